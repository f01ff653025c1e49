"""The experiment kernel_counters: counts that follow from the work, and the modelled bound."""

from __future__ import annotations

import dataclasses
import sys

import pandas as pd
import pytest

from experiments import kernel_counters
from experiments.bench.gpus import GPUS
from experiments.kernel_counters import COUNTED, EXPERIMENT, KernelCounters, cells
from experiments.kernel_counters.modelled_time import modelled_time
from kernels.executor import Counts
from kernels.executor.counts import _CLASSES, ProgramCounts
from kernels.testing.cases import CASES

A100 = next(gpu for gpu in GPUS if gpu.arch == "sm_80")
CYCLE = 1 / (312e12 / (108 * 2048))
IDLE = ProgramCounts(instructions=0, lines=0, wavefronts=0, tensor_operations=0)


def launch(*programs: ProgramCounts, distinct_lines: int = 0) -> Counts:
    return Counts(programs=programs, distinct_lines=distinct_lines)


@pytest.mark.parametrize(
    ("work", "part", "cycles"),
    [
        ({"instructions": 4000}, "issue", 1000),
        ({"wavefronts": 300, "lines": 700}, "LSU", 1000),
        ({"tensor_operations": 2048 * 1000}, "tensor cores", 1000),
    ],
)
def test_rates_of_a_multiprocessor(work, part, cycles):
    time = modelled_time(launch(*[IDLE._replace(**work)] * 108), A100, 108)
    assert time.parts[part] == pytest.approx(cycles * CYCLE)
    assert {name: value for name, value in time.parts.items() if value} == {part: time.bound}
    assert time.bound_by == part


def test_dram_moves_every_line_once():
    time = modelled_time(launch(IDLE, distinct_lines=1000), A100, 108)
    assert time.bound == time.parts["DRAM"] == 128_000 / 2.039e12
    assert time.bound_by == "DRAM"


def test_parts_of_a_multiprocessor_work_side_by_side():
    issue, tensor = IDLE._replace(instructions=4000), IDLE._replace(tensor_operations=2048 * 900)
    assert modelled_time(launch(issue, tensor), A100, 1).placed == pytest.approx(
        1000 * 312e12**-1 * 2048
    )


@pytest.mark.parametrize(
    ("cycles", "busiest"),
    [
        ([10, 10, 10], 20),  # a third has to wait
        ([10, 1, 1, 1, 1], 10),
        ([1, 1, 1, 10], 11),  # a long one last is a tail
        ([4, 3, 2, 2], 6),  # 4 + 2 beside 3 + 2: the fourth goes where 3 ends first
    ],
)
def test_programs_are_placed_one_by_one_in_order(cycles, busiest):
    programs = [IDLE._replace(instructions=4 * one) for one in cycles]
    time = modelled_time(launch(*programs), A100, 2)
    clock = 312e12 / (2 * 2048)
    assert time.placed == pytest.approx(busiest / clock)
    assert time.bound_by == ("tail" if busiest > 1.05 * sum(cycles) / 2 else "issue")


def test_an_op_is_varied_over_what_matters_to_it(tmp_path):
    file = tmp_path / "decode_attention.py"
    file.write_text("")
    options = KernelCounters(op=("decode", "rotary"), arch=("sm_80",), sglang=file)
    grid = list(cells(options))
    ours, theirs = [
        [cell for cell in grid if cell.implementation == name] for name in ("pagelab", "sglang")
    ]
    assert [cell.op for cell in ours] == ["decode"] * 16 + ["rotary"]
    assert [
        dataclasses.replace(cell, implementation="pagelab", source=None) for cell in theirs
    ] == [cell for cell in ours if cell.op == "decode"]
    assert {cell.source.name for cell in theirs} == {"decode_attention.py"}


def test_every_op_is_counted_and_a_skewed_batch_has_as_many_tokens():
    assert {counted.op for counted in COUNTED.values()} == set(CASES)
    for op in ("decode", "prefill"):
        lengths = [COUNTED[op].sizes[kind]["context_lens"] for kind in ("even", "skewed")]
        assert sum(lengths[0]) == sum(lengths[1])


def test_every_class_of_the_executor_has_a_column():
    assert sorted(kernel_counters.CLASSES) == sorted(name for name, _ in _CLASSES)


@pytest.mark.slow
def test_the_counts_of_a_store_follow_from_its_work(tiny_run, drawn, tmp_path):
    """64 tokens of 2 heads of 128: rows of 16 bytes per thread, 512 per request, each row once."""
    rows = tiny_run("kernel_counters").rows
    store = rows[(rows["op"] == "store") & (rows["kv_dtype"] == "bfloat16")]
    row = store.iloc[0]
    moved = 2 * 64 * 2 * 128 * 2  # K and V, bytes
    assert row["written_bytes"] == moved
    assert row["distinct_bytes"] == 2 * moved + 64 * 8  # and the slots
    assert row["distinct_line_bytes"] == row["distinct_bytes"]
    wide = 2 * moved // (32 * 16)
    narrow = row["requests"] - wide
    assert row["instructions_global_store"] == wide / 2
    assert row["instructions_global_load"] == wide / 2 + narrow
    assert row["sectors"] == 2 * moved / 32 + narrow
    assert row["lines"] == 2 * moved / 128 + narrow
    assert row["tensor_operations"] == row["bank_conflicts"] == 0
    assert row["instructions"] == row[[c for c in rows if c.startswith("instructions_")]].sum()
    assert set(store["gpu"]) == {"H100 SXM", "H200 SXM"}
    assert len(store) == 2


@pytest.mark.slow
def test_a_decode_reads_the_context_once(tiny_run):
    rows = tiny_run("kernel_counters").rows
    decode = rows[(rows["op"] == "decode") & (rows["gpu"] == "H100 SXM")]
    for lengths, row in decode[decode["kernel"] == "paged_decode"].groupby("lengths"):
        kv = 2 * 1024 * 2 * 128 * 2
        assert kv < row["distinct_bytes"].item() < 1.1 * kv, lengths
        # Every lane reads the lengths that its program walks past and its sequence's.
        lengths_read = 4 * 32 * row["num_warps"].item() * row["programs"].item() * (8 + 8)
        assert row["read_bytes"].item() < 1.1 * kv + lengths_read
    by_lengths = decode[decode["kernel"] == "paged_decode"].set_index("lengths")
    even, skewed = by_lengths.loc["even"], by_lengths.loc["skewed"]
    assert skewed["modelled_placed_us"] > 2.5 * even["modelled_placed_us"], (
        "one is 4.5 times longer"
    )
    assert skewed["modelled_bound_by"] == "tail"


def test_a_missing_import_of_a_file_is_named(tmp_path):
    from experiments.harness import Unavailable
    from experiments.kernel_counters.other_kernels import sglang_decode

    file = tmp_path / "decode_attention.py"
    file.write_text("from sglang.srt.nothing import absent\n")
    with pytest.raises(Unavailable, match=r"decode_attention\.py .* alone: .*sglang\.srt\.nothing"):
        sglang_decode(file)
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_figures_have_units_and_every_kernel(tiny_run, drawn, tmp_path):
    rows: pd.DataFrame = tiny_run("kernel_counters").rows
    EXPERIMENT.plot(rows, tmp_path)
    assert set(drawn) == {"counts", "modelled"}
    labels = {axis.get_xlabel() for axis in drawn["counts"].axes}
    assert all("per" in label or "%" in label for label in labels)
    names = {tick.get_text() for tick in drawn["counts"].axes[0].get_yticklabels()}
    assert names == {"decode, paged_decode", "decode, merge_splits", "store, store_kvcache"}
    assert "not measured" in drawn["modelled"]._supxlabel.get_text()
    assert EXPERIMENT.name == "kernel_counters"
