"""rope_store_kvcache: the rotation is judged in fp64, the rest bitwise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import apply_rotary_embedding, reference, rope_store_kvcache, store_kvcache
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import accuracy, bits, compare_with_reference
from kernels.testing.inputs import LAYOUTS, SCALES, make_cache, random_scales

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@given(data=st.data())
def test_is_rotation_then_store(data, device):
    def draw(name, strategy):
        return data.draw(strategy, label=name)

    block_size = draw("block_size", st.sampled_from([1, 3, 7, 16, 256]))
    num_kv_heads = draw("num_kv_heads", st.integers(1, 3))
    num_q_heads = draw("num_q_heads", st.sampled_from([None, 1, 4, 5]))
    head_dim = draw("head_dim", st.sampled_from([16, 33, 64, 80]))
    rotary_dim = draw("rotary_dim", st.sampled_from([2, 16, head_dim // 2 * 2]))
    num_tokens = draw("num_tokens", st.integers(0, 20))
    num_slots = draw("num_slots", st.integers(0, num_tokens))
    dtype = draw("dtype", st.sampled_from(DTYPES))
    scale_kind = draw("scales of an fp8 cache", st.none() | st.sampled_from(SCALES))
    scales = {} if scale_kind is None else random_scales(scale_kind, num_kv_heads, device)
    interleaved = draw("interleaved", st.booleans())
    torch.manual_seed(draw("seed", st.integers(0, 2**16)))

    num_blocks = -(-num_tokens // block_size) + 2
    k_cache, v_cache = make_cache(
        num_blocks,
        block_size,
        num_kv_heads,
        head_dim,
        dtype=dtype if scale_kind is None else FP8_DTYPE,
        device=device,
        layout=draw("layout", st.sampled_from(LAYOUTS)),
    )
    heads = (num_q_heads or 0, num_kv_heads, num_kv_heads)
    qkv = torch.randn(num_tokens, sum(heads), head_dim).to(device, dtype)
    query, key, value = qkv.split(heads, dim=1)
    slots = torch.randperm(num_blocks * block_size)[:num_slots]
    slots[torch.rand(num_slots) < 0.2] = -1
    slots = slots.to(device, draw("slot dtype", st.sampled_from([torch.int32, torch.int64])))
    angle = 2 * math.pi * torch.rand(30, rotary_dim // 2)
    rotary = (angle.cos().to(device), angle.sin().to(device))
    positions = torch.randint(0, 30, (num_tokens,), device=device)

    rotated_query, rotated_key = (
        apply_rotary_embedding(x, positions, *rotary, interleaved=interleaved) for x in (query, key)
    )
    want_k, want_v = k_cache.clone(), v_cache.clone()
    store_kvcache(rotated_key, value, want_k, want_v, slots, **scales)
    given_query = query.clone()
    kept = qkv[:, heads[0] :].clone()
    assert (
        rope_store_kvcache(
            query if num_q_heads else None,
            key,
            value,
            k_cache,
            v_cache,
            slots,
            positions,
            *rotary,
            interleaved=interleaved,
            **scales,
        )
        is None
    )
    assert torch.equal(bits(k_cache), bits(want_k))
    assert torch.equal(bits(v_cache), bits(want_v))
    assert torch.equal(query, rotated_query)
    assert torch.equal(qkv[:, heads[0] :], kept)

    if num_q_heads:
        low = reference.apply_rotary_embedding(
            given_query, positions, *rotary, interleaved=interleaved
        )
        ref = reference.apply_rotary_embedding(
            given_query.double(), positions, *rotary, interleaved=interleaved
        )
        result = accuracy(query, low, ref)
        assert result.passed, result


@pytest.mark.parametrize("scales", [None, *SCALES])
def test_reference(scales, device):
    """Where rotations are exact, since every angle is 0 or a half turn, it stores the same bits."""
    qkv = torch.randn(5, 8, 32, device=device).half()
    slots, positions = torch.tensor([7, -1, 0], device=device), torch.arange(5, device=device)
    cos, sin = torch.ones(9, 8, device=device), torch.zeros(9, 8, device=device)
    cos[::2] = -1
    results = []
    for op in (rope_store_kvcache, reference.rope_store_kvcache):
        query, key, value = qkv.clone().split((4, 2, 2), dim=1)
        caches = torch.zeros(2, 2, 4, 2, 32, device=device)
        caches = caches.half() if scales is None else caches.to(FP8_DTYPE)
        options = {} if scales is None else random_scales(scales, 2, device)
        op(query, key, value, *caches, slots, positions, cos, sin, **options)
        results.append((bits(query), bits(caches)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    written = results[0][1].flatten(1, 2).any(-1).any(-1)
    assert written.nonzero().tolist() == [[0, 0], [0, 7], [1, 0], [1, 7]]


@given(data=st.data())
def test_norms_come_before_the_rotation(data, device):
    def draw(name, strategy):
        return data.draw(strategy, label=name)

    num_kv_heads = draw("num_kv_heads", st.integers(1, 3))
    num_q_heads = draw("num_q_heads", st.sampled_from([0, 1, 5]))
    head_dim = draw("head_dim", st.sampled_from([16, 33, 64, 80]))
    rotary_dim = draw("rotary_dim", st.sampled_from([2, 16, head_dim // 2 * 2]))
    # Few numbers may be rounded better by luck than the rule expects of PyTorch.
    num_tokens = draw("num_tokens", st.integers(60, 72))
    dtype = draw("dtype", st.sampled_from(DTYPES))
    interleaved = draw("interleaved", st.booleans())
    scale_kind = draw("scales of an fp8 cache", st.none() | st.sampled_from(SCALES))
    constants = {
        "norm_eps": draw("eps", st.sampled_from([1e-6, 0.1])),
        "norm_offset": draw("offset", st.sampled_from([0.0, 1.0])),
    }
    normed = draw("normed", st.sampled_from(["q", "k", "qk"]))
    torch.manual_seed(draw("seed", st.integers(0, 2**16)))
    scales = {} if scale_kind is None else random_scales(scale_kind, num_kv_heads, device)
    heads = (num_q_heads, num_kv_heads, num_kv_heads)
    qkv = torch.randn(num_tokens, sum(heads), head_dim).to(device, dtype)
    weights = torch.randn(2, head_dim).to(device, dtype)
    angle = 2 * math.pi * torch.rand(30, rotary_dim // 2, device=device)
    positions = torch.randint(0, 30, (num_tokens,), device=device)
    slots = torch.arange(num_tokens, device=device)

    def empty(dtype):
        return torch.zeros(2, 18, 4, num_kv_heads, head_dim, device=device).to(dtype)

    def run(op, qkv, weights, cos, sin, cache_dtype=None, **scales):
        query, key, value = qkv.clone().split(heads, dim=1)
        caches = empty(cache_dtype or qkv.dtype)
        options = {f"{name}_norm_weight": w for name, w in zip("qk", weights, strict=True)}
        options = {name: w for name, w in options.items() if name[0] in normed}
        options |= {"interleaved": interleaved, **constants, **scales}
        op(
            query if num_q_heads else None,
            key,
            value,
            *caches,
            slots,
            positions,
            cos,
            sin,
            **options,
        )
        return query, caches

    args = (qkv, weights, angle.cos(), angle.sin())
    results = compare_with_reference(
        lambda *args: run(rope_store_kvcache, *args),
        lambda *args: run(reference.rope_store_kvcache, *args),
        args,
    )
    for name, result in zip(("query", "caches"), results, strict=True):
        assert result.passed, f"{name}: {result}, bound {result.bound:.3g}"
    if scale_kind is not None:  # what is stored plainly, quantised
        _, plain = run(rope_store_kvcache, *args)
        _, stored = run(rope_store_kvcache, *args, cache_dtype=FP8_DTYPE, **scales)
        expected = empty(FP8_DTYPE)
        store_kvcache(*plain.flatten(1, 2)[:, :num_tokens], *expected, slots, **scales)
        assert torch.equal(bits(stored), bits(expected))


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # rows that pad a tile
@pytest.mark.parametrize("interleaved", [False, True])
def test_norms_are_rounded_before_the_rotation(interleaved, device):
    """Heads of ones have rms 1. Their gain 1.0035 is 1 in bf16, and 6 times it would not be 6."""
    heads = torch.ones(1, 4, 16, dtype=torch.bfloat16, device=device)
    query, key, value = heads.split((2, 1, 1), dim=1)
    caches = torch.zeros(2, 1, 1, 1, 16, dtype=torch.bfloat16, device=device)
    zero, threes = torch.zeros(1, dtype=torch.int64, device=device), torch.full((1, 8), 3.0)
    weight = torch.full((16,), 0.0035, device=device)
    rope_store_kvcache(
        query,
        key,
        value,
        *caches,
        zero,
        zero,
        *[threes.to(device)] * 2,
        interleaved=interleaved,
        q_norm_weight=weight,
        k_norm_weight=weight,
        norm_eps=0.0,
        norm_offset=1.0,
    )
    for rotated in (query, caches[:1]):  # pairs (a, b) are now (3 a - 3 b, 3 b + 3 a)
        assert rotated.unique().tolist() == [0.0, 6.0]
