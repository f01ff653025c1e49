"""The experiment queue_informed."""

from __future__ import annotations

import pandas as pd
import pytest

from experiments import queue_informed


@pytest.mark.slow
def test_who_knows_all_arrivals_hits_most_and_a_line_helps_once_there_is_one(tiny_run):
    rows = tiny_run("queue_informed").rows
    rates = rows.pivot(index=["slice", "load"], columns="policy", values="block_hit_rate")
    assert (rates["lru, all"] >= rates["lru, queue"]).all()
    assert (rates["lru, queue"] > rates["lru"]).xs(2.0, level="load").all()
    waiting = rows[rows["policy"] == "lru"].groupby("load")["mean_waiting"].mean()
    assert waiting.iloc[-1] > waiting.iloc[0]


def test_the_gap_is_that_from_lru_to_who_knows_all_arrivals():
    rates = {"lru": 0.2, "lru, queue": 0.3, "lru, all": 0.4}
    rows = pd.DataFrame(
        {
            "trace": "t",
            "slice": 0,
            "capacity_fraction": 0.1,
            "load": 1.0,
            "policy": p,
            "block_hit_rate": rate,
        }
        for p, rate in rates.items()
    )
    assert queue_informed.closed(rows).iloc[0].to_dict() == pytest.approx(
        {"lru": 0, "lru, queue": 0.5, "lru, all": 1}
    )
