"""One step of the scheduler that admits a prompt with a cached prefix: how much code it runs."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from pathlib import Path

import pytest
from manager_helpers import CACHING, NAMES, manager_of, started, used

import cache
from cache import AllocStatus, Sequence
from cache.serving.request import Request, RequestStats, ScheduledSequence
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import Scheduler

# Functions and files of ``cache`` that may run, comprehensions included.
BARS = {
    "contiguous": (22, 6),
    "nano_vllm": (33, 8),
    "paged": (18, 5),
    "radix": (40, 7),
    "vllm_v0": (41, 9),
    "vllm_v1": (30, 8),
}
FOLDER = str(Path(cache.__file__).parent)


def scheduled(request_id: int, token_ids) -> ScheduledSequence:
    request = Request(request_id, SamplingParams(), 64, frozenset(), RequestStats(0.0))
    return ScheduledSequence(request_id, token_ids, request, 0)


def calls_of_an_admission(name: str) -> Counter:
    """Calls by (file, function) of a step that admits 8 cached and 5 new blocks."""
    scheduler = Scheduler(manager_of(name, 100), max_num_seqs=8, max_num_batched_tokens=1000)
    first = scheduled(0, range(41))
    scheduler.add(first)
    scheduler.schedule()
    first.append_token(5)
    scheduler.schedule()
    scheduler.finish(first)
    seq = scheduled(1, [*range(32), *range(100, 120)])
    scheduler.add(seq)
    calls: Counter = Counter()

    def count(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDER):
            calls[code.co_filename, code.co_qualname] += 1

    sys.setprofile(count)
    try:
        step = scheduler.schedule()
    finally:
        sys.setprofile(None)
    assert step.admitted == [seq]
    assert seq.num_cached_tokens == (32 if name in CACHING else 0)
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_one_lookup_and_no_more_functions_than_the_bar(name):
    calls = calls_of_an_admission(name)
    by_function = Counter()
    for (_, function), count in calls.items():
        by_function[function.rpartition(".")[2]] += count
    assert by_function["find"] == 1
    assert by_function["_match"] == (name in CACHING)
    functions, files = BARS[name]
    assert len(calls) <= functions, sorted(calls)
    assert len({file for file, _ in calls}) <= files


@pytest.mark.parametrize("name", CACHING)
def test_a_hit_is_refused_once_the_manager_has_changed(name):
    manager = manager_of(name)
    used(manager, 0, range(9))
    seq = Sequence(1, range(12))
    hit = manager.find(seq)
    assert hit.num_tokens == 8
    equal = Sequence(2, range(12))
    with pytest.raises(ValueError, match=r"hit: it was found for .*seq_id=1.*find\(.*seq_id=2"):
        manager.admit(equal, hit, 12)
    with pytest.raises(ValueError, match="hit: it was found for"):
        copy.deepcopy(manager).admit(seq, hit, 12)
    other = started(manager, 2, [7] * 30)
    for prompt in (seq, equal):
        assert manager.can_allocate(prompt, hit) is manager.can_allocate(prompt)
    with pytest.raises(ValueError, match="hit: the manager has changed since it was found"):
        manager.admit(seq, hit, 12)
    manager.free(other)
    if manager.can_reset:
        empty = manager.find(Sequence(3, [8] * 41))
        manager.reset_prefix_cache()
        assert manager.can_allocate(Sequence(3, [8] * 40), empty) is AllocStatus.OK
        used(manager, 0, range(9))
    hit = manager.find(seq)
    for end in (8, 13, 9.0, None, -1):
        with pytest.raises(ValueError, match=f"end={end}: .*needs an int from 9 to 12"):
            manager.admit(seq, hit, end)
    manager.admit(seq, hit, 12)
    assert seq.num_cached_tokens == hit.num_tokens
    manager.check_invariants()
