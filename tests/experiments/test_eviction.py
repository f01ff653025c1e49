"""The experiment eviction, and what experiments on traces have in common."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest

import cache
from experiments import eviction
from experiments.load import workloads


def grid(**options):
    return list(eviction.EXPERIMENT.checked_cells(eviction.Eviction(**options)))


def test_hit_rates_are_those_of_the_replay_between_lru_and_the_bounds(tiny_run, inputs):
    run = tiny_run("eviction")
    trace, rows = cache.load_trace(inputs["chat"]), run.rows
    assert set(rows["policy"]) == {"lru", "sieve", "belady", "policy.py:Mine", "infinite"}
    assert set(rows["unique_blocks"]) == {trace.num_unique_blocks}
    for row in rows[rows["policy"] == "sieve"].itertuples():
        assert row.capacity_blocks == int(trace.num_unique_blocks * row.capacity_fraction)
        result = cache.simulate(trace, policy="sieve", capacity_blocks=row.capacity_blocks)
        assert (row.block_hit_rate, row.token_hit_rate, row.evictions) == (
            result.block_hit_rate, result.token_hit_rate, result.evictions,
        )  # fmt: skip
        cut = len(trace) * 2 // 3  # before it to choose a policy by, after it to judge it
        for column, part in ((eviction.FIRST, slice(cut)), (eviction.LAST, slice(cut, None))):
            hits = result.hits[part].sum()
            assert getattr(row, column) == hits / trace[part].num_block_references
    rates = rows.pivot(index="policy", columns="capacity_fraction", values="block_hit_rate")
    assert rates.loc["infinite", 1.0] == trace.infinite_cache_hit_rate
    for fraction in (0.05, 0.2):
        at = rates[fraction]
        assert at["policy.py:Mine"] == at["sieve"]
        assert at["lru"] < at["belady"] <= trace.infinite_cache_hit_rate
    closed = run.summary.set_index("policy")["lru_to_optimum_closed"]
    assert (closed["lru"], closed["belady"]) == (0, 1)
    assert closed["policy.py:Mine"] == closed["sieve"] < 1
    environment = (run.folder / "environment.json").read_text()
    assert str(inputs["chat"].parent) not in environment
    files = {file["file"] for file in json.loads(environment)["inputs"]}
    assert files == {"chat.jsonl.gz", "policy.py"}


def test_a_trace_without_block_size_is_titled_without_one(drawn, tmp_path):
    row = {"policy": "lru", "capacity_fraction": 0.1, "unique_blocks": 9}
    row |= dict.fromkeys(("block_hit_rate", eviction.FIRST, eviction.LAST), 0.5)
    rows = pd.DataFrame(
        [{**row, "trace": "a", "block_size": math.nan}, {**row, "trace": "b", "block_size": 16}]
    )
    eviction.EXPERIMENT.plot(rows, tmp_path)
    titles = [axis.get_title() for axis in drawn["hit_rate"].axes[:2]]
    assert titles == ["a\n9 blocks", "b\n9 blocks of 16 tokens"]


def test_without_a_trace_those_of_the_repository_are_replayed():
    """They match their page and the reference hit rates to the digit."""
    described = (workloads.REAL_TRACES[0].parent / "README.md").read_text()
    for path in workloads.REAL_TRACES:
        name = path.name.removesuffix(".jsonl.zst")
        (line,) = (line for line in described.splitlines() if line.startswith(f"| `{name}` "))
        trace = cache.load_trace(path)
        for number in (trace.num_requests, trace.num_block_references, trace.num_unique_blocks):
            assert f"{number:,}" in line
        assert f"| {trace.infinite_cache_hit_rate:.3f} |".replace("0.", ".") in line
        assert f"| {trace.block_size} |" in line
    cells = grid(policy=("lru",), capacity_percent=(5,), num_requests=None)
    assert [cell.trace.file.path for cell in cells if cell.policy == "lru"] == [
        *workloads.REAL_TRACES
    ]
    mooncake = next(cell for cell in cells if cell.trace.name.startswith("mooncake"))
    (row,) = eviction.run_cell(mooncake)
    assert round(row["block_hit_rate"], 4) == 0.1958


def test_a_workload_is_named_like_a_trace():
    cells = grid(
        trace=(Path("agent_loops"),), policy=("lru",), capacity_percent=(10,), seed=4,
        num_requests=30,
    )  # fmt: skip
    assert {(cell.trace.name, cell.trace.seed) for cell in cells} == {("agent_loops", 4)}
    assert {row["requests"] for cell in cells for row in eviction.run_cell(cell)} == {30}


def test_capacities_are_of_the_unique_blocks_of_the_first_requests_rounded_down(inputs):
    cells = grid(
        trace=(inputs["chat"],), policy=("lru",), capacity_percent=(0.001, 5, 10), num_requests=9
    )
    rows = [row for cell in cells for row in eviction.run_cell(cell)]
    assert {row["requests"] for row in rows} == {9}
    unique = cache.load_trace(inputs["chat"])[:9].num_unique_blocks
    expected = [1, int(unique * 0.05), int(unique * 0.1), unique]
    assert [row["capacity_blocks"] for row in rows] == expected


def test_bounds_ours_lru_mq_own_and_the_best_other_have_curves_the_rest_a_band(drawn, tmp_path):
    rates = {policy: 0.3 + place / 1000 for place, policy in enumerate(cache.POLICIES)}
    rates |= {"belady": 0.9, "lru": 0.5, "sieve": 0.6, "mru": 0.1, "my.py:Own": 0.55}
    rows = pd.DataFrame(
        {
            "trace": "t", "block_size": 16, "unique_blocks": 9, "policy": policy,
            "capacity_fraction": size, "block_hit_rate": rate,
            eviction.FIRST: rate, eviction.LAST: rate - 0.1 * (policy == "sieve"),
        }
        for policy, rate in rates.items()
        for size in (0.1, 0.5)
    )  # fmt: skip
    eviction.EXPERIMENT.plot(rows, tmp_path)
    above, below = drawn["hit_rate"].axes[:2]
    assert above.get_title().endswith("best of the others: SIEVE")
    shown = {line.get_label(): line.get_ydata()[0] for line in above.lines}
    assert shown == pytest.approx(
        {
            "Belady (optimum)": 90, "my.py:Own": 55, "LRU": 50, "SIEVE": 60,
            "MQ": 100 * rates["mq"], "gittins, safeguarded (ours)": 100 * rates["safeguarded"],
        }
    )  # fmt: skip
    (band,) = above.collections
    assert (band.get_datalim(above.transData).y0, band.get_datalim(above.transData).y1) == (10, 60)
    way = [line.get_ydata()[0] for line in below.lines if line.get_label() == "SIEVE"]
    assert way == pytest.approx([25, 0])


def test_a_csv_trace_is_replayed_by_its_columns(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("ts,blocks\n0,1 2\n1,1 2\n2,3\n")
    own = {"trace": (file,), "policy": ("lru",), "capacity_percent": (50, 70)}
    cells = grid(**own, trace_columns="time=ts,hash_ids=blocks")
    rates = [row["block_hit_rate"] for cell in cells for row in eviction.run_cell(cell)]
    assert rates == [0.2, 0.4, 0.4]
    with pytest.raises(ValueError, match=r"own\.csv:1: a CSV trace starts with .*--columns"):
        grid(**own)
    with pytest.raises(ValueError, match=r"^--columns: needs --trace FILE\.csv"):
        grid(trace=(Path("rag"),), trace_columns="time=ts,hash_ids=blocks")


def test_means_are_over_the_pools_that_all_policies_of_a_trace_have(tmp_path):
    """A policy tried in one pool is not compared with others' means over all pools."""
    same = {"trace": "t", "block_size": 16, "unique_blocks": 9}
    rates = {("lru", 0.1): 0.2, ("belady", 0.1): 0.3, ("lru", 0.01): 0.0, ("belady", 0.01): 0.1}
    rates |= {("my.py:Own", 0.1): 0.25, ("infinite", 1.0): 0.5}
    columns = "block_hit_rate", eviction.FIRST, eviction.LAST
    rows = pd.DataFrame(
        {**same, "policy": policy, "capacity_fraction": pool, **dict.fromkeys(columns, rate)}
        for (policy, pool), rate in rates.items()
    )
    eviction.EXPERIMENT.plot(rows, tmp_path)
    summary = pd.read_csv(tmp_path / "summary.csv").set_index("policy")
    assert summary["mean_block_hit_rate"].tolist() == [0.3, 0.25, 0.2]
    assert summary["lru_to_optimum_closed"]["my.py:Own"] == 0.5


def test_a_named_trace_that_cannot_be_replayed_is_an_error(inputs, tmp_path):
    with pytest.raises(ValueError, match="lengths only"):
        grid(trace=(inputs["lengths"],))
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    with pytest.raises(ValueError, match=r"broken\.jsonl:1: missing "):
        grid(trace=(broken,))
