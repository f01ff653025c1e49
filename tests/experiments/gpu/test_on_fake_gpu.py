"""The GPU experiments' host code, from cells to rows with times, at tiny sizes.

On the stand-in of ``tests/fake_cuda.py``; kernels are interpreted, and the times mean nothing.
"""

import functools
from dataclasses import replace

import pandas as pd
import pytest
import torch

from experiments.bench import gpu_timing, timed_ops
from experiments.gpu import contact, kernel_latency
from experiments.harness import Absent

HEADS = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16}


@pytest.fixture(autouse=True)
def small_gpu(fake_gpu, monkeypatch):
    """Rates of small copies and products, and few samples."""
    sizes = {"_FLUSH_BYTES": 64, "_COPIED_BYTES": 4096, "_TRANSFERRED_BYTES": 4096}
    sizes |= {"_MATMUL_SIZE": 32, "_MIN_SAMPLES": 1, "_MAX_SAMPLES": 1, "_TOLERANCE": float("inf")}
    for name, size in sizes.items():
        monkeypatch.setattr(gpu_timing, name, size)
    for name in ("_l2_buffer", "device_bandwidths", "_link_bandwidth", "matmul_rate"):
        measure = getattr(gpu_timing, name).__wrapped__
        monkeypatch.setattr(gpu_timing, name, functools.cache(measure))
    yield fake_gpu
    timed_ops.release()


def rows_of(options, *implementations) -> list[dict]:
    cells = kernel_latency.EXPERIMENT.checked_cells(options)
    cells = (cell for cell in cells if cell.implementation in implementations)
    return [row for cell in cells for row in kernel_latency.run_cell(cell)]


def test_every_op_is_checked_captured_and_timed(small_gpu, monkeypatch):
    def lower_right(queries: int, keys: int) -> torch.Tensor:
        """A plain mask: the stand-in takes no CausalBias."""
        ones = torch.ones(queries, keys, dtype=torch.bool, device="cuda")
        return ones.tril(keys - queries)

    monkeypatch.setattr("torch.nn.attention.bias.causal_lower_right", lower_right)
    few = {"batch": (2,), "context_len": (9,), "block_size": (4,), "prefill": ((1, 3, 9),)}
    few |= {"store_tokens": (3,), "move_tokens": (8,), "num_layers": 1}
    few |= {"prefix_len": (16,), "suffix_len": 4, "cascade_batch": (2,)}
    options = kernel_latency.KernelLatency(**HEADS, **few, mla_q_heads=4)
    rows = rows_of(options, "pagelab", "paged_decode", "gather_sdpa", "torch")
    assert small_gpu.replays > 0
    launches = {(row["op"], row["implementation"]): row["launch"] for row in rows}
    eager = {key for key, launch in launches.items() if launch == "eager"}
    assert eager == {("prefill", "gather_sdpa")}
    assert {op for op, name in launches if name == "pagelab"} == set(timed_ops.OPS)
    assert len(launches) == 15
    for row in rows:
        assert 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        seconds = row["p50_us"] * 1e-6
        assert row["bandwidth_fraction"] * row["peak_gb_per_s"] == pytest.approx(row["gb_per_s"])
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / seconds / 1e9)


def test_tiles_and_splits_that_are_not_the_tables(tmp_path, drawn):
    few = {"batch": (1,), "context_len": (20,), "block_size": (4,), "part": ("decode",)}
    few |= {"tile_n": (16,), "num_warps": (4,), "num_stages": (1,), "num_splits": (2,)}
    options = kernel_latency.KernelLatency(**HEADS, **few)
    table, forced, split = rows_of(options, "pagelab")
    assert [row["by_table"] for row in (table, forced, split)] == [True, False, False]
    # The table's tile is the GPU's, not the interpreter's.
    assert (table["num_stages"], forced["tile_n"], forced["num_stages"]) == (5, 16, 1)
    assert (table["num_splits"], split["num_splits"], split["num_stages"]) == (None, 2, 5)
    rows = pd.DataFrame([table, forced, split])
    written = kernel_latency.EXPERIMENT.plot(rows, tmp_path)
    assert [path.name for path in written] == ["decode.png", "tiles.csv"]


def test_each_stage_of_a_first_contact_has_cells():
    for _, steps in contact.STAGES.values():
        for step in filter(lambda step: isinstance(step, contact.Sweep), steps):
            assert any(not isinstance(cell, Absent) for cell in step.cells()), step


def test_the_stages_of_a_first_contact(small_gpu, tmp_path, monkeypatch):
    """Their own code at tiny sizes; all tables are written."""
    few = {"dtype": ("float16",), "head_dim": (16,), "feature": ("none",)}
    kernels = ("swap_blocks", "store_kvcache", "paged_decode_attention")
    tiny = {"kernel_accuracy": few | {"kernel": kernels, "block_size": (7,)}}
    sizes = {"batch": (2,), "context_len": (9,), "block_size": (4,), "prefill": ((1, 3, 9),)}
    tiny |= {"kernel_latency": HEADS | sizes}
    said = []
    for name in ("smoke", "headline"):
        most, steps = contact.STAGES[name]
        small = [
            replace(s, options=s.options | tiny.get(s.experiment, {}), jobs=None) for s in steps
        ]
        monkeypatch.setitem(contact.STAGES, name, (most, small))
        contact.run_stage(name, tmp_path, lambda *line: said.append(line))
    print(*said, sep="\n")
    assert not [text for _, text in said if "FAILED" in text or "Error" in text]
    accuracy = pd.read_csv(tmp_path / "kernel_accuracy/nvidia-h200/rows.csv")
    assert set(accuracy["kernel"]) == set(kernels)
    assert accuracy["passed"].all()
    assert not accuracy["interpreted"].any()
    rows = pd.read_csv(tmp_path / "kernel_latency/nvidia-h200/rows.csv")
    assert sorted(rows["kv_dtype"]) == ["bfloat16"] * 2 + ["float8_e4m3fn"]
    assert (rows["p50_us"] > 0).all()
    assert any(
        "absent (2) flash_attn_3: flash_attn_interface cannot be" in text for _, text in said
    )
