"""Paging without prefix caching: the cache manager of paged-attention-minimal."""

from collections import Counter
from itertools import chain

from cache.blocks.memory_usage import MemoryUsage
from cache.blocks.pool import check_free
from cache.blocks.sequence import Sequence
from cache.checks import at_least, require
from cache.managers.base import MIDDLE, CacheManager, CacheOptions, Copies, Table


class Paged(CacheManager):
    """Free blocks and one block table per sequence.  Blocks are neither shared nor cached.

    The design of paged-attention-minimal (tspeterkim).  Only the last block of a sequence wastes
    memory.  docs/deviations.md lists the differences from the original.

    ``bytes_per_slot``: bytes of one token's K and V in all layers, see ``cache.sizing``.  With the
    default 1, ``fragmented_bytes`` counts slots.
    """

    name = "paged"
    prefix_caching = False

    def __init__(self, options: CacheOptions, *, bytes_per_slot: int = 1) -> None:
        super().__init__(options)
        self.bytes_per_slot = at_least(1, "bytes_per_slot", bytes_per_slot)
        self._free = list(range(self.num_blocks))

    def filled_block_table(self, seq: Sequence) -> list[tuple[int, int]]:
        """Return (block, number of filled slots) for each block of ``seq``, in token order."""
        blocks = self.block_table(seq)
        filled = [self.block_size] * len(blocks)
        filled[-1] -= len(blocks) * self.block_size - self._table_of(seq).seq.num_computed_tokens
        return list(zip(blocks, filled, strict=True))

    def fragmented_bytes(self) -> int:
        """Number of bytes of the unfilled slots in the last blocks of all sequences."""
        return self.memory_usage().internal * self.bytes_per_slot

    def memory_usage(self) -> MemoryUsage:
        """Count the slots of the cache by use.  O(sequences)."""
        used = sum(table.seq.num_computed_tokens for table in self._tables.values())
        free = len(self._free) * self.block_size
        unfilled = self.num_blocks * self.block_size - free - used
        return MemoryUsage(used=used, reserved=0, internal=unfilled, external=0, free=free)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def check_invariants(self) -> None:
        super().check_invariants()
        tables = self._tables.values()
        holders = Counter(chain(self._free, *(table.blocks for table in tables)))
        for block in range(self.num_blocks):
            require(
                holders.pop(block, 0) == 1, f"block {block} is not either free or in one table once"
            )
        require(not holders, f"there are no blocks {sorted(holders)}")
        for seq_id, table in self._tables.items():
            stored = table.seq.num_computed_tokens
            require(
                len(table.blocks) == self._num_blocks_for(stored),
                f"{seq_id!r}: {len(table.blocks)} blocks for {stored} tokens",
            )

    def _extend(self, table: Table, start: int, end: int) -> Copies:
        free = self._free
        count = max(0, self._num_blocks_for(end) - len(table.blocks))
        check_free(count, len(free))
        self.interruption = MIDDLE
        split = len(free) - count
        table.blocks += free[split:]
        del free[split:]
        self._counts["allocated_blocks"] += count
        return []

    def _release(self, table: Table) -> None:
        self._free.extend(table.blocks)
