"""Properties of apply_rotary_embedding beyond its contract, which test_contract.py tests."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import apply_rotary_embedding
from kernels.testing.accuracy import bits

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


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
    angle = 2 * math.pi * torch.rand(5, 8)
    cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
    positions = torch.tensor([4, 0, 2], device=device)
    out = apply_rotary_embedding(x, positions, cos, sin, interleaved=interleaved)
    assert torch.equal(bits(out[..., 16:].contiguous()), bits(x[..., 16:].contiguous()))
    assert out[..., :16].isfinite().all()
