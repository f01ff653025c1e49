"""The experiment cascade: both decodes at a tiny size, and the figure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments import cascade
from experiments.cascade import CascadeOptions

TINY = CascadeOptions(
    prefix_len=(32, 48),
    suffix_len=5,
    batch=(2,),
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=32,
    budget_ms=1.0,
)


def test_both_decodes_are_right_and_cascade_needs_fewer_bytes():
    rows = [row for cell in cascade.cells(TINY) for row in cascade.run_cell(cell)]
    assert [(row["prefix_len"], row["implementation"]) for row in rows] == [
        (32, "pagelab"), (32, "paged_decode"), (48, "pagelab"), (48, "paged_decode"),
    ]  # fmt: skip
    assert all(row["error"] <= row["bound"] for row in rows)
    if not torch.cuda.is_available():
        assert all(row["p50_us"] is None for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_len": (100,)}, "--prefix-len must be a multiple of the block size 16, got 100"),
        ({"suffix_len": 0}, "--suffix-len must be at least 1"),
        ({"batch": (0,)}, "--batch must be at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        list(cascade.cells(CascadeOptions(**options)))


def test_the_figure_bounds_the_gain_by_the_bytes_read(timed_rows, drawn):
    rows = timed_rows(cascade.cells(CascadeOptions(prefix_len=(1024, 4096), batch=(1, 64))))
    qo_bytes = 2 * rows["batch"] * 32 * 128 * 2
    rows["bytes"] = 2 * 2 * (rows["prefix_len"] + rows["batch"] * 256) * 8 * 128 + qo_bytes
    cascade.plot(rows, Path())
    _, speedup = (axis for axis in drawn["cascade"].axes if axis.get_title())
    bounds = [line for line in speedup.get_lines() if line.get_linestyle() == "--"]
    plain = 2 * 2 * 64 * (4096 + 256) * 8 * 128 + 2 * 64 * 32 * 128 * 2
    shared = 2 * 2 * (4096 + 64 * 256) * 8 * 128 + 2 * 64 * 32 * 128 * 2
    assert bounds[0].get_ydata() == pytest.approx([1.0, 1.0])
    assert bounds[1].get_ydata()[-1] == pytest.approx(plain / shared)


def test_a_table_without_times_has_no_figure(timed_rows):
    rows = timed_rows(cascade.cells(TINY)).assign(p50_us=float("nan"))
    assert cascade.plot(rows, Path()) == []
