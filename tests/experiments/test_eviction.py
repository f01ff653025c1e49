"""The experiment eviction."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest

import cache
from experiments import eviction
from experiments.harness import Absent

OWN_POLICY = """
from cache.policies.sieve import Sieve

class Mine(Sieve):
    pass
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl.gz"
    cache.save_trace(cache.make_workload("multi_turn_chat", num_requests=60), path)
    return path


@pytest.fixture(autouse=True)
def _no_traces_dir(monkeypatch):
    monkeypatch.delenv("TRACES_DIR", raising=False)


def grid(**options):
    return list(eviction.EXPERIMENT.checked_cells(eviction.Eviction(**options)))


@pytest.mark.slow
def test_the_command_line_from_a_trace_to_the_figure(command_line, trace, tmp_path):
    (tmp_path / "policy.py").write_text(OWN_POLICY)
    policies = ("lru", "sieve", "belady", "policy.py:Mine")
    options = [word for policy in policies for word in ("--policy", policy)]
    run = ("run", "eviction", "--trace", trace, "--capacity-percent", 5, 20, "--jobs", 1)
    output = command_line(*run, *options).stdout
    assert "eviction: 9 cells, 9 run" in output

    folder = tmp_path / "results" / "eviction" / "cpu"
    rows = pd.read_csv(folder / "rows.csv")
    loaded = cache.load_trace(trace)
    assert list(rows["policy"]) == [p for p in policies for _ in range(2)] + ["infinite"]
    assert set(rows["trace"]) == {"chat"}
    assert set(rows["unique_blocks"]) == {loaded.num_unique_blocks}
    for row in rows[rows["policy"] == "sieve"].itertuples():
        assert row.capacity_blocks == int(loaded.num_unique_blocks * row.capacity_fraction)
        result = cache.simulate(loaded, policy=row.policy, capacity_blocks=row.capacity_blocks)
        assert row.block_hit_rate == result.block_hit_rate
        assert row.token_hit_rate == result.token_hit_rate
        assert row.evictions == result.evictions

    rates = rows.pivot(index="policy", columns="capacity_fraction", values="block_hit_rate")
    assert rates.loc["infinite", 1.0] == loaded.infinite_cache_hit_rate
    for fraction in (0.05, 0.2):
        assert rates.loc["policy.py:Mine", fraction] == rates.loc["sieve", fraction]
        assert (
            rates.loc["lru", fraction] < rates.loc["belady", fraction] <= rates.loc["infinite", 1]
        )

    summary = pd.read_csv(folder / "summary.csv").set_index("policy")["lru_to_optimum_closed"]
    assert (summary["lru"], summary["belady"]) == (0, 1)
    assert summary["policy.py:Mine"] == summary["sieve"] < 1
    environment = (folder / "environment.json").read_text()
    assert str(tmp_path) not in environment
    assert str(trace.parent) not in environment
    assert {file["file"] for file in json.loads(environment)["inputs"]} == {
        "chat.jsonl.gz",
        "policy.py",
    }


def test_without_a_trace_every_synthetic_workload_is_replayed():
    cells = grid(policy=("lru",), capacity_percent=(10,), seed=4)
    assert [cell.trace.name for cell in cells if cell.policy == "lru"] == list(cache.WORKLOADS)
    assert {cell.trace.seed for cell in cells} == {4}
    assert len(grid()) == len(cache.WORKLOADS) * (10 * len(cache.POLICIES) + 1)


def test_the_capacity_is_counted_in_unique_blocks_rounded_down(trace):
    cells = grid(trace=(trace,), policy=("lru",), capacity_percent=(0.001, 0.5, 10))
    unique = cache.load_trace(trace).num_unique_blocks
    capacities = [eviction.run_cell(cell)[0]["capacity_blocks"] for cell in cells]
    assert capacities == [1, int(unique * 0.005), int(unique * 0.1), unique]


def test_a_traces_folder_gives_what_can_be_replayed_and_the_reason_for_the_rest(
    trace, tmp_path, monkeypatch
):
    shutil.copy(trace, tmp_path)
    (tmp_path / "README.md").write_text("not a trace")
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"
    )
    (tmp_path / "broken.jsonl").write_text('{"timestamp": 1}\n')
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    items = grid(policy=("lru",), capacity_percent=(10,))
    assert [item.reason for item in items if isinstance(item, Absent)] == [
        "azure.csv has lengths only",
        "broken.jsonl:1: missing field 'input_length'",
    ]
    assert {i.trace.name for i in items if not isinstance(i, Absent)} == {"chat.jsonl.gz"}


def test_a_named_trace_that_cannot_be_replayed_is_an_error(tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    with pytest.raises(ValueError, match="lengths only"):
        grid(trace=(azure,))
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    with pytest.raises(ValueError, match=r"broken\.jsonl:1: missing field"):
        grid(trace=(broken,))


def test_traces_dir_without_a_trace_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="holds no"):
        grid()


def test_plots_what_there_is(trace, tmp_path):
    """A table without the optimum, LRU and the infinite cache still gives figure and summary."""
    (cell, *_) = grid(trace=(trace,), policy=("sieve",), capacity_percent=(10,))
    files = eviction.plot(pd.DataFrame(eviction.run_cell(cell)), tmp_path)
    assert [file.name for file in files] == ["hit_rate.pdf", "hit_rate.png", "summary.csv"]
    assert list(pd.read_csv(tmp_path / "summary.csv")["policy"]) == ["sieve"]
