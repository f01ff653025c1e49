"""What designs that find blocks by their hashes in a :class:`BlockPool` have in common."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from cache.blocks.event_log import EventLog
from cache.blocks.hashing import BlockHasher, collision_free_hasher
from cache.blocks.pool import BlockPool
from cache.checks import require
from cache.managers.base import GIVEN_BACK, CacheManager, Copies, Hit, Table
from cache.policies import as_policy
from cache.policies.base import EvictionPolicy, listener


@dataclass(slots=True, eq=False)
class PooledTable(Table):
    """The blocks of one sequence, and what a pool knows of them.

    Attributes:
        num_cached_blocks: leading blocks that are cached.
        num_computed_blocks: leading blocks whose K/V are there for certain.
        num_given_back: leading blocks that the sequence holds no more.
    """

    num_cached_blocks: int = 0
    num_computed_blocks: int = 0
    num_given_back: int = 0


class PooledManager(CacheManager):
    """Tables only grow, and their full blocks become findable when they are stored.

    Attributes:
        pool: the blocks; its policy chooses among those without a user.

    Raises ValueError for an unknown policy or algorithm, and for a digest below 128 bits unless
    the design compares the tokens of a hit.
    """

    compares_tokens: ClassVar[bool] = False

    _table_class = PooledTable

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        policy: str | EvictionPolicy,
        hash_algorithm: str,
        enable_prefix_caching: bool,
        queue_uncached: bool,
        event_log: EventLog | None,
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        if self.compares_tokens:
            self._hasher = BlockHasher(hash_algorithm, self.block_size)
        else:
            self._hasher = collision_free_hasher(self.name, hash_algorithm, self.block_size)
        self.pool = BlockPool(
            self.num_blocks,
            as_policy(policy),
            queue_uncached=queue_uncached,
            event_log=event_log,
        )
        self.pool.counts = self._counts
        self._listener = listener(self.pool.policy)

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

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
            require(
                num_cached == (num_full if self.enable_prefix_caching else 0)
                and held == expected[first:],
                f"{seq_id!r}: of the blocks {table.blocks} for {stored} tokens {num_cached} are "
                f"cached, with hashes {held}",
            )

    def _num_idle(self, hit: Hit) -> int:
        return self.pool.num_revived([block for block in hit.blocks if block != GIVEN_BACK])

    def _begin(self, table: PooledTable, hit: Hit, end: int) -> Copies:
        held = [block for block in hit.blocks if block != GIVEN_BACK]
        donor = hit.where  # stays, so that it is not handed out to this very sequence
        users = held if donor is None else [*held, donor]
        num_hits = len(hit.blocks)
        self.pool.revive(users, self._num_blocks_of(table, 0, end) - num_hits)
        if self._listener:
            self._tell(table.seq)  # what fails tells nothing
        table.blocks = list(hit.blocks)
        table.num_cached_blocks = table.num_computed_blocks = num_hits
        table.num_given_back = num_hits - len(held)
        copies = self._extend(table, num_hits * self.block_size, end)
        if donor is not None:
            self.pool.free([donor])
            copies.append((donor, table.blocks[num_hits]))
            self._counts["copied_blocks"] += 1
        return copies

    def _num_blocks_of(self, table: PooledTable, start: int, end: int) -> int:
        """Blocks that ``table`` is to have when its tokens from ``start`` to ``end`` are stored."""
        return -(-end // self.block_size)

    def _fill(self, table: PooledTable, num_blocks: int, end: int) -> None:
        """Give ``table`` ``num_blocks`` blocks, or leave it those it has, and make findable what
        its tokens up to ``end`` fill, as far as they are known."""
        first = last = table.num_cached_blocks
        count = num_blocks - len(table.blocks)
        hashes: list[bytes] = []
        if self.enable_prefix_caching and end // self.block_size > first:
            hashes = self._hasher.block_hashes(table.seq)
            last = min(end // self.block_size, len(hashes))
        if count > 0 or last > first:
            self.pool.extend(table.blocks, count, hashes, first, last)
            table.num_cached_blocks = last

    def _release(self, table: PooledTable) -> None:
        self._fill(table, 0, table.seq.num_computed_tokens)
        self.pool.free(table.blocks[table.num_given_back :])
