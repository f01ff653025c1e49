"""vLLM's first block manager (v0)."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, count
from numbers import Real
from typing import Any

from cache.blocks.groups import Group
from cache.blocks.pool import check_free
from cache.blocks.sequence import Sequence
from cache.checks import at_least, callable_or_none, require
from cache.managers.base import (
    MIDDLE,
    AllocStatus,
    CacheManager,
    CacheOptions,
    Copies,
    Hit,
    Table,
    UnsupportedByDesign,
)
from cache.managers.vllm_v0_allocator import BlockAllocator, ContentKey, LRUEvictor
from cache.policies import as_policy


@dataclass(slots=True, eq=False)
class _Table(Table):
    """The physical blocks of one sequence, all on one device.

    With a sliding window they are a ring: logical block i is at index i % window.
    """

    blocks: list[int] = field(default_factory=list)
    num_named_tokens: int = 0  # stored tokens that the block keys include
    num_computed_blocks: int = 0  # leading blocks that are marked as computed
    last_accessed: float = 0.0


_Growth = tuple[int, bytes | None, int | None, int | None]
"""A logical block of a sequence that grows: its position, its hash if it is full afterwards, its
present physical block, and the block that already holds this content."""


class VLLMv0(CacheManager):
    """``BlockSpaceManagerV1`` of vLLM 0.5.4 (``block_manager_v1.py`` and ``evictor_v1.py``).

    * The GPU and the CPU have an allocator each.  With prefix caching the name of a full block is
      its hash, and a partly filled block has a unique placeholder.  Unused blocks are taken first,
      then the LRU evictor's.  Without prefix caching the free blocks are a stack.
    * A sequence shares every full block whose hash is in use or with the evictor.  Such a block is
      a *computed* hit once the step that fills it is over: after ``mark_blocks_as_computed``, or
      from the next ``append``, ``free`` or ``swap_out`` of its sequence on.  Until then a sequence
      with the same prompt shares the block and writes the same K/V to it.  The last block of a
      table is never a hit, so that block of a fully cached prompt is computed again.
    * *Promotion*: when a token fills a block and the resulting hash belongs to another block, the
      sequence switches to that block and frees its own.
    * A shared, partly filled block is copied by the first append to it.
    * ``can_allocate`` keeps ``int(watermark * num_blocks)`` blocks free for running sequences and
      counts hits as new blocks.  ``allocate`` and ``append`` may use all blocks.
    * Sequences that are swapped out one by one keep sharing blocks, on either device.  A swap
      copies only blocks whose content is not there yet.
    * With ``sliding_window`` (tokens that a query sees, itself included) a sequence has
      ``ceil(sliding_window / block_size)`` blocks and uses them in turn.  Its block table repeats
      them.  If several tokens of a step share a slot, only the last may be stored.

    Run the copies of a swap before any K or V is written; the swapped sequence has no step pending.
    docs/deviations.md lists the differences from vLLM.

    Options:
        policy: for the GPU's cached blocks without a user; ``"lru"`` is the original's evictor.
            The CPU always uses that evictor.
        num_cpu_blocks: blocks of host memory to swap to.
        watermark: share of the GPU blocks, in [0, 1).
        sliding_window: refused together with prefix caching (UnsupportedByDesign).  Without prefix
            caching, any ``policy`` but ``"lru"`` is refused.
        clock: returns the time of an allocation or an append.  Sequences with the same time were
            scheduled together and tie in the evictor.  By default each call has its own time.

    Raises ValueError for values out of range.
    """

    name = "vllm_v0"
    own_hash = "xxh3_128"
    can_chunk = False
    can_fork = True
    can_swap = True
    _table_class = _Table

    def __init__(
        self,
        options: CacheOptions,
        *,
        num_cpu_blocks: int = 0,
        watermark: float = 0.01,
        sliding_window: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(options)
        callable_or_none("clock", clock)
        is_share = isinstance(watermark, Real) and 0 <= watermark < 1
        if not is_share:
            raise ValueError(f"watermark={watermark!r}: needs a share of the blocks in [0, 1)")
        self.num_cpu_blocks = at_least(0, "num_cpu_blocks", num_cpu_blocks)
        if num_cpu_blocks and options.host_blocks:
            raise ValueError(
                f"num_cpu_blocks={num_cpu_blocks}: host_blocks={options.host_blocks} keep the "
                "blocks of preempted sequences; give one of them"
            )
        self.watermark_blocks = int(watermark * self.num_blocks)
        self.sliding_window = sliding_window
        self._window_blocks: int | None = None
        caching, policy = self.enable_prefix_caching, options.policy
        if sliding_window is not None:
            if caching:
                feature = "a sliding_window together with prefix caching"
                raise UnsupportedByDesign(self.name, feature)
            window = at_least(1, "sliding_window", sliding_window)
            self._window_blocks = -(-window // self.block_size)
            self.groups = (Group("window", window),)
        if policy != "lru" and not caching:
            raise UnsupportedByDesign(self.name, f"a policy ({policy!r}) without prefix caching")
        evictor = LRUEvictor() if policy == "lru" else as_policy(policy)
        self._policies = (evictor,)
        self._listeners = (evictor.tell,) if "tell" in evictor.hooks else ()
        self.gpu = BlockAllocator(self.num_blocks, evictor, caching)
        self.cpu = BlockAllocator(self.num_cpu_blocks, LRUEvictor(), caching)
        self.gpu.counts = self._counts
        self._numbers = count(1)  # placeholders, and times without a clock
        self._clock: Callable[[], float] = self._numbers.__next__ if clock is None else clock

    def can_allocate(self, seq: Sequence, hit: Hit | None = None) -> AllocStatus:
        """OK, LATER or NEVER by the watermark; ``allocate`` may succeed although it is not OK."""
        return self._status(self._num_blocks_for(seq.num_tokens))

    def mark_blocks_as_computed(self, seq: Sequence) -> None:
        """Mark the full blocks of ``seq`` as computed: its scheduled step is over."""
        table = self._table_on_device(seq)
        with self._change:
            self._name(table)
            self.interruption = MIDDLE
            self._mark_as_computed(table)

    def block_table(self, seq: Sequence) -> list[int]:
        """The block ids of ``seq`` in the order of its tokens; CPU blocks while swapped out."""
        table = self._table_of(seq)
        num_blocks = -(-table.seq.num_computed_tokens // self.block_size)
        return [table.blocks[i % len(table.blocks)] for i in range(num_blocks)]

    def swap_out(self, seq: Sequence) -> Copies:
        """Move ``seq`` to host memory; returns the (device block, host block) pairs to copy now.

        Until it is back only ``swap_in``, ``free`` and ``block_table`` (of host blocks) accept
        ``seq``.  Raises OutOfBlocks.
        """
        return self._swap(self._table_on_device(seq))

    def swap_in(self, seq: Sequence) -> Copies:
        """Move ``seq`` back; returns the (host block, device block) pairs to copy now.

        Raises OutOfBlocks.
        """
        return self._swap(self._table_on_host(seq))

    def can_swap_out(self, seq: Sequence) -> bool:
        """Whether ``swap_out(seq)`` would find enough free host blocks.  Changes nothing."""
        return self._num_missing(self._table_on_device(seq)) <= self.cpu.num_free_blocks

    def can_swap_in(self, seq: Sequence) -> AllocStatus:
        """Whether the blocks of ``seq`` and one more are free above the watermark.

        NEVER where the watermark makes that impossible, as in ``can_allocate``.
        """
        return self._status(len(self._table_on_host(seq).blocks) + 1)

    @property
    def num_free_blocks(self) -> int:
        return self.gpu.num_free_blocks

    def check_invariants(self) -> None:
        super().check_invariants()
        for allocator in (self.gpu, self.cpu):
            tables = [t for t in self._tables.values() if self._devices(t)[0] is allocator]
            allocator.check_invariants(Counter(chain.from_iterable(t.blocks for t in tables)))
        for seq_id, table in self._tables.items():
            (allocator, _), blocks = self._devices(table), table.blocks
            noted = table.num_named_tokens
            keys = [allocator.keys[block] for block in blocks]
            num_hashed = noted // self.block_size if self.enable_prefix_caching else 0
            require(
                len(blocks) == self._num_blocks_for(table.seq.num_computed_tokens)
                and [isinstance(key, bytes) for key in keys]
                == [i < num_hashed for i in range(len(blocks))],
                f"{seq_id!r}: blocks {blocks} with keys {keys} for {noted} tokens",
            )
            require(
                all(allocator.computed[block] for block in blocks[: table.num_computed_blocks]),
                f"{seq_id!r}: not all of the first {table.num_computed_blocks} blocks of {blocks} "
                "are computed",
            )

    def _match(self, seq: Sequence, limit: int) -> tuple[list[int], None]:
        blocks: list[int] = []
        find, computed = self.gpu.block_with, self.gpu.computed
        for key in self._hashes(seq)[:limit]:
            block = find(key)
            if block is None or not computed[block]:
                break
            blocks.append(block)
        return blocks, None

    def _extend(self, table: _Table, start: int, end: int) -> Copies:
        plan = self._plan(table, end)
        check_free(self._num_planned(plan), self.gpu.num_free_blocks)
        if not table.blocks:
            self._notify_of_admission(table.seq)
        now = self._clock()
        self.interruption = MIDDLE
        self._mark_as_computed(table)
        for position, _, own, found in plan:  # order: frees, then hits, then new blocks
            if own is not None and found is not None:
                self.gpu.release([table.blocks.pop()], table.last_accessed, position)
                table.seq.table_version += 1
        for *_, found in plan:
            if found is not None:
                self.gpu.share(found)
        copies: Copies = []
        for position, key, own, found in plan:
            if found is not None:
                table.blocks.append(found)
            elif own is None:
                table.blocks.append(self._take(table, position, key))
            else:
                copies += self._write_to(table, position, key, own)
        table.last_accessed = now
        known = len(table.seq.token_ids) - table.seq.num_unknown_tokens
        table.num_named_tokens = min(end, known)
        return copies

    def _notify_of_admission(self, seq: Sequence) -> None:
        super()._notify_of_admission(seq)
        evictor = self.gpu.evictor
        if self.enable_prefix_caching and "look_up" in evictor.hooks:
            evictor.look_up(self._hashes(seq)[: self._max_hits(seq)])

    def _name(self, table: _Table) -> None:
        """Name blocks by tokens that were unknown when they got their slots."""
        stored = table.seq.num_computed_tokens
        if table.num_named_tokens < stored:
            self._extend(table, stored, stored)  # takes no block

    def _num_needed(self, table: _Table, end: int) -> int:
        return self._num_planned(self._plan(table, end))

    def _share(self, table: _Table, copy: _Table) -> None:
        self._name(table)
        copy.num_named_tokens = table.num_named_tokens
        for block in table.blocks:
            self.gpu.share(block)
        copy.blocks = table.blocks.copy()
        copy.last_accessed = table.last_accessed

    def _release(self, table: _Table) -> None:
        self._name(table)
        self._mark_as_computed(table)
        self._devices(table)[0].release(table.blocks, table.last_accessed)

    def _num_blocks_for(self, num_slots: int) -> int:
        num_logical = -(-num_slots // self.block_size)
        return min(num_logical, self._window_blocks or num_logical)

    def _table_on_host(self, seq: Sequence) -> _Table:
        table = self._table_of(seq)
        if not table.is_swapped_out:
            raise ValueError(f"sequence {seq.seq_id!r} is not swapped out")
        return table

    def _devices(self, table: _Table) -> tuple[BlockAllocator, BlockAllocator]:
        """The device that holds ``table``, and the device to which a swap would move it."""
        return (self.cpu, self.gpu) if table.is_swapped_out else (self.gpu, self.cpu)

    def _plan(self, table: _Table, end: int) -> list[_Growth]:
        """The logical blocks for the new tokens before ``end``, each physical block once."""
        first, last = table.num_named_tokens // self.block_size, (end - 1) // self.block_size
        hashes, blocks, ring = self._hashes(table.seq), table.blocks, self._window_blocks
        num_full = min(end // self.block_size, len(hashes))
        plan: list[_Growth] = []
        find = self.gpu.block_with
        for position in range(first, last + 1)[:ring]:
            slot = position % ring if ring else position
            own = blocks[slot] if slot < len(blocks) else None
            if position < num_full:
                plan.append((position, hashes[position], own, find(hashes[position])))
            else:
                plan.append((position, None, own, None))
        return plan

    def _num_planned(self, plan: list[_Growth]) -> int:
        """Free blocks that ``plan`` takes; negative if a promotion gives one back."""
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
            return self.gpu.take(next(self._numbers), None, position)
        return self.gpu.take(key, self._key_before(table, position), position)

    def _write_to(self, table: _Table, position: int, key: bytes | None, own: int) -> Copies:
        """Prepare block ``own`` of ``table`` for new tokens; a shared one is copied."""
        gpu = self.gpu
        if gpu.ref_counts[own] > 1:
            new = self._take(table, position, key)
            table.blocks[table.blocks.index(own)] = new
            gpu.release([own], table.last_accessed, position)
            self._counts["copied_blocks"] += 1
            return [(own, new)]
        if key is not None:
            gpu.rename(own, key, self._key_before(table, position), position)
            gpu.computed[own] = (position + 1) * self.block_size <= table.seq.num_computed_tokens
        elif self.cpu.block_with(gpu.keys[own]) is not None:  # its CPU copy will differ from now on
            gpu.rename(own, next(self._numbers), None, position)
        return []

    def _key_before(self, table: _Table, position: int) -> ContentKey | None:
        return self.gpu.keys[table.blocks[position - 1]] if position else None

    def _num_missing(self, table: _Table) -> int:
        """Free blocks of the target device that a swap of ``table`` takes."""
        source, target = self._devices(table)
        found = [target.block_with(source.keys[block]) for block in table.blocks]
        return sum(block is None or target.ref_counts[block] == 0 for block in found)

    def _swap(self, table: _Table) -> Copies:
        """Replace the blocks of ``table`` by blocks of the target device."""
        source, target = self._devices(table)
        check_free(self._num_missing(table), target.num_free_blocks)
        with self._change:
            self._name(table)
            self.interruption = MIDDLE
            self._mark_as_computed(table)
            keys: list[Any] = [source.keys[block] for block in table.blocks]
            found = [target.block_with(key) for key in keys]
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
                    copies.append((table.blocks[position], block))  # its own step is not over
                target.computed[block] = isinstance(key, bytes)
                moved.append(block)
            source.release(table.blocks, table.last_accessed)
            table.blocks, table.is_swapped_out = moved, target is self.cpu
            self._version += 1
            table.seq.table_version += 1
        return copies

    def _mark_as_computed(self, table: _Table) -> None:
        if self.enable_prefix_caching:
            first, last = table.num_computed_blocks, table.num_named_tokens // self.block_size
            computed = self._devices(table)[0].computed
            for block in table.blocks[first:last]:
                computed[block] = 1
            table.num_computed_blocks = last

    def _status(self, needed: int) -> AllocStatus:
        self._check_usable()
        if self.num_blocks - needed < self.watermark_blocks:
            return AllocStatus.NEVER
        if self.gpu.num_free_blocks - needed >= self.watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def _hashes(self, seq: Sequence) -> list[bytes]:
        return self._hasher.block_hashes(seq) if self.enable_prefix_caching else []
