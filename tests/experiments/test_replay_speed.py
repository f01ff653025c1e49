"""The experiment replay_speed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import cache
from experiments import replay_speed
from experiments.harness import Absent
from experiments.load.workloads import Workload

libcachesim = pytest.importorskip("libcachesim")


def test_the_stream_says_when_each_block_comes_next():
    records = replay_speed.oracle_general(np.array([5, 3, 5, 5, 0], np.int32))
    assert records.dtype.itemsize == 24
    assert list(records["id"]) == [6, 4, 6, 6, 1]
    assert list(records["next"]) == [2, -1, 3, -1, -1]
    assert set(records["size"]) == {1}


@pytest.fixture
def rows():
    source = Workload("shared_system_prompts", seed=0, num_requests=50)
    return [
        row
        for policy in ("lru", "fifo", "lfu", "belady")
        for row in replay_speed.run_cell(
            replay_speed.ReplaySpeedCell(
                seed=0,
                source=source,
                policy=policy,
                capacity_percent=10,
                repeats=3,
                libcachesim=True,
            )
        )
    ]


def test_both_replay_the_same_stream_in_turn(rows):
    table = pd.DataFrame(rows)
    assert list(table["implementation"]) == ["pagelab", "libcachesim"] * 12
    trace = cache.make_workload("shared_system_prompts", seed=0, num_requests=50)
    assert set(table["block_references"]) == {trace.num_block_references}
    assert (table["references_per_second"] * table["replay_seconds"]).to_numpy() == pytest.approx(
        trace.num_block_references
    )
    rates = table.groupby(["policy", "implementation"])["block_hit_rate"].first().unstack()
    # Per request and per reference differ a little, except for blocks that never return.
    assert (rates["pagelab"] - rates["libcachesim"]).abs().max() < 0.05


def test_figure_and_medians(rows, tmp_path):
    table = pd.DataFrame(rows)
    files = replay_speed.plot(table, tmp_path)
    assert [file.name for file in files] == ["replay_speed.pdf", "replay_speed.png", "summary.csv"]
    summary = pd.read_csv(tmp_path / "summary.csv").set_index("policy")
    lru = table[(table["policy"] == "lru") & (table["implementation"] == "pagelab")]
    median = lru["references_per_second"].median() / 1e6
    assert summary.loc["lru", "pagelab_million_references_per_second"] == pytest.approx(
        median, abs=1e-3
    )


def test_without_libcachesim_ours_is_timed_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(replay_speed.importlib.util, "find_spec", lambda name: None)
    options = replay_speed.ReplaySpeedOptions(policy=("lru",), num_requests=20, repeats=1)
    absent, *cells = replay_speed.cells(options)
    assert absent == Absent("libcachesim is not installed")
    monkeypatch.undo()
    rows = pd.DataFrame(replay_speed.run_cell(cells[0]))
    assert list(rows["implementation"]) == ["pagelab"]
    assert replay_speed.plot(rows, tmp_path)
