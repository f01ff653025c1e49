"""The prefill kernel with a producer, on executed PTX of sm_90 or on such a GPU.

Gluon has no interpreter: where kernels are interpreted, a second process runs this file.
"""

import inspect
from dataclasses import replace
from unittest import mock

import pytest
import torch
from attention_ops import OPS, select
from op_calls import same

from kernels import paged_prefill_hopper
from kernels.launch import remembered
from kernels.primitives import INTERPRETED
from kernels.tiles import force_target, prefill_tile, target_of

PREFILL = OPS["prefill"]
SHAPE = {"head_dim": 128, "dtype": torch.bfloat16}
MIXED = ((140, 40), (0, 0), (1, 1), (45, 9), (33, 0), (128, 7))
RESOURCES = """
from dataclasses import replace
from kernels import tiles
from kernels.compiled.architectures import ARCHITECTURES
from kernels.compiled.compile import _cuobjdump, compile_call, read_resources
from kernels.testing.cases import make_case

arch = ARCHITECTURES["sm_90"]
case = make_case("paged_prefill_attention", head_dim=128, device="meta", first_block=2**18)
def call():
    tile = tiles.prefill_tile(128, case.inputs["q"].dtype, arch.tiles_target)
    forced = ("prefill_tile", replace(tile, has_producer=True))
    with tiles.force_target(replace(arch.tiles_target, tiles=(forced,))):
        case.call()
[kernel] = compile_call(call, arch)
row = read_resources("", "", arch, *kernel)
waits = _cuobjdump(kernel[2].asm["cubin"], "-sass").count("WARPGROUP.DEPBAR")
print(row.kernel, row.num_warps, row.local_bytes, waits)
"""


@pytest.fixture
def launches(device):
    """Chooses the kernel, and lists its launches."""
    if INTERPRETED.value:
        pytest.skip("in a process that compiles kernels")
    target = target_of(device)
    if target.arch != 90:
        pytest.skip("only for sm_90")
    tile = replace(prefill_tile(128, torch.bfloat16, target), has_producer=True)
    forced = replace(target, tiles=(("prefill_tile", tile),))
    launch = mock.Mock(wraps=paged_prefill_hopper.launch)
    with force_target(forced), mock.patch.object(paged_prefill_hopper, "launch", launch):
        yield launch.call_args_list


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        (((290, 65), (0, 0), (1, 1)), {"num_kv_heads": 4}),
        (((270, 3), (140, 35)), {"num_kv_heads": 1, "block_size": 128}),
        (((300, 9), (513, 1), (256, 16)), {"num_q_heads": 8, "num_kv_heads": 1, "block_size": 256}),
        (((140, 5),), {"num_q_heads": 71, "num_kv_heads": 1, "layout": "HND", "block_size": 32}),
        (((65, 64),), {"dtype": torch.float16, "block_size": 64, "layout": "interleaved"}),
        (((0, 40), (5, 10)), {}),
    ],
)
def test_matches_reference(lengths, shape, launches, device):
    PREFILL.assert_matches_reference(PREFILL.call(device, lengths, **SHAPE | shape))
    assert launches


def test_a_sequence_gives_the_same_bits_in_any_batch(launches, device):
    """Also beside rows of padding, which are not written."""
    call = PREFILL.call(device, MIXED, **SHAPE)
    results = PREFILL.run(call)
    alone = select(call, [5, 3])
    q = torch.cat([alone["q"], torch.full_like(alone["q"], torch.nan)])
    out = torch.full_like(q, 7.0)
    with mock.patch.object(paged_prefill_hopper, "_SEARCH_WIDTH", 2):
        _, lse = PREFILL.run(alone, q=q, out=out)
    assert same((out[:16], lse[:16]), [torch.cat([x[50:], x[41:50]]) for x in results])
    assert (out[16:] == 7).all()
    assert len(launches) == 2


def test_a_repeated_launch_reads_the_new_caches(launches, device):
    call = remembered(inspect.unwrap(PREFILL.function))
    first, second = (PREFILL.call(device, ((45, 9),), seed=seed, **SHAPE) for seed in (1, 2))
    call(**first)
    assert same(call(**second), PREFILL.run(second)[0])
    assert len(launches) == 2, "by the launcher and by PREFILL.run"


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"block_size": 24}, {}), ({"dtype": torch.float32}, {}), ({"layout": "unaligned K"}, {}),
        ({"head_dim": 80}, {}), ({}, {"softcap": 5.0}), ({}, {"window_size": 33}),
        ({}, {"scale": -0.1}), ({}, {"num_splits": 2}), ({}, {"causal": False}),
    ],
)  # fmt: skip
def test_other_calls_use_the_other_kernel(shape, options, launches, device):
    with mock.patch("triton.runtime.jit.KernelInterface.__getitem__"):
        PREFILL.run(PREFILL.call(device, ((9, 2),), **SHAPE | shape), **{"num_splits": 1} | options)
    assert not launches


def test_registers_suffice(compiling_process):
    """12 warps without spills, and each consumer waits for products only where the source does: if
    registers did not suffice, ptxas would add a wait to every product."""
    if not INTERPRETED.value:
        pytest.skip("the executor compiles no machine code")
    assert compiling_process(RESOURCES) == "_hopper_prefill_kernel 12 0 8\n"


@pytest.mark.parametrize("part", range(4))
def test_on_executed_ptx(part, run_compiled, pytestconfig):
    """Without --all: the first shape in step; in a seeded order the fifth and the other tests."""
    if not INTERPRETED.value:
        pytest.skip("kernels are compiled in this process")
    some = ["-k", "step and lengths0 or seed and (lengths4 or not lengths)"]
    some = [] if pytestconfig.getoption("--all") else some
    run_compiled(__file__, "--executor", "ptx-sm_90", "--part", f"{part}/4", *some)
