"""Baselines against the references: PyTorch's directly, packages through stand-ins on our kernels.

The stand-ins have the packages' own argument names and defaults and compute by
`kernels.flash_attn_compat`, so a wrongly mapped argument shows in the result.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import flash_attn_compat, reference
from kernels.testing import baselines
from kernels.testing.baselines import BASELINES, PAGE_SIZE, Unavailable
from kernels.testing.cases import make_case

CONTEXT_LENS = (1, 270, 0, 37)
QUERY_LENS = (1, 20, 0, 5)


def _flash_attn_3() -> SimpleNamespace:
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, page_table, softmax_scale, causal, window_size,
        cu_seqlens_q=None, max_seqlen_q=None,
    ):  # fmt: skip
        options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
        if cu_seqlens_q is None:
            return flash_attn_compat.flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=page_table, **options
            )
        lens = cu_seqlens_q, cache_seqlens, max_seqlen_q
        return _varlen(q, k_cache, v_cache, *lens, page_table, *options.values())

    return SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)


def _varlen(q, k, v, cu_seqlens_q, lengths, max_q, table, scale, causal, window):
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return flash_attn_compat.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, ends, max_q, table.shape[1] * k.shape[1], softmax_scale=scale,
        causal=causal, window_size=window, block_table=table,
    )  # fmt: skip


def _flash_attn_4() -> SimpleNamespace:
    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, seqused_k, page_table,
        softmax_scale, causal, window_size, num_splits,
    ):  # fmt: skip
        window = tuple(-1 if limit is None else limit for limit in window_size)
        out = _varlen(
            q, k, v, cu_seqlens_q, seqused_k, max_seqlen_q, page_table, softmax_scale, causal,
            window,
        )  # fmt: skip
        return out, None

    return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)


def _flashinfer() -> SimpleNamespace:
    class Wrapper:
        plans = 0

        def __init__(self, float_workspace_buffer, kv_layout="NHD"):
            assert kv_layout == "NHD"

        def _plan(
            self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            *, window_left=-1, q_data_type, kv_data_type, sm_scale=None,
        ):  # fmt: skip
            Wrapper.plans += 1
            self.shapes = (num_qo_heads, head_dim, q_data_type), (num_kv_heads, page_size)
            num_pages = indptr.diff()
            self.lengths = ((num_pages - 1).clamp(min=0) * page_size + last_page_len).int()
            self.table = torch.zeros(len(num_pages), max(1, int(num_pages.max())), dtype=torch.int)
            for row, start, count in zip(self.table, indptr, num_pages, strict=False):
                row[:count] = indices[start : start + count]
            self.options = {"softmax_scale": sm_scale, "window": (window_left, 0)}

        def run(self, q, paged_kv_cache):
            k, v = paged_kv_cache
            assert self.shapes == ((*q.shape[1:], q.dtype), (k.shape[2], k.shape[1]))
            assert (self.lengths >= 0).all()
            scale, window = self.options.values()
            starts = self.starts if self.starts is not None else torch.arange(len(q) + 1).int()
            longest = int(starts.diff().max())
            return _varlen(q, k, v, starts, self.lengths, longest, self.table, scale, False, window)

    class Decode(Wrapper):
        starts = None

        def __init__(self, float_workspace_buffer, kv_layout="NHD", use_tensor_cores=False):
            super().__init__(float_workspace_buffer, kv_layout)

        plan = Wrapper._plan

    class Prefill(Wrapper):
        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, *, causal, **options,
        ):  # fmt: skip
            assert causal
            self.starts = qo_indptr
            self._plan(
                paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
                num_kv_heads, head_dim_qk, page_size, **options,
            )  # fmt: skip

    return SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        Wrapper=Wrapper,
    )


def _torch_varlen() -> SimpleNamespace:
    from torch.nn.attention.varlen import varlen_attn as real

    if "block_table" not in inspect.signature(real).parameters:
        pytest.skip("varlen_attn of this PyTorch takes no block_table")

    def varlen_attn(*args, **kwargs):
        call = inspect.signature(real).bind(*args, **kwargs)
        call.apply_defaults()
        a = SimpleNamespace(**call.arguments)
        assert a.enable_gqa == (a.query.shape[1] != a.key.shape[2])
        return _varlen(
            a.query, a.key, a.value, a.cu_seq_q, a.seqused_k, a.max_q, a.block_table, a.scale,
            False, a.window_size,
        )  # fmt: skip

    varlen_attn.__signature__ = inspect.signature(real)
    return SimpleNamespace(varlen_attn=varlen_attn)


STAND_INS = {
    "flash_attn_2": (lambda: baselines.FlashAttention2(flash_attn_compat), PAGE_SIZE),
    "flash_attn_3": (lambda: baselines.FlashAttention3(_flash_attn_3()), 24),
    "flash_attn_4": (lambda: baselines.FlashAttention4(_flash_attn_4()), 24),
    "flashinfer": (lambda: baselines.FlashInfer(_flashinfer()), 24),
    "torch_flash": (lambda: baselines.TorchFlash(_torch_varlen()), PAGE_SIZE),
    "gather_flash_attn_2": (
        lambda: baselines._GatherPages(baselines.FlashAttention2(flash_attn_compat)),
        16,
    ),
    "gather_sdpa": (baselines.GatherSdpa, 24),
    "gather_naive": (baselines.GatherNaive, 24),
}


@pytest.fixture(params=STAND_INS)
def served(request):
    """A baseline and a block size that it serves."""
    make, block_size = STAND_INS[request.param]
    return make(), block_size


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


@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.3, "window_size": 33}], ids=["plain", "scale and window"]
)
@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_with_and_without_cached_prefix(served, step, options):
    baseline, block_size = served
    case = _call(step, block_size)
    case.inputs.update(options)
    _assert_accurate(baseline, step, case)


@given(
    block_size=st.sampled_from((1, 3, 16, 100, 256)),
    context_lens=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    head_dim=st.sampled_from((16, 40)),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
    data=st.data(),
)
@pytest.mark.parametrize("name", ["gather_sdpa", "gather_naive"])
def test_pytorch_baselines_on_any_batch(name, block_size, context_lens, head_dim, dtype, data):
    query_lens = [data.draw(st.integers(0, n)) for n in context_lens]
    shape = {"head_dim": head_dim, "dtype": dtype, "query_lens": query_lens}
    for step in ("decode", "prefill"):
        case = _call(step, block_size, context_lens, **shape)
        _assert_accurate(BASELINES[name], step, case)


@pytest.mark.parametrize("block_size", [1, 16, 24, 256, 300])
def test_gathers_repeat_the_cache_token_for_token(block_size):
    call = _call("decode", block_size).inputs
    cache = call["k_cache"], call["v_cache"], call["block_tables"]
    pages_k, _, table = baselines.gather_pages(*cache)
    padded_k, _, exists = baselines.gather_padded(*cache, call["context_lens"])
    for row, length in enumerate(CONTEXT_LENS):
        expected = reference.gather_tokens(cache[0], cache[2][row], 0, length)
        assert torch.equal(reference.gather_tokens(pages_k, table[row], 0, length), expected)
        assert torch.equal(padded_k[row, :length], expected)
        assert exists[row].sum() == length


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
@pytest.mark.parametrize("name", [n for n in BASELINES if n not in ("gather_sdpa", "gather_naive")])
def test_packages_for_gpus_say_so_on_a_cpu(name):
    for step in ("decode", "prefill"):
        call = _call(step, PAGE_SIZE).inputs
        reason = BASELINES[name].unavailable(call["q"], call["k_cache"])
        assert reason == "it runs on CUDA devices only"
        with pytest.raises(Unavailable, match=f"{name}: it runs on CUDA devices only"):
            getattr(BASELINES[name], step)(**call)


@pytest.mark.parametrize(
    ("name", "block_size", "options", "reason"),
    [
        ("flash_attn_2", 16, {}, "block_size: needs a multiple of 256, got 16"),
        ("torch_flash", 16, {}, "block_size: needs a multiple of 256, got 16"),
        ("flash_attn_3", 16, {"dtype": torch.float32}, "takes fp16 and bf16, got q torch.float32"),
        ("flash_attn_2", 256, {"head_dim": 20}, "head_dim up to 256 in steps of 8, got 20"),
        ("gather_flash_attn_2", 16, {"head_dim": 20}, "in steps of 8, got 20"),
    ],
)
def test_reasons_name_what_is_needed(name, block_size, options, reason):
    call = _call("decode", block_size, **options).inputs
    assert reason in BASELINES[name].unavailable(call["q"], call["k_cache"])


def test_flashinfer_plans_once_for_a_batch():
    package = _flashinfer()
    baseline = baselines.FlashInfer(package)
    one, other = _call("decode", 24), _call("decode", 24, (3, 50))
    for case in (one, one, other, one):
        _assert_accurate(baseline, "decode", case)
    assert package.Wrapper.plans == 3


def test_an_absent_package_is_a_reason_not_an_error():
    class Absent(baselines.FlashAttention2):
        package = "no_such_package"

    assert "no_such_package cannot be imported" in Absent()._module


def test_old_pytorch_has_no_paged_varlen():
    call = _call("decode", PAGE_SIZE).inputs
    old = baselines.TorchFlash(SimpleNamespace(varlen_attn=lambda query, key, value: None))
    assert "takes no block_table" in old.unavailable(call["q"], call["k_cache"])
