"""gated_activation against its reference in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import gated_activation, reference
from kernels.gated_activation import ACTIVATIONS
from kernels.testing.accuracy import bits, compare_with_reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@given(data=st.data())
def test_matches_reference(data, device):
    def draw(name, strategy):
        return data.draw(strategy, label=name)

    size = draw("size", st.sampled_from([1, 7, 80, 1024, 2048, 2049, 5000]))
    num_tokens = draw("num_tokens", st.integers(0, 20))
    dtype = draw("dtype", st.sampled_from(DTYPES))
    torch.manual_seed(draw("seed", st.integers(0, 2**16)))
    gate_up = torch.randn(num_tokens, 2 * size).to(device, dtype)
    gate_up[:, :size] *= draw("magnitude of the gate", st.sampled_from([1e-2, 1.0, 20.0]))
    before = gate_up.clone()
    (result,) = compare_with_reference(
        gated_activation,
        reference.gated_activation,
        gate_up.chunk(2, dim=1),
        activation=draw("activation", st.sampled_from(ACTIVATIONS)),
    )
    assert result.passed, result
    assert torch.equal(bits(gate_up), bits(before))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_saturates_without_nan(activation, device):
    """Far below 0 the gate is shut; far above it lets its input pass."""
    gate = torch.tensor([[-1e38, -1e4, -200.0, 0.0, 200.0, 1e4, 1e18]], device=device)
    up = torch.full_like(gate, 0.5)
    assert gated_activation(gate, up, activation).tolist() == (0.5 * gate.clamp(min=0)).tolist()


def test_offsets_beyond_32_bits(far_apart, device):
    gate, up = torch.randn(2, 4, 64, device=device).half()
    expected = gated_activation(gate, up, "silu")
    assert torch.equal(gated_activation(*far_apart(gate, up), "silu"), expected)
