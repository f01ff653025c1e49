"""contiguous: one reservation per sequence, placed by a buddy allocator."""

from __future__ import annotations

import pytest

from cache import AllocStatus, CacheStats, MemoryUsage, Sequence, make_manager
from cache.buddy import BuddyAllocator, OutOfRuns
from cache.managers import Contiguous


def manager_of(num_blocks: int = 16, block_size: int = 1, **options) -> Contiguous:
    return make_manager("contiguous", num_blocks=num_blocks, block_size=block_size, **options)


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def test_worked_example_of_a_reservation_up_to_the_maximum():
    manager = manager_of(2 * 8192, max_model_len=8192)
    manager.allocate(Sequence(0, [1] * 792))
    assert round(100 * manager.memory_usage().wasted_fraction, 1) == 90.3
    manager = manager_of(1024, 16, max_model_len=8192)
    manager.allocate(Sequence(0, [1] * 792))
    assert round(100 * manager.memory_usage().wasted_fraction, 1) == 90.3


def test_pow2_reserves_32_slots_for_25_output_tokens():
    manager = manager_of(256, reservation="pow2", final_length=lambda seq: 100 + 25)
    manager.allocate(Sequence(0, [1] * 100))
    assert manager.memory_usage() == MemoryUsage(
        used=100, reserved=25, internal=7, external=256 - 132, free=0
    )


def test_oracle_reserves_the_final_length():
    manager = manager_of(256, reservation="oracle", final_length=lambda seq: 125, max_model_len=125)
    seq = Sequence(0, [1] * 100)
    manager.allocate(seq)
    assert manager.memory_usage() == MemoryUsage(
        used=100, reserved=25, internal=0, external=3, free=128
    )
    for _ in range(25):
        seq.append_token(1)
        assert manager.append(seq) == []
    assert manager.memory_usage().reserved == 0
    assert manager.stats.allocated_blocks == 128


def test_max_tells_reserved_from_internal_only_if_it_knows_the_end():
    seq = Sequence(0, [1] * 10)
    usage = {}
    for final_length in (None, lambda seq: 12):
        manager = manager_of(64, max_model_len=32, final_length=final_length)
        manager.allocate(seq)
        usage[final_length is not None] = manager.memory_usage()
    assert usage[False] == MemoryUsage(used=10, reserved=22, internal=0, external=0, free=32)
    assert usage[True] == MemoryUsage(used=10, reserved=2, internal=20, external=0, free=32)


def test_free_memory_without_a_run_is_external_fragmentation():
    manager = manager_of(16, max_model_len=8, reservation="oracle", final_length=lambda s: 4)
    sequences = [Sequence(i, [1] * 4) for i in range(4)]
    for seq in sequences:
        manager.allocate(seq)
    tables = {manager.block_table(seq)[0]: seq for seq in sequences}
    assert sorted(tables) == [0, 4, 8, 12]
    manager.free(tables[0])
    assert manager.memory_usage().free == 4  # too few for a request of 8, wherever they were
    manager.free(tables[8])
    assert manager.memory_usage().external == 8  # enough, but apart
    assert manager.memory_usage(Sequence(9, [1])).free == 8  # a request of 4 takes either run
    manager.free(tables[4])
    assert manager.memory_usage().free == 12


def test_a_waiting_request_needs_a_run_for_all_that_it_reserves():
    manager = manager_of(32, reservation="pow2", final_length=lambda seq: seq.num_prompt_tokens + 3)
    sequences = [Sequence(i, [1]) for i in range(4)]  # 1 + 4 slots in a run of 8
    for seq in sequences:
        manager.allocate(seq)
    for seq in sequences:
        if manager.block_table(seq)[0] in (0, 16):
            manager.free(seq)
    beyond = 2 * (8 - 5)
    waiting = Sequence(9, [1] * 5)  # 5 + 4 slots in a run of 16, though it will use 8
    assert manager.memory_usage(waiting).external == beyond + 16
    assert manager.memory_usage(Sequence(9, [1] * 4)).external == beyond


def test_an_outgrown_pow2_reservation_grows_where_it_is():
    manager = manager_of(16, reservation="pow2")
    seq = Sequence(0, [1] * 3)
    manager.allocate(seq)
    start = manager.block_table(seq)[0]
    copies = []
    for _ in range(13):
        seq.append_token(1)
        copies += manager.append(seq)
    assert copies == []
    assert manager.block_table(seq) == list(range(start, start + 16))
    assert manager.num_free_blocks == 0
    assert manager.stats.allocated_blocks == 16


def test_an_outgrown_pow2_reservation_moves_if_its_neighbour_is_in_use():
    manager = manager_of(16, 2, reservation="pow2")
    first, second = Sequence(0, [1] * 7), Sequence(1, [1] * 7)
    manager.allocate(first)
    manager.allocate(second)
    old = manager.block_table(first)
    assert sorted(old + manager.block_table(second)) == list(range(8))
    for token_id in range(2):
        first.append_token(token_id)
        copies = manager.append(first)
    new = manager.block_table(first)
    assert new == list(range(8, 13))
    assert copies == list(zip(old, new[:4], strict=True))
    assert manager.num_free_blocks == 16 - 8 - 4
    assert manager.stats.copied_blocks == 4
    manager.check_invariants()


def test_statistics():
    manager = manager_of(16, 2, reservation="pow2")
    first, second = Sequence(0, [1] * 7), Sequence(1, [1] * 4)
    manager.allocate(first)  # 8 slots: 4 blocks
    manager.allocate(second)  # 5 slots: 4 blocks
    for _ in range(2):
        second.append_token(1)
        manager.append(second)  # within its blocks
    for _ in range(2):
        first.append_token(1)
        manager.append(first)  # moves: 8 blocks, 4 of them copied
    manager.free(second)
    assert manager.stats == CacheStats(
        num_allocations=2,
        queried_tokens=11,
        queried_blocks=3 + 2,
        allocated_blocks=4 + 4 + 8,
        copied_blocks=4,
    )


def test_sequences_longer_than_they_may_be():
    manager = manager_of(16, max_model_len=8)
    seq = Sequence(0, [1] * 8)
    assert manager.can_allocate(Sequence(1, [1] * 9)) is AllocStatus.NEVER
    with pytest.raises(ValueError, match=r"9 tokens.*max_model_len=8"):
        manager.allocate(Sequence(1, [1] * 9))
    manager.allocate(seq)
    seq.append_token(1)
    with pytest.raises(ValueError, match=r"9 tokens.*max_model_len=8"):
        manager.can_append(seq)
    with pytest.raises(ValueError, match=r"9 tokens.*max_model_len=8"):
        manager.append(seq)
    assert manager.block_table(seq) == list(range(8))
    assert seq.num_computed_tokens == 8


@pytest.mark.parametrize("final", [4, 17])
def test_a_wrong_oracle_is_named(final):
    manager = manager_of(reservation="oracle", final_length=lambda seq: final)
    with pytest.raises(ValueError, match=f"5 tokens, final length {final}, max_model_len=16"):
        manager.allocate(Sequence(0, [1] * 5))
    manager.check_invariants()
    assert manager.num_free_blocks == 16


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reservation": "half"}, "reservation='half'.*max, pow2, oracle"),
        ({"reservation": "oracle"}, "final_length=None.*oracle"),
        ({"max_model_len": 0}, "max_model_len=0.*at least 1"),
        ({"max_model_len": 33}, "max_model_len=33.*num_blocks=20 .* 32 slots"),
    ],
    ids=["reservation", "oracle", "zero", "too long"],
)
def test_bad_options(options, says):
    with pytest.raises(ValueError, match=says):
        manager_of(20, 2, **options)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda m: m._buddy.free(m._tables[0].start), "runs in use"),
        (lambda m: m._buddy.allocate(1), "runs in use"),
        (lambda m: setattr(m._tables[0], "max_tokens", 4), "5 tokens, 4 in the end"),
        (lambda m: setattr(m._tables[0], "num_reserved", 4), "5 in the end, 4 reserved|runs in"),
        (lambda m: m._buddy._free[3].clear(), "the runs end at|begins at"),
        (lambda m: m._buddy._free[0].update({0: None}), "begins at"),
        (lambda m: setattr(m._buddy, "num_free", 9), "num_free is 9, the free runs have 8"),
    ],
    ids=["freed", "leaked", "overfull", "unreserved", "lost", "free and used", "miscounted"],
)
def test_check_invariants_sees(break_it, says):
    manager = manager_of(
        16, reservation="oracle", final_length=lambda seq: seq.num_tokens, max_model_len=16
    )
    manager.allocate(Sequence(0, range(5)))
    manager.check_invariants()
    break_it(manager)
    with pytest.raises(AssertionError, match=says):
        manager.check_invariants()


@pytest.mark.parametrize("num_blocks", [1, 7, 20, 32])
def test_buddies_split_and_join(num_blocks):
    buddy = BuddyAllocator(num_blocks)
    starts = [buddy.allocate(1) for _ in range(num_blocks)]
    assert sorted(starts) == list(range(num_blocks))
    assert (buddy.num_free, buddy.longest_run) == (0, 0)
    with pytest.raises(OutOfRuns, match="a run of 1 blocks is needed, 0 are free, at most 0"):
        buddy.allocate(1)
    for start in starts[::2] + starts[1::2]:
        buddy.free(start)
        buddy.check_invariants()
    assert buddy.num_free == num_blocks
    assert buddy.longest_run == buddy.longest_possible_run == next_power_of_two(num_blocks + 1) // 2


@pytest.mark.parametrize("count", range(1, 17))
@pytest.mark.parametrize("block", range(16))
def test_a_run_grows_over_free_buddies_on_both_sides(block, count):
    buddy = BuddyAllocator(16)
    for start in sorted([buddy.allocate(1) for _ in range(16)]):
        if start != block:
            buddy.free(start)
    length = next_power_of_two(count)
    assert buddy.can_grow(block, count)
    assert buddy.grow(block, count) == block // length * length
    assert buddy.runs == {block // length * length: length}
    assert buddy.num_free == 16 - length
    buddy.check_invariants()


@pytest.mark.parametrize("count", range(2, 17))
def test_a_run_beside_one_in_use_moves_if_another_is_as_long(count):
    buddy = BuddyAllocator(16)
    first, second = sorted([buddy.allocate(1), buddy.allocate(1)])
    assert (first, second) == (0, 1)
    assert buddy.can_grow(first, count) == (count <= 8)
    if count <= 8:
        length = next_power_of_two(count)
        assert buddy.grow(first, count) == length
        assert buddy.runs == {1: 1, length: length}
    else:
        with pytest.raises(OutOfRuns, match="a run of 16 blocks is needed, 14 are free, at most 8"):
            buddy.grow(first, count)
        assert buddy.runs == {0: 1, 1: 1}
    buddy.check_invariants()


def test_unjoined_buddies_are_seen():
    buddy = BuddyAllocator(4)
    buddy._free = [{}, {0: None, 2: None}, {}]
    with pytest.raises(AssertionError, match="free buddies of 2 blocks"):
        buddy.check_invariants()
