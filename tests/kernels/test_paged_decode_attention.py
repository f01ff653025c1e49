"""paged_decode_attention against its reference in fp64.

Every batch has shuffled block tables with garbage padding, and NaN or Inf in every slot that must
not matter.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import paged_decode_attention, reference
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import compare_with_reference
from kernels.testing.inputs import LAYOUTS, SCALES, random_paged_batch, random_scales

# The interpreter computes rows and tiles that are masked afterwards, and numpy reports their NaNs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def make_batch(context_lens, device, **overrides):
    shape = {
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "block_size": 16,
        "dtype": torch.float16,
    }
    return random_paged_batch(context_lens, device=device, **{**shape, **overrides})


def assert_matches_reference(batch, **options):
    results = compare_with_reference(
        paged_decode_attention,
        reference.paged_decode_attention,
        batch.decode_args,
        return_lse=True,
        **options,
    )
    for name, result in zip(("out", "lse"), results, strict=True):
        assert result.passed, f"{name}: {result}, bound {result.bound:.3g}"


def decode(batch, **options):
    return paged_decode_attention(*batch.decode_args, return_lse=True, **options)


def assert_bitwise_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@given(data=st.data())
def test_matches_reference_on_any_shape(data, device):
    def draw(name, strategy):
        return data.draw(strategy, label=name)

    num_kv_heads = draw("num_kv_heads", st.integers(1, 3))
    num_q_heads = num_kv_heads * draw("group_size", st.sampled_from([1, 2, 3, 5, 8]))
    longest = 110 if device.type == "cpu" else 2000  # the interpreter is slow, and its tiles small
    context_lens = draw("context_lens", st.lists(st.integers(0, longest), min_size=1, max_size=3))
    window_size = draw("window_size", st.none() | st.integers(1, 120))
    scales = draw("scales of an fp8 cache", st.none() | st.sampled_from(SCALES))
    batch = random_paged_batch(
        context_lens,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw("head_dim", st.sampled_from([16, 24, 33, 64, 80, 112])),
        block_size=draw("block_size", st.sampled_from([1, 2, 3, 7, 16, 24, 100, 256])),
        dtype=draw("dtype", st.sampled_from(DTYPES)),
        kv_dtype=None if scales is None else FP8_DTYPE,
        device=device,
        layout=draw("layout", st.sampled_from(LAYOUTS)),
        seed=draw("seed", st.integers(0, 2**16)),
        hidden_tokens=None if window_size is None else [n - window_size for n in context_lens],
    )
    generator = torch.Generator().manual_seed(0)
    options = {
        "window_size": window_size,
        "scale": draw("scale", st.sampled_from([None, 0.5, -0.2])),
        "softcap": draw("softcap", st.sampled_from([0.0, 0.5, 30.0])),
        "num_splits": draw("num_splits", st.sampled_from([None, 1, 2, 3, 7])),
    }
    if draw("alibi", st.booleans()):
        shape = draw("alibi shape", st.sampled_from([(num_q_heads,), (len(batch.q), num_q_heads)]))
        options["alibi_slopes"] = torch.rand(shape, generator=generator).to(device)
    if draw("sinks", st.booleans()):
        options["sinks"] = 3 * torch.randn(num_q_heads, generator=generator).to(device)
    if scales is not None:
        options |= random_scales(scales, num_kv_heads, device)
    assert_matches_reference(batch, **options)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype", "scales"),
    [
        (1, 80, torch.float16, "number"),
        (7, 112, torch.bfloat16, "per head"),
        (16, 128, torch.bfloat16, "none"),
        (24, 64, torch.float32, "tensor"),
        (256, 96, torch.float16, "per head"),
    ],
)
def test_fp8_caches(block_size, head_dim, dtype, scales, device):
    lens = [70, 0, 33]
    batch = make_batch(
        lens,
        device,
        num_q_heads=6,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=FP8_DTYPE,
        hidden_tokens=[n - 50 for n in lens],
    )
    options = {"window_size": 50, "softcap": 20.0, **random_scales(scales, 2, device)}
    for num_splits in (1, 2):
        assert_matches_reference(batch, num_splits=num_splits, **options)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_equal_scales_are_bitwise_alike_in_every_form(num_splits, device):
    batch = make_batch([70, 5], device, kv_dtype=FP8_DTYPE)
    forms = [0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.5, 0.5])]
    forms = [form.to(device) if isinstance(form, torch.Tensor) else form for form in forms]
    results = [decode(batch, k_scale=form, v_scale=form, num_splits=num_splits) for form in forms]
    for result in results[1:]:
        assert_bitwise_equal(result, results[0])
    one = decode(batch, k_scale=1.0, v_scale=torch.ones(2, device=device), num_splits=num_splits)
    assert_bitwise_equal(one, decode(batch, num_splits=num_splits))
    assert not torch.equal(one[0], results[0][0])


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 24, 100, 256, 1024])
def test_block_sizes(block_size, device):
    lens = [1, block_size, min(block_size + 1, 300), 75]
    assert_matches_reference(make_batch(lens, device, block_size=block_size), num_splits=2)


@pytest.mark.parametrize("head_dim", [16, 17, 48, 64, 80, 96, 112, 128, 160, 192, 255, 256])
def test_head_dims(head_dim, device):
    assert_matches_reference(make_batch([45, 3], device, head_dim=head_dim), num_splits=2)


@pytest.mark.parametrize("group_size", [1, 3, 5, 7, 8, 16, 17, 71])
def test_group_sizes(group_size, device):
    batch = make_batch([45, 3], device, num_q_heads=2 * group_size)
    assert_matches_reference(batch, alibi_slopes=torch.rand(2 * group_size, device=device))


def test_group_takes_several_tiles_at_head_dim_256(device):
    assert_matches_reference(make_batch([45], device, num_q_heads=71, num_kv_heads=1, head_dim=256))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_layouts_are_bitwise_alike(layout, device):
    batch = make_batch([70, 5], device, layout=layout)
    assert_matches_reference(batch)
    contiguous = replace(
        batch, k_cache=batch.k_cache.contiguous(), v_cache=batch.v_cache.contiguous()
    )
    assert_bitwise_equal(decode(batch), decode(contiguous))


def test_strided_query_table_and_output(device):
    batch = make_batch([70, 5], device)
    wide_q = torch.full((2, 3, 4, 32), torch.nan, dtype=batch.q.dtype, device=device)
    wide_q[:, 1] = batch.q
    wide_tables = torch.full((2, 40), -7, dtype=torch.int32, device=device)
    wide_tables[:, 10 : 10 + batch.block_tables.shape[1]] = batch.block_tables
    strided = replace(
        batch,
        q=wide_q[:, 1],
        block_tables=wide_tables[:, 10 : 10 + batch.block_tables.shape[1]],
    )
    out = torch.zeros(2, 4, 2, 32, dtype=batch.q.dtype, device=device)
    for num_splits in (1, 2):
        result, _ = decode(strided, out=out[:, :, 1], num_splits=num_splits)
        assert result.data_ptr() == out[:, :, 1].data_ptr()
        assert_bitwise_equal([out[:, :, 1]], decode(batch, num_splits=num_splits)[:1])
        assert not out[:, :, 0].any()


@pytest.mark.parametrize("num_splits", [1, 2])
def test_fp32_output_of_half_precision_inputs(num_splits, device):
    batch = make_batch([70, 5], device)
    out = torch.empty(batch.q.shape, dtype=torch.float32, device=device)
    decode(batch, out=out, num_splits=num_splits)
    assert torch.equal(out.half(), decode(batch, num_splits=num_splits)[0])
    assert not torch.equal(out, out.half().float())


def test_lse_is_returned_only_when_asked_for(device):
    batch = make_batch([70, 5], device)
    out = paged_decode_attention(*batch.decode_args)
    assert isinstance(out, torch.Tensor)
    with_lse, lse = decode(batch)
    assert torch.equal(out, with_lse)
    assert (lse.shape, lse.dtype) == ((2, 4), torch.float32)


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


def test_empty_batch(device):
    out, lse = decode(make_batch([], device))
    assert (out.shape, lse.shape) == ((0, 4, 32), (0, 4))


@pytest.mark.parametrize("kv_dtype", [None, FP8_DTYPE], ids=["fp16", "fp8"])
@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_batch_invariance(num_splits, kv_dtype, device):
    lens = [90, 0, 33, 1, 64]
    batch = make_batch(lens, device, block_size=7, kv_dtype=kv_dtype)
    sinks = torch.randn(4, device=device)
    options = {"num_splits": num_splits, "window_size": 70, "sinks": sinks}
    if kv_dtype is not None:
        options |= random_scales("per head", 2, device)
    out, lse = decode(batch, **options)
    for rows in ([4, 2, 0, 3, 1], [0], [2], [3, 3, 0]):
        some_out, some_lse = decode(batch.select(rows), **options)
        assert_bitwise_equal([some_out, some_lse], [out[rows], lse[rows]])


@pytest.mark.parametrize("kv_dtype", [None, FP8_DTYPE], ids=["fp16", "fp8"])
def test_block_size_changes_nothing(kv_dtype, device):
    batch = make_batch([90, 33, 1], device, block_size=1, kv_dtype=kv_dtype)
    expected = decode(batch, num_splits=2)
    for block_size in (3, 16, 100):
        other = make_batch([90, 33, 1], device, block_size=block_size, kv_dtype=kv_dtype)
        assert torch.equal(other.q, batch.q)
        assert_bitwise_equal(decode(other, num_splits=2), expected)


def test_more_splits_than_tokens(device):
    assert_matches_reference(make_batch([90, 2, 0], device), num_splits=40)


@pytest.mark.parametrize("window_size", [1, 16, 31, 32, 33, 89, 90, 91, 10**9])
def test_windows(window_size, device):
    hidden = [n - window_size for n in (90, 40)]
    batch = make_batch([90, 40], device, block_size=7, hidden_tokens=hidden)
    assert_matches_reference(batch, window_size=window_size, num_splits=2)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_equal_scores_average_the_values(num_splits, device):
    batch = make_batch([75], device, dtype=torch.float32)
    batch.q.zero_()
    out, lse = decode(batch, num_splits=num_splits)
    values = reference.gather_tokens(batch.v_cache, batch.block_tables[0], 0, 75)
    mean = values.double().mean(0).repeat_interleave(2, dim=0)
    assert (out[0] - mean).abs().max() < 1e-6
    assert (lse - math.log(75)).abs().max() < 1e-6


def rule_out(batch, row, tokens):
    """Give the tokens of a sequence a score of -inf, all queries being the first unit vector."""
    batch.q.zero_()
    batch.q[..., 0] = 1
    block_size = batch.k_cache.shape[1]
    for token in tokens:
        block = batch.block_tables[row, token // block_size]
        batch.k_cache[block, token % block_size, :, 0] = -math.inf


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    "tokens", [range(40), range(50, 75), range(74)], ids=["head", "tail", "all but last"]
)
def test_scores_of_minus_infinity(tokens, num_splits, device):
    batch = make_batch([75, 3], device)
    rule_out(batch, 0, tokens)
    assert_matches_reference(batch, num_splits=num_splits)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_only_scores_of_minus_infinity(num_splits, sinks, device):
    batch = make_batch([75, 3], device)
    rule_out(batch, 0, range(75))
    out, lse = decode(
        batch, num_splits=num_splits, sinks=torch.ones(4, device=device) if sinks else None
    )
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()
    assert torch.isfinite(out[1]).all()


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


@pytest.mark.parametrize("num_splits", [1, 3])
def test_nan_in_a_used_slot_stays_in_its_sequence(num_splits, device):
    batch = make_batch([75, 75], device)
    expected = decode(batch, num_splits=num_splits)
    batch.v_cache[batch.block_tables[1, 0], 3] = math.nan
    out, lse = decode(batch, num_splits=num_splits)
    assert torch.equal(out[0], expected[0][0])
    assert out[1].isnan().all()
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("num_splits", [1, 2])
def test_block_offsets_beyond_32_bits(num_splits, huge_cache, device):
    batch = make_batch([40], device, head_dim=64)
    expected = decode(batch, num_splits=num_splits)
    k_cache, v_cache = huge_cache(block_size=16, num_kv_heads=2, head_dim=64)
    far = k_cache.shape[0] - 1 - torch.arange(3, device=device)
    for cache, source in ((k_cache, batch.k_cache), (v_cache, batch.v_cache)):
        cache[far] = source[batch.block_tables[0, :3].long()]
    assert int(far.min()) * k_cache.stride(0) > 2**31
    far_batch = replace(batch, k_cache=k_cache, v_cache=v_cache, block_tables=far[None].int())
    assert_bitwise_equal(decode(far_batch, num_splits=num_splits), expected)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_result_is_written_to_out(num_splits, device):
    batch = make_batch([5, 40], device)
    out = torch.empty_like(batch.q)
    assert paged_decode_attention(*batch.decode_args, out=out, num_splits=num_splits) is out
    assert torch.equal(out, decode(batch, num_splits=num_splits)[0])


@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_replay_of_a_cuda_graph_with_other_lengths(num_splits, device):
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    batch, other = (make_batch(lens, device) for lens in ([600, 600, 600], [3, 600, 0]))
    decode(batch, num_splits=num_splits)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured = decode(batch, num_splits=num_splits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    eager = decode(replace(batch, context_lens=other.context_lens), num_splits=num_splits)
    batch.context_lens.copy_(other.context_lens)
    graph.replay()
    assert_bitwise_equal(captured, eager)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_head_and_sequence_offsets_beyond_32_bits(num_splits, far_apart, device):
    batch = make_batch([40, 23, 5], device, num_q_heads=3, num_kv_heads=3)
    heads_first = [cache.permute(2, 0, 1, 3) for cache in (batch.k_cache, batch.v_cache)]
    q, out, *caches = far_apart(batch.q, torch.empty_like(batch.q), *heads_first)
    k_cache, v_cache = (cache.permute(1, 2, 0, 3) for cache in caches)
    far = replace(batch, q=q, k_cache=k_cache, v_cache=v_cache)
    actual = decode(far, num_splits=num_splits, out=out)
    assert_bitwise_equal(actual, decode(batch, num_splits=num_splits))


def test_more_splits_than_the_merge_reads_at_a_time(device):
    """The last of them weighs most, so what was merged before has to be scaled down."""
    batch = make_batch([1100], device, num_q_heads=1, num_kv_heads=1, head_dim=256)
    last = batch.block_tables[0, 1099 // 16], 1099 % 16
    batch.k_cache[last] = batch.q[0] / 2
    assert_matches_reference(batch, num_splits=100)


@pytest.mark.parametrize("options", [{}, {"window_size": 20}, {"num_splits": 2}], ids=str)
def test_nothing_past_the_end_is_accessed(options, at_the_edge, device):
    """Block tables exactly as wide as the longest sequence needs, blocks of one slot."""
    batch = make_batch([5, 37], device, head_dim=33, block_size=1)
    per_head = {"alibi_slopes": torch.rand(2, 4), "sinks": torch.rand(4)}
    options = options | {name: at_the_edge(values) for name, values in per_head.items()}
    expected = decode(batch, **options)
    names = ("q", "k_cache", "v_cache", "context_lens")
    edge = {name: at_the_edge(getattr(batch, name)) for name in names}
    edge["block_tables"] = at_the_edge(batch.block_tables[:, :37])
    out = at_the_edge(torch.empty_like(batch.q))
    assert_bitwise_equal(decode(replace(batch, **edge), out=out, **options), expected)
