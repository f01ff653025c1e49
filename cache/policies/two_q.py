"""2Q."""

from __future__ import annotations

from cache.policies.queues import GhostList, Queue, QueuePolicy


class TwoQ(QueuePolicy):
    """Full 2Q (Johnson and Shasha, VLDB 1994).

    New blocks pass through a FIFO of ``in_ratio`` of the capacity (A1in); the keys of those that
    leave it are remembered (A1out, ``out_ratio`` of the capacity).  Content that comes back while
    it is remembered enters the main LRU queue (Am).
    """

    name = "two_q"

    def __init__(self, in_ratio: float = 0.25, out_ratio: float = 0.5) -> None:
        if not 0 < in_ratio < 1:
            raise ValueError(f"in_ratio must lie between 0 and 1, got {in_ratio}")
        if out_ratio < 0:
            raise ValueError(f"out_ratio must not be negative, got {out_ratio}")
        self.in_ratio = in_ratio
        self.out_ratio = out_ratio

    def _reset(self) -> None:
        self._incoming = Queue()
        self._main = Queue()
        self._ghosts = GhostList(int(self._capacity * self.out_ratio))
        self._in_size = int(self._capacity * self.in_ratio)

    def _admit(self, block: int) -> None:
        returns = self._keys[block] in self._returning
        self._move(block, self._main if returns else self._incoming)

    def _hit(self, block: int) -> None:
        if self._queue_of[block] is self._main:
            self._main.move_to_end(block)

    def _choose(self) -> int:
        if len(self._incoming) > self._in_size:
            block = self._first_of(self._incoming, self._main)
        else:
            block = self._first_of(self._main, self._incoming)
        if self._queue_of[block] is self._incoming:
            self._ghosts.add(self._keys[block])
        return block
