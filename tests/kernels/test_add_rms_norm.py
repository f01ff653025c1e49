"""add_rms_norm against its reference in fp64; the sum equals PyTorch's bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import add_rms_norm, reference
from kernels.testing.accuracy import accuracy, bits, compare_with_reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def norm_and_sum(op, x, residual, weight, **options):
    residual = None if residual is None else residual.clone()
    out = op(x, residual, weight, **options)
    return out if residual is None else (out, residual)


def assert_matches_reference(x, residual, weight, **options):
    results = compare_with_reference(
        lambda *args, **named: norm_and_sum(add_rms_norm, *args, **named),
        lambda *args, **named: norm_and_sum(reference.add_rms_norm, *args, **named),
        (x, residual, weight),
        **options,
    )
    for name, result in zip(("out", "residual"), results, strict=False):
        assert result.passed, f"{name}: {result}, bound {result.bound:.3g}"


@given(data=st.data())
def test_matches_reference(data, device):
    def draw(name, strategy):
        return data.draw(strategy, label=name)

    hidden_size = draw("hidden_size", st.sampled_from([1, 7, 64, 100, 1000, 1024, 2560, 5120]))
    num_tokens = draw("num_tokens", st.integers(0, 9))
    dtype = draw("dtype", st.sampled_from(DTYPES))
    weight_dtype = draw("weight dtype", st.sampled_from([dtype, torch.float32]))
    gaps = draw("gaps between rows", st.lists(st.sampled_from([0, 1, 16]), min_size=2, max_size=2))
    options = {
        "eps": draw("eps", st.sampled_from([0.0, 1e-6, 1e-5, 0.1])),
        "offset": draw("offset", st.sampled_from([0.0, 1.0])),
    }
    torch.manual_seed(draw("seed", st.integers(0, 2**16)))
    size = draw("magnitude", st.sampled_from([1e-2, 1.0, 30.0]))
    x, residual = (
        (size * torch.randn(num_tokens, hidden_size + gap)).to(device, dtype)[:, :hidden_size]
        for gap in gaps
    )
    weight = torch.randn(hidden_size).to(device, weight_dtype)
    residual = residual if draw("residual", st.booleans()) else None
    assert_matches_reference(x, residual, weight, **options)
    if residual is not None:
        before, total = x.clone(), x + residual
        add_rms_norm(x, residual, weight, **options)
        assert torch.equal(bits(residual), bits(total))
        assert torch.equal(bits(x), bits(before))


@pytest.mark.parametrize("hidden_size", [16384, 20000])
def test_longest_rows(hidden_size, device):
    x, residual = torch.randn(2, 2, hidden_size, device=device).bfloat16()
    assert_matches_reference(x, residual, torch.randn(hidden_size, device=device).bfloat16())


def test_a_row_does_not_depend_on_its_neighbours(device):
    """Batch invariance, also where a program takes several rows."""
    for hidden_size in (64, 1024, 4096):
        x, residual = torch.randn(2, 9, hidden_size, device=device).half()
        weight = torch.ones(hidden_size, device=device)
        alone = torch.cat([add_rms_norm(a, None, weight) for a in (x + residual).split(1)])
        x[4] = torch.nan
        together = add_rms_norm(x, residual, weight)
        assert together[4].isnan().all()
        others = torch.arange(9) != 4
        assert torch.equal(bits(together[others]), bits(alone[others]))


def test_the_mean_is_taken_over_the_rounded_sum(device):
    """The result equals a separate addition and norm."""
    x, residual = torch.randn(2, 5, 96, device=device).bfloat16()
    weight = torch.rand(96, device=device).bfloat16()
    expected = add_rms_norm(x + residual, None, weight)
    assert torch.equal(add_rms_norm(x, residual, weight), expected)


def test_offset_is_added_in_fp32(device):
    """bf16, the dtype of the weight, has no 1 + 2^-9."""
    x = torch.full((1, 64), 3.0, device=device)
    weight = torch.full((64,), 2.0**-9, dtype=torch.bfloat16, device=device)
    out, expected = add_rms_norm(x, None, weight, eps=0.0, offset=1.0), 1 + 2**-9
    result = accuracy(out, x / 3 * expected, x.double() / 3 * expected)
    assert result.passed, result


def test_offsets_beyond_32_bits(far_apart, device):
    x, residual = torch.randn(2, 4, 64, device=device).half()
    weight = torch.ones(64, device=device)
    far_x, far_residual = far_apart(x, residual)
    expected = add_rms_norm(x, residual, weight)
    assert torch.equal(add_rms_norm(far_x, far_residual, weight), expected)
    assert torch.equal(far_residual, residual)
