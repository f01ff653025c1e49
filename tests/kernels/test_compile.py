"""What the compiler makes of the shipped decode and store kernels, and of all kernels on gfx942.

This is how performance is guarded where no GPU is: registers, shared memory, access widths and
tensor-core instructions of the compiled kernels are asserted on.
"""

from __future__ import annotations

import json

import pytest

from kernels.compiled.architectures import ARCHITECTURES, CUDA_ARCHITECTURES
from kernels.compiled.compile import (
    KernelResources,
    compile_call,
    count_loop_spills,
    format_table,
    main,
)
from kernels.compiled.shipped import HEAD_DIMS
from kernels.compiled.shipped import OPS as ALL_OPS
from kernels.tiles import PROGRAMS_PER_MULTIPROCESSOR

OPS = ("store_kvcache", "paged_decode_attention")


@pytest.fixture(scope="module", params=CUDA_ARCHITECTURES)
def rows(request, shipped_resources):
    """Every kernel of both ops on one architecture; fp16 compiles like bf16, so once is enough."""
    return shipped_resources(
        request.param, *OPS, match="bf16|fp16" if request.param == "sm_90" else "bf16"
    )


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


def test_decode_fetches_keys_and_values_by_16_byte_accesses(rows):
    sizes = set()
    for row in of_kernel(rows, "_paged_decode_kernel"):
        constants = row["constants"]
        sizes.add(constants["BLOCK_SIZE"])
        tile_bytes = 2 * 2 * constants["TILE_N"] * constants["HEAD_DIM_PADDED"]  # K and V
        buffers = (row["num_stages"] - 1) // 2
        # The pipeline's prologue fills its buffers, its body refills one, the tail loads its own.
        assert 16 * row["async_copies"]["128"] * 32 * row["num_warps"] == (buffers + 1) * tile_bytes
        assert bytes_fetched(row) >= (buffers + 2) * tile_bytes
        # What is narrower is block ids and lengths, 4 bytes each.
        assert set(row["async_copies"]) <= {"32", "128"}
        assert set(row["global_loads"]) <= {"32", "128"}
    assert sizes == {16, 24, 256}


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


ATTENTION_KERNELS = {"_paged_decode_kernel", "_paged_prefill_kernel"}


@pytest.fixture(scope="module")
def amd_rows(shipped_resources):
    """Every op on gfx942 at a padded head_dim; at the largest decode, and prefill with features."""
    rows = shipped_resources("gfx942", match="^b16$|bf16 d80|fp16 d80 (list|hnd)")
    largest = "bf16 d256 g4($| b16 split features)"
    attention = ("paged_decode_attention", "paged_prefill_attention")
    return rows + shipped_resources("gfx942", *attention, match=largest)


def test_every_op_compiles_for_amd_without_spills(amd_rows):
    assert {row["op"] for row in amd_rows} == set(ALL_OPS)
    assert {row["kernel"] for row in amd_rows} >= ATTENTION_KERNELS
    for row in amd_rows:
        assert row["local_bytes"] == 0, (row["kernel"], row["config"])
        assert row["programs_per_multiprocessor"] >= 1, (row["kernel"], row["config"])


def test_amd_attention_uses_matrix_cores_and_16_byte_loads(amd_rows):
    """A wavefront is 64 threads; loads to registers take the place of asynchronous copies."""
    for row in amd_rows:
        if row["kernel"] not in ATTENTION_KERNELS:
            continue
        constants, config = row["constants"], (row["kernel"], row["config"])
        regions = 2 + bool(constants.get("HAS_LEFT"))
        assert row["dots"] == row["tensor_core_dots"] >= 2 * regions, config
        assert row["mma"].keys() == {"mfma"}, config
        # Every region of keys loads its K and V; what is narrower is block ids and lengths.
        tile_bytes = 2 * 2 * constants["TILE_N"] * constants["HEAD_DIM_PADDED"]
        assert 16 * row["global_loads"]["128"] * 64 * row["num_warps"] >= regions * tile_bytes
        assert set(row["global_loads"]) <= {"32", "64", "128"}, config
        if row["kernel"] == "_paged_decode_kernel":
            assert row["programs_per_multiprocessor"] >= PROGRAMS_PER_MULTIPROCESSOR, config


def test_amd_store_and_copies_move_16_bytes_at_a_time(amd_rows):
    for row in amd_rows:
        constants, accesses = row["constants"], 16 * 64 * row["num_warps"]
        if row["op"] == "store_kvcache":
            tile_bytes = 2 * 2 * constants["TILE_ROWS"] * constants["HEAD_DIM_PADDED"]
        elif row["op"] in ("copy_blocks", "swap_blocks"):
            tile_bytes = 2 * constants["TILE"]
        else:
            continue
        assert accesses * row["global_loads"]["128"] >= tile_bytes, row["config"]
        assert accesses * row["global_stores"]["128"] >= tile_bytes, row["config"]
        assert set(row["global_stores"]) == {"128"}, row["config"]


SASS = """
        /*0000*/                   NOP outside ;          /* 0x0000000000017983 */
        /*0010*/                   BSSY B0, 0x90 ;
        /*0020*/              @!P0 BRA 0x90 ;
        /*0030*/                   NOP inside ;
        /*0040*/                   BRA 0xc0 ;
        /*0050*/                   NOP inside ;
        /*0060*/               @P1 CALL.REL.NOINC 0x80 ;
        /*0070*/                   BRA 0x30 ;
        /*0080*/                   NOP outside ;
        /*0090*/                   BSYNC B0 ;
        /*00a0*/              @!P0 STG.E [R2.64+0x30], R4 ;
        /*00b0*/                   EXIT ;
        /*00c0*/                   NOP inside ;
        /*00d0*/             @!UP2 BRA 0xc0 ;
        /*00e0*/                   BRA.U !UP0, 0xa0 ;
        /*00f0*/                   BRA 0x50 ;
        /*0100*/                   NOP outside ;
        /*0110*/                   RET.REL.NODEC R2 0x0 ;
        /*0120*/                   BRA 0x120;
"""


def test_spills_count_inside_loops_only():
    """Of one loop, part of which stands behind the end of the kernel."""
    assert count_loop_spills(SASS) == 0
    for access in ("LDL.LU R0, [R1]", "@!P0 STL.64 [R1+0x8], R2"):
        assert count_loop_spills(SASS.replace("NOP inside", access)) == 3
        assert count_loop_spills(SASS.replace("NOP outside", access)) == 0


@pytest.mark.parametrize(
    ("arch", "used", "expected"),
    [
        pytest.param("sm_90", (168, 106_240, 4), ("shared memory", 2), id="sm90-shared-memory"),
        pytest.param("sm_90", (129, 0, 8), ("registers", 1), id="sm90-registers-in-units-of-8"),
        pytest.param("sm_90", (128, 0, 8), ("registers", 2), id="sm90-registers"),
        pytest.param("sm_80", (24, 0, 8), ("warps", 8), id="sm80-warps"),
        pytest.param("sm_100", (16, 0, 1), ("programs", 32), id="sm100-programs"),
        pytest.param(
            "sm_100", (64, 67_584, 4, 256), ("tensor memory", 2), id="sm100-tensor-memory"
        ),
        pytest.param("sm_80", (16, 166_912, 4), ("shared memory", 1), id="sm80-largest-program"),
        pytest.param("gfx942", (129, 16384, 4), ("registers", 3), id="gfx942-registers"),
        pytest.param("gfx942", (64, 16384, 4), ("shared memory", 4), id="gfx942-shared-memory"),
        pytest.param("gfx942", (56, 0, 4), ("warps", 8), id="gfx942-warps"),
    ],
)
def test_resident_programs(arch, used, expected):
    registers, shared_bytes, num_warps, *tensor_memory = used
    resident = ARCHITECTURES[arch].resident_programs(
        registers=registers,
        shared_bytes=shared_bytes,
        num_warps=num_warps,
        tensor_memory_columns=sum(tensor_memory),
    )
    assert min(resident.items(), key=lambda item: item[1]) == expected


SPECIALISATION = """
import json, torch
from kernels import paged_decode_attention, store_kvcache
from kernels.compiled.architectures import ARCHITECTURES
from kernels.compiled.compile import compile_call

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


def test_new_lengths_compile_nothing_new(compiling_process):
    """Launching on meta tensors also shows that grids and arguments depend on no device value."""
    counts = json.loads(compiling_process(SPECIALISATION))
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
