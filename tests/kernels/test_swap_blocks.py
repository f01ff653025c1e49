"""swap_blocks against its reference: exact copies, so every comparison is bitwise.

On a GPU one cache lies there and the other in pinned host memory; in the interpreter both are on
the host.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import reference, swap_blocks
from kernels.block_layout import CACHE_DTYPES
from kernels.testing.accuracy import bits
from kernels.testing.inputs import poison_

MODULE = sys.modules["kernels.swap_blocks"]


def on_gpu(tensor, device):
    return tensor.to(device)


def on_host(tensor, device):
    return tensor if device.type == "cpu" else tensor.pin_memory()


DIRECTIONS = {"out": (on_gpu, on_host), "in": (on_host, on_gpu)}


def random_cache(shape, dtype):
    nbytes = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, nbytes, dtype=torch.uint8).view(dtype)


def assert_swaps_like_reference(src_cache, dst_cache, src_to_dst):
    want = dst_cache.clone()
    before = bits(src_cache).clone()
    reference.swap_blocks(src_cache, want, src_to_dst)
    assert swap_blocks(src_cache, dst_cache, src_to_dst) is None
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert torch.equal(bits(dst_cache), bits(want))
    assert torch.equal(bits(src_cache), before)


@given(data=st.data())
def test_matches_reference(data, device):
    draw = data.draw
    block_size = draw(st.sampled_from([1, 3, 7, 16, 100]), label="block_size")
    num_kv_heads = draw(st.sampled_from([1, 2, 3]), label="num_kv_heads")
    head_dim = draw(st.sampled_from([16, 24, 33, 128]), label="head_dim")
    planes = draw(st.sampled_from([(), (2, 1), (2, 3)]), label="planes")
    num_src, num_dst = (draw(st.integers(1, 6), label=f"num_{end}") for end in ("src", "dst"))
    dtype = draw(st.sampled_from(CACHE_DTYPES), label="dtype")
    src_place, dst_place = DIRECTIONS[draw(st.sampled_from(list(DIRECTIONS)), label="direction")]
    torch.manual_seed(draw(st.integers(0, 2**16), label="seed"))

    src_cache, dst_cache = (
        place(
            random_cache((*planes, num_blocks, block_size, num_kv_heads, head_dim), dtype), device
        )
        for place, num_blocks in ((src_place, num_src), (dst_place, num_dst))
    )
    destinations = torch.randperm(num_dst)[: draw(st.integers(0, num_dst), label="num_pairs")]
    sources = torch.randint(num_src, (len(destinations),))
    padding = torch.tensor([[-1, 0], [0, -1], [2**40, -(2**40)]])
    pairs = torch.cat([torch.stack([sources, destinations], 1), padding])
    assert_swaps_like_reference(src_cache, dst_cache, pairs[torch.randperm(len(pairs))].to(device))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_caches_of_different_layouts(direction, device):
    """A cache with heads outside slots on one side, views with strides on both."""
    src_place, dst_place = DIRECTIONS[direction]
    src_cache = src_place(torch.randn(2, 2, 5, 3, 7, 32), device).transpose(3, 4)[..., :24]
    dst_cache = dst_place(torch.randn(2, 4, 6, 7, 3, 24), device)[:, ::2]
    pairs = torch.tensor([[4, 0], [4, 5], [1, 2]], device=device)
    assert_swaps_like_reference(src_cache, dst_cache, pairs)


@pytest.mark.parametrize("pairs", [torch.empty(0, 2).long(), torch.tensor([[-1, -1]])], ids=str)
def test_no_pairs_write_nothing(pairs, device):
    src_cache = on_gpu(torch.ones(3, 4, 1, 16), device)
    dst_cache = on_host(poison_(torch.empty(3, 4, 1, 16)), device)
    assert_swaps_like_reference(src_cache, dst_cache, pairs.to(device))


def test_offsets_beyond_32_bits(device, huge_tensor):
    if device.type != "cpu":
        pytest.skip("would pin several GiB of host memory")
    num_blocks = 2**31 // (16 * 64) // 3 + 4
    src_cache = huge_tensor(2, 4, num_blocks, 16, 1, 64)  # the last layer of K starts past 2**31
    dst_cache = torch.zeros(2, 4, 2, 16, 1, 64, dtype=torch.float16)
    for plane in src_cache.flatten(0, 1):
        plane[-1] = torch.randn(16, 1, 64).half()
    swap_blocks(src_cache, dst_cache, torch.tensor([[num_blocks - 1, 1]]))
    assert torch.equal(dst_cache[:, :, 1], src_cache[:, :, -1])
    swap_blocks(dst_cache, src_cache, torch.tensor([[1, num_blocks - 2]]))
    assert torch.equal(src_cache[:, :, -2], src_cache[:, :, -1])
    assert not src_cache[:, :, 0].any()


def test_parts_of_one_pool_that_do_not_overlap(device):
    """Layers that alternate: the address ranges overlap and the elements do not."""
    pool = torch.arange(2 * 2 * 5 * 16.0, device=device).view(2, 2, 5, 1, 1, 16)
    expected = pool.clone()
    expected[:, 1, 3] = expected[:, 0, 4]
    swap_blocks(pool[:, :1], pool[:, 1:], torch.tensor([[4, 3]], device=device))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("src", [slice(5), slice(None, None, 2), slice(4, 5)])
def test_caches_that_overlap_are_refused(src, device):
    pool = torch.zeros(12, 4, 2, 16, device=device)
    with pytest.raises(ValueError, match="src_cache, dst_cache: expected tensors that do not over"):
        swap_blocks(pool[src], pool[4:], torch.tensor([[0, 0]], device=device))


def test_pageable_host_memory_is_refused_outside_the_interpreter(monkeypatch):
    monkeypatch.setattr(MODULE, "INTERPRETED", SimpleNamespace(value=False))
    gpu, host = torch.empty(5, 4, 2, 16, device="meta"), torch.zeros(5, 4, 2, 16)
    pairs = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    for name, caches in (("dst", (gpu, host)), ("src", (host, gpu)), ("src", (host, host))):
        with pytest.raises(ValueError, match=rf"^{name}_cache: .*pageable.*pin_memory=True"):
            swap_blocks(*caches, pairs)
