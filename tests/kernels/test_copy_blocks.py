"""copy_blocks against its reference: exact copies, so every comparison is bitwise."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from kernels import copy_blocks, reference
from kernels.block_layout import CACHE_DTYPES
from kernels.testing.accuracy import bits
from kernels.testing.inputs import LAYOUTS, make_cache, poison_

ALIKE = [layout for layout in LAYOUTS if layout != "unlike"]  # K and V must have one layout


def pairs_of(*pairs, device):
    return torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)


def random_bits_(tensor):
    """Any bit pattern, NaN payloads among them."""
    tensor.view(torch.uint8).random_(256)
    return tensor


def assert_copies_like_reference(caches, src_to_dst):
    """caches: one tensor, or (k_cache, v_cache) per layer."""
    want = copy.deepcopy(caches)
    reference.copy_blocks(want, src_to_dst)
    assert copy_blocks(caches, src_to_dst) is None
    for plane, wanted in zip(tree_leaves(caches), tree_leaves(want), strict=True):
        assert torch.equal(bits(plane), bits(wanted))


@given(data=st.data())
def test_matches_reference(data, device):
    draw = data.draw
    block_size = draw(st.sampled_from([1, 2, 3, 7, 16, 100]), label="block_size")
    num_kv_heads = draw(st.sampled_from([1, 2, 3]), label="num_kv_heads")
    head_dim = draw(st.sampled_from([16, 24, 33, 80, 128]), label="head_dim")
    num_layers = draw(st.integers(1, 3), label="num_layers")
    num_blocks = draw(st.integers(1, 9), label="num_blocks")
    dtype = draw(st.sampled_from(CACHE_DTYPES), label="dtype")
    layout = draw(st.sampled_from(["one tensor", *ALIKE]), label="layout")
    torch.manual_seed(draw(st.integers(0, 2**16), label="seed"))

    if layout == "one tensor":
        shape = (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        caches = random_bits_(torch.empty(shape, dtype=dtype, device=device))
    else:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        options = {"dtype": torch.int8, "device": device, "layout": layout}
        caches = []
        for _ in range(num_layers):
            layer = make_cache(*shape[:3], head_dim * dtype.itemsize, **options)
            caches.append(tuple(random_bits_(plane).view(dtype) for plane in layer))
    num_sources = draw(st.integers(1, num_blocks), label="num_sources")
    shuffled = torch.randperm(num_blocks)
    destinations = shuffled[num_sources:]
    sources = shuffled[torch.randint(num_sources, (len(destinations),))]
    padding = pairs_of((-1, 0), (0, -1), (-(2**40), 2**40), (int(shuffled[0]),) * 2, device="cpu")
    pairs = torch.cat([torch.stack([sources, destinations], 1), padding])
    pairs = pairs[torch.randperm(len(pairs))].to(device)
    assert_copies_like_reference(caches, torch.cat([pairs, pairs + 1], 1)[:, :2])  # strided


@pytest.mark.parametrize("layout", ["heads-outside", "half-the-heads", "half-the-dims"])
def test_strided_blocks(layout, device):
    caches = {
        "heads-outside": lambda: torch.randn(2, 3, 5, 2, 7, 24, device=device).transpose(3, 4),
        "half-the-heads": lambda: torch.randn(2, 3, 5, 7, 4, 24, device=device)[:, :, :, :, :2],
        "half-the-dims": lambda: torch.randn(2, 3, 5, 7, 2, 48, device=device)[..., :24],
    }[layout]()
    assert_copies_like_reference(caches, pairs_of((4, 0), (4, 2), device=device))


def test_unaligned_cache(device):
    flat = torch.randn(2 * 2 * 5 * 4 * 16 + 1, device=device)[1:]
    cache = flat.view(2, 2, 5, 4, 1, 16)
    assert_copies_like_reference(cache, pairs_of((0, 2), device=device))
    assert_copies_like_reference([(cache[0, 0], cache[1, 0])], pairs_of((2, 1), device=device))


def test_no_pairs_writes_nothing(device):
    cache = poison_(torch.empty(2, 1, 3, 4, 1, 16, device=device))
    before = bits(cache).clone()
    copy_blocks(cache, pairs_of(device=device))
    copy_blocks([(cache[0, 0], cache[1, 0])], pairs_of((-1, -1), device=device))
    assert torch.equal(bits(cache), before)


def test_offsets_beyond_32_bits(device, huge_tensor):
    num_blocks = 2**31 // (16 * 64) // 3 + 4
    cache = huge_tensor(2, 4, num_blocks, 16, 1, 64)  # the last layer of K starts past 2**31
    last = num_blocks - 1
    for plane in cache.flatten(0, 1):
        plane[last] = torch.randn(16, 1, 64, device=device).half()
    layers = [tuple(layer) for layer in cache.unbind(1)]
    copy_blocks(cache, pairs_of((last, last - 1), device=device))
    copy_blocks(layers, pairs_of((last, last - 2), device=device))
    for plane in cache.flatten(0, 1):
        assert plane[last].any()
        assert torch.equal(plane[last - 1], plane[last])
        assert torch.equal(plane[last - 2], plane[last])
        assert not plane[0].any()


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_offsets_inside_a_block_beyond_32_bits(num_kv_heads, device, huge_tensor):
    """Slots and heads outermost in memory: a block is spread over the whole cache."""
    num_blocks = 2**31 // (2 * num_kv_heads * 64) // 2 + 8
    cache = huge_tensor(3, num_kv_heads, 2, 1, num_blocks, 64).permute(2, 3, 4, 0, 1, 5)
    cache[:, :, -1] = torch.randn(2, 1, 3, num_kv_heads, 64, device=device).half()
    copy_blocks(cache, pairs_of((num_blocks - 1, num_blocks - 2), device=device))
    assert torch.equal(cache[:, :, -2], cache[:, :, -1])
    assert not cache[:, :, 0].any()
