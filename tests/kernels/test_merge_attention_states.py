"""merge_attention_states against its reference, by the rule of kernels/testing/accuracy.py."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import merge_attention_states, reference
from kernels.testing.accuracy import compare_with_reference, max_error
from kernels.testing.inputs import poison_

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def random_states(num_tokens, num_heads, head_dim, dtype, device, spread=3.0):
    """(out, lse); an LSE far below the other part's is a weight that underflows."""
    out = torch.randn(num_tokens, num_heads, head_dim).to(device, dtype)
    return out, (spread * torch.randn(num_tokens, num_heads)).to(device)


def assert_matches_reference(*states):
    results = compare_with_reference(
        merge_attention_states, reference.merge_attention_states, states
    )
    for name, result in zip(("out", "lse"), results, strict=True):
        assert result.passed, f"{name}: {result}, bound {result.bound:.3g}"


@given(data=st.data())
def test_matches_reference(data, device):
    draw = data.draw
    num_tokens = draw(st.integers(0, 40), label="num_tokens")
    num_heads = draw(st.sampled_from([1, 2, 3, 7]), label="num_heads")
    head_dim = draw(st.sampled_from([0, 1, 16, 33, 80, 112, 128, 256]), label="head_dim")
    dtype = draw(st.sampled_from(DTYPES), label="dtype")
    spread = draw(st.sampled_from([0.0, 3.0, 100.0]), label="spread")
    torch.manual_seed(draw(st.integers(0, 2**16), label="seed"))
    shape = (num_tokens, num_heads, head_dim, dtype, device, spread)
    (out_a, lse_a), (out_b, lse_b) = random_states(*shape), random_states(*shape)
    for out, lse in ((out_a, lse_a), (out_b, lse_b)):
        empty = torch.rand(num_tokens, num_heads) < 0.3
        signs = torch.where(torch.rand(num_tokens, num_heads) < 0.5, -1.0, 1.0)
        lse[empty] = math.inf * signs[empty].to(device)
        out[empty] = poison_(torch.empty_like(out[empty]))
    # Views of wider tensors, and with heads first, as flash-attn has its LSE.
    out_a = torch.cat([out_a, out_a], dim=-1)[..., :head_dim]
    out_b, lse_a = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (out_b, lse_a))
    assert_matches_reference(out_a, lse_a, out_b, lse_b)


def test_two_empty_parts_give_zeros_and_minus_infinity(device):
    out = poison_(torch.empty(2, 3, 80, dtype=torch.float16, device=device))
    lse = torch.full((2, 3), -math.inf, device=device)
    merged, merged_lse = merge_attention_states(out, lse, out, -lse)
    assert not merged.any()
    assert (merged_lse == -math.inf).all()


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_an_empty_part_changes_nothing(empty, device):
    out, lse = random_states(4, 3, 64, torch.float16, device)
    nothing = poison_(torch.empty_like(out)), torch.full_like(lse, empty)
    for states in ((out, lse, *nothing), (*nothing, out, lse)):
        merged, merged_lse = merge_attention_states(*states)
        assert torch.equal(merged, out)
        assert merged.is_contiguous()
        assert max_error(merged_lse, lse.double()) < 1e-6


def test_merging_halves_gives_the_whole(device):
    torch.manual_seed(0)
    scores, v = 4 * torch.randn(5, 2, 60).double(), torch.randn(60, 2, 24).double()

    def part(keys):
        out = torch.einsum("qhk,khd->qhd", scores[..., keys].softmax(-1), v[keys])
        return out.float().to(device), scores[..., keys].logsumexp(-1).float().to(device)

    want, want_lse = part(slice(None))
    out, lse = merge_attention_states(*part(slice(0, 13)), *part(slice(13, None)))
    assert max_error(out, want.double()) < 2e-6
    assert max_error(lse, want_lse.double()) < 2e-6


def test_huge_lse_does_not_overflow(device):
    out = torch.tensor([[[1.0] * 16]], device=device)
    lse = torch.tensor([[3e38]], device=device)
    merged, merged_lse = merge_attention_states(out, lse, 3 * out, lse)
    assert (merged == 2).all()
    assert merged_lse.item() == pytest.approx(3e38)


@pytest.mark.parametrize("shape", [(0, 4, 16), (3, 0, 16)], ids=str)
def test_nothing_to_merge(shape, device):
    out, lse = torch.empty(shape, device=device), torch.empty(shape[:2], device=device)
    merged, merged_lse = merge_attention_states(out, lse, out, lse)
    assert merged.shape == shape
    assert merged_lse.shape == shape[:2]
