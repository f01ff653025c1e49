"""paged_prefill_attention against its reference in fp64.

Every batch has shuffled block tables with garbage padding, and NaN or Inf in every slot that must
not matter.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from unittest import mock

import attention_ops
import hypothesis.strategies as st
import pytest
import torch
import triton
from attention_ops import SHAPE, same
from hypothesis import given, settings

from kernels import paged_prefill_attention, reference
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import compare_with_reference
from kernels.testing.inputs import hidden_tokens, random_paged_batch, random_scales
from kernels.tiles import Chunking, force_target, prefill_tile, target_of

MODULE = sys.modules["kernels.paged_prefill_attention"]
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
def test_kinds_of_batches(lens, device):
    assert_matches_reference(make_batch(*lens, device))


@pytest.mark.parametrize(
    ("causal", "window_size"),
    [(True, size) for size in (1, 31, 32, 33, 10**9)] + [(False, 1), (False, 33)],
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


@pytest.mark.parametrize("window_size", [None, 33, 90])
@pytest.mark.parametrize("num_splits", [2, 3, 7])
def test_split_keys(num_splits, window_size, device):
    """Splits that end inside each region of keys, and splits without keys."""
    lens = [140, 70, 0, 1, 40], [3, 1, 0, 1, 17]
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
    assert_matches_reference(batch)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("kv_dtype", [None, FP8_DTYPE], ids=["fp16", "fp8"])
def test_batch_invariance(kv_dtype, num_splits, device):
    """Tiles are found by search or, in uniform batches, by division: both give the same bits."""
    batch = make_batch(**MIXED, device=device, block_size=7, kv_dtype=kv_dtype, **ONE_KV_HEAD)
    options = {"window_size": 50, "sinks": torch.randn(2, device=device), "num_splits": num_splits}
    if kv_dtype is not None:
        options |= random_scales("per head", 1, device)
    out, lse = prefill(batch, **options)
    starts = batch.cu_seqlens_q.tolist()
    for rows, slack in (([4, 2, 0, 3, 5, 1], 0), ([3], 0), ([3], 500), ([3, 3, 5], 0)):
        tokens = [t for row in rows for t in range(starts[row], starts[row + 1])]
        some = batch.select(rows)
        result = prefill(some, max_seqlen_q=some.max_seqlen_q + slack, **options)
        assert same(result, [out[tokens], lse[tokens]])


@given(
    own=st.tuples(st.integers(1, 20), st.integers(0, 160)),
    neighbours=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 160)), max_size=2),
    place=st.integers(0, 2),
    spare_blocks=st.integers(0, 20),
    causal=st.booleans(),
    sinks=st.booleans(),
)
@settings(max_examples=10)
def test_chunks_depend_on_the_sequence_alone(
    own, neighbours, place, spare_blocks, causal, sinks, device
):
    """With the default num_splits, patched to up to 4 chunks of at least 2 tiles of 16."""
    options = {"num_splits": None, "causal": causal}
    options["sinks"] = torch.linspace(-3, 3, 2, device=device) if sinks else None
    place = min(place, len(neighbours))
    sequences = [*neighbours[:place], own, *neighbours[place:]]
    query_lens = [queries for queries, _ in sequences]
    context_lens = [queries + cached for queries, cached in sequences]
    batch = make_batch(context_lens, query_lens, device, **ONE_KV_HEAD)
    alone = batch.select([place])
    own_blocks = -(-sum(own) // batch.k_cache.shape[1])
    alone = replace(alone, block_tables=alone.block_tables[:, :own_blocks])
    garbage = torch.full((len(sequences), spare_blocks), -7, dtype=torch.int32, device=device)
    wide = replace(batch, block_tables=torch.cat([batch.block_tables, garbage], dim=1))
    target = target_of(batch.q.device)
    tile = replace(prefill_tile(32, torch.float16, target), tile_n=16)
    small_chunks = mock.patch.object(MODULE, "chunking", return_value=Chunking(2, 4))
    with small_chunks, force_target(replace(target, tiles=(("prefill_tile", tile),))):
        expected = prefill(alone, **options)
        out, lse = prefill(wide, **options)
    first = sum(query_lens[:place])
    rows = slice(first, first + own[0])
    assert same([out[rows], lse[rows]], expected)
    options |= {"max_seqlen_q": wide.max_seqlen_q, "return_lse": True}
    by_reference = reference.paged_prefill_attention
    for result in compare_with_reference(
        lambda *_, **__: (out, lse), by_reference, wide.prefill_args, **options
    ):
        assert result.passed, result


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window_size", [None, 33])
def test_scores_ahead_change_no_bit(window_size, num_splits, device):
    lens = [200, 97, 0, 1, 40], [3, 1, 0, 1, 17]
    hidden = hidden_tokens(*lens, window_size)
    batch = make_batch(*lens, device, hidden_tokens=hidden, block_size=7, **ONE_KV_HEAD)
    target, results = target_of(batch.q.device), []
    if target.arch in (100, 103) and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
        pytest.skip("Triton puts a barrier that this needs since 3.8: docs/kernel-tuning.md")
    table = prefill_tile(32, torch.float16, target)
    for scores_ahead in (False, True):
        tile = replace(table, scores_ahead=scores_ahead)
        with force_target(replace(target, tiles=(("prefill_tile", tile),))):
            results.append(prefill(batch, window_size=window_size, num_splits=num_splits))
    assert same(*results)


def test_search_over_many_sequences(device, monkeypatch):
    batch = make_batch(**MIXED, device=device)
    expected = prefill(batch)
    monkeypatch.setattr(MODULE, "_SEARCH_WIDTH", 2)
    assert same(prefill(batch, max_seqlen_q=1000), expected)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows_past_the_last_query_are_not_written(num_splits, device):
    batch = make_batch([40, 5], [9, 2], device)
    padded = replace(batch, q=torch.cat([batch.q, torch.full_like(batch.q, torch.nan)]))
    out = torch.full_like(padded.q, 7.0)
    prefill(padded, out=out, num_splits=num_splits)
    assert torch.equal(out[:11], prefill(batch, num_splits=num_splits)[0])
    assert (out[11:] == 7).all()
