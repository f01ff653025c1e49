"""Requests served at their arrival times, and the statistics of such a run."""

import math
import time

import numpy as np
import pytest

from cache import ServiceModel, make_manager
from cache.serving.open_loop import Run, StepRecord, engine_without_model, poisson_arrivals, serve
from cache.serving.request import RequestStats


@pytest.fixture
def engine():
    manager = make_manager("vllm_v1", num_blocks=64, block_size=4)
    return engine_without_model(
        manager, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=64
    )


TICKS = ServiceModel(
    step_seconds=1 / 16, prefill_tokens_per_second=math.inf, decode_seconds_per_sequence=0
)


def served(**values) -> RequestStats:
    times = {"first_scheduled_time": 1.0, "first_token_time": 1.5, "finish_time": 3.0}
    lengths = {"num_prompt_tokens": 10, "max_tokens": 5, "longest_output": 5}
    return RequestStats(**{"arrival_time": 1.0, "num_cached_tokens": 4} | times | lengths | values)


def step(at_s: float, running: int = 1, used_blocks: int = 0, seconds: float = 0.1) -> StepRecord:
    return StepRecord(at_s, seconds, running, 0, used_blocks)


def test_poisson_arrivals():
    def arrivals(rate, seed=0, count=20_000):
        return np.array(poisson_arrivals(rate, count, np.random.default_rng(seed)))

    times = arrivals(50.0)
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)  # exponential: as large as the mean
    np.testing.assert_array_equal(arrivals(100.0), times / 2)
    assert (arrivals(50.0, seed=1, count=9)[1:] != times[1:9]).all()
    assert len(arrivals(50.0, count=1)) == 1


def test_times_of_finished_and_cancelled_requests():
    request = served()
    assert (request.normalized_latency, request.time_to_first_token) == (0.4, 0.5)
    assert request.time_per_output_token == 1.5 / 4
    running = served(was_aborted=True, longest_output=2)
    assert (running.normalized_latency, running.time_to_first_token) == (0.4, 0.5)
    assert running.time_per_output_token is None
    waiting = served(was_aborted=True, first_token_time=None, longest_output=0)
    assert waiting.time_to_first_token == 2.0
    assert served(longest_output=1).time_per_output_token is None
    assert served(longest_output=2).time_per_output_token == 1.5
    assert RequestStats(1.0).normalized_latency is RequestStats(1.0).time_to_first_token is None


def test_steps_count_while_requests_arrive():
    """Steps after the last arrival only drain the queue."""
    steps = [step(0.5, 2, 10), step(1.0, 4, 20), step(9.0, 100, 100)]
    run = Run([served(arrival_time=0.0, num_cached_tokens=8), served(arrival_time=1.0)], steps)
    assert run.mean_of_steps("running") == 3
    assert run.mean_of_steps("used_blocks") == 15
    assert run.busy_seconds == pytest.approx(0.3)
    assert run.cached_prompt_fraction == 0.6
    assert Run().cached_prompt_fraction == 0
    burst = Run([served(arrival_time=0.0)], steps)  # all steps come after: then all count
    assert burst.mean_of_steps("running") == pytest.approx(106 / 3)


def test_modelled_time_passes_as_the_service_model_says(engine):
    service = ServiceModel(
        step_seconds=0.5, prefill_tokens_per_second=10, decode_seconds_per_sequence=0.25
    )
    prompts, seen = [[1] * 10, [2] * 20, [3] * 5], []
    engine.on_step = on_step = lambda *step_and_seconds: seen.append(step_and_seconds)
    clock = engine.clock
    run = serve(engine, prompts, [3, 1, 2], [0.0, 1.0, 100.0], service=service)
    assert [step.seconds for step in run.steps] == [1.5, 2.75, 0.75, 1.0, 0.75]
    assert [step.at_s for step in run.steps] == [1.5, 4.25, 5.0, 101.0, 101.75]
    assert [request.time_to_first_token for request in run.requests] == [1.5, 3.25, 1.0]
    assert [request.finish_time for request in run.requests] == [5.0, 4.25, 101.75]
    assert run.seconds == 101.75
    assert (engine.clock, engine.on_step) == (clock, on_step)
    assert [step.counts for step, _ in seen] == [[10], [1, 20], [1], [5], [1]]
    assert [seconds for _, seconds in seen] == [step.seconds for step in run.steps]


def test_only_tokens_behind_the_prompt_are_decoded(engine):
    """The last chunk of a prompt may be one token, too."""
    engine.scheduler.max_num_batched_tokens = 8
    service = ServiceModel(
        step_seconds=1, prefill_tokens_per_second=1, decode_seconds_per_sequence=100
    )
    run = serve(engine, [[1] * 9], [2], [0.0], service=service)
    assert [step.seconds for step in run.steps] == [1 + 8, 1 + 1, 1 + 100]


def test_requests_are_served_when_they_are_due(engine):
    """Open loop: the time of a request starts at its arrival."""
    arrivals = [0, 1 / 64, 1 / 16, 5 / 16]
    lengths = [3, 1, 2, 1]
    prompts = [[i] * 10 for i in range(4)]
    run = serve(engine, prompts, lengths, arrivals, service=TICKS)
    assert [request.arrival_time for request in run.requests] == arrivals
    assert [request.finish_time for request in run.requests] == [3 / 16, 2 / 16, 3 / 16, 6 / 16]
    waits = [request.time_to_first_token for request in run.requests]
    assert waits == [1 / 16, 7 / 64, 1 / 16, 1 / 16]
    assert all(request.finished for request in run.requests)
    assert run.generated_tokens == sum(lengths)
    assert [request.num_prompt_tokens for request in run.requests] == [10] * 4
    assert [step.running for step in run.steps] == [1, 3, 2, 1]
    assert (run.seconds, run.busy_seconds) == (6 / 16, 4 / 16)  # it slept before the last one
    assert engine.manager.num_free_blocks == 64


def test_real_time_is_the_clock_of_the_engine(engine):
    before = time.perf_counter()
    run = serve(engine, [[1] * 4] * 2, [2, 1], [0.0, 0.02])
    assert 0.02 <= run.seconds <= time.perf_counter() - before


def test_one_after_the_other(engine):
    prompts, previous = [[i] * 10 for i in range(5)], [None, 0, 1, 2, 0]
    pauses = [0.0, 1.0, 0.5, 0.0, 9.0]
    run = serve(engine, prompts, [3] * 5, pauses, previous=previous, service=TICKS)
    assert {s.running for s in run.steps} == {1}
    assert len(run.steps) == 15
    for request, before in enumerate(previous[1:], start=1):
        pause = run.requests[request].arrival_time - run.requests[before].finish_time
        assert pause == pauses[request]
    with pytest.raises(ValueError, match=r"previous\[1\]=1: needs None or an earlier request"):
        serve(engine, prompts[:2], [3] * 2, [0.0] * 2, previous=[None, 1], service=TICKS)


def test_the_batch_is_what_fits_into_the_cache(engine):
    """64 blocks hold seven prompts of 9 blocks, but only six such sequences of 10 blocks."""
    run = serve(engine, [[i] * 36 for i in range(10)], [4] * 10, [0.0] * 10)
    assert [(s.running, s.waiting) for s in run.steps[:2]] == [(7, 3), (6, 4)]
    assert [s.used_blocks for s in run.steps[:2]] == [63, 60]
    assert sum(request.num_preemptions for request in run.requests) == 1
    assert all(request.finished for request in run.requests)


def test_sampling_reaches_every_request_and_beams_survive_by_chance(engine):
    run = serve(engine, [[1] * 5] * 3, [6] * 3, [0.0] * 3, service=TICKS, sampling={"n": 4})
    assert [request.num_output_tokens for request in run.requests] == [24] * 3
    run = serve(engine, [[1] * 5], [20], [0.0], service=TICKS, sampling={"beam_width": 4})
    assert run.requests[0].longest_output == 20
    blocks = {step.used_blocks for step in run.steps[8:]}
    assert 7 < max(blocks) < 4 * 7, "shared, but not wholly"
    assert engine.manager.num_free_blocks == 64
