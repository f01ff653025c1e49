"""The experiment kernel_latency: its grid, its figures, and what it decides of tiles."""

import pandas as pd
import pytest
import torch

from experiments.bench.timed_ops import OPS
from experiments.gpu import kernel_latency
from experiments.gpu.kernel_latency import OURS, KernelLatency, tiles
from experiments.harness import Unavailable
from experiments.harness.environment import committed
from experiments.harness.grid import check
from kernels.testing.baselines import BASELINES


def cells_of(*parts: str, **options) -> list:
    return list(kernel_latency.cells(KernelLatency(part=parts, **options)))


def test_baselines_and_parts_are_those_that_exist():
    assert {*kernel_latency.PAGED, kernel_latency.GATHER} == {OURS, *BASELINES}
    assert set(kernel_latency.PARTS) == set(OPS)


def test_gathers_are_compared_where_paged_kernels_refuse_the_blocks():
    by_size = {}
    for cell in cells_of("decode", "prefill", block_size=(16, 100, 256, 512)):
        by_size.setdefault(cell.shape.block_size, set()).add(cell.implementation)
    for block_size, names in by_size.items():
        assert ("gather_sdpa" in names) == (block_size % 256 != 0)
        assert {OURS, "flash_attn_2", "flash_attn_3"} <= names
    fp8 = cells_of("decode", kv_dtype="float8_e4m3fn")
    assert {cell.implementation for cell in fp8} == {OURS}, "an fp8 cache has no baselines"


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("prefill", (1, 30, 20), "--prefill 1 30 20: needs seq"),
     ("prefill", (0, 1, 1), "--prefill 0 1 1: needs seq"),
     ("prefill", (1, 0, 1), "--prefill 1 0 1: needs seq"),
     ("prefix_len", 100, "100: needs a multiple of 16")],
)  # fmt: skip
def test_impossible_sizes_are_refused(option, value, says):
    with pytest.raises(ValueError, match=says):
        check(KernelLatency(**{option: (value,)}))


def test_other_tiles_and_splits_of_ours_are_tried_beside_the_tables_choice():
    few = {"prefill": ((1, 8, 8),), "block_size": (16,), "tile_n": (32, 64), "num_warps": (4,)}
    few |= {"prefix_len": (16,), "cascade_batch": (2,), "store_tokens": (1,), "num_splits": (3,)}
    cells = [c for c in cells_of("prefill", "cascade", "store", **few) if c.implementation == OURS]
    tried = [(c.part, c.tile, c.shape.num_splits) for c in cells]
    table, *tiles = (0, 0, 0, 0, 0), (0, 32, 4, 0, 0), (0, 64, 4, 0, 0)
    assert tried == [
        ("prefill", table, None), *(("prefill", tile, None) for tile in tiles),
        ("prefill", table, 3), ("cascade", table, None),
        *(("cascade", tile, None) for tile in tiles), ("store", table, None),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    """The committed times; an fp8 cache and ``gather_sdpa`` are given the times of our decode."""
    rows = pd.read_csv(committed("kernel_latency", "nvidia-h200") / "rows.csv")
    ours = rows.query(f"part == 'decode' and implementation == '{OURS}' and block_size == 16")
    gather = ours.assign(implementation="gather_sdpa")
    return pd.concat([rows, ours.assign(kv_dtype="float8_e4m3fn"), gather])


def test_figures_of_a_table_with_times(rows, drawn, tmp_path):
    kernel_latency.EXPERIMENT.plot(rows, tmp_path)
    assert set(drawn) == {"decode", "prefill", "moves", "cascade", "mla"}
    latency = drawn["decode"]
    contexts = rows.loc[rows["part"] == "decode", "context_len"].nunique()
    assert len([axis for axis in latency.axes if axis.get_title()]) == contexts > 1
    labels = {line.get_label() for line in latency.axes[0].get_lines()}
    assert {f"{OURS}, block 16", f"{OURS}, block 256", "flash_attn_2, block 256"} <= labels
    assert "bound: bytes at the measured peak" in labels
    assert f"{OURS}, block 16, fp8 cache" in labels
    assert not any("flash_attn_3" in label for label in labels)
    for line in latency.axes[0].get_lines():
        assert len(set(line.get_xdata())) == len(line.get_xdata()), "one point per batch size"


def test_the_figure_of_cascade_shows_the_gain_over_plain_decode(rows, drawn, tmp_path):
    kernel_latency.EXPERIMENT.plot(rows[rows["part"] == "cascade"], tmp_path)
    *curves, _ = drawn["cascade"].axes[0].get_lines()
    times = rows.pivot_table("p50_us", ["batch", "prefix_len"], "implementation")
    gains = (times["paged_decode"] / times[OURS]).dropna().unstack()
    assert [list(line.get_ydata()) for line in curves] == gains.to_numpy().tolist()
    assert gains.shape == (3, 2)


def test_a_table_without_times_has_no_figures(rows, tmp_path):
    assert kernel_latency.EXPERIMENT.plot(rows.assign(p50_us=float("nan")), tmp_path) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tiles")
def test_the_tile_of_the_table_is_not_run_twice():
    heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    few = {"batch": (2,), "context_len": (40,), "block_size": (16,), "num_warps": (4,)}
    cell = cells_of("decode", **heads, **few)[-1]
    assert any(cell.tile)
    with pytest.raises(Unavailable, match="the table's own choice"):
        kernel_latency.run_cell(cell)


def test_choices_are_ranked_by_time_relative_to_the_tables():
    """One is twice as fast at one of two shapes, another at both, a third fails at one."""
    table, other = (16, 64, 4, 5, 0), (16, 32, 4, 3, 0)
    third, failed = (16, 128, 8, 3, 0), (16, 16, 4, 3, 0)
    times = {table: (10.0, 40.0), other: (5.0, 40.0), third: (5.0, 20.0), failed: (1.0, None)}
    shape = {"op": "decode", "query_len": 1, "prefix_len": 0, "block_size": 16}
    rows = pd.DataFrame(
        {**dict(zip(tiles.TILE, tile, strict=True)), **shape, "by_table": tile == table,
         "batch": batch, "context_len": context_len, "num_splits": None, "p50_us": p50_us}
        for tile, values in times.items()
        for (batch, context_len), p50_us in zip(((1, 8192), (64, 4096)), values, strict=True)
    )  # fmt: skip
    split = rows[rows["by_table"]].assign(by_table=False, num_splits=4, p50_us=[20.0, 40.0])
    theirs = rows.head(1).assign(by_table=True, **dict.fromkeys(tiles.TILE))
    assert tiles.ranking(rows[rows["by_table"]]) is None
    ranking = tiles.ranking(pd.concat([rows.dropna(subset="p50_us"), split, theirs]))
    assert list(ranking[[*tiles.TILE]].itertuples(index=False, name=None)) == [
        third, other, table, table,
    ]  # fmt: skip
    assert list(ranking["num_splits"]) == [0, 0, 0, 4]
    ratios = ranking.loc[:, "mean_over_table":"max_over_table"].to_numpy()
    assert ratios[1].tolist() == pytest.approx([0.5**0.5, 0.5, 1.0])
    assert ratios[3].tolist() == pytest.approx([2**0.5, 1.0, 2.0])
