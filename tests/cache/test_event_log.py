"""The event log and what can be read from it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache import Event, EventLog, MemoryUsage


def manager_with_log(name="vllm_v1", num_blocks=4, **options):
    log = EventLog()
    manager = cache.make_manager(
        name, num_blocks=num_blocks, block_size=2, event_log=log, **options
    )
    return manager, log


def kinds(log: EventLog) -> list[tuple[str, int]]:
    return [(event.kind, event.block) for event in log.events]


WITH_LOG = ["vllm_v1", "vllm_v0", "nano_vllm", "radix"]


@pytest.mark.parametrize("name", ["vllm_v1", "nano_vllm", "radix"])
def test_the_life_of_a_block(name):
    manager, log = manager_with_log(name)
    first = cache.Sequence("a", [1, 2, 3])
    manager.allocate(first)
    manager.free(first)
    again = cache.Sequence("b", [1, 2, 4])
    assert manager.allocate(again) == 2
    manager.free(again)
    seen = Counter(kinds(log))
    block = next(event.block for event in log.events if event.kind == "cached")
    assert [kind for kind, which in kinds(log) if which == block] == [
        "allocated", "cached", "freed", "hit", "freed",
    ]  # fmt: skip
    assert seen["evicted", block] == 0
    other = cache.Sequence("c", range(10, 18))
    manager.allocate(other)
    evicted = [event for event in log.events if event.kind == "evicted"]
    cached = {event.block: event.content for event in log.events[:6] if event.kind == "cached"}
    assert [(event.block, event.content) for event in evicted] == list(cached.items())


def test_an_evicted_block_is_logged_before_it_is_handed_out():
    manager, log = manager_with_log(num_blocks=2)
    for number, tokens in enumerate(([1, 2, 3, 4], [5, 6, 7, 8])):
        seq = cache.Sequence(number, tokens)
        manager.allocate(seq)
        manager.free(seq)
    assert kinds(log) == [
        ("allocated", 0), ("allocated", 1), ("cached", 0), ("cached", 1),
        ("freed", 1), ("freed", 0),
        ("evicted", 1), ("evicted", 0), ("allocated", 1), ("allocated", 0),
        ("cached", 1), ("cached", 0), ("freed", 0), ("freed", 1),
    ]  # fmt: skip
    assert log.lifetimes() == [2, 2]
    assert log.usage() == [(0, 2), (2, 0), (4, 2), (6, 0)]


@given(
    uses=st.lists(st.integers(0, 5), min_size=1, max_size=40),
)
def test_reuse_distance_counts_different_contents(uses):
    log = EventLog()
    known: set[int] = set()
    for content in uses:
        log.record("hit" if content in known else "cached", [content], [content])
        known.add(content)
    expected = []
    for now, content in enumerate(uses):
        before = [then for then in range(now) if uses[then] == content]
        if before:
            expected.append(len(set(uses[before[-1] + 1 : now])))
    assert log.reuse_distances() == expected


@pytest.mark.parametrize("name", WITH_LOG)
@given(
    prompts=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    num_blocks=st.integers(4, 12),
    num_tokens=st.integers(4, 9),
)
def test_the_log_agrees_with_the_manager(name, prompts, num_blocks, num_tokens):
    """Sequences come, fork, grow and go; some have a prefix in common."""
    manager, log = manager_with_log(name, num_blocks=num_blocks)
    held = []
    for number, prompt in enumerate(prompts):
        seq = cache.Sequence(number, [prompt] * num_tokens)
        if manager.can_allocate(seq) is cache.AllocStatus.OK:
            manager.allocate(seq)
            held.append(seq)
            if prompt == 0 and name != "nano_vllm":
                child = seq.fork(("child of", number))
                manager.fork(seq, child)
                held.append(child)
        elif held:
            manager.free(held.pop(0))
        if held:
            held[-1].append_token(number % 2)
            if manager.can_append(held[-1]):
                manager.append(held[-1])
            else:
                manager.free(held.pop())
    counts = Counter(event.kind for event in log.events)
    in_use = num_blocks - manager.num_free_blocks
    assert (log.usage() or [(0, 0)])[-1][1] == in_use
    assert counts["allocated"] == manager.stats.allocated_blocks
    assert counts["evicted"] == manager.stats.evicted_blocks == len(log.lifetimes())
    if name == "vllm_v0":  # promotions are hits of decoded blocks, which no statistic counts
        assert counts["hit"] >= manager.stats.hit_blocks
    else:
        assert counts["hit"] == manager.stats.hit_blocks


def test_own_clock_and_simultaneous_events():
    now = 3.5
    log = EventLog(clock=lambda: now)
    log.record("allocated", [4, 5])
    log.record("freed", [])
    assert log.events == [Event(3.5, "allocated", 4, None), Event(3.5, "allocated", 5, None)]


def test_a_log_changes_nothing():
    results = []
    for log in (None, EventLog()):
        manager = cache.make_manager(
            "vllm_v1", num_blocks=300, block_size=16, policy="arc", event_log=log
        )
        trace = cache.make_workload("rag", seed=1, num_requests=20)
        results.append(cache.simulate_serving(trace, manager=manager).stats)
    assert results[0] == results[1]


def test_designs_without_a_log_say_so():
    with pytest.raises(ValueError, match="manager 'paged' has no option event_log"):
        cache.make_manager("paged", num_blocks=4, block_size=2, event_log=EventLog())


@pytest.mark.parametrize("name", ["vllm_v1", "vllm_v0", "nano_vllm", "radix"])
def test_memory_usage_counts_shared_blocks_once(name):
    """12 blocks of 2 slots; the prefix of 4 tokens is shared, two last blocks are half full."""
    manager = cache.make_manager(name, num_blocks=12, block_size=2)
    assert manager.memory_usage() == MemoryUsage(
        used=0, reserved=0, internal=0, external=0, free=24
    )
    first, second = cache.Sequence(0, [1, 2, 3, 4, 5]), cache.Sequence(1, [1, 2, 3, 4, 6, 7, 8])
    manager.allocate(first)
    manager.allocate(second)
    assert manager.memory_usage() == MemoryUsage(
        used=8, reserved=0, internal=2, external=0, free=14
    )
    first.append_token(9)
    manager.append(first)
    assert manager.memory_usage().internal == 1
    manager.free(second)
    usage = manager.memory_usage()
    assert (usage.used, usage.internal, usage.free, usage.wasted_fraction) == (6, 0, 18, 0)


@pytest.mark.parametrize("name", ["vllm_v1", "vllm_v0", "radix"])
def test_memory_usage_of_forks_that_part(name):
    manager = cache.make_manager(name, num_blocks=12, block_size=4)
    parent = cache.Sequence("parent", [1, 2, 3, 4, 5])
    manager.allocate(parent)
    child = parent.fork("child")
    manager.fork(parent, child)
    assert manager.memory_usage().used == 5
    child.append_token(6)
    manager.append(child)
    usage = manager.memory_usage()
    assert (usage.used, usage.internal, usage.free) == (4 + 1 + 2, 3 + 2, 36)


def test_swapped_sequences_use_no_gpu_memory():
    manager = cache.make_manager("vllm_v0", num_blocks=4, block_size=2, num_cpu_blocks=4)
    seq = cache.Sequence(0, [1, 2, 3])
    manager.allocate(seq)
    assert manager.memory_usage().used == 3
    manager.swap_out(seq)
    assert manager.memory_usage().free == 8


def test_memory_usage_of_a_sliding_window():
    manager = cache.make_manager(
        "vllm_v0", num_blocks=8, block_size=2, enable_prefix_caching=False, sliding_window=4
    )
    seq = cache.Sequence(0, range(11))
    manager.allocate(seq)
    held = len(set(manager.block_table(seq)))
    usage = manager.memory_usage()
    assert (usage.used, usage.free) == (2 * held, 16 - 2 * held)
    assert held < 6


def test_a_radix_log_tells_of_duplicates_and_of_evictions():
    """Two sequences decode the same block side by side; the tree keeps one of the two."""
    manager, log = manager_with_log("radix", num_blocks=6)
    one, other = cache.Sequence(0, [1, 2, 3]), cache.Sequence(1, [1, 2, 3])
    for seq in (one, other):
        manager.allocate(seq)
    for seq in (one, other):
        seq.append_token(4)
        manager.append(seq)
    tables = manager.block_table(one), manager.block_table(other)
    assert tables == ([0, 1], [0, 2])
    manager.free(one)
    manager.free(other)
    assert kinds(log) == [
        ("allocated", 0), ("allocated", 1), ("cached", 0), ("hit", 0), ("allocated", 2),
        ("cached", 1), ("freed", 1), ("freed", 2), ("freed", 0),
    ]  # fmt: skip
    contents = {event.block: event.content for event in log.events if event.kind == "cached"}
    manager.allocate(cache.Sequence(2, range(10, 22)))
    evicted = {event.block: event.content for event in log.events if event.kind == "evicted"}
    assert evicted == contents
    manager.check_invariants()


def test_slots_to_look_ahead_hold_no_token():
    manager = cache.make_manager("vllm_v1", num_blocks=9, block_size=2)
    manager.allocate_slots(cache.Sequence(0, [1, 2, 3]), 3, num_lookahead_tokens=4)
    usage = manager.memory_usage()
    assert (usage.used, usage.internal, usage.free) == (3, 5, 10)
