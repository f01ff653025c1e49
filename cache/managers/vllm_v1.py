"""vLLM's present KV cache manager (v1)."""

from cache.blocks.events import Event
from cache.blocks.pool import check_free
from cache.blocks.sequence import Sequence
from cache.checks import at_least, true_or_false
from cache.managers.base import FREED, MIDDLE, CacheOptions, Copies
from cache.managers.pooled import PooledManager, PooledTable


class VLLMv1(PooledManager):
    """Automatic prefix caching by block hashes, as in ``KVCacheManager`` of vLLM v1 (0.33).

    * A dictionary of chained hashes finds the cached prefix block by block.  At least one token is
      left to compute for its logits; if that token is in the last cached block, the whole block is
      computed again.
    * Hits leave the free queue before anything is taken from it.  A cached block loses its content
      only when it is taken again.  Blocks return in reverse order, so the tail of a prompt is
      evicted before its head.  Blocks without a hash return to the front of the queue, with any
      policy.  With ``queue_uncached`` they queue with the cached blocks, as in older vLLM v1.
    * A full block can be found when the step that computes it is scheduled, because every layer
      stores K/V of the whole batch before any sequence of the batch reads them.
    * Tables only grow.  Two sequences that compute the same block side by side keep both copies.
    * ``sliding_window``: the largest window of the model's layers, in tokens, the query included.
      A sequence that grows first gives back the blocks behind the window of its next query, then
      takes new ones.  FREED replaces them in its table.  Like vLLM it gives them back even if
      the call then raises OutOfBlocks; a raise changes nothing else.  A prefix is cached if the
      blocks in the window of the first new token are cached.
    * ``fork`` shares all stored blocks.  The first append to a shared, partly filled block copies
      it (copy-on-write of the PagedAttention paper).
    * ``enable_kv_cache_events``: ``take_events`` returns the blocks that were cached and lost.

    docs/deviations.md lists the differences from vLLM.
    """

    name = "vllm_v1"
    own_hash = "xxh3_128"
    can_fork = True
    can_look_ahead = True
    can_reset = True

    def __init__(
        self,
        options: CacheOptions,
        *,
        queue_uncached: bool = False,
        sliding_window: int | None = None,
        enable_kv_cache_events: bool = False,
    ) -> None:
        super().__init__(options)
        self.pool.queue_uncached = true_or_false("queue_uncached", queue_uncached)
        if true_or_false("enable_kv_cache_events", enable_kv_cache_events):
            self.pool.events = []
        if sliding_window is not None:
            sliding_window = at_least(1, "sliding_window", sliding_window)
        self.sliding_window = sliding_window

    def take_events(self) -> list[Event]:
        """The events since the last call, in their order; they are kept until then.

        Raises ValueError without ``enable_kv_cache_events``.
        """
        self._check_usable()
        if self.pool.events is None:
            raise ValueError("enable_kv_cache_events=False: the manager records no events")
        events, self.pool.events = self.pool.events, []
        return events

    def _match(self, seq: Sequence, limit: int) -> tuple[list[int], None]:
        hashes = self._hasher.block_hashes(seq)[:limit]
        if self.sliding_window is None:
            return self.pool.lookup(hashes), None
        return self._lookup_from_end(hashes, self.sliding_window), None

    def _lookup_from_end(self, hashes: list[bytes], window: int) -> list[int]:
        """The last cached run of blocks that fills the window, after FREED for earlier ones."""
        num_seen = -(-(window - 1) // self.block_size)
        blocks: list[int] = []
        for position in reversed(range(len(hashes))):
            found = self.pool.lookup(hashes[position : position + 1])
            blocks = found + blocks if found else []
            if len(blocks) == max(1, num_seen):
                num_unseen = position + len(blocks) - num_seen
                return [FREED] * num_unseen + blocks[:num_seen]
        return blocks

    def _extend(self, table: PooledTable, start: int, end: int) -> Copies:
        pool, blocks, size = self.pool, table.blocks, self.block_size
        num_blocks = -(-end // size)
        if table.num_lookahead_tokens:
            num_blocks = -(-(end + table.num_lookahead_tokens) // size)
            table.num_lookahead_tokens = 0
        if self.sliding_window is not None:
            self._give_back(table, start)
        copies: Copies = []
        if start % size and pool.ref_counts[blocks[start // size]] > 1:
            position = start // size
            shared = blocks[position]
            check_free(1 + max(0, num_blocks - len(blocks)), pool.num_free_blocks)
            self.interruption = MIDDLE
            (blocks[position],) = pool.allocate(1)
            pool.free([shared])
            self._counts["copied_blocks"] += 1
            copies.append((shared, blocks[position]))
        length = len(blocks)
        self._fill(table, num_blocks, end)
        room = len(blocks) * size - 1
        if room > end + size - 2:  # lookahead tokens have blocks
            room = (table.num_cached_blocks + 1) * size - 1
            table.seq.table_version += len(blocks) > length
        if self.sliding_window is None:
            table.no_alloc_until = room
        return copies

    def _num_unseen(self, start: int) -> int:
        """Leading blocks that neither the query at ``start`` nor a later one sees."""
        if self.sliding_window is None:
            return 0
        return max(0, start - self.sliding_window + 1) // self.block_size

    def _give_back(self, table: PooledTable, start: int) -> None:
        first, end = table.num_given_back, self._num_unseen(start)
        if end > first:
            self._notify_policy(table.seq)
            with self._change:
                self._fill(table, 0, start)  # caches a block whose last token was unknown until now
                self.interruption = MIDDLE
                self.pool.free(table.blocks[first:end])
                table.blocks[first:end] = [FREED] * (end - first)
                table.num_given_back = end
                table.seq.table_version += 1

    def _num_needed(self, table: PooledTable, end: int) -> int:
        end_unseen = self._num_unseen(table.seq.num_computed_tokens)
        unseen = table.blocks[table.num_given_back : end_unseen]
        num_freed = sum(self.pool.ref_counts[block] == 1 for block in unseen)
        return super()._num_needed(table, end) - num_freed

    def _is_shared(self, block: int) -> bool:
        return self.pool.ref_counts[block] > 1

    def _share(self, table: PooledTable, copy: PooledTable) -> None:
        self._fill(table, 0, table.seq.num_computed_tokens)
        copy.blocks = table.blocks[: -(-table.seq.num_computed_tokens // self.block_size)]
        copy.num_cached_blocks = table.num_cached_blocks
        copy.num_given_back = table.num_given_back
        table.no_alloc_until = 0  # the next append may have to copy the last block
        self.pool.share(copy.blocks[copy.num_given_back :])

    def _forget(self) -> None:
        self.pool.reset_prefix_cache()
