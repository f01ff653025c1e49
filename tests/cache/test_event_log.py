"""The event log and what can be read from it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache import Event, EventLog


def manager_with_log(name="vllm_v1", num_blocks=4, **options):
    log = EventLog()
    manager = cache.make_manager(
        name, num_blocks=num_blocks, block_size=2, event_log=log, **options
    )
    return manager, log


def kinds(log: EventLog) -> list[tuple[str, int]]:
    return [(event.kind, event.block) for event in log.events]


@pytest.mark.parametrize("name", ["vllm_v1", "nano_vllm"])
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


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(4, 12))
def test_usage_ends_where_the_manager_is(prompts, num_blocks):
    manager, log = manager_with_log(num_blocks=num_blocks)
    held = []
    for number, prompt in enumerate(prompts):
        seq = cache.Sequence(number, [prompt] * 5)
        if manager.can_allocate(seq) is cache.AllocStatus.OK:
            manager.allocate(seq)
            held.append(seq)
        elif held:
            manager.free(held.pop(0))
    counts = Counter(event.kind for event in log.events)
    in_use = num_blocks - manager.num_free_blocks
    assert (log.usage() or [(0, 0)])[-1][1] == in_use
    assert counts["allocated"] == manager.stats.allocated_blocks
    assert counts["evicted"] == manager.stats.evicted_blocks == len(log.lifetimes())
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
