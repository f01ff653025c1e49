"""Paging and nothing else: paged-attention-minimal's cache manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from itertools import chain

from cache.block_pool import OutOfBlocks
from cache.checks import at_least
from cache.managers.base import AllocStatus, CacheManager, CacheStats, Copies
from cache.managers.tables import Table, check_grew, check_holds_no_blocks, table_of
from cache.memory_usage import MemoryUsage
from cache.sequence import Sequence


class _Table(Table):
    """The blocks of one sequence; all but the last are full."""

    __slots__ = ("blocks",)

    def __init__(self, seq: Sequence) -> None:
        super().__init__(seq)
        self.blocks: list[int] = []


class Paged(CacheManager):
    """A set of free blocks and a table of (block, filled) per sequence: no sharing, no reuse.

    As in paged-attention-minimal (tspeterkim), the least that a paged cache needs.  Memory is
    wasted in the last block of a sequence only.  Any free block will do: the original draws one at
    random, here the free set is a stack, so that a whole prompt is one slice of it.

    Two faults of the original are not repeated: there a prompt that ends on a block boundary is
    entered with 0 tokens in its last block, and a finished sequence keeps its first block.

    ``bytes_per_slot`` is the size of one token's K and V in all layers, see ``cache.sizing``; with
    the default 1, ``fragmented_bytes`` counts slots.
    """

    name = "paged"
    prefix_caching = False

    def __init__(self, num_blocks: int, block_size: int, *, bytes_per_slot: int = 1) -> None:
        super().__init__(num_blocks, block_size)
        self.bytes_per_slot = at_least(1, "bytes_per_slot", bytes_per_slot)
        self._free = list(range(self.num_blocks))
        self._tables: dict[Hashable, _Table] = {}
        self._num_allocations = 0
        self._queried_tokens = 0
        self._queried_blocks = 0
        self._num_allocated = 0

    def can_allocate(self, seq: Sequence) -> AllocStatus:
        needed = -(-seq.num_tokens // self.block_size)
        if needed > self.num_blocks:
            return AllocStatus.NEVER
        return AllocStatus.OK if needed <= len(self._free) else AllocStatus.LATER

    def allocate(self, seq: Sequence) -> int:
        check_holds_no_blocks(self._tables, seq)
        table = _Table(seq)
        self._extend(table, seq)
        self._tables[seq.seq_id] = table
        seq.num_cached_tokens = 0
        self._num_allocations += 1
        self._queried_tokens += seq.num_tokens
        self._queried_blocks += seq.num_tokens // self.block_size
        return 0

    def append(self, seq: Sequence) -> Copies:
        table = table_of(self._tables, seq)
        check_grew(seq, table.num_tokens)
        self._extend(table, seq)
        return []

    def can_append(self, seq: Sequence) -> bool:
        return self._num_missing(table_of(self._tables, seq), seq) <= len(self._free)

    def free(self, seq: Sequence) -> None:
        self._free.extend(table_of(self._tables, seq).blocks)
        del self._tables[seq.seq_id]
        seq.num_cached_tokens = seq.num_computed_tokens = 0

    def block_table(self, seq: Sequence) -> list[int]:
        return table_of(self._tables, seq).blocks.copy()

    def filled_block_table(self, seq: Sequence) -> list[tuple[int, int]]:
        """(block, number of filled slots) of ``seq`` in the order of its tokens."""
        table = table_of(self._tables, seq)
        filled = [self.block_size] * len(table.blocks)
        filled[-1] -= self._num_unfilled(table)
        return list(zip(table.blocks, filled, strict=True))

    def fragmented_bytes(self) -> int:
        """Bytes of the unfilled slots of all sequences, which are in their last blocks."""
        return sum(map(self._num_unfilled, self._tables.values())) * self.bytes_per_slot

    def memory_usage(self) -> MemoryUsage:
        """What the slots are used for; the unfilled ones count as internal fragmentation."""
        return MemoryUsage(
            used=sum(table.num_tokens for table in self._tables.values()),
            reserved=0,
            internal=sum(map(self._num_unfilled, self._tables.values())),
            external=0,
            free=len(self._free) * self.block_size,
        )

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def stats(self) -> CacheStats:
        return CacheStats(
            num_allocations=self._num_allocations,
            queried_tokens=self._queried_tokens,
            queried_blocks=self._queried_blocks,
            allocated_blocks=self._num_allocated,
        )

    def check_invariants(self) -> None:
        tables = self._tables.values()
        holders = Counter(chain(self._free, *(table.blocks for table in tables)))
        for block in range(self.num_blocks):
            if holders.pop(block, 0) != 1:
                raise AssertionError(f"block {block} is not either free or in one table once")
        if holders:
            raise AssertionError(f"there are no blocks {sorted(holders)}")
        for seq_id, table in self._tables.items():
            if len(table.blocks) != -(-table.num_tokens // self.block_size):
                raise AssertionError(
                    f"{seq_id!r}: {len(table.blocks)} blocks for {table.num_tokens} tokens"
                )

    def _extend(self, table: _Table, seq: Sequence) -> None:
        """Make room in ``table`` for all tokens of ``seq``."""
        count = self._num_missing(table, seq)
        if count > len(self._free):
            raise OutOfBlocks(count, len(self._free))
        split = len(self._free) - count
        table.blocks += self._free[split:]
        del self._free[split:]
        table.seq = seq
        seq.num_computed_tokens = seq.num_tokens
        self._num_allocated += count

    def _num_missing(self, table: _Table, seq: Sequence) -> int:
        return -(-seq.num_tokens // self.block_size) - len(table.blocks)

    def _num_unfilled(self, table: _Table) -> int:
        return len(table.blocks) * self.block_size - table.num_tokens
