"""paged_decode_attention against its reference in fp64.

Every batch has shuffled block tables with garbage padding, and NaN or Inf in every slot that must
not matter.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from unittest import mock

import attention_ops
import hypothesis.strategies as st
import pytest
import torch
from attention_ops import SHAPE, same
from hypothesis import given, settings

from kernels import paged_decode_attention, reference
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import compare_with_reference
from kernels.testing.inputs import random_paged_batch, random_scales
from kernels.tiles import Chunking, decode_tile, force_target, target_of

MODULE = sys.modules["kernels.paged_decode_attention"]

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


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_empty_sequences(num_splits, sinks, device):
    sinks = torch.ones(4, device=device) if sinks else None
    batch = make_batch([0, 40, 0], device)
    out, lse = decode(batch, num_splits=num_splits, sinks=sinks)
    assert not out[0].any()
    assert not out[2].any()
    assert (lse[[0, 2]] == -math.inf).all()
    assert_matches_reference(batch, num_splits=num_splits, sinks=sinks)


@pytest.mark.parametrize("kv_dtype", [None, FP8_DTYPE], ids=["fp16", "fp8"])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_batch_invariance(num_splits, kv_dtype, device):
    lens = [90, 0, 33, 1, 64]
    batch = make_batch(lens, device, block_size=7, kv_dtype=kv_dtype)
    sinks = torch.randn(4, device=device)
    options = {"num_splits": num_splits, "window_size": 70, "sinks": sinks}
    if kv_dtype is not None:
        options |= random_scales("per head", 2, device)
    out, lse = decode(batch, **options)
    for rows in ([4, 2, 0, 3, 1], [0], [3, 3, 2]):
        some_out, some_lse = decode(batch.select(rows), **options)
        assert same([some_out, some_lse], [out[rows], lse[rows]])


@given(
    own_len=st.integers(0, 200),
    neighbours=st.lists(st.integers(0, 200), max_size=2),
    place=st.integers(0, 2),
    spare_blocks=st.integers(0, 20),
    num_multiprocessors=st.integers(1, 9),
    window_size=st.sampled_from([None, 90, 10**9]),
    sinks=st.booleans(),
)
@settings(max_examples=10)
def test_chunks_depend_on_the_sequence_alone(
    own_len, neighbours, place, spare_blocks, num_multiprocessors, window_size, sinks, device
):
    """With the default num_splits, patched to up to 4 chunks of at least 2 tiles of 16, for any
    neighbours, padding of batch and tables, and number of multiprocessors."""
    sinks = torch.linspace(-3, 3, 2, device=device) if sinks else None
    options = {"window_size": window_size, "sinks": sinks}
    place = min(place, len(neighbours))
    lens = [*neighbours[:place], own_len, *neighbours[place:], 0]
    batch = make_batch(lens, device, num_q_heads=2, num_kv_heads=1)
    alone = batch.select([place])
    own_blocks = max(1, -(-own_len // SHAPE["block_size"]))
    alone = replace(alone, block_tables=alone.block_tables[:, :own_blocks])
    target = target_of(batch.q.device)
    tile = replace(decode_tile(2, 32, torch.float16, target), tile_n=16)
    target = replace(target, tiles=(("decode_tile", tile),))
    small_chunks = mock.patch.object(MODULE, "chunking", return_value=Chunking(2, 4))
    with small_chunks, force_target(target):
        expected = decode(alone, **options)
    garbage = torch.full((len(lens), spare_blocks), -7, dtype=torch.int32, device=device)
    wide = replace(batch, block_tables=torch.cat([batch.block_tables, garbage], dim=1))
    with small_chunks, force_target(replace(target, num_multiprocessors=num_multiprocessors)):
        out, lse = decode(wide, **options)
    assert same([out[place], lse[place]], [expected[0][0], expected[1][0]])
    options |= {"return_lse": True}
    by_reference = reference.paged_decode_attention
    for result in compare_with_reference(
        lambda *_, **__: (out, lse), by_reference, wide.decode_args, **options
    ):
        assert result.passed, result


def test_more_splits_than_tokens(device):
    assert_matches_reference(make_batch([90, 2, 0], device), num_splits=40)


@pytest.mark.parametrize("window_size", [1, 16, 31, 32, 33, 89, 90, 91, 10**9])
def test_windows(window_size, device):
    hidden = [n - window_size for n in (90, 40)]
    batch = make_batch([90, 40], device, block_size=7, hidden_tokens=hidden)
    assert_matches_reference(batch, window_size=window_size, num_splits=2)


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


@pytest.mark.parametrize("sink", [-math.inf, -1e4, 0.0, 1e4])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_extreme_sinks(sink, num_splits, device):
    sinks = torch.tensor([sink, 0.0, 1.0, sink], device=device)
    assert_matches_reference(make_batch([75, 3], device), num_splits=num_splits, sinks=sinks)


def test_more_splits_than_the_merge_reads_at_a_time(device):
    """The last of them weighs most, so what was merged before has to be scaled down."""
    batch = make_batch([1100], device, num_q_heads=1, num_kv_heads=1, head_dim=256)
    last = batch.block_tables[0, 1099 // 16], 1099 % 16
    batch.k_cache[last] = batch.q[0] / 2
    assert_matches_reference(batch, num_splits=100)
