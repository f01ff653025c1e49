"""Code of the designs that use a :class:`BlockPool` to find blocks by hash."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

from cache.blocks.events import BlockStored
from cache.blocks.pool import BlockPool, OutOfBlocks, check_free
from cache.blocks.sequence import Sequence
from cache.checks import require
from cache.managers.base import FREED, MIDDLE, CacheManager, CacheOptions, Copies, Hit, Table
from cache.policies import as_policy


@dataclass(slots=True, eq=False)
class PooledTable(Table):
    """The blocks of one sequence."""

    blocks: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0  # number of leading blocks that can be found
    num_given_back: int = 0  # number of leading blocks that are FREED


class PooledManager(CacheManager):
    """Tables only grow, and a full block can be found once all its tokens have slots.

    Attributes:
        pool: the blocks.  The pool's policy chooses which block without a user is taken.
    """

    _table_class = PooledTable

    def __init__(self, options: CacheOptions) -> None:
        super().__init__(options)
        self.pool = BlockPool(self.num_blocks, as_policy(options.policy), self._counts)
        self._listener = self.pool.policy.tell if "tell" in self.pool.policy.hooks else None

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def on_queued(self, position: tuple[int, ...], seq: Sequence | None = None) -> None:
        if "on_queued" in self.pool.policy.hooks:
            self.pool.policy.on_queued(position, self._hasher.block_hashes(seq)[:] if seq else ())

    def check_invariants(self) -> None:
        super().check_invariants()
        self.pool.check_invariants()
        users = Counter(chain.from_iterable(table.blocks for table in self._tables.values()))
        for block, ref_count in enumerate(self.pool.ref_counts):
            require(
                ref_count == users[block],
                f"block {block} has ref_count {ref_count} and is in {users[block]} tables",
            )
        block_hashes = self.pool.block_hashes
        for seq_id, table in self._tables.items():
            num_cached, first = table.num_cached_blocks, table.num_given_back
            stored, hashes = table.seq.num_computed_tokens, self._hasher.block_hashes(table.seq)
            held = [block_hashes[block] for block in table.blocks[first:]]
            expected = hashes[:num_cached] + [None] * (len(table.blocks) - num_cached)
            num_full = min(stored // self.block_size, len(hashes))
            # If the last token was unknown, the next call hashes its block.
            num_late = int(stored % self.block_size == 0)
            if not self.enable_prefix_caching:
                num_full = num_late = 0
            require(
                num_full - num_late <= num_cached <= num_full and held == expected[first:],
                f"{seq_id!r}: of the blocks {table.blocks} for {stored} tokens {num_cached} are "
                f"cached, with hashes {held}",
            )

    def _num_idle(self, hit: Hit) -> int:
        return self.pool.num_revived([block for block in hit.blocks if block != FREED])

    def _begin(self, table: PooledTable, hit: Hit, end: int) -> Copies:
        num_hits, num_given_back = len(hit.blocks), hit.blocks.count(FREED)  # FREED come first
        held = hit.blocks[num_given_back:]
        needed = self._num_blocks_of(table, 0, end + table.num_lookahead_tokens)
        needed -= num_hits - self.pool.num_revived(held)
        check_free(needed, self.pool.num_free_blocks)
        if "look_up" in self.pool.policy.hooks:
            hashes = self._hasher.block_hashes(table.seq) if self.enable_prefix_caching else ()
            self.pool.policy.look_up(hashes[: self._max_hits(table.seq)])
        if self._listener:
            self._notify_policy(table.seq)
        self.interruption = MIDDLE
        self.pool.share(held)
        table.blocks = list(hit.blocks)
        table.num_cached_blocks = num_hits
        table.num_given_back = num_given_back
        return self._extend(table, hit.num_tokens, end)

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
            hashes = self._hasher.block_hashes(table.seq)
            last = min(end // self.block_size, len(hashes))
        pool, missing = self.pool, num_blocks - len(table.blocks)
        if last > first or missing > 0:
            if missing > pool.num_free_blocks:
                raise OutOfBlocks(missing, pool.num_free_blocks)
            self.interruption = MIDDLE
            pool.extend(table.blocks, num_blocks, hashes, first, last)
            if last > first and pool.events is not None:
                pool.events.append(self._stored(table.seq, hashes, first, last))
            table.num_cached_blocks = last

    def _stored(self, seq: Sequence, hashes: list[bytes], first: int, last: int) -> BlockStored:
        """Make the event that blocks ``first`` to ``last - 1`` of ``seq`` can be found."""
        size = self.block_size
        return BlockStored(
            hashes[first:last],
            hashes[first - 1] if first else None,
            seq.token_ids[first * size : last * size].tolist(),
            size,
            seq.lora_name,
            [seq.extra_keys(i * size, (i + 1) * size) for i in range(first, last)],
        )

    def _release(self, table: PooledTable) -> None:
        self._fill(table, 0, table.seq.num_computed_tokens)
        self.pool.free(table.blocks[table.num_given_back :])
