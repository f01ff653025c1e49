"""paged_decode_attention against its reference in fp64.

Every batch has shuffled block tables with garbage padding, and NaN or Inf in every slot that must
not matter.
"""

from __future__ import annotations

import attention_ops
import pytest
import torch
from attention_ops import SHAPE, same

from kernels import paged_decode_attention, reference
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.inputs import random_paged_batch

# The interpreter computes rows and tiles that are masked afterwards, and numpy reports their NaNs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def make_batch(context_lens, device, **overrides):
    return random_paged_batch(context_lens, device=device, **SHAPE | overrides)


def assert_matches_reference(batch, **options):
    attention_ops.assert_matches_reference(paged_decode_attention, *batch.decode_args, **options)


def decode(batch, **options):
    return paged_decode_attention(*batch.decode_args, return_lse=True, **options)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_equal_scales_are_bitwise_alike_in_every_form(num_splits, device):
    batch = make_batch([70, 5], device, kv_dtype=FP8_DTYPE)
    forms = [0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.5, 0.5])]
    forms = [form.to(device) if isinstance(form, torch.Tensor) else form for form in forms]
    results = [decode(batch, k_scale=form, v_scale=form, num_splits=num_splits) for form in forms]
    for result in results[1:]:
        assert same(result, results[0])
    one = decode(batch, k_scale=1.0, v_scale=torch.ones(2, device=device), num_splits=num_splits)
    assert same(one, decode(batch, num_splits=num_splits))
    assert not torch.equal(one[0], results[0][0])


def test_group_takes_several_tiles_at_head_dim_256(device):
    assert_matches_reference(make_batch([45], device, num_q_heads=71, num_kv_heads=1, head_dim=256))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_huge_scores_do_not_overflow(num_splits, device):
    batch = make_batch([75, 33], device, dtype=torch.float32)
    for options in ({"scale": 1e4}, {"scale": -1e4, "softcap": 1e3}):
        out, lse = decode(batch, num_splits=num_splits, **options)
        ref_out, ref_lse = reference.paged_decode_attention(
            *batch.double().decode_args, return_lse=True, **options
        )
        # Scores of this size carry an error of a few units in their own last place.
        lse_error = 8 * torch.finfo(torch.float32).eps * ref_lse.abs().max()
        assert (lse - ref_lse).abs().max() <= lse_error
        assert (out - ref_out).abs().max() <= 4 * lse_error


def test_more_splits_than_the_merge_reads_at_a_time(device):
    """The last of them weighs most, so what was merged before has to be scaled down."""
    batch = make_batch([1100], device, num_q_heads=1, num_kv_heads=1, head_dim=256)
    last = batch.block_tables[0, 1099 // 16], 1099 % 16
    batch.k_cache[last] = batch.q[0] / 2
    assert_matches_reference(batch, num_splits=100)
