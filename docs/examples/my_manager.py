# my_manager.py
from heapq import heappop, heappush

from cache import CacheManager
from cache.blocks.pool import check_free
from cache.managers.base import MIDDLE


class LowestFirst(CacheManager):
    """Gives a sequence the free blocks with the lowest numbers.  Shares no prefixes."""

    prefix_caching = False

    def __init__(self, options):
        super().__init__(options)
        self._free = list(range(self.num_blocks))

    @property
    def num_free_blocks(self):
        return len(self._free)

    def _extend(self, table, start, end):  # slots for the tokens from start to end - 1
        count = max(0, -(-end // self.block_size) - len(table.blocks))
        check_free(count, len(self._free))  # raises OutOfBlocks before anything changes
        self.interruption = MIDDLE
        table.blocks += [heappop(self._free) for _ in range(count)]
        return []  # blocks to copy first

    def _release(self, table):
        for block in table.blocks:
            heappush(self._free, block)
