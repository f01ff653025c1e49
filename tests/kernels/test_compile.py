"""What the compiler makes of the shipped decode and store kernels, without a GPU.

This is how performance is guarded where no GPU is: registers, shared memory, access widths and
tensor-core instructions of the compiled kernels are asserted on.
"""

from __future__ import annotations

import json

import pytest

from kernels.compile import (
    ARCHITECTURES,
    KernelResources,
    compile_call,
    format_table,
    main,
)
from kernels.shipped import HEAD_DIMS
from kernels.tiles import PROGRAMS_PER_MULTIPROCESSOR

OPS = ("store_kvcache", "paged_decode_attention")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def rows(request, shipped_resources):
    """Every kernel of both ops on one architecture; fp16 compiles like bf16, so once is enough."""
    return shipped_resources(request.param, *OPS, match="" if request.param == "sm_90" else "bf16")


def of_kernel(rows, name):
    selected = [row for row in rows if row["kernel"] == name]
    assert selected
    return selected


def bytes_fetched(row):
    """Bytes that the 16-byte accesses of one program to global memory bring in, each run once."""
    accesses = row["global_loads"].get("128", 0) + row["async_copies"].get("128", 0)
    return 16 * accesses * 32 * row["num_warps"]


def test_every_configuration_is_compiled(rows):
    decode = {row["config"] for row in of_kernel(rows, "_paged_decode_kernel")}
    store = {row["config"] for row in of_kernel(rows, "_store_kvcache_kernel")}
    for head_dim in HEAD_DIMS:
        assert f"bf16 d{head_dim} g4" in decode
        assert f"bf16 d{head_dim}" in store
    assert "bf16 d128 g4 split features" in decode
    of_kernel(rows, "_merge_splits_kernel")


def test_nothing_spills(rows):
    assert {row["local_bytes"] for row in rows} == {0}


def test_decode_fetches_keys_and_values_by_16_byte_accesses(rows):
    for row in of_kernel(rows, "_paged_decode_kernel"):
        constants = row["constants"]
        assert constants["BLOCK_SIZE"] == 16
        tile_bytes = 2 * 2 * constants["TILE_N"] * constants["HEAD_DIM_PADDED"]  # K and V
        buffers = (row["num_stages"] - 1) // 2
        # The pipeline's prologue fills its buffers, its body refills one, the tail loads its own.
        assert 16 * row["async_copies"]["128"] * 32 * row["num_warps"] == (buffers + 1) * tile_bytes
        assert bytes_fetched(row) >= (buffers + 2) * tile_bytes
        # What is narrower is block ids and lengths, 4 bytes each.
        assert set(row["async_copies"]) <= {"32", "128"}
        assert set(row["global_loads"]) <= {"32", "128"}


def test_decode_keeps_block_ids_in_flight(rows):
    """Block ids come by asynchronous copies too, ahead of the keys and values they lead to."""
    for row in of_kernel(rows, "_paged_decode_kernel"):
        assert row["async_copies"]["32"] >= 2 * ((row["num_stages"] - 1) // 2)


def test_decode_runs_both_products_on_tensor_cores(rows):
    for row in of_kernel(rows, "_paged_decode_kernel"):
        assert row["dots"] == row["tensor_core_dots"] == 4  # two in the loop, two in the tail
        assert sum(row["mma"].values()) > 0


def test_decode_programs_fit_a_multiprocessor_together(rows):
    for row in of_kernel(rows, "_paged_decode_kernel"):
        assert row["programs_per_multiprocessor"] >= PROGRAMS_PER_MULTIPROCESSOR


def test_store_moves_rows_by_16_byte_accesses(rows):
    for row in of_kernel(rows, "_store_kvcache_kernel"):
        constants = row["constants"]
        tile_bytes = 2 * 2 * constants["TILE_ROWS"] * constants["HEAD_DIM_PADDED"]
        assert bytes_fetched(row) == tile_bytes
        assert 16 * row["global_stores"]["128"] * 32 * row["num_warps"] == tile_bytes
        assert set(row["global_stores"]) == {"128"}
        assert set(row["global_loads"]) <= {"64", "128"}  # 8 bytes: the slots


SPECIALISATION = """
import json, torch
from kernels import paged_decode_attention, store_kvcache
from kernels.compile import ARCHITECTURES, compile_call

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

def decode(batch, max_blocks, num_splits, window_size):
    cache = meta(1000, 16, 8, 128)
    lens = meta(batch, dtype=torch.int32)
    tables = meta(batch, max_blocks, dtype=torch.int32)
    paged_decode_attention(
        meta(batch, 32, 128), cache, cache, tables, lens,
        num_splits=num_splits, window_size=window_size,
    )

def store(num_tokens):
    key, cache = meta(num_tokens, 8, 128), meta(1000, 16, 8, 128)
    store_kvcache(key, key, cache, cache, meta(num_tokens, dtype=torch.int64))

def kernels(*calls):
    return {k[2].hash for call in calls for k in compile_call(call, ARCHITECTURES["sm_90"])}

print(json.dumps({
    "decode": len(kernels(
        lambda: decode(1, 1, 2, 1),
        lambda: decode(2, 16, 16, 1024),
        lambda: decode(64, 255, 7, 77),
    )),
    "store": len(kernels(lambda: store(1), lambda: store(2), lambda: store(4096))),
}))
"""


def test_new_lengths_compile_nothing_new(run_without_interpreter):
    """Launching on meta tensors also shows that grids and arguments depend on no device value."""
    counts = json.loads(run_without_interpreter("-c", SPECIALISATION))
    assert counts == {"decode": 2, "store": 1}  # decode is two kernels when it splits


def test_table_has_a_line_for_every_kernel(rows):
    lines = format_table([KernelResources(**row) for row in rows]).splitlines()
    assert lines[0].split()[:4] == ["arch", "kernel", "config", "warps"]
    for line, row in zip(lines[1:], rows, strict=True):
        assert line.startswith(f"{row['arch']} ")
        assert f" {row['config']} " in line
        assert f" {row['registers']} " in line


def test_interpreter_process_cannot_compile(device):
    if device.type != "cpu":
        pytest.skip("this process does not run the interpreter")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        compile_call(lambda: None, ARCHITECTURES["sm_90"])


@pytest.mark.parametrize("flag", ["--arch", "--op"])
def test_unknown_choice_names_the_known_ones(flag, capsys):
    with pytest.raises(SystemExit):
        main([flag, "nonesuch"])
    known = {"--arch": "sm_100", "--op": "paged_decode_attention"}[flag]
    assert known in capsys.readouterr().err
