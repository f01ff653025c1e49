"""paged_decode_attention against its reference in fp64.

Every batch has shuffled block tables with garbage padding, and NaN or Inf in every slot that must
not matter.
"""

from dataclasses import replace

import torch
from attention_ops import OPS, select
from hypothesis import given
from hypothesis import strategies as st
from op_calls import same

from kernels.tiles import force_target, target_of

DECODE = OPS["decode"]


def test_more_splits_than_the_merge_reads_at_a_time(device):
    """The last of them weighs most, so that earlier ones have to be scaled down."""
    call = DECODE.call(device, (1100,), num_q_heads=1, num_kv_heads=1, head_dim=256)
    last = call["block_tables"][0, 1099 // 16], 1099 % 16
    call["k_cache"][last] = call["q"][0] / 2
    DECODE.assert_matches_reference(call, num_splits=100)


@given(
    lengths=st.lists(st.sampled_from((0, 1, 40, 130, 290)), min_size=1, max_size=5),
    num_heads=st.sampled_from((1, 3)),
    num_splits=st.integers(2, 9),
    window_size=st.sampled_from((None, 170)),
    multiprocessors=st.sets(st.integers(1, 9), min_size=2, max_size=2),
    seed=st.integers(0, 9),
)
def test_any_number_of_programs_computes_every_chunk(
    lengths, num_heads, num_splits, window_size, multiprocessors, seed
):
    """Programs take chunks in turns."""
    shape = {"num_q_heads": num_heads, "num_kv_heads": num_heads, "head_dim": 16, "seed": seed}
    call = DECODE.call("cpu", lengths, window_size=window_size, **shape)
    usual = DECODE.assert_matches_reference(call, num_splits)
    for number in multiprocessors:  # of two programs each
        target = replace(target_of(call["q"].device), num_multiprocessors=number)
        with force_target(target):
            assert same(DECODE.run(call, num_splits), usual)


def test_later_chunks_are_found_in_a_large_batch(device):
    """The search goes through 64 sequences at a time and halves the ones that hold a chunk."""
    lens = torch.ones(70, dtype=torch.int64)
    lens[[31, 63, 65]] = torch.tensor([40, 75, 100])
    call = DECODE.call(device, lens.tolist(), num_q_heads=1, num_kv_heads=1)
    out, lse = DECODE.run(call, num_splits=3)
    for row in (31, 63, 65):
        one = select(call, [row])
        alone = DECODE.assert_matches_reference(one, num_splits=3)
        assert same(alone, (out[[row]], lse[[row]]))
