"""Baselines against the references: PyTorch's directly, packages through stand-ins on our kernels.

The stand-ins have the packages' own argument names and defaults and compute by
`kernels.flash_attn_compat`, so a wrongly mapped argument shows in the result.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import flash_attn_compat
from kernels.testing import baselines
from kernels.testing.baselines import BASELINES, PAGE_SIZE
from kernels.testing.cases import make_case

CONTEXT_LENS = (1, 270, 0, 37)
QUERY_LENS = (1, 20, 0, 5)


def _flash_attn_3() -> SimpleNamespace:
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, page_table, causal,
        cu_seqlens_q=None, max_seqlen_q=None,
    ):  # fmt: skip
        if cu_seqlens_q is None:
            return flash_attn_compat.flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=page_table,
                causal=causal,
            )  # fmt: skip
        ends = torch.nn.functional.pad(cache_seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        return flash_attn_compat.flash_attn_varlen_func(
            q, k_cache, v_cache, cu_seqlens_q, ends, max_seqlen_q,
            page_table.shape[1] * k_cache.shape[1], causal=causal, block_table=page_table,
        )  # fmt: skip

    return SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)


STAND_INS = {
    "flash_attn_2": (baselines.FlashAttention2(), PAGE_SIZE),
    "flash_attn_3": (baselines.FlashAttention3(), 24),
}
STAND_INS["flash_attn_2"][0]._module = flash_attn_compat
STAND_INS["flash_attn_3"][0]._module = _flash_attn_3()


def _call(step, block_size, context_lens=CONTEXT_LENS, **sizes):
    """The case of decode or prefill on small heads, without an LSE."""
    shape = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float16}
    shape |= {"query_lens": QUERY_LENS, "context_lens": context_lens, "block_size": block_size}
    options = {"return_lse": False}
    case = make_case(f"paged_{step}_attention", **shape | sizes, options=options)
    del case.inputs["return_lse"]
    return case


def _assert_accurate(baseline, step, case):
    [accuracy] = case.judge(lambda: getattr(baseline, step)(**case.inputs)).values()
    assert accuracy.passed, accuracy


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_with_and_without_cached_prefix(name, step):
    baseline, block_size = STAND_INS[name]
    _assert_accurate(baseline, step, _call(step, block_size))


@given(
    block_size=st.sampled_from((1, 3, 16, 100, 256)),
    context_lens=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    head_dim=st.sampled_from((16, 40)),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
    data=st.data(),
)
def test_pytorch_on_any_batch(block_size, context_lens, head_dim, dtype, data):
    query_lens = [data.draw(st.integers(0, n)) for n in context_lens]
    shape = {"head_dim": head_dim, "dtype": dtype, "query_lens": query_lens}
    for step in ("decode", "prefill"):
        case = _call(step, block_size, context_lens, **shape)
        _assert_accurate(BASELINES["gather_sdpa"], step, case)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3"])
def test_packages_for_gpus_say_so_on_a_cpu(name):
    for step in ("decode", "prefill"):
        call = _call(step, PAGE_SIZE).inputs
        reason = BASELINES[name].unavailable(call["q"], call["k_cache"])
        assert reason == "it runs on CUDA devices only"


@pytest.mark.parametrize(
    ("name", "block_size", "options", "reason"),
    [
        ("flash_attn_2", 16, {}, "block_size: needs a multiple of 256, got 16"),
        ("flash_attn_3", 16, {"dtype": torch.float32}, "takes fp16 and bf16, got q torch.float32"),
        ("flash_attn_2", 256, {"head_dim": 20}, "head_dim up to 256 in steps of 8, got 20"),
    ],
)
def test_reasons_name_what_is_needed(name, block_size, options, reason):
    call = _call("decode", block_size, **options).inputs
    assert reason in BASELINES[name].unavailable(call["q"], call["k_cache"])
