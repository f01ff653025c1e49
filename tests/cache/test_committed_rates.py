"""The committed table of the eviction experiment is what the code computes today."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import cache
from cache import bounds

ROOT = Path(__file__).parents[2]
TRACE = "mooncake_conversation_512"
BOUNDS = {"class_hazards": bounds.class_hazard_hits, "fluid": bounds.fluid_hits}


def committed() -> list[dict[str, str]]:
    """Rows of a pool of 1 % of the trace's unique blocks, but for policies that run in Python."""
    with (ROOT / "results/eviction/cpu/rows.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["trace"] == TRACE]
    rows = [row for row in rows if float(row["capacity_fraction"]) == 0.01]
    return [row for row in rows if row["policy"] in BOUNDS or row["compiled"] == "True"]


@pytest.fixture(scope="module")
def trace():
    return cache.load_trace(ROOT / f"experiments/traces/{TRACE}.jsonl.zst")


@pytest.mark.parametrize("row", committed(), ids=lambda row: row["policy"])
def test_hit_rate(trace, row):
    policy, capacity = row["policy"], int(row["capacity_blocks"])
    if policy in BOUNDS:
        hits = BOUNDS[policy](trace, capacity)
    else:
        hits = cache.simulate(trace, policy=policy, capacity_blocks=capacity).hit_blocks
    rate = hits / trace.num_block_references
    assert rate == pytest.approx(float(row["block_hit_rate"]), rel=1e-9)
