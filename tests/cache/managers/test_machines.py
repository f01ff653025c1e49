"""The managers under random operations, beside models of their content; see manager_machine."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from manager_helpers import CACHING, ONLINE_POLICIES, OWN, state_of
from manager_machine import CachingMachine, Live, Machine, held

from cache import AllocStatus, Group, OutOfBlocks, Sequence
from cache.blocks.events import AllBlocksCleared, BlockRemoved
from cache.blocks.session_hint import SessionHint
from cache.managers.base import FREED


class OwnMachine(Machine):
    """A manager of one's own that takes a block for each ``block_size`` tokens."""

    name = "".join(OWN)


class PagedMachine(Machine):
    name = "paged"

    def make_options(self):
        return {"bytes_per_slot": 3}

    def check(self):
        super().check()
        size, lives = self.size, self.live.values()
        for live in lives:
            filled = [min(size, live.stored - i * size) for i in range(len(live.table))]
            table = list(zip(live.table, filled, strict=True))
            assert self.manager.filled_block_table(live.seq) == table
        unfilled = sum(len(live.table) * size - live.stored for live in lives)
        assert self.manager.fragmented_bytes() == 3 * unfilled


class VLLMv1Machine(CachingMachine):
    """The model keeps the queue of free blocks and, per block, the content of its hash."""

    name = "vllm_v1"

    def make_options(self):
        # One block in each position; lru twice as often, since its queue is predicted exactly.
        self.policy = self.pick([*ONLINE_POLICIES, "lru"])
        self.caching, self.queue_uncached = self.pick([True, True, True, False]), True
        self.cached: dict[int, tuple] = {}  # block -> content of its last token
        self.queue = list(range(self.num_blocks))
        options = {"policy": self.policy, "enable_prefix_caching": self.caching}
        options["hash_algorithm"] = self.pick(["xxh3_128", "sha256"])
        if self.name == "vllm_v1":
            self.queue_uncached = self.pick([True, False])
            window = self.pick([None, self.randint(1, 3 * self.size)])
            options |= {"queue_uncached": self.queue_uncached, "sliding_window": window}
            options["enable_kv_cache_events"] = True
            self.routed: Counter[bytes] = Counter()  # hashes that a reader of the events knows
        return options

    def observe(self, live: Live, taken: list[int]) -> None:
        for block in live.table:
            if block in self.queue and block not in taken:
                self.queue.remove(block)
        if self.policy == "lru":
            assert taken == self.queue[: len(taken)], "not from the front of the queue"
        for block in taken:
            self.queue.remove(block)
            self.counted["evicted_blocks"] += self.cached.pop(block, None) is not None
        self.counted["allocated_blocks"] += len(taken)
        contents = self.full_contents(live.seq, live.stored)
        self.cached.update(zip(live.table, contents, strict=False))
        self.cached.pop(FREED, None)

    def observe_free(self, live: Live) -> None:
        self.observe_given_back(held(live.table))

    def observe_given_back(self, blocks):
        released = [block for block in reversed(blocks) if not self.users(block)]
        if not self.queue_uncached:
            first = [block for block in released if block not in self.cached]
            released = [block for block in released if block in self.cached]
            self.queue[:0] = first
        self.queue += released

    def observe_reset(self) -> None:
        self.cached.clear()  # the queue stays as it is

    def check(self):
        super().check()
        hashes = self.manager.pool.block_hashes
        held = [block for block, key in enumerate(hashes) if key]
        assert held == sorted(self.cached)
        for event in self.manager.take_events() if self.name == "vllm_v1" else ():
            if isinstance(event, AllBlocksCleared):
                self.routed.clear()
            elif isinstance(event, BlockRemoved):
                self.routed.subtract(event.block_hashes)
            else:
                self.routed.update(event.block_hashes)
        assert self.name != "vllm_v1" or +self.routed == Counter(filter(None, hashes))


class NanoVLLMMachine(VLLMv1Machine):
    name = "nano_vllm"

    def __init__(self, random):
        super().__init__(random)
        self.collide = self.pick([True, False])
        if self.collide:
            self.manager._hasher._digest = lambda data: bytes(7) + bytes([sum(data) % 2])

    def expected_hits(self, seq):
        # A collision may cost a hit; a false one is seen by its content.
        return None if self.collide else super().expected_hits(seq)

    def blocks_needed(self, live, end):
        if live.seq.seq_id in self.live and end <= -(-live.stored // self.size) * self.size:
            return 0
        return super().blocks_needed(live, live.seq.num_tokens)  # the blocks of all tokens at once

    def observe(self, live, taken):
        assert not taken or len(live.table) == -(-live.seq.num_tokens // self.size)
        super().observe(live, taken)


class RadixMachine(CachingMachine):
    name = "radix"

    def make_options(self):
        self.caching = self.pick([True, True, True, False])
        self.cached_before: set[tuple] = set()  # the running step
        self.admitted: set[tuple] = set()  # full blocks of the prompt that this step admitted
        return {"policy": self.pick(ONLINE_POLICIES), "enable_prefix_caching": self.caching}

    def nodes(self):
        """All nodes but the root, parents first."""
        return self.manager.tree.check_invariants()

    def cached(self) -> set[tuple]:
        last = self.size - 1
        return {self.device[block, last] for node in self.nodes() for block in node.blocks}

    def contents(self):
        return self.cached_before

    def adopt(self, seq, num_cached, num_device, end):
        super().adopt(seq, num_cached, num_device, end)
        self.admitted = set(self.full_contents(seq, end))

    def observe_free(self, live: Live) -> None:
        cached = self.cached()
        in_tree = {block for node in self.nodes() for block in node.blocks}
        contents = self.full_contents(live.seq, live.stored)
        for block, content in zip(live.table, contents, strict=False):
            if block not in in_tree and self.users(block):
                break  # shared by a fork: the last to be freed inserts it
            assert content in cached, "a full block was lost"

    def check(self):
        super().check()
        cached = set()
        for node in self.nodes():  # parents first
            for i, block in enumerate(node.blocks):
                for offset in range(self.size):
                    *keys, inputs, tokens = self.device[block, offset]
                    assert len(tokens) == (node.depth + i) * self.size + offset + 1
                    position = i * self.size + offset
                    key = node.key[4 * position : 4 * position + 4]
                    assert key == tokens[-1].to_bytes(4, "little")
                content = *keys, inputs, tokens
                assert content not in cached, "the same content twice in the tree"
                cached.add(content)
                before = tokens[: -self.size]
                inputs = tuple(item for item in inputs if item.offset < len(before))
                assert not before or (*keys, inputs, before) in cached
        assert self.admitted <= cached, "full blocks of a prompt are missing in the tree"
        self.cached_before, self.admitted = cached, set()


def next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


class ContiguousMachine(Machine):
    """The model keeps the range of blocks of each sequence and looks for aligned free ranges."""

    name = "contiguous"

    def make_options(self):
        self.runs: dict[int, range] = {}
        self.reserved: dict[int, int] = {}
        self.final: dict[int, int] = {}
        self.reservation = self.pick(["max", "pow2", "oracle"])
        self.knows = self.reservation == "oracle" or self.pick([True, False])
        longest = next_power_of_two(self.num_blocks + 1) // 2 * self.size
        self.max_model_len = self.pick([longest, self.randint(1, longest)])
        options = {"reservation": self.reservation, "max_model_len": self.max_model_len}
        if self.knows:
            options["final_length"] = lambda seq: self.final[seq.seq_id]
        return options

    def new_sequence(self):
        seq = super().new_sequence()
        ahead = self.randint(0, 3 * self.size)
        self.final[seq.seq_id] = min(seq.num_tokens + ahead, self.max_model_len)
        self.longest[seq.seq_id] = self.final[seq.seq_id] if self.knows else self.max_model_len
        return seq

    def to_reserve(self, seq) -> int:
        if self.reservation == "max":
            return self.max_model_len
        if self.reservation == "oracle":
            return self.final[seq.seq_id]
        length = self.final[seq.seq_id] if self.knows else seq.num_tokens
        outputs = next_power_of_two(max(1, length - seq.num_prompt_tokens))
        return min(seq.num_prompt_tokens + outputs, self.max_model_len)

    def run_length(self, slots: int) -> int:
        return next_power_of_two(-(-slots // self.size))

    def fits(self, length: int) -> bool:
        used = {block for run in self.runs.values() for block in run}
        starts = range(0, self.num_blocks - length + 1, length)
        return any(used.isdisjoint(range(start, start + length)) for start in starts)

    def expected_status(self, seq):
        if seq.num_tokens > self.max_model_len:
            return AllocStatus.NEVER
        fits = self.fits(self.run_length(self.to_reserve(seq)))
        return AllocStatus.OK if fits else AllocStatus.LATER

    def attempt(self, live, end, call):
        seq_id = live.seq.seq_id
        if seq_id not in self.live and live.seq.num_tokens > self.max_model_len:
            with pytest.raises(ValueError, match="max_model_len"):
                call()
            return None
        enough = seq_id in self.reserved and end <= self.reserved[seq_id]
        needed = self.run_length(self.to_reserve(live.seq))
        if enough or needed <= len(self.runs.get(seq_id, ())) or self.fits(needed):
            return call()
        before, free = state_of(self.manager), self.manager.num_free_blocks
        with pytest.raises(OutOfBlocks) as failure:
            call()
        error = failure.value
        assert (error.needed, error.free) == (needed, free)
        assert error.longest_run < needed
        assert error.longest_run == 0 or self.fits(error.longest_run)
        assert not self.fits(2 * error.longest_run or 1)
        assert state_of(self.manager) == before, "a failed call has changed something"
        return None

    def granted(self, live, end, copies=()):
        if copies:  # to another run
            sources, targets = zip(*copies, strict=True)
            assert list(sources) == live.table
            assert not {block for run in self.runs.values() for block in run}.intersection(targets)
            self.copies += copies
            live.tables = [list(targets)]
            self.counted["copied_blocks"] += len(copies)
        super().granted(live, end)

    def observe(self, live, taken):
        seq_id, table = live.seq.seq_id, live.table
        assert table == list(range(table[0], table[0] + -(-live.stored // self.size)))
        if live.stored > self.reserved.get(seq_id, 0):
            self.reserved[seq_id] = self.to_reserve(live.seq)
        run = range(table[0], table[0] + self.run_length(self.reserved[seq_id]))
        old = self.runs.pop(seq_id, range(0))
        self.counted["allocated_blocks"] += len(run)
        if old.start == run.start:  # in place
            self.counted["allocated_blocks"] -= len(old)
        assert set(run).isdisjoint(block for other in self.runs.values() for block in other)
        assert run.start % len(run) == 0
        assert run.stop <= self.num_blocks
        self.runs[seq_id] = run

    def observe_free(self, live):
        del self.runs[live.seq.seq_id], self.reserved[live.seq.seq_id]

    def check(self):
        self.manager.check_invariants()
        self.check_sequences()
        used = sum(map(len, self.runs.values()))
        assert self.manager.num_free_blocks == self.num_blocks - used
        usage = self.manager.memory_usage()
        stored = sum(live.stored for live in self.live.values())
        reserved = sum(self.reserved.values())
        assert usage.num_slots == self.num_blocks * self.size
        assert usage.used == stored
        final = sum(self.final[seq_id] for seq_id in self.live) if self.knows else reserved
        assert (usage.reserved, usage.internal) == (final - stored, reserved - final)
        beyond = used * self.size - reserved
        free = usage.num_slots - reserved - beyond
        needed = self.run_length(self.max_model_len)
        fragmented = not self.fits(needed) and free >= needed * self.size
        assert usage.external == beyond + (free if fragmented else 0)
        assert usage.free == (0 if fragmented else free)


class VLLMv0Machine(CachingMachine):
    name = "vllm_v0"

    def make_options(self):
        self.caching = self.pick([True, True, False])
        options = {"enable_prefix_caching": self.caching, "watermark": self.pick([0, 0.01, 0.3])}
        self.ring = self.num_blocks + 1
        if self.caching:
            options["policy"] = self.pick([*ONLINE_POLICIES, *["lru"] * 12])
        elif self.pick([True, False]):
            options["sliding_window"] = self.randint(1, 3 * self.size)
            self.ring = -(-options["sliding_window"] // self.size)
        self.num_cpu_blocks = options["num_cpu_blocks"] = self.pick([0, 3, 20])
        self.watermark_blocks = int(self.num_blocks * options["watermark"])
        self.swapped: dict[int, Live] = {}
        self.cached: dict[int, tuple] = {}  # block -> content of its last token
        self.computed: set[int] = set()
        return options

    def contents(self):
        return {self.cached[block] for block in self.computed}

    def growth(self, live, end):
        """Position, own block and block with that content (or None), of each block to write."""
        contents = dict(enumerate(self.full_contents(live.seq, end)))
        holders = {content: block for block, content in self.cached.items()}
        assert len(holders) == len(self.cached), "two blocks hold the same content"
        first, last = live.stored // self.size, (end - 1) // self.size
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
        self.computed.update(live.table[: live.stored // self.size] if self.caching else ())

    def granted(self, live, end, copies=()):
        self.mark_as_computed(live)
        super().granted(live, end, copies)
        assert len(live.table) == -(-end // self.size)

    def observe(self, live, taken):
        for block in taken:
            self.cached.pop(block, None)
            self.computed.discard(block)
        contents = self.full_contents(live.seq, live.stored)
        self.cached.update(zip(live.table, contents, strict=False))

    def observe_free(self, live):
        self.mark_as_computed(live)

    def status(self, needed):
        needed += self.watermark_blocks
        return super().status(needed, needed)

    def expected_status(self, seq):
        return self.status(min(-(-seq.num_tokens // self.size), self.ring))

    def actions(self):
        swaps = [self.swap_out, self.swap_in] * (3 if self.num_cpu_blocks else 0)
        return super().actions() + [self.step_is_over] * 3 + swaps + [self.free_swapped]

    def step_is_over(self):
        if live := self.any_live():
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
        live.tables = self.tables_of(live.seq)
        assert {dst for _, dst in copies} <= set(live.table)
        for src, dst in copies:
            self.copy(source, src, target, dst)
        return True

    def swap_out(self):
        if live := self.any_live():
            manager, free = self.manager, self.manager.cpu.num_free_blocks
            if possible := manager.can_swap_out(live.seq):
                self.mark_as_computed(live)
                self.swapped[live.seq.seq_id] = self.live.pop(live.seq.seq_id)
            assert self.swap(live, manager.swap_out, free, self.device, self.host) == possible

    def swap_in(self):
        if not self.swapped:
            return
        live = self.swapped[self.pick(sorted(self.swapped))]
        status, free = self.manager.can_swap_in(live.seq), self.manager.num_free_blocks
        assert status == self.status(len(set(live.table)) + 1)
        unused = {block for block in range(self.num_blocks) if not self.users(block)}
        if not self.swap(live, self.manager.swap_in, free, self.host, self.device):
            assert status is not AllocStatus.OK
            return
        found = self.found(Live(live.seq, 0, [[]]), live.stored)
        assert all(live.table[i] == block for i, block in found.items()), "stored twice"
        self.observe(live, unused.intersection(live.table).difference(found.values()))
        self.live[live.seq.seq_id] = self.swapped.pop(live.seq.seq_id)
        self.mark_as_computed(live)

    def free_swapped(self):
        if self.swapped:
            self.manager.free(self.swapped.pop(self.pick(sorted(self.swapped))).seq)

    def check(self):
        super().check()
        used, contents = set(), set()
        for live in self.swapped.values():
            assert self.tables_of(live.seq) == live.tables
            self.check_reads(live, live.stored, self.host)
            used.update(live.table)
            full = self.full_contents(live.seq, live.stored)
            contents.update(zip(live.table, full, strict=False))
        assert self.manager.cpu.num_free_blocks == self.num_cpu_blocks - len(used)
        assert len(contents) == len({content for _, content in contents}), "stored twice"
        flags = self.manager.gpu.computed
        assert {block for block, flag in enumerate(flags) if flag} == self.computed

    def end(self):
        for live in self.swapped.values():
            self.manager.free(live.seq)
        assert self.manager.cpu.num_free_blocks == self.num_cpu_blocks
        super().end()


class TierMachine(Machine):
    """A tier in host memory, with groups of layers, and tokens that the host reads a step later."""

    predicts, num_calls, sizes = False, 8, (1, 2, 3)

    def __init__(self, random):
        super().__init__(random)
        self.manager.clock, self.tier = count().__next__, self.manager.tier
        self.takes_only_new = self.name != "vllm_v0"  # the others do not look for a full block
        self.keys: dict[bytes, list[tuple]] = {}  # (offset, content) of a block with this key

    def make_options(self):
        self.num_blocks, options = self.randint(3, 6), dict(self.options)
        if "groups" in options:
            self.num_blocks, options["retention"] = 3 * self.num_blocks, self.pick([None, 0])
        options["store"], options["inclusive"] = self.pick(STORES)
        policies = ["lru", "arc", "gittins", "lfu", "session_gap", "safeguarded"]
        return options | {"host_blocks": self.randint(1, 30), "host_policy": self.pick(policies)}

    def new_sequence(self):
        seq = super().new_sequence()
        seq.hints = SessionHint(self.randint(0, 3), self.pick([True, False])).numbers
        return seq

    def remember(self, seq: Sequence) -> None:
        """Note what the keys of ``seq`` stand for."""
        for group in range(len(self.manager.groups)):
            for i, key in enumerate(self.tier.hasher.block_hashes(seq, group)):
                slots = self.slots(seq, group, i * self.size, (i + 1) * self.size)
                self.keys[key] = [slot[1:] for slot in slots]

    def observe_free(self, live):
        self.remember(live.seq)

    def observe_reset(self):
        assert not any(self.tier.pool.block_hashes)

    def check(self):
        if self.randint(0, 19):  # it takes long
            self.check_sequences()
        else:
            super().check()
        for live in self.live.values():
            self.remember(live.seq)
        pending = {*self.tier._out, *self.tier._next_out}
        for block, key in enumerate(self.tier.pool.block_hashes):
            if key is not None and block not in pending:
                for offset, content in self.keys[key]:
                    assert self.host[block, offset] == content, "a host block has other content"

    def end(self):
        super().end()
        assert self.tier.pool.num_free_blocks == self.tier.pool.num_blocks


STORES = [("through", True), ("selective", True), ("back", True), ("back", False)]
OPTIONS = {name: {} for name in CACHING} | {
    "vllm_v1 window": {"sliding_window": 4},
    "vllm_v1 groups": {"groups": [Group("window", 3), Group(), Group("window", 6)]},
    "vllm_v1 states": {"groups": [Group(), Group("state"), Group("window", 4)]},
}
MACHINES = {
    "paged": (PagedMachine, 2), "contiguous": (ContiguousMachine, 6), "radix": (RadixMachine, 5),
    "nano_vllm": (NanoVLLMMachine, 5), "vllm_v1": (VLLMv1Machine, 6), "vllm_v0": (VLLMv0Machine, 6),
}  # fmt: skip
"""Machine and number of tests, as a multiple of the profile's examples."""
for name, options in OPTIONS.items():
    names = {"name": name.split()[0], "options": options}
    MACHINES[f"{name} with a tier"] = type("Tiered", (TierMachine,), names), 3
if OWN:
    MACHINES = {OWN[0]: (OwnMachine, 10)}
# Shrinking needs numbers that Hypothesis draws, which takes longer.
RANDOM = st.randoms(use_true_random=Phase.shrink not in settings.default.phases)


@pytest.mark.parametrize("name", MACHINES)
def test_random_calls(name):
    machine_class, factor = MACHINES[name]
    loads = []

    @settings(max_examples=factor * settings.default.max_examples)
    @given(RANDOM)
    def run(random):
        machine = machine_class(random)
        for _ in range(60):
            machine.step()
        machine.end()
        loads.append(machine.counted["loaded_blocks"])

    run()
    assert sum(loads) > 2 * len(loads) or machine_class.predicts
