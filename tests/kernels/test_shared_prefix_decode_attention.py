"""shared_prefix_decode_attention against its reference and against plain decode, on poisoned
caches and garbage tables.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import paged_decode_attention, reference, shared_prefix_decode_attention
from kernels.compiled.architectures import CUDA_ARCHITECTURES
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import compare_with_reference, max_error
from kernels.testing.inputs import LAYOUTS, SCALES, random_scales, random_shared_prefix_args

# The interpreter computes rows and tiles that are masked afterwards, and numpy reports their NaNs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

SHAPE = {
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "block_size": 16,
    "dtype": torch.float16,
}
NAMES = (
    "q",
    "k_cache",
    "v_cache",
    "prefix_block_tables",
    "prefix_lens",
    "group_offsets",
    "suffix_block_tables",
    "suffix_lens",
)


def make_args(group_sizes, prefix_lens, suffix_lens, device, **overrides):
    options = {**SHAPE, **overrides}
    return random_shared_prefix_args(
        group_sizes, prefix_lens, suffix_lens, device=device, **options
    )


def assert_matches_reference(args, **options):
    results = compare_with_reference(
        shared_prefix_decode_attention,
        reference.shared_prefix_decode_attention,
        args,
        return_lse=True,
        **options,
    )
    for name, result in zip(("out", "lse"), results, strict=True):
        assert result.passed, f"{name}: {result}, bound {result.bound:.3g}"


@settings(max_examples=8)
@given(data=st.data())
def test_matches_reference_on_any_shape(data, device):
    def draw(name, strategy):
        return data.draw(strategy, label=name)

    num_kv_heads = draw("num_kv_heads", st.integers(1, 2))
    num_q_heads = num_kv_heads * draw("group_size", st.sampled_from([1, 3, 5]))
    group_sizes = draw("group_sizes", st.lists(st.integers(0, 2), min_size=1, max_size=3))
    prefix_lens = [draw("prefix_len", st.integers(0, 70)) for _ in group_sizes]
    suffix_lens = [draw("suffix_len", st.integers(0, 40)) for _ in range(sum(group_sizes))]
    window_size = draw("window_size", st.none() | st.integers(1, 100))
    scales = draw("scales of an fp8 cache", st.none() | st.sampled_from(SCALES))
    args = random_shared_prefix_args(
        group_sizes,
        prefix_lens,
        suffix_lens,
        window_size=window_size,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw("head_dim", st.sampled_from([16, 33, 80])),
        block_size=draw("block_size", st.sampled_from([1, 3, 7, 16, 100])),
        dtype=draw("dtype", st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
        kv_dtype=None if scales is None else FP8_DTYPE,
        device=device,
        layout=draw("layout", st.sampled_from(LAYOUTS)),
        seed=draw("seed", st.integers(0, 2**16)),
    )
    generator = torch.Generator().manual_seed(0)
    options = {
        "window_size": window_size,
        "scale": draw("scale", st.sampled_from([None, 0.5])),
        "softcap": draw("softcap", st.sampled_from([0.0, 3.0])),
        "num_prefix_splits": draw("num_prefix_splits", st.sampled_from([None, 1, 2, 5])),
        "num_splits": draw("num_splits", st.sampled_from([None, 2])),
    }
    if draw("alibi", st.booleans()):
        shape = draw("alibi shape", st.sampled_from([(num_q_heads,), (len(args[0]), num_q_heads)]))
        options["alibi_slopes"] = torch.rand(shape, generator=generator).to(device)
    if draw("sinks", st.booleans()):
        options["sinks"] = 3 * torch.randn(num_q_heads, generator=generator).to(device)
    if scales is not None:
        options |= random_scales(scales, num_kv_heads, device)
    assert_matches_reference(args, **options)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype", "scales"),
    [
        (1, 80, torch.bfloat16, "per head"),
        (7, 112, torch.float16, "tensor"),
        (256, 128, torch.bfloat16, "number"),
    ],
)
def test_fp8_caches(block_size, head_dim, dtype, scales, device):
    shape = {"block_size": block_size, "head_dim": head_dim, "dtype": dtype}
    args = make_args([2, 1], [50, 0], [3, 40, 0], device, kv_dtype=FP8_DTYPE, **shape)
    options = {"num_prefix_splits": 2, **random_scales(scales, 2, device)}
    assert_matches_reference(args, window_size=45, **options)


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
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    ours = shared_prefix_decode_attention(*args, **options)
    plain = (q, k_cache, v_cache, tables, context_lens)
    low = reference.paged_decode_attention(*plain, **options)
    ref = reference.paged_decode_attention(
        q.double(), k_cache.double(), v_cache.double(), tables, context_lens, **wide
    )
    for a, b, c in zip(ours, low, ref, strict=True):
        assert max_error(a, c) <= 2 * max_error(b, c) + 1e-5
    kernel = paged_decode_attention(*plain, **options)
    assert max_error(ours[1], kernel[1].double()) < 1e-5


def test_group_of_several_tiles(device):
    """The first group has more rows than one tile, and the second starts in mid-tile."""
    num_members = 12 if device.type == "cpu" else 100
    lens = [1] * (num_members + 2)
    args = make_args([num_members, 2], [40, 33], lens, device, num_q_heads=3, num_kv_heads=1)
    assert_matches_reference(args, num_prefix_splits=2)


def test_heads_of_one_sequence_take_several_tiles(device):
    args = make_args([2], [20], [3, 1], device, num_q_heads=71, num_kv_heads=1)
    assert_matches_reference(args, window_size=10, alibi_slopes=torch.rand(71, device=device))


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


def test_no_groups_no_sequences(device):
    out, lse = shared_prefix_decode_attention(*make_args([], [], [], device), return_lse=True)
    assert out.shape == (0, 4, 32)
    assert lse.shape == (0, 4)


def test_prefix_of_an_empty_group_is_not_looked_at(device):
    args = dict(zip(NAMES, make_args([1, 0, 1], [20, 0, 5], [3, 2], device), strict=True))
    want = shared_prefix_decode_attention(**args)
    args["prefix_lens"] = args["prefix_lens"].clone()
    args["prefix_lens"][1] = -(2**31)
    assert torch.equal(shared_prefix_decode_attention(**args), want)


@pytest.mark.parametrize("kv_dtype", [None, FP8_DTYPE], ids=["fp16", "fp8"])
def test_batch_invariant(kv_dtype, device):
    """A sequence's result is bitwise the same alone, in its group and among other groups."""
    options = {"num_prefix_splits": 2, "num_splits": 2, "return_lse": True, "window_size": 60}
    if kv_dtype is not None:
        options |= random_scales("per head", 2, device)
    args = make_args([3, 2], [70, 40], [5, 20, 9, 30, 40], device, kv_dtype=kv_dtype)
    together = shared_prefix_decode_attention(*args, **options)
    q, k_cache, v_cache, prefix_tables, prefix_lens, _, tables, lens = args
    for i, group in ((1, 0), (4, 1)):
        alone = shared_prefix_decode_attention(
            q[i : i + 1],
            k_cache,
            v_cache,
            prefix_tables[group : group + 1],
            prefix_lens[group : group + 1],
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            tables[i : i + 1],
            lens[i : i + 1],
            **options,
        )
        assert torch.equal(alone[0][0], together[0][i])
        assert torch.equal(alone[1][0], together[1][i])


def test_writes_to_out(device):
    args = make_args([2], [20], [3, 4], device)
    wide = torch.zeros(2, 6, 32, device=device)
    out = wide[:, 1:5]
    assert shared_prefix_decode_attention(*args, out=out) is out
    assert max_error(out, shared_prefix_decode_attention(*args)) < 1e-3
    assert not wide[:, [0, 5]].any()


def test_block_ids_beyond_32_bit_offsets(device, huge_cache):
    k_cache, v_cache = huge_cache(16, 1, 64)
    last = len(k_cache) - 1
    tables = torch.tensor([[last], [last - 1]], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(0)
    for cache in (k_cache, v_cache):
        cache[last - 1 :] = torch.randn(2, 16, 1, 64, generator=generator).half().to(device)
    q = torch.randn(1, 2, 64, generator=generator).half().to(device)
    lens = torch.tensor([16, 3], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=device)
    out = shared_prefix_decode_attention(
        q, k_cache, v_cache, tables[:1], lens[:1], offsets, tables[1:], lens[1:]
    )
    k, v = (torch.cat([c[last, :, 0], c[last - 1, :3, 0]]).double() for c in (k_cache, v_cache))
    want = torch.softmax(q[0].double() @ k.T * 64**-0.5, -1) @ v
    assert max_error(out[0], want) < 2e-3


@pytest.mark.parametrize("arch", CUDA_ARCHITECTURES)
def test_compiled_for_tensor_cores_without_spills(arch, shipped_resources):
    match = "bf16 d128" if arch == "sm_90" else "bf16 d256"
    rows = shipped_resources(arch, "shared_prefix_decode_attention", match=match)
    prefix_rows = [row for row in rows if row["kernel"] == "_shared_prefix_kernel"]
    assert f"{match} g4" in {row["config"] for row in prefix_rows}
    for row in prefix_rows:
        assert row["dots"] == row["tensor_core_dots"] > 0
        if arch == "sm_90":
            assert set(row["mma"]) == {"wgmma"}
        tile_bytes = 2 * 2 * row["constants"]["TILE_N"] * row["constants"]["HEAD_DIM_PADDED"]
        assert 16 * row["async_copies"]["128"] * 32 * row["num_warps"] >= 2 * tile_bytes
        assert set(row["async_copies"]) <= {"32", "128"}  # 4 bytes: block ids
    assert {row["kernel"] for row in rows} >= {"_merge_splits_kernel"}
    assert {row["local_bytes"] for row in rows} == {0}


BAD_CALLS = {
    "q-heads": ({"q": torch.zeros(3, 3, 32).half()}, "q: expected a positive multiple of num_kv"),
    "q-dtype": ({"q": torch.zeros(3, 4, 32)}, "q: expected dtype torch.float16"),
    "prefix-rank": (
        {"prefix_lens": torch.ones(2, 1).int()},
        r"prefix_lens: expected shape \(num_groups\)",
    ),
    "prefix-rows": (
        {"prefix_block_tables": torch.zeros(3, 2).int()},
        r"prefix_block_tables: expected shape \(num_groups=2, max_blocks\), got \(3, 2\)",
    ),
    "prefix-narrow": (
        {"prefix_lens": torch.tensor([20, 99]).int()},
        "prefix_block_tables: 4 columns .* but prefix_lens reaches 99",
    ),
    "prefix-block": (
        {"prefix_block_tables": torch.full((2, 4), -1).int()},
        "prefix_block_tables: expected block ids from 0",
    ),
    "suffix-narrow": (
        {"suffix_lens": torch.tensor([1, 2, 99]).int()},
        "suffix_block_tables: 4 columns .* but suffix_lens reaches 99",
    ),
    "suffix-rows": (
        {"suffix_lens": torch.ones(4).int()},
        r"suffix_block_tables|suffix_lens: expected shape \(batch=3\)",
    ),
    "offsets-shape": (
        {"group_offsets": torch.tensor([0, 3]).int()},
        r"group_offsets: expected shape \(num_groups \+ 1=3\), got \(2,\)",
    ),
    "offsets-end": (
        {"group_offsets": torch.tensor([0, 1, 2]).int()},
        r"group_offsets: expected values that ascend from 0 to batch=3, got \[0, 1, 2\]",
    ),
    "offsets-order": (
        {"group_offsets": torch.tensor([0, 4, 3]).int()},
        "group_offsets: expected values that ascend",
    ),
    "offsets-dtype": (
        {"group_offsets": torch.tensor([0, 1, 3])},
        "group_offsets: expected dtype torch.int32",
    ),
    "window": ({"window_size": 0}, "window_size: expected None"),
    "prefix-splits": ({"num_prefix_splits": 0}, "num_prefix_splits: expected from 1"),
    "sinks": ({"sinks": torch.zeros(3)}, r"sinks: expected shape \(num_q_heads=4\)"),
    "out": ({"out": torch.zeros(3, 4, 16).half()}, "out: expected shape"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_input(bad, message, device):
    if device.type != "cpu" and any(word in message for word in ("reaches", "ids", "ascend")):
        pytest.skip("values of GPU tensors are not checked: that would synchronise")
    good = dict(zip(NAMES, make_args([1, 2], [20, 9], [3, 2, 20], device), strict=True))
    bad = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in bad.items()}
    with pytest.raises(ValueError, match=message):
        shared_prefix_decode_attention(**{**good, **bad})


def test_k_and_v_of_unlike_strides(device):
    assert_matches_reference(make_args([2, 1], [40, 7], [3, 20, 5], device, layout="unlike"))


@pytest.mark.parametrize("num_prefix_splits", [1, 2])
def test_head_and_sequence_offsets_beyond_32_bits(num_prefix_splits, far_apart, device):
    args = make_args([3], [40], [3, 20, 5], device, num_q_heads=3, num_kv_heads=3)
    q, k_cache, v_cache, *rest = args
    heads_first = [cache.permute(2, 0, 1, 3) for cache in (k_cache, v_cache)]
    far_q, out, *caches = far_apart(q, torch.empty_like(q), *heads_first)
    far_args = (far_q, *(cache.permute(1, 2, 0, 3) for cache in caches), *rest)
    options = {"num_prefix_splits": num_prefix_splits}
    shared_prefix_decode_attention(*far_args, out=out, **options)
    assert torch.equal(out, shared_prefix_decode_attention(*args, **options))


def test_more_splits_than_the_merge_reads_at_a_time(device):
    """The last of them weighs most, so what was merged before has to be scaled down."""
    shape = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 256}
    args = make_args([2], [600], [3, 20], device, **shape)
    q, k_cache, _, prefix_tables, *_ = args
    k_cache[prefix_tables[0, 599 // 16], 599 % 16] = q[0] / 2
    assert_matches_reference(args, num_prefix_splits=100)


@pytest.mark.parametrize("options", [{}, {"window_size": 20}, {"num_prefix_splits": 2}], ids=str)
def test_nothing_past_the_end_is_accessed(options, at_the_edge, device):
    """Tables exactly as wide as the longest sequence needs, blocks of one slot."""
    args = make_args([1, 1], [7, 37], [3, 20], device, head_dim=33, block_size=1)
    per_head = {"alibi_slopes": torch.rand(2, 4), "sinks": torch.rand(4)}
    options = options | {name: at_the_edge(values) for name, values in per_head.items()}
    expected = shared_prefix_decode_attention(*args, **options)
    edge = dict(zip(NAMES, args, strict=True))
    edge["prefix_block_tables"] = edge["prefix_block_tables"][:, :37]
    edge["suffix_block_tables"] = edge["suffix_block_tables"][:, :20]
    out = at_the_edge(torch.empty_like(edge["q"]))
    shared_prefix_decode_attention(*map(at_the_edge, edge.values()), out=out, **options)
    assert torch.equal(out, expected)
