"""vLLM's first block manager (v0)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from itertools import chain, count

from cache.checks import at_least
from cache.event_log import EventLog
from cache.hashing import HASH_ALGORITHMS, BlockHasher
from cache.managers.base import (
    AllocStatus,
    CacheManager,
    CacheStats,
    Copies,
    UnsupportedByDesign,
    as_policy,
)
from cache.managers.tables import (
    Table,
    check_grew,
    check_holds_no_blocks,
    check_shares_content,
    table_of,
)
from cache.managers.vllm_v0_allocator import BlockAllocator, ContentKey, LRUEvictor
from cache.memory_usage import MemoryUsage, usage_of_tables
from cache.policies.base import EvictionPolicy
from cache.sequence import Sequence

_MIN_DIGEST_SIZE = 16  # bytes: hits are believed without comparing tokens


class _Table(Table):
    """The physical blocks of one sequence, all on the device of ``allocator``."""

    __slots__ = ("allocator", "blocks", "last_accessed", "num_computed_blocks", "num_noted_tokens")

    def __init__(self, seq: Sequence, allocator: BlockAllocator) -> None:
        super().__init__(seq)
        self.allocator = allocator
        self.blocks: list[int] = []  # with a sliding window a ring, logical block i in i % window
        self.num_noted_tokens = 0  # those of them that the keys of the blocks take into account
        self.num_computed_blocks = 0  # leading blocks that are known to be marked as computed
        self.last_accessed = 0.0


_Growth = tuple[int, bytes | None, int | None, int | None]
"""What becomes of one logical block when its sequence grows: its position, its hash if it is full
afterwards, the physical block that the table has for it, and the one that holds this content."""


class VLLMv0(CacheManager):
    """``BlockSpaceManager`` of vLLM 2023-2024 (``block_manager_v1.py`` and ``evictor_v1.py``).

    * The blocks of the GPU and the CPU have an allocator each.  With prefix caching a full block
      is named by its hash and a partly filled one by a placeholder that nothing else has (vLLM
      itself also hashed the partial tail of a prompt); both are handed out fresh first, then by
      the LRU evictor.  Without, free blocks are a stack.
    * A sequence shares every full block whose hash lives, in use or with the evictor.  The block
      is a *computed* hit only once the step that fills it is over: ``mark_blocks_as_computed``
      says so, and so does the next ``append``, ``free`` or ``swap_out`` of the sequence.  Before
      that a sequence with the same prompt shares the block and writes the same K/V to it.  The
      last block of a table is never a hit: a whole cached prompt has that block computed again.
    * *Promotion*: when a token fills a block and another with the resulting hash lives, the
      sequence switches to that one and its own is freed.
    * A shared, partly filled block is copied by the first append to it.
    * ``can_allocate`` keeps ``int(watermark * num_blocks)`` blocks back for running sequences and
      counts hits as if they were to be allocated; ``allocate`` and ``append`` take these too.
    * Sequences swapped out one by one go on sharing blocks, on either device.  Only what the other
      device lacks is copied.
    * With ``sliding_window`` (tokens that a query sees, itself included) a sequence has
      ``ceil(sliding_window / block_size)`` blocks and uses them in turn.  Its block table repeats
      them.  Of the tokens of one step that share a slot only the last may be stored.

    vLLM appends one token a step and swaps groups of samples; here an append may bring several
    tokens, and ``can_append`` is exact where vLLM asks for one free block per sequence.  Copies of
    a swap are to run before any K or V are written, and the swapped sequence has no step pending.

    Options:
        policy: of the GPU's cached blocks without a user; ``"lru"`` is the evictor of the original.
            The CPU's evictor always is.
        num_cpu_blocks: blocks of host memory to swap to.
        watermark: share of the GPU blocks, in [0, 1).
        sliding_window: refused together with prefix caching (UnsupportedByDesign), as any other
            policy is without it.
        event_log: is told what happens to every GPU block.
        clock: time of an allocation or an append; sequences with the same time were scheduled
            together and tie in the evictor.  By default each call has a time of its own.  Tokens
            that needed no call are dated by the next.

    Raises ValueError for values out of range and for a digest below 128 bits (vLLM's own hash had
    64, and tokens are not compared).
    """

    name = "vllm_v0"

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        policy: str | EvictionPolicy = "lru",
        hash_algorithm: str = "xxh3_128",
        enable_prefix_caching: bool = True,
        num_cpu_blocks: int = 0,
        watermark: float = 0.01,
        sliding_window: int | None = None,
        clock: Callable[[], float] | None = None,
        event_log: EventLog | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size)
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark={watermark!r}: needs a share of the blocks in [0, 1)")
        self._hasher = BlockHasher(hash_algorithm, self.block_size)
        if self._hasher.digest_size < _MIN_DIGEST_SIZE:
            strong = [n for n, a in HASH_ALGORITHMS.items() if a.digest_size >= _MIN_DIGEST_SIZE]
            raise ValueError(
                f"hash_algorithm={hash_algorithm!r}: {self.name} does not compare tokens and needs "
                f"a digest of 128 bits or more; choose from {', '.join(strong)}"
            )
        self.enable_prefix_caching = enable_prefix_caching
        self.num_cpu_blocks = at_least(0, "num_cpu_blocks", num_cpu_blocks)
        self.watermark_blocks = int(watermark * self.num_blocks)
        self.sliding_window = sliding_window
        self._window_blocks = self._check_window(sliding_window)
        if enable_prefix_caching:
            evictor = LRUEvictor() if policy == "lru" else as_policy(policy)
            self.gpu = BlockAllocator(self.num_blocks, evictor, event_log)
            self.cpu = BlockAllocator(self.num_cpu_blocks, LRUEvictor())
        elif policy != "lru":
            raise UnsupportedByDesign(self.name, f"a policy ({policy!r}) without prefix caching")
        else:
            self.gpu = BlockAllocator(self.num_blocks, None, event_log)
            self.cpu = BlockAllocator(self.num_cpu_blocks, None)
        self._clock = count(1).__next__ if clock is None else clock
        self._placeholders = count()
        self._tables: dict[Hashable, _Table] = {}
        self._num_allocations = 0
        self._queried_tokens = 0
        self._queried_blocks = 0
        self._hit_blocks = 0
        self._num_copied = 0

    def get_computed_blocks(self, seq: Sequence) -> tuple[list[int], int]:
        blocks: list[int] = []
        for key in self._hashes(seq)[: (seq.num_tokens - 1) // self.block_size]:
            block = self.gpu.find(key)
            if block is None or not self.gpu.computed[block]:
                break
            blocks.append(block)
        return blocks, len(blocks) * self.block_size

    def can_allocate(self, seq: Sequence) -> AllocStatus:
        """OK, LATER or NEVER by the watermark; ``allocate`` may succeed although it is not OK."""
        needed = -(-seq.num_tokens // self.block_size)
        return self._status(self._num_physical(needed))

    def allocate(self, seq: Sequence) -> int:
        check_holds_no_blocks(self._tables, seq)
        hits, num_cached = self.get_computed_blocks(seq)
        table = _Table(seq, self.gpu)
        self._extend(seq, table, seq.num_tokens)
        self._tables[seq.seq_id] = table
        seq.num_cached_tokens = num_cached
        self._num_allocations += 1
        self._queried_tokens += seq.num_tokens
        self._queried_blocks += seq.num_tokens // self.block_size
        self._hit_blocks += len(hits)
        return num_cached

    def append(self, seq: Sequence) -> Copies:
        table = self._table_on(self.gpu, seq)
        check_grew(seq, table.num_tokens)
        return self._extend(seq, table, seq.num_tokens)

    def can_append(self, seq: Sequence) -> bool:
        table = self._table_on(self.gpu, seq)
        plan = self._plan(seq, table, seq.num_tokens)
        return self._num_needed(plan) <= self.gpu.num_free_blocks

    def mark_blocks_as_computed(self, seq: Sequence) -> None:
        """The step that ``seq`` was scheduled for is over: its full blocks are computed hits."""
        table = self._table_on(self.gpu, seq)
        self._note_stored(table)
        self._mark_as_computed(table)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        table = self._table_on(self.gpu, parent)
        check_holds_no_blocks(self._tables, child)
        check_shares_content(parent, child, table.num_tokens)
        self._note_stored(table)
        for block in table.blocks:
            self.gpu.share(block, found=False)
        copy = self._tables[child.seq_id] = _Table(child, self.gpu)
        copy.blocks = table.blocks.copy()
        copy.num_noted_tokens = table.num_tokens
        copy.last_accessed = table.last_accessed
        child.num_cached_tokens = child.num_computed_tokens = table.num_tokens

    def free(self, seq: Sequence) -> None:
        table = table_of(self._tables, seq)
        if table.allocator is self.gpu:
            self._note_stored(table)
        self._mark_as_computed(table)
        table.allocator.release(table.blocks, table.last_accessed)
        del self._tables[seq.seq_id]
        seq.num_cached_tokens = seq.num_computed_tokens = 0

    def block_table(self, seq: Sequence) -> list[int]:
        """Block ids of ``seq`` in the order of its tokens: of CPU blocks while swapped out."""
        table = table_of(self._tables, seq)
        num_blocks = -(-table.num_tokens // self.block_size)
        return [table.blocks[i % len(table.blocks)] for i in range(num_blocks)]

    def can_swap_out(self, seq: Sequence) -> bool:
        """Whether ``swap_out(seq)`` would find enough CPU blocks.  Changes nothing."""
        table = self._table_on(self.gpu, seq)
        return self._num_missing(table, self.cpu) <= self.cpu.num_free_blocks

    def can_swap_in(self, seq: Sequence) -> AllocStatus:
        """Whether ``seq`` should come back: with its blocks and one more, above the watermark.

        NEVER where the watermark makes it so, as in ``can_allocate``; vLLM says LATER for ever.
        """
        return self._status(len(self._table_on(self.cpu, seq).blocks) + 1)

    def swap_out(self, seq: Sequence) -> Copies:
        table = self._table_on(self.gpu, seq)
        self.cpu.check_free(self._num_missing(table, self.cpu))
        self._note_stored(table)
        self._mark_as_computed(table)
        return self._move(table, self.cpu)

    def swap_in(self, seq: Sequence) -> Copies:
        table = self._table_on(self.cpu, seq)
        self.gpu.check_free(self._num_missing(table, self.gpu))
        return self._move(table, self.gpu)

    @property
    def num_free_blocks(self) -> int:
        return self.gpu.num_free_blocks

    @property
    def num_free_cpu_blocks(self) -> int:
        """CPU blocks that a swap could take now."""
        return self.cpu.num_free_blocks

    @property
    def stats(self) -> CacheStats:
        """A snapshot of the counters, which are those of the GPU."""
        return CacheStats(
            num_allocations=self._num_allocations,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_blocks * self.block_size,
            queried_blocks=self._queried_blocks,
            hit_blocks=self._hit_blocks,
            allocated_blocks=self.gpu.num_allocated,
            evicted_blocks=self.gpu.num_evicted,
            copied_blocks=self._num_copied,
        )

    def memory_usage(self) -> MemoryUsage:
        """Of GPU memory."""
        tables = [t for t in self._tables.values() if t.allocator is self.gpu]
        return usage_of_tables(
            self.num_blocks, self.block_size, ((t.blocks, t.num_tokens) for t in tables)
        )

    def check_invariants(self) -> None:
        for allocator in (self.gpu, self.cpu):
            tables = [t for t in self._tables.values() if t.allocator is allocator]
            allocator.check_invariants(Counter(chain.from_iterable(t.blocks for t in tables)))
        for seq_id, table in self._tables.items():
            blocks = table.blocks
            needed = -(-table.num_tokens // self.block_size)
            if len(set(blocks)) != len(blocks) or len(blocks) != self._num_physical(needed):
                raise AssertionError(f"{seq_id!r}: {blocks} for {table.num_tokens} tokens")
            keys = [table.allocator.keys[block] for block in blocks]
            num_full = table.num_tokens // self.block_size
            num_noted = table.num_noted_tokens // self.block_size
            num_hashed = num_noted if self.enable_prefix_caching else 0
            hashed = [isinstance(key, bytes) for key in keys]
            if not table.may_lack(num_full - num_noted, self.block_size) or (
                hashed != [i < num_hashed for i in range(len(blocks))]
            ):
                raise AssertionError(f"{seq_id!r}: {num_full} blocks are full, but keys {keys}")
            computed = [table.allocator.computed[b] for b in blocks[: table.num_computed_blocks]]
            if not all(computed):
                raise AssertionError(f"{seq_id!r}: {computed} computed of its first {blocks}")

    def _note_stored(self, table: _Table) -> None:
        """Take tokens into account that the caller has counted in: they may have filled a block."""
        if table.num_noted_tokens < table.num_tokens:
            self._extend(table.seq, table, table.num_tokens)  # which takes no block

    def _extend(self, seq: Sequence, table: _Table, end: int) -> Copies:
        """Make room in ``table``, a GPU one, for the tokens of ``seq`` up to ``end``."""
        plan = self._plan(seq, table, end)
        self.gpu.check_free(self._num_needed(plan))
        self._mark_as_computed(table)
        hits = [growth for growth in plan if growth[-1] is not None]
        for position, _, own, _ in hits:  # first what makes room, then hits, then new blocks
            if own is not None:
                self.gpu.release([table.blocks.pop()], table.last_accessed, position)
        for *_, found in hits:
            self.gpu.share(found)
        copies: Copies = []
        for position, key, own, found in plan:
            if found is not None:
                table.blocks.append(found)
            elif own is None:
                table.blocks.append(self._take(table, position, key))
            else:
                copies += self._write_to(table, position, key, own)
        table.seq = seq
        table.num_noted_tokens = seq.num_computed_tokens = end
        table.last_accessed = self._clock()
        return copies

    def _plan(self, seq: Sequence, table: _Table, end: int) -> list[_Growth]:
        """The logical blocks that new tokens up to ``end`` go to, each physical one once."""
        first, last = table.num_noted_tokens // self.block_size, (end - 1) // self.block_size
        num_full = end // self.block_size if self.enable_prefix_caching else 0
        hashes, blocks, ring = self._hashes(seq), table.blocks, self._window_blocks
        plan = []
        for position in range(first, last + 1)[:ring]:
            slot = position % ring if ring else position
            own = blocks[slot] if slot < len(blocks) else None
            if position < num_full:
                plan.append((position, hashes[position], own, self.gpu.find(hashes[position])))
            else:
                plan.append((position, None, own, None))
        return plan

    def _num_needed(self, plan: list[_Growth]) -> int:
        """Blocks by which the free ones shrink: negative if a promotion gives one back."""
        ref_counts, needed = self.gpu.ref_counts, 0
        for _, _, own, found in plan:
            if found is not None:
                needed += ref_counts[found] == 0
                needed -= own is not None and ref_counts[own] == 1
            else:
                needed += own is None or ref_counts[own] > 1
        return needed

    def _take(self, table: _Table, position: int, key: bytes | None) -> int:
        """A new block for position ``position`` of ``table``."""
        if key is None:
            return self.gpu.take(next(self._placeholders), None, position)
        return self.gpu.take(key, self._key_before(table, position), position)

    def _write_to(self, table: _Table, position: int, key: bytes | None, own: int) -> Copies:
        """New tokens go to a block that ``table`` has; it is copied first if it is shared."""
        gpu = self.gpu
        if gpu.ref_counts[own] > 1:
            new = self._take(table, position, key)
            table.blocks[table.blocks.index(own)] = new
            gpu.release([own], table.last_accessed, position)
            self._num_copied += 1
            return [(own, new)]
        if key is not None:
            gpu.rename(own, key, self._key_before(table, position), position)
            gpu.computed[own] = (position + 1) * self.block_size <= table.num_tokens
        elif self.cpu.find(gpu.keys[own]) is not None:  # a copy there is another content now
            gpu.rename(own, next(self._placeholders), None, position)
        return []

    def _key_before(self, table: _Table, position: int) -> ContentKey | None:
        return self.gpu.keys[table.blocks[position - 1]] if position else None

    def _move(self, table: _Table, target: BlockAllocator) -> Copies:
        """Give ``table`` blocks of ``target``, which has enough, for those it has."""
        source = table.allocator
        keys = [source.keys[block] for block in table.blocks]
        found = [target.find(key) for key in keys]
        for block in found:
            if block is not None:
                target.share(block)
        copies: Copies = []
        moved: list[int] = []
        for position, (block, key) in enumerate(zip(found, keys, strict=True)):
            if block is None:
                block = target.take(key, keys[position - 1] if position else None, position)
                copies.append((table.blocks[position], block))
            elif isinstance(key, bytes) and not target.computed[block]:
                copies.append((table.blocks[position], block))  # whose own step is not over
            target.computed[block] = isinstance(key, bytes)
            moved.append(block)
        source.release(table.blocks, table.last_accessed)
        table.allocator, table.blocks = target, moved
        return copies

    def _num_missing(self, table: _Table, target: BlockAllocator) -> int:
        """Free blocks of ``target`` that moving ``table`` there takes."""
        found = [target.find(table.allocator.keys[block]) for block in table.blocks]
        return sum(block is None or target.ref_counts[block] == 0 for block in found)

    def _mark_as_computed(self, table: _Table) -> None:
        if self.enable_prefix_caching:
            first, last = table.num_computed_blocks, table.num_noted_tokens // self.block_size
            for block in table.blocks[first:last]:
                table.allocator.computed[block] = 1
            table.num_computed_blocks = last

    def _status(self, needed: int) -> AllocStatus:
        if self.num_blocks - needed < self.watermark_blocks:
            return AllocStatus.NEVER
        if self.gpu.num_free_blocks - needed >= self.watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def _num_physical(self, num_logical: int) -> int:
        return min(num_logical, self._window_blocks or num_logical)

    def _hashes(self, seq: Sequence) -> list[bytes]:
        return self._hasher.block_hashes(seq) if self.enable_prefix_caching else []

    def _table_on(self, device: BlockAllocator, seq: Sequence) -> _Table:
        table = table_of(self._tables, seq)
        if table.allocator is not device:
            place = "is swapped out" if device is self.gpu else "is not swapped out"
            raise ValueError(f"sequence {seq.seq_id!r} {place}")
        return table

    def _check_window(self, sliding_window: int | None) -> int | None:
        """The window in blocks."""
        if sliding_window is None:
            return None
        if self.enable_prefix_caching:
            raise UnsupportedByDesign(self.name, "a sliding_window together with prefix caching")
        return -(-at_least(1, "sliding_window", sliding_window) // self.block_size)
