"""The experiment kernel_resources: its table, and the work that its bounds follow from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from experiments import kernel_resources
from experiments.bench.gpus import GPUS
from experiments.bench.kernel_work import Work, work_of
from kernels.compiled.architectures import ARCHITECTURES
from kernels.compiled.shipped import shipped_calls

H200 = next(gpu for gpu in GPUS if gpu.name == "H200 SXM")


def compiled(kernel, pointers, **constants):
    """The part of KernelResources that the work follows from. pointers: name -> type."""
    signature = {f"{name}_ptr": f"*{kind}" for name, kind in pointers.items()}
    return SimpleNamespace(kernel=f"_{kernel}_kernel", signature=signature, constants=constants)


def decode(cache="bf16", out="bf16", is_split=False):
    pointers = {"out": out, "q": "bf16", "k_cache": cache, "v_cache": cache}
    heads = {"NUM_KV_HEADS": 8, "GROUP_SIZE": 4, "HEAD_DIM": 128, "BLOCK_SIZE": 16}
    return compiled("paged_decode", pointers, **heads, IS_SPLIT=is_split)


def test_decode_of_the_bar():
    """Batch 64, context 4096, 32 query and 8 KV heads of 128: every key and value once."""
    (work,) = work_of(decode())
    keys_and_values = 64 * 4096 * 8 * 2 * 128 * 2
    block_ids, q_and_out = 64 * 256 * 4, 2 * 64 * 32 * 128 * 2
    assert work.bytes == keys_and_values + block_ids + q_and_out
    assert work.operations == 64 * 32 * 4096 * 2 * (2 * 128)  # two products of 2 x 128 per key
    assert work.outputs == 64 * 32 * 128
    seconds, limit = work.bound(H200)
    assert (seconds, limit) == (work.bytes / 4.8e12, "memory")


@pytest.mark.parametrize("kind", ["u8", "fp8e4nv"])
def test_fp8_halves_the_bytes_of_the_cache(kind):
    half, full = work_of(decode(cache=kind))[0], work_of(decode())[0]
    assert full.bytes - half.bytes == 64 * 4096 * 8 * 2 * 128
    assert full.operations == half.operations


def test_a_split_decode_writes_states_in_place_of_its_output():
    split, whole = work_of(decode(out="fp32", is_split=True))[0], work_of(decode())[0]
    rows = 64 * 32
    assert split.bytes - whole.bytes == rows * 8 * (128 + 1) * 4 - rows * 128 * 2
    assert "8 splits" in split.problem


def test_prefill_counts_what_each_query_sees():
    pointers = dict.fromkeys(("out", "q", "k_cache", "v_cache"), "fp16")
    heads = {"NUM_KV_HEADS": 2, "GROUP_SIZE": 3, "HEAD_DIM": 80, "BLOCK_SIZE": 16}
    prompt, chunk = work_of(compiled("paged_prefill", pointers, **heads, IS_SPLIT=False))
    (few,) = work_of(compiled("paged_prefill", pointers, **heads, IS_SPLIT=True))
    assert prompt.operations == 4 * 6 * 80 * sum(range(1, 8193))
    assert chunk.operations == 4 * 6 * 80 * sum(range(32768 - 512 + 1, 32768 + 1))
    assert chunk.bytes == 32768 * 2 * 2 * 80 * 2 + 2048 * 4 + 2 * 512 * 6 * 80 * 2
    states = 16 * 6 * 8 * (80 + 1) * 4
    assert few.bytes == 32768 * 2 * 2 * 80 * 2 + 2048 * 4 + 16 * 6 * 80 * 2 + states
    assert prompt.bound(H200)[1] == chunk.bound(H200)[1] == "arithmetic"


def test_store_reads_and_writes_every_row_once():
    pointers = dict.fromkeys(("key", "value"), "bf16") | dict.fromkeys(("k_cache", "v_cache"), "u8")
    row = compiled("store_kvcache", pointers | {"slot_mapping": "i64"}, NUM_KV_HEADS=8, HEAD_DIM=96)
    (work,) = work_of(row)
    assert work.bytes == 8192 * (8 * 96 * (2 + 2 + 1 + 1) + 8)
    assert work.operations == 0


def test_swapping_is_bound_by_the_link_to_the_host():
    (work,) = work_of(compiled("swap_blocks", {"src": "i16", "dst": "i16"}, NUM_ELEMENTS=16384))
    assert work.outputs == 64 * 64 * 16384
    assert work.bound(H200) == (2 * work.outputs / 64e9, "host link")


def test_the_bound_is_the_slowest_of_its_parts():
    work = Work("", 1, bytes=48 * 10**6, operations=0)
    assert work.bound(H200) == (1e-5, "memory")
    work = Work("", 1, bytes=48 * 10**6, operations=int(2e-5 * H200.half_flops))
    assert work.bound(H200) == (pytest.approx(2e-5), "arithmetic")


@pytest.mark.slow
def test_the_command_line_from_kernels_to_figures(command_line, tmp_path):
    only = ("--op", "paged_decode_attention", "--arch", "sm_90", "--match", "^bf16 d64 g4$|split$")
    command_line("run", "kernel_resources", *only, "--match", "^bf16 d128 g4 split$", "--jobs", 1)
    folder = tmp_path / "results" / "kernel_resources" / "cpu"
    for figure in ("resources", "bounds"):
        assert (folder / f"{figure}.png").stat().st_size > 10_000
    rows = pd.read_csv(folder / "rows.csv")
    assert set(rows["gpu"]) == {"H100 SXM", "H200 SXM"}
    assert list(rows["kernel"].unique()) == ["paged_decode", "merge_splits"]
    row = rows[rows["kernel"] == "paged_decode"].iloc[0]
    assert row["programs_per_multiprocessor"] == 2
    assert row["limited_by"] == "registers"  # by shared memory as many
    assert row["warps_per_multiprocessor"] == 8
    assert row["occupancy"] == 8 / 64
    assert row["local_bytes"] == 0
    assert row["dots"] == row["tensor_core_dots"] == 4
    assert row["async_copies_128_bit"] > row["loads_128_bit"] > 0
    assert row["bound_us"] == pytest.approx(work_of(decode("bf16", "fp32", True))[0].bytes / 3.35e6)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"op": ("nonesuch",)}, "--op 'nonesuch' is unknown; choose from store_kvcache"),
        ({"arch": ("sm_70",)}, "--arch 'sm_70' is unknown; choose from sm_80, sm_90"),
    ],
)
def test_bad_options(option, message):
    options = kernel_resources.KernelResourcesOptions(**option)
    with pytest.raises(ValueError, match=message):
        list(kernel_resources.cells(options))


COMMITTED = Path(__file__).parents[2] / "results" / "kernel_resources" / "cpu" / "rows.csv"


def test_the_committed_table_has_every_shipped_configuration():
    rows = pd.read_csv(COMMITTED)
    committed = rows[["arch", "op", "config"]].drop_duplicates().itertuples(index=False, name=None)
    shipped = {(call.op, call.config) for call in shipped_calls()}
    assert set(committed) == {(arch, *call) for arch in ARCHITECTURES for call in shipped}
