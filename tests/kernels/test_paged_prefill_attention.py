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
import triton
from attention_ops import SHAPE, same

from kernels import paged_prefill_attention
from kernels.testing.inputs import hidden_tokens, random_paged_batch
from kernels.tiles import force_target, prefill_tile, target_of

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


@pytest.mark.parametrize("window_size", [1, 33])
def test_windows_that_look_ahead(window_size, device):
    lens = [34, 45], [34, 9]
    hidden = hidden_tokens(*lens, window_size)
    batch = make_batch(*lens, device, hidden_tokens=hidden, block_size=7, **ONE_KV_HEAD)
    for num_splits in (1, 2):
        options = {"window_size": window_size, "causal": False, "num_splits": num_splits}
        assert_matches_reference(batch, **options)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_window_far_from_the_first_token(num_splits, device):
    """The masked left region alone reaches past the last visible key."""
    lens = [200], [3]
    batch = make_batch(*lens, device, hidden_tokens=hidden_tokens(*lens, 4))
    assert_matches_reference(batch, window_size=4, num_splits=num_splits)


@pytest.mark.parametrize("query_len", [2, 40, 64])
def test_queries_before_the_first_token_see_nothing(query_len, device):
    batch = make_batch([0, 5], [query_len, query_len + 5], device)
    out, lse = prefill(batch)
    blind = torch.ones(len(batch.q), dtype=torch.bool, device=device)
    blind[-5:] = False
    assert not out[blind].any()
    assert (lse[blind] == -math.inf).all()
    assert_matches_reference(batch)


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
