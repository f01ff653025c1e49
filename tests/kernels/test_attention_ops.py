"""Contract of the attention ops: decode, prefill and decode of shared prefixes.

Each is compared with its reference in fp64 on shuffled block tables with garbage padding; every
slot that must not matter holds NaN or Inf. Behaviour of a single op is tested in its own file.
"""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from attention_ops import OPS, SHAPE, assert_accurate, select
from hypothesis import given, settings
from hypothesis import strategies as st
from op_calls import same

from kernels import merge_attention_states, tiles
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.inputs import random_scales
from kernels.tiles import Chunking, force_target, target_of

every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
without_prefix = pytest.mark.parametrize(
    "op", [op for name, op in OPS.items() if name != "shared_prefix"], ids=["decode", "prefill"]
)
whole_and_split = pytest.mark.parametrize("num_splits", [1, 3])


@pytest.mark.parametrize("group_size", [17, 35])
@every_op
def test_group_sizes(op, group_size, device):
    call = op.call(device, op.few, num_q_heads=2 * group_size)
    op.assert_matches_reference(call | {"alibi_slopes": torch.rand(2 * group_size, device=device)})


@every_op
@whole_and_split
def test_result_is_written_to_out_in_its_dtype(op, num_splits, device):
    """And the LSE is returned only when asked for."""
    call = op.call(device, op.few)
    expected, lse = op.run(call, num_splits)
    assert (lse.shape, lse.dtype) == (expected.shape[:2], torch.float32)
    assert torch.equal(op.function(**call | op.splits(num_splits)), expected)
    wider = torch.zeros(len(call["q"]), 4, 2, 32, dtype=torch.float16, device=device)
    out = wider[:, :, 1]
    assert op.run(call | {"out": out}, num_splits)[0] is out
    assert torch.equal(out, expected)
    assert not wider[:, :, 0].any()
    wide = torch.empty(call["q"].shape, dtype=torch.float32, device=device)
    op.run(call | {"out": wide}, num_splits)
    assert torch.equal(wide.half(), expected)
    assert not torch.equal(wide, wide.half().float())


@pytest.mark.parametrize(
    ("kv_dtype", "block_size"), [(None, 24), (FP8_DTYPE, 3)], ids=["fp16", "fp8"]
)
@every_op
def test_block_size_changes_nothing(op, kv_dtype, block_size, device):
    call = op.call(device, kv_dtype=kv_dtype)  # blocks of 16
    expected = op.assert_matches_reference(call, num_splits=2)
    call = op.call(device, kv_dtype=kv_dtype, block_size=block_size)
    assert same(op.run(call, num_splits=2), expected)


def rule_out(call, table, tokens):
    """Give tokens of a table's first row a score of -inf, by queries of a unit vector."""
    call["q"].zero_()[..., 0] = 1
    block_size = call["k_cache"].shape[1]
    for token in tokens:
        block = call[table][0, token // block_size]
        call["k_cache"][block, token % block_size, :, 0] = -math.inf


@pytest.mark.parametrize(("tokens", "num_splits"), [(range(35, 74), 1), (range(74), 3)])
@every_op
def test_scores_of_minus_infinity(op, num_splits, tokens, device):
    call = op.call(device)
    rule_out(call, op.tables[0], tokens)
    op.assert_matches_reference(call, num_splits)


@pytest.mark.parametrize(("sinks", "num_splits"), [(False, 3), (True, 1), (True, 3)])
@without_prefix
def test_only_scores_of_minus_infinity(op, num_splits, sinks, device):
    call = op.call(device)
    rule_out(call, op.tables[0], range(75))
    first = slice(0, 1 if op.name == "decode" else 5)  # queries of the first sequence
    out, lse = op.run(call | {"sinks": torch.ones(4, device=device) if sinks else None}, num_splits)
    assert not out[first].any()
    assert (lse[first] == (1 if sinks else -math.inf)).all()
    assert out.isfinite().all()


@whole_and_split
@every_op
def test_nan_in_a_used_slot_stays_in_its_sequence(op, num_splits, device):
    call = op.call(device, op.two)
    expected = op.run(call, num_splits)
    call["v_cache"][call[op.tables[-1]][1, 0], 1] = math.nan
    out, lse = op.run(call, num_splits)
    half = len(out) // 2
    assert torch.equal(out[:half], expected[0][:half])
    assert out[half:].isnan().all()
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize(("window_size", "num_splits"), [(1, 1), (32, 2), (75, 1), (10**9, 2)])
@every_op
def test_windows(op, window_size, num_splits, device):
    call = op.call(device, window_size=window_size, block_size=7)
    op.assert_matches_reference(call, num_splits)


@whole_and_split
@every_op
def test_extreme_sinks(op, num_splits, device):
    sinks = torch.tensor([-math.inf, 0.0, 1.0, 1e4], device=device)
    op.assert_matches_reference(op.call(device) | {"sinks": sinks}, num_splits)


@pytest.mark.parametrize(
    ("scale", "slope", "num_splits"), [(0.25, 0, 1), (-0.25, 0, 3), (0.25, 1, 3), (-0.25, 1, 1)]
)
@every_op
def test_small_differences_of_large_scores(op, num_splits, scale, slope, device):
    """Scores are 2^23 + 0 to 3: exact, but beside such a maximum an LSE has no room for a sum."""
    call = op.call(device, dtype=torch.float32) | {"scale": scale}
    keys = call["k_cache"]
    keys[used := keys[..., 0].isfinite()] = 0
    keys[..., 0][used] = math.copysign(2**11, scale)
    keys[..., 1][used] = torch.randint(0, 4, (int(used.sum()),), device=device).float()
    call["q"].zero_()[..., :2] = torch.tensor([2.0**14, 4.0])
    call["alibi_slopes"] = torch.ones(4, device=device) if slope else None
    op.assert_matches_reference(call, num_splits)


@every_op
def test_batches_of_any_size_fit_a_grid(op, device):
    lens = {"decode": (0,) * 70_000, "prefill": ((0, 1),) * 70_000}
    lens |= {"shared_prefix": ([70_000], [9], (0,) * 70_000)}
    call = op.call(device, lens[op.name], num_q_heads=1, num_kv_heads=1)
    with mock.patch("triton.runtime.jit.KernelInterface.__getitem__") as launched:
        op.run(call, num_splits=2)
    for (grid,), _ in launched.call_args_list:
        assert max((1, *grid[1:])) <= 65535


@given(
    num_splits=st.sampled_from([1, 3]),
    cut=st.sampled_from([0, 20]) | st.integers(1, 19),
    first_has_sinks=st.booleans(),
)
@without_prefix
def test_merged_parts_of_a_context_are_the_whole(op, num_splits, cut, first_has_sinks, device):
    """Cut anywhere, so that a part may be empty, with the sinks in either part."""
    lens = {"decode": (20, 20), "prefill": ((20, 1), (20, 1))}[op.name]
    call = op.call(device, lens, block_size=1, dtype=torch.float32)
    whole, tables = call["context_lens"], call["block_tables"]
    first = call | {"context_lens": whole * 0 + cut}
    last = call | {"context_lens": whole - cut, "block_tables": tables[:, cut:]}
    call["sinks"] = torch.tensor([-math.inf, -2.0, 0.5, 3.0], device=device)
    (first if first_has_sinks else last)["sinks"] = call["sinks"]
    states = *op.run(first, num_splits), *op.run(last, num_splits)
    assert_accurate(op.op, call, lambda: merge_attention_states(*states))


@pytest.mark.parametrize(
    ("kv_dtype", "num_splits"), [(None, 1), (FP8_DTYPE, 3)], ids=["fp16, whole", "fp8, split"]
)
@without_prefix
def test_batch_invariance(op, kv_dtype, num_splits, device):
    """Tiles of prefill are found by search or, in uniform batches, by division: both give the same
    bits."""
    lens = ((70, 17), (0, 0), (1, 1), (45, 9), (33, 0), (90, 1))
    lens = tuple(n for n, _ in lens) if op.name == "decode" else lens
    call = op.call(device, lens, block_size=7, kv_dtype=kv_dtype) | {"window_size": 50}
    call["sinks"] = torch.randn(4, device=device)
    if kv_dtype is not None:
        call |= random_scales("per head", 2, device)
    out, lse = op.run(call, num_splits)
    starts = call.get("cu_seqlens_q", torch.arange(7)).tolist()
    for rows, slack in (([4, 2, 0, 3, 5, 1], 0), ([3], 500), ([3, 3, 5], 0)):
        tokens = [t for row in rows for t in range(starts[row], starts[row + 1])]
        some = select(call, rows)
        if op.name == "prefill":
            some["max_seqlen_q"] += slack
        assert same(op.run(some, num_splits), [out[tokens], lse[tokens]])


@given(
    own=st.tuples(st.integers(1, 20), st.integers(0, 140)),
    neighbours=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 140)), max_size=2),
    place=st.integers(0, 2),
    group_size=st.integers(1, 3),
    spare_blocks=st.integers(0, 20),
    num_multiprocessors=st.integers(1, 9),
    window_size=st.sampled_from([None, 37, 90, 10**9]),
    sinks=st.booleans(),
)
@settings(max_examples=8)
@without_prefix
def test_chunks_depend_on_the_sequence_alone(
    op, own, neighbours, place, group_size, spare_blocks, num_multiprocessors, window_size, sinks,
    device,
):  # fmt: skip
    """With the default num_splits, patched to up to 4 chunks of at least 2 tiles of 16 (in prefill
    fewer for more than 5 queries), for any neighbours, padding of batch and tables, and number of
    multiprocessors."""
    place = min(place, len(neighbours))
    sequences = [*neighbours[:place], own, *neighbours[place:], (0, 0)]
    lens = [(queries + cached, queries) for queries, cached in sequences]
    lens = [n for n, _ in lens] if op.name == "decode" else lens
    call = op.call(device, lens, num_q_heads=group_size, num_kv_heads=1)
    call |= {"window_size": window_size}
    call["sinks"] = torch.linspace(-3, 3, group_size, device=device) if sinks else None
    alone = select(call, [place])
    own_blocks = -(-sum(own) // SHAPE["block_size"])
    alone["block_tables"] = alone["block_tables"][:, :own_blocks]
    garbage = torch.full((len(sequences), spare_blocks), -7, dtype=torch.int32, device=device)
    wide = call | {"block_tables": torch.cat([call["block_tables"], garbage], dim=1)}

    target, chunks = target_of(call["q"].device), Chunking(2, 4, queries=5)
    shape = (group_size, 32) if op.name == "decode" else (32,)
    name = "chunking" if op.name == "decode" else "prefill_chunking"
    tile = replace(getattr(tiles, f"{op.name}_tile")(*shape, torch.float16, target), tile_n=16)
    target = replace(target, tiles=((f"{op.name}_tile", tile),))
    small_chunks = mock.patch.object(tiles, name, return_value=chunks)
    with small_chunks, force_target(target):
        expected = op.run(alone, None)
    with small_chunks, force_target(replace(target, num_multiprocessors=num_multiprocessors)):
        together = op.run(wide, None)
    starts = call.get("cu_seqlens_q", torch.arange(len(lens) + 1)).tolist()
    rows = slice(starts[place], starts[place + 1])
    assert same([part[rows] for part in together], expected)
    assert_accurate(op.op, wide, lambda: together)


@pytest.mark.parametrize("num_splits", [None, 1, 4])
@every_op
def test_replay_of_a_cuda_graph_with_other_lengths(op, num_splits, device):
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    call = op.call(device)
    shorter = {name: call[name] // 2 for name in op.lens}
    op.run(call, num_splits)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured = op.run(call, num_splits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    eager = op.run(call | shorter, num_splits)
    for name, lens in shorter.items():
        call[name].copy_(lens)
    graph.replay()
    assert same(captured, eager)
