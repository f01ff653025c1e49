"""Admission: one look-up of a prefix, whose result is refused once it is stale."""

import copy
from collections import Counter

import pytest
from manager_helpers import CACHING, NAMES, manager_of, started, used

from cache import AllocStatus, Sequence
from cache.serving.request import Request, RequestStats, ScheduledSequence
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import Scheduler


def scheduled(request_id: int, token_ids) -> ScheduledSequence:
    request = Request(request_id, SamplingParams(), 64, frozenset(), RequestStats(0.0))
    return ScheduledSequence(request_id, token_ids, request, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_looks_up_a_prompt_once(name, monkeypatch):
    scheduler = Scheduler(manager_of(name, 100), max_num_seqs=8, max_num_batched_tokens=1000)
    first, seq = scheduled(0, range(41)), scheduled(1, [*range(32), *range(100, 120)])
    scheduler.add(first)
    scheduler.schedule()
    first.append_token(5)
    scheduler.schedule()
    scheduler.finish(first)
    scheduler.add(seq)
    calls: Counter[str] = Counter()

    def count(name: str, call) -> None:
        monkeypatch.setattr(scheduler.manager, name, lambda *a: calls.update([name]) or call(*a))

    for function in ("find", "_match"):
        count(function, getattr(scheduler.manager, function))
    assert scheduler.schedule().admitted == [seq]
    assert seq.num_cached_tokens == (32 if name in CACHING else 0)
    assert calls == Counter(find=1, _match=int(name in CACHING))


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
