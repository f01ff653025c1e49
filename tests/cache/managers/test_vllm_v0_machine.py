"""vllm_v0 under random operations, swaps included, against a model of both devices."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from manager_helpers import ONLINE_POLICIES, manager_of, state_of
from manager_machine import CachingMachine, Live

from cache import AllocStatus, OutOfBlocks


class VLLMv0Machine(CachingMachine):
    def make_manager(self, data, num_blocks, block_size):
        self.caching = data.draw(st.sampled_from([True, True, False]), label="caching")
        policy = "lru"
        if self.caching:
            policy = data.draw(st.sampled_from([*ONLINE_POLICIES, *["lru"] * 12]))
        else:
            self.window = data.draw(st.none() | st.integers(1, 3 * block_size), label="window")
        self.ring = -(-self.window // block_size) if self.window else num_blocks + 1
        self.num_cpu_blocks = data.draw(st.sampled_from([0, 3, 20]), label="num_cpu_blocks")
        watermark = data.draw(st.sampled_from([0, 0.01, 0.3]), label="watermark")
        self.watermark_blocks = int(num_blocks * watermark)
        self.swapped: dict[int, Live] = {}
        self.host_slots: dict[tuple[int, int], tuple] = {}
        self.cached: dict[int, tuple] = {}  # block -> content of its last token
        self.computed: set[int] = set()
        return manager_of(
            "vllm_v0",
            num_blocks,
            block_size,
            policy=policy,
            enable_prefix_caching=self.caching,
            num_cpu_blocks=self.num_cpu_blocks,
            watermark=watermark,
            sliding_window=self.window,
        )

    def contents(self):
        return {self.cached[block] for block in self.computed}

    def growth(self, live, end):
        """Position, own block and block with that content (or None), of each block to write."""
        contents = dict(enumerate(self.full_contents(live.seq, end)))
        holders = {content: block for block, content in self.cached.items()}
        assert len(holders) == len(self.cached), "two blocks hold the same content"
        first, last = live.stored // self.block_size, (end - 1) // self.block_size
        for position in range(first, min(last + 1, first + self.ring)):
            slot = position % self.ring
            own = live.table[slot] if slot < len(live.table) else None
            yield position, own, holders.get(contents.get(position))

    def found(self, live, end):
        growth = self.growth(live, end)
        return {position: holder for position, _, holder in growth if holder is not None}

    def behind_window(self, live):
        return []  # its blocks are written again

    def blocks_needed(self, live, end):
        needed = 0
        for _, own, holder in self.growth(live, end):
            if holder is not None:
                needed += self.users(holder) == 0
                needed -= own is not None and self.users(own) == 1
            else:
                needed += own is None or self.users(own) > 1
        return needed

    def mark_as_computed(self, live):
        self.computed.update(live.table[: live.stored // self.block_size] if self.caching else ())

    def write(self, live, end, copies=()):
        self.mark_as_computed(live)
        super().write(live, end, copies)
        assert len(live.table) == -(-end // self.block_size)

    def observe(self, live, taken):
        for block in taken:
            self.cached.pop(block, None)
            self.computed.discard(block)
        contents = self.full_contents(live.seq, live.stored)
        self.cached.update(zip(live.table, contents, strict=False))

    def observe_free(self, live):
        self.mark_as_computed(live)

    def status(self, needed):
        if self.num_blocks - needed < self.watermark_blocks:
            return AllocStatus.NEVER
        enough = self.num_free - needed >= self.watermark_blocks
        return AllocStatus.OK if enough else AllocStatus.LATER

    def expected_status(self, seq):
        return self.status(min(-(-seq.num_tokens // self.block_size), self.ring))

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def step_is_over(self, data):
        live = self.pick(data)
        self.manager.mark_blocks_as_computed(live.seq)
        self.mark_as_computed(live)

    def swap(self, live, call, num_free, source, target):
        """Move ``live`` between devices; False, after checking why, if it raises."""
        before = state_of(self.manager)
        try:
            copies = call(live.seq)
        except OutOfBlocks as error:
            assert error.free == num_free < error.needed <= len(set(live.table))  # noqa: PT017
            assert state_of(self.manager) == before
            return False
        assert {src for src, _ in copies} <= set(live.table)
        live.table = self.manager.block_table(live.seq)
        assert {dst for _, dst in copies} <= set(live.table)
        for src, dst in copies:
            self.copy(source, src, target, dst)
        return True

    @rule(data=st.data())
    @precondition(lambda self: self.live and self.num_cpu_blocks)
    def swap_out(self, data):
        live = self.pick(data)
        possible, free = self.manager.can_swap_out(live.seq), self.manager.cpu.num_free_blocks
        if possible:
            self.mark_as_computed(live)
            del self.live[live.seq.seq_id]
            self.swapped[live.seq.seq_id] = live
        call = self.manager.swap_out
        assert self.swap(live, call, free, self.slots, self.host_slots) == possible

    def pick_swapped(self, data) -> Live:
        return self.swapped[data.draw(st.sampled_from(sorted(self.swapped)), label="swapped")]

    @rule(data=st.data())
    @precondition(lambda self: self.swapped)
    def swap_in(self, data):
        live = self.pick_swapped(data)
        status, free = self.manager.can_swap_in(live.seq), self.num_free
        assert status == self.status(len(set(live.table)) + 1)
        unused = {block for block in range(self.num_blocks) if not self.users(block)}
        if not self.swap(live, self.manager.swap_in, free, self.host_slots, self.slots):
            assert status is not AllocStatus.OK
            return
        found = self.found(Live(live.seq, 0, []), live.stored)
        assert all(live.table[i] == block for i, block in found.items()), "stored twice"
        self.observe(live, unused.intersection(live.table).difference(found.values()))
        self.live[live.seq.seq_id] = self.swapped.pop(live.seq.seq_id)
        self.mark_as_computed(live)

    @rule(data=st.data())
    @precondition(lambda self: self.swapped)
    def free_swapped(self, data):
        live = self.pick_swapped(data)
        self.manager.free(self.swapped.pop(live.seq.seq_id).seq)

    @invariant()
    def swapped_tokens_are_unchanged(self):
        for live in self.swapped.values():
            self.check_stored(live, self.host_slots)

    @invariant()
    def host_blocks_add_up(self):
        used = {block for live in self.swapped.values() for block in live.table}
        assert self.manager.cpu.num_free_blocks == self.num_cpu_blocks - len(used)
        contents = set()
        for live in self.swapped.values():
            contents |= set(zip(live.table, self.full_contents(live.seq, live.stored)))  # noqa: B905
        assert len(contents) == len({content for _, content in contents}), "stored twice"

    @invariant()
    def computed_blocks_are_those_of_the_model(self):
        flags = self.manager.gpu.computed
        assert {block for block, flag in enumerate(flags) if flag} == self.computed

    def teardown(self):
        if hasattr(self, "manager"):
            for live in self.swapped.values():
                self.manager.free(live.seq)
            assert self.manager.cpu.num_free_blocks == self.num_cpu_blocks
        super().teardown()


VLLMv0Machine.TestCase.settings = settings(
    max_examples=4 * settings.default.max_examples, stateful_step_count=40
)
TestVLLMv0Machine = VLLMv0Machine.TestCase
