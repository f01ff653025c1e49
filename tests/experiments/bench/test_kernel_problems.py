"""Problems of the GPU experiments, at tiny sizes: right results pass, wrong ones get no time."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from experiments.bench import attention_problems
from experiments.bench.gpu_timing import NO_TIMES
from experiments.bench.kernel_problems import problem_of, refusal, run
from experiments.bench.problem import OURS, Shape, WrongResult
from experiments.harness import Unavailable

_HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32}
SHAPES = {
    "decode": Shape(op="decode", batch=3, context_len=37, block_size=16, **_HEADS),
    "decode-fp16": Shape(
        op="decode", batch=2, context_len=20, block_size=7, dtype="float16", **_HEADS
    ),
    "prefill": Shape(op="prefill", batch=2, context_len=40, query_len=40, block_size=16, **_HEADS),
    "prefill-cached": Shape(
        op="prefill", batch=2, context_len=45, query_len=19, block_size=24, **_HEADS
    ),
    "cascade": Shape(
        op="cascade", batch=3, context_len=48 + 21, prefix_len=48, block_size=16, **_HEADS
    ),
    "norm": Shape(op="norm", batch=21, block_size=16, **_HEADS),
    "gate": Shape(op="gate", batch=21, block_size=16, **_HEADS),
    "store": Shape(op="store", batch=21, block_size=16, **_HEADS),
    "copy": Shape(op="copy", batch=3, block_size=8, num_layers=2, **_HEADS),
    "swap_out": Shape(op="swap_out", batch=3, block_size=8, num_layers=2, **_HEADS),
    "swap_in": Shape(op="swap_in", batch=3, block_size=8, num_layers=2, **_HEADS),
}
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_implementation_is_right_or_says_why_it_cannot_run(shape):
    problem = problem_of(shape)
    assert OURS in problem.implementations
    served = 0
    for implementation in problem.implementations:
        if refusal(shape, implementation):
            with pytest.raises(Unavailable, match=implementation):
                run(shape, implementation)
            continue
        row = run(shape, implementation, budget_ms=1)
        assert row["error"] <= row["bound"]
        assert row["implementation"] == implementation
        assert row["bytes"] > 0
        served += 1
    assert served >= 2


def test_what_cannot_be_served_is_known_before_inputs_are_made():
    huge = {"batch": 2**40, "context_len": 2**40, "block_size": 16}
    with pytest.raises(Unavailable, match=r"flash_attn_2: .*multiple of 256, got 16"):
        run(Shape(op="decode", **huge), "flash_attn_2")
    with pytest.raises(Unavailable, match="torch_index_put: it does not quantise"):
        run(Shape(op="store", kv_dtype="float8_e4m3fn", **huge), "torch_index_put")


@on_cpu
def test_there_are_no_times_without_a_gpu():
    row = run(SHAPES["decode"], OURS)
    for column in (*NO_TIMES, "gb_per_s", "bandwidth_fraction", "matmul_fraction"):
        assert not row[column], column


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_wrong_result_gets_no_time(shape, monkeypatch):
    """An implementation that does nothing (moves), or is a little off (attention)."""
    problem = problem_of(shape)
    right = problem.implementations[OURS]

    def wrong():
        if problem.reset:
            return None
        out = right()
        return out + 0.05 * out.abs().max()

    monkeypatch.setitem(problem.implementations, OURS, wrong)
    with pytest.raises(WrongResult, match=f"{OURS} is wrong: error .* no time is reported"):
        run(shape, OURS)


def test_all_unused_slots_are_poison():
    shape = SHAPES["decode"]
    batch = attention_problems._paged_batch(shape, torch.device("cpu"))
    used = set(batch.block_tables.flatten().tolist())
    assert len(used) == batch.block_tables.numel()
    for cache in (batch.k_cache, batch.v_cache):
        holds_nan = cache.isnan().any(-1).any(-1)
        for block in range(len(cache)):
            expected = torch.zeros(shape.block_size, dtype=torch.bool)
            if block not in used:
                expected[:] = True
            elif block in batch.block_tables[:, -1]:
                expected[shape.context_len % shape.block_size :] = True
            assert torch.equal(holds_nan[block], expected)


def test_bytes_and_operations_are_counted_by_hand():
    """batch 2, 37 tokens in cache, 19 queries: of them query i sees 19 + i tokens."""
    shape = Shape(op="prefill", batch=2, context_len=37, query_len=19, block_size=16, **_HEADS)
    problem = problem_of(shape)
    kv, qo = 2 * (2 * 37 * 2 * 32) * 2, 2 * (2 * 19 * 4 * 32) * 2
    assert problem.num_bytes == kv + qo
    visible = sum(range(37 - 19 + 1, 37 + 1))
    assert problem.flops == 2 * visible * 4 * (2 * 32 * 2)

    cascade = problem_of(SHAPES["cascade"])
    assert cascade.num_bytes == 2 * (48 + 3 * 21) * 2 * 32 * 2 + 2 * 3 * 4 * 32 * 2
    copy = problem_of(SHAPES["copy"])
    assert copy.num_bytes == 2 * 3 * (2 * 2 * 8 * 2 * 32) * 2


@pytest.mark.parametrize("name", ["decode", "store", "copy"])
def test_an_enlarged_cache_is_used_at_its_end(name):
    shape = dataclasses.replace(SHAPES[name], min_cache_elements=200_000)
    assert run(shape, OURS)["error"] == pytest.approx(0, abs=0.01)
    if name == "decode":
        batch = attention_problems._paged_batch(shape, torch.device("cpu"))
        assert batch.k_cache.numel() >= 200_000
        used = batch.block_tables.flatten()
        assert sorted(used.tolist()) == list(range(len(batch.k_cache) - 9, len(batch.k_cache)))


def test_the_sample_repeats_rows_of_the_batch():
    shape = Shape(op="prefill", batch=3, context_len=37, query_len=19, block_size=7, **_HEADS)
    batch = attention_problems._paged_batch(shape, torch.device("cpu"))
    small, queries = attention_problems._sample(batch, [(0, 0, 4), (2, 15, 4)])
    assert queries.tolist() == [0, 1, 2, 3, 53, 54, 55, 56]
    assert small.context_lens.tolist() == [37 - 19 + 4, 37]
    for row, seq in ((0, 0), (1, 2)):
        from kernels.reference import gather_tokens

        length = int(small.context_lens[row])
        assert torch.equal(
            gather_tokens(small.k_cache, small.block_tables[row], 0, length),
            gather_tokens(batch.k_cache, batch.block_tables[seq], 0, length),
        )
