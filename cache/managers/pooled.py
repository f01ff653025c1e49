"""Code of the designs that use a :class:`BlockPool` to find blocks by hash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableSequence
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import chain

from cache.blocks.events import BlockStored
from cache.blocks.pool import BlockPool, OutOfBlocks, check_free
from cache.checks import require
from cache.managers.base import FREED, MIDDLE, CacheManager, CacheOptions, Copies, Hit, Table
from cache.policies import as_policy


@dataclass(slots=True, eq=False)
class PooledTable(Table):
    """The blocks of one sequence."""

    blocks: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0  # number of leading blocks that were cached, if they are kept
    num_given_back: int = 0  # number of leading blocks that are FREED
    group: int = 0  # number of the group of layers
    others: Items[PooledTable] = ()  # the tables of the further groups
    junction: int = 0  # length in blocks of a prefix that only some of the groups had cached


class PooledManager(CacheManager):
    """Tables only grow, and a full block can be found once all its tokens have slots.

    Attributes:
        pool: the blocks.  The pool's policy chooses which block without a user is taken.
    """

    _table_class = PooledTable

    # Of a design with several groups of layers, or with windows:
    _num_taken: Callable[..., int]
    """Number of free blocks that a hit and the slots before a position take."""
    _share_further: Callable[[PooledTable, Hit], None]
    """Adds the blocks of a hit in further groups to a new table."""
    _release_groups: Callable[[PooledTable], None]
    """Takes back the blocks of a table in each group."""
    _kept: Callable[[PooledTable, int, int], Items[int]]
    """Positions, from the first to before the last, of the blocks of a table to cache."""

    def __init__(self, options: CacheOptions) -> None:
        super().__init__(options)
        self.pool = BlockPool(self.num_blocks, as_policy(options.policy), self._counts)
        policy = self.pool.policy
        self._policies = (policy,)
        self._listeners = (policy.tell,) if "tell" in policy.hooks else ()
        self.queue_readers = ((policy, self._hasher),) if "on_queued" in policy.hooks else ()
        self._prompt_reader = policy if "look_up" in policy.hooks else None

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def check_invariants(self) -> None:
        super().check_invariants()
        self.pool.check_invariants()
        tables = [part for table in self._tables.values() for part in (table, *table.others)]
        users = Counter(chain.from_iterable(table.blocks for table in tables))
        for block, ref_count in enumerate(self.pool.ref_counts):
            require(
                ref_count == users[block],
                f"block {block} has ref_count {ref_count} and is in {users[block]} tables",
            )
        block_hashes = self.pool.block_hashes
        for table in tables:
            num_cached, first = table.num_cached_blocks, table.num_given_back
            stored, blocks = table.seq.num_computed_tokens, table.blocks
            hashes = self._hasher.block_hashes(table.seq, table.group)
            kept = range(num_cached) if self._is_full else {*self._kept(table, 0, num_cached)}
            held = [None if b == FREED else block_hashes[b] for b in blocks]
            expected = [*hashes[:num_cached], *[None] * (len(blocks) - num_cached)]
            num_full = min(stored // self.block_size, len(hashes))
            # If the last token was unknown, the next call hashes its block.
            num_late = int(stored % self.block_size == 0)
            if not self.enable_prefix_caching:
                num_full = num_late = 0
            require(
                num_full - num_late <= num_cached <= num_full
                and all(
                    held[i] == expected[i] or (held[i] is None and i not in kept)
                    for i in range(first, len(blocks))
                ),
                f"{table.seq.seq_id!r}: of the blocks {blocks} for {stored} tokens {num_cached} "
                f"are cached, with hashes {held}",
            )

    def _num_idle(self, hit: Hit) -> int:
        return self.pool.num_revived(hit.blocks)

    def _begin(self, table: PooledTable, hit: Hit, end: int) -> Copies:
        slots = end + table.num_lookahead_tokens
        free = self.pool.num_free_blocks
        if not self._is_full:
            check_free(self._num_taken(slots, hit), free)
        elif (needed := self._num_blocks_of(table, 0, slots)) > free:
            needed -= len(hit.blocks) - self._num_idle(hit)  # those in use need no free block
            check_free(needed, free)
        self._notify_of_admission(table.seq)
        self.interruption = MIDDLE
        self._share_hit(table, hit.blocks)
        if not self._is_full:
            self._share_further(table, hit)
            num_loaded = hit.num_tokens // self.block_size
            for part in (table, *table.others) if hit.loads else ():
                self._fill(part, num_loaded, hit.num_tokens)
        return self._extend(table, hit.num_tokens, end)

    def _share_hit(self, table: PooledTable, blocks: Items[int]) -> None:
        table.num_cached_blocks = len(blocks)
        table.num_given_back = blocks.count(FREED)  # FREED come first
        table.blocks = list(blocks)
        self.pool.share(table.blocks[table.num_given_back :])

    def _num_blocks_of(self, table: PooledTable, start: int, end: int) -> int:
        """Length that ``table`` needs to give slots to the tokens from ``start`` to ``end``."""
        return -(-end // self.block_size)

    def _fill(self, table: PooledTable, num_blocks: int, end: int) -> None:
        """Extend ``table`` to at least ``num_blocks`` blocks and index full blocks before ``end``.

        A block with an unknown token is not indexed yet.
        """
        first = last = table.num_cached_blocks
        hashes: list[bytes] = []
        if end // self.block_size > first and self.enable_prefix_caching:
            hashes = self._hasher.block_hashes(table.seq, table.group)
            last = min(end // self.block_size, len(hashes))
        pool, missing = self.pool, num_blocks - len(table.blocks)
        if last > first or missing > 0:
            if missing > pool.num_free_blocks:
                raise OutOfBlocks(missing, pool.num_free_blocks)
            self.interruption = MIDDLE
            kept = range(first, last) if self._is_full else self._kept(table, first, last)
            pool.extend(table.blocks, num_blocks, hashes, kept)
            if last > first and pool.events is not None:
                size, seq = self.block_size, table.seq
                event = BlockStored(
                    [hashes[i] for i in kept],
                    hashes[first - 1] if first else None,
                    seq.token_ids[first * size : last * size].tolist(),
                    size,
                    seq.lora_name,
                    [seq.extra_keys(i * size, (i + 1) * size) for i in kept],
                )
                pool.events.append(event)
            table.num_cached_blocks = last

    def _blocks_by_group(self, table: PooledTable) -> list[MutableSequence[int]]:
        return [part.blocks for part in (table, *table.others)]

    def _release(self, table: PooledTable) -> None:
        if not self._is_full:
            return self._release_groups(table)
        self._fill(table, 0, table.seq.num_computed_tokens)
        self.pool.free(table.blocks)
