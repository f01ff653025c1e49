"""vllm_v0 under random operations, swaps included, against a model of both devices."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from manager_helpers import ONLINE_POLICIES, manager_of, state_of
from manager_machine import Live, ManagerMachine

from cache import AllocStatus, OutOfBlocks


class VLLMv0Machine(ManagerMachine):
    def make_manager(self, data, num_blocks, block_size):
        self.caching = data.draw(st.sampled_from([True, True, False]), label="caching")
        self.policy, window = "lru", None
        if self.caching:
            self.policy = data.draw(st.sampled_from([*ONLINE_POLICIES, *["lru"] * 12]))
        else:
            window = data.draw(st.none() | st.integers(1, 3 * block_size), label="window")
        self.num_seen = window or math.inf  # tokens that a query sees
        self.ring = -(-window // block_size) if window else num_blocks + 1
        self.num_cpu_blocks = data.draw(st.sampled_from([0, 3, 20]), label="num_cpu_blocks")
        watermark = data.draw(st.sampled_from([0, 0.01, 0.3]), label="watermark")
        self.watermark_blocks = int(num_blocks * watermark)
        self.step = 0
        self.last_step: dict[int, int] = {}  # of each sequence
        self.swapped: dict[int, Live] = {}
        self.host_slots: dict[tuple[int, int], tuple] = {}
        self.cached: dict[int, tuple] = {}  # block -> content of its last token
        self.computed: set[int] = set()
        # Free blocks with what the evictor sorts them by, or in the order of the stack.
        self.free_blocks = {block: (-1, 0, block) for block in range(num_blocks)}
        self.last_accessed = [-1] * num_blocks
        self.num_released = num_blocks
        return manager_of(
            "vllm_v0",
            num_blocks,
            block_size,
            policy=self.policy,
            enable_prefix_caching=self.caching,
            num_cpu_blocks=self.num_cpu_blocks,
            watermark=watermark,
            sliding_window=window,
            event_log=self.draw_log(data),
            clock=lambda: self.step,
        )

    def full_content(self, seq, position, end):
        """Content of the logical block if it is full, else None."""
        last = (position + 1) * self.block_size - 1
        return self.content(seq, last) if self.caching and last < end else None

    def holder(self, content):
        """The block that holds the full content."""
        found = [block for block, held in self.cached.items() if held == content]
        assert len(found) < 2, "two blocks hold the same content"
        return found[0] if found and content is not None else None

    def others(self, block, live):
        return sum(block in other.table for other in self.live.values() if other is not live)

    def growth(self, live, end, stored=None):
        """(logical block, its own block or None, the block that holds its content or None)."""
        stored = live.stored if stored is None else stored
        first, last = stored // self.block_size, (end - 1) // self.block_size
        for position in range(first, min(last + 1, first + self.ring)):
            slot = position % self.ring
            own = live.table[slot] if slot < len(live.table) else None
            yield position, own, self.holder(self.full_content(live.seq, position, end))

    def expected_hits(self, seq):
        hits = 0
        while hits + self.block_size < seq.num_tokens:
            content = self.full_content(seq, hits // self.block_size, seq.num_tokens)
            if self.holder(content) not in self.computed:
                break
            hits += self.block_size
        return hits

    def blocks_needed(self, live, end):
        if live.seq.seq_id not in self.live:
            live = Live(live.seq, 0, [])
        needed = 0
        for _, own, holder in self.growth(live, end):
            if holder is not None:
                needed += holder in self.free_blocks
                needed -= own is not None and not self.others(own, live)
            else:
                needed += own is None or self.others(own, live) > 0
        return needed

    def release(self, block, depth, step):
        """Remove a user of ``block``."""
        self.last_accessed[block] = max(self.last_accessed[block], step)
        if any(block in live.table for live in self.live.values()):
            return
        self.num_released += 1
        age = (self.last_accessed[block], -depth) if self.caching else (0, 0)
        self.free_blocks[block] = (*age, self.num_released)
        if block not in self.cached:
            self.computed.discard(block)

    def take(self, taken):
        """Blocks were taken, in this order."""
        ranked = sorted(self.free_blocks, key=self.free_blocks.get)
        if not self.caching:
            ranked.reverse()
        for block in taken:
            assert block in self.free_blocks, f"block {block} was handed out, but is in use"
            if self.policy == "lru":
                assert block == ranked[0], "not the next one of the evictor"
                ranked.pop(0)
            del self.free_blocks[block]
            self.cached.pop(block, None)
            self.computed.discard(block)
            self.last_accessed[block] = -1
            for offset in range(self.block_size):
                self.slots.pop((block, offset), None)

    def mark_as_computed(self, live):
        self.computed.update(live.table[: live.stored // self.block_size] if self.caching else ())

    def write(self, live, end, copies=()):
        is_new = live.seq.seq_id not in self.last_step
        if is_new:  # hits are shared in the same way as blocks that are not computed yet
            live.table = []
        self.mark_as_computed(live)
        stored = 0 if is_new else live.stored
        plan = list(self.growth(live, end, stored))
        table = self.manager.block_table(live.seq)
        live.table = []  # a block freed by a promotion may be taken again at once
        assert len(table) == -(-end // self.block_size)
        taken, expected_copies = [], []
        for position, own, holder in plan:
            block = table[position]
            if holder is not None:
                assert block == holder, "the block that holds this already is not used"
                if own is not None:
                    self.release(own, position, self.last_step[live.seq.seq_id])
            elif own is None or self.others(own, live):
                taken.append(block)
                expected_copies += [] if own is None else [(own, block)]
            else:
                assert block == own, "not written in place"
        for _, _, holder in plan:
            self.free_blocks.pop(holder, None)
        assert list(copies) == expected_copies
        self.take(taken)
        live.table = table
        for src, dst in copies:
            self.copy(self.slots, src, self.slots, dst)
            self.release(src, 0, self.last_step[live.seq.seq_id])
        for position in range(live.stored, end):
            slot = table[position // self.block_size], position % self.block_size
            content = self.content(live.seq, position)
            if self.others(slot[0], live):
                assert self.slots.get(slot, content) == content, "written while shared"
            self.slots[slot] = content
        for position, own, _ in plan:
            content = self.full_content(live.seq, position, end)
            if content is not None:
                self.cached[table[position]] = content
            stored_before = (position + 1) * self.block_size <= stored
            if stored_before and self.caching and table[position] == own:
                self.computed.add(own)
        live.stored = end
        self.last_step[live.seq.seq_id] = self.step
        assert live.seq.num_computed_tokens == end

    def copy(self, source, src, target, dst):
        for offset in range(self.block_size):
            target.pop((dst, offset), None)
            if (src, offset) in source:
                target[dst, offset] = source[src, offset]

    def release_all(self, live):
        self.mark_as_computed(live)
        for depth in reversed(range(min(len(live.table), self.ring))):
            self.release(live.table[depth], depth, self.last_step[live.seq.seq_id])

    def observe_free(self, live):
        self.release_all(live)
        del self.last_step[live.seq.seq_id]

    def observe_fork(self, parent, child):
        self.last_step[child.seq.seq_id] = self.last_step[parent.seq.seq_id]

    def status(self, needed):
        if self.num_blocks - needed < self.watermark_blocks:
            return AllocStatus.NEVER
        enough = self.manager.num_free_blocks - needed >= self.watermark_blocks
        return AllocStatus.OK if enough else AllocStatus.LATER

    def expected_status(self, seq):
        return self.status(min(-(-seq.num_tokens // self.block_size), self.ring))

    @rule()
    def next_step(self):
        self.step += 1

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def step_is_over(self, data):
        live = self.pick(data)
        self.manager.mark_blocks_as_computed(live.seq)
        self.mark_as_computed(live)

    @rule(data=st.data())
    @precondition(lambda self: self.live and self.num_cpu_blocks)
    def swap_out(self, data):
        live = self.pick(data)
        possible = self.manager.can_swap_out(live.seq)
        free_on_gpu, before = self.manager.num_free_blocks, state_of(self.manager)
        if not possible:
            with pytest.raises(OutOfBlocks) as failure:
                self.manager.swap_out(live.seq)
            assert failure.value.free == self.manager.num_free_cpu_blocks < failure.value.needed
            assert state_of(self.manager) == before
            return
        copies = self.manager.swap_out(live.seq)
        for src, dst in copies:
            assert src in live.table
            self.copy(self.slots, src, self.host_slots, dst)
        del self.live[live.seq.seq_id]
        self.release_all(live)
        assert self.manager.num_free_blocks >= free_on_gpu
        live.table = self.manager.block_table(live.seq)
        self.swapped[live.seq.seq_id] = live

    def missing_on_gpu(self, live):
        """Free GPU blocks that swapping in takes: blocks that no other sequence has there."""
        used = {
            self.manager.gpu.keys[block] for other in self.live.values() for block in other.table
        }
        num_physical = min(len(live.table), self.ring)
        return sum(self.manager.cpu.keys[block] not in used for block in live.table[:num_physical])

    @rule(data=st.data())
    @precondition(lambda self: self.swapped)
    def swap_in(self, data):
        live = self.swapped[data.draw(st.sampled_from(sorted(self.swapped)), label="sequence")]
        host_table = live.table
        num_physical = min(len(host_table), self.ring)
        status = self.manager.can_swap_in(live.seq)
        assert status == self.status(num_physical + 1)
        if self.missing_on_gpu(live) > self.manager.num_free_blocks:
            assert status is not AllocStatus.OK
            before = state_of(self.manager)
            with pytest.raises(OutOfBlocks) as failure:
                self.manager.swap_in(live.seq)
            assert failure.value.needed == self.missing_on_gpu(live)
            assert state_of(self.manager) == before
            return
        copies = self.manager.swap_in(live.seq)
        del self.swapped[live.seq.seq_id]
        live.table = self.manager.block_table(live.seq)
        taken = []
        for position in range(num_physical):
            block = live.table[position]
            holder = self.holder(self.full_content(live.seq, position, live.stored))
            assert holder in (None, block), "the block that holds this already is not used"
            if holder is None and block in self.free_blocks:
                taken.append(block)
        for position in range(num_physical):
            if live.table[position] not in taken:
                self.free_blocks.pop(live.table[position], None)
        self.take(taken)
        assert set(taken) <= {dst for _, dst in copies}
        for src, dst in copies:
            assert src in host_table
            assert dst in taken or (dst in self.cached and dst not in self.computed)
            self.copy(self.host_slots, src, self.slots, dst)
        for position in range(num_physical):
            content = self.full_content(live.seq, position, live.stored)
            if content is not None:
                self.cached[live.table[position]] = content
        self.live[live.seq.seq_id] = live
        self.mark_as_computed(live)

    @rule(data=st.data())
    @precondition(lambda self: self.swapped)
    def free_swapped(self, data):
        key = data.draw(st.sampled_from(sorted(self.swapped)), label="sequence")
        self.manager.free(self.swapped.pop(key).seq)
        del self.last_step[key]

    @invariant()
    def stored_tokens_are_unchanged(self):
        for where, slots in ((self.live, self.slots), (self.swapped, self.host_slots)):
            for live in where.values():
                table = self.manager.block_table(live.seq)
                assert table == live.table
                for position in range(
                    max(0, live.stored - int(min(self.num_seen, 1e9))), live.stored
                ):
                    slot = table[position // self.block_size], position % self.block_size
                    assert slots.get(slot) == self.content(live.seq, position), (live, position)

    @invariant()
    def host_blocks_add_up(self):
        used = {block for live in self.swapped.values() for block in live.table}
        assert used <= set(range(self.num_cpu_blocks))
        assert self.manager.num_free_cpu_blocks == self.num_cpu_blocks - len(used)
        holders: dict[tuple, int] = {}
        for live in self.swapped.values():
            for position in range(live.stored // self.block_size):
                content = self.full_content(live.seq, position, live.stored)
                block = live.table[position]
                assert content is None or holders.setdefault(content, block) == block

    @invariant()
    def computed_blocks_are_those_of_the_model(self):
        flags = self.manager.gpu.computed
        assert {block for block, flag in enumerate(flags) if flag} == self.computed

    def teardown(self):
        if hasattr(self, "manager"):
            for live in self.swapped.values():
                self.manager.free(live.seq)
            assert self.manager.num_free_cpu_blocks == self.num_cpu_blocks
        super().teardown()


VLLMv0Machine.TestCase.settings = settings(
    max_examples=7 * settings.default.max_examples, stateful_step_count=40
)
TestVLLMv0Machine = pytest.mark.slow(VLLMv0Machine.TestCase)
