"""What designs that find blocks by their hashes in a :class:`BlockPool` have in common."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

from cache.block_pool import BlockPool, check_free
from cache.checks import require
from cache.content_index import ContentIndex
from cache.event_log import EventLog
from cache.hash_index import HashIndex
from cache.hashing import BlockHasher, collision_free_hasher
from cache.managers.base import CacheManager, Prefix, Table
from cache.policies import as_policy
from cache.policies.base import EvictionPolicy, listener
from cache.sequence import Sequence


@dataclass(slots=True, eq=False)
class PooledTable(Table):
    """The blocks of one sequence, and what a pool knows of them.

    Attributes:
        hashes: of its full blocks, at least of those that are to be cached.
        num_cached_blocks: leading blocks that are cached; the pool counts them.
        num_given_back: leading blocks that the sequence holds no more.
    """

    hashes: list[bytes] = field(default_factory=list)
    num_cached_blocks: int = 0
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
        keeps_prefixes: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        if self.compares_tokens:
            self._hasher = BlockHasher(hash_algorithm, self.block_size)
        else:
            self._hasher = collision_free_hasher(self.name, hash_algorithm, self.block_size)
        if self.compares_tokens or not keeps_prefixes:
            index = HashIndex(self.num_blocks)
        else:
            index = ContentIndex(self.num_blocks, self._hasher.digest_size)
        self.pool = BlockPool(
            self.num_blocks,
            as_policy(policy),
            queue_uncached=queue_uncached,
            index=index,
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
            held = [block_hashes[block] for block in table.blocks[first:]]
            expected = table.hashes[:num_cached] + [None] * (len(table.blocks) - num_cached)
            require(
                num_cached == self._num_findable(table, table.num_noted_tokens)
                and held == expected[first:],
                f"{seq_id!r}: of the blocks {table.blocks} for {table.num_noted_tokens} tokens "
                f"{num_cached} are cached, with hashes {held}",
            )

    def _match(self, seq: Sequence, limit: int) -> Prefix:
        blocks = self.pool.lookup(self._hasher.block_hashes(seq)[:limit])
        return blocks, len(blocks) * self.block_size, None

    def _num_revived(self, prefix: Prefix) -> int:
        return self.pool.num_revived(prefix[0])

    def _begin(self, table: PooledTable, prefix: Prefix, end: int) -> None:
        hits = prefix[0] or []
        count = self._num_blocks_for(end) - len(hits)
        if hits:
            self.pool.revive(hits, count)
            table.hashes = self._hasher.block_hashes(table.seq)
        else:
            check_free(count, self.pool.num_free_blocks)
        self._tell(table.seq)  # what fails tells nothing
        table.blocks = hits
        table.num_cached_blocks = len(hits)
        table.num_noted_tokens = len(hits) * self.block_size

    def _note_stored(self, table: PooledTable, end: int) -> None:
        self.pool.extend(table, 0, self._num_findable(table, end))

    def _num_findable(self, table: PooledTable, num_tokens: int) -> int:
        """Blocks of ``table`` that ``num_tokens`` fill and that are to be cached, with hashes."""
        if not self.enable_prefix_caching:
            return 0
        count = num_tokens // self.block_size
        if count > table.num_cached_blocks:
            table.hashes = self._hasher.block_hashes(table.seq)
        return count

    def _release(self, table: PooledTable) -> None:
        self.pool.free(table.blocks[table.num_given_back :])
