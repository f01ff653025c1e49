"""2Q."""

from cache.checks import finite
from cache.policies.queues import GhostList, Queue, QueuePolicy


class TwoQ(QueuePolicy):
    """Full 2Q (Johnson and Shasha, VLDB 1994).

    New blocks enter a FIFO queue, A1in, of ``in_ratio`` x capacity.  The keys of blocks evicted
    from A1in are remembered in A1out, up to ``out_ratio`` x capacity.  Content that returns while
    A1out has its key enters the main LRU queue, Am.
    """

    name = "two_q"

    def __init__(self, in_ratio: float = 0.25, out_ratio: float = 0.5) -> None:
        if not 0 < in_ratio < 1:
            raise ValueError(f"in_ratio must lie between 0 and 1, got {in_ratio}")
        self.in_ratio = in_ratio
        self.out_ratio = finite("out_ratio", out_ratio)

    def _reset(self) -> None:
        self._incoming = Queue()
        self._main = Queue()
        self._ghosts = GhostList(self._capacity * self.out_ratio)
        self._in_size = int(self._capacity * self.in_ratio)

    def _admit(self, block: int) -> None:
        self._move(block, self._main if self._recalled(block) else self._incoming)

    def _hit(self, block: int) -> None:
        if self._is_in(block, self._main):
            self._move(block, self._main)

    def _choose(self) -> int:
        if self._length(self._incoming) > self._in_size:
            block = self._first_of((self._incoming, self._main))
        else:
            block = self._first_of((self._main, self._incoming))
        if self._is_in(block, self._incoming):
            self._remember(self._ghosts, block)
        return block
