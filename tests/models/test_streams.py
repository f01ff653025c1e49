"""Callers that come, go and fail at any time, on the symbolic engine."""

import gc
import threading

import pytest
from symbolic_engine import assert_idle, make_engine

from cache.policies.arc import ARC
from models import FinishReason, RequestOutput, SamplingParams
from models.streams import NewRequest, Streams

GREEDY = SamplingParams(temperature=0, max_tokens=9)
PROMPTS = [[(i * i + seed) % 13 for i in range(length)] for seed, length in enumerate((17, 3, 20))]


def requests(*prompts, params=GREEDY) -> list[NewRequest]:
    return [NewRequest(prompt, params, None) for prompt in prompts]


def outputs(events) -> list[list[int]]:
    finished = [event for event in events if isinstance(event, RequestOutput)]
    finished.sort(key=lambda output: output.request_id)
    return [output.outputs[0].token_ids for output in finished]


def make_streams(manager: str = "vllm_v1", num_blocks: int = 16, **options):
    """Streams, and their engine."""
    engine = make_engine(manager, num_blocks, **options)
    return Streams(engine, lambda: make_engine(manager, num_blocks, **options).scheduler), engine


def test_a_failed_step_cancels_all_requests(monkeypatch):
    """A policy object outlives it."""
    streams, engine = make_streams(policy=ARC())
    list(streams.open(requests(*PROMPTS)))
    other = streams.open(requests(PROMPTS[0]))
    first = next(other)
    monkeypatch.setattr(engine.runner, "run", lambda step, manager: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(streams.open(requests(PROMPTS[1])))
    monkeypatch.undo()
    [output] = [event for event in other if isinstance(event, RequestOutput)]
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert output.outputs[0].token_ids == [first.token_id]
    assert output.stats.finish_time is not None
    for _ in range(3):  # evicts
        expected = [engine.runner.greedy(prompt, 9) for prompt in PROMPTS]
        assert outputs(streams.open(requests(*PROMPTS))) == expected
    assert_idle(engine)


def test_a_stream_that_never_began_is_cancelled():
    streams, engine = make_streams()
    stream = streams.open(requests(*PROMPTS))
    assert len(engine.requests) == 3
    del stream
    assert_idle(engine)


def test_a_stream_dropped_during_a_step_is_cancelled_after_it(monkeypatch):
    """The garbage collector may drop it then."""
    streams, engine = make_streams()
    dropped = streams.open(requests(PROMPTS[1], PROMPTS[2]))
    next(dropped)
    run = engine.runner.run

    def drop_and_run(step, manager):
        dropped.close()
        assert len(engine.requests) == 3
        return run(step, manager)

    stream = streams.open(requests(PROMPTS[0]))
    monkeypatch.setattr(engine.runner, "run", drop_and_run)
    first = next(stream)
    assert list(engine.requests) == [first.request_id]
    monkeypatch.undo()
    expected = engine.runner.greedy(PROMPTS[0], 9)
    assert [first.token_id, *(event.token_id for event in [*stream][:-1])] == expected
    assert_idle(engine)


def test_requests_are_added_all_or_none(monkeypatch):
    streams, engine = make_streams()
    add = engine.add

    def fail_at_the_third(*request, **keys):
        if len(engine.requests) == 2:
            raise KeyboardInterrupt
        return add(*request, **keys)

    monkeypatch.setattr(engine, "add", fail_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        streams.open(requests(*PROMPTS))
    assert_idle(engine)
    assert not streams._requests


def test_requests_that_are_taken_away_are_not_waited_for():
    streams, engine = make_streams()
    stream = streams.open(requests(PROMPTS[0]))
    next(stream)
    engine.abort(0)
    with pytest.raises(RuntimeError, match="aborted past the streams"):
        next(stream)


def test_several_threads():
    streams, engine = make_streams(num_blocks=20)
    expected = [engine.runner.greedy(prompt, 9) for prompt in PROMPTS]
    wrong = []

    def serve(first: int) -> None:
        for i in range(first, first + 6):
            cycle = [streams.open(requests(PROMPTS[i % 3]))]
            cycle.append(cycle)
            next(cycle[0])
            del cycle  # collected at some time, in any thread
            if outputs(streams.open(requests(PROMPTS[i % 3]))) != [expected[i % 3]]:
                wrong.append(i)

    threads = [threading.Thread(target=serve, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=25)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    gc.collect()
    assert_idle(engine)
    assert not streams._outbox
    assert not streams._requests
