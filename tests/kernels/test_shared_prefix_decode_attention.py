"""shared_prefix_decode_attention against its reference and against plain decode, on poisoned
caches and garbage tables.
"""

from __future__ import annotations

import math

import pytest
import torch
from attention_ops import OPS, assert_accurate

from kernels import shared_prefix_decode_attention
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.inputs import random_scales

SHARED = OPS["shared_prefix"]


@pytest.mark.parametrize(
    ("dtype", "window_size"),
    [
        (torch.float16, None),
        (torch.float16, 3),
        (torch.float16, 40),
        (torch.bfloat16, 70),
        (torch.float32, None),
    ],
    ids=str,
)
def test_equals_plain_decode_over_the_concatenated_table(dtype, window_size, device):
    group_sizes, prefix_lens, suffix_lens = [2, 1, 2], [64, 0, 16], [5, 20, 9, 1, 17]
    lens = group_sizes, prefix_lens, suffix_lens
    call = SHARED.call(device, lens, dtype=dtype, window_size=window_size)
    prefix_tables, suffix_tables = call["prefix_block_tables"], call["suffix_block_tables"]
    groups = torch.repeat_interleave(torch.tensor(group_sizes)).tolist()
    tables = torch.full((5, 8), -1, dtype=torch.int32, device=device)
    context_lens = torch.zeros(5, dtype=torch.int32, device=device)
    for i, group in enumerate(groups):
        prefix_blocks = prefix_lens[group] // 16
        tables[i, :prefix_blocks] = prefix_tables[group, :prefix_blocks]
        suffix_blocks = -(-suffix_lens[i] // 16)
        tables[i, prefix_blocks : prefix_blocks + suffix_blocks] = suffix_tables[i, :suffix_blocks]
        context_lens[i] = prefix_lens[group] + suffix_lens[i]
    options = {
        "window_size": window_size,
        "softcap": 5.0,
        "alibi_slopes": torch.rand(4, device=device),
        "sinks": torch.randn(4, device=device),
    }
    plain = {name: call[name] for name in ("q", "k_cache", "v_cache")} | options
    plain |= {"block_tables": tables, "context_lens": context_lens}
    assert_accurate("paged_decode_attention", plain, lambda: SHARED.run(call, None, **options))


def test_group_of_several_tiles(device):
    """The first group has more rows than one tile, and the second starts in mid-tile."""
    num_members = 12 if device.type == "cpu" else 100
    lens = [num_members, 2], [40, 33], [1] * (num_members + 2)
    call = SHARED.call(device, lens, num_q_heads=3, num_kv_heads=1)
    SHARED.assert_matches_reference(call | {"num_prefix_splits": 2})


def test_more_groups_than_one_search_step(device):
    sizes = [int(group in (0, 63, 64, 69)) for group in range(70)]
    prefix_lens = [group if size else 0 for group, size in enumerate(sizes)]
    call = SHARED.call(device, (sizes, prefix_lens, [2] * 4), num_q_heads=1, num_kv_heads=1)
    SHARED.assert_matches_reference(call)


def test_nothing_to_attend_to(device):
    call = SHARED.call(device, ([1, 2], [0, 17], [0, 0, 4]))
    out, lse = SHARED.run(call, None, sinks=torch.ones(4, device=device))
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()
    assert out[1:].isfinite().all()
    assert lse[1:].isfinite().all()


def test_prefix_of_an_empty_group_is_not_read(device):
    args = SHARED.call(device, ([1, 0, 1], [20, 0, 5], [3, 2]))
    want = shared_prefix_decode_attention(**args)
    args["prefix_lens"] = args["prefix_lens"].clone()
    args["prefix_lens"][1] = -(2**31)
    assert torch.equal(shared_prefix_decode_attention(**args), want)


@pytest.mark.parametrize("kv_dtype", [None, FP8_DTYPE], ids=["fp32", "fp8"])
def test_batch_invariant(kv_dtype, device):
    """A sequence's result is bitwise the same alone, in its group and among other groups.

    fp32 output shows any change in the order of sums.
    """
    options = {"num_prefix_splits": 2, "num_splits": 2, "return_lse": True, "window_size": 60}
    if kv_dtype is not None:
        options |= random_scales("per head", 2, device)
    sizes = [3, 2], [70, 40], [5, 20, 9, 30, 40]
    call = SHARED.call(device, sizes, kv_dtype=kv_dtype, dtype=torch.float32)
    together = shared_prefix_decode_attention(**call, **options)
    for i, group in ((1, 0), (4, 1)):
        own = {name: call[name][[i]] for name in ("q", "suffix_block_tables", "suffix_lens")}
        own |= {name: call[name][[group]] for name in ("prefix_block_tables", "prefix_lens")}
        own["group_offsets"] = torch.tensor([0, 1], dtype=torch.int32, device=device)
        alone = shared_prefix_decode_attention(**call | own, **options)
        assert torch.equal(alone[0][0], together[0][i])
        assert torch.equal(alone[1][0], together[1][i])
