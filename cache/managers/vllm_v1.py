"""vLLM's present KV cache manager (v1)."""

from __future__ import annotations

from array import array

from cache.blocks.event_log import EventLog
from cache.blocks.partial_blocks import PartialBlockIndex
from cache.blocks.pool import check_free
from cache.blocks.sequence import Sequence
from cache.checks import at_least, require
from cache.managers.base import GIVEN_BACK, Copies, Hit
from cache.managers.pooled import PooledManager, PooledTable
from cache.policies.base import EvictionPolicy


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
    * With ``sliding_window`` (tokens that a query of any layer sees, itself included) blocks behind
      the window of every query to come are given back, and in the table GIVEN_BACK stands for
      them.  A prefix is cached if the blocks that the window of the first new token reaches are,
      whatever has become of those before: they are looked for from the end.
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
        sliding_window: int | None = None,
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
        self.sliding_window = sliding_window
        if sliding_window is not None:
            at_least(1, "sliding_window", sliding_window)
            if partial_block_reuse:
                raise ValueError(
                    "partial_block_reuse=True with a sliding_window: the blocks of a prefix, which "
                    "the part would follow, may be given back"
                )
        self._partials = PartialBlockIndex() if partial_block_reuse else None
        if partial_block_reuse:
            if not enable_prefix_caching:
                raise ValueError("partial_block_reuse=True needs enable_prefix_caching=True")
            self.pool.on_forget = self._partials.discard

    def check_invariants(self) -> None:
        super().check_invariants()
        block_hashes = self.pool.block_hashes
        for block, parent, tokens in self._partials or ():
            require(
                self._hasher.hash_block(parent, array("I", tokens)) == block_hashes[block],
                f"block {block} is offered for copies of what it has not",
            )

    def _match(self, seq: Sequence, limit: int) -> Hit:
        hashes = self._hasher.block_hashes(seq)[:limit]
        if self.sliding_window is None:
            blocks = self.pool.lookup(hashes)
        else:
            blocks = self._lookup_from_end(hashes)
        return Hit(blocks, len(blocks) * self.block_size)

    def _lookup_from_end(self, hashes: list[bytes]) -> list[int]:
        """The last blocks that the window reaches, found from the end, behind GIVEN_BACK."""
        num_seen = max(1, -(-(self.sliding_window - 1) // self.block_size))
        blocks: list[int] = []
        for position in reversed(range(len(hashes))):
            found = self.pool.lookup(hashes[position : position + 1])
            blocks = found + blocks if found else []
            if len(blocks) == num_seen:
                return [GIVEN_BACK] * position + blocks
        return blocks

    def find_part(self, seq: Sequence, hit: Hit) -> Hit:
        found = self._partial_hit(seq, hit.blocks) if self._partials else None
        if found is None:
            return hit
        donor, num_shared = found
        return Hit(hit.blocks, hit.num_tokens + num_shared, donor)

    def _extend(self, table: PooledTable, start: int, end: int) -> Copies:
        pool, blocks = self.pool, table.blocks
        num_blocks = self._num_blocks_of(table, start, end)
        copies: Copies = []
        position, offset = divmod(start, self.block_size)
        if offset and pool.ref_counts[blocks[position]] > 1:
            check_free(max(0, num_blocks - len(blocks)) + 1, pool.num_free_blocks)
            shared = blocks[position]
            (blocks[position],) = pool.allocate(1)
            pool.free([shared])
            self._counts["copied_blocks"] += 1
            copies.append((shared, blocks[position]))
        if self._partials:
            self._mark_as_computed(table)
        self._fill(table, num_blocks, end)
        if self.sliding_window is not None:
            self._give_back(table, start)
        return copies

    def _give_back(self, table: PooledTable, first_query: int) -> None:
        """Give up the blocks that neither the query at ``first_query`` nor later ones see."""
        first = table.num_given_back
        end = (first_query - self.sliding_window + 1) // self.block_size
        if end > first:
            self._tell(table.seq)
            self.pool.free(table.blocks[first:end])
            table.blocks[first:end] = [GIVEN_BACK] * (end - first)
            table.num_given_back = end
            table.seq.table_version += 1

    def _is_shared(self, block: int) -> bool:
        return self.pool.ref_counts[block] > 1

    def _share(self, table: PooledTable, copy: PooledTable) -> None:
        self._fill(table, 0, table.seq.num_computed_tokens)
        copy.blocks = table.blocks.copy()
        copy.num_cached_blocks = copy.num_computed_blocks = table.num_cached_blocks
        copy.num_given_back = table.num_given_back
        self.pool.share(copy.blocks[copy.num_given_back :])

    def _release(self, table: PooledTable) -> None:
        self._fill(table, 0, table.seq.num_computed_tokens)
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

    def _mark_as_computed(self, table: PooledTable) -> None:
        """Let parts of the blocks that were filled so far be reused."""
        if not self._partials:
            return
        seq, size = table.seq, self.block_size
        hashes = self._hasher.block_hashes(seq)
        for position in range(table.num_computed_blocks, table.num_cached_blocks):
            start, end = position * size, (position + 1) * size
            if not seq.extra_keys(start, end):
                parent = hashes[position - 1] if position else None
                tokens = seq.token_ids[start:end].tobytes()
                self._partials.add(table.blocks[position], parent, tokens)
        table.num_computed_blocks = table.num_cached_blocks
