"""paged_decode_attention against its reference in fp64.

Every batch has shuffled block tables with garbage padding, and NaN or Inf in every slot that must
not matter.
"""

import pytest
import torch
from attention_ops import OPS, select
from op_calls import same

from kernels.fp8_cache import FP8_DTYPE

DECODE = OPS["decode"]


@pytest.mark.parametrize("num_splits", [1, 2])
def test_equal_scales_are_bitwise_alike_in_every_form(num_splits, device):
    call = DECODE.call(device, (70, 5), kv_dtype=FP8_DTYPE)
    forms = [0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.5, 0.5])]
    forms = [form.to(device) if isinstance(form, torch.Tensor) else form for form in forms]
    results = [DECODE.run(call, num_splits, k_scale=form, v_scale=form) for form in forms]
    for result in results[1:]:
        assert same(result, results[0])
    one = DECODE.run(call, num_splits, k_scale=1.0, v_scale=torch.ones(2, device=device))
    assert same(one, DECODE.run(call, num_splits))
    assert not torch.equal(one[0], results[0][0])


def test_more_splits_than_the_merge_reads_at_a_time(device):
    """The last of them weighs most, so that earlier ones have to be scaled down."""
    call = DECODE.call(device, (1100,), num_q_heads=1, num_kv_heads=1, head_dim=256)
    last = call["block_tables"][0, 1099 // 16], 1099 % 16
    call["k_cache"][last] = call["q"][0] / 2
    DECODE.assert_matches_reference(call, num_splits=100)


def test_later_chunks_are_found_in_a_large_batch(device):
    """The search goes through 64 sequences at a time and halves the ones that hold a chunk."""
    lens = torch.ones(70, dtype=torch.int64)
    lens[[31, 63, 65]] = torch.tensor([40, 75, 100])
    call = DECODE.call(device, lens.tolist(), num_q_heads=1, num_kv_heads=1)
    out, lse = DECODE.run(call, num_splits=3)
    for row in (31, 63, 65):
        one = select(call, [row])
        DECODE.assert_matches_reference(one, num_splits=3)
        assert same(DECODE.run(one, num_splits=3), (out[[row]], lse[[row]]))
