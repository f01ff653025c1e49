"""paged_prefill_attention against its reference in fp64.

Every batch has shuffled block tables with garbage padding, and NaN or Inf in every slot that must
not matter.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import paged_decode_attention, paged_prefill_attention, reference
from kernels.compiled.architectures import CUDA_ARCHITECTURES
from kernels.compiled.shipped import HEAD_DIMS
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import compare_with_reference, max_error
from kernels.testing.inputs import LAYOUTS, SCALES, random_paged_batch, random_scales

# The interpreter computes rows and tiles that are masked afterwards, and numpy reports their NaNs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
MIXED = {"context_lens": [70, 0, 1, 45, 33, 40], "query_lens": [70, 0, 1, 9, 0, 1]}


def make_batch(context_lens, query_lens, device, **overrides):
    shape = {
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "block_size": 16,
        "dtype": torch.float16,
    }
    return random_paged_batch(
        context_lens, query_lens=query_lens, device=device, **{**shape, **overrides}
    )


def prefill(batch, **options):
    options = {"max_seqlen_q": batch.max_seqlen_q, "return_lse": True, **options}
    return paged_prefill_attention(*batch.prefill_args, **options)


def assert_matches_reference(batch, **options):
    results = compare_with_reference(
        paged_prefill_attention,
        reference.paged_prefill_attention,
        batch.prefill_args,
        **{"max_seqlen_q": batch.max_seqlen_q, "return_lse": True, **options},
    )
    for name, result in zip(("out", "lse"), results, strict=True):
        assert result.passed, f"{name}: {result}, bound {result.bound:.3g}"


def assert_bitwise_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def hidden_tokens(context_lens, query_lens, window_size):
    """Tokens before the window of each sequence's first query (all, if it has none)."""
    if window_size is None:
        return None
    return [
        n if q == 0 else max(0, n - q + 1 - window_size)
        for n, q in zip(context_lens, query_lens, strict=True)
    ]


@given(data=st.data())
def test_matches_reference_on_any_shape(data, device):
    def draw(name, strategy):
        return data.draw(strategy, label=name)

    num_kv_heads = draw("num_kv_heads", st.integers(1, 2))
    num_q_heads = num_kv_heads * draw("group_size", st.sampled_from([1, 2, 3, 5, 8]))
    lens = st.integers(0, 70).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(0, n) | st.integers(0, min(n, 2)))
    )
    context_lens, query_lens = zip(
        *draw("(context, queries)", st.lists(lens, min_size=1, max_size=3)), strict=True
    )
    window_size = draw("window_size", st.none() | st.integers(1, 80))
    scales = draw("scales of an fp8 cache", st.none() | st.sampled_from(SCALES))
    batch = random_paged_batch(
        context_lens,
        query_lens=query_lens,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw("head_dim", st.sampled_from([16, 24, 33, 64, 80, 112])),
        block_size=draw("block_size", st.sampled_from([1, 2, 3, 7, 16, 24, 100, 256])),
        dtype=draw("dtype", st.sampled_from(DTYPES)),
        kv_dtype=None if scales is None else FP8_DTYPE,
        device=device,
        layout=draw("layout", st.sampled_from(LAYOUTS)),
        seed=draw("seed", st.integers(0, 2**16)),
        hidden_tokens=hidden_tokens(context_lens, query_lens, window_size),
    )
    generator = torch.Generator().manual_seed(0)
    options = {
        "window_size": window_size,
        "causal": draw("causal", st.booleans()),
        "num_splits": draw("num_splits", st.sampled_from([1, None, 2, 3, 7])),
        "scale": draw("scale", st.sampled_from([None, 0.5, -0.2])),
        "softcap": draw("softcap", st.sampled_from([0.0, 0.5, 30.0])),
        "max_seqlen_q": batch.max_seqlen_q + draw("slack of max_seqlen_q", st.integers(0, 40)),
    }
    if draw("alibi", st.booleans()):
        shape = draw("alibi shape", st.sampled_from([(), (len(context_lens),)]))
        options["alibi_slopes"] = torch.rand(*shape, num_q_heads, generator=generator).to(device)
    if draw("sinks", st.booleans()):
        options["sinks"] = 3 * torch.randn(num_q_heads, generator=generator).to(device)
    if scales is not None:
        options |= random_scales(scales, num_kv_heads, device)
    assert_matches_reference(batch, **options)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype", "scales"),
    [
        (1, 80, torch.float16, "number"),
        (7, 112, torch.bfloat16, "per head"),
        (16, 128, torch.bfloat16, "none"),
        (24, 64, torch.float32, "tensor"),
        (256, 96, torch.float16, "per head"),
    ],
)
def test_fp8_caches(block_size, head_dim, dtype, scales, device):
    lens = [70, 0, 40], [20, 0, 40]
    batch = make_batch(
        *lens,
        device,
        num_q_heads=6,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=FP8_DTYPE,
        hidden_tokens=hidden_tokens(*lens, 30),
    )
    options = {"window_size": 30, "softcap": 20.0, **random_scales(scales, 2, device)}
    for num_splits in (1, 3):
        assert_matches_reference(batch, num_splits=num_splits, **options)


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 24, 100, 256, 1024])
def test_block_sizes(block_size, device):
    assert_matches_reference(make_batch([50, 40], [50, 9], device, block_size=block_size))


@pytest.mark.parametrize("head_dim", [16, 17, 80, 96, 112, 128, 160, 255, 256])
def test_head_dims(head_dim, device):
    assert_matches_reference(make_batch([40, 37], [7, 3], device, head_dim=head_dim))


@pytest.mark.parametrize("group_size", [1, 3, 5, 7, 8, 16, 17, 71])
def test_group_sizes(group_size, device):
    batch = make_batch([20, 37], [4, 1], device, num_q_heads=2 * group_size)
    assert_matches_reference(batch, alibi_slopes=torch.rand(2 * group_size, device=device))


@pytest.mark.parametrize(
    "lens",
    [
        pytest.param(([70], [70]), id="whole prompt"),
        pytest.param(([70], [25]), id="cached prefix"),
        pytest.param(([70, 64, 3], [4, 5, 3]), id="verification"),
        pytest.param(([70, 64, 3], [1, 1, 1]), id="decode only"),
        pytest.param((MIXED["context_lens"], MIXED["query_lens"]), id="mixed"),
        pytest.param(([40, 3], [0, 0]), id="no queries"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kinds_of_batches(lens, dtype, device):
    assert_matches_reference(make_batch(*lens, device, dtype=dtype))


@pytest.mark.parametrize(
    ("causal", "window_size"),
    [(True, size) for size in (1, 2, 31, 32, 33, 50, 10**9)] + [(False, 1), (False, 33)],
)
def test_windows(causal, window_size, device):
    lens = [50, 45], [50, 9]
    batch = make_batch(*lens, device, hidden_tokens=hidden_tokens(*lens, window_size), block_size=7)
    for num_splits in (1, 2):
        options = {"window_size": window_size, "causal": causal, "num_splits": num_splits}
        assert_matches_reference(batch, **options)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_window_far_from_the_first_token(num_splits, device):
    """The masked left region alone reaches past the last visible key."""
    lens = [200], [3]
    batch = make_batch(*lens, device, hidden_tokens=hidden_tokens(*lens, 4))
    assert_matches_reference(batch, window_size=4, num_splits=num_splits)


@pytest.mark.parametrize("window_size", [None, 33, 75, 120])
@pytest.mark.parametrize("num_splits", [2, 3, 4, 5, 40])
def test_split_keys(num_splits, window_size, device):
    """Splits that end inside each region of keys, and splits without keys."""
    lens = [200, 97, 0, 1, 40], [12, 1, 0, 1, 17]
    batch = make_batch(*lens, device, hidden_tokens=hidden_tokens(*lens, window_size))
    assert_matches_reference(batch, num_splits=num_splits, window_size=window_size)


@pytest.mark.parametrize("query_len", [2, 40, 64])
def test_queries_before_the_first_token_see_nothing(query_len, device):
    batch = make_batch([0, 5], [query_len, query_len + 5], device)
    out, lse = prefill(batch)
    blind = torch.ones(len(batch.q), dtype=torch.bool, device=device)
    blind[-5:] = False
    assert not out[blind].any()
    assert (lse[blind] == -math.inf).all()
    expected = prefill(make_batch([5], [5], device).select([0]))
    assert torch.isfinite(lse[~blind]).all()
    assert out[~blind].shape == expected[0].shape
    assert_matches_reference(batch)


def test_single_queries_agree_with_decode(device):
    batch = make_batch([70, 0, 1, 33], [1, 1, 1, 1], device)
    sinks = torch.randn(4, device=device)
    options = {"window_size": 40, "softcap": 20.0, "sinks": sinks, "return_lse": True}
    out, lse = prefill(batch, **options)
    decode_out, decode_lse = paged_decode_attention(*batch.decode_args, num_splits=2, **options)
    assert max_error(out, decode_out) < 2e-3
    assert max_error(lse, decode_lse) < 1e-5


@pytest.mark.parametrize("kv_dtype", [None, FP8_DTYPE], ids=["fp32", "fp8"])
@pytest.mark.parametrize("chunk", [5, 13, 32])
def test_chunks_agree_with_the_whole(chunk, kv_dtype, device):
    whole = make_batch([45], [45], device, dtype=torch.float32, kv_dtype=kv_dtype)
    expected = prefill(whole)
    for start in range(0, 45, chunk):
        stop = min(start + chunk, 45)
        part = replace(
            whole,
            q=whole.q[start:stop],
            cu_seqlens_q=torch.tensor([0, stop - start], dtype=torch.int32, device=device),
            context_lens=torch.tensor([stop], dtype=torch.int32, device=device),
        )
        for actual, wanted in zip(prefill(part), expected, strict=True):
            assert max_error(actual, wanted[start:stop]) < 2e-6


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("kv_dtype", [None, FP8_DTYPE], ids=["fp16", "fp8"])
def test_batch_invariance(kv_dtype, num_splits, device):
    """Tiles are found by search or, in uniform batches, by division: both give the same bits."""
    batch = make_batch(**MIXED, device=device, block_size=7, kv_dtype=kv_dtype)
    options = {"window_size": 50, "sinks": torch.randn(4, device=device), "num_splits": num_splits}
    if kv_dtype is not None:
        options |= random_scales("per head", 2, device)
    out, lse = prefill(batch, **options)
    starts = batch.cu_seqlens_q.tolist()
    for rows in ([4, 2, 0, 3, 5, 1], [3], [3, 3, 5]):
        tokens = [t for row in rows for t in range(starts[row], starts[row + 1])]
        some = batch.select(rows)
        for slack in (0, 500):
            result = prefill(some, max_seqlen_q=some.max_seqlen_q + slack, **options)
            assert_bitwise_equal(result, [out[tokens], lse[tokens]])


def test_search_over_many_sequences(device, monkeypatch):
    batch = make_batch(**MIXED, device=device)
    expected = prefill(batch)
    monkeypatch.setattr(sys.modules["kernels.paged_prefill_attention"], "_SEARCH_WIDTH", 2)
    assert_bitwise_equal(prefill(batch, max_seqlen_q=1000), expected)


def test_block_size_changes_nothing(device):
    expected = prefill(make_batch(**MIXED, device=device, block_size=1))
    for block_size in (3, 100):
        other = make_batch(**MIXED, device=device, block_size=block_size)
        assert_bitwise_equal(prefill(other), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_layouts_are_bitwise_alike(layout, device):
    batch = make_batch([40, 5], [9, 2], device, layout=layout)
    assert_matches_reference(batch)
    contiguous = replace(
        batch, k_cache=batch.k_cache.contiguous(), v_cache=batch.v_cache.contiguous()
    )
    assert_bitwise_equal(prefill(batch), prefill(contiguous))


def test_strided_query_table_and_output(device):
    batch = make_batch([40, 5], [9, 2], device)
    wide_q = torch.full((11, 3, 4, 32), torch.nan, dtype=batch.q.dtype, device=device)
    wide_q[:, 1] = batch.q
    wide_tables = torch.full((2, 40), -7, dtype=torch.int32, device=device)
    wide_tables[:, 10 : 10 + batch.block_tables.shape[1]] = batch.block_tables
    strided = replace(
        batch,
        q=wide_q[:, 1],
        block_tables=wide_tables[:, 10 : 10 + batch.block_tables.shape[1]],
    )
    out = torch.zeros(11, 4, 2, 32, dtype=batch.q.dtype, device=device)
    result, _ = prefill(strided, out=out[:, :, 1])
    assert result.data_ptr() == out[:, :, 1].data_ptr()
    assert_bitwise_equal([out[:, :, 1]], prefill(batch)[:1])
    assert not out[:, :, 0].any()


@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows_past_the_last_query_are_not_written(num_splits, device):
    batch = make_batch([40, 5], [9, 2], device)
    padded = replace(batch, q=torch.cat([batch.q, torch.full_like(batch.q, torch.nan)]))
    out = torch.full_like(padded.q, 7.0)
    prefill(padded, out=out, num_splits=num_splits)
    assert torch.equal(out[:11], prefill(batch, num_splits=num_splits)[0])
    assert (out[11:] == 7).all()


def test_fp32_output_of_half_precision_inputs(device):
    batch = make_batch([40, 5], [9, 2], device)
    out = torch.empty(batch.q.shape, dtype=torch.float32, device=device)
    prefill(batch, out=out)
    assert torch.equal(out.half(), prefill(batch)[0])
    assert not torch.equal(out, out.half().float())


def test_lse_is_returned_only_when_asked_for(device):
    batch = make_batch([40, 5], [9, 2], device)
    out = prefill(batch, return_lse=False)
    assert isinstance(out, torch.Tensor)
    with_lse, lse = prefill(batch)
    assert torch.equal(out, with_lse)
    assert (lse.shape, lse.dtype) == ((11, 4), torch.float32)


@pytest.mark.parametrize("lens", [([], []), ([40, 0], [0, 0])], ids=["no sequences", "no queries"])
def test_empty_batch(lens, device):
    out, lse = prefill(make_batch(*lens, device))
    assert (out.shape, lse.shape) == ((0, 4, 32), (0, 4))


def rule_out(batch, row, tokens):
    """Give the tokens of a sequence a score of -inf, all queries being the first unit vector."""
    batch.q.zero_()
    batch.q[..., 0] = 1
    block_size = batch.k_cache.shape[1]
    for token in tokens:
        block = batch.block_tables[row, token // block_size]
        batch.k_cache[block, token % block_size, :, 0] = -math.inf


@pytest.mark.parametrize(
    "tokens", [range(40), range(35, 74), range(74)], ids=["head", "middle", "all but last"]
)
def test_scores_of_minus_infinity(tokens, device):
    batch = make_batch([75, 3], [20, 2], device)
    rule_out(batch, 0, tokens)
    assert_matches_reference(batch)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_only_scores_of_minus_infinity(sinks, num_splits, device):
    batch = make_batch([75, 3], [20, 2], device)
    rule_out(batch, 0, range(75))
    sinks = torch.ones(4, device=device) if sinks else None
    out, lse = prefill(batch, sinks=sinks, num_splits=num_splits)
    assert not out[:20].any()
    assert (lse[:20] == -math.inf).all()
    assert torch.isfinite(out[20:]).all()


def test_equal_scores_average_the_values(device):
    batch = make_batch([75], [75], device, dtype=torch.float32)
    batch.q.zero_()
    out, lse = prefill(batch)
    values = reference.gather_tokens(batch.v_cache, batch.block_tables[0], 0, 75).double()
    seen = torch.arange(1, 76, device=device)
    mean = (values.cumsum(0) / seen[:, None, None]).repeat_interleave(2, dim=1)
    assert max_error(out, mean) < 1e-6
    assert max_error(lse, seen.double().log()[:, None].expand(-1, 4)) < 1e-6


def test_nan_in_a_used_slot_stays_in_its_sequence(device):
    batch = make_batch([75, 75], [20, 20], device)
    expected = prefill(batch)
    batch.v_cache[batch.block_tables[1, 0], 3] = math.nan
    out, lse = prefill(batch)
    assert torch.equal(out[:20], expected[0][:20])
    assert out[20:].isnan().all()
    assert torch.equal(lse, expected[1])


def test_block_offsets_beyond_32_bits(huge_cache, device):
    batch = make_batch([40], [6], device, head_dim=64)
    expected = prefill(batch)
    k_cache, v_cache = huge_cache(block_size=16, num_kv_heads=2, head_dim=64)
    far = k_cache.shape[0] - 1 - torch.arange(3, device=device)
    for cache, source in ((k_cache, batch.k_cache), (v_cache, batch.v_cache)):
        cache[far] = source[batch.block_tables[0, :3].long()]
    assert int(far.min()) * k_cache.stride(0) > 2**31
    far_batch = replace(batch, k_cache=k_cache, v_cache=v_cache, block_tables=far[None].int())
    assert_bitwise_equal(prefill(far_batch), expected)


def bad(**arguments):
    return arguments


BAD_CALLS = {
    "q-rank": (
        bad(q=torch.zeros(5, 64)),
        r"q: expected shape \(total_q, .*, head_dim=16\), got \(5, 64\)",
    ),
    "q-dtype": (
        bad(q=torch.zeros(5, 4, 16).half()),
        r"q: expected dtype torch\.float32, got torch\.float16",
    ),
    "q-strided": (
        bad(q=torch.zeros(5, 16, 4).mT),
        "q: expected a contiguous last dimension, got strides",
    ),
    "q-heads": (
        bad(q=torch.zeros(5, 5, 16)),
        "q: expected a positive multiple of num_kv_heads=2 .* got 5",
    ),
    "q-device": (
        bad(q=torch.zeros(5, 4, 16, device="meta")),
        "q: expected a tensor on .* got one on meta",
    ),
    "cache-shape": (
        bad(v_cache=torch.zeros(5, 4, 1, 16)),
        "v_cache: expected shape .*num_kv_heads=2",
    ),
    "tables-batch": (
        bad(block_tables=torch.zeros(3, 2).int()),
        r"block_tables: expected shape \(batch=2, max_blocks\), got \(3, 2\)",
    ),
    "tables-dtype": (
        bad(block_tables=torch.zeros(2, 2).long()),
        r"block_tables: expected dtype torch\.int32, got torch\.int64",
    ),
    "cu-shape": (
        bad(cu_seqlens_q=torch.tensor([0, 5]).int()),
        r"cu_seqlens_q: expected shape \(batch \+ 1=3\), got \(2,\)",
    ),
    "cu-dtype": (
        bad(cu_seqlens_q=torch.tensor([0, 2, 5])),
        r"cu_seqlens_q: expected dtype torch\.int32, got torch\.int64",
    ),
    "lens-rank": (
        bad(context_lens=torch.ones(2, 1).int()),
        r"context_lens: expected shape \(batch\), got \(2, 1\)",
    ),
    "lens-dtype": (
        bad(context_lens=torch.ones(2)),
        r"context_lens: expected dtype torch\.int32, got torch\.float32",
    ),
    "max-negative": (bad(max_seqlen_q=-1), "max_seqlen_q: expected at least 0, got -1"),
    "window-zero": (
        bad(window_size=0),
        r"window_size: expected None \(no window\) or at least 1 token, got 0",
    ),
    "softcap-negative": (
        bad(softcap=-1.0),
        r"softcap: expected 0 \(off\) or a positive finite cap, got -1.0",
    ),
    "alibi-batch": (
        bad(alibi_slopes=torch.zeros(3, 4)),
        r"alibi_slopes: expected shape \(batch=2, num_q_heads=4\), got \(3, 4\)",
    ),
    "sinks-shape": (
        bad(sinks=torch.zeros(2)),
        r"sinks: expected shape \(num_q_heads=4\), got \(2,\)",
    ),
    "out-shape": (
        bad(out=torch.zeros(4, 4, 16)),
        r"out: expected shape \(total_q=5, .*, head_dim=16\), got \(4, 4, 16\)",
    ),
    "out-dtype": (
        bad(out=torch.zeros(5, 4, 16).half()),
        r"out: expected dtype torch\.float32, got torch\.float16",
    ),
}

BAD_HOST_VALUES = {
    "cu-descends": (
        bad(cu_seqlens_q=torch.tensor([0, 3, 2]).int()),
        r"cu_seqlens_q: .* ascend from 0 to at most 5, got \[0, 3, 2\]",
    ),
    "cu-offset": (
        bad(cu_seqlens_q=torch.tensor([1, 2, 5]).int()),
        r"cu_seqlens_q: .*got \[1, 2, 5\]",
    ),
    "cu-past-q": (
        bad(cu_seqlens_q=torch.tensor([0, 2, 6]).int()),
        r"cu_seqlens_q: .* at most 5, got \[0, 2, 6\]",
    ),
    "max-too-small": (bad(max_seqlen_q=2), "max_seqlen_q: expected at least 3, .*, got 2"),
    "lens-negative": (
        bad(context_lens=torch.tensor([-1, 3]).int()),
        "context_lens: expected lengths >= 0, got -1",
    ),
    "tables-narrow": (
        bad(context_lens=torch.tensor([3, 9]).int()),
        "block_tables: 2 columns .* hold 8 tokens, but context_lens reaches 9",
    ),
    "tables-invalid": (
        bad(block_tables=torch.tensor([[0, 1], [2, -1]]).int()),
        r"block_tables: expected block ids from 0 to 4 .* got -1 at \[1, 1\]",
    ),
}


def good_call(device):
    arguments = {
        "q": torch.zeros(5, 4, 16),
        "k_cache": torch.zeros(5, 4, 2, 16),
        "v_cache": torch.zeros(5, 4, 2, 16),
        "block_tables": torch.tensor([[0, 1], [2, 3]]).int(),
        "cu_seqlens_q": torch.tensor([0, 2, 5]).int(),
        "context_lens": torch.tensor([7, 8]).int(),
        "out": torch.ones(5, 4, 16),
    }
    return {"max_seqlen_q": 3} | {name: tensor.to(device) for name, tensor in arguments.items()}


def assert_rejected(arguments, message, device):
    on_device = {
        name: value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
        for name, value in arguments.items()
    }
    call = {**good_call(device), **on_device}
    with pytest.raises(ValueError, match=message):
        paged_prefill_attention(**call)
    if "out" not in arguments:
        assert (call["out"] == 1).all()


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_input(arguments, message, device):
    assert_rejected(arguments, message, device)


@pytest.mark.parametrize(("arguments", "message"), BAD_HOST_VALUES.values(), ids=BAD_HOST_VALUES)
def test_bad_values_in_host_memory(arguments, message, device):
    if device.type != "cpu":
        pytest.skip("values of GPU tensors are not checked: that would synchronise")
    assert_rejected(arguments, message, device)


def test_good_call_is_accepted(device):
    call = good_call(device)
    assert paged_prefill_attention(**call) is call["out"]
    assert not call["out"].any()


@pytest.fixture(scope="module", params=CUDA_ARCHITECTURES)
def compiled(request, shipped_resources):
    """Every bf16 configuration on one architecture; fp16 where registers are scarcest."""
    rows = shipped_resources(request.param, "paged_prefill_attention", match="bf16")
    if request.param == "sm_90":
        rows += shipped_resources(request.param, "paged_prefill_attention", match="fp16 d256")
    return rows


@pytest.mark.slow
def test_compiled_configurations(compiled):
    """No spills, 16-byte asynchronous copies of K and V, tensor cores in every product."""
    configs = {row["config"] for row in compiled}
    assert {f"bf16 d{head_dim} g4 b16" for head_dim in HEAD_DIMS} <= configs
    assert {"bf16 d128 g71 b16 batch", "bf16 d128 g4 b16 features"} <= configs
    assert {"bf16 d128 g4 b16 split", "bf16 d256 g4 b16 split features"} <= configs
    for row in compiled:
        constants, config = row["constants"], (row["arch"], row["config"])
        assert row["local_bytes"] == 0, config
        if row["kernel"] == "_merge_splits_kernel":
            continue
        assert row["programs_per_multiprocessor"] >= 1, config
        # Only block ids, lengths and what is per head are fetched by less than 16 bytes.
        assert set(row["async_copies"]) == {"32", "128"}, config
        assert set(row["global_loads"]) <= {"32", "128"}, config
        assert set(row["global_stores"]) <= {"32", "128"}, config
        # Each region of keys has a pipeline: its prologue fills the buffers, its body refills one
        # (on sm_100, where products are asynchronous too, the body is peeled).
        tile_bytes = 2 * 2 * constants["TILE_N"] * constants["HEAD_DIM_PADDED"]  # K and V
        regions = 3 if constants["HAS_LEFT"] else 2
        fills = regions * ((row["num_stages"] - 1) // 2 + 1)
        copied = 16 * row["async_copies"]["128"] * 32 * row["num_warps"]
        assert copied >= fills * tile_bytes, config
        assert copied == fills * tile_bytes or row["arch"] == "sm_100", config
        q_bytes = 2 * constants["TILE_M"] * constants["HEAD_DIM_PADDED"]
        assert 16 * row["global_loads"]["128"] * 32 * row["num_warps"] == q_bytes, config
        assert row["dots"] == row["tensor_core_dots"] >= 2 * regions, config
        assert set(row["mma"]) == {MMA_FAMILY[row["arch"]]}, config


MMA_FAMILY = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}

SPECIALISATION = """
import torch
from kernels import paged_prefill_attention
from kernels.compiled.compile import ARCHITECTURES, compile_call

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

def prefill(total_q, batch, max_blocks, max_seqlen_q, window_size, num_splits=1):
    cache, lens = meta(1000, 16, 8, 64), meta(batch, dtype=torch.int32)
    paged_prefill_attention(
        meta(total_q, 32, 64), cache, cache, meta(batch, max_blocks, dtype=torch.int32),
        meta(batch + 1, dtype=torch.int32), lens, max_seqlen_q=max_seqlen_q,
        window_size=window_size, num_splits=num_splits,
    )

calls = [
    lambda: prefill(1, 1, 1, 1, 1),
    lambda: prefill(4096, 1, 255, 4096, 16),
    lambda: prefill(4096, 64, 255, 4096, 1024),
    lambda: prefill(100, 16, 2, 90, 1),
    lambda: prefill(16, 1, 2000, 16, 1024, 2),
    lambda: prefill(17, 1, 999, 17, 16, 9),
]
print(len({k[2].hash for call in calls for k in compile_call(call, ARCHITECTURES["sm_80"])}))
"""


@pytest.mark.slow
def test_new_lengths_compile_nothing_new(run_without_interpreter):
    """Two kernels: tiles owned by uniform sequences, and tiles whose sequence is looked up. Of the
    first one that leaves split states, and the kernel that merges these.

    Launching on meta tensors also shows that grid and arguments depend on no device value.
    """
    assert int(run_without_interpreter("-c", SPECIALISATION)) == 4


def test_head_and_token_offsets_beyond_32_bits(far_apart, device):
    batch = make_batch([40, 23], [2, 1], device, num_q_heads=3, num_kv_heads=3)
    heads_first = [cache.permute(2, 0, 1, 3) for cache in (batch.k_cache, batch.v_cache)]
    q, out, *caches = far_apart(batch.q, torch.empty_like(batch.q), *heads_first)
    k_cache, v_cache = (cache.permute(1, 2, 0, 3) for cache in caches)
    far = replace(batch, q=q, k_cache=k_cache, v_cache=v_cache)
    assert_bitwise_equal(prefill(far, out=out), prefill(batch))


@pytest.mark.parametrize(
    "options", [{}, {"window_size": 20}, {"causal": False}, {"num_splits": 2}], ids=str
)
def test_nothing_past_the_end_is_accessed(options, at_the_edge, device):
    """Block tables exactly as wide as the longest sequence needs, blocks of one slot."""
    batch = make_batch([5, 37], [5, 3], device, head_dim=33, block_size=1)
    per_head = {"alibi_slopes": torch.rand(2, 4), "sinks": torch.rand(4)}
    options = options | {name: at_the_edge(values) for name, values in per_head.items()}
    expected = prefill(batch, **options)
    names = ("q", "k_cache", "v_cache", "context_lens", "cu_seqlens_q")
    edge = {name: at_the_edge(getattr(batch, name)) for name in names}
    edge["block_tables"] = at_the_edge(batch.block_tables[:, :37])
    out = at_the_edge(torch.empty_like(batch.q))
    assert_bitwise_equal(prefill(replace(batch, **edge), out=out, **options), expected)
