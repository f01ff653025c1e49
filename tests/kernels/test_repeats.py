"""Calls and launches that are repeated give the same bits, or there is a race.

The GPU repeats calls often at real sizes, the interpreter at tiny ones.
"""

from inspect import signature

import pytest
import torch
from op_calls import same

import kernels
from kernels import add_rms_norm, paged_decode_attention
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.cases import OPS, make_case
from kernels.testing.op import Case

ON_GPU = torch.cuda.is_available()
REPEATS, ROUNDS, SHRINK = (300, 40, 1) if ON_GPU else (1, 2, 20)
HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
if not ON_GPU:  # in the interpreter, products of bf16 are wrong
    HEADS |= {"num_q_heads": 2, "num_kv_heads": 1, "dtype": torch.float16}
FP16_D64 = {"dtype": torch.float16, "head_dim": 64}
REPEATED = [op for op, record in OPS.items() if record.repeated]
assert [op for op in OPS if "num_splits" in signature(getattr(kernels, op)).parameters] == REPEATED


@pytest.fixture(scope="module")
def poisoned_memory():
    """Overrides the fixture: filling memory would separate launches that depend on each other."""


def make(op: str, device: torch.device, **sizes: object) -> Case:
    """The op at its sizes; without a GPU, with a part of the sequences and of their tokens."""
    lens = {
        name: tuple(-(-n // SHRINK) for n in some[:: SHRINK if len(some) > SHRINK else 1])
        for name, some in OPS[op].repeated.items()
    }
    return make_case(op, **HEADS | lens | sizes, device=device)


@pytest.mark.parametrize("sizes", [{}, {"kv_dtype": FP8_DTYPE}, FP16_D64, {"features": ("split",)}])
@pytest.mark.parametrize("op", REPEATED)
def test_repeats_of_a_call_agree(op, sizes, device):
    case = make(op, device, **sizes)
    first = case.call()
    assert all(same(case.call(), first) for _ in range(REPEATS))


@pytest.mark.parametrize("num_splits", [1, 8])
def test_repeats_of_a_chain_of_dependent_launches_agree(num_splits, device):
    """Each norm reads a decode's result, and the next decode reads the norm's."""
    options = {"num_splits": num_splits, "return_lse": False}
    inputs = make("paged_decode_attention", device, options=options).inputs
    weight = torch.ones_like(inputs["q"][0].flatten())

    def chain() -> torch.Tensor:
        q = inputs["q"]
        for _ in range(ROUNDS):
            out = paged_decode_attention(**inputs | {"q": q})
            q = add_rms_norm(out.flatten(1), None, weight).view_as(q)
        return q

    expected = chain()
    assert expected.isfinite().all()
    assert same(chain(), expected)
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain()
        for _ in range(50):
            captured.zero_()
            graph.replay()
            assert same(captured, expected)
