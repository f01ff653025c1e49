"""The experiment replay_speed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import cache
from experiments import replay_speed
from experiments.harness import Absent

pytest.importorskip("libcachesim")


def test_the_stream_says_when_each_block_comes_next():
    records = replay_speed.oracle_general(np.array([5, 3, 5, 5, 0], np.int32))
    assert records.dtype.itemsize == 24
    assert list(records["id"]) == [6, 4, 6, 6, 1]
    assert list(records["next"]) == [2, -1, 3, -1, -1]
    assert set(records["size"]) == {1}


@pytest.mark.slow
def test_both_replay_the_same_stream_in_turn(tiny_run, inputs):
    run = tiny_run("replay_speed")
    table = run.rows
    assert list(table["implementation"]) == ["pagelab", "libcachesim"] * 8
    references = cache.load_trace(inputs["prompts"]).num_block_references
    assert set(table["block_references"]) == {references}
    spent = table["references_per_second"] * table["replay_seconds"]
    assert spent.to_numpy() == pytest.approx(references)
    rates = table.groupby(["policy", "implementation"])["block_hit_rate"].first().unstack()
    # Per request and per reference differ a little, except for blocks that never return.
    assert (rates["pagelab"] - rates["libcachesim"]).abs().max() < 0.05
    lru = table[(table["policy"] == "lru") & (table["implementation"] == "pagelab")]
    summary = run.summary.set_index("policy")
    assert summary.loc["lru", "pagelab_million_references_per_second"] == pytest.approx(
        lru["references_per_second"].median() / 1e6, abs=1e-3
    )


def test_without_libcachesim_ours_is_timed_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(replay_speed.importlib.util, "find_spec", lambda name: None)
    few = {"trace": (Path("agent_loops"),), "policy": ("lru",), "num_requests": 20, "repeats": 1}
    absent, *cells = replay_speed.cells(replay_speed.ReplaySpeed(**few))
    assert absent == Absent("libcachesim is not installed")
    monkeypatch.undo()
    rows = pd.DataFrame(replay_speed.run_cell(cells[0]))
    assert list(rows["implementation"]) == ["pagelab"]
    assert replay_speed.EXPERIMENT.plot(rows, tmp_path)
