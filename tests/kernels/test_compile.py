"""Registers, shared memory, access widths and tensor-core instructions of the shipped kernels.

They guard performance where there is no GPU.
"""

import ast
import json
import re
from pathlib import Path

import pytest

import kernels
from kernels.compiled.architectures import ARCHITECTURES
from kernels.compiled.compile import count_softmax_overlaps, launched_by
from kernels.primitives import INTERPRETED
from kernels.testing.cases import OPS
from kernels.tiles import PROGRAMS_PER_MULTIPROCESSOR, PROGRAMS_THAT_SAMPLE

DECODE, PREFILL = "_paged_decode_kernel", "_paged_prefill_kernel"
MLA = "_paged_mla_decode_kernel"
SAMPLE = "_sample_tokens_kernel"
LAYER = ("add_rms_norm", "gated_activation")
MOVES = ("copy_blocks", "swap_blocks", "merge_attention_states")
MAX_LOCAL_BYTES = {"sm_80": 16, "sm_90": 0, "sm_100": 0}
"""Bytes that a thread may spill. Which kernels do depends on Triton's version."""
MMA_FAMILY = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}


def pytest_generate_tests(metafunc):
    """Every shipped configuration, or what the ops guard, for each architecture."""
    if "rows" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all")
        cases = [
            (arch, op, "" if every else record.guarded[arch])
            for arch in ARCHITECTURES
            for op, record in OPS.items()
            if every or arch in record.guarded
        ]
        metafunc.parametrize("rows", cases, indirect=True, ids=["-".join(one[:2]) for one in cases])


@pytest.fixture
def rows(request, shipped_resources):
    """Rows of one selection, of which none spills more than MAX_LOCAL_BYTES."""
    _, op, patterns = request.param
    rows = shipped_resources(*request.param)
    assert {row["op"] for row in rows} == {op}
    for pattern in patterns.split("|"):
        assert any(re.search(pattern, row["config"]) for row in rows), pattern
    for row in rows:
        assert row["local_bytes"] <= MAX_LOCAL_BYTES[row["arch"]], name_of(row)
    return rows


def of_kernels(rows, *names):
    return [row for row in rows if row["kernel"] in names]


def name_of(row):
    return row["arch"], row["kernel"], row["config"]


def bytes_of(row, accesses, width=128):
    """Bytes that all threads of a program move by the accesses of a width, each run once."""
    return width // 8 * 32 * row["num_warps"] * row[accesses].get(str(width), 0)


def test_programs_fit_a_multiprocessor(rows):
    """The number that split counts assume; three for top-k and top-p, whose programs then run in up
    to three waves. Kernels with few bytes in flight per thread need at least 28 warps, 16 with the
    widest rows."""
    wanted = {DECODE: PROGRAMS_PER_MULTIPROCESSOR, SAMPLE: PROGRAMS_THAT_SAMPLE}
    for row in rows:
        least = 3 if " top" in row["config"] else wanted.get(row["kernel"], 1)
        if row["op"] in (*LAYER, "rope_store_kvcache"):
            widest = row["constants"].get("HIDDEN_SIZE") == 16384
            least = (16 if widest else 28) / row["num_warps"]
        assert row["programs_per_multiprocessor"] >= least, name_of(row)


def regions_of(row):
    """Regions of keys, each with a loop of its own: all of decode's, or prefill's with and without
    masks."""
    return 1 if row["kernel"] != PREFILL else 2 + row["constants"]["HAS_LEFT"]


def test_attention_computes_every_product_on_tensor_cores(rows):
    for row in of_kernels(rows, DECODE, PREFILL, MLA):
        assert row["dots"] == row["tensor_core_dots"] >= 2 * regions_of(row), name_of(row)
        assert len(row["mma"]) == 1, name_of(row)
        if row["config"].startswith("bf16") and row["kernel"] == PREFILL:
            assert set(row["mma"]) == {MMA_FAMILY[row["arch"]]}, name_of(row)


def test_prefill_multiplies_during_the_softmax(rows):
    """On sm_90, seen in the PTX, where the table says so: in each region of keys."""
    for row in of_kernels(rows, PREFILL):
        constants, arch, name = row["constants"], row["arch"], name_of(row)
        if row["config"].startswith("bf16 d128"):
            assert constants["SCORES_AHEAD"] == (arch == "sm_90"), name
        overlapping = regions_of(row) if constants["SCORES_AHEAD"] else 0
        assert row["softmax_overlaps"] == overlapping, name


def test_attention_fetches_keys_and_values_by_16_byte_accesses(rows):
    for row in of_kernels(rows, DECODE, PREFILL):
        constants, copies, name = row["constants"], row["async_copies"], name_of(row)
        decode, fp8 = row["kernel"] == DECODE, row["config"].startswith("fp8")
        tile_bytes = constants["TILE_N"] * constants["HEAD_DIM_PADDED"] * (1 if fp8 else 2)
        regions = regions_of(row)
        # Block ids, lengths and numbers per head are narrower.
        assert set(row["global_loads"]) <= {"32", "128"}, name
        # Each region has a pipeline: its prologue fills the buffers, its body refills one. On
        # sm_100, where products are asynchronous too, that is peeled.
        buffers = (row["num_stages"] - 1) // 2
        fills = regions * (buffers + 1)
        copied = bytes_of(row, "async_copies")
        assert copied >= fills * 2 * tile_bytes, name
        assert fp8 or row["arch"] == "sm_100" or copied == fills * 2 * tile_bytes, name
        assert set(copies) == {"32", "128"}, name
        if decode:
            assert copies["32"] >= 2 * buffers, "block ids too, ahead of what they lead to"
        elif not fp8:
            q_bytes = 2 * constants["TILE_M"] * constants["HEAD_DIM_PADDED"]
            first_keys = tile_bytes * constants["SCORES_AHEAD"]
            assert bytes_of(row, "global_loads") == q_bytes + first_keys, name
            assert set(row["global_stores"]) <= {"32", "128"}, name


def test_stores_and_copies_move_16_bytes_at_a_time(rows):
    for row in rows:
        constants, fp8 = row["constants"], row["config"].startswith("fp8")
        elements = constants.get("TILE_ROWS", 0) * constants.get("HEAD_DIM_PADDED", 0)
        read = written = 2 * elements
        if row["op"] == "store_kvcache":
            read, written = 2 * read, 2 * written // (1 + fp8)  # K and V
        elif row["op"] == "merge_attention_states":
            read = 2 * read
        elif row["op"] in MOVES:
            read = written = 2 * constants["TILE"]
        elif row["op"] == "add_rms_norm":  # x, weight and the residual, which is written too
            written = (
                2 * constants["HIDDEN_SIZE_PADDED"] * (1 + ("residual_ptr" in row["signature"]))
            )
            read = written + 2 * constants["HIDDEN_SIZE_PADDED"]
        elif row["op"] == "gated_activation":
            read, written = 4 * constants["TILE"], 2 * constants["TILE"]
        else:
            if row["config"].endswith(" norms") and not fp8:
                assert set(row["global_stores"]) == {"128"}, name_of(row)
            if fp8 and row["op"] == "rope_store_kvcache":  # 8 bytes: half a rotated key of e4m3
                assert min(map(int, row["global_stores"])) >= 64
            continue
        moved = [bytes_of(row, accesses) for accesses in ("global_loads", "global_stores")]
        assert moved == [read, written], name_of(row)
        if row["op"] != "merge_attention_states":  # whose LSEs are narrower
            assert set(row["global_stores"]) == {"128"}, name_of(row)
            # 8 bytes: slots, pairs, addresses; 4: scales.
            narrow = {"32", "64"} if fp8 else {"64"}
            assert set(row["global_loads"]) <= {"128"} | narrow, name_of(row)


def test_sampling_loads_what_a_thread_needs_of_a_span_at_once(rows):
    for row in of_kernels(rows, SAMPLE, "_merge_samples_kernel"):
        assert row["local_bytes"] == 0, name_of(row)
        if row["kernel"] == SAMPLE and " top" not in row["config"]:  # these read logits again
            width = "128" if row["config"].startswith("fp32") else "64"
            seeds = width == "64" and row["constants"].get("noise_seeds_ptr", 1) is not None
            assert row["global_loads"][width] == 4 + seeds, name_of(row)
            assert row["registers"] <= 64, name_of(row)


UNFUSED = """
from kernels.compiled.architectures import ARCHITECTURES
from kernels.compiled.compile import compile_call
from kernels.compiled.shipped import shipped_calls

for config, call in shipped_calls("sample_tokens"):
    if config.startswith("bf16"):
        for function, _, compiled in compile_call(call, ARCHITECTURES["sm_90"]):
            ptx = compiled.asm["ptx"]
            adds = "add.f32" in ptx or "add.rn.f32" in ptx
            print(function.__name__, config, adds, "fma" in ptx, sep=",")
"""


def test_no_product_of_the_noise_is_fused_with_a_sum(compiling_process):
    """Or a GPU would draw other tokens than the reference.

    The kernel that samples adds noise, except where it runs for the largest logits. With top-p it
    samples twice.
    """
    lines = [line.split(",") for line in compiling_process(UNFUSED).splitlines()]
    restricted = "bf16 v128256 min_p top_k top_p"
    noisy = [config for kernel, config, adds, _ in lines if kernel == SAMPLE and adds == "True"]
    assert noisy == ["bf16 v128256", "bf16 v128256 min_p", restricted, restricted]
    assert {fused for *_, fused in lines} == {"False"}


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        pytest.param("ex2 mma_async wait_group mma_async mma_async", 1, id="values-not-waited-for"),
        pytest.param("ex2 mma_async wait_group mma_async wait_group", 0, id="values-waited-for"),
        pytest.param("mma_async wait_group ex2 mma_async", 0, id="softmax-before-values"),
    ],
)
def test_softmax_overlaps(loop, expected):
    lines = [f"wgmma.{one}.sync" if "_" in one else f"{one}.approx" for one in loop.split()]
    ptx = "\n".join(
        f"\t{line} %r1;" for line in [*lines, "@%p1 bra $L__BB0_1", "bra.uni $L__BB0_2"]
    )
    assert count_softmax_overlaps(ptx) == expected


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
from kernels.compiled.architectures import ARCHITECTURES
from kernels.compiled.compile import compile_call, launched_by
from kernels.flash_attn_compat import flash_attn_varlen_func, flash_attn_with_kvcache
from kernels.testing.cases import make_case

SIZES = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "device": "meta", "padded": False}

def case(op, **sizes):
    return make_case(op, **SIZES | sizes).call

def decode(batch, table_width, num_splits, window_size):
    options = {"num_splits": num_splits, "window_size": window_size, "return_lse": False}
    lens = {"context_lens": (1,) * batch, "table_width": table_width}
    return case("paged_decode_attention", **lens, options=options)

def prefill(query_lens, table_width, window_size, num_splits=1):
    options = {"num_splits": num_splits, "window_size": window_size, "return_lse": False}
    lens = {"context_lens": query_lens, "query_lens": query_lens, "table_width": table_width}
    return case("paged_prefill_attention", **lens, options=options)

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

def grow(capacity):
    contiguous, new, angles = meta(4, capacity, 8, 128), meta(4, 1, 8, 128), meta(capacity, 64)
    rotated = new, new, angles, angles, meta(4, dtype=torch.int32)
    return lambda: flash_attn_with_kvcache(
        meta(4, 1, 32, 128), contiguous, contiguous, *rotated, num_splits=1
    )

def with_kvcache(**options):
    pages, k, angles = meta(64, 256, 8, 128), meta(4, 8, 8, 128), meta(4096, 64)
    lens = meta(4, dtype=torch.int32)
    options = {"cache_leftpad": lens} if not options else options
    return lambda: flash_attn_with_kvcache(
        meta(4, 8, 32, 128), pages, pages, k, k, angles, angles, lens, causal=True, **options
    )

def varlen(k, block_table=None):
    starts = meta(5, dtype=torch.int32)
    return lambda: flash_attn_varlen_func(
        meta(100, 32, 128), k, k, starts, starts, 40, 90, window_size=(20, 3),
        block_table=block_table,
    )

calls = {
    "grow": [grow(capacity) for capacity in (100, 101, 4096)],
    "append": [with_kvcache(), with_kvcache(block_table=meta(4, 16, dtype=torch.int32))],
    "varlen": [
        varlen(meta(300, 8, 128)), varlen(meta(64, 16, 8, 128), meta(4, 16, dtype=torch.int32))
    ],
    "decode": [decode(1, 1, 2, 1), decode(2, 16, 16, 1024), decode(64, 255, 7, 77)],
    "store": [case("store_kvcache", num_tokens=n) for n in (1, 2, 4096)],
    "norm": [case("add_rms_norm", num_tokens=n) for n in (1, 2, 4095, 4096)],
    "gate": [case("gated_activation", num_tokens=n) for n in (1, 2, 4095, 4096)],
    "prefill": [
        prefill((1,), 1, 1), prefill((4096,), 257, 16), prefill((4033, *(1,) * 63), 257, 1024),
        prefill((85, *(1,) * 15), 6, 1), prefill((16,), 2000, 1024, 2), prefill((17,), 999, 16, 9),
    ],
}
for call in (calls["append"][0], calls["varlen"][0]):  # no other test compiles these
    compile_call(call, ARCHITECTURES["sm_80"])
kernels = {
    op: {
        (source.hash(), str(options))
        for call in calls_of_op
        for _, source, options in launched_by(call, ARCHITECTURES["sm_90"])
    }
    for op, calls_of_op in calls.items()
}
print(json.dumps({op: len(found) for op, found in kernels.items()}))
"""


def test_new_lengths_compile_nothing_new(compiling_process):
    """Launching on meta tensors also shows that grids and arguments depend on no device value.

    Decode is one kernel where the tables allow one chunk, else two. Of prefill one finds its tiles
    in uniform sequences, one looks them up; the first also leaves split states, which another
    merges. The flash-attn functions have kernels of their own for contiguous and for paged keys.
    """
    counts = json.loads(compiling_process(SPECIALISATION))
    flash_attn = {"grow": 4, "append": 7, "varlen": 2}
    assert counts == flash_attn | {"decode": 3, "store": 1, "norm": 1, "gate": 1, "prefill": 4}


def test_no_device_function_returns_none():
    """Triton 3.6, which comes with PyTorch 2.11, compiles none that does."""
    returned = []
    for path in Path(kernels.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            decorators = getattr(function, "decorator_list", ())
            if any(ast.unparse(one).startswith("triton.jit") for one in decorators):
                returned += [node.value for node in ast.walk(function) if type(node) is ast.Return]
    results = [result for value in returned for result in getattr(value, "elts", [value])]
    assert len(results) > 30
    assert "None" not in [ast.unparse(result) for result in results if result]


def test_interpreter_process_cannot_compile():
    if not INTERPRETED.value:
        pytest.skip("this process does not run the interpreter")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        launched_by(lambda: None, ARCHITECTURES["sm_90"])
