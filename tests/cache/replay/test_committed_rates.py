"""The committed table of the eviction experiment is what the code computes today."""

import csv
from pathlib import Path

import pytest

import cache

ROOT = Path(__file__).parents[3]
POOL = ("mooncake_conversation_512", 0.01)
"""Trace and share of its unique blocks."""


def committed() -> list[dict[str, str]]:
    with (ROOT / "results/eviction/cpu/rows.csv").open() as file:
        return [
            row
            for row in csv.DictReader(file)
            if (row["trace"], float(row["capacity_fraction"])) == POOL
        ]


@pytest.fixture(scope="module")
def trace() -> cache.Trace:
    return cache.load_trace(ROOT / f"experiments/traces/{POOL[0]}.jsonl.zst")


@pytest.mark.parametrize("row", committed(), ids=lambda row: row["policy"])
def test_hit_rate(row, trace):
    policy, capacity = row["policy"], int(row["capacity_blocks"])
    hits = cache.simulate(trace, policy=policy, capacity_blocks=capacity).hit_blocks
    rate = hits / trace.num_block_references
    assert rate == pytest.approx(float(row["block_hit_rate"]), rel=1e-9)
