"""The experiment eviction_serving."""

from pathlib import Path

import pandas as pd
import pytest

import cache
from cache import Trace
from experiments import eviction_serving
from experiments.eviction_serving import EvictionServing
from experiments.load.workloads import REAL_TRACES


@pytest.fixture
def trace(inputs) -> Path:
    return inputs["chat"]


def rows_of(trace, **options):
    """Rows by policy and pool."""
    given = {"policy": ("lru", "mru"), "pool_gib": (0.5, 2.0), "slices": 1, "load": (0.5,)}
    given |= options
    cells = eviction_serving.EXPERIMENT.checked_cells(EvictionServing(trace=(trace,), **given))
    rows = [row for cell in cells for row in eviction_serving.run_cell(cell)]
    assert all(row["passed"] for row in rows)
    return {(row["policy"], row["pool_gib"]): row for row in rows}


def test_hits_save_time_and_the_bounds_are_bounds(trace):
    rows = rows_of(trace)
    infinite, none = rows["infinite", float("inf")], rows["no_cache", 0.5]
    few, many = rows["lru", 0.5], rows["lru", 2.0]
    assert none["block_hit_rate"] == 0 == infinite["evictions"]
    assert 0 < few["block_hit_rate"] < many["block_hit_rate"] <= infinite["block_hit_rate"]
    assert infinite["block_hit_rate"] == cache.load_trace(trace).infinite_cache_hit_rate
    assert infinite["block_hit_rate"] == infinite["most_block_hit_rate"]
    assert infinite["ttft_mean_s"] <= many["ttft_mean_s"] < few["ttft_mean_s"]
    assert few["ttft_mean_s"] < none["ttft_mean_s"]
    assert few["evictions"] > 0


def test_knowing_the_queue_helps_once_requests_wait(trace):
    rows = rows_of(trace, policy=("lru", "queue_informed"), load=(0.01, 8.0), pool_gib=(0.5,))
    assert rows["lru", 0.5]["mean_waiting"] > 1
    assert rows["queue_informed", 0.5]["block_hit_rate"] > rows["lru", 0.5]["block_hit_rate"]
    assert rows["queue_informed", 0.5]["ttft_mean_s"] < rows["lru", 0.5]["ttft_mean_s"]


def test_arrivals_offer_the_load(trace):
    half, whole = (rows_of(trace, load=(load,))["lru", 2.0] for load in (0.5, 1.0))
    assert half["gaps_scaled_by"] == pytest.approx(2 * whole["gaps_scaled_by"])
    assert half["ttft_mean_s"] < whole["ttft_mean_s"]


def test_requests_beyond_the_maximum_of_the_model_are_left_out(tmp_path):
    path = tmp_path / "long.jsonl"
    lengths = (512, 131_063, 131_062, 1024)
    blocks = [[1000 * i + j for j in range(-(-n // 512))] for i, n in enumerate(lengths)]
    requests = [(i, n, 10, blocks[i]) for i, n in enumerate(lengths)]
    cache.save_trace(Trace.from_requests(requests, name="long", block_size=512), path)
    row = rows_of(path, policy=("lru",), pool_gib=(48.0,))["lru", 48.0]
    assert (row["requests"], row["requests_left_out"], row["requests_dropped"]) == (3, 1, 0)


def test_the_grid(trace):
    options = EvictionServing(trace=(trace,), slices=1)
    cells = list(eviction_serving.EXPERIMENT.checked_cells(options))
    policies = [str(cell.policy) for cell in cells]
    assert policies[16] == "infinite"
    assert set(policies) == {
        "lru", "fifo", "lfu", "ttl", "session_end", "safeguarded", "queue_informed",
        "no_cache", "infinite",
    }  # fmt: skip
    assert len(cells) == 8 * 2 + 1 + 2 * 2
    options = EvictionServing(policy=("lru",), load=(0.5,))
    default = eviction_serving.EXPERIMENT.checked_cells(options)
    traces = [cell.trace for cell in default][:: 2 * 2 + 1]
    assert [trace.file.path for trace in traces[::5]] == [*REAL_TRACES]
    places = [(trace.first, trace.num_requests) for trace in traces[5:10]]
    assert places == [(2406 * number, 1000) for number in range(5)], "apart"


def test_a_preempted_request_counts_once(tmp_path):
    """It finds its own blocks when it resumes; no two prompts share one."""
    requests = [(i, 256, 256, range(16 * i, 16 * i + 16)) for i in range(60)]
    trace = Trace.from_requests(requests, name="t", block_size=16)
    cache.save_trace(trace, tmp_path / "t.jsonl")
    rows = rows_of(tmp_path / "t.jsonl", policy=("lru",), pool_gib=(0.75,), load=(8.0,))
    with pytest.raises(ValueError, match="--slices 61: t"):
        rows_of(tmp_path / "t.jsonl", slices=61)
    row = rows["lru", 0.75]
    assert row["preemptions"] > 0 < row["resumed_block_hit_rate"]
    assert row["block_hit_rate"] == 0


def test_a_trace_without_differences_becomes_a_sentence_unless_it_is_the_only_one():
    rows = pd.DataFrame({"trace": ["a", "a", "b"], "over_lru": [1, 1.002, 0.9]})
    left, note = eviction_serving._apart(rows)
    assert left["trace"].tolist() == ["b"]
    assert "On a, all times with prefix caching are within 0.2 % of LRU's." in note
    assert len(eviction_serving._apart(rows[:2])[0]) == 2
