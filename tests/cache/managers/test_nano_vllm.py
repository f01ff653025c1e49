"""nano_vllm: which block goes where, and the faults that the original has or had."""

from __future__ import annotations

import time
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from manager_machine import ManagerMachine

from cache import AllocStatus, OutOfBlocks, Sequence, UnsupportedByDesign, make_manager
from cache.managers import NanoVLLM
from cache.policies import POLICIES

ONLINE_POLICIES = sorted(name for name, policy in POLICIES.items() if not policy.needs_future)


def manager_of(num_blocks: int = 10, block_size: int = 4, **options) -> NanoVLLM:
    return make_manager("nano_vllm", num_blocks=num_blocks, block_size=block_size, **options)


def grow(manager: NanoVLLM, seq: Sequence, *token_ids: int) -> None:
    for token_id in token_ids:
        seq.append_token(token_id)
        assert manager.append(seq) == []


def free_ids(manager: NanoVLLM) -> list[int]:
    return list(manager.pool.free_blocks())


def with_colliding_hashes(manager: NanoVLLM, values: int = 1) -> NanoVLLM:
    """All blocks share ``values`` hashes."""
    manager._hasher._digest = lambda data: bytes(7) + bytes([sum(data) % values])
    return manager


class NanoVLLMMachine(ManagerMachine):
    """The model keeps the deque of free ids and, per block, the content that it was hashed with."""

    supports_chunks = True
    lookaheads = (0,)

    def make_manager(self, data, num_blocks, block_size):
        self.policy = data.draw(st.sampled_from([*ONLINE_POLICIES, "lru"]), label="policy")
        self.caching = data.draw(st.sampled_from([True, True, True, False]), label="caching")
        self.collide = data.draw(st.sampled_from([False, False, True]), label="collide")
        self.free_ids = deque(range(num_blocks))
        self.hashed: dict[int, tuple] = {}  # block -> content of its last token
        manager = manager_of(
            num_blocks,
            block_size,
            policy=self.policy,
            hash_algorithm=data.draw(st.sampled_from(["xxh64", "sha256"])),
            enable_prefix_caching=self.caching,
        )
        return with_colliding_hashes(manager, 2) if self.collide else manager

    def expected_hits(self, seq):
        if self.collide:
            return None  # a collision may cost a hit; a false one is seen by its content
        found, size = set(self.hashed.values()), self.block_size
        hits = 0
        while hits + size < seq.num_tokens and self.content(seq, hits + size - 1) in found:
            hits += size
        return hits

    def blocks_needed(self, live, end):
        table, needed = live.table, -(-live.seq.num_tokens // self.block_size)
        if live.seq.seq_id not in self.live:
            table, _ = self.manager.get_computed_blocks(live.seq)
            needed += sum(self.users(block) == 0 for block in table)
        return needed - len(table)

    def observe(self, live, taken):
        assert len(live.table) == -(-live.seq.num_tokens // self.block_size)
        for block in live.table:
            if block in self.free_ids and block not in taken:
                self.free_ids.remove(block)
        if self.policy == "lru":
            assert taken == [self.free_ids[i] for i in range(len(taken))]
        for block in taken:
            self.free_ids.remove(block)
            self.hashed.pop(block, None)

    def observe_noted(self, live):
        if self.caching:
            for i in range(live.stored // self.block_size):
                last = (i + 1) * self.block_size - 1
                self.hashed[live.table[i]] = self.content(live.seq, last)

    def observe_free(self, live):
        self.free_ids.extend(b for b in reversed(live.table) if not self.users(b))

    def snapshot(self):
        pool = self.manager.pool
        state = (*pool.ref_counts,), (*pool.block_hashes,), (*pool.free_blocks(),)
        return *super().snapshot(), state

    def teardown(self):
        if hasattr(self, "manager"):
            for live in self.live.values():
                self.manager.free(live.seq)
            self.manager.check_invariants()
            assert self.manager.num_free_blocks == self.num_blocks


NanoVLLMMachine.TestCase.settings = settings(
    max_examples=5 * settings.default.max_examples, stateful_step_count=40
)
TestNanoVLLMMachine = NanoVLLMMachine.TestCase


def test_blocks_go_where_the_original_puts_them():
    manager = manager_of()
    first, second = Sequence(0, range(14)), Sequence(1, [*range(11), 91, 92, 93])
    assert manager.allocate(first) == 0
    assert manager.block_table(first) == [0, 1, 2, 3]
    grow(manager, first, 14, 15, 16)
    assert manager.block_table(first) == [0, 1, 2, 3, 4]
    assert manager.allocate(second) == 8
    assert manager.block_table(second) == [0, 1, 5, 6]
    manager.free(first)
    assert free_ids(manager) == [7, 8, 9, 4, 3, 2]
    manager.free(second)
    assert free_ids(manager) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    third = Sequence(2, [*range(12), *range(50, 67)])
    assert manager.allocate(third) == 12
    assert manager.block_table(third) == [0, 1, 2, 7, 8, 9, 4, 3]
    assert free_ids(manager) == [6, 5]
    stats = manager.stats
    assert (stats.num_allocations, stats.queried_tokens, stats.hit_tokens) == (3, 57, 20)
    assert (stats.queried_blocks, stats.hit_blocks) == (3 + 3 + 7, 5)
    assert (stats.allocated_blocks, stats.evicted_blocks, stats.copied_blocks) == (12, 1, 0)


def test_hashes_are_xxh64_unless_another_is_named():
    assert manager_of()._hasher.algorithm == "xxh64"
    assert manager_of(hash_algorithm="sha256")._hasher.algorithm == "sha256"
    with pytest.raises(ValueError, match=r"hash_algorithm='md5'.*xxh64"):
        manager_of(hash_algorithm="md5")


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_another_block_is_needed_after_each_boundary_only(block_size):
    manager = manager_of(30, block_size)
    seq = Sequence(0, [1])
    manager.allocate(seq)
    for _ in range(20):
        before = manager.num_free_blocks
        grow(manager, seq, 1)
        taken = before - manager.num_free_blocks
        assert taken == (block_size == 1 or seq.num_tokens % block_size == 1)


def test_a_block_is_needed_from_an_exhausted_pool_after_a_boundary_only():
    manager = manager_of(2)
    seq = Sequence(0, range(6))
    manager.allocate(seq)
    grow(manager, seq, 6, 7)
    seq.append_token(8)
    assert not manager.can_append(seq)
    with pytest.raises(OutOfBlocks, match="1 blocks are needed, 0 are free"):
        manager.append(seq)
    assert manager.block_table(seq) == [0, 1]
    assert seq.num_computed_tokens == 8


@pytest.mark.parametrize("length", [4, 8, 9, 12])
def test_a_prompt_that_is_wholly_cached_leaves_a_token_to_compute(length):
    manager = manager_of()
    manager.allocate(Sequence(0, range(length)))
    again = Sequence(1, range(length))
    assert manager.allocate(again) == (length - 1) // 4 * 4 == again.num_cached_tokens
    assert again.num_computed_tokens == length


def test_a_reused_block_loses_its_hash():
    manager = manager_of(2)
    first, other = Sequence(0, range(8)), Sequence(1, range(50, 58))
    manager.allocate(first)
    manager.free(first)
    manager.allocate(other)
    assert manager.get_computed_blocks(Sequence(2, range(9))) == ([], 0)
    manager.free(other)
    assert manager.get_computed_blocks(Sequence(2, range(50, 59)))[1] == 8


def test_a_failed_allocation_leaves_its_hits_in_the_queue():
    manager = manager_of(4)
    first = Sequence(0, range(9))
    manager.allocate(first)
    manager.free(first)
    before = free_ids(manager)
    with pytest.raises(OutOfBlocks, match="5 blocks are needed, 4 are free"):
        manager.allocate(Sequence(1, range(20)))
    assert free_ids(manager) == before
    assert manager.stats.hit_blocks == 0
    manager.check_invariants()


def test_a_hit_in_the_free_queue_is_not_free_for_the_rest_of_the_prompt():
    manager = manager_of(4)
    first = Sequence(0, range(9))
    manager.allocate(first)
    manager.free(first)
    manager.allocate(Sequence(1, [99] * 4))  # 3 of 4 blocks are free, 2 of them are hits
    prompt = Sequence(2, range(16))
    assert manager.can_allocate(prompt) is AllocStatus.LATER
    with pytest.raises(OutOfBlocks, match="4 blocks are needed, 3 are free"):
        manager.allocate(prompt)
    assert manager.can_allocate(Sequence(3, range(12))) is AllocStatus.OK


def test_a_hit_that_others_use_needs_no_free_block():
    manager = manager_of(4)
    manager.allocate(Sequence(0, range(9)))
    assert manager.can_allocate(Sequence(1, range(12))) is AllocStatus.OK
    assert manager.can_allocate(Sequence(1, range(16))) is AllocStatus.LATER
    assert manager.can_allocate(Sequence(1, range(17))) is AllocStatus.NEVER
    assert manager.allocate(Sequence(1, range(12))) == 8


def test_a_duplicate_does_not_take_over_the_index():
    manager = manager_of()
    first, second = Sequence(0, range(8)), Sequence(1, range(8))
    manager.allocate(first)
    manager.allocate(second)  # computes its last block again
    assert manager.block_table(second) == [0, 2]
    probe = Sequence(2, range(9))
    assert manager.get_computed_blocks(probe)[0] == [0, 1]
    manager.free(first)
    manager.allocate(Sequence(3, [99] * 32))  # all blocks that are free, 1 among them
    assert manager.num_free_blocks == 0
    assert manager.get_computed_blocks(probe)[0] == [0, 2]
    manager.check_invariants()


def test_the_tokens_of_a_hit_are_compared():
    manager = with_colliding_hashes(manager_of())
    manager.allocate(Sequence(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert manager.get_computed_blocks(Sequence(1, [1, 2, 3, 9, 5, 6, 7, 8, 9])) == ([], 0)
    assert manager.get_computed_blocks(Sequence(1, [1, 2, 3, 4, 9])) == ([0], 4)


def test_a_first_block_is_no_hit_for_a_later_one_of_equal_tokens_and_hash():
    manager = with_colliding_hashes(manager_of(10, 2))
    prompt = Sequence(0, [1, 1, 1, 1, 9])
    manager.allocate(prompt)
    assert manager.pool.lookup(manager._hasher.block_hashes(prompt)) == [0, 0]
    assert manager.get_computed_blocks(Sequence(1, [1, 1, 1, 1, 9])) == ([0], 2)


def test_a_freed_sequence_has_nothing_cached_or_computed():
    manager = manager_of()
    manager.allocate(Sequence(0, range(9)))
    manager.allocate(seq := Sequence(1, range(9)))
    assert (seq.num_cached_tokens, seq.num_computed_tokens) == (8, 9)
    manager.free(seq)
    assert (seq.num_cached_tokens, seq.num_computed_tokens) == (0, 0)


@pytest.mark.parametrize(
    "keys", [{"lora_name": "a"}, {"cache_salt": "a"}, {"mm_inputs": [("a", 0, 4)]}]
)
def test_the_extra_keys_of_a_hit_are_compared(keys):
    manager = with_colliding_hashes(manager_of())
    manager.allocate(Sequence(0, range(9), **keys))
    for others in [{}, {"lora_name": "a"}, {"cache_salt": "a"}, {"mm_inputs": [("a", 0, 4)]}]:
        hits, _ = manager.get_computed_blocks(Sequence(1, range(9), **others))
        assert hits == ([0] if others == keys else [])


def without_first_block(manager: NanoVLLM, seq: Sequence) -> int:
    """Cache the two full blocks of ``seq``, evict the first; returns the second.

    The pool has 5 blocks and the policy mru, which gives up the last block released first.
    """
    shorter = Sequence("shorter", [*seq.token_ids[:2], 9])
    manager.allocate(seq)
    manager.allocate(shorter)
    assert manager.block_table(seq) == [0, 1, 2]
    assert manager.block_table(shorter) == [0, 3]
    manager.free(seq)
    manager.free(shorter)
    others = [Sequence(("other", i), [7]) for i in range(4)]
    for other in others:
        manager.allocate(other)
    assert [manager.block_table(other) for other in others] == [[4], [3], [2], [0]]
    for other in others:
        manager.free(other)
    assert manager.get_computed_blocks(seq) == ([], 0)
    return 1


def test_a_prefix_of_equal_hash_that_lost_its_block_does_not_lend_its_later_ones():
    manager = with_colliding_hashes(manager_of(5, 2, policy="mru"), 251)
    lender, other = Sequence(0, [1, 2, 5, 6, 9]), Sequence(1, [2, 1, 5, 6, 9])
    lent = without_first_block(manager, lender)
    manager.allocate(other)
    first, second, _ = manager.block_table(other)
    assert manager.pool.lookup(manager._hasher.block_hashes(other)) == [first, lent]
    assert manager.get_computed_blocks(other) == ([first], 2)
    assert manager.get_computed_blocks(lender) == ([], 0)
    assert lent != second
    manager.check_invariants()


def test_a_first_block_that_is_computed_again_finds_the_later_ones():
    manager = manager_of(5, 2, policy="mru")
    prompt = Sequence(0, [1, 2, 5, 6, 9])
    second = without_first_block(manager, prompt)
    manager.allocate(prompt)
    first = manager.block_table(prompt)[0]
    assert manager.get_computed_blocks(Sequence(1, [1, 2, 5, 6, 9])) == ([first, second], 4)
    assert manager._contents[second].parent is manager._contents[first]  # not compared again


def test_chunks_are_findable_one_after_the_other():
    manager = manager_of()
    prompt, probe = Sequence(0, range(14)), Sequence(1, range(14))
    assert manager.allocate_slots(prompt, 5) == []
    assert manager.block_table(prompt) == [0, 1, 2, 3]
    assert prompt.num_computed_tokens == 5
    assert manager.get_computed_blocks(probe) == ([0], 4)
    manager.allocate_slots(prompt, 7)
    assert manager.get_computed_blocks(probe) == ([0, 1, 2], 12)
    manager.allocate_slots(probe, 2, [0, 1, 2])
    assert manager.block_table(probe) == [0, 1, 2, 4]
    assert (probe.num_cached_tokens, probe.num_computed_tokens) == (12, 14)
    manager.check_invariants()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0,), "num_new_tokens=0: 0 of the 14 .* 1 to 14"),
        ((15,), "num_new_tokens=15"),
        ((3, [1]), r"computed_blocks=\[1\]: these do not hold"),
    ],
    ids=["none", "too many", "wrong blocks"],
)
def test_bad_first_chunks(arguments, says):
    manager = manager_of()
    with pytest.raises(ValueError, match=says):
        manager.allocate_slots(Sequence(0, range(14)), *arguments)
    assert manager.num_free_blocks == 10


def test_hits_go_in_front_of_the_first_chunk_only():
    manager = manager_of()
    prompt = Sequence(0, range(14))
    manager.allocate_slots(prompt, 5)
    with pytest.raises(ValueError, match="first chunk"):
        manager.allocate_slots(prompt, 5, [0])
    with pytest.raises(ValueError, match=r"5 of the 14 tokens .* 1 to 9"):
        manager.allocate_slots(prompt, 10)


@pytest.mark.parametrize(
    "call",
    [
        lambda manager, seq: manager.fork(seq, seq.fork(1)),
        lambda manager, seq: manager.swap_out(seq),
        lambda manager, seq: manager.reset_prefix_cache(),
        lambda manager, seq: manager.allocate_slots(seq, 1, num_lookahead_tokens=2),
    ],
    ids=["fork", "swap_out", "reset_prefix_cache", "num_lookahead_tokens"],
)
def test_what_the_design_does_not_offer(call):
    manager, seq = manager_of(), Sequence(0, range(5))
    manager.allocate(seq)
    with pytest.raises(UnsupportedByDesign, match="'nano_vllm' does not offer"):
        call(manager, seq)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda m: m.pool.ref_counts.__setitem__(0, 2), "block 0 has ref_count 2 and is in 1"),
        (lambda m: m._contents.__setitem__(1, None), "block 1 is cached, but"),
        (lambda m: m._tables[0].blocks.append(0), "ref_count 1 and is in 2"),
        (lambda m: setattr(m._tables[0].seq, "num_computed_tokens", 13), "for 13 tokens"),
        (lambda m: setattr(m._tables[0], "num_hashed", 1), "first 2 .* 1 are said"),
    ],
    ids=["ref_count", "content", "twice", "short", "hashed"],
)
def test_check_invariants_sees(break_it, says):
    manager = manager_of()
    manager.allocate(Sequence(0, range(9)))
    manager.check_invariants()
    break_it(manager)
    with pytest.raises(AssertionError, match=says):
        manager.check_invariants()


def test_a_hit_costs_the_same_wherever_it_is_in_a_queue_thirty_times_longer():
    def seconds(num_blocks: int) -> float:
        manager = manager_of(num_blocks, 16)
        prompt = [1] * 4097
        manager.allocate(first := Sequence("first", prompt))
        for i in range(num_blocks // 256 - 1):  # so that none is fresh, and the hits are amid
            manager.allocate(seq := Sequence(i, range(i * 4096, i * 4096 + 4096)))
            manager.free(seq)
            if i == num_blocks // 512:
                manager.free(first)
        times = []
        for seq_id in range(20):
            seq = Sequence(("again", seq_id), prompt)
            started = time.perf_counter()
            assert manager.allocate(seq) == 4096
            times.append(time.perf_counter() - started)
            manager.free(seq)
        return min(times)

    assert seconds(60_000) < 5 * seconds(2_000)  # what is O(queue) would be 30 times
