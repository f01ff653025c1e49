"""The experiment kernel_counters: counts that follow from the work."""

import dataclasses
import sys

import pytest

from experiments.kernel_counters import COUNTED, EXPERIMENT, KernelCounters, cells
from kernels.testing.cases import CASES


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


def test_the_counts_of_a_store_follow_from_its_work(tiny_run):
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
    assert len(store) == 1


def test_a_decode_reads_the_context_once(tiny_run):
    rows = tiny_run("kernel_counters").rows
    decode = rows[rows["op"] == "decode"]
    for lengths, row in decode[decode["kernel"] == "paged_decode"].groupby("lengths"):
        kv = 2 * 1024 * 2 * 128 * 2
        assert kv < row["distinct_bytes"].item() < 1.1 * kv, lengths
        # Every lane reads the lengths that its program walks past and its sequence's.
        lengths_read = 4 * 32 * row["num_warps"].item() * row["programs"].item() * (8 + 8)
        assert row["read_bytes"].item() < 1.1 * kv + lengths_read


def test_a_missing_import_of_a_file_is_named(tmp_path):
    from experiments.harness import Unavailable
    from experiments.kernel_counters.other_kernels import sglang_decode

    file = tmp_path / "decode_attention.py"
    file.write_text("from sglang.srt.nothing import absent\n")
    with pytest.raises(Unavailable, match=r"decode_attention\.py .* alone: .*sglang\.srt\.nothing"):
        sglang_decode(file)
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


def test_the_figure_has_units_and_every_kernel(tiny_run, drawn, tmp_path):
    EXPERIMENT.plot(tiny_run("kernel_counters").rows, tmp_path)
    labels = {axis.get_xlabel() for axis in drawn["counts"].axes}
    assert all("per" in label or "%" in label for label in labels)
    names = {tick.get_text() for tick in drawn["counts"].axes[0].get_yticklabels()}
    assert names == {"decode, paged_decode", "decode, merge_splits", "store, store_kvcache"}
