"""Nano-vLLM's block manager."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable
from itertools import chain

from cache.block_pool import BlockPool
from cache.event_log import EventLog
from cache.hashing import BlockHasher, ExtraKey
from cache.managers.base import (
    AllocStatus,
    CacheManager,
    CacheStats,
    Copies,
    UnsupportedByDesign,
    as_policy,
)
from cache.managers.tables import Table, check_grew, check_holds_no_blocks, table_of
from cache.memory_usage import MemoryUsage, usage_of_tables
from cache.policies.base import EvictionPolicy
from cache.sequence import Sequence


class _Content:
    """What a full block holds: its tokens and extra keys, and the content of the block before."""

    __slots__ = ("extra_keys", "parent", "token_ids")

    def __init__(
        self, token_ids: array, extra_keys: list[ExtraKey], parent: _Content | None
    ) -> None:
        self.token_ids = token_ids
        self.extra_keys = extra_keys
        self.parent = parent

    def equals(self, other: _Content) -> bool:
        """Whether both are the same all the way to the first block."""
        mine, its = self, other
        while mine is not its:
            if mine is None or its is None:
                return False
            if mine.token_ids != its.token_ids or mine.extra_keys != its.extra_keys:
                return False
            mine, its = mine.parent, its.parent
        self.parent = other.parent  # the next comparison ends there
        return True


class _Table(Table):
    """The blocks of one sequence."""

    __slots__ = ("blocks", "num_hashed")

    def __init__(self, seq: Sequence, hits: list[int]) -> None:
        super().__init__(seq)
        self.blocks = hits.copy()
        self.num_hashed = len(hits)  # leading blocks that can be found by their hash


class NanoVLLM(CacheManager):
    """Prefix caching as in the ``BlockManager`` of Nano-vLLM (GeeeekExplorer).

    * Free block ids wait in a deque: taken from its front, put back at its end, the last block of
      a sequence first.  A cached block keeps its content until it is taken.
    * Full blocks are found by chained 64-bit hashes (xxh64).  The tokens of every hit are
      compared, and the first block that differs ends the cached prefix.
    * The last block of a sequence is never taken from the cache, full or not, so one token is left
      to compute.
    * A sequence gets the blocks of all its tokens at once, also if its prompt is computed in
      chunks; blocks become findable chunk by chunk.  After that it needs another block only when
      ``num_tokens % block_size == 1`` (with block_size 1: always).

    Which block goes where is as in the original, which hands out the same tables, except that

    * a block becomes findable when the step that computes it is scheduled, not when the step has
      ended: equal prompts of one step share their blocks (K/V are stored before they are read);
    * a block with the hash of one that is cached stays a duplicate and is found once the other is
      gone.  There it takes over the index, and with its end the older copy is lost.

    A hit leaves the deque in O(1), there in O(n).  The original compares a block's own tokens; this
    compares all tokens up to its end, so that prefixes of equal hash cannot pass for each other
    after one of them has lost a block.  Adapters, multi-modal inputs and salts, which the original
    does not know, enter the hash and are compared with the tokens.

    ``policy`` orders the free blocks in place of the deque, whose order is ``"lru"``.  Neither fork
    nor swap nor reset.  Raises ValueError for an unknown policy or algorithm.
    """

    name = "nano_vllm"

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        policy: str | EvictionPolicy = "lru",
        hash_algorithm: str = "xxh64",
        enable_prefix_caching: bool = True,
        event_log: EventLog | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self._hasher = BlockHasher(hash_algorithm, self.block_size)
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(self.num_blocks, as_policy(policy), event_log=event_log)
        self._contents: list[_Content | None] = [None] * self.num_blocks  # as of their last hash
        self._tables: dict[Hashable, _Table] = {}
        self._num_allocations = 0
        self._queried_tokens = 0
        self._queried_blocks = 0
        self._hit_blocks = 0

    def get_computed_blocks(self, seq: Sequence) -> tuple[list[int], int]:
        if not self.enable_prefix_caching:
            return [], 0
        hashes = self._hasher.block_hashes(seq)
        hits: list[int] = []
        parent = None
        for depth, block in enumerate(self.pool.lookup(hashes[: self._blocks_for(seq) - 1])):
            content = self._contents[block]
            if not content.equals(self._content(seq, depth, parent)):
                break
            hits.append(block)
            parent = content
        return hits, len(hits) * self.block_size

    def can_allocate(self, seq: Sequence) -> AllocStatus:
        needed, free = self._blocks_for(seq), self.pool.num_free_blocks
        if needed > self.num_blocks:
            return AllocStatus.NEVER
        if needed > free:  # unless others use the cached part of the prefix already
            hits, _ = self.get_computed_blocks(seq)
            needed -= len(hits) - self.pool.num_revived(hits)
        return AllocStatus.OK if needed <= free else AllocStatus.LATER

    def allocate(self, seq: Sequence) -> int:
        check_holds_no_blocks(self._tables, seq)
        hits, num_cached = self.get_computed_blocks(seq)
        self._start(seq, hits, seq.num_tokens)
        return num_cached

    def append(self, seq: Sequence) -> Copies:
        table = table_of(self._tables, seq)
        check_grew(seq, table.num_tokens)
        self._extend(seq, table, seq.num_tokens)
        return []

    def can_append(self, seq: Sequence) -> bool:
        table = table_of(self._tables, seq)
        return self._blocks_for(seq) - len(table.blocks) <= self.pool.num_free_blocks

    def allocate_slots(
        self,
        seq: Sequence,
        num_new_tokens: int,
        computed_blocks: list[int] | tuple[int, ...] = (),
        *,
        num_lookahead_tokens: int = 0,
    ) -> Copies:
        if num_lookahead_tokens:
            raise UnsupportedByDesign(self.name, "num_lookahead_tokens")
        table = self._tables.get(seq.seq_id)
        hits = list(computed_blocks)
        start = len(hits) * self.block_size if table is None else table.num_tokens
        if not 1 <= num_new_tokens <= seq.num_tokens - start:
            raise ValueError(
                f"num_new_tokens={num_new_tokens}: {start} of the {seq.num_tokens} tokens of "
                f"sequence {seq.seq_id!r} have a slot, so needs 1 to {seq.num_tokens - start}"
            )
        if table is None:
            if hits and hits != self.get_computed_blocks(seq)[0][: len(hits)]:
                raise ValueError(
                    f"computed_blocks={hits}: these do not hold the prefix of sequence "
                    f"{seq.seq_id!r} (any more); ask get_computed_blocks again"
                )
            self._start(seq, hits, start + num_new_tokens)
        else:
            if hits:
                raise ValueError(
                    f"computed_blocks: sequence {seq.seq_id!r} has blocks already, and these can "
                    "only go in front of its first chunk"
                )
            self._extend(seq, table, start + num_new_tokens)
        return []

    def free(self, seq: Sequence) -> None:
        table = table_of(self._tables, seq)
        self._index_filled(seq, table, self._num_full(table.num_tokens))
        self.pool.free(table.blocks)
        del self._tables[seq.seq_id]
        seq.num_cached_tokens = seq.num_computed_tokens = 0

    def block_table(self, seq: Sequence) -> list[int]:
        return table_of(self._tables, seq).blocks.copy()

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def stats(self) -> CacheStats:
        return CacheStats(
            num_allocations=self._num_allocations,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_blocks * self.block_size,
            queried_blocks=self._queried_blocks,
            hit_blocks=self._hit_blocks,
            allocated_blocks=self.pool.num_allocated,
            evicted_blocks=self.pool.num_evicted,
        )

    def memory_usage(self) -> MemoryUsage:
        tables = self._tables.values()
        return usage_of_tables(
            self.num_blocks, self.block_size, ((t.blocks, t.num_tokens) for t in tables)
        )

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        users = Counter(chain.from_iterable(table.blocks for table in self._tables.values()))
        for block, ref_count in enumerate(self.pool.ref_counts):
            if ref_count != users[block]:
                raise AssertionError(
                    f"block {block} has ref_count {ref_count} and is in {users[block]} tables"
                )
            if self.pool.block_hashes[block] is not None and self._contents[block] is None:
                raise AssertionError(f"block {block} is cached, but its tokens are not known")
        for seq_id, table in self._tables.items():
            blocks, num_full = table.blocks, self._num_full(table.num_tokens)
            if len(set(blocks)) != len(blocks) or len(blocks) * self.block_size < table.num_tokens:
                raise AssertionError(f"{seq_id!r}: table {blocks} for {table.num_tokens} tokens")
            hashed = [self.pool.block_hashes[block] is not None for block in blocks]
            unnoted = num_full - table.num_hashed
            if not table.may_lack(unnoted, self.block_size) or (
                sum(hashed[: table.num_hashed]) != sum(hashed)
            ):
                raise AssertionError(
                    f"{seq_id!r}: the first {num_full} of its blocks should be findable, "
                    f"{table.num_hashed} are said to be, of {hashed}"
                )

    def _start(self, seq: Sequence, hits: list[int], end: int) -> None:
        """Give ``seq`` a table that begins with ``hits``, and store its tokens up to ``end``."""
        table = _Table(seq, hits)
        self._extend(seq, table, end, hits)
        self._tables[seq.seq_id] = table
        seq.num_cached_tokens = len(hits) * self.block_size
        self._num_allocations += 1
        self._queried_tokens += seq.num_tokens
        self._queried_blocks += seq.num_tokens // self.block_size
        self._hit_blocks += len(hits)

    def _extend(
        self, seq: Sequence, table: _Table, end: int, hits: list[int] | tuple[int, ...] = ()
    ) -> None:
        """Store the tokens of ``seq`` up to ``end``, in blocks for all its tokens.

        ``hits`` are the blocks that ``table`` has if it is a new one.
        """
        num_missing = self._blocks_for(seq) - len(table.blocks)
        if not hits:  # else the allocation is the first change, and checks by itself
            self.pool.check_free(num_missing)
        last = self._num_full(end)
        self._index_filled(seq, table, last)
        first = table.num_hashed
        if last > first:
            hashes = self._hasher.block_hashes(seq)
            table.blocks += self.pool.allocate(num_missing, hits, hashes, first, last)
            self._note_contents(seq, table, last)
        else:
            table.blocks += self.pool.allocate(num_missing, hits)
        table.seq = seq
        seq.num_computed_tokens = end

    def _index_filled(self, seq: Sequence, table: _Table, last: int) -> None:
        """Make the first ``last`` blocks, which are full, findable as far as ``table`` has them."""
        first = table.num_hashed
        if filled := table.blocks[first:last]:
            last = first + len(filled)
            self.pool.cache(filled, self._hasher.block_hashes(seq), first, last)
            self._note_contents(seq, table, last)

    def _note_contents(self, seq: Sequence, table: _Table, last: int) -> None:
        """The blocks of ``table`` before position ``last`` are all findable now."""
        first = table.num_hashed
        parent = self._contents[table.blocks[first - 1]] if first else None
        for depth in range(first, last):
            parent = self._content(seq, depth, parent)
            self._contents[table.blocks[depth]] = parent
        table.num_hashed = last

    def _num_full(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` fill and that are to be findable."""
        return num_tokens // self.block_size if self.enable_prefix_caching else 0

    def _content(self, seq: Sequence, depth: int, parent: _Content | None) -> _Content:
        """Content of the full block of ``seq`` at ``depth``."""
        start, end = depth * self.block_size, (depth + 1) * self.block_size
        keys = seq.extra_keys(start, end) if start < seq.keyed_length else []
        return _Content(seq.token_ids[start:end], keys, parent)

    def _blocks_for(self, seq: Sequence) -> int:
        return -(-seq.num_tokens // self.block_size)
