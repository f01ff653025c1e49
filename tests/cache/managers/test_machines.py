"""The managers under random operations, beside models of their content; see manager_machine."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant
from manager_helpers import ONLINE_POLICIES, OWN, manager_of, state_of
from manager_machine import CachingMachine, Live, ManagerMachine, held

from cache import AllocStatus, OutOfBlocks
from cache.blocks.events import AllBlocksCleared, BlockRemoved
from cache.managers.base import FREED


class OwnMachine(ManagerMachine):
    """A manager of one's own that takes a block for each ``block_size`` tokens."""

    def make_manager(self, data, num_blocks, block_size):
        return manager_of(OWN[0], num_blocks, block_size)

    def expected_hits(self, seq):
        return None


class PagedMachine(ManagerMachine):
    def make_manager(self, data, num_blocks, block_size):
        return manager_of("paged", num_blocks, block_size, bytes_per_slot=3)

    @invariant()
    def filled_slots_are_counted(self):
        size, lives = self.block_size, self.live.values()
        for live in lives:
            filled = [min(size, live.stored - i * size) for i in range(len(live.table))]
            table = list(zip(live.table, filled, strict=True))
            assert self.manager.filled_block_table(live.seq) == table
        unfilled = sum(len(live.table) * size - live.stored for live in lives)
        assert self.manager.fragmented_bytes() == 3 * unfilled


class VLLMv1Machine(CachingMachine):
    """The model keeps the queue of free blocks and, per block, the content of its hash."""

    name = "vllm_v1"

    def make_manager(self, data, num_blocks, block_size):
        # One block in each position; lru twice as often, since its queue is predicted exactly.
        self.policy = data.draw(st.sampled_from([*ONLINE_POLICIES, "lru"]), label="policy")
        self.caching = data.draw(st.sampled_from([True, True, True, False]), label="caching")
        self.collide = self.name == "nano_vllm" and data.draw(st.booleans(), label="collide")
        self.cached: dict[int, tuple] = {}  # block -> content of its last token
        self.queue = list(range(num_blocks))
        options = {"policy": self.policy, "enable_prefix_caching": self.caching}
        options["hash_algorithm"] = data.draw(st.sampled_from(["xxh3_128", "sha256"]))
        self.queue_uncached = self.name == "nano_vllm"
        if self.name == "vllm_v1":
            self.queue_uncached = data.draw(st.booleans(), label="queue_uncached")
            self.window = data.draw(st.none() | st.integers(1, 3 * block_size), label="window")
            options |= {"queue_uncached": self.queue_uncached, "sliding_window": self.window}
            options["enable_kv_cache_events"] = True
            self.routed: Counter[bytes] = Counter()  # hashes that a reader of the events knows
        self.order_known = self.policy == "lru"
        manager = manager_of(self.name, num_blocks, block_size, **options)
        if self.collide:
            manager._hasher._digest = lambda data: bytes(7) + bytes([sum(data) % 2])
        return manager

    def contents(self):
        return set(self.cached.values())

    def expected_hits(self, seq):
        # A collision may cost a hit; a false one is seen by its content.
        return None if self.collide else super().expected_hits(seq)

    def blocks_needed(self, live, end):
        if self.name == "nano_vllm":
            if (
                live.seq.seq_id in self.live
                and end <= -(-live.stored // self.block_size) * self.block_size
            ):
                return 0
            end = live.seq.num_tokens  # the blocks of all tokens at once
        return super().blocks_needed(live, end)

    def observe(self, live: Live, taken: list[int]) -> None:
        if self.name == "nano_vllm" and taken:
            assert len(live.table) == -(-live.seq.num_tokens // self.block_size)
        for block in live.table:
            if block in self.queue and block not in taken:
                self.queue.remove(block)
        if self.order_known:
            assert taken == self.queue[: len(taken)], "not from the front of the queue"
        for block in taken:
            self.queue.remove(block)
            self.counted["evicted_blocks"] += self.cached.pop(block, None) is not None
        self.counted["allocated_blocks"] += len(taken)
        for block, content in zip(
            live.table, self.full_contents(live.seq, live.stored), strict=False
        ):
            if block != FREED:
                self.cached[block] = content

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

    @invariant()
    def the_pool_holds_what_the_model_does(self):
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
        users = Counter(block for live in self.live.values() for block in live.table)
        assert self.manager.pool.ref_counts == [users[b] for b in range(self.num_blocks)]


class NanoVLLMMachine(VLLMv1Machine):
    name = "nano_vllm"


class RadixMachine(CachingMachine):
    def make_manager(self, data, num_blocks, block_size):
        self.caching = data.draw(st.sampled_from([True, True, True, False]), label="caching")
        self.cached_before: set[tuple] = set()  # the running step
        options = {"policy": data.draw(st.sampled_from(ONLINE_POLICIES), label="policy")}
        options["enable_prefix_caching"] = self.caching
        return manager_of("radix", num_blocks, block_size, **options)

    def nodes(self):
        """All nodes but the root, parents first."""
        return self.manager.tree.check_invariants()

    def cached(self) -> set[tuple]:
        last = self.block_size - 1
        return {self.slots[block, last] for node in self.nodes() for block in node.blocks}

    def contents(self):
        return self.cached_before

    def adopt(self, seq, num_cached, end, table):
        super().adopt(seq, num_cached, end, table)
        contents = set(self.full_contents(seq, end))
        assert contents <= self.cached(), "full blocks of a prompt are missing in the tree"

    def observe_free(self, live: Live) -> None:
        cached = self.cached()
        in_tree = {block for node in self.nodes() for block in node.blocks}
        contents = self.full_contents(live.seq, live.stored)
        for block, content in zip(live.table, contents, strict=False):
            if block not in in_tree and self.users(block):
                break  # shared by a fork: the last to be freed inserts it
            assert content in cached, "a full block was lost"

    @invariant()
    def the_tree_holds_what_its_paths_say(self):
        cached = set()
        for node in self.nodes():  # parents first
            for i, block in enumerate(node.blocks):
                for offset in range(self.block_size):
                    lora, salt, inputs, tokens = self.slots[block, offset]
                    assert len(tokens) == (node.depth + i) * self.block_size + offset + 1
                    position = i * self.block_size + offset
                    assert node.key[4 * position : 4 * position + 4] == tokens[-1].to_bytes(
                        4, "little"
                    )
                content = lora, salt, inputs, tokens
                assert content not in cached, "the same content twice in the tree"
                cached.add(content)
                before = tokens[: -self.block_size]
                inputs = tuple(item for item in inputs if item.offset < len(before))
                assert not before or (lora, salt, inputs, before) in cached
        self.cached_before = cached


def next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


class ContiguousMachine(ManagerMachine):
    """The model keeps the range of blocks of each sequence and looks for aligned free ranges."""

    def make_manager(self, data, num_blocks, block_size):
        self.runs: dict[int, range] = {}
        self.reserved: dict[int, int] = {}
        self.final: dict[int, int] = {}
        self.reservation = data.draw(st.sampled_from(["max", "pow2", "oracle"]))
        self.knows = self.reservation == "oracle" or data.draw(st.booleans(), label="knows")
        longest = next_power_of_two(num_blocks + 1) // 2 * block_size
        self.max_model_len = data.draw(st.just(longest) | st.integers(1, longest), label="longest")
        options = {"reservation": self.reservation, "max_model_len": self.max_model_len}
        if self.knows:
            options["final_length"] = lambda seq: self.final[seq.seq_id]
        return manager_of("contiguous", num_blocks, block_size, **options)

    def new_sequence(self, data):
        seq = super().new_sequence(data)
        ahead = data.draw(st.integers(0, 3 * self.block_size), label="tokens to come")
        self.final[seq.seq_id] = min(seq.num_tokens + ahead, self.max_model_len)
        return seq

    def limit(self, seq) -> int:
        return self.final[seq.seq_id] if self.knows else self.max_model_len

    def to_reserve(self, seq) -> int:
        if self.reservation == "max":
            return self.max_model_len
        if self.reservation == "oracle":
            return self.final[seq.seq_id]
        length = self.final[seq.seq_id] if self.knows else seq.num_tokens
        outputs = next_power_of_two(max(1, length - seq.num_prompt_tokens))
        return min(seq.num_prompt_tokens + outputs, self.max_model_len)

    def run_length(self, slots: int) -> int:
        return next_power_of_two(-(-slots // self.block_size))

    def fits(self, length: int) -> bool:
        used = {block for run in self.runs.values() for block in run}
        starts = range(0, self.num_blocks - length + 1, length)
        return any(used.isdisjoint(range(start, start + length)) for start in starts)

    def tokens_to_come(self, seq):
        return self.limit(seq) - seq.num_tokens

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
        before, free = state_of(self.manager), self.num_free
        with pytest.raises(OutOfBlocks) as failure:
            call()
        error = failure.value
        assert (error.needed, error.free) == (needed, free)
        assert error.longest_run < needed
        assert error.longest_run == 0 or self.fits(error.longest_run)
        assert not self.fits(2 * error.longest_run or 1)
        assert state_of(self.manager) == before, "a failed call has changed something"
        return None

    def write(self, live, end, copies=()):
        if copies:  # to another run
            sources, targets = zip(*copies, strict=True)
            assert list(sources) == live.table
            assert not {block for run in self.runs.values() for block in run}.intersection(targets)
            for source, target in copies:
                self.copy(self.slots, source, self.slots, target)
            live.table = list(targets)
            self.counted["copied_blocks"] += len(copies)
        super().write(live, end)

    def observe(self, live, taken):
        seq_id, table = live.seq.seq_id, live.table
        assert table == list(range(table[0], table[0] + -(-live.stored // self.block_size)))
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

    @invariant()
    def blocks_add_up(self):
        used = sum(map(len, self.runs.values()))
        assert self.manager.num_free_blocks == self.num_blocks - used

    @invariant()
    def memory_adds_up(self):
        usage = self.manager.memory_usage()
        stored = sum(live.stored for live in self.live.values())
        reserved = sum(self.reserved.values())
        assert usage.num_slots == self.num_blocks * self.block_size
        assert usage.used == stored
        final = sum(self.final[seq_id] for seq_id in self.live) if self.knows else reserved
        assert (usage.reserved, usage.internal) == (final - stored, reserved - final)
        beyond = sum(map(len, self.runs.values())) * self.block_size - reserved
        free = usage.num_slots - reserved - beyond
        needed = self.run_length(self.max_model_len)
        fragmented = not self.fits(needed) and free >= needed * self.block_size
        assert usage.external == beyond + (free if fragmented else 0)
        assert usage.free == (0 if fragmented else free)


# Tests per machine, as a multiple of the profile's examples.
for machine, factor in (
    (OwnMachine, 10), (PagedMachine, 2), (ContiguousMachine, 4), (NanoVLLMMachine, 4),
    (VLLMv1Machine, 6), (RadixMachine, 4),
):  # fmt: skip
    machine.TestCase.settings = settings(
        max_examples=factor * settings.default.max_examples, stateful_step_count=40
    )

if OWN:
    TestOwn = OwnMachine.TestCase
TestPaged = PagedMachine.TestCase
TestContiguous = ContiguousMachine.TestCase
TestNanoVLLM = NanoVLLMMachine.TestCase
TestVLLMv1 = VLLMv1Machine.TestCase
TestRadix = RadixMachine.TestCase
