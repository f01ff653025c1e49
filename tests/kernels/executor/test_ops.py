"""Runs the ops on the PTX of one architecture (needs `--executor`).

Ops with matrix products run on every architecture. Other ops, features and sizes are distributed
over them; with `--all` everything runs on each. `make test` runs these tests through
`test_selection.py`. The other kernel tests take `--executor` too, with many more shapes.
"""

import inspect
import itertools
import re
from functools import partial
from unittest import mock

import pytest
import torch
import triton
from op_calls import ATTENTION
from packaging.version import Version

from kernels import paged_decode_attention
from kernels.fp8_cache import FP8_DTYPE
from kernels.launch import remembered
from kernels.testing.cases import OPS, make_case

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 24, "num_tokens": 9}
FP16, BF16, FP32 = DTYPES = [
    {"dtype": getattr(torch, x)} for x in ("float16", "bfloat16", "float32")
]
FP8 = {**BF16, "kv_dtype": FP8_DTYPE}
DECODE, PREFILL, SHARED = ATTENTION
SIZES = {op: {**record.executed[0]} for op, record in OPS.items()}
IN_TURN = [
    (op, {"features": (one,)})
    for op, record in OPS.items()
    for one in record.features
    if op not in ATTENTION
]
IN_TURN += [(op, sizes) for op, record in OPS.items() for sizes in record.executed[1:]]
VARIANTS = [
    {**FP16, "features": OPS[DECODE].features},
    {**FP16, "kv_dtype": FP8_DTYPE, "features": OPS[DECODE].features[:-1]},
    {**FP8, "scales": "number", "options": {"num_splits": 2}},
    {**BF16, "layout": "unaligned K", "options": {"num_splits": 2}},
    {**BF16, "layout": "unaligned V", "exponent": 59, "head_dim": 88, "options": {"scale": 0.125}},
    {**FP32, "exponent": 14, "options": {"scale": -0.125, "num_splits": 2}},
]


ON_EVERY_ARCHITECTURE = (DECODE, PREFILL, "paged_mla_decode_attention")


def turn_of(config) -> int:
    """Which third of the calls runs on this architecture."""
    architecture = config.getoption("--executor").removeprefix("ptx-")
    return ARCHITECTURES.index(architecture) if architecture in ARCHITECTURES else 0


def calls_of(turn: int, step: int = 3) -> list[tuple[str, dict]]:
    """(op, sizes of its case) of each call that runs on an architecture, in dtypes that change from
    call to call: every ``step``-th, and each op with matrix products.

    Shared prefixes run the kernels of prefill and decode, to which most variants are left.
    """
    first = turn % step
    chosen = [
        (op, {})
        for number, op in enumerate(OPS)
        if number % step == first or op in ON_EVERY_ARCHITECTURE
    ]
    chosen = [
        (op, DTYPES[(number + turn) % 3] | SIZES[op] | sizes)
        for number, (op, sizes) in enumerate([*chosen, *IN_TURN[first::step]])
    ]
    return chosen + [
        (op, SIZES[op] | variant)
        for place, op in enumerate(ATTENTION)
        for number, variant in enumerate(VARIANTS)
        if (place + number) % step == first
        if step == 1 or op != SHARED or not {"features", "layout", "exponent"} & {*variant}
    ]


def described(sizes: dict) -> str:
    """Readable test id for the sizes of a case."""
    return "-".join(re.sub(r"torch\.|[ '{}()]", "", f"{k}={x}") for k, x in sizes.items())


def pytest_generate_tests(metafunc):
    if "num_splits" in metafunc.fixturenames:
        splits = [*itertools.product(ATTENTION, (1, 2))][turn_of(metafunc.config) :: 3]
        metafunc.parametrize(("op", "num_splits"), splits)
    if "sizes" in metafunc.fixturenames:
        step = 1 if metafunc.config.getoption("--all") else 3
        calls = calls_of(turn_of(metafunc.config), step)
        metafunc.parametrize(
            ("op", "sizes"), calls, ids=[f"{op}-{described(s)}" for op, s in calls]
        )


def test_the_architectures_cover_all_calls():
    repeated, left_out = 2 * len(ON_EVERY_ARCHITECTURE), 5
    assert sum(map(len, map(calls_of, range(3)))) == len(calls_of(0, 1)) + repeated - left_out


def test_result(op, sizes):
    case = make_case(op, **HEADS | sizes)
    for name, accuracy in case.judge().items():
        assert accuracy.passed, f"{name}: {accuracy}, bound {accuracy.bound:.3g}"


def test_a_dimension_of_one_may_have_a_stride_of_one():
    """Triton compiles an argument of 1, here the bytes from block to block, as a constant."""
    case = make_case(DECODE, **HEADS | FP8, context_lens=(9,))
    inputs = case.inputs
    for name in ("k_cache", "v_cache"):
        block = inputs[name][inputs["block_tables"][0, 0]]
        inputs[name] = block.as_strided((1, *block.shape), (1, *block.stride()))
    inputs["block_tables"].zero_()
    assert all(accuracy.passed for accuracy in case.judge().values())


def test_a_query_that_is_nan_is_not_taken_for_one_that_sees_nothing(op, num_splits):
    """A maximum of a GPU drops NaN, and an LSE of -inf would drop the row in a merge."""
    case = make_case(op, **HEADS | FP16 | SIZES[op] | {"options": {"num_splits": num_splits}})
    case.inputs["q"][0] = torch.nan
    out, lse = case.call()
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert not lse[1:].isnan().any()


def test_an_equal_call_launches_the_compiled_kernels_again():
    """Two kernels, an fp8 cache as bytes, new tensors for the states."""
    function = inspect.unwrap(paged_decode_attention)
    launcher = mock.Mock(wraps=function)
    call = remembered(launcher)
    sizes = HEADS | FP8 | SIZES[DECODE] | {"options": {"num_splits": 2}}
    first, second = (make_case(DECODE, **sizes, seed=seed) for seed in (1, 2))
    call(**first.inputs)
    for got, wanted in zip(call(**second.inputs), function(**second.inputs), strict=True):
        assert torch.equal(got, wanted)
    assert launcher.call_count == 1


def executing(request, **options):
    """The executor for the chosen architecture."""
    from kernels.executor import execute_ptx

    return execute_ptx(request.config.getoption("--executor").removeprefix("ptx-"), **options)


@pytest.mark.parametrize("op", [DECODE, PREFILL])
def test_attention_does_not_depend_on_the_order(request, op):
    """Every order gives the same result, decode by the same number of instructions. On sm_90 and
    sm_100 prefill has asynchronous products; on sm_100 it waits for them in a loop."""
    lens = {"context_lens": (140, 9)} | ({"query_lens": (33, 1)} if op == PREFILL else {})
    outs, counts = [], set()
    for seed in (None, 7, 8):
        case = make_case(op, **HEADS | FP16 | lens)
        with executing(request, seed=seed) as execution:
            outs.append(case.call())
        assert len(execution.launches) == 1
        counts.add(execution.warp_instructions)
    assert len(counts) == 1 or op == PREFILL
    assert all(torch.equal(a, b) for other in outs[1:] for a, b in zip(outs[0], other, strict=True))


DECODING_LAYER = (
    ("add_rms_norm", {"features": ("alone",)}),
    ("rope_store_kvcache", {}),
    (DECODE, {"context_lens": (40, 9), "options": {"num_splits": 2}}),
    (PREFILL, {"context_lens": (40, 9), "query_lens": (1, 1)}),
    ("gated_activation", {}),
    ("sample_tokens", {"vocab_size": 2100}),
)


def test_dependent_launches_wait(request):
    """From sm_90 on, a launch may begin before the previous launch has ended. Each kernel waits for
    that end. Without the wait, its first memory access is a fault."""
    from kernels.executor import Fault, FaultKind

    turn = turn_of(request.config)  # sm_90 and sm_100 have every other op, sm_80 only the first
    wait = re.compile(r"griddepcontrol\.wait ?;")
    for op, sizes in DECODING_LAYER[turn - 1 :: 2] if turn else DECODING_LAYER[:1]:
        case = make_case(op, **HEADS | FP32 | {"num_tokens": 2, "block_size": 16} | sizes)
        kernels = {}
        with executing(request, edit=lambda name, ptx, of=kernels: of.setdefault(name, ptx)):
            case.call()
        waiting = [name for name, ptx in kernels.items() if wait.search(ptx)]
        assert waiting == ([*kernels] if turn else [])
        for broken in waiting:

            def edit(name, ptx, broken=broken):
                return wait.sub("", ptx) if name == broken else ptx

            with executing(request, edit=edit), pytest.raises(Fault) as raised:
                case.call()
            assert (raised.value.kind, raised.value.kernel) == (FaultKind.LAUNCH_RACE, broken)


SHIFT = 64 if Version(triton.__version__) >= Version("3.7.1") else 2**20
"""Bytes.  Before 3.7.1 64 would move all accesses of one layout conversion together: no fault."""
BREAKS = {
    r"^\s*bar\.sync\s+0;$": ("", "SHARED_RACE"),
    r"\bcp\.async\.wait_group\s+\d+;": ("cp.async.wait_group 7;", "COPY_IN_FLIGHT"),
    r"@!?%p\d+ ((?:ld|st)\.global)": (r"\1", "OUT_OF_BOUNDS"),
    r"\bsetp\.lt\.s(32|64)\b": (r"setp.le.s\1", "OUT_OF_BOUNDS"),
    r"(\b(?:st\.shared|ldmatrix)\S* .*?\[ ?%r\d+) ?(?:\+ ?0 ?)?\]": (
        rf"\1+{SHIFT}]", "OUT_OF_BOUNDS COPY_IN_FLIGHT",
    ),
    r"^\s*fence\.proxy\.async\S*;$": ("", "FENCE"),
    r"^\s*wgmma\.fence\S*;$": ("", "FENCE"),
    r"^\s*wgmma\.wait_group\S*\s+0;$": ("", "MATRIX_IN_FLIGHT"),
    r"^\s*@!complete bra\.uni waitLoop;$": ("", "MATRIX_IN_FLIGHT"),
    r"^\s*@%p\d+ tcgen05\.commit\S* .*;$": ("", "ENDLESS"),
    r"^\s*tcgen05\.wait::(ld|st)\S*;$": ("", "COPY_IN_FLIGHT"),
}  # fmt: skip
"""Pattern of what bounds or orders memory accesses: a wrong replacement, kinds of the fault."""


def test_broken_prefill_is_a_fault(request):
    """The executor finds that barriers, waits, fences or masks of a compiled kernel are missing."""
    from kernels.executor import Fault

    texts = []
    case = make_case(PREFILL, **HEADS | FP16, context_lens=(140, 9), query_lens=(33, 1))
    with executing(request, edit=lambda name, ptx: texts.append(ptx) or ptx):
        case.call()
    broken = {one: re.sub(one, BREAKS[one][0], texts[0], flags=re.M) for one in BREAKS}
    broken = {one: ptx for one, ptx in broken.items() if ptx != texts[0]}
    architecture = request.config.getoption("--executor").removeprefix("ptx-")
    assert len(broken) == {"sm_90": 8, "sm_100": 9}.get(architecture, 5)
    for one, text in broken.items():
        edit = partial(lambda _name, _ptx, text: text, text=text)
        with executing(request, edit=edit), pytest.raises(Fault) as raised:
            case.call()
        assert raised.value.kind.name in BREAKS[one][1].split(), one
