"""shared_prefix_decode_attention against its reference and against plain decode, on poisoned
caches and garbage tables.
"""

import pytest
import torch
from attention_ops import OPS

from kernels import shared_prefix_decode_attention
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.inputs import random_scales

SHARED = OPS["shared_prefix"]


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
