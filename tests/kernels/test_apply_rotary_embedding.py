"""apply_rotary_embedding against its reference in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import apply_rotary_embedding, reference
from kernels.testing.accuracy import bits, compare_with_reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def tables(num_positions, rotary_dim, dtype, device):
    angle = 2 * math.pi * torch.rand(num_positions, rotary_dim // 2)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


@given(data=st.data())
def test_matches_reference(data, device):
    def draw(name, strategy):
        return data.draw(strategy, label=name)

    head_dim = draw("head_dim", st.sampled_from([16, 33, 64, 80, 128, 256]))
    rotary_dim = draw("rotary_dim", st.sampled_from([2, 16, head_dim // 4 * 2, head_dim // 2 * 2]))
    num_tokens = draw("num_tokens", st.integers(0, 20))
    dtype = draw("dtype", st.sampled_from(DTYPES))
    table_dtype = draw("table dtype", st.sampled_from([dtype, torch.float32]))
    torch.manual_seed(draw("seed", st.integers(0, 2**16)))
    qkv = torch.randn(num_tokens, 3 * draw("num_heads", st.integers(1, 5)), head_dim)
    x = qkv.to(device, dtype)[:, ::3]
    positions = torch.randint(0, 50, (num_tokens,), device=device)
    if draw("int32 positions", st.booleans()):
        positions = positions.int()
    cos, sin = tables(50, rotary_dim, table_dtype, device)
    before = x.clone()
    (result,) = compare_with_reference(
        apply_rotary_embedding,
        reference.apply_rotary_embedding,
        (x, positions, cos, sin),
        interleaved=draw("interleaved", st.booleans()),
    )
    assert result.passed, result
    assert torch.equal(x, before)


@pytest.mark.parametrize("interleaved", [False, True])
def test_is_a_rotation_by_the_angle_of_the_position(interleaved, device):
    """Scalar products of rotated vectors depend on the distance of their positions alone."""
    frequencies = 10000.0 ** -(torch.arange(0, 32, 2) / 32)
    angle = torch.arange(100)[:, None] * frequencies
    cos, sin = angle.cos().to(device), angle.sin().to(device)
    q, k = torch.arange(1.0, 65.0, device=device).view(2, 1, 1, 32) / 64

    def score(q_position, k_position):
        rotated = [
            apply_rotary_embedding(
                x, torch.tensor([p], device=device), cos, sin, interleaved=interleaved
            )
            for x, p in ((q, q_position), (k, k_position))
        ]
        return (rotated[0] * rotated[1]).sum().item()

    assert score(12, 5) == pytest.approx(score(97, 90), abs=1e-4)
    assert score(7, 7) == pytest.approx((q * k).sum().item(), abs=1e-4)
    assert score(12, 5) != pytest.approx(score(12, 6), abs=1e-2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_past_rotary_dim_keep_their_bits(dtype, interleaved, device):
    x = torch.full((3, 2, 40), math.nan, dtype=dtype, device=device)
    x[..., :16] = 1
    x[..., 30:] = -math.inf
    cos, sin = tables(5, 16, dtype, device)
    positions = torch.tensor([4, 0, 2], device=device)
    out = apply_rotary_embedding(x, positions, cos, sin, interleaved=interleaved)
    assert torch.equal(bits(out[..., 16:].contiguous()), bits(x[..., 16:].contiguous()))
    assert out[..., :16].isfinite().all()
