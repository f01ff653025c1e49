"""Device functions that the kernels share: paged addresses, norms, scores, the online softmax.

Address arithmetic. The K (or V) row of token position p of a sequence lies at

    cache + block_table[p // BLOCK_SIZE] * stride_block + (p % BLOCK_SIZE) * stride_slot

elements. The product of block id and stride exceeds 32 bits on every large cache, so both factors
are widened to 64 bits where they meet (one wide multiply) and not before. Positions are divided as
unsigned numbers: a signed division by a constant costs several instructions more.

Online softmax (Milakov & Gimelshein, 2018; FlashAttention). Weights are powers of two: with u the
unit of the scores s, in log2 (scale * log2(e) for plain products), a tile updates, row by row,

    m' = max(m, u max(s))    a = 2^(m - m')    p = 2^(u s - m')
    l' = a l + sum(p)        acc' = a acc + p V

so that scaling takes no instruction of its own: u s - m' is one multiply-add. The maximum commutes
with u as u > 0. A row that has seen nothing but -inf keeps m = -inf, l = 0 and acc = 0 rather than
NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Whether kernels were bound to Triton's interpreter, which is decided when `triton.jit` decorates
# them; setting TRITON_INTERPRET after this import has no effect.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def await_launches_before(PDL: tl.constexpr):
    """Wait for all that launches before this one write, then let the next one come to its own wait.

    PDL: whether the launch has the options of `kernels.tiles.pdl_options`; without, nothing is to
    be waited for. Before this a kernel accesses no memory, and no program ends.
    """
    if PDL and not INTERPRETED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def locate_tile(
    tile,
    cu_seqlens_q_ptr,
    batch,
    GROUP_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    SEARCH_WIDTH: tl.constexpr,
):
    """Sequence that a tile of the launch belongs to, and the tile's number inside it.

    Sequence i owns the tiles from floor(cu_seqlens_q[i] * GROUP_SIZE / TILE_M) + i on: at least as
    many as its rows need, at most one more. Counting the sequences that start at or before a tile
    finds its owner with one wide load instead of a chain of dependent ones.
    """
    offs = tl.arange(0, SEARCH_WIDTH)
    started = 0
    for first in range(0, batch, SEARCH_WIDTH):
        seqs = first + offs
        starts = tl.load(cu_seqlens_q_ptr + seqs, mask=seqs < batch, other=0)
        first_tiles = starts * GROUP_SIZE // TILE_M + seqs
        started += tl.sum(((first_tiles <= tile) & (seqs < batch)).to(tl.int32))
    seq = started - 1
    return seq, tile - (tl.load(cu_seqlens_q_ptr + seq) * GROUP_SIZE // TILE_M + seq)


@triton.jit
def load_block_ids(
    block_table_ptr, positions, mask, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr
):
    """Block ids, int32, of token positions. MASKED: only where `mask`, and 0 elsewhere.

    Table entries that no unmasked position needs are never read: they may hold anything.
    """
    ptrs = block_table_ptr + positions.to(tl.uint32) // BLOCK_SIZE
    return tl.load(ptrs, mask=mask, other=0) if MASKED else tl.load(ptrs)


@triton.jit
def slot_offsets(block_ids, positions, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """Offset in elements, int64, of the cache row that holds each token position."""
    slots = positions.to(tl.uint32) % BLOCK_SIZE
    return block_ids.to(tl.int64) * stride_block + slots.to(tl.int64) * stride_slot


@triton.jit
def load_rows(ptrs, row_mask, dim_mask, MASK_ROWS: tl.constexpr, MASK_DIMS: tl.constexpr):
    """Load a [rows, dims] tile; what a mask excludes is 0, so no NaN of an unused slot gets in."""
    if MASK_ROWS and MASK_DIMS:
        return tl.load(ptrs, mask=row_mask[:, None] & dim_mask[None, :], other=0.0)
    elif MASK_ROWS:
        return tl.load(ptrs, mask=row_mask[:, None], other=0.0)
    elif MASK_DIMS:
        return tl.load(ptrs, mask=dim_mask[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in fp32. PRECISION ("tf32x3" or "ieee") only matters for fp32 operands.

    The interpreter stores bf16 as integers and would multiply those, so it gets fp32 operands.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """fp32 to `dtype`, rounded to nearest even (the interpreter alone would truncate to bf16)."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, nearest_even.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def load_gain(weight_ptrs, mask, offset):
    """offset + weight in fp32, which a narrower dtype would round; 0 weights where not `mask`."""
    return tl.load(weight_ptrs, mask=mask, other=0.0).to(tl.float32) + offset


@triton.jit
def reciprocal_rms(square_sums, eps, SIZE: tl.constexpr):
    """[rows, 1] of the sums, [rows], over the SIZE squares of each row."""
    return tl.rsqrt(square_sums / SIZE + eps)[:, None]


@triton.jit
def tanh(x):
    """tanh to fp32 accuracy: near 0 the exponential form loses digits, so a polynomial serves."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    x2 = x * x
    near = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


def folds_scale(scale: float, softcap: float, alibi_slopes: torch.Tensor | None) -> bool:
    """Whether kernels may scale scores with their exponent, FOLD_SCALE: only what comes before."""
    return scale > 0 and not softcap and alibi_slopes is None


@triton.jit
def score_unit(scale, FOLD_SCALE: tl.constexpr):
    """Unit in log2 of the scores; not 0, which would make NaN of the -inf of a masked score."""
    return tl.maximum(scale * LOG2_E, 1e-37) if FOLD_SCALE else 1.0


@triton.jit
def attention_scores(
    qk,
    scale,
    softcap,
    alibi_slopes,
    distances,
    FOLD_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Raw products to scores in units of `score_unit`: scale, then softcap, then ALiBi.

    qk: [queries, keys] fp32. alibi_slopes: [queries, 1] fp32. distances: how far each key lies
    before its query, >= 0, broadcastable to qk. Softcap is softcap * tanh(score / softcap)
    (Gemma 2), the ALiBi bias -slope * distance (Press et al., 2022).
    """
    scores = qk
    if HAS_SOFTCAP:
        scores = tanh(qk * (scale / softcap)) * (softcap * LOG2_E)
    elif not FOLD_SCALE:
        scores = qk * (scale * LOG2_E)
    if HAS_ALIBI:
        scores -= alibi_slopes * LOG2_E * distances
    return scores


@triton.jit
def online_softmax_update(scores, unit, v, acc, row_max, row_sum, PRECISION: tl.constexpr):
    """Fold one tile of keys into the running state; see the head of this file.

    scores: [queries, keys] fp32, in units of `unit`. v: [keys, dims]. acc: [queries, dims] fp32.
    row_max: [queries] fp32, in log2. row_sum: l, [queries] fp32, or [queries, keys] whose sum over
    keys is l: where the keys of a tile are spread over warps, summing once after the last tile
    spares a reduction across them per tile. Returns the new (acc, row_max, row_sum).
    """
    p, alpha, row_max, row_sum = online_softmax_weights(scores, unit, row_max, row_sum)
    return accumulate(p, v, acc, alpha, PRECISION), row_max, row_sum


@triton.jit
def online_softmax_weights(scores, unit, row_max, row_sum):
    """The part of the update that is before V: (p, a, new row_max, new row_sum)."""
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * unit)
    shift = finite_shift(new_max)
    alpha = tl.exp2(row_max - shift)
    p = tl.exp2(scores * unit - shift[:, None])
    if len(row_sum.shape) == 1:
        row_sum = row_sum * alpha + tl.sum(p, axis=1)
    else:
        row_sum = row_sum * alpha[:, None] + p
    return p, alpha, new_max, row_sum


@triton.jit
def accumulate(p, v, acc, alpha, PRECISION: tl.constexpr):
    """a acc + p V, the products in V's dtype."""
    if not INTERPRETED:
        p = p.to(v.dtype)
    return dot(p, v, acc * alpha[:, None], PRECISION)


@triton.jit
def finite_shift(row_max):
    """row_max, or 0 where it is -inf: -inf - (-inf) would be NaN, -inf - 0 gives a weight of 0."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def normalise(acc, row_max, row_sum):
    """Softmax state to (output, LSE in log2 units); a row without weight gives 0 and -inf."""
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), row_max + tl.log2(row_sum))
    return acc / row_sum[:, None], lse


@triton.jit
def add_sinks(out, lse, sinks):
    """Add each row's sink logit to its denominator; a row without weight stays empty."""
    empty = lse == float("-inf")
    sinks = tl.where(empty, float("-inf"), sinks.to(tl.float32) * LOG2_E)
    new_max = tl.maximum(lse, sinks)
    shift = finite_shift(new_max)
    weight = tl.exp2(lse - shift)
    return normalise(out * weight[:, None], new_max, weight + tl.exp2(sinks - shift))
