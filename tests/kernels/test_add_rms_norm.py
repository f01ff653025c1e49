"""Properties of add_rms_norm beyond its contract, which test_contract.py tests."""

import pytest
import torch

from kernels import add_rms_norm
from kernels.testing.accuracy import accuracy, bits
from kernels.testing.cases import make_case


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [100, 16384, 20000])
def test_the_sum_is_that_of_pytorch(width, dtype, device):
    case = make_case("add_rms_norm", width=width, num_tokens=2, dtype=dtype, device=device)
    total = case.inputs["x"] + case.inputs["residual"]
    assert all(result.passed for result in case.judge().values())
    assert torch.equal(bits(case.inputs["residual"].contiguous()), bits(total))


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


def test_offset_is_added_in_fp32(device):
    """bf16, the dtype of the weight, has no 1 + 2^-9."""
    x = torch.full((1, 64), 3.0, device=device)
    weight = torch.full((64,), 2.0**-9, dtype=torch.bfloat16, device=device)
    out, expected = add_rms_norm(x, None, weight, eps=0.0, offset=1.0), 1 + 2**-9
    result = accuracy(out, x / 3 * expected, x.double() / 3 * expected)
    assert result.passed, result
