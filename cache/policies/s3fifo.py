"""S3-FIFO."""

from cache.checks import at_least, finite
from cache.policies.queues import GhostList, Queue, QueuePolicy


class S3FIFO(QueuePolicy):
    """S3-FIFO (Yang et al., SOSP 2023): three static FIFO queues.

    New blocks enter a small queue (``small_ratio`` x capacity).  At its head, a block with at least
    ``promote_after`` accesses moves to the main queue, and its count restarts at 0.  Any other
    block is evicted, and its key is remembered (``ghost_ratio`` x capacity keys).  Content that
    returns while its key is remembered enters the main queue.  At the head of the main queue,
    blocks with accesses return to the end.  Until the first eviction, blocks enter the main queue
    if the small queue is full, as in the authors' implementation in libCacheSim.
    """

    name = "s3fifo"

    def __init__(
        self, small_ratio: float = 0.1, ghost_ratio: float = 0.9, promote_after: int = 2
    ) -> None:
        if not 0 < small_ratio < 1:
            raise ValueError(f"small_ratio must lie between 0 and 1, got {small_ratio}")
        self.small_ratio = small_ratio
        self.ghost_ratio = finite("ghost_ratio", ghost_ratio)
        self.promote_after = at_least(1, "promote_after", promote_after)

    def _reset(self) -> None:
        self._small = Queue()
        self._main = Queue()
        self._small_size = int(self._capacity * self.small_ratio)
        self._main_size = self._capacity - self._small_size
        self._ghosts = GhostList(self._capacity * self.ghost_ratio)
        self._accesses: dict[int, int] = {}
        self._filling = True

    def _admit(self, block: int) -> None:
        self._accesses[block] = 0
        small_is_full = self._filling and self._length(self._small) >= self._small_size
        to_main = small_is_full or self._recalled(block) > 0
        self._move(block, self._main if to_main else self._small)

    def _hit(self, block: int) -> None:
        self._accesses[block] += 1

    def _choose(self) -> int:
        self._filling = False
        if self._length(self._main) <= self._main_size:
            while self._num_released(self._small):
                block = self._oldest(self._small)
                if self._accesses[block] < self.promote_after:
                    self._remember(self._ghosts, block)
                    return block
                self._accesses[block] = 0
                self._move(block, self._main)
        while self._num_released(self._main):
            block = self._oldest(self._main)
            if not self._accesses[block]:
                return block
            self._accesses[block] = min(self._accesses[block], 3) - 1
            self._move(block, self._main)
        return self._first_of((self._small,))  # all blocks of the main queue are in use
