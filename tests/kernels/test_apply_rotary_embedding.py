"""Properties of apply_rotary_embedding beyond its contract, which test_contract.py tests."""

import math

import pytest
import torch

from kernels import apply_rotary_embedding
from kernels.testing.accuracy import bits

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


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
