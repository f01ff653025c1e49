"""Ops of the GPU experiments at tiny sizes: right results pass, wrong ones get no time."""

import pytest
import torch

from experiments.bench import timed_ops
from experiments.bench.shapes import OURS, Shape, Timed, WrongResult
from experiments.bench.timed_ops import OPS, problem_of, refusal
from experiments.harness import Unavailable

FP8 = {"kv_dtype": "float8_e4m3fn"}
LAYERS = {"block_size": 8, "num_layers": 2}
SIZES = {
    "decode": {"batch": 3, "context_len": 37},
    "decode-fp16": {"batch": 2, "context_len": 20, "block_size": 7, "dtype": "float16"},
    "prefill": {"batch": 2, "context_len": 45, "query_len": 19, "block_size": 24},
    "cascade": {"batch": 3, "context_len": 48 + 21, "prefix_len": 48},
    "mla": {"batch": 2, "context_len": 37, "num_kv_heads": 1},
    **{op: {"batch": 21} for op in ("norm", "gate", "store")},
    "store-fp8": {"batch": 9, **FP8},
    "copy-fp8": {"batch": 3, **LAYERS, **FP8},
    **{op: {"batch": 3, **LAYERS} for op in ("copy", "swap_out", "swap_in")},
}
HEADS = {"block_size": 16, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32}
SHAPES = {name: Shape(op=name.partition("-")[0], **HEADS | sizes) for name, sizes in SIZES.items()}


def run(shape, implementation=OURS):
    return timed_ops.run(Timed(shape=shape, implementation=implementation, budget_ms=1))


def test_every_op_has_a_shape():
    assert {shape.op for shape in SHAPES.values()} == set(OPS)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_implementation_is_right_or_refused_with_a_reason(shape):
    problem = problem_of(shape)
    assert OURS in problem.implementations
    for implementation in problem.implementations:
        if refusal(shape, implementation):
            with pytest.raises(Unavailable, match=implementation):
                run(shape, implementation)
            continue
        row = run(shape, implementation)
        assert row["error"] <= row["bound"]
        assert row["implementation"] == implementation
        assert row["bytes"] > 0


def test_a_wrong_result_has_no_time(monkeypatch):
    problem = problem_of(SHAPES["decode"])
    ours = problem.implementations[OURS]
    monkeypatch.setitem(problem.implementations, OURS, lambda: ours() + 1)
    with pytest.raises(WrongResult, match="pagelab is wrong"):
        run(SHAPES["decode"])


def test_a_refusal_needs_no_inputs():
    huge = {"batch": 2**40, "context_len": 2**40, "block_size": 16}
    with pytest.raises(Unavailable, match=r"flash_attn_2: .*multiple of 256, got 16"):
        run(Shape(op="decode", **huge), "flash_attn_2")


def test_running_out_of_memory_becomes_a_reason(monkeypatch):
    def full(shape, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB. GPU 0 has ...")

    monkeypatch.setattr(timed_ops, "case_of", full)
    timed_ops.release()
    with pytest.raises(Unavailable, match=r"^CUDA out of memory$"):
        run(SHAPES["decode"])
