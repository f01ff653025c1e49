"""Buddy allocator of runs of 2**k adjacent blocks (Knowlton, CACM 1965; Knuth, TAOCP 1, 2.5)."""

from cache.blocks.pool import OutOfBlocks
from cache.checks import require


class BuddyAllocator:
    """Allocates runs of the blocks ``0 .. num_blocks - 1``.

    A run has 2**k blocks and begins at a multiple of its length.  If a free run is too long, it is
    halved until it has the requested length.  The two halves of a run are buddies, and they join
    as soon as both are free.  If ``num_blocks`` is not a power of two, the blocks form several
    runs that never join.  Every call is O(log num_blocks).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._orders: dict[int, int] = {}  # first block of a run in use -> order
        # Free runs by order, the last freed at the end.  The dicts serve as ordered sets.
        self._free: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length())]
        start = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self._free[order][start] = None
                start += 1 << order

    @staticmethod
    def run_length(count: int) -> int:
        """Length of the run for ``count`` blocks: the next power of two."""
        return 1 << (count - 1).bit_length()

    @property
    def runs(self) -> dict[int, int]:
        """Runs in use: first block -> length."""
        return {start: 1 << order for start, order in self._orders.items()}

    @property
    def longest_run(self) -> int:
        """Length of the longest free run; 0 if there is no free run."""
        for order in reversed(range(len(self._free))):
            if self._free[order]:
                return 1 << order
        return 0

    def allocate(self, count: int) -> int:
        """Take a run of at least ``count`` blocks; return its first block.  Raises OutOfBlocks."""
        order = wanted = (count - 1).bit_length()
        while order < len(self._free) and not self._free[order]:
            order += 1
        if order >= len(self._free):
            raise OutOfBlocks(1 << wanted, self.num_free, self.longest_run)
        start, _ = self._free[order].popitem()
        for smaller in range(wanted, order):
            self._free[smaller][start + (1 << smaller)] = None
        self._orders[start] = wanted
        self.num_free -= 1 << wanted
        return start

    def free(self, start: int) -> None:
        """Free the run in use whose first block is ``start``."""
        order = self._orders.pop(start)
        self.num_free += 1 << order
        while start ^ (1 << order) in self._free[order]:
            del self._free[order][start ^ (1 << order)]
            start &= ~(1 << order)
            order += 1
        self._free[order][start] = None

    def check_invariants(self) -> None:
        """Raise AssertionError unless each block is in one run and all free buddies are joined."""
        runs = list(self._orders.items())
        for order, free in enumerate(self._free):
            runs += [(start, order) for start in free]
            for start in free:
                buddy = start ^ (1 << order)
                require(buddy not in free, f"free buddies of {1 << order} blocks at {start}")
        end = 0
        for start, order in sorted(runs):
            require(
                start == end and start % (1 << order) == 0,
                f"a run of {1 << order} blocks begins at {start}, not {end}",
            )
            end = start + (1 << order)
        require(end == self.num_blocks, f"the runs end at {end} of {self.num_blocks} blocks")
        num_free = sum(len(free) << order for order, free in enumerate(self._free))
        require(
            self.num_free == num_free, f"num_free is {self.num_free}, the free runs have {num_free}"
        )
