"""The flash-attn entry points against an implementation of flash-attn's documentation.

docs/flash-attn-compat.md reports how flash-attn's own tests were run on these functions.
"""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_calls import good_call, i32, labelled, on_device, same

from kernels import reference
from kernels.flash_attn_compat import flash_attn_varlen_func, flash_attn_with_kvcache
from kernels.score_options import ScoreOptions
from kernels.testing.accuracy import accuracy, bits
from kernels.testing.inputs import random_paged_batch

WINDOWS = [(-1, -1), (5, -1), (-1, 3), (0, 0), (7, 2), (1000, 1000), (40, 0)]


def attend(q, k, v, *, causal, window_size, scale=None, softcap=0.0, slopes=None):
    """Documented attention of one sequence, in q's dtype: output and LSE, (tokens, heads ...)."""
    left, right = (None if size < 0 else size for size in window_size)
    window = None if left is None else left + 1
    options = ScoreOptions.checked(k, scale, window, softcap, slopes, ahead=0 if causal else right)
    out, lse = reference.attention(
        q, k.to(q.dtype), v.to(q.dtype), options,
        q_positions=torch.arange(len(q)) + len(k) - len(q), k_positions=torch.arange(len(k)),
    )  # fmt: skip
    return out, lse.masked_fill(lse == -math.inf, math.inf)


def assert_accurate(out, lse, sequences):
    """out, lse: (total_q, nheads[, headdim]); sequences: (q, k, v, options of attend) of each."""
    low = [attend(q, k, v, **options) for q, k, v, options in sequences]
    ref = [attend(q.double(), k, v, **options) for q, k, v, options in sequences]
    for actual, index in ((out, 0), (lse, 1)):
        low_all, ref_all = (torch.cat([pair[index] for pair in part]) for part in (low, ref))
        result = accuracy(actual.cpu(), low_all, ref_all)
        assert result.passed, f"{('out', 'lse')[index]}: {result}, bound {result.bound:.3g}"


def random_cache(lens, block_size, capacity, *, shuffled=False, **shape):
    """Keys, values and block table. block_size None: a row of `capacity` tokens for each sequence,
    in order unless shuffled."""
    width = 1 if block_size is None else -(-capacity // block_size)
    room = {"block_size": block_size or capacity, "table_width": width}
    batch = random_paged_batch(lens, num_q_heads=2, num_kv_heads=2, **room, **shape)
    k_cache, v_cache, table = batch.k_cache, batch.v_cache, batch.block_tables
    if block_size is None and not shuffled:
        rows = torch.cat([table[:, 0], table[:1, 0]]).long()
        k_cache, v_cache = k_cache[rows], v_cache[rows]
        table = torch.arange(len(lens), dtype=torch.int32, device=table.device)[:, None]
    return k_cache, v_cache, table


def draw_scores(draw, nheads, batch):
    """Options of both functions, and ALiBi slopes or None."""
    options = {
        "causal": draw("causal", st.booleans()),
        "window_size": draw("window_size", st.sampled_from(WINDOWS)),
        "softcap": draw("softcap", st.sampled_from([0.0, 5.0])),
    }
    shape = draw("slopes", st.sampled_from([None, None, (nheads,), (batch, nheads)]))
    return options, None if shape is None else torch.rand(shape)


def strided_copy(tensor):
    """A copy whose last dimension is not contiguous."""
    return None if tensor is None else torch.stack([tensor, tensor - 9], dim=-1)[..., 0]


@given(data=st.data())
def test_with_kvcache_like_the_documentation(data, device):
    draw = labelled(data)
    dtype = draw("dtype", st.sampled_from([torch.float16, torch.float32]))
    seqlen = draw("seqlen", st.sampled_from([1, 1, 2, 5, 20]))
    seqlen_new = draw("seqlen_new", st.sampled_from([0, 1, seqlen]))
    lens = draw("cache_seqlens", st.lists(st.integers(0, 40), min_size=1, max_size=2))
    capacity = 40 + max(seqlen, seqlen_new)
    batch, nheads_k = len(lens), 2
    nheads = nheads_k * draw("group_size", st.sampled_from([1, 3]))
    dim = draw("headdim", st.sampled_from([16, 24, 59]))
    block_size = draw("block_size", st.sampled_from([None, None, 1, 7, 16, 256]))
    use_batch_idx = block_size is None and draw("batch_idx", st.booleans())
    k_cache, v_cache, table = random_cache(
        [min(length + seqlen_new + 1, capacity) for length in lens], block_size, capacity,
        shuffled=use_batch_idx, head_dim=dim, dtype=dtype, device=device,
    )  # fmt: skip
    room = table.shape[1] * k_cache.shape[1]

    def tokens(cache, row, first, last):
        return reference.gather_tokens(cache, table[row], first, last).cpu()

    torch.manual_seed(draw("seed", st.integers(0, 2**16)))
    q = torch.randn(batch, seqlen, nheads, dim).to(device, dtype)
    shared, slopes = draw_scores(draw, nheads, batch)
    options = shared | {"alibi_slopes": None if slopes is None else slopes.to(device)}
    options["num_splits"] = draw("num_splits", st.sampled_from([0, 1, 3]))
    options["softmax_scale"] = draw("scale", st.sampled_from([None, 0.3]))
    leftpad = [0] * batch
    if draw("leftpad", st.booleans()):
        leftpad = [length // 3 for length in lens]
        options["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32, device=device)
    q_seen, k_new, v_new = q, None, None
    if seqlen_new:
        k_new, v_new = torch.randn(2, batch, seqlen_new, nheads_k, dim).to(device, dtype)
        if draw("rotary", st.booleans()):
            half = draw("rotary_dim / 2", st.sampled_from([8, dim // 2]))
            angle = 2 * math.pi * torch.rand(capacity + 256, half)
            cos, sin = angle.cos(), angle.sin()
            interleaved = draw("interleaved", st.booleans())
            options |= {"rotary_cos": cos.to(device), "rotary_sin": sin.to(device)}
            options["rotary_interleaved"] = interleaved

            def rotate(x, steps):
                positions = (torch.tensor(lens)[:, None] + steps).flatten()
                wide = reference.apply_rotary_embedding(
                    x.cpu().double().flatten(0, 1), positions, cos, sin, interleaved=interleaved
                )
                return wide.to(dtype).view(x.shape)

            left, right = options["window_size"]
            right = 0 if options["causal"] else right
            local = 0 <= left < room or 0 <= right < room
            q_seen = rotate(q, torch.arange(seqlen) * local)
            k_rotated = rotate(k_new, torch.arange(seqlen_new))
        else:
            k_rotated = k_new.cpu()

    strided = strided_copy if draw("strided inputs", st.booleans()) else lambda tensor: tensor
    before = [bits(x.clone()) for x in (k_cache, v_cache)]
    result, lse = flash_attn_with_kvcache(
        strided(q), k_cache, v_cache, strided(k_new), strided(v_new),
        cache_seqlens=torch.tensor(lens, dtype=torch.int32, device=device),
        cache_batch_idx=strided(table[:, 0]) if use_batch_idx else None,
        block_table=None if block_size is None else strided(table),
        return_softmax_lse=True, **options,
    )  # fmt: skip
    assert result.shape == q.shape
    assert lse.shape == (batch, nheads, seqlen)

    for row, length in enumerate(lens):
        if seqlen_new:
            new = length, length + seqlen_new
            error = (tokens(k_cache, row, *new).double() - k_rotated[row].double()).abs()
            # One rounding apart: the kernel rotates in fp32, the reference in fp64.
            assert error.max() <= 4 * torch.finfo(dtype).eps
            assert torch.equal(tokens(v_cache, row, *new), v_new[row].cpu())
            positions = torch.arange(*new, device=device)
            where = table[row, positions // k_cache.shape[1]].long(), positions % k_cache.shape[1]
            for old, now in zip(before, (k_cache, v_cache), strict=True):
                old[where] = bits(now)[where]
    for old, now in zip(before, (k_cache, v_cache), strict=True):
        assert torch.equal(old, bits(now)), "a slot changed that no new token belongs to"

    shared["scale"] = options["softmax_scale"]
    sequences = []
    for row, length in enumerate(lens):
        span = row, leftpad[row], length + seqlen_new
        k, v = tokens(k_cache, *span), tokens(v_cache, *span)
        sequences.append(
            (q_seen[row].cpu(), k, v, shared | {"slopes": reference.slopes_of(slopes, row)})
        )
    assert_accurate(result.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), sequences)


@pytest.mark.parametrize(
    ("causal", "window_size", "moving"),
    [
        (False, (-1, -1), False),
        (True, (-1, -1), True),
        (False, (5, 5), True),
        (False, (15, -1), True),
        (False, (16, 16), False),  # as wide as the cache
    ],
)
def test_positions_that_queries_are_rotated_by(causal, window_size, moving, device):
    torch.manual_seed(0)
    caches = torch.randn(2, 1, 16, 2, 16, device=device)
    q, (k, v) = torch.randn(1, 5, 4, 16), torch.randn(2, 1, 2, 2, 16)
    angle = 2 * math.pi * torch.rand(16, 8)
    tables = angle.cos(), angle.sin()
    out, lse = flash_attn_with_kvcache(
        *(x.to(device) for x in (q, *caches, k, v, *tables)),
        cache_seqlens=6,
        causal=causal,
        window_size=window_size,
        return_softmax_lse=True,
    )
    positions = 6 + torch.arange(5) * moving
    rotated = reference.apply_rotary_embedding(q[0].double(), positions, *tables, interleaved=True)
    keys, values = caches[:, 0, :8].cpu()
    options = {"causal": causal, "window_size": window_size}
    assert_accurate(out[0], lse[0].T, [(rotated.float(), keys, values, options)])


@given(data=st.data())
def test_varlen_like_the_documentation(data, device):
    draw = labelled(data)
    dtype = draw("dtype", st.sampled_from([torch.float16, torch.float32]))
    paged = draw("paged", st.booleans())
    lens = draw(
        "(queries, keys)",
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=3)
        | st.lists(st.tuples(st.just(1), st.integers(0, 60)), min_size=1, max_size=3),
    )
    lens_q, lens_k = zip(*lens, strict=True)
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "dtype": dtype, "device": device}
    shape["exponent"] = draw("exponent", st.sampled_from([None, None, 59]))
    shape["head_dim"] = draw("headdim", st.sampled_from([16] if shape["exponent"] else [16, 40]))
    shape["block_size"] = draw("block_size", st.sampled_from([1, 7, 16]))
    seed = draw("seed", st.integers(0, 2**16))
    batch = random_paged_batch(lens_k, query_lens=lens_q, seed=seed, **shape)
    tables = list(zip(batch.block_tables, lens_k, strict=True))
    gathered = [
        [reference.gather_tokens(cache, table, 0, n) for table, n in tables]
        for cache in (batch.k_cache, batch.v_cache)
    ]
    keys, values = (batch.k_cache, batch.v_cache) if paged else map(torch.cat, gathered)
    options, slopes = draw_scores(draw, 4, len(lens))
    cu_seqlens_k = torch.tensor([0, *lens_k], device=device).cumsum(0).int()
    out, lse, dropped = flash_attn_varlen_func(
        batch.q, keys, values, batch.cu_seqlens_q, cu_seqlens_k, max(lens_q), max(lens_k),
        alibi_slopes=None if slopes is None else slopes.to(device),
        block_table=batch.block_tables if paged else None, return_attn_probs=True, **options,
    )  # fmt: skip
    assert (out.shape, lse.shape) == (batch.q.shape, (4, len(batch.q)))
    assert dropped.numel() == 0
    queries = batch.q.cpu().split(list(lens_q))
    sequences = [
        (queries[i], k.cpu(), v.cpu(), options | {"slopes": reference.slopes_of(slopes, i)})
        for i, (k, v) in enumerate(zip(*gathered, strict=True))
    ]
    assert_accurate(out, lse.T, sequences)


def varlen_call(device, **overrides):
    call = good_call("flash_attn_varlen_func") | overrides
    return flash_attn_varlen_func(**on_device(call, device))


@pytest.mark.parametrize(("seqlens", "length"), [(None, 8), (8, 8), (5, 5)])
@pytest.mark.parametrize("table", [None, i32([4, 1], [0, 2])], ids=["contiguous", "paged"])
def test_ways_to_give_cache_seqlens(table, seqlens, length, device):
    """As a tensor, which other tests judge, and as a number or by its absence."""
    caches = torch.randn(2, *((2, 8) if table is None else (6, 4)), 2, 16)
    call = good_call("flash_attn_with_kvcache") | {"block_table": table}
    call = on_device(call | {"k_cache": caches[0], "v_cache": caches[1]}, device)
    expected = flash_attn_with_kvcache(**call, cache_seqlens=i32(length, length).to(device))
    assert same(flash_attn_with_kvcache(**call, cache_seqlens=seqlens), expected)


def test_table_entries_before_the_window_are_not_read(device):
    """A sliding-window cache frees its oldest blocks."""
    lens = torch.tensor([20], dtype=torch.int32, device=device)
    caches = torch.randn(2, 8, 4, 2, 16, device=device)
    table = torch.tensor([[3, 1, 5, 0, 2, 7]], dtype=torch.int32, device=device)
    q, k, v = torch.randn(1, 2, 8, 16, device=device).split((4, 2, 2), dim=2)
    results = []
    for gone in (0, 3):
        table[:, :gone] = -1
        k_cache, v_cache = caches.clone().unbind(0)
        out = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lens, block_table=table, causal=True,
            window_size=(8, 0),
        )  # fmt: skip
        results.append((out, k_cache, v_cache))
    assert same(*results)


def test_backward_pass_raises(device):
    out = varlen_call(device, q=torch.ones(5, 4, 16, requires_grad=True), deterministic=True)
    assert not out.any()
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func: the backward pass"):
        out.sum().backward()
    with torch.no_grad():
        assert varlen_call(device, q=torch.ones(5, 4, 16, requires_grad=True)).grad_fn is None


@pytest.mark.parametrize("compiled", [False, True])
def test_results_on_a_cache_require_no_gradients(compiled, device):
    """The function is not differentiable in flash-attn either."""

    def call(q, k_cache, v_cache, new):
        out = flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=4)
        return out + 1

    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    caches = torch.randn(2, 2, 8, 2, 16, device=device).unbind(0)
    q, new = (torch.randn(2, 1, n, 16, device=device).requires_grad_() for n in (4, 2))
    out = call(q, *caches, new)
    assert not out.requires_grad
    assert torch.equal(caches[0][:, 4], new[:, 0])


def test_integers_of_numpy_and_tensors_are_accepted(device):
    out = varlen_call(device, max_seqlen_q=np.int64(3), max_seqlen_k=torch.tensor(9))
    assert torch.equal(out, varlen_call(device))


SIGNATURES = {
    flash_attn_varlen_func: (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
        "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
        "deterministic=False return_attn_probs=False block_table=None"
    ),
    flash_attn_with_kvcache: (
        "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
        "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False "
        "window_size=(-1,-1) softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 "
        "return_softmax_lse=False"
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signature_is_that_of_flash_attn(function):
    parameters = inspect.signature(function).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    written = [
        p.name if p.default is p.empty else f"{p.name}={p.default}".replace(", ", ",")
        for p in parameters
    ]
    assert " ".join(written) == SIGNATURES[function]
