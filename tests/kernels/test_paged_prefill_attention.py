"""paged_prefill_attention against its reference in fp64.

Every batch has shuffled block tables with garbage padding, and NaN or Inf in every slot that must
not matter.
"""

import math
import sys
from dataclasses import replace

import pytest
import torch
import triton
from attention_ops import OPS, select
from op_calls import same

from kernels.tiles import force_target, prefill_tile, target_of

PREFILL = OPS["prefill"]
MODULE = sys.modules["kernels.paged_prefill_attention"]
MIXED = ((70, 17), (0, 0), (1, 1), (45, 9), (33, 0), (40, 1))
ONE_KV_HEAD = {"num_q_heads": 2, "num_kv_heads": 1}


@pytest.mark.parametrize("num_splits", [1, 2])
def test_window_far_from_the_first_token(num_splits, device):
    """The masked left region alone reaches past the last visible key."""
    call = PREFILL.call(device, ((200, 3),), window_size=4)
    PREFILL.assert_matches_reference(call, num_splits)


@pytest.mark.parametrize("query_len", [2, 40, 64])
def test_queries_before_the_first_token_see_nothing(query_len, device):
    call = PREFILL.call(device, ((0, query_len), (5, query_len + 5)))
    out, lse = PREFILL.run(call)
    blind = torch.ones(len(call["q"]), dtype=torch.bool, device=device)
    blind[-5:] = False
    assert not out[blind].any()
    assert (lse[blind] == -math.inf).all()
    PREFILL.assert_matches_reference(call)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window_size", [None, 33])
def test_scores_ahead_change_no_bit(window_size, num_splits, device):
    lens = ((200, 3), (97, 1), (0, 0), (1, 1), (40, 17))
    call = PREFILL.call(device, lens, window_size=window_size, block_size=7, **ONE_KV_HEAD)
    target, results = target_of(call["q"].device), []
    if target.arch in (100, 103) and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
        pytest.skip("Triton puts a barrier that this needs since 3.8: docs/kernel-tuning.md")
    table = prefill_tile(32, torch.float16, target)
    for scores_ahead in (False, True):
        tile = replace(table, scores_ahead=scores_ahead)
        with force_target(replace(target, tiles=(("prefill_tile", tile),))):
            results.append(PREFILL.run(call, num_splits))
    assert same(*results)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_search_over_many_sequences(num_splits, device, monkeypatch):
    call = PREFILL.call(device, MIXED, **ONE_KV_HEAD)
    expected = PREFILL.run(call, num_splits)
    for module in (MODULE, sys.modules["kernels.split_states"]):
        monkeypatch.setattr(module, "_SEARCH_WIDTH", 2)
    assert same(PREFILL.run(call, num_splits, max_seqlen_q=1000), expected)


@pytest.mark.parametrize("window_size", [None, 700])
def test_a_turn_of_an_agent(window_size, device):
    """Few queries behind a long prefix, divided by the table of tiles; those of the second sequence
    fill one tile of rows, and the third may have half as many chunks. Alone, all pairs of a chunk
    and a tile are launched; beside many single queries tiles are looked up."""
    lens = ((1060, 17), (1100, 16), (80, 65), (1, 1))
    call = PREFILL.call(device, lens, block_size=24, **ONE_KV_HEAD) | {"window_size": window_size}
    out, lse = PREFILL.assert_matches_reference(call | {"num_splits": None})
    for rows, tokens in (([0], slice(0, 17)), ([0] + 9 * [3], slice(0, 17)), ([1], slice(17, 33))):
        alone = PREFILL.run(select(call, rows), None)
        assert same([x[: len(out[tokens])] for x in alone], [out[tokens], lse[tokens]])


@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows_past_the_last_query_are_not_written(num_splits, device):
    call = PREFILL.call(device, ((40, 9), (5, 2)))
    q = torch.cat([call["q"], torch.full_like(call["q"], torch.nan)])
    out = torch.full_like(q, 7.0)
    PREFILL.run(call, num_splits, q=q, out=out)
    assert torch.equal(out[:11], PREFILL.run(call, num_splits)[0])
    assert (out[11:] == 7).all()
