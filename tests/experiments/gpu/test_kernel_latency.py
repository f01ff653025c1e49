"""The experiment kernel_latency: its grid, its figures, and what it decides of tiles."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.bench.timed_ops import OPS
from experiments.gpu import kernel_latency
from experiments.gpu.kernel_latency import OURS, KernelLatency, tiles
from experiments.harness import Unavailable
from experiments.harness.grid import check
from kernels.testing.baselines import BASELINES


def cells_of(*parts: str, **options) -> list:
    return list(kernel_latency.cells(KernelLatency(part=parts, **options)))


def test_baselines_and_parts_are_those_that_exist():
    named = {*kernel_latency.PAGED, *kernel_latency.GATHER}
    assert named == {OURS, *BASELINES}
    assert set(kernel_latency.PARTS) - {"tiles", "splits"} == set(OPS)


def test_gathers_are_compared_where_paged_kernels_refuse_the_blocks():
    by_size = {}
    for cell in cells_of("decode", "prefill", block_size=(16, 100, 256, 512)):
        by_size.setdefault(cell.shape.block_size, set()).add(cell.implementation)
    for block_size, names in by_size.items():
        assert ("gather_flash_attn_2" in names) == (block_size % 256 != 0)
        assert {OURS, "flash_attn_2", "flash_attn_3"} <= names


def test_an_fp8_cache_has_no_baselines():
    cells = cells_of("decode", kv_dtype="float8_e4m3fn")
    assert {cell.implementation for cell in cells} == {OURS}


@pytest.mark.parametrize("sizes", [(1, 30, 20), (0, 1, 1), (1, 0, 1)])
def test_prefill_has_sequences_and_new_tokens_in_their_context(sizes):
    with pytest.raises(ValueError, match=f"--prefill {sizes[0]} {sizes[1]} {sizes[2]}: needs seq"):
        check(KernelLatency(prefill=(sizes,)))


def test_a_prefix_is_whole_blocks():
    for option, value in (("prefix_len", (100,)), ("tile_prefixes", ((16, 100),))):
        with pytest.raises(ValueError, match="100: needs a multiple of 16"):
            check(KernelLatency(**{option: value}))


def test_figures_of_a_table_with_times(timed_rows, drawn):
    cells = cells_of(*kernel_latency.PARTS[:8], batch=(1, 8, 64, 256), context_len=(512, 4096))
    few = {"batch": (8, 64), "context_len": (512,), "block_size": (16,)}
    cells += cells_of("decode", **few, kv_dtype="float8_e4m3fn")
    rows = timed_rows(cells, refused=("flash_attn_3",))
    kernel_latency.EXPERIMENT.plot(rows, Path())
    assert set(drawn) == {"decode", "prefill", "moves"}
    latency = drawn["decode"]
    assert len([axis for axis in latency.axes if axis.get_title()]) == 2
    labels = {line.get_label() for line in latency.axes[0].get_lines()}
    assert {f"{OURS}, block 16", f"{OURS}, block 256", "flash_attn_2, block 256"} <= labels
    assert "bound: bytes at copy bandwidth" in labels
    assert f"{OURS}, block 16, fp8 cache" in labels
    assert not any("flash_attn_3" in label for label in labels)
    for line in latency.axes[0].get_lines():
        assert len(set(line.get_xdata())) == len(line.get_xdata()), "one point per batch size"


def test_the_figure_of_cascade_bounds_the_gain_by_the_bytes_read(timed_rows, drawn):
    rows = timed_rows(cells_of("cascade", prefix_len=(1024, 4096), cascade_batch=(1, 64)))
    qo_bytes = 2 * rows["batch"] * 32 * 128 * 2
    rows["bytes"] = 2 * 2 * (rows["prefix_len"] + rows["batch"] * 256) * 8 * 128 + qo_bytes
    kernel_latency.EXPERIMENT.plot(rows, Path())
    (speedup,) = (axis for axis in drawn["cascade"].axes if axis.get_title())
    bounds = [line for line in speedup.get_lines() if line.get_linestyle() == "--"]
    plain = 2 * 2 * 64 * (4096 + 256) * 8 * 128 + 2 * 64 * 32 * 128 * 2
    shared = 2 * 2 * (4096 + 64 * 256) * 8 * 128 + 2 * 64 * 32 * 128 * 2
    assert bounds[0].get_ydata() == pytest.approx([1.0, 1.0])
    assert bounds[1].get_ydata()[-1] == pytest.approx(plain / shared)


def test_a_table_without_times_has_no_figures(timed_rows):
    rows = timed_rows(cells_of("decode", batch=(1,))).assign(p50_us=float("nan"))
    assert kernel_latency.EXPERIMENT.plot(rows, Path()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tiles")
def test_the_tile_of_the_table_is_not_run_twice():
    heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    few = {"tile_shapes": ((2, 1, 40),), "tile_prefixes": (), "decode_tile": ((32, 4, 1),)}
    cell = cells_of("tiles", **heads, **few)[1]
    with pytest.raises(Unavailable, match="the table's own choice"):
        kernel_latency.run_cell(cell)


def row_of(part, tile, by_table, batch, context_len, p50_us, num_splits=None):
    row = dict(zip(tiles.TILE, tile, strict=True))
    row |= {"part": part, "op": "decode", "by_table": by_table, "num_splits": num_splits}
    return row | {"batch": batch, "query_len": 1, "context_len": context_len, "p50_us": p50_us}


def test_tiles_are_ranked_by_time_relative_to_the_present_choice():
    """One tile is twice as fast at one of two shapes, another at both, a third fails at one."""
    table, other, third, failed = (16, 64, 4, 5), (16, 32, 4, 3), (16, 128, 8, 3), (16, 16, 4, 3)
    times = {table: (10.0, 40.0), other: (5.0, 40.0), third: (5.0, 20.0), failed: (1.0, None)}
    rows = pd.DataFrame(
        row_of("tiles", tile, tile == table, batch, context_len, p50_us)
        for tile, values in times.items()
        for (batch, context_len), p50_us in zip(((1, 8192), (64, 4096)), values, strict=True)
    )
    ranking = tiles.ranking(rows.dropna(subset="p50_us")).set_index([*tiles.TILE])
    assert list(ranking.index) == [third, other, table]
    ratios = ranking.loc[other, ["mean_over_table", "min_over_table", "max_over_table"]]
    assert ratios.tolist() == pytest.approx([0.5**0.5, 0.5, 1.0])


def test_the_best_number_of_splits_stands_beside_the_tables():
    times = [(1, 30.0, False), (4, 12.0, False), (16, 15.0, True)]
    rows = pd.DataFrame(
        row_of("splits", (16, 64, 4, 5), by_table, 1, 8192, p50_us, splits)
        for splits, p50_us, by_table in times
    )
    (row,) = tiles.best_splits(rows).to_dict("records")
    assert (row["context_len"], row["num_splits"], row["best"]) == (8192, 16, 4)
    assert row["best_over_table"] == pytest.approx(0.8)
