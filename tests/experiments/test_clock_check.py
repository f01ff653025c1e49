"""The experiment clock_check."""

from __future__ import annotations

import itertools

import pytest

from experiments import clock_check
from experiments.clock_check import ClockCheck, CpuClock
from experiments.load.engine_models import make_llm


@pytest.fixture
def ticks(monkeypatch):
    """A clock that advances by 1 whenever it is read: every timed operation lasts 1."""
    monkeypatch.setattr(clock_check.time, "thread_time", itertools.count().__next__)
    monkeypatch.setattr(clock_check, "_CONTEXTS", (16, 256))


def test_a_step_is_the_sum_of_its_operations(ticks):
    limits = {**clock_check._LIMITS, "max_model_len": 512}
    llm = make_llm("tiny", manager="vllm_v1", **clock_check._MANAGER, **limits)
    clock = CpuClock(llm)
    layers, head, end = 2, 1, 1
    step = 2 * layers + 2 * head + end  # the clock is read before and after each operation
    assert clock.seconds([20]) == pytest.approx(step)
    assert clock.seconds([20, 40, 60]) == pytest.approx(step)
    assert clock.seconds([], [(64, 64)], 1) == pytest.approx(step)
    # Beside a decoding sequence a chunk has attention of its own.
    assert clock.seconds([20], [(15, 15)], 2) == pytest.approx(step + layers)


def test_the_same_requests_are_served_with_and_without_the_model(ticks):
    cell = ClockCheck(model="tiny", load=0.5, draw=0, requests=3)
    clock_check._engine_and_clock.cache_clear()
    (row,) = clock_check.run_cell(cell)
    clock_check._engine_and_clock.cache_clear()
    for column in ("normalized_latency_s", "output_tokens_per_second"):
        error = row[f"clock_{column}"] / row[f"computed_{column}"] - 1
        assert row[f"{column}_error"] == error
