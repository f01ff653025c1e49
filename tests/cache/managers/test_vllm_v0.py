"""vllm_v0: the worked examples, its own rules, and the faults that real systems had."""

from __future__ import annotations

import functools

import manager_helpers
import pytest
from manager_helpers import grow, started, state_of, used

from cache import AllocStatus, EventLog, OutOfBlocks, PriorityPolicy, Sequence, UnsupportedByDesign
from cache.managers.vllm_v0_allocator import LRUEvictor

manager_of = functools.partial(manager_helpers.manager_of, "vllm_v0")

PROMPT = range(6)


# Worked examples --------------------------------------------------------------------------------


def test_worked_example_of_promotion():
    manager = manager_of()
    a = started(manager, "a", PROMPT)
    grow(manager, a, 6, 7, 8)
    assert manager.block_table(a) == [0, 1, 2]
    b = Sequence("b", PROMPT)
    assert manager.allocate(b) == 4
    assert manager.block_table(b) == [0, 3]
    grow(manager, b, 6)
    assert manager.block_table(b) == [0, 3]
    assert grow(manager, b, 7) == []
    assert manager.block_table(b) == [0, 1]
    assert manager.gpu.ref_counts[:4] == [2, 2, 1, 0]
    assert manager.num_free_blocks == 7


def test_promotion_to_a_block_of_the_evictor():
    manager = manager_of()
    a = started(manager, "a", PROMPT)
    grow(manager, a, 6, 7, 8)
    b = started(manager, "b", PROMPT)
    manager.free(a)
    assert grow(manager, b, 6, 7) == []
    assert manager.block_table(b) == [0, 1]
    assert manager.gpu.free_blocks() == [4, 5, 6, 7, 8, 9, 2, 3]  # never used, then by age


def test_promotion_needs_no_free_block():
    manager = manager_of(2)
    a, b = started(manager, "a", [1] * 4), started(manager, "b", [1] * 3)
    assert manager.num_free_blocks == 0
    b.append_token(1)
    assert manager.can_append(b)
    assert manager.append(b) == []
    assert manager.block_table(a) == manager.block_table(b) == [0]
    assert manager.num_free_blocks == 1
    manager.check_invariants()


def test_the_block_given_up_for_a_promotion_can_take_the_next_token():
    manager = manager_of(2)
    used(manager, "a", [1] * 4)
    b = started(manager, "b", [1] * 3)
    for token_id in (1, 9):
        b.append_token(token_id)
    assert manager.can_append(b)
    assert manager.append(b) == []
    assert manager.block_table(b) == [0, 1]
    manager.check_invariants()


def test_samples_that_agree_meet_in_one_block_without_a_copy():
    manager = manager_of()
    one = started(manager, "one", range(7))
    other = one.fork("other")
    manager.fork(one, other)
    assert grow(manager, one, 7) == [(1, 2)]
    assert grow(manager, other, 7) == []  # its block would be the same: no copy, but a switch
    assert manager.block_table(one) == manager.block_table(other) == [0, 2]
    assert manager.num_free_blocks == 8


# Computed flags ---------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["mark", "append", "free", "swap_out"])
def test_a_block_is_a_computed_hit_once_its_step_is_over(over):
    manager = manager_of(num_cpu_blocks=10)
    a = started(manager, "a", range(9))
    assert manager.get_computed_blocks(Sequence("x", range(9))) == ([], 0)
    b = Sequence("b", range(9))
    assert manager.allocate(b) == 0  # the same step: shares the blocks, computes them as well
    assert manager.block_table(b) == [0, 1, 3]
    {
        "mark": manager.mark_blocks_as_computed,
        "append": lambda seq: grow(manager, seq, 9),
        "free": manager.free,
        "swap_out": manager.swap_out,
    }[over](a)
    manager.check_invariants()
    assert manager.get_computed_blocks(Sequence("x", range(9))) == ([0, 1], 8)
    c = Sequence("c", [*range(8), 50])
    assert manager.allocate(c) == 8


def test_a_block_filled_by_the_running_step_is_not_computed_yet():
    manager = manager_of()
    a = started(manager, "a", range(7))
    grow(manager, a, 7)
    assert manager.get_computed_blocks(Sequence("x", range(9))) == ([0], 4)
    grow(manager, a, 8)
    assert manager.get_computed_blocks(Sequence("x", range(9))) == ([0, 1], 8)


def test_a_hole_in_the_prefix_ends_the_hits_but_not_the_sharing():
    manager = manager_of(4, policy="mru")
    used(manager, 0, range(12))
    filler = started(manager, 1, [50] * 4)  # the fourth block
    used(manager, 2, [60] * 4)  # evicts the head of the first prompt: the last to be released
    found = [manager.gpu.find(key) for key in manager._hashes(Sequence(3, range(12)))]
    assert [block is None for block in found].count(True) == 1
    hole = found.index(None)
    manager.free(filler)
    seq = Sequence(3, [*range(12), 99])
    assert manager.allocate(seq) == 4 * hole
    table = manager.block_table(seq)
    assert [table[i] for i in range(3) if i != hole] == [b for b in found if b is not None]
    manager.check_invariants()


# Watermark and evictor --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "status"),
    [(7, "OK"), (8, "OK"), (9, "LATER"), (16, "LATER"), (17, "NEVER"), (99, "NEVER")],
)
def test_the_three_answers_of_the_watermark(num_tokens, status):
    manager = manager_of(10, 2, watermark=0.25)  # 2 blocks are kept back
    started(manager, "a", range(100, 108))  # 4 blocks: 6 are free
    seq = Sequence("b", range(num_tokens))
    before = state_of(manager)
    assert manager.can_allocate(seq) is AllocStatus[status]
    assert state_of(manager) == before


def test_the_default_watermark_is_one_percent():
    assert manager_of(99).watermark_blocks == 0
    assert manager_of(250).watermark_blocks == 2


def test_hits_count_as_needed_for_the_watermark():
    manager = manager_of(4, watermark=0)
    a = started(manager, "a", range(12))
    assert manager.can_allocate(Sequence("b", range(12))) is AllocStatus.LATER
    manager.mark_blocks_as_computed(a)
    b = Sequence("b", [*range(12), 60])
    assert manager.can_allocate(b) is AllocStatus.LATER
    assert manager.allocate(b) == 12  # though vLLM's scheduler would not have asked
    assert manager.num_free_blocks == 0


def test_the_evictor_takes_the_oldest_access_and_then_the_deepest_block():
    step = 0
    manager = manager_of(9, clock=lambda: step)
    a = started(manager, "a", range(8))
    b = started(manager, "b", range(50, 62))
    step = 1
    c = started(manager, "c", range(80, 88))
    for seq in (c, a, b):  # in another order than they were scheduled in
        manager.free(seq)
    # a: 0, 1; b: 2, 3, 4; c: 5, 6.  a and b tie: the third block of b goes first.
    assert manager.gpu.free_blocks() == [7, 8, 4, 1, 3, 0, 2, 6, 5]
    taken = [manager.block_table(started(manager, i, [i])) for i in range(9)]
    assert taken == [[7], [8], [4], [1], [3], [0], [2], [6], [5]]
    assert manager.stats.evicted_blocks == 7


def test_blocks_filled_or_given_up_while_decoding_tie_by_their_depth_too():
    manager = manager_of(9, clock=lambda: 1)
    a, b = started(manager, "a", PROMPT), started(manager, "b", PROMPT)
    other = started(manager, "other", range(50, 54))
    grow(manager, a, 6, 7, 8)  # fills block 1 of [0, 1, 4]
    manager.free(other)
    assert grow(manager, b, 6, 7) == []  # from [0, 2] to [0, 1]
    assert manager.gpu.free_blocks() == [5, 6, 7, 8, 2, 3]
    manager.free(a)
    manager.free(b)
    assert manager.gpu.free_blocks() == [5, 6, 7, 8, 4, 2, 1, 3, 0]


def test_the_time_of_access_goes_with_the_content():
    evictor = LRUEvictor()
    evictor.start(2)
    evictor.touch([0], 5)
    evictor.release(0)
    assert evictor.evict() == 0
    for block, step in ((1, 2), (0, 1)):  # a sequence that was swapped in has an older time
        evictor.touch([block], step)
        evictor.release(block)
    assert list(evictor) == [0, 1]


class Recorder(PriorityPolicy):
    """FIFO that writes down what it is told."""

    name = "recorder"

    @staticmethod
    def priority(block):
        return block.inserted

    def start(self, capacity, next_use=None):
        super().start(capacity, next_use)
        self.log = []

    def miss(self, key):
        self.log.append(("miss", key))

    def insert(self, block, key, parent, depth):
        super().insert(block, key, parent, depth)
        self.log.append(("insert", block, key, parent, depth))

    def evict(self):
        self.log.append("evict")
        return super().evict()


def test_a_policy_is_told_of_content_before_room_is_made_for_it():
    policy = Recorder()
    manager = manager_of(2, policy=policy)
    used(manager, "old", range(50, 58))
    policy.log.clear()
    seq = started(manager, "new", PROMPT)
    grow(manager, seq, 6, 7)
    first, second = manager._hashes(seq)
    assert policy.log == [
        ("miss", first), "evict", ("insert", 1, first, None, 0), "evict",
        ("miss", second), ("insert", 0, second, first, 1),
    ]  # fmt: skip


def test_a_shared_block_was_accessed_when_any_of_its_users_was():
    step = 1
    manager = manager_of(4, clock=lambda: step)
    a = started(manager, "a", range(5))
    old = started(manager, "old", range(50, 54))
    step = 2
    b = started(manager, "b", range(5))  # shares block 0 at a later step
    manager.free(b)
    manager.free(a)
    manager.free(old)
    assert manager.gpu.free_blocks() == [1, 2, 3, 0]


# Sliding window ---------------------------------------------------------------------------------


def test_a_sliding_window_reuses_blocks_modulo_the_window():
    manager = manager_of(10, 4, sliding_window=7, enable_prefix_caching=False)
    seq = started(manager, "a", range(9))
    table = manager.block_table(seq)
    assert table == [9, 8, 9]  # two blocks: the third logical block is the first one again
    assert grow(manager, seq, *range(9, 17)) == []
    assert manager.block_table(seq) == [9, 8, 9, 8, 9]
    assert manager.num_free_blocks == 8
    child = seq.fork("b")
    manager.fork(seq, child)
    assert manager.gpu.ref_counts[8:] == [2, 2]
    assert grow(manager, child, 50) == [(9, 7)]
    assert manager.block_table(child) == [7, 8, 7, 8, 7]
    assert grow(manager, child, 51, 52, 53) == [(8, 6)]  # the next block, when its turn comes
    manager.free(seq)
    manager.free(child)
    manager.check_invariants()
    assert manager.num_free_blocks == 10


def test_a_sliding_window_bounds_what_a_sequence_needs():
    manager = manager_of(2, 4, sliding_window=8, enable_prefix_caching=False, watermark=0)
    assert manager.can_allocate(Sequence(0, range(1000))) is AllocStatus.OK
    seq = started(manager, 0, range(1000))
    assert len(manager.block_table(seq)) == 250
    assert not manager.num_free_blocks
    assert grow(manager, seq, *range(20)) == []


def test_a_sliding_window_is_refused_together_with_prefix_caching():
    with pytest.raises(UnsupportedByDesign, match=r"'vllm_v0'.*sliding_window.*prefix caching"):
        manager_of(sliding_window=8)


# Swapping ---------------------------------------------------------------------------------------


def test_swapping_moves_all_blocks_there_and_back():
    manager = manager_of(4, num_cpu_blocks=3, enable_prefix_caching=False)
    seq = started(manager, "a", range(9))
    assert manager.block_table(seq) == [3, 2, 1]
    assert manager.can_swap_out(seq)
    assert manager.swap_out(seq) == [(3, 2), (2, 1), (1, 0)]
    manager.check_invariants()
    assert (manager.num_free_blocks, manager.num_free_cpu_blocks) == (4, 0)
    assert manager.block_table(seq) == [2, 1, 0]
    started(manager, "b", [7])
    assert manager.can_swap_in(seq) is AllocStatus.LATER  # it would need a fourth block soon
    manager.free(Sequence("b", [7]))
    assert manager.can_swap_in(seq) is AllocStatus.OK
    assert manager.swap_in(seq) == [(2, 3), (1, 2), (0, 1)]
    assert manager.block_table(seq) == [3, 2, 1]
    assert (manager.num_free_blocks, manager.num_free_cpu_blocks) == (1, 3)
    assert seq.num_computed_tokens == 9
    assert grow(manager, seq, 9) == []


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_sharing_survives_a_trip_of_the_samples_one_by_one(caching):
    manager = manager_of(10, num_cpu_blocks=10, enable_prefix_caching=caching)
    one = started(manager, "one", PROMPT)
    two = one.fork("two")
    manager.fork(one, two)
    assert len(manager.swap_out(one)) == 2
    assert manager.swap_out(two) == []
    assert manager.block_table(one) == manager.block_table(two)
    assert manager.num_free_cpu_blocks == 8
    manager.check_invariants()
    back = manager.swap_in(two)
    assert len(back) == (1 if caching else 2)  # the first block was with the GPU's evictor still
    assert manager.swap_in(one) == []
    assert manager.block_table(one) == manager.block_table(two)
    assert manager.num_free_blocks == 8
    manager.check_invariants()
    assert len(grow(manager, one, 6)) == 1
    assert grow(manager, two, 7) == []


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_a_block_written_after_its_copy_left_is_not_taken_for_that_copy(caching):
    manager = manager_of(10, num_cpu_blocks=10, enable_prefix_caching=caching)
    one = started(manager, "one", PROMPT)
    two = one.fork("two")
    manager.fork(one, two)
    manager.swap_out(one)
    assert grow(manager, two, 6) == []  # in place: the CPU's copy lacks this token
    partial = manager.block_table(two)[1]
    copies = manager.swap_out(two)
    assert [src for src, _ in copies] == [partial]
    assert manager.block_table(one)[0] == manager.block_table(two)[0]
    assert manager.block_table(one)[1] != manager.block_table(two)[1]
    manager.check_invariants()


def test_a_block_that_another_sequence_is_about_to_compute_is_copied_all_the_same():
    manager = manager_of(4, num_cpu_blocks=4)
    a = started(manager, "a", range(5))
    manager.swap_out(a)
    for i in range(4):  # nothing of a is left on the GPU
        started(manager, i, [i])
    for i in range(4):
        manager.free(Sequence(i, [i]))
    b = started(manager, "b", range(5))  # its step runs after this swap
    shared = manager.block_table(b)[0]
    copies = manager.swap_in(a)
    assert len(copies) == 2
    assert shared in [dst for _, dst in copies]
    assert manager.block_table(a)[0] == shared
    manager.check_invariants()


def test_content_on_the_cpu_is_found_after_its_sequence_came_back():
    manager = manager_of(10, num_cpu_blocks=4)
    a = started(manager, "a", range(8))
    assert len(manager.swap_out(a)) == 2
    assert manager.swap_in(a) == []
    assert manager.swap_out(a) == []
    manager.check_invariants()
    assert manager.num_free_cpu_blocks == 2


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_swaps_that_fail_change_nothing(caching):
    manager = manager_of(4, num_cpu_blocks=2, enable_prefix_caching=caching)
    big, small = started(manager, "big", range(9)), started(manager, "small", range(50, 53))
    before = state_of(manager)
    assert not manager.can_swap_out(big)
    with pytest.raises(OutOfBlocks, match="3 blocks are needed, 2 are free"):
        manager.swap_out(big)
    assert state_of(manager) == before
    manager.swap_out(small)
    started(manager, "filler", range(70, 73))
    before = state_of(manager)
    assert manager.can_swap_in(small) is AllocStatus.LATER
    with pytest.raises(OutOfBlocks, match="1 blocks are needed, 0 are free"):
        manager.swap_in(small)
    assert state_of(manager) == before


def test_a_sequence_is_swapped_in_the_right_direction_only():
    manager = manager_of(num_cpu_blocks=4)
    seq = started(manager, "a", PROMPT)
    for call in (manager.swap_in, manager.can_swap_in):
        with pytest.raises(ValueError, match="sequence 'a' is not swapped out"):
            call(seq)
    manager.swap_out(seq)
    for call in (manager.swap_out, manager.can_swap_out, manager.append, manager.can_append):
        with pytest.raises(ValueError, match="sequence 'a' is swapped out"):
            call(seq)
    manager.free(seq)
    manager.check_invariants()
    assert manager.num_free_cpu_blocks == 4


def test_a_sequence_as_long_as_the_cache_never_comes_back():
    manager = manager_of(3, num_cpu_blocks=4)
    seq = started(manager, "a", range(9))
    manager.swap_out(seq)
    assert manager.can_swap_in(seq) is AllocStatus.NEVER


# Faults seen in real systems --------------------------------------------------------------------


def test_no_stale_computed_flag_on_a_reused_block():
    manager = manager_of(1)
    used(manager, 0, [1] * 4)
    started(manager, 1, [2] * 4)
    assert manager.get_computed_blocks(Sequence(2, [2] * 5)) == ([], 0)


def test_duplicates_of_the_same_step_share_their_blocks():
    manager = manager_of()
    twins = [started(manager, i, range(9)) for i in range(3)]
    assert [seq.num_cached_tokens for seq in twins] == [0, 0, 0]
    assert [manager.block_table(seq) for seq in twins] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    for seq in twins:
        manager.free(seq)
        manager.check_invariants()
        assert manager.get_computed_blocks(Sequence(9, range(9))) == ([0, 1], 8)


def test_a_64_bit_hash_is_refused_because_tokens_are_not_compared():
    with pytest.raises(ValueError, match=r"'xxh64'.*128 bits.*xxh3_128, sha256"):
        manager_of(hash_algorithm="xxh64")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_cpu_blocks": -1}, "num_cpu_blocks=-1"),
        ({"num_cpu_blocks": 2.0}, "num_cpu_blocks=2.0"),
        ({"watermark": -0.1}, "watermark=-0.1"),
        ({"watermark": 1}, "watermark=1"),
        ({"sliding_window": 0, "enable_prefix_caching": False}, "sliding_window=0"),
        ({"sliding_window": -4, "enable_prefix_caching": False}, "sliding_window=-4"),
        ({"policy": "mru2"}, "policy='mru2'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        manager_of(**options)


# Behaviour beyond these -------------------------------------------------------------------------


def test_the_event_log_is_told_of_every_gpu_block():
    log = EventLog()
    manager = manager_of(2, event_log=log, num_cpu_blocks=2)
    a = started(manager, "a", [1] * 3)
    grow(manager, a, 1)
    b = started(manager, "b", [1] * 3)
    grow(manager, b, 1)
    for seq in (a, b):
        manager.free(seq)
    used(manager, "c", [2] * 6)
    (one,), (two,) = manager._hashes(a), manager._hashes(Sequence("c", [2] * 6))
    assert [event[1:] for event in log.events] == [
        ("allocated", 0, None), ("cached", 0, one), ("allocated", 1, None), ("freed", 1, None),
        ("hit", 0, one), ("freed", 0, None),
        ("allocated", 1, None), ("cached", 1, two), ("evicted", 0, one), ("allocated", 0, None),
        ("freed", 0, None), ("freed", 1, None),
    ]  # fmt: skip
    assert log.reuse_distances() == [0]
    assert [count for _, count in log.usage()] == [1, 2, 1, 0, 1, 2, 0]


@pytest.mark.parametrize("damage", ["ref_count", "key", "computed", "table", "free", "marked"])
def test_check_invariants_sees_damage(damage):
    manager = manager_of()
    seq = started(manager, 0, range(9))
    used(manager, 1, range(50, 59))
    manager.check_invariants()
    table = manager._tables[seq.seq_id]
    if damage == "ref_count":
        manager.gpu.ref_counts[0] = 2
    elif damage == "key":
        manager.gpu.keys[0], manager.gpu.keys[1] = manager.gpu.keys[1], manager.gpu.keys[0]
    elif damage == "computed":
        manager.gpu.computed[2] = 1
    elif damage == "table":
        table.blocks = [0, 1, 1]
    elif damage == "free":
        manager.gpu._stack.append(3)
    else:
        table.num_computed_blocks = 2
    with pytest.raises(AssertionError):
        manager.check_invariants()
