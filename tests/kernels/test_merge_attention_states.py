"""Properties of merge_attention_states beyond its contract, which test_contract.py tests."""

import math

import pytest
import torch

from kernels import merge_attention_states
from kernels.testing.accuracy import max_error
from kernels.testing.inputs import poison_


def test_two_empty_parts_give_zeros_and_minus_infinity(device):
    out = poison_(torch.empty(2, 3, 80, dtype=torch.float16, device=device))
    lse = torch.full((2, 3), -math.inf, device=device)
    merged, merged_lse = merge_attention_states(out, lse, out, -lse)
    assert not merged.any()
    assert (merged_lse == -math.inf).all()


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_an_empty_part_changes_nothing(empty, device):
    out, lse = torch.randn(4, 3, 64, device=device).half(), torch.randn(4, 3, device=device)
    nothing = poison_(torch.empty_like(out)), torch.full_like(lse, empty)
    for states in ((out, lse, *nothing), (*nothing, out, lse)):
        merged, merged_lse = merge_attention_states(*states)
        assert torch.equal(merged, out)
        assert merged.is_contiguous()
        assert max_error(merged_lse, lse.double()) < 1e-6
