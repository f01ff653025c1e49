import numpy as np
import pytest
import torch

import kernels
from experiments import block_selection
from experiments.block_selection import RULES, BlockSelection, Selecting


def test_rows_of_a_run(tiny_run):
    run = tiny_run("block_selection")
    rows = run.rows.set_index("rule")
    assert rows.index.value_counts().to_dict() == {"full": 1, "bounds": 4, "oracle": 4, "recent": 2}
    assert rows.loc["full", "mass"] == pytest.approx(1)
    assert (rows["mass_worst_head"] <= rows["mass_p5"]).all()
    mass = run.rows.pivot_table(index="rule", columns=["block_size", "share"], values="mass")
    assert (mass.loc["oracle"] >= mass.loc["bounds"] - 0.05).all()
    ratio = np.exp(rows["nats_per_token"] - rows.loc["full", "nats_per_token"]).drop("full")
    assert np.allclose(run.summary["perplexity_ratio"], ratio.to_numpy(), rtol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_each_query_reads_its_share_and_the_last_block(rule):
    """Values are one-hot, so an output has the weights of the tokens. Blocks of 4, of which a half
    are read: 3 at positions 17 to 19, and 3 of 6 at position 20."""
    q, k = torch.randn(4, 4, 16), torch.randn(21, 2, 16)
    v = torch.eye(21)[:, None].expand(-1, 2, -1)
    out, mass = Selecting(4, 0.5, rule).attention(q, k, v, 0.5)
    weights = out.unflatten(1, (2, 2))
    read = torch.nn.functional.pad(weights, (0, 3)).unflatten(-1, (6, 4)).sum(-1) > 0
    assert (read == read[:, :, :1]).all(), "a KV head's query heads read the same blocks"
    assert (read.sum(-1) == 3).all()
    assert read[:3, ..., 4].all()
    assert read[3, ..., 5].all()
    assert rule != "recent" or read[..., 0].all()
    assert torch.allclose(out.sum(-1), torch.ones(4, 4))
    scores = torch.einsum("hd,thd->ht", q[3], 0.5 * k.repeat_interleave(2, 1))
    full = scores.softmax(-1) * (out[3] > 0)
    assert torch.allclose(mass[:, 3], full.sum(-1), atol=1e-6)
    assert torch.allclose(out[3], full / full.sum(-1, keepdim=True), atol=1e-6)


def test_the_kernels_compute_the_same():
    size, num_tokens, num_blocks = 8, 77, 10
    q, k, v = torch.randn(1, 6, 32), *torch.randn(2, num_blocks * size, 2, 32)
    caches = [x.unflatten(0, (num_blocks, size)).contiguous() for x in (k, v)]
    bounds = torch.empty(num_blocks, 2, 2, 32)
    kernels.update_block_bounds(caches[0], bounds, torch.arange(num_tokens))
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    lens = torch.tensor([num_tokens], dtype=torch.int32)
    selected = kernels.select_blocks(q, bounds, table, lens, 3, size)
    out = kernels.paged_decode_attention(q, *caches, *selected, scale=0.2)
    expected, _ = Selecting(size, 0.3, "bounds").attention(q, k[:77], v[:77], 0.2)
    assert torch.allclose(out, expected, atol=1e-5)


def test_a_window_past_the_text_is_refused():
    cell = BlockSelection(model="tiny", window=10**6, window_tokens=64, decoded_tokens=8)
    with pytest.raises(ValueError, match="--window: the text ends"):
        block_selection.run_cell(cell)
