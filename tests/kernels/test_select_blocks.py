"""Scores of any values, and decode over selected blocks. test_contract.py compares
update_block_bounds and select_blocks with their references, with exact scores."""

import pytest
import torch

from kernels import (
    paged_decode_attention,
    reference,
    select_blocks,
    slot_mapping_from_positions,
    update_block_bounds,
)
from kernels.testing.accuracy import accuracy
from kernels.testing.cases import make_case
from kernels.testing.inputs import poison_

SIZES = {"num_q_heads": 6, "num_kv_heads": 2, "context_lens": (900, 290, 37, 0, 64)}


def with_bounds(device, **sizes):
    """Inputs of a decode, and bounds of its blocks, of which tokens fill one after the other."""
    inputs = make_case("paged_decode_attention", **SIZES | sizes, device=device).inputs
    k_cache, lens = inputs["k_cache"], inputs["context_lens"]
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    bounds = poison_(k_cache.new_empty(num_blocks, 2, num_kv_heads, head_dim))
    positions = torch.arange(int(lens.max()), device=device)
    for row in range(len(lens)):
        seq = torch.full_like(positions, row)[: lens[row]]
        where = inputs["block_tables"], seq, block_size
        slots = slot_mapping_from_positions(positions[: lens[row]], *where)
        for chunk in slots.split(33):
            update_block_bounds(k_cache, bounds, chunk)
    return inputs, bounds


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_no_other_block_has_a_larger_score(dtype, device):
    inputs, bounds = with_bounds(device, block_size=5, dtype=dtype)
    q, tables, lens = (inputs[name] for name in ("q", "block_tables", "context_lens"))
    selected, selected_lens = select_blocks(q, bounds, tables, lens, 20, 5)
    assert selected_lens.tolist() == [100, 100, 37, 0, 64]
    queries = q.double().unflatten(1, (2, 3))
    for row in range(2):
        blocks = tables[row, : lens[row] // 5]
        low, high = bounds[blocks.long()].double()[:, :, :, None].unbind(1)
        scores = torch.maximum(queries[row] * low, queries[row] * high).sum(-1).amax(-1).T
        for head in range(2):
            kept = torch.isin(blocks, selected[row, head])
            assert torch.equal(blocks[kept], selected[row, head])
            assert kept[-1]
            assert scores[head, :-1][kept[:-1]].min() > scores[head][~kept].max() - 1e-4


def test_scores_of_nan_count_as_infinite_and_equal_scores_in_order(device):
    inputs, bounds = with_bounds(device)
    tables, lens = inputs["block_tables"], inputs["context_lens"]
    for q in (inputs["q"] * torch.nan, -0.0 * inputs["q"]):
        selected, _ = select_blocks(q, bounds, tables, lens, 4, 16)
        first = torch.cat([tables[:2, :3], tables[[0, 1], [56, 18]][:, None]], dim=1)
        assert torch.equal(selected[:2], first[:, None].expand(-1, 2, -1))
    bounds[tables[0, 7]] = torch.inf  # inf - inf in one score
    inputs["q"][0, :, :2] = torch.tensor([1.0, -1.0], device=device)
    bounds[tables[0, 7], 1] = -torch.inf
    selected, _ = select_blocks(inputs["q"], bounds, tables, lens, 2, 16)
    assert torch.equal(selected[0, :, 0], tables[0, 7].expand(2))


@pytest.mark.parametrize("num_selected", [1, 4, 60])
def test_decode_over_selected_blocks(num_selected, device):
    options = {"return_lse": False}
    inputs, bounds = with_bounds(device, dtype=torch.float16, options=options)
    q, k_cache, v_cache, tables, lens = (
        inputs[name] for name in ("q", "k_cache", "v_cache", "block_tables", "context_lens")
    )
    selected = select_blocks(q, bounds, tables, lens, num_selected, 16)
    out = paged_decode_attention(q, k_cache, v_cache, *selected)
    if num_selected == 60:
        assert torch.equal(out, paged_decode_attention(q, k_cache, v_cache, tables, lens))
    low, exact = (
        reference.paged_decode_attention(*(x.to(d) for x in (q, k_cache, v_cache)), *selected)
        for d in (q.dtype, torch.float64)
    )
    judged = accuracy(out, low, exact)
    assert judged.passed, judged
