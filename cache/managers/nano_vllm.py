"""Nano-vLLM's block manager."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from cache.blocks.hashing import ExtraKey
from cache.blocks.sequence import Sequence
from cache.checks import require
from cache.managers.base import CacheOptions, Copies
from cache.managers.pooled import PooledManager, PooledTable
from cache.policies.lru import LRU


@dataclass(slots=True, eq=False)
class _Content:
    """Tokens and extra keys of a full block.  ``parent`` is the content of the block before it."""

    token_ids: array
    extra_keys: list[ExtraKey]
    parent: _Content | None

    def __getstate__(self) -> tuple[None, dict]:
        """Leave out ``parent``, so that pickling does not recurse; the manager restores it."""
        return None, {"token_ids": self.token_ids, "extra_keys": self.extra_keys}

    def equals(self, other: _Content) -> bool:
        """Whether the tokens and keys of both blocks and of all blocks before them are equal."""
        mine: _Content | None = self
        its: _Content | None = other
        while mine is not its:
            if mine is None or its is None:
                return False
            if mine.token_ids != its.token_ids or mine.extra_keys != its.extra_keys:
                return False
            mine, its = mine.parent, its.parent
        self.parent = other.parent  # the next comparison stops here
        return True


class NanoVLLM(PooledManager):
    """Prefix caching as in the ``BlockManager`` of Nano-vLLM (GeeeekExplorer).

    * Free block ids wait in a deque.  They are taken from the front and returned to the end, the
      last block of a sequence first.  A cached block keeps its content until it is taken.
    * Full blocks are found by chained 64-bit hashes (xxh64).  The tokens of every hit are compared,
      and the cached prefix ends before the first block that differs.
    * The last block of a sequence is never taken from the cache, so one token is left to compute.
    * A sequence gets blocks for all its tokens at once, even if its prompt is computed in chunks.
      The blocks of a chunk can be found once the chunk has slots.  Later the sequence needs a new
      block only when ``num_tokens % block_size == 1`` (with block_size 1: always).

    The original hands out the same block tables; docs/deviations.md lists the differences.

    ``policy`` orders the free blocks in place of the deque.  ``"lru"`` is the deque's order.  With
    any other policy, blocks without cached content are taken first.  No fork, swap or reset.
    """

    name = "nano_vllm"
    compares_tokens = True
    own_hash = "xxh64"

    def __init__(self, options: CacheOptions) -> None:
        super().__init__(options)
        self.pool.queue_uncached = isinstance(self.pool.policy, LRU)
        self._contents: list[_Content | None] = [None] * self.num_blocks  # by block

    def __getstate__(self) -> tuple[dict, dict]:
        parents: dict[_Content, _Content | None] = {}
        for content in self._contents:
            while content and content not in parents:
                parents[content] = content.parent
                content = content.parent
        return self.__dict__, parents

    def __setstate__(self, state: tuple[dict, dict]) -> None:
        self.__dict__, parents = state
        for content, parent in parents.items():
            content.parent = parent

    def check_invariants(self) -> None:
        super().check_invariants()
        for block, key in enumerate(self.pool.block_hashes):
            require(
                key is None or self._contents[block] is not None,
                f"block {block} is cached, but its tokens are missing",
            )

    def _match(self, seq: Sequence, limit: int) -> tuple[list[int], None]:
        hits: list[int] = []
        parent = None
        for depth, block in enumerate(self.pool.lookup(self._hasher.block_hashes(seq)[:limit])):
            content = self._contents[block]
            if content is None or not content.equals(self._content(seq, depth, parent)):
                break
            hits.append(block)
            parent = content
        return hits, None

    def _num_blocks_of(self, table: PooledTable, start: int, end: int) -> int:
        if start and end <= -(-start // self.block_size) * self.block_size:
            return 0  # the last block has room
        return -(-len(table.seq.token_ids) // self.block_size)  # blocks for all tokens at once

    def _extend(self, table: PooledTable, start: int, end: int) -> Copies:
        self._fill(table, self._num_blocks_of(table, start, end), end)
        return []

    def _fill(self, table: PooledTable, num_blocks: int, end: int) -> None:
        first = table.num_cached_blocks
        super()._fill(table, num_blocks, end)
        parent = self._contents[table.blocks[first - 1]] if first else None
        for depth in range(first, table.num_cached_blocks):
            parent = self._content(table.seq, depth, parent)
            self._contents[table.blocks[depth]] = parent

    def _content(self, seq: Sequence, depth: int, parent: _Content | None) -> _Content:
        """Content of the full block at position ``depth`` of ``seq``."""
        start, end = depth * self.block_size, (depth + 1) * self.block_size
        keys = seq.extra_keys(start, end) if start < seq.keyed_length else []
        return _Content(seq.token_ids[start:end], keys, parent)
