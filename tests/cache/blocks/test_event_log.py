"""The event log and what can be read from it."""

from __future__ import annotations

import cache
from cache import Event, EventLog


def test_an_eviction_is_logged_before_the_allocation():
    log = EventLog()
    manager = cache.make_manager("vllm_v1", num_blocks=2, block_size=2, event_log=log)
    for number, tokens in enumerate(([1, 2, 3, 4], [5, 6, 7, 8])):
        seq = cache.Sequence(number, tokens)
        manager.allocate(seq)
        manager.free(seq)
    assert [(event.kind, event.block) for event in log.events] == [
        ("allocated", 0), ("allocated", 1), ("cached", 0), ("cached", 1),
        ("freed", 1), ("freed", 0),
        ("evicted", 1), ("evicted", 0), ("allocated", 1), ("allocated", 0),
        ("cached", 1), ("cached", 0), ("freed", 0), ("freed", 1),
    ]  # fmt: skip


def test_own_clock_and_simultaneous_events():
    now = 3.5
    log = EventLog(clock=lambda: now)
    log.record("allocated", [4, 5])
    log.record("freed", [])
    assert log.events == [Event(3.5, "allocated", 4, None), Event(3.5, "allocated", 5, None)]
