"""The experiment kernel_latency: its grid and its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.bench.kernel_problems import OPS
from experiments.gpu import kernel_latency
from experiments.gpu.kernel_latency import OURS, KernelLatency
from experiments.harness.grid import check
from kernels.testing.baselines import BASELINES


def test_baselines_and_parts_are_those_that_exist():
    named = {*kernel_latency.PAGED, *kernel_latency.GATHER}
    assert named == {OURS, *BASELINES}
    assert set(kernel_latency.PARTS) | {"cascade"} == set(OPS)


def test_gathers_are_compared_where_paged_kernels_refuse_the_blocks():
    cells = list(kernel_latency.cells(KernelLatency(block_size=(16, 100, 256, 512))))
    by_size = {}
    for cell in cells:
        if cell.shape.op in ("decode", "prefill"):
            by_size.setdefault(cell.shape.block_size, set()).add(cell.implementation)
    for block_size, names in by_size.items():
        assert ("gather_flash_attn_2" in names) == (block_size % 256 != 0)
        assert {OURS, "flash_attn_2", "flash_attn_3"} <= names


def test_an_fp8_cache_has_no_baselines():
    cells = kernel_latency.cells(KernelLatency(part=("decode",), kv_dtype="float8_e4m3fn"))
    assert {cell.implementation for cell in cells} == {OURS}


@pytest.mark.parametrize("sizes", [(1, 30, 20), (0, 1, 1), (1, 0, 1)])
def test_prefill_has_sequences_and_new_tokens_in_their_context(sizes):
    with pytest.raises(ValueError, match=f"--prefill {sizes[0]} {sizes[1]} {sizes[2]}: needs seq"):
        check(KernelLatency(prefill=(sizes,)))


def test_figures_of_a_table_with_times(timed_rows, drawn):
    some = KernelLatency(batch=(1, 8, 64, 256), context_len=(512, 4096))
    fp8 = KernelLatency(
        part=("decode",),
        batch=(8, 64),
        context_len=(512,),
        block_size=(16,),
        kv_dtype="float8_e4m3fn",
    )
    cells = [*kernel_latency.cells(some), *kernel_latency.cells(fp8)]
    rows = timed_rows(cells, refused=("flash_attn_3",))
    kernel_latency.EXPERIMENT.plot(rows, Path())
    assert set(drawn) == {"decode_latency", "decode_bandwidth", "prefill", "moves", "gpu_rates"}
    bars = [axis.get_yticklabels() for axis in drawn["gpu_rates"].axes]
    assert [[label.get_text() for label in labels] for labels in bars] == [
        ["device copy, read and written", "to pinned host memory", "from pinned host memory"],
        ["bf16 matrix product"],
    ]
    latency = drawn["decode_latency"]
    assert len([axis for axis in latency.axes if axis.get_title()]) == 2
    labels = {line.get_label() for line in latency.axes[0].get_lines()}
    assert {f"{OURS}, block 16", f"{OURS}, block 256", "flash_attn_2, block 256"} <= labels
    assert "bound: bytes at copy bandwidth" in labels
    assert f"{OURS}, block 16, fp8 cache" in labels
    assert not any("flash_attn_3" in label for label in labels)
    for line in latency.axes[0].get_lines():
        assert len(set(line.get_xdata())) == len(line.get_xdata()), "one point per batch size"


def test_a_table_without_times_has_no_figures(timed_rows):
    rows = timed_rows(kernel_latency.cells(KernelLatency(batch=(1,)))).assign(p50_us=float("nan"))
    assert kernel_latency.EXPERIMENT.plot(rows, Path()) == []
