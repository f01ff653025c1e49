"""The experiment eviction_serving."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch

import cache
from cache import ServiceModel, Trace
from experiments import eviction_serving
from experiments.eviction_serving import EvictionServing, service_times
from experiments.harness import Unavailable
from experiments.load.scaled_trace import shrink_blocks
from experiments.load.workloads import REAL_TRACES

torch.set_num_threads(1)


@pytest.fixture
def trace(inputs) -> Path:
    return inputs["chat"]


def grid(**options):
    return list(eviction_serving.EXPERIMENT.checked_cells(EvictionServing(**options)))


def run_one(trace, policy, percent=30, **options):
    """The row of one policy or bound; the slice is small enough for a second or less."""
    sizes = {"slice_tokens": 8_000, "max_output_tokens": 4, "timed_model": "tiny"}
    cells = grid(trace=(trace,), capacity_percent=(percent,), **{**sizes, **options})
    cell = dataclasses.replace(cells[0], policy=policy)
    (row,) = eviction_serving.run_cell(cell)
    return row


def served_slice(trace, num_requests=600, slice_tokens=8_000, max_output_tokens=16, **_) -> Trace:
    """The trace that ``run_one`` serves."""
    part = cache.load_trace(trace).head(num_requests)
    sizes = {"slice_tokens": slice_tokens, "max_output_tokens": max_output_tokens}
    return shrink_blocks(part, **sizes, vocab_size=512).trace


@pytest.mark.slow
def test_the_tiny_run_has_bounds_and_ratios_to_no_cache(tiny_run, inputs):
    run = tiny_run("eviction_serving")
    rows = run.rows
    own = "policy.py:Mine"
    assert list(rows["policy"]) == [own] * 2 + ["belady"] * 2 + ["no_cache"] * 2 + ["infinite"]
    assert set(rows["requests"]) == {30}
    at = rows.set_index(["policy", "capacity_fraction"])
    slice_ = served_slice(inputs["chat"], num_requests=30, slice_tokens=3_000)
    row = at.loc[own, 0.4]
    assert row["capacity_blocks"] == int(0.4 * slice_.num_unique_blocks)
    sieve = cache.simulate(slice_, policy="sieve", capacity_blocks=int(row["capacity_blocks"]))
    assert row["replay_evictions"] == sieve.evictions
    assert row["tokens_per_block"] == slice_.block_size == 3_000 // slice_.num_block_references
    assert row["length_divisor"] == 16 / slice_.block_size
    tokens = slice_.num_block_references * slice_.block_size / slice_.input_lengths.sum()
    assert row["engine_token_hit_rate"] == pytest.approx(tokens * row["engine_block_hit_rate"])
    assert 0 < row["overlap_block_hit_rate"] <= slice_.infinite_cache_hit_rate
    replayed, engine = at["replay_block_hit_rate"], at["engine_block_hit_rate"]
    assert replayed[own, 0.4] == sieve.block_hit_rate < replayed["belady", 0.4]
    assert replayed["belady", 0.4] <= replayed["infinite", 1] == slice_.infinite_cache_hit_rate
    assert engine["infinite", 1] == pytest.approx(replayed["infinite", 1])
    assert at["engine_evictions"]["infinite", 1] == 0 < engine[own, 0.4]
    assert engine["belady"].isna().all(), "its optimum needs the future"
    assert replayed["no_cache"].isna().all()
    assert (engine["no_cache"] == 0).all()
    served = rows[rows["policy"] != "belady"]
    assert (served["ttft_p50_s"] <= served["ttft_p90_s"]).all()
    for column in ("busy_seconds", "requests_per_second", "service_step_s"):
        assert (served[column] > 0).all()
    ratio = run.summary.set_index(["policy", "capacity_fraction"])["ttft_to_no_cache"]
    assert ratio["no_cache"].tolist() == [1, 1]
    ttft = at["ttft_mean_s"]
    assert ratio[own, 0.8] == pytest.approx(ttft[own, 0.8] / ttft["no_cache", 0.8], rel=1e-3)


@pytest.mark.parametrize("policy", ["lru", "lfu", "lru_k"])
def test_one_request_at_a_time_the_engine_hits_what_the_replay_hits(trace, policy):
    """For policies that evict a prompt from its tail.

    The engine's pool has one block more, for the last token of the running prompt.
    """
    serial = {"arrivals": "serial", "max_output_tokens": 1}
    row = run_one(trace, policy, **serial)
    slice_ = served_slice(trace, **serial)
    replay = cache.simulate(slice_, policy=policy, capacity_blocks=row["capacity_blocks"] - 1)
    assert 0 < replay.hit_blocks < slice_.infinite_cache_hit_rate * slice_.num_block_references
    assert row["engine_block_hit_rate"] == replay.block_hit_rate
    assert row["engine_evictions"] == replay.evictions
    assert row["preemptions"] == 0
    assert row["mean_running"] == 1


def test_modelled_times_are_those_of_the_same_requests_replayed(trace, monkeypatch):
    """Without preemption and chunks: two schedulers, one result."""
    service = ServiceModel(
        step_seconds=0.001, prefill_tokens_per_second=20_000, decode_seconds_per_sequence=1e-4
    )  # not measured: what caching is worth depends on it, and so on what else the machine does
    monkeypatch.setattr(eviction_serving, "measure_service", lambda *_, **__: service)
    rows = [run_one(trace, policy) for policy in ("lfu", "lru", "no_cache")]
    for row in rows:
        assert row["ttft_mean_s"] == pytest.approx(row["overlap_ttft_mean_s"], rel=1e-9)
        assert row["engine_block_hit_rate"] == row["overlap_block_hit_rate"]
        assert row["ttft_p50_s"] > row["service_step_s"]
    assert max(row["ttft_mean_s"] for row in rows[:2]) < 0.5 * rows[2]["ttft_mean_s"]


def test_arrivals_offer_the_load(trace):
    service = ServiceModel(prefill_tokens_per_second=10_000)
    cell = grid(trace=(trace,), load=0.5)[0]
    served = eviction_serving._slice(cell).trace
    times = eviction_serving._arrivals(cell, served, service)
    assert served.input_lengths.mean() * (len(times) - 1) / times[-1] == pytest.approx(5_000)
    gaps, stretched = np.diff(served.timestamps_ms), np.diff(times)
    np.testing.assert_allclose(stretched / stretched.sum(), gaps / gaps.sum())


def test_the_radix_manager_serves_the_slice_too(trace):
    row = run_one(trace, "lru", manager="radix")
    assert row["manager"] == "radix"
    assert row["engine_block_hit_rate"] > 0


def test_a_cache_that_does_not_hold_the_longest_request_is_unavailable(trace):
    with pytest.raises(Unavailable, match="does not hold its longest request"):
        run_one(trace, "lru", percent=1)


def test_the_grid(trace):
    cells = grid(trace=(trace,))
    policies = [str(cell.policy) for cell in cells]
    assert policies[-1] == "infinite"
    assert set(policies) == {
        "lru", "lfu", "arc", "tlru", "safeguarded", "belady", "no_cache", "infinite",
    }  # fmt: skip
    assert len(cells) == 7 * 3 + 1
    assert [cell.trace.file.path for cell in grid(policy=("lru",))][::7] == [*REAL_TRACES]


def test_service_times_are_those_of_the_steps(monkeypatch):
    """On an engine whose steps last as long as a known service model says."""
    known = ServiceModel(
        step_seconds=0.004, prefill_tokens_per_second=20_000, decode_seconds_per_sequence=0.0003
    )
    timed = functools.partial(service_times.open_loop.serve, service=known)
    monkeypatch.setattr(service_times.open_loop, "serve", timed)
    service_times.measure_service.cache_clear()
    measured = service_times.measure_service("tiny", threads=1)
    assert service_times.measure_service("tiny", threads=1) is measured
    service_times.measure_service.cache_clear()
    assert dataclasses.astuple(measured) == pytest.approx(dataclasses.astuple(known))
