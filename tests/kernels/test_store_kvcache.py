"""store_kvcache against its reference: all of it is exact, so comparisons are bitwise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import reference, store_kvcache
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import bits
from kernels.testing.inputs import LAYOUTS, SCALES, make_cache, random_scales

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def fused_qkv(num_tokens, num_kv_heads, head_dim, dtype, device):
    """key and value as views of one QKV projection with two query heads per KV head."""
    qkv = torch.randn(num_tokens, (4 * num_kv_heads) * head_dim, device=device).to(dtype)
    _, key, value = qkv.split([w * num_kv_heads * head_dim for w in (2, 1, 1)], dim=-1)
    return (t.unflatten(-1, (num_kv_heads, head_dim)) for t in (key, value))


def head_major(num_tokens, num_kv_heads, head_dim, dtype, device):
    """key and value computed as (heads, tokens, dim) and transposed."""
    kv = torch.randn(2, num_kv_heads, num_tokens, head_dim, device=device).to(dtype)
    return kv[0].transpose(0, 1), kv[1].transpose(0, 1)


def unlike(*shape_dtype_device):
    """key of a fused projection, value transposed: none of their strides agree."""
    key, _ = fused_qkv(*shape_dtype_device)
    _, value = head_major(*shape_dtype_device)
    return key, value


def assert_stores_like_reference(key, value, k_cache, v_cache, slot_mapping, **scales):
    want_k, want_v = k_cache.clone(), v_cache.clone()
    reference.store_kvcache(key, value, want_k, want_v, slot_mapping, **scales)
    assert store_kvcache(key, value, k_cache, v_cache, slot_mapping, **scales) is None
    assert torch.equal(bits(k_cache), bits(want_k))
    assert torch.equal(bits(v_cache), bits(want_v))


@given(data=st.data())
def test_matches_reference(data, device):
    draw = data.draw
    block_size = draw(st.sampled_from([1, 2, 3, 7, 16, 24, 100, 256]), label="block_size")
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 8]), label="num_kv_heads")
    head_dim = draw(st.sampled_from([16, 24, 64, 80, 96, 112, 128, 200, 256]), label="head_dim")
    num_blocks = draw(st.integers(1, 6), label="num_blocks")
    shape = num_blocks, block_size, num_kv_heads, head_dim
    num_tokens = draw(st.integers(0, min(40, num_blocks * block_size)), label="num_tokens")
    num_slots = draw(st.integers(0, num_tokens), label="num_slots")
    dtype = draw(st.sampled_from(DTYPES), label="dtype")
    layout = draw(st.sampled_from(LAYOUTS), label="layout")
    source = draw(st.sampled_from([fused_qkv, head_major, unlike]), label="source")
    slot_dtype = draw(st.sampled_from([torch.int32, torch.int64]), label="slot_dtype")
    scale_kind = draw(st.none() | st.sampled_from(SCALES), label="scales of an fp8 cache")
    scales = {} if scale_kind is None else random_scales(scale_kind, num_kv_heads, device)
    cache_dtype = dtype if scale_kind is None else FP8_DTYPE
    torch.manual_seed(draw(st.integers(0, 2**16), label="seed"))

    key, value = source(num_tokens, num_kv_heads, head_dim, dtype, device)
    caches = make_cache(*shape, dtype=cache_dtype, device=device, layout=layout)
    slots = torch.randperm(num_blocks * block_size)[:num_slots]
    skipped = torch.rand(num_slots) < 0.2
    slots[skipped] = torch.randint(-(2**31), 0, (int(skipped.sum()),))
    assert_stores_like_reference(key, value, *caches, slots.to(device, slot_dtype), **scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_bit_patterns_of_nan_and_inf(dtype, device):
    key = torch.full((2, 1, 16), torch.nan, dtype=dtype, device=device)
    value = torch.full((2, 1, 16), -torch.inf, dtype=dtype, device=device)
    k_cache, v_cache = make_cache(1, 4, 1, 16, dtype=dtype, device=device)
    assert_stores_like_reference(key, value, k_cache, v_cache, torch.tensor([3, 0], device=device))


def test_cache_offsets_beyond_32_bits(huge_cache, device):
    key, value = torch.randn(2, 3, 2, 64, device=device).half().unbind(0)
    k_cache, v_cache = huge_cache(block_size=16, num_kv_heads=2, head_dim=64)
    num_slots = k_cache.shape[0] * 16
    slots = torch.tensor([num_slots - 1, 0, num_slots - 33], device=device)
    store_kvcache(key, value, k_cache, v_cache, slots)
    blocks, offsets = slots // 16, slots % 16
    assert torch.equal(k_cache[blocks, offsets], key)
    assert torch.equal(v_cache[blocks, offsets], value)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_negative_slots_write_nothing_anywhere(slot_dtype, device):
    key, value = torch.randn(2, 6, 2, 16, device=device).unbind(0)
    around = [torch.zeros(6, 4, 2, 16, device=device) for _ in range(2)]
    slots = torch.tensor([-1, -2, -4, -5, -8, -(2**31)], dtype=slot_dtype, device=device)
    store_kvcache(key, value, around[0][3:], around[1][3:], slots)
    assert not any(cache.any() for cache in around)


def test_token_and_head_offsets_beyond_32_bits(far_apart, device):
    key, value = torch.randn(2, 3, 3, 32, device=device).half().unbind(0)
    heads_first = torch.zeros(3, 2, 4, 32, dtype=torch.float16, device=device)
    key, value, *caches = far_apart(key, value, heads_first, heads_first)
    caches = (cache.permute(1, 2, 0, 3) for cache in caches)
    assert_stores_like_reference(key, value, *caches, torch.tensor([5, 0, 2], device=device))
