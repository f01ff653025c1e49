"""rope_store_kvcache: bitwise equal to a rotation and a store; its norms are judged in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import apply_rotary_embedding, reference, rope_store_kvcache, store_kvcache
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import bits, compare_with_reference
from kernels.testing.inputs import LAYOUTS, SCALES, make_cache, random_scales

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


class Drawn:
    """Random arguments: rows of a fused projection, positions, rotary tables, scales."""

    def __init__(self, data, num_tokens, device):
        def draw(name, strategy):
            return data.draw(strategy, label=name)

        self.num_tokens = draw("num_tokens", num_tokens)
        num_kv_heads = draw("num_kv_heads", st.integers(1, 3))
        self.heads = draw("num_q_heads", st.sampled_from([0, 1, 4, 5])), num_kv_heads, num_kv_heads
        self.head_dim = draw("head_dim", st.sampled_from([16, 33, 64, 80]))
        rotary_dim = draw("rotary_dim", st.sampled_from([2, 16, self.head_dim // 2 * 2]))
        self.dtype = draw("dtype", st.sampled_from(DTYPES))
        self.interleaved = draw("interleaved", st.booleans())
        scale_kind = draw("scales of an fp8 cache", st.none() | st.sampled_from(SCALES))
        torch.manual_seed(draw("seed", st.integers(0, 2**16)))
        self.scales = random_scales(scale_kind, num_kv_heads, device) if scale_kind else {}
        self.cache_dtype = FP8_DTYPE if scale_kind else self.dtype
        shape = self.num_tokens, sum(self.heads), self.head_dim
        self.qkv = (2 * torch.rand(shape) - 1).to(device, self.dtype)
        angle = 2 * math.pi * torch.rand(30, rotary_dim // 2, device=device)
        self.rotary = angle.cos(), angle.sin()
        self.positions = torch.randint(0, 30, (self.num_tokens,), device=device)

    def split(self, qkv):
        """Query, or None without query heads, key and value."""
        query, key, value = qkv.split(self.heads, dim=1)
        return (query if self.heads[0] else None), key, value


@given(data=st.data())
def test_is_rotation_then_store(data, device):
    drawn = Drawn(data, st.integers(0, 20), device)
    block_size = data.draw(st.sampled_from([1, 3, 7, 16, 256]), label="block_size")
    num_slots = data.draw(st.integers(0, drawn.num_tokens), label="num_slots")
    layout = data.draw(st.sampled_from(LAYOUTS), label="layout")
    slot_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), label="slot dtype")
    shape = -(-drawn.num_tokens // block_size) + 2, block_size, drawn.heads[1], drawn.head_dim
    caches = make_cache(*shape, dtype=drawn.cache_dtype, device=device, layout=layout)
    slots = torch.randperm(shape[0] * block_size)[:num_slots]
    slots[torch.rand(num_slots) < 0.2] = -1
    slots = slots.to(device, slot_dtype)
    rotation = drawn.positions, *drawn.rotary
    options = {"interleaved": drawn.interleaved}

    before, (query, key, value) = drawn.qkv.clone(), drawn.split(drawn.qkv)
    wanted = [cache.clone() for cache in caches]
    rotated_key = apply_rotary_embedding(key, *rotation, **options)
    store_kvcache(rotated_key, value, *wanted, slots, **drawn.scales)
    arguments = query, key, value, *caches, slots, *rotation
    assert rope_store_kvcache(*arguments, **options, **drawn.scales) is None
    for cache, want in zip(caches, wanted, strict=True):
        assert torch.equal(bits(cache), bits(want))
    assert torch.equal(drawn.qkv[:, drawn.heads[0] :], before[:, drawn.heads[0] :])
    if query is not None:
        given_query = before[:, : drawn.heads[0]]
        assert torch.equal(query, apply_rotary_embedding(given_query, *rotation, **options))


@pytest.mark.parametrize("scales", [None, *SCALES])
def test_reference(scales, device):
    """Rotations by 0 or a half turn are exact, so the kernel stores the same bits."""
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
@settings(max_examples=8)
def test_norms_come_before_the_rotation(data, device):
    # Many evenly spread numbers. Normal ones have few outliers, which PyTorch may round so well by
    # luck that two correct roundings are more than twice as far off.
    drawn = Drawn(data, st.integers(60, 72), device)
    options = {
        "interleaved": drawn.interleaved,
        "norm_eps": data.draw(st.sampled_from([1e-6, 0.1]), label="eps"),
        "norm_offset": data.draw(st.sampled_from([0.0, 1.0]), label="offset"),
    }
    normed = data.draw(st.sampled_from(["q", "k", "qk"]), label="normed")
    weights = (0.5 + torch.rand(2, drawn.head_dim)).to(device, drawn.dtype)
    slots = torch.arange(drawn.num_tokens, device=device)

    def empty(dtype):
        return torch.zeros(2, 18, 4, drawn.heads[1], drawn.head_dim, device=device).to(dtype)

    def run(op, qkv, weights, cos, sin, cache_dtype=None, **scales):
        query, key, value = drawn.split(qkv.clone())
        caches = empty(cache_dtype or qkv.dtype)
        norms = {f"{x}_norm_weight": w for x, w in zip("qk", weights, strict=True) if x in normed}
        rotation = drawn.positions, cos, sin
        op(query, key, value, *caches, slots, *rotation, **norms, **options, **scales)
        return qkv.new_zeros(1) if query is None else query, caches

    args = (drawn.qkv, weights, *drawn.rotary)
    results = compare_with_reference(
        lambda *args: run(rope_store_kvcache, *args),
        lambda *args: run(reference.rope_store_kvcache, *args),
        args,
    )
    for result in results:
        assert result.passed, f"{result}, bound {result.bound:.3g}"
    if drawn.scales:  # equals quantising the result without scales
        *_, plain = run(rope_store_kvcache, *args)
        *_, stored = run(rope_store_kvcache, *args, cache_dtype=FP8_DTYPE, **drawn.scales)
        expected = empty(FP8_DTYPE)
        store_kvcache(*plain.flatten(1, 2)[:, : drawn.num_tokens], *expected, slots, **drawn.scales)
        assert torch.equal(bits(stored), bits(expected))


@pytest.mark.parametrize("interleaved", [False, True])
def test_norms_are_rounded_before_the_rotation(interleaved, device):
    """Heads of ones have rms 1. Their gain 1.0035 is 1 in bf16, and 6 times it would not be 6."""
    heads = torch.ones(1, 4, 16, dtype=torch.bfloat16, device=device)
    query, key, value = heads.split((2, 1, 1), dim=1)
    caches = torch.zeros(2, 1, 1, 1, 16, dtype=torch.bfloat16, device=device)
    zero, threes = torch.zeros(1, dtype=torch.int64, device=device), torch.full((1, 8), 3.0)
    weight = torch.full((16,), 0.0035, device=device)
    options = {"q_norm_weight": weight, "k_norm_weight": weight, "interleaved": interleaved}
    options |= {"norm_eps": 0.0, "norm_offset": 1.0}
    rotation = zero, *[threes.to(device)] * 2
    rope_store_kvcache(query, key, value, *caches, zero, *rotation, **options)
    for rotated in (query, caches[:1]):  # pairs (a, b) are now (3 a - 3 b, 3 b + 3 a)
        assert rotated.unique().tolist() == [0.0, 6.0]
