"""vLLM's present KV cache manager (v1)."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable
from itertools import chain

from cache.block_pool import BlockPool
from cache.content_index import ContentIndex
from cache.event_log import EventLog
from cache.hashing import HASH_ALGORITHMS, BlockHasher
from cache.managers.base import (
    AllocStatus,
    CacheManager,
    CacheStats,
    Copies,
    as_policy,
)
from cache.managers.tables import (
    Table,
    check_grew,
    check_holds_no_blocks,
    check_shares_content,
    table_of,
)
from cache.memory_usage import MemoryUsage, usage_of_tables
from cache.partial_blocks import PartialBlockIndex
from cache.policies.base import EvictionPolicy
from cache.sequence import Sequence

_MIN_DIGEST_SIZE = 16  # bytes: hits are believed without comparing tokens


class _Table(Table):
    """The blocks of one sequence."""

    __slots__ = ("blocks", "hashes", "num_cached_blocks", "num_computed_blocks")

    def __init__(
        self, seq: Sequence, blocks: list[int], hashes: list[bytes], num_cached_blocks: int
    ) -> None:
        super().__init__(seq)
        self.blocks = blocks
        self.hashes = hashes  # of all full blocks: the list of the sequence, which grows with it
        self.num_cached_blocks = num_cached_blocks  # leading blocks whose content is indexed
        self.num_computed_blocks = num_cached_blocks  # those whose K/V are there for certain


class VLLMv1(CacheManager):
    """Automatic prefix caching by block hashes, as in ``KVCacheManager`` of vLLM v1.

    * A prompt's cached prefix is found block by block through a dictionary of chained hashes.
      At least one token is left to compute, since its logits are needed; if that splits the last
      block, the whole block is computed again.
    * Hits leave the free queue before anything is taken from it.  A cached block loses its
      content only when it is handed out again, and blocks return in reverse, so that the tail of
      a prompt is evicted before its head.
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
      A block can be copied from once the step that filled it is over: ``mark_blocks_as_computed``
      says so, and so does the next ``append`` or ``free`` of its sequence.  Blocks with
      multi-modal inputs, and first blocks with an adapter or a salt, are left out.

    Unlike vLLM no block is set aside as a null block: all ``num_blocks`` can be used.

    ``policy`` is the name of an eviction policy or an object, which then belongs to this manager;
    ``event_log`` is told what happens to every block.
    Raises ValueError for an unknown policy or algorithm, and for a digest below 128 bits.
    """

    name = "vllm_v1"

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        policy: str | EvictionPolicy = "lru",
        hash_algorithm: str = "xxh3_128",
        enable_prefix_caching: bool = True,
        partial_block_reuse: bool = False,
        event_log: EventLog | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self._hasher = BlockHasher(hash_algorithm, self.block_size)
        if self._hasher.digest_size < _MIN_DIGEST_SIZE:
            strong = [n for n, a in HASH_ALGORITHMS.items() if a.digest_size >= _MIN_DIGEST_SIZE]
            raise ValueError(
                f"hash_algorithm={hash_algorithm!r}: {self.name} does not compare tokens and needs "
                f"a digest of 128 bits or more; choose from {', '.join(strong)}"
            )
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(
            self.num_blocks,
            as_policy(policy),
            index=ContentIndex(self.num_blocks, self._hasher.digest_size),
            event_log=event_log,
        )
        self._partials = PartialBlockIndex() if partial_block_reuse else None
        if partial_block_reuse and not enable_prefix_caching:
            raise ValueError("partial_block_reuse=True needs enable_prefix_caching=True")
        if self._partials:
            self.pool.on_forget = self._partials.discard
        self._copies: Copies = []
        self._tables: dict[Hashable, _Table] = {}
        self._num_allocations = 0
        self._queried_tokens = 0
        self._queried_blocks = 0
        self._hit_blocks = 0
        self._num_copied = 0
        self._partial_tokens = 0

    def get_computed_blocks(self, seq: Sequence) -> tuple[list[int], int]:
        if not self.enable_prefix_caching:
            return [], 0
        hashes = self._hasher.block_hashes(seq)
        blocks = self.pool.lookup(hashes[: (seq.num_tokens - 1) // self.block_size])
        return blocks, len(blocks) * self.block_size

    def can_allocate(self, seq: Sequence) -> AllocStatus:
        needed = -(-seq.num_tokens // self.block_size)
        if needed > self.num_blocks:
            return AllocStatus.NEVER
        free = self.pool.num_free_blocks
        if needed > free:  # unless others use the cached part of the prefix already
            hits, _ = self.get_computed_blocks(seq)
            needed -= len(hits) - self.pool.num_revived(hits)
        return AllocStatus.OK if needed <= free else AllocStatus.LATER

    def allocate(self, seq: Sequence) -> int:
        check_holds_no_blocks(self._tables, seq)
        hits, num_cached = self.get_computed_blocks(seq)
        donor = self._partial_hit(seq, hits) if self._partials else None
        if donor is None:
            self._start(seq, hits, seq.num_tokens - num_cached, 0)
            return num_cached
        block, num_shared = donor
        self.pool.allocate(0, [block])  # so that it is not handed out to this very sequence
        num_hits = len(hits)
        self._start(seq, hits, seq.num_tokens - num_cached, 0)
        self.pool.free([block])
        self._copies.append((block, self._tables[seq.seq_id].blocks[num_hits]))
        self._num_copied += 1
        self._partial_tokens += num_shared
        seq.num_cached_tokens += num_shared
        return seq.num_cached_tokens

    def take_copies(self) -> Copies:
        copies, self._copies = self._copies, []
        return copies

    def mark_blocks_as_computed(self, seq: Sequence) -> None:
        """The step that ``seq`` was scheduled for is over: its full blocks may be copied from."""
        self._mark_as_computed(seq, table_of(self._tables, seq))

    def append(self, seq: Sequence) -> Copies:
        table = table_of(self._tables, seq)
        check_grew(seq, table.num_tokens)
        self._mark_as_computed(seq, table)
        return self._extend(seq, table, seq.num_tokens, 0)

    def can_append(self, seq: Sequence) -> bool:
        table = table_of(self._tables, seq)
        needed = self._num_missing(table, seq.num_tokens) + self._writes_to_shared_block(table)
        return needed <= self.pool.num_free_blocks

    def allocate_slots(
        self,
        seq: Sequence,
        num_new_tokens: int,
        computed_blocks: list[int] | tuple[int, ...] = (),
        *,
        num_lookahead_tokens: int = 0,
    ) -> Copies:
        table = self._tables.get(seq.seq_id)
        start = len(computed_blocks) * self.block_size if table is None else table.num_tokens
        if not 1 <= num_new_tokens <= seq.num_tokens - start or num_lookahead_tokens < 0:
            raise ValueError(
                f"num_new_tokens={num_new_tokens}, num_lookahead_tokens={num_lookahead_tokens}: "
                f"{start} of the {seq.num_tokens} tokens of sequence {seq.seq_id!r} have a slot, "
                f"so needs 1 to {seq.num_tokens - start} new ones, and none or more to look ahead"
            )
        if table is not None:
            if computed_blocks:
                raise ValueError(
                    f"computed_blocks: sequence {seq.seq_id!r} has blocks already, and these can "
                    "only go in front of its first chunk"
                )
            self._mark_as_computed(seq, table)
            return self._extend(seq, table, start + num_new_tokens, num_lookahead_tokens)
        hits = list(computed_blocks)
        if hits and hits != self.get_computed_blocks(seq)[0][: len(hits)]:
            raise ValueError(
                f"computed_blocks={hits}: these do not hold the prefix of sequence {seq.seq_id!r} "
                "(any more); ask get_computed_blocks again"
            )
        self._start(seq, hits, num_new_tokens, num_lookahead_tokens)
        return []

    def fork(self, parent: Sequence, child: Sequence) -> None:
        table = table_of(self._tables, parent)
        check_holds_no_blocks(self._tables, child)
        stored = table.num_tokens
        check_shares_content(parent, child, stored)
        self._index_filled(parent, table, self._num_cacheable(stored))
        blocks = table.blocks[: -(-stored // self.block_size)]
        self.pool.share(blocks)
        hashes = self._hasher.block_hashes(child) if self.enable_prefix_caching else []
        self._tables[child.seq_id] = _Table(child, blocks, hashes, table.num_cached_blocks)
        child.num_cached_tokens = child.num_computed_tokens = stored

    def free(self, seq: Sequence) -> None:
        table = table_of(self._tables, seq)
        self._index_filled(seq, table, self._num_cacheable(table.num_tokens))
        self._mark_as_computed(seq, table)
        if self._copies:  # nobody took them, and their targets may soon be another's blocks
            self._copies = [pair for pair in self._copies if pair[1] not in table.blocks]
        self.pool.free(table.blocks)
        del self._tables[seq.seq_id]
        seq.num_cached_tokens = seq.num_computed_tokens = 0

    def block_table(self, seq: Sequence) -> list[int]:
        return table_of(self._tables, seq).blocks.copy()

    def reset_prefix_cache(self) -> bool:
        done = self.pool.reset_prefix_cache()
        if done and self._partials:
            self._partials.clear()
        return done

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def stats(self) -> CacheStats:
        return CacheStats(
            num_allocations=self._num_allocations,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_blocks * self.block_size + self._partial_tokens,
            queried_blocks=self._queried_blocks,
            hit_blocks=self._hit_blocks,
            allocated_blocks=self.pool.num_allocated,
            evicted_blocks=self.pool.num_evicted,
            copied_blocks=self._num_copied,
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
        block_hashes = self.pool.block_hashes
        for seq_id, table in self._tables.items():
            blocks = table.blocks
            num_cached = table.num_cached_blocks
            if len(set(blocks)) != len(blocks) or len(blocks) * self.block_size < table.num_tokens:
                raise AssertionError(f"{seq_id!r}: table {blocks} for {table.num_tokens} tokens")
            held = [block_hashes[block] for block in blocks]
            expected = table.hashes[:num_cached] + [None] * (len(blocks) - num_cached)
            unnoted = self._num_cacheable(table.num_tokens) - num_cached
            if not table.may_lack(unnoted, self.block_size) or held != expected:
                raise AssertionError(
                    f"{seq_id!r}: of the blocks {blocks} for {table.num_tokens} tokens "
                    f"{num_cached} are cached, with hashes {held}"
                )
        for block, parent, tokens in self._partials or ():
            if self._hasher.hash_block(parent, array("I", tokens)) != block_hashes[block]:
                raise AssertionError(f"block {block} is offered for copies of what it has not")

    def _start(self, seq: Sequence, hits: list[int], num_new_tokens: int, lookahead: int) -> None:
        """Give ``seq`` a table that begins with ``hits``."""
        num_hits = len(hits)
        hashes = self._hasher.block_hashes(seq) if self.enable_prefix_caching else []
        table = _Table(seq, hits, hashes, num_hits)
        num_cached = num_hits * self.block_size
        self._extend(seq, table, num_cached + num_new_tokens, lookahead, is_new=True)
        self._tables[seq.seq_id] = table
        seq.num_cached_tokens = num_cached
        self._num_allocations += 1
        self._queried_tokens += seq.num_tokens
        self._queried_blocks += seq.num_tokens // self.block_size
        self._hit_blocks += num_hits

    def _extend(
        self,
        seq: Sequence,
        table: _Table,
        end: int,
        lookahead: int,
        *,
        is_new: bool = False,
    ) -> Copies:
        """Add slots up to ``end`` to ``table``, which has nothing but its hits if it is new."""
        blocks, hits = table.blocks, table.blocks if is_new else ()
        num_missing = self._num_missing(table, end + lookahead)
        last = self._num_cacheable(end)
        copies: Copies = []
        if not is_new:  # else the allocation is the first change, and checks by itself
            shared = self._writes_to_shared_block(table)
            self.pool.check_free(num_missing + shared)
            if shared:
                copies.append(self._copy_on_write(table))
            self._index_filled(seq, table, last)
        first = table.num_cached_blocks
        if last > first:
            hashes = self._hasher.block_hashes(seq)
            previous = blocks[first - 1] if first else None
            blocks += self.pool.allocate(num_missing, hits, hashes, first, last, previous)
            table.num_cached_blocks = last
        else:
            blocks += self.pool.allocate(num_missing, hits)
        table.seq = seq
        seq.num_computed_tokens = end
        return copies

    def _index_filled(self, seq: Sequence, table: _Table, last: int) -> None:
        """Cache the first ``last`` blocks, which are full, as far as ``table`` has them."""
        blocks, first = table.blocks, table.num_cached_blocks
        if filled := blocks[first:last]:
            last = first + len(filled)
            previous = blocks[first - 1] if first else None
            self.pool.cache(filled, self._hasher.block_hashes(seq), first, last, previous)
            table.num_cached_blocks = last

    def _num_cacheable(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` fill and that are to be cached."""
        return num_tokens // self.block_size if self.enable_prefix_caching else 0

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
        needed = -(-seq.num_tokens // self.block_size) - len(hits)
        needed += self.pool.num_revived([*hits, found[0]])
        return found if needed <= self.pool.num_free_blocks else None

    def _mark_as_computed(self, seq: Sequence, table: _Table) -> None:
        """Let parts of the blocks that were filled so far be reused."""
        if not self._partials:
            return
        size, tokens = self.block_size, seq.token_ids
        for position in range(table.num_computed_blocks, table.num_cached_blocks):
            start, end = position * size, (position + 1) * size
            if not seq.extra_keys(start, end):
                parent = table.hashes[position - 1] if position else None
                self._partials.add(table.blocks[position], parent, tokens[start:end].tobytes())
        table.num_computed_blocks = table.num_cached_blocks

    def _copy_on_write(self, table: _Table) -> tuple[int, int]:
        """Replace the shared block that the next token of ``table`` goes into."""
        position = table.num_tokens // self.block_size
        shared = table.blocks[position]
        (table.blocks[position],) = self.pool.allocate(1)
        self.pool.free([shared])
        self._num_copied += 1
        return shared, table.blocks[position]

    def _num_missing(self, table: _Table, num_tokens: int) -> int:
        """Blocks that ``table`` lacks to hold ``num_tokens`` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(table.blocks))

    def _writes_to_shared_block(self, table: _Table) -> bool:
        """Whether the next token of ``table`` goes into a block that another table holds too."""
        position, offset = divmod(table.num_tokens, self.block_size)
        return offset > 0 and self.pool.ref_counts[table.blocks[position]] > 1
