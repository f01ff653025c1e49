"""vLLM's present KV cache manager (v1)."""

from __future__ import annotations

from array import array

from cache.block_pool import check_free
from cache.checks import require
from cache.event_log import EventLog
from cache.managers.base import Copies, Prefix
from cache.managers.pooled import PooledManager, PooledTable
from cache.partial_blocks import PartialBlockIndex
from cache.policies.base import EvictionPolicy
from cache.sequence import Sequence


class _Table(PooledTable):
    """The blocks of one sequence."""

    __slots__ = ("donor", "num_computed_blocks")

    def __init__(self, seq: Sequence) -> None:
        super().__init__(seq)
        self.donor: int | None = None  # the block to copy the beginning of its next one from
        self.num_computed_blocks = 0  # leading blocks whose K/V are there for certain


class VLLMv1(PooledManager):
    """Automatic prefix caching by block hashes, as in ``KVCacheManager`` of vLLM v1.

    * A prompt's cached prefix is found block by block through a dictionary of chained hashes.
      At least one token is left to compute, since its logits are needed; if that splits the last
      block, the whole block is computed again.
    * Hits leave the free queue before anything is taken from it.  A cached block loses its
      content only when it is handed out again, and blocks return in reverse, so that the tail of
      a prompt is evicted before its head.  Blocks whose content cannot be found (partly filled
      ones) return to the front of the queue and are handed out next, whatever the policy.  With
      ``queue_uncached`` they wait in line with the cached ones, as in older versions of vLLM v1.
    * A full block becomes findable when the step that computes it is scheduled: every layer
      stores the K/V of the whole batch before any sequence of the batch reads them.
    * Tables only grow.  If two sequences compute the same block side by side both copies stay;
      the duplicate is an ordinary block that is evicted in its turn.
    * ``fork`` shares all stored blocks; the first append to a shared, partly filled block copies
      it (copy-on-write of the PagedAttention paper; vLLM v1 itself runs the samples of a prompt as
      requests of their own, which meet in the prefix cache).

    * ``partial_block_reuse`` (beyond vLLM): where the cached prefix ends inside a block,
      ``allocate`` copies the cached block that shares the longest beginning with the next one and
      counts that beginning as cached.  ``take_copies`` gives the pairs, to be run before the step.
      A block can be copied from once the step that filled it is over, which the next ``append``
      or ``free`` of its sequence says.  Blocks with multi-modal inputs, and first blocks with an
      adapter or a salt, are left out.

    Unlike vLLM no block is set aside as a null block: all ``num_blocks`` can be used.

    ``policy`` is the name of an eviction policy or an object, which then belongs to this manager;
    ``event_log`` is told what happens to every block.
    Raises ValueError for an unknown policy or algorithm, and for a digest below 128 bits.
    """

    name = "vllm_v1"
    can_fork = True
    can_reset = True
    _table_class = _Table

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        policy: str | EvictionPolicy = "lru",
        hash_algorithm: str = "xxh3_128",
        enable_prefix_caching: bool = True,
        queue_uncached: bool = False,
        partial_block_reuse: bool = False,
        event_log: EventLog | None = None,
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            policy=policy,
            hash_algorithm=hash_algorithm,
            enable_prefix_caching=enable_prefix_caching,
            queue_uncached=queue_uncached,
            event_log=event_log,
        )
        self._partials = PartialBlockIndex() if partial_block_reuse else None
        self._copies: Copies = []
        if partial_block_reuse:
            if not enable_prefix_caching:
                raise ValueError("partial_block_reuse=True needs enable_prefix_caching=True")
            self.pool.on_forget = self._partials.discard

    def take_copies(self) -> Copies:
        copies, self._copies = self._copies, []
        return copies

    def check_invariants(self) -> None:
        super().check_invariants()
        block_hashes = self.pool.block_hashes
        for block, parent, tokens in self._partials or ():
            require(
                self._hasher.hash_block(parent, array("I", tokens)) == block_hashes[block],
                f"block {block} is offered for copies of what it has not",
            )

    def _find_for_allocate(self, seq: Sequence) -> Prefix:
        prefix = hits, num_tokens, _ = self._find(seq)
        found = self._partial_hit(seq, hits) if self._partials else None
        if found is None:
            return prefix
        block, num_shared = found
        return hits, num_tokens + num_shared, block

    def _begin(self, table: _Table, prefix: Prefix, end: int) -> None:
        super()._begin(table, prefix, end)
        table.num_computed_blocks = table.num_cached_blocks
        table.donor = prefix[-1]
        if table.donor is not None:
            self.pool.revive([table.donor])  # so that it is not handed out to this very sequence

    def _extend(self, table: _Table, end: int) -> Copies:
        pool, blocks = self.pool, table.blocks
        num_held = len(blocks)
        count = -(-end // self.block_size) - num_held
        copies: Copies = []
        position, offset = divmod(table.num_noted_tokens, self.block_size)
        if offset and pool.ref_counts[blocks[position]] > 1:
            check_free(max(0, count) + 1, pool.num_free_blocks)
            shared = blocks[position]
            (blocks[position],) = pool.allocate(1)
            pool.free([shared])
            self._num_copied += 1
            copies.append((shared, blocks[position]))
        if self._partials:
            self._mark_as_computed(table)
        pool.extend(table, count, self._num_findable(table, end))
        if table.donor is not None:
            pool.free([table.donor])
            self._copies.append((table.donor, blocks[num_held]))
            self._num_copied += 1
            table.donor = None
        return copies

    def _is_shared(self, block: int) -> bool:
        return self.pool.ref_counts[block] > 1

    def _share(self, table: _Table, copy: _Table) -> None:
        copy.blocks = table.blocks.copy()
        copy.num_cached_blocks = copy.num_computed_blocks = table.num_cached_blocks
        if self.enable_prefix_caching:
            copy.hashes = self._hasher.block_hashes(copy.seq)
        self.pool.share(copy.blocks)

    def _release(self, table: _Table) -> None:
        self._mark_as_computed(table)
        if self._copies:  # nobody took them, and their targets may soon be another's blocks
            self._copies = [pair for pair in self._copies if pair[1] not in table.blocks]
        super()._release(table)

    def _forget(self) -> None:
        self.pool.reset_prefix_cache()
        if self._partials:
            self._partials.clear()

    def _partial_hit(self, seq: Sequence, hits: list[int]) -> tuple[int, int] | None:
        """The block that begins like the one after ``hits``, and for how many tokens it does.

        None if there is no such block, or no room for ``seq`` unless it is handed out.
        """
        start = len(hits) * self.block_size
        end = min(start + self.block_size, seq.num_tokens - 1)
        if end <= start or seq.extra_keys(start, end):
            return None
        parent = self._hasher.block_hashes(seq)[len(hits) - 1] if hits else None
        found = self._partials.find(parent, seq.token_ids[start:end].tobytes())
        if found is None:
            return None
        needed = self._num_blocks_for(seq.num_tokens) - len(hits)
        needed += self.pool.num_revived([*hits, found[0]])
        return found if needed <= self.pool.num_free_blocks else None

    def _mark_as_computed(self, table: _Table) -> None:
        """Let parts of the blocks that were filled so far be reused."""
        if not self._partials:
            return
        seq, size = table.seq, self.block_size
        for position in range(table.num_computed_blocks, table.num_cached_blocks):
            start, end = position * size, (position + 1) * size
            if not seq.extra_keys(start, end):
                parent = table.hashes[position - 1] if position else None
                tokens = seq.token_ids[start:end].tobytes()
                self._partials.add(table.blocks[position], parent, tokens)
        table.num_computed_blocks = table.num_cached_blocks
