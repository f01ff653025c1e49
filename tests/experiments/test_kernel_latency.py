"""The experiment kernel_latency: the whole path at a tiny size, and its figures."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments import kernel_latency
from experiments.bench.kernel_problems import OPS
from experiments.harness import Unavailable
from experiments.kernel_latency import OURS, KernelLatencyOptions
from kernels.testing.baselines import BASELINES

TINY = KernelLatencyOptions(
    batch=(1, 2),
    context_len=(40,),
    block_size=(16,),
    prefill=((1, 20, 20), (2, 4, 40)),
    store_tokens=(5,),
    move_tokens=(40,),
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=32,
    budget_ms=1.0,
)


def test_every_part_runs_and_is_right():
    rows, absent = [], set()
    for cell in kernel_latency.cells(TINY):
        try:
            rows += kernel_latency.run_cell(cell)
        except Unavailable:
            absent.add(cell.implementation)
    table = pd.DataFrame(rows)
    assert (table["error"] <= table["bound"]).all()
    assert set(table["op"]) == set(kernel_latency.PARTS)
    assert set(table["implementation"]).isdisjoint(absent)
    assert len(table[(table["op"] == "decode") & (table["implementation"] == OURS)]) == 2
    if not torch.cuda.is_available():
        assert absent == set(BASELINES) - {"gather_sdpa", "gather_naive"}
        assert table["p50_us"].isna().all()


def test_baselines_and_parts_are_those_that_exist():
    named = {*kernel_latency.PAGED, *kernel_latency.GATHER}
    assert named == {OURS, *BASELINES}
    assert set(kernel_latency.PARTS) | {"cascade"} == set(OPS)


def test_gathers_are_compared_where_paged_kernels_refuse_the_blocks():
    cells = list(kernel_latency.cells(KernelLatencyOptions(block_size=(16, 100, 256, 512))))
    by_size = {}
    for cell in cells:
        if cell.shape.op in ("decode", "prefill"):
            by_size.setdefault(cell.shape.block_size, set()).add(cell.implementation)
    for block_size, names in by_size.items():
        assert ("gather_flash_attn_2" in names) == (block_size % 256 != 0)
        assert {OURS, "flash_attn_2", "flash_attn_3"} <= names


def test_an_fp8_cache_has_no_baselines():
    cells = kernel_latency.cells(KernelLatencyOptions(part=("decode",), kv_dtype="float8_e4m3fn"))
    assert {cell.implementation for cell in cells} == {OURS}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": ((1, 30, 20),)}, r"--prefill: needs .* got 1 30 20"),
        ({"batch": (0,)}, r"--batch must be at least 1"),
        ({"move_tokens": (0,)}, r"--move-tokens must be at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        list(kernel_latency.cells(KernelLatencyOptions(**options)))


def test_figures_of_a_table_with_times(timed_rows, drawn):
    some = KernelLatencyOptions(batch=(1, 8, 64, 256), context_len=(512, 4096))
    fp8 = KernelLatencyOptions(
        part=("decode",),
        batch=(8, 64),
        context_len=(512,),
        block_size=(16,),
        kv_dtype="float8_e4m3fn",
    )
    cells = [*kernel_latency.cells(some), *kernel_latency.cells(fp8)]
    rows = timed_rows(cells, refused=("flash_attn_4",))
    kernel_latency.plot(rows, Path())
    assert set(drawn) == {"decode_latency", "decode_bandwidth", "prefill", "moves"}
    latency = drawn["decode_latency"]
    assert len([axis for axis in latency.axes if axis.get_title()]) == 2
    labels = {line.get_label() for line in latency.axes[0].get_lines()}
    assert {f"{OURS}, block 16", f"{OURS}, block 256", "flash_attn_2, block 256"} <= labels
    assert "bound: bytes at copy bandwidth" in labels
    assert f"{OURS}, block 16, fp8 cache" in labels
    assert not any("flash_attn_4" in label for label in labels)
    for line in latency.axes[0].get_lines():
        assert len(set(line.get_xdata())) == len(line.get_xdata()), "one point per batch size"


def test_a_table_without_times_has_no_figures(timed_rows):
    rows = timed_rows(kernel_latency.cells(TINY)).assign(p50_us=float("nan"))
    assert kernel_latency.plot(rows, Path()) == []
