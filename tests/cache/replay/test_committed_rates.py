"""The committed table of the eviction experiment is what the code computes today."""

from __future__ import annotations

import csv
import functools
from pathlib import Path

import pytest

import cache

ROOT = Path(__file__).parents[3]
POOLS = {True: ("mooncake_conversation_512", 0.01), False: ("ragpulse_16_first_1500", 0.001)}
"""Trace and share of its unique blocks, for compiled policies and for policies in Python."""


def committed() -> list[dict[str, str]]:
    with (ROOT / "results/eviction/cpu/rows.csv").open() as file:
        return [
            row
            for row in csv.DictReader(file)
            if (row["trace"], float(row["capacity_fraction"])) == POOLS[row["compiled"] != "False"]
        ]


@functools.cache
def load(name: str) -> cache.Trace:
    return cache.load_trace(ROOT / f"experiments/traces/{name}.jsonl.zst")


@pytest.mark.parametrize("row", committed(), ids=lambda row: row["policy"])
def test_hit_rate(row):
    trace, policy, capacity = load(row["trace"]), row["policy"], int(row["capacity_blocks"])
    hits = cache.simulate(trace, policy=policy, capacity_blocks=capacity).hit_blocks
    rate = hits / trace.num_block_references
    assert rate == pytest.approx(float(row["block_hit_rate"]), rel=1e-9)
