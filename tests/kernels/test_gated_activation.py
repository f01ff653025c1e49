"""Properties of gated_activation beyond its contract, which test_contract.py tests."""

import pytest
import torch

from kernels import gated_activation
from kernels.gated_activation import ACTIVATIONS


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_saturates_without_nan(activation, device):
    """Far below 0 the gate is shut; far above it lets its input pass."""
    gate = torch.tensor([[-1e38, -1e4, -200.0, 0.0, 200.0, 1e4, 1e18]], device=device)
    up = torch.full_like(gate, 0.5)
    assert gated_activation(gate, up, activation).tolist() == (0.5 * gate.clamp(min=0)).tolist()
