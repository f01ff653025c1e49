"""Segmented LRU."""

from cache.checks import at_least
from cache.policies.queues import Queue, QueuePolicy


class SLRU(QueuePolicy):
    """Segmented LRU (Karedla, Love and Wherry, IEEE Computer 1994), with ``segments`` segments.

    A hit moves a block up one segment.  A segment larger than its share of the capacity moves its
    oldest block down one segment.  Victims come from the lowest segment with a released block.  A
    new block enters the lowest segment with room, so all segments fill at first.  Equal to
    libCacheSim if ``segments`` divides the capacity; otherwise libCacheSim evicts from the lowest
    segment a little before the cache is full.
    """

    name = "slru"

    def __init__(self, segments: int = 4) -> None:
        self.segments = at_least(1, "segments", segments, maximum=256)

    def _reset(self) -> None:
        self._queues = [Queue() for _ in range(self.segments)]
        self._level: dict[int, int] = {}
        self._share = self._capacity // self.segments

    def _admit(self, block: int) -> None:
        for level in range(self.segments):
            if self._length(self._queues[level]) < self._share:
                return self._place(block, level)
        self._place(block, 0)

    def _hit(self, block: int) -> None:
        level = min(self._level[block] + 1, self.segments - 1)
        self._place(block, level)
        while level and self._length(self._queues[level]) > self._share:
            oldest = self._head(self._queues[level])
            level -= 1
            self._place(oldest, level)

    def _choose(self) -> int:
        return self._first_of(self._queues)

    def _place(self, block: int, level: int) -> None:
        self._level[block] = level
        self._move(block, self._queues[level])
