"""Multi-queue."""

import math

from cache.checks import at_least, finite
from cache.policies.queues import GhostList, Queue, QueuePolicy


class MQ(QueuePolicy):
    """MQ (Zhou, Philbin and Li, USENIX ATC 2001), for caches below another cache.

    A block with f accesses is in LRU queue min(floor(log2 f), ``num_queues`` - 1).  A block without
    an access during ``life_time`` accesses to the cache moves one queue down.  Victims come from
    the lowest queue.  The access counts of ``ghost_ratio`` x capacity victims are remembered.
    """

    name = "mq"

    def __init__(
        self, num_queues: int = 8, life_time: int = 10_000, ghost_ratio: float = 4.0
    ) -> None:
        self.num_queues = at_least(1, "num_queues", num_queues)
        self.life_time = at_least(1, "life_time", life_time)
        self.ghost_ratio = finite("ghost_ratio", ghost_ratio)

    def _reset(self) -> None:
        self._queues = [Queue() for _ in range(self.num_queues)]
        self._ghosts = GhostList(self._capacity * self.ghost_ratio)
        self._accesses: dict[int, int] = {}
        self._expires: dict[int, int] = {}
        self._time = 0

    def _admit(self, block: int) -> None:
        self._accesses[block] = self._recalled(block)
        self._hit(block)

    def _choose(self) -> int:
        block = self._first_of(self._queues)
        self._remember(self._ghosts, block, self._accesses[block])
        return block

    def _hit(self, block: int) -> None:
        self._time += 1
        self._accesses[block] += 1
        level = min(math.frexp(self._accesses[block])[1] - 1, self.num_queues - 1)
        self._expires[block] = self._time + self.life_time
        self._move(block, self._queues[level])
        for level in range(1, self.num_queues):
            if self._length(self._queues[level]):
                oldest = self._head(self._queues[level])
                if self._expires[oldest] < self._time:
                    self._expires[oldest] = self._time + self.life_time
                    self._move(oldest, self._queues[level - 1])
