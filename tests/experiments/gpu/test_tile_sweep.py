"""The experiment tile_sweep: other tiles compute the same, and the decision is the fastest."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.gpu import tile_sweep
from experiments.gpu.tile_sweep import TileSweep
from experiments.harness import Unavailable


@pytest.mark.skipif(torch.cuda.is_available(), reason="knows the interpreter's tiles")
def test_the_tables_own_tile_is_not_run_twice():
    heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    same = TileSweep(**heads, part=("decode",), decode=((2, 40),), decode_tile=((32, 4, 1),))
    cell = list(tile_sweep.cells(same))[1]
    with pytest.raises(Unavailable, match="the table's own choice"):
        tile_sweep.run_cell(cell)


@pytest.fixture
def rows():
    """Times of 2 shapes: one tile is twice as fast at one of them, another at both."""
    table, other, third = (16, 64, 4, 5), (16, 32, 4, 3), (16, 128, 8, 3)
    times = {table: (10.0, 40.0), other: (5.0, 40.0), third: (5.0, 20.0)}
    made = []
    for part in ("decode", "prefill"):
        for tile, values in times.items():
            for (batch, context), p50 in zip(((1, 8192), (64, 4096)), values, strict=True):
                made.append(_row(part, tile, tile == table, batch, context, p50))
    for splits, p50 in ((1, 30.0), (4, 12.0), (16, 15.0)):
        made.append(_row("splits", table, False, 1, 8192, p50, num_splits=splits))
    made.append(_row("splits", table, True, 1, 8192, 15.0, num_splits=16))
    return pd.DataFrame(made)


def _row(part, tile, by_table, batch, context, p50, num_splits=None):
    row = dict(zip(("tile_m", "tile_n", "num_warps", "num_stages"), tile, strict=True))
    shape = {"batch": batch, "query_len": 1, "context_len": context, "num_splits": num_splits}
    kind = {"head_dim": 128, "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    return {"part": part, "by_table": by_table, "p50_us": p50, **row, **shape, **kind}


def test_tiles_are_ranked_by_time_relative_to_the_present_choice(rows):
    relative = tile_sweep.relative_times(rows, "decode")
    assert list(relative.index) == [(16, 128, 8, 3), (16, 32, 4, 3), (16, 64, 4, 5)]
    assert relative.loc[(16, 32, 4, 3)].tolist() == pytest.approx([0.5**0.5, 0.5, 1.0])
    failed = rows[~((rows["tile_n"] == 128) & (rows["batch"] == 64))]
    assert (16, 128, 8, 3) not in tile_sweep.relative_times(failed, "decode").index


def test_the_decision_names_the_best_tile_and_split_count(rows, tmp_path):
    (written,) = tile_sweep.plot(rows, tmp_path)
    text = written.read_text()
    assert "`decode_tile`: now (16, 64, 4, 5)" in text
    first = next(line for line in text.splitlines() if line.startswith("| (16"))
    assert first == "| (16, 128, 8, 3) | 0.500 | 0.500 | 0.500 |"
    assert "| 1 | 1 | 8192 | 16 | 4 | 0.800 |" in text


def test_without_times_there_is_no_decision(rows):
    assert tile_sweep.plot(rows.assign(p50_us=float("nan")), Path()) == []
