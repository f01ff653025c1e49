"""paged: free set and (block, filled) tables, and nothing shared."""

from __future__ import annotations

import time
from array import array

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant
from manager_machine import ManagerMachine

from cache import AllocStatus, CacheStats, OutOfBlocks, Sequence, UnsupportedByDesign, make_manager
from cache.managers import Paged
from cache.sizing import slot_bytes


def manager_of(num_blocks: int = 4, block_size: int = 4, **options) -> Paged:
    return make_manager("paged", num_blocks=num_blocks, block_size=block_size, **options)


class PagedMachine(ManagerMachine):
    def make_manager(self, data, num_blocks, block_size):
        self.free_set = set(range(num_blocks))
        return manager_of(num_blocks, block_size, bytes_per_slot=3)

    def expected_hits(self, seq):
        return 0

    def blocks_needed(self, live, end):
        return -(-end // self.block_size) - len(live.table)

    def observe(self, live, taken):
        assert set(taken) <= self.free_set
        self.free_set -= set(taken)

    @invariant()
    def filled_slots_are_counted(self):
        size, lives = self.block_size, self.live.values()
        for live in lives:
            filled = [min(size, live.stored - i * size) for i in range(len(live.table))]
            table = list(zip(live.table, filled, strict=True))
            assert self.manager.filled_block_table(live.seq) == table
        unfilled = sum(len(live.table) * size - live.stored for live in lives)
        assert self.manager.fragmented_bytes() == 3 * unfilled
        usage = self.manager.memory_usage()
        assert usage.used == sum(live.stored for live in lives)
        assert usage.internal == unfilled
        assert usage.num_slots == self.num_blocks * size

    def observe_free(self, live):
        self.free_set |= set(live.table)


PagedMachine.TestCase.settings = settings(
    max_examples=2 * settings.default.max_examples, stateful_step_count=40
)
TestPagedMachine = PagedMachine.TestCase


def test_fragmented_bytes_are_the_unfilled_slots_of_last_blocks():
    # Llama 3 8B in bfloat16: 32 layers, 8 KV heads of 128.
    bytes_per_slot = slot_bytes(num_layers=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)
    manager = manager_of(8, 256, bytes_per_slot=bytes_per_slot)
    manager.allocate(Sequence(0, [1] * 300))
    manager.allocate(Sequence(1, [1] * 256))
    assert manager.fragmented_bytes() == 212 * 131_072
    manager.allocate(Sequence(2, [1]))
    assert manager.fragmented_bytes() == (212 + 255) * 131_072


def test_without_a_slot_size_fragmentation_is_counted_in_slots():
    manager = manager_of()
    manager.allocate(Sequence(0, [1] * 5))
    assert manager.fragmented_bytes() == 3


def test_a_prompt_that_ends_on_a_boundary_fills_its_last_block():
    manager = manager_of()
    seq = Sequence(0, range(8))
    manager.allocate(seq)
    assert [filled for _, filled in manager.filled_block_table(seq)] == [4, 4]
    assert manager.fragmented_bytes() == 0
    seq.append_token(8)
    assert manager.append(seq) == []
    assert [filled for _, filled in manager.filled_block_table(seq)] == [4, 4, 1]


def test_a_finished_sequence_gives_back_all_its_blocks():
    manager = manager_of()
    seq = Sequence(0, range(16))
    manager.allocate(seq)
    assert manager.num_free_blocks == 0
    manager.free(seq)
    assert manager.num_free_blocks == 4
    assert manager.fragmented_bytes() == 0


def test_equal_prompts_share_nothing():
    manager = manager_of()
    first, second = Sequence(0, range(8)), Sequence(1, range(8))
    assert manager.allocate(first) == manager.allocate(second) == 0
    assert not set(manager.block_table(first)) & set(manager.block_table(second))
    assert manager.stats.token_hit_rate == 0


def test_a_freed_sequence_has_nothing_computed():
    manager = manager_of()
    manager.allocate(seq := Sequence(0, range(5)))
    assert (seq.num_cached_tokens, seq.num_computed_tokens) == (0, 5)
    manager.free(seq)
    assert (seq.num_cached_tokens, seq.num_computed_tokens) == (0, 0)


def test_statistics():
    manager = manager_of()
    first, second = Sequence(0, range(7)), Sequence(1, range(4))
    manager.allocate(first)
    manager.allocate(second)
    second.append_token(4)
    manager.append(second)
    manager.free(first)
    assert manager.stats == CacheStats(
        num_allocations=2, queried_tokens=11, queried_blocks=2, allocated_blocks=4
    )


def test_statuses_and_a_failing_append():
    manager = manager_of()
    running, waiting = Sequence(0, range(12)), Sequence(1, range(5))
    assert manager.can_allocate(Sequence(2, range(17))) is AllocStatus.NEVER
    assert manager.can_allocate(Sequence(2, range(16))) is AllocStatus.OK
    manager.allocate(running)
    assert manager.can_allocate(waiting) is AllocStatus.LATER
    with pytest.raises(OutOfBlocks, match="2 blocks are needed, 1 are free"):
        manager.allocate(waiting)
    for token_id in range(4):
        running.append_token(token_id)
        manager.append(running)
    running.append_token(4)
    assert not manager.can_append(running)
    with pytest.raises(OutOfBlocks):
        manager.append(running)
    assert running.num_computed_tokens == 16
    manager.check_invariants()


@pytest.mark.parametrize(
    "call",
    [
        lambda manager, seq: manager.fork(seq, seq.fork(1)),
        lambda manager, seq: manager.swap_out(seq),
        lambda manager, seq: manager.get_computed_blocks(seq),
        lambda manager, seq: manager.allocate_slots(seq, 1),
        lambda manager, seq: manager.reset_prefix_cache(),
    ],
    ids=["fork", "swap_out", "get_computed_blocks", "allocate_slots", "reset_prefix_cache"],
)
def test_what_the_design_does_not_offer(call):
    manager, seq = manager_of(), Sequence(0, range(5))
    manager.allocate(seq)
    with pytest.raises(UnsupportedByDesign, match="'paged' does not offer"):
        call(manager, seq)


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_slot_has_bytes(value):
    with pytest.raises(ValueError, match=r"bytes_per_slot=.*at least 1"):
        manager_of(bytes_per_slot=value)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda m: m._free.append(m._tables[0].blocks[0]), "either free or in one table"),
        (lambda m: m._free.pop(), "either free or in one table"),
        (lambda m: m._free.append(4), r"no blocks \[4\]"),
        (lambda m: setattr(m._tables[0].seq, "num_computed_tokens", 4), "2 blocks for 4 tokens"),
    ],
    ids=["free and used", "lost", "unknown", "empty block"],
)
def test_check_invariants_sees(break_it, says):
    manager = manager_of()
    manager.allocate(Sequence(0, range(5)))
    manager.check_invariants()
    break_it(manager)
    with pytest.raises(AssertionError, match=says):
        manager.check_invariants()


def test_a_block_costs_the_same_in_a_nearly_full_pool_a_hundred_times_larger():
    def seconds(num_blocks: int) -> float:
        manager = manager_of(num_blocks, 16)
        manager.allocate(Sequence("others", array("I", bytes(4 * 16 * (num_blocks - 300)))))
        prompt = [1] * 4096
        times = []
        for seq_id in range(20):
            seq = Sequence(seq_id, prompt)
            started = time.perf_counter()
            manager.allocate(seq)
            manager.free(seq)
            times.append(time.perf_counter() - started)
        return min(times)

    assert seconds(1_000_000) < 10 * seconds(10_000)  # what is O(pool) would be 100 times
