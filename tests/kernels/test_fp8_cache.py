"""fp8 KV caches: every code, every rounding, and every form of scale."""

import math

import pytest
import torch
from attention_ops import OPS

from kernels import paged_decode_attention, store_kvcache
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import bits

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def every_code(device):
    """All 256 codes, in 16 tokens of 16 elements."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(16, 1, 1, 16).view(FP8_DTYPE)


def every_number(dtype, device):
    """All fp16 or bf16 numbers; for fp32 numbers at, next to and between codes, and extremes."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    codes = every_code("cpu").flatten()[:127].float()
    x = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    x = torch.cat([x, x.nextafter(torch.tensor(math.inf)), x.nextafter(torch.tensor(0.0))])
    extremes = [464.0, 464.1, 1e30, math.inf, math.nan, 1e-30, 2.0**-10, 1.1 * 2.0**-10]
    x = torch.cat([x, torch.tensor(extremes)])
    return torch.cat([x, -x]).to(device)


def stored(x, scale):
    """The fp8 numbers that store_kvcache writes for x."""
    numbers = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 16)).view(-1, 1, 16)
    cache = torch.zeros(len(numbers), 1, 1, 16, device=x.device).to(FP8_DTYPE)
    slots = torch.arange(len(numbers), device=x.device)
    store_kvcache(numbers, numbers, cache, cache, slots, k_scale=scale, v_scale=scale)
    return cache.flatten()[: x.numel()]


@pytest.mark.parametrize("scale", [None, 0.37, 3e-6, 2000.0], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_is_stored_as_pytorch_converts_it(dtype, scale, device):
    x = every_number(dtype, device)
    # On a GPU, PyTorch divides by a number in host memory as it multiplies by its reciprocal.
    divisor = torch.tensor(1.0 if scale is None else scale, device=device)
    want = (x.float() / divisor).clamp(-448, 448).to(FP8_DTYPE)
    forms = [scale]
    if scale is not None and dtype == torch.float32:
        forms.append(torch.tensor(scale, device=device))
    for form in forms:
        got = stored(x, form)
        assert torch.equal(got.float().isnan(), x.isnan())
        assert torch.equal(bits(got)[~x.isnan()], bits(want)[~x.isnan()])


@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_is_read_exactly(dtype, scale, device):
    """Attention over one token returns its value. With unit vectors as queries the LSEs are the
    elements of its key."""
    v_cache = every_code(device)
    k_cache = torch.zeros(16, 1, 1, 16, device=device).to(FP8_DTYPE)
    tables = torch.arange(16, dtype=torch.int32, device=device)[:, None]
    lens = torch.ones(16, dtype=torch.int32, device=device)
    q = torch.zeros(16, 1, 16, device=device, dtype=dtype)
    out = paged_decode_attention(q, k_cache, v_cache, tables, lens, v_scale=scale)
    want = v_cache[:, 0].to(dtype) * (scale or 1.0)
    assert torch.equal(out.nan_to_num(), want.nan_to_num())
    assert torch.equal(out.isnan(), want.isnan())

    q = torch.eye(16, device=device, dtype=dtype).repeat(16, 1, 1)
    keys = every_code(device).float().nan_to_num()  # a NaN would spread to its row's products
    options = {"k_scale": scale, "scale": 1.0, "return_lse": True}
    _, lse = paged_decode_attention(q, keys.to(FP8_DTYPE), k_cache, tables, lens, **options)
    torch.testing.assert_close(lse, keys[:, 0, 0] * (scale or 1.0), rtol=1e-6, atol=0)


def bf16_call(device):
    shape = {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 16, "block_size": 4}
    return OPS["decode"].call(device, (9, 21), dtype=torch.bfloat16, kv_dtype=FP8_DTYPE, **shape)


@pytest.mark.parametrize("power", [-80, -20, 17, 80])
def test_bf16_queries_of_any_magnitude_keep_their_precision(power, device):
    """They are multiplied as fp16, which has a much smaller range."""
    call = bf16_call(device)
    expected = paged_decode_attention(**call, scale=0.25)
    call["q"] *= 2.0**power
    out = paged_decode_attention(**call, scale=0.25 * 2.0**-power)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_a_query_that_is_not_finite_stays_in_its_head(wrong, device):
    call = bf16_call(device)
    expected = paged_decode_attention(**call)
    call["q"][1, 2, 5] = wrong
    out = paged_decode_attention(**call)
    others = torch.ones(2, 4, dtype=torch.bool, device=device)
    others[1, 2] = False
    assert torch.equal(out[others], expected[others])
    assert not out[1, 2].isfinite().all()
