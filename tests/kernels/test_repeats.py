"""Calls and launches that are repeated give the same bits.

A race of copies, or a dependent launch that starts too early, shows as a difference between
repeats. The GPU repeats calls often at real sizes, the interpreter twice at tiny ones.
"""

from __future__ import annotations

import pytest
import torch
from op_calls import same

from kernels import add_rms_norm, paged_decode_attention
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.cases import Case, make_case

ON_GPU = torch.cuda.is_available()
HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
LENS = {
    "prefill": {"context_lens": (2048, 300, 33), "query_lens": (1024, 300, 1)},
    "decode": {"context_lens": (5000, 300, 33) * 20},
    "cascade": {"prefix_lens": (3000, 50), "group_sizes": (40, 1), "context_lens": (77,) * 41},
}
if not ON_GPU:  # in the interpreter, products of bf16 are wrong
    HEADS = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 32, "dtype": torch.float16}
    LENS = {
        "prefill": {"context_lens": (40, 9), "query_lens": (20, 9)},
        "decode": {"context_lens": (40, 9)},
        "cascade": {"prefix_lens": (40, 5), "group_sizes": (2, 1), "context_lens": (9,) * 3},
    }
OPS = {
    "prefill": "paged_prefill_attention",
    "decode": "paged_decode_attention",
    "cascade": "shared_prefix_decode_attention",
}


@pytest.fixture(scope="module")
def poisoned_memory():
    """Overrides the fixture: filling memory would separate launches that depend on each other."""


def make(phase: str, device: torch.device, **sizes: object) -> Case:
    return make_case(OPS[phase], **HEADS | LENS[phase] | sizes, device=device)


@pytest.mark.parametrize(
    ("phase", "sizes"),
    [
        pytest.param("prefill", {}, id="prefill"),
        pytest.param("prefill", {"kv_dtype": FP8_DTYPE}, id="prefill fp8"),
        pytest.param("prefill", {"dtype": torch.float16, "head_dim": 64}, id="prefill fp16 d64"),
        pytest.param("prefill", {"options": {"num_splits": 4}}, id="prefill split"),
        pytest.param("decode", {}, id="decode"),
        pytest.param("decode", {"kv_dtype": FP8_DTYPE}, id="decode fp8"),
        pytest.param("cascade", {}, id="cascade"),
    ],
)
def test_repeats_of_a_call_agree(phase, sizes, device):
    case = make(phase, device, **sizes)
    first = case.call()
    for _ in range(300 if device.type == "cuda" else 2):
        assert same(case.call(), first)


@pytest.mark.parametrize("num_splits", [1, 8])
def test_repeats_of_a_chain_of_dependent_launches_agree(num_splits, device):
    """Each norm reads a decode's result, and the next decode reads the norm's."""
    options = {"num_splits": num_splits, "return_lse": False}
    inputs = make("decode", device, options=options).inputs
    weight = torch.ones_like(inputs["q"][0].flatten())

    def chain(rounds: int) -> torch.Tensor:
        q = inputs["q"]
        for _ in range(rounds):
            out = paged_decode_attention(**inputs | {"q": q})
            q = add_rms_norm(out.flatten(1), None, weight).view_as(q)
        return q

    rounds = 40 if device.type == "cuda" else 2
    expected = chain(rounds)
    assert expected.isfinite().all()
    assert same(chain(rounds), expected)
    if device.type == "cpu":
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(rounds)
    for _ in range(50):
        captured.zero_()
        graph.replay()
        assert same(captured, expected)
