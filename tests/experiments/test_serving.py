"""The experiment serving."""

from __future__ import annotations

import functools

import pandas as pd
import pytest
import torch

from cache import ServiceModel
from cache.serving.open_loop import Run, StepRecord
from cache.serving.request import RequestStats
from experiments import serving
from experiments.load.workloads import LogNormalLengths

torch.set_num_threads(1)
CACHING = ("vllm_v1", "vllm_v0", "radix", "nano_vllm")
TINY = {"duration_s": 0.1, "drain_s": 5.0, "mean_tokens": 24.0, "max_model_len": 64}


@pytest.fixture(autouse=True)
def _modelled_time(monkeypatch):
    """A step takes 2 ms, and more with its tokens, however busy the machine is."""
    service = ServiceModel(step_seconds=0.002, prefill_tokens_per_second=100_000)
    modelled = functools.partial(serving.open_loop.serve, service=service)
    monkeypatch.setattr(serving.open_loop, "serve", modelled)


def grid(**options):
    return list(serving.EXPERIMENT.checked_cells(serving.Serving(**options)))


def request(**values) -> RequestStats:
    times = {"first_scheduled_time": 0.0, "first_token_time": 0.5, "finish_time": 1.0}
    lengths = {"num_prompt_tokens": 10, "max_tokens": 5, "longest_output": 5}
    return RequestStats(**{"arrival_time": 0.0} | times | lengths | values)


def run_one(system, trace=None, **options):
    """The row of ``system`` on the chat workload, or on ``trace``."""
    traces = {} if trace is None else {"trace": (trace,)}
    *_, cell = grid(system=(system,), **{**TINY, "request_rate": (100,), **traces, **options})
    (row,) = serving.run_cell(cell)
    return row


@pytest.mark.slow
def test_a_tiny_run_has_the_same_memory_for_all_and_says_what_is_saturated(tiny_run):
    run = tiny_run("serving")
    rows = run.rows
    assert set(rows["cache_slots"]) == {8 * 64}
    assert rows["requests"].between(1, 59).all()
    assert (rows["saturated"] == (rows["requests_finished"] < rows["requests"])).all()
    assert (rows["normalized_latency_s"] > 0).all()
    assert (rows["ttft_p50_s"] <= rows["ttft_p99_s"]).all()
    reserved = rows[rows["system"] == "contiguous_max"]
    assert reserved["peak_batched_requests"].max() <= 8
    assert (reserved["cached_prompt_fraction"] == 0).all()
    assert list(run.summary["highest_rate"]) == [2000, 2000]


def test_the_default_grid_has_lengths_alone_and_chats_with_common_prefixes():
    cells = grid()
    lengths = [cell for cell in cells if isinstance(cell.trace, LogNormalLengths)]
    chats = [cell for cell in cells if cell not in lengths]
    assert {cell.trace.name for cell in chats} == {"multi_turn_chat"}
    assert {cell.system for cell in lengths} == {
        "contiguous_max", "contiguous_pow2", "contiguous_oracle", "paged",
    }  # fmt: skip
    assert {cell.system for cell in chats} >= {"contiguous_oracle", "paged", "vllm_v1", "radix"}
    draws = [cell.draw for cell in cells]
    assert draws == sorted(draws), "a slow hour of the machine affects all systems"
    assert len(set(cells)) == len(cells)


def test_a_trace_of_lengths_runs_the_systems_without_prefix_caching(tmp_path):
    azure = tmp_path / "azure.csv"
    lines = [f"2023-11-16 18:15:{10 + i}.5,{300 + i},{40 + i}" for i in range(20)]
    azure.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    assert "vllm_v1" not in {cell.system for cell in grid(trace=(azure,))}
    row = run_one("paged", azure, arrivals="trace", request_rate=(400,))
    assert (row["trace"], row["arrivals"], row["requests"]) == ("azure", "trace", 20)
    assert row["length_divisor"] == pytest.approx((309.5 + 49.5) / 24)
    assert not row["saturated"]
    assert row["seconds"] >= 19 / 400


@pytest.mark.parametrize(
    "system",
    [*(f"contiguous_{size}" for size in ("max", "pow2", "oracle")), "paged", *CACHING],
)
def test_every_system_serves_every_request_in_the_same_memory(system):
    row = run_one(system, request_rate=(200,))
    assert row["system"] == system
    assert (row["requests"], row["requests_finished"]) == (20, 20)
    assert row["cache_slots"] == 512
    assert 0 < row["mean_cache_usage"] <= 1
    assert row["normalized_latency_s"] > 0
    assert (row["cached_prompt_fraction"] > 0) == (system in CACHING)


def test_paging_batches_more_requests_than_reservations():
    """Figure 13 of the paper.  The burst is more than fits, so memory decides."""
    burst = {"request_rate": (100_000,), "duration_s": 0.001, "drain_s": 20.0}
    peaks = {
        system: run_one(system, **burst)["peak_batched_requests"]
        for system in ("contiguous_max", "contiguous_pow2", "contiguous_oracle", "paged")
    }
    assert peaks["contiguous_max"] == 8
    assert peaks["contiguous_max"] < peaks["contiguous_pow2"] <= peaks["contiguous_oracle"]
    assert peaks["contiguous_oracle"] < peaks["paged"]


def test_saturated_cells_say_so_and_count_what_was_given_up():
    row = run_one("contiguous_max", request_rate=(20_000,), duration_s=0.01, drain_s=0.01)
    assert row["saturated"]
    assert row["requests_finished"] < row["requests"] == 200
    assert row["seconds"] >= 0.02
    assert row["ttft_p99_s"] >= 0.01


def test_the_row_is_computed_of_the_run(monkeypatch):
    run = Run(
        [
            request(longest_output=2, num_cached_tokens=4),
            request(was_aborted=True, max_tokens=4, finish_time=4.0, num_preemptions=3),
        ],
        [StepRecord(0.5, 0.5, 1, 0, 32), StepRecord(1.0, 0.5, 2, 3, 64)],
        seconds=4.0,
        generated_tokens=6,
    )
    monkeypatch.setattr(serving.open_loop, "serve", lambda *_, **__: run)
    monkeypatch.setattr(serving, "_warm_up", lambda cell: None)
    row = run_one("paged")
    assert row["normalized_latency_s"] == (0.5 + 1.0) / 2
    assert row["saturated"]
    assert (row["requests"], row["requests_finished"], row["preemptions"]) == (2, 1, 3)
    assert (row["mean_batched_requests"], row["peak_batched_requests"]) == (1.5, 2)
    assert row["mean_cache_usage"] == 48 / 128
    assert row["cached_prompt_fraction"] == 0.2
    assert (row["requests_per_second"], row["output_tokens_per_second"]) == (0.25, 1.5)
    assert row["tpot_mean_s"] == 0.5


def test_cells_of_all_rates_serve_the_same_requests_in_the_same_pattern(monkeypatch):
    calls = []

    def record(llm, prompts, lengths, arrivals, stop_s=None):
        calls.append((prompts, lengths, arrivals, stop_s))
        return Run([request()], [StepRecord(0.5, 0.5, 1, 0, 32)], seconds=1.0)

    monkeypatch.setattr(serving.open_loop, "serve", record)
    monkeypatch.setattr(serving, "_warm_up", lambda cell: None)
    cells = grid(system=("paged",), **{**TINY, "request_rate": (100, 200), "draw": (0,)})
    for cell in cells[:2]:
        serving.run_cell(cell)
    (prompts, lengths, arrivals, stop), (more, longer, faster, _) = calls
    assert (len(prompts), len(more)) == (10, 20)
    assert more[:10] == prompts
    assert longer[:10] == lengths
    assert [2 * time for time in faster[:10]] == pytest.approx(arrivals)
    assert stop == arrivals[-1] + 5.0


def test_the_highest_rate_kept_up_with_in_all_draws():
    rows = pd.DataFrame(
        {
            "trace": "t",
            "system": ["paged"] * 4 + ["contiguous_max"] * 2,
            "request_rate": [40, 40, 10, 20, 10, 20],
            "draw": [0, 1, 0, 0, 0, 0],
            "saturated": [True, False, False, False, True, True],
            "requests_per_second": [24.0, 26.0, 10.0, 20.0, 5.0, 6.0],
            "mean_batched_requests": [30.0, 34.0, 5.0, 9.0, 8.0, 7.5],
            "cached_prompt_fraction": 0.0,
            "preemptions": [7, 9, 0, 0, 0, 0],
        }
    )
    paged, contiguous = serving._summary(rows).to_dict("records")
    assert (paged["highest_rate_kept_up"], paged["requests_per_second_at_most"]) == (20, 25)
    assert (paged["batched_requests_there"], paged["preemptions_there"]) == (32, 8)
    assert contiguous["highest_rate_kept_up"] == 0
