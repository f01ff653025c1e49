"""vllm_v0: worked examples and its own rules."""

import functools

import manager_helpers
import pytest
from manager_helpers import grow, started, state_of, used

from cache import Sequence, make_policy

manager_of = functools.partial(manager_helpers.manager_of, "vllm_v0")

PROMPT = range(6)


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


def test_a_shared_block_keeps_the_latest_access_of_its_users():
    step = 0
    manager = manager_of(5, clock=lambda: step)
    a, b = started(manager, "a", range(5)), started(manager, "b", range(50, 55))
    manager.mark_blocks_as_computed(a)
    step = 1
    c = started(manager, "c", range(5))
    assert manager.block_table(c) == [0, 4]
    for seq in (c, a, b):  # block 0 was scheduled last with c, and is freed with a
        manager.free(seq)
    assert manager.gpu.free_blocks() == [1, 3, 2, 4, 0]


def test_misses_are_reported_before_evictions():
    policy, log = make_policy("fifo"), []
    manager = manager_of(2, policy=policy)
    used(manager, "old", range(50, 58))
    for name in ("miss", "insert", "evict"):
        call = getattr(policy, name)
        setattr(policy, name, lambda *a, name=name, call=call: log.append((name, *a)) or call(*a))
    seq = started(manager, "new", PROMPT)
    grow(manager, seq, 6, 7)
    first, second = manager._hashes(seq)
    assert log == [
        ("miss", first), ("evict",), ("insert", 1, first, None, 0), ("evict",),
        ("miss", second), ("insert", 0, second, first, 1),
    ]  # fmt: skip


def test_a_sequence_is_swapped_in_the_right_direction_only():
    manager = manager_of(num_cpu_blocks=4)
    seq = started(manager, "a", PROMPT)
    for call in (manager.swap_in, manager.can_swap_in):
        with pytest.raises(ValueError, match="sequence 'a' is not swapped out"):
            call(seq)
    manager.swap_out(seq)
    before = state_of(manager)
    refused = [manager.swap_out, manager.can_swap_out, manager.append, manager.can_append]
    refused += [manager.mark_blocks_as_computed, lambda seq: manager.fork(seq, seq.fork("b"))]
    for call in refused:
        with pytest.raises(ValueError, match="sequence 'a' is swapped out"):
            call(seq)
    assert state_of(manager) == before
