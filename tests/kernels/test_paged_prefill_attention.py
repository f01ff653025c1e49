"""paged_prefill_attention against its reference in fp64.

Every batch has shuffled block tables with garbage padding, and NaN or Inf in every slot that must
not matter.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import attention_ops
import pytest
import torch
from attention_ops import SHAPE, hidden_tokens, same

from kernels import paged_decode_attention, paged_prefill_attention, reference
from kernels.compiled.architectures import CUDA_ARCHITECTURES
from kernels.compiled.shipped import HEAD_DIMS
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import max_error
from kernels.testing.inputs import random_paged_batch, random_scales

# The interpreter computes rows and tiles that are masked afterwards, and numpy reports their NaNs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
MIXED = {"context_lens": [70, 0, 1, 45, 33, 40], "query_lens": [17, 0, 1, 9, 0, 1]}
ONE_KV_HEAD = {"num_q_heads": 2, "num_kv_heads": 1}


def make_batch(context_lens, query_lens, device, **overrides):
    return random_paged_batch(
        context_lens, query_lens=query_lens, device=device, **SHAPE | overrides
    )


def prefill(batch, **options):
    options = {"max_seqlen_q": batch.max_seqlen_q, "return_lse": True, **options}
    return paged_prefill_attention(*batch.prefill_args, **options)


def assert_matches_reference(batch, **options):
    options = {"max_seqlen_q": batch.max_seqlen_q, **options}
    attention_ops.assert_matches_reference(paged_prefill_attention, *batch.prefill_args, **options)


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
    [(True, size) for size in (1, 2, 31, 32, 33, 34, 10**9)] + [(False, 1), (False, 33)],
)
def test_windows(causal, window_size, device):
    lens = [34, 45], [34, 9]
    hidden = hidden_tokens(*lens, window_size)
    batch = make_batch(*lens, device, hidden_tokens=hidden, block_size=7, **ONE_KV_HEAD)
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
@pytest.mark.parametrize("num_splits", [2, 3, 4, 5, 9])
def test_split_keys(num_splits, window_size, device):
    """Splits that end inside each region of keys, and splits without keys."""
    lens = [200, 97, 0, 1, 40], [3, 1, 0, 1, 17]
    hidden = hidden_tokens(*lens, window_size)
    batch = make_batch(*lens, device, hidden_tokens=hidden, **ONE_KV_HEAD)
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
    for rows, slack in (([4, 2, 0, 3, 5, 1], 0), ([3], 0), ([3], 500), ([3, 3, 5], 0)):
        tokens = [t for row in rows for t in range(starts[row], starts[row + 1])]
        some = batch.select(rows)
        result = prefill(some, max_seqlen_q=some.max_seqlen_q + slack, **options)
        assert same(result, [out[tokens], lse[tokens]])


def test_search_over_many_sequences(device, monkeypatch):
    batch = make_batch(**MIXED, device=device)
    expected = prefill(batch)
    monkeypatch.setattr(sys.modules["kernels.paged_prefill_attention"], "_SEARCH_WIDTH", 2)
    assert same(prefill(batch, max_seqlen_q=1000), expected)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows_past_the_last_query_are_not_written(num_splits, device):
    batch = make_batch([40, 5], [9, 2], device)
    padded = replace(batch, q=torch.cat([batch.q, torch.full_like(batch.q, torch.nan)]))
    out = torch.full_like(padded.q, 7.0)
    prefill(padded, out=out, num_splits=num_splits)
    assert torch.equal(out[:11], prefill(batch, num_splits=num_splits)[0])
    assert (out[11:] == 7).all()


def test_equal_scores_average_the_values(device):
    batch = make_batch([75], [75], device, dtype=torch.float32)
    batch.q.zero_()
    out, lse = prefill(batch)
    values = reference.gather_tokens(batch.v_cache, batch.block_tables[0], 0, 75).double()
    seen = torch.arange(1, 76, device=device)
    mean = (values.cumsum(0) / seen[:, None, None]).repeat_interleave(2, dim=1)
    assert max_error(out, mean) < 1e-6
    assert max_error(lse, seen.double().log()[:, None].expand(-1, 4)) < 1e-6


@pytest.fixture(scope="module", params=CUDA_ARCHITECTURES)
def compiled(request, shipped_resources):
    """Every bf16 configuration on one architecture; fp16 where registers are scarcest."""
    rows = shipped_resources(request.param, "paged_prefill_attention", match="bf16")
    if request.param == "sm_90":
        rows += shipped_resources(request.param, "paged_prefill_attention", match="fp16 d256")
    return rows


@pytest.mark.slow
def test_compiled_configurations(compiled):
    """16-byte asynchronous copies of K and V, tensor cores in every product."""
    configs = {row["config"] for row in compiled}
    assert {f"bf16 d{head_dim} g4 b16" for head_dim in HEAD_DIMS} <= configs
    assert {"bf16 d128 g71 b16 batch", "bf16 d128 g4 b16 features"} <= configs
    assert {"bf16 d128 g4 b16 split", "bf16 d256 g4 b16 split features"} <= configs
    for row in compiled:
        constants, config = row["constants"], (row["arch"], row["config"])
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
def test_new_lengths_compile_nothing_new(compiling_process):
    """Two kernels: tiles owned by uniform sequences, and tiles whose sequence is looked up. Of the
    first one that leaves split states, and the kernel that merges these.

    Launching on meta tensors also shows that grid and arguments depend on no device value.
    """
    assert int(compiling_process(SPECIALISATION)) == 4
