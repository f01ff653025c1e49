"""shared_prefix_decode_attention against its reference and against plain decode, on poisoned
caches and garbage tables.
"""

from __future__ import annotations

import math

import attention_ops
import pytest
import torch
from attention_ops import SHAPE

from kernels import reference, shared_prefix_decode_attention
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import compare_with_reference
from kernels.testing.cases import PREFIX_ARGUMENTS
from kernels.testing.inputs import random_scales, random_shared_prefix_args


def make_args(group_sizes, prefix_lens, suffix_lens, device, **overrides):
    lens = group_sizes, prefix_lens, suffix_lens
    return random_shared_prefix_args(*lens, device=device, **SHAPE | overrides)


def assert_matches_reference(args, **options):
    attention_ops.assert_matches_reference(shared_prefix_decode_attention, *args, **options)


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
    args = make_args(
        group_sizes, prefix_lens, suffix_lens, device, dtype=dtype, window_size=window_size
    )
    q, k_cache, v_cache, prefix_tables, _, _, suffix_tables, _ = args
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
        "return_lse": True,
    }
    results = compare_with_reference(
        lambda *_, **options: shared_prefix_decode_attention(*args, **options),
        reference.paged_decode_attention,
        (q, k_cache, v_cache, tables, context_lens),
        **options,
    )
    assert all(result.passed for result in results), results


def test_group_of_several_tiles(device):
    """The first group has more rows than one tile, and the second starts in mid-tile."""
    num_members = 12 if device.type == "cpu" else 100
    lens = [1] * (num_members + 2)
    args = make_args([num_members, 2], [40, 33], lens, device, num_q_heads=3, num_kv_heads=1)
    assert_matches_reference(args, num_prefix_splits=2)


def test_more_groups_than_one_search_step(device):
    sizes = [int(group in (0, 63, 64, 69)) for group in range(70)]
    prefix_lens = [group if size else 0 for group, size in enumerate(sizes)]
    args = make_args(sizes, prefix_lens, [2] * 4, device, num_q_heads=1, num_kv_heads=1)
    assert_matches_reference(args)


def test_nothing_to_attend_to(device):
    args = make_args([1, 2], [0, 17], [0, 0, 4], device)
    out, lse = shared_prefix_decode_attention(
        *args, return_lse=True, sinks=torch.ones(4, device=device)
    )
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()
    assert out[1:].isfinite().all()
    assert lse[1:].isfinite().all()


def test_prefix_of_an_empty_group_is_not_read(device):
    args = dict(
        zip(PREFIX_ARGUMENTS, make_args([1, 0, 1], [20, 0, 5], [3, 2], device), strict=True)
    )
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
    args = make_args(*sizes, device, kv_dtype=kv_dtype, dtype=torch.float32)
    together = shared_prefix_decode_attention(*args, **options)
    q, k_cache, v_cache, prefix_tables, prefix_lens, _, tables, lens = args
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=device)
    for i, group in ((1, 0), (4, 1)):
        prefix = prefix_tables[group : group + 1], prefix_lens[group : group + 1]
        own = tables[i : i + 1], lens[i : i + 1]
        alone = shared_prefix_decode_attention(
            q[i : i + 1], k_cache, v_cache, *prefix, offsets, *own, **options
        )
        assert torch.equal(alone[0][0], together[0][i])
        assert torch.equal(alone[1][0], together[1][i])
