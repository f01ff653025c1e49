"""Device functions shared by the kernels: paged addresses, norms, scores, the online softmax.

Address arithmetic. The K (or V) row of token position p of a sequence lies at

    cache + block_table[p // BLOCK_SIZE] * stride_block + (p % BLOCK_SIZE) * stride_slot

with strides in bytes. On a large cache, block id * stride exceeds 32 bits. So both factors are
widened to 64 bits just for this multiplication. Positions are divided as unsigned numbers, because
a signed division by a constant takes several more instructions.

Online softmax (Milakov & Gimelshein, 2018; FlashAttention). A tile of scores s, in units of u > 0,
updates each row:

    m' = max(m, max(s))    a = 2^((m - m') u log2(e))    p = 2^((s - m') u log2(e))
    l' = a l + sum(p)      acc' = a acc + p V

The unit (the scale, if there is no softcap or ALiBi) needs no extra instruction. The subtraction
precedes the multiplication: compilers would turn s u - m' u into one multiply-add that rounds only
m' u. For scores of 2^29 that rounding error is a factor of 2^32. A row whose scores are all -inf
keeps m = -inf, l = 0 and acc = 0; it never becomes NaN.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import is_cuda

# Whether the kernels run in Triton's interpreter. `triton.jit` decides this when it decorates the
# kernels; setting TRITON_INTERPRET after this import has no effect.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def await_launches_before(PDL: tl.constexpr):
    """Wait until the writes of earlier launches are visible, then let the next launch start.

    PDL: whether the launch uses `kernels.tiles.pdl_options`. Without these options launches always
    wait for each other. A kernel must call this before it accesses memory or returns.
    """
    if PDL and not INTERPRETED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def locate_tile(
    tile, cu_seqlens_q_ptr, batch, offs, GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr
):
    """Return a tile's sequence, and the tile's index within that sequence.

    The tiles of sequence i start at floor(cu_seqlens_q[i] * GROUP_SIZE / TILE_M) + i. So a sequence
    gets the tiles that its rows need, or one more. A tile's sequence is found by counting sequences
    that start at or before the tile: one wide load, no chain of loads.

    offs: 0, 1, 2 ... to index the sequences that are loaded at a time.
    """
    started = 0
    for first in range(0, batch, offs.shape[0]):
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
    """Load the int32 block ids of token positions. MASKED: load only where `mask`; 0 elsewhere.

    Table entries that only masked positions refer to are never read and may have any value.
    """
    ptrs = block_table_ptr + positions.to(tl.uint32) // BLOCK_SIZE
    return tl.load(ptrs, mask=mask, other=0) if MASKED else tl.load(ptrs)


@triton.jit
def wide_product(indices, stride):
    """Return indices * stride as int64. Both are at least 0.

    With unsigned 32-bit factors this takes one GPU instruction; with signed factors, five.
    """
    stride = tl.zeros((), tl.int32) + stride  # a tensor, though a stride of 1 is a constant
    if stride.dtype == tl.int32:
        stride = stride.to(tl.uint32)
    return indices.to(tl.uint32).to(tl.int64) * stride.to(tl.int64)


@triton.jit
def add_bytes(ptr, offset):
    """Return ptr + offset, where offset is in bytes.

    Multiplying and adding takes one GPU instruction for strides in bytes, three for elements.
    """
    return (ptr.to(tl.pointer_type(tl.uint8)) + offset).to(ptr.dtype)


@triton.jit
def row_ptrs(cache_ptr, block_ids, positions, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """Pointers to the cache rows of token positions. Strides are in bytes. BLOCK_SIZE 0: all
    positions are in one block."""
    slots = positions.to(tl.uint32) % BLOCK_SIZE if BLOCK_SIZE else positions
    ptrs = add_bytes(cache_ptr, wide_product(slots, stride_slot))
    return add_bytes(ptrs, wide_product(block_ids, stride_block))


@triton.jit
def load_rows(ptrs, row_mask, dim_mask, MASK_ROWS: tl.constexpr, MASK_DIMS: tl.constexpr):
    """Load a [rows, dims] tile. Masked elements are 0, so a NaN in an unused slot has no effect."""
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
    """Return acc + a @ b in fp32. PRECISION ("tf32x3" or "ieee") matters for fp32 operands only.

    The interpreter stores bf16 as integers and would multiply the integers, so cast to fp32.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Convert fp32 to `dtype`, rounded to nearest even. (The interpreter truncates to bf16.)"""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, nearest_even.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def load_gain(weight_ptrs, mask, offset):
    """Return offset + weight in fp32 (a narrower dtype would round it). Masked weights are 0."""
    return tl.load(weight_ptrs, mask=mask, other=0.0).to(tl.float32) + offset


@triton.jit
def reciprocal_rms(square_sums, eps, SIZE: tl.constexpr):
    """Return 1 / RMS of each row, [rows, 1]. square_sums: [rows], each a sum of SIZE squares."""
    return tl.rsqrt(square_sums / SIZE + eps)[:, None]


@triton.jit
def tanh(x):
    """tanh to fp32 accuracy. Near 0 the exponential form loses digits, so a polynomial is used."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    x2 = x * x
    near = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def score_unit(scale, softcap, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr):
    """Return the unit of the scores. It is never 0, because 0 * -inf (a masked score) is NaN."""
    if HAS_ALIBI:
        return 1.0
    else:
        return tl.maximum(softcap if HAS_SOFTCAP else tl.abs(scale), 1e-37)


@triton.jit
def attention_scores(
    qk, scale, softcap, alibi_slopes, distances,
    NEGATIVE_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
):  # fmt: skip
    """Convert products to scores in units of `score_unit`: scale, then softcap, then ALiBi.

    qk: [queries, keys] fp32. alibi_slopes: [queries, 1] fp32. distances: from each query to each
    key, >= 0, broadcastable to qk. Softcap is softcap * tanh(score / softcap) (Gemma 2). The ALiBi
    bias is -slope * distance (Press et al., 2022).
    """
    scores = qk
    if HAS_SOFTCAP:
        scores = tanh(qk * (scale / softcap))
    elif NEGATIVE_SCALE and not HAS_ALIBI:
        scores = -qk
    if HAS_ALIBI:
        scores = scores * (softcap if HAS_SOFTCAP else scale) - alibi_slopes * distances
    return scores


@triton.jit
def online_softmax_weights(scores, unit, row_max, row_sum):
    """Update m and l with one tile of keys by the formulas above. Return (p, a, new m, new l).

    scores: [queries, keys] fp32, in units of `unit`. row_max: m, [queries] fp32, in the same units.
    row_sum: l, [queries] fp32; or [queries, keys], whose sum over keys is l. If a tile's keys are
    spread over several warps, [queries, keys] avoids a reduction across warps in every tile.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    shift = finite_shift(new_max)
    alpha = tl.exp2((row_max - shift) * (unit * LOG2_E))
    p = tl.exp2((scores - shift[:, None]) * (unit * LOG2_E))
    if len(row_sum.shape) == 1:
        row_sum = row_sum * alpha + tl.sum(p, axis=1)
    else:
        row_sum = row_sum * alpha[:, None] + p
    return p, alpha, new_max, row_sum


@triton.jit
def natural_max(row_max, unit):
    """Return m in natural-log units, rounded by the fma; compilers would fuse a plain product."""
    return tl.fma(row_max, unit, 0.0)


@triton.jit
def accumulate(p, v, acc, alpha, PRECISION: tl.constexpr):
    """Return a acc + p V, [queries, dims] fp32. p is cast to the dtype of v, [keys, dims]."""
    if not INTERPRETED:
        p = p.to(v.dtype)
    return dot(p, v, acc * alpha[:, None], PRECISION)


@triton.jit
def finite_shift(row_max):
    """Return row_max, but 0 for -inf: -inf - (-inf) is NaN, while -inf - 0 gives weight 0."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def quotient(x, y):
    """Return x / y. The error is at most 2 units in the last place for y from 2^-126 to 2^126. On
    NVIDIA GPUs this takes two instructions; Triton's division takes ten."""
    if not INTERPRETED and is_cuda():
        asm: tl.constexpr = "div.approx.ftz.f32 $0, $1, $2;"
        return tl.inline_asm_elementwise(asm, "=f,f,f", [x, y], tl.float32, True, 1)
    else:
        return x / y


@triton.jit
def _log2(x):
    """Return log2 of normal fp32 numbers with an error of at most 2^-22. On NVIDIA GPUs this takes
    one instruction; Triton's log2 takes thirty."""
    if not INTERPRETED and is_cuda():
        asm: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.log2(x)


@triton.jit
def normalise(acc, row_max, row_sum):
    """Convert a softmax state (m in natural-log units) to (output, LSE). A row without keys gives 0
    and -inf."""
    # row_sum is about 1 or more, unless the row has no keys.
    row_sum = tl.maximum(row_sum, 1e-37, propagate_nan=tl.PropagateNan.ALL)
    return acc * quotient(1.0, row_sum)[:, None], row_max + _log2(row_sum) * LN_2


@triton.jit
def add_sinks(acc, row_max, row_sum, sinks):
    """Add each row's sink logit to its softmax state (m in natural-log units). A sink acts as a key
    without a value."""
    sinks = sinks.to(tl.float32)
    new_max = tl.maximum(row_max, sinks)
    shift = finite_shift(new_max)
    alpha = tl.exp2((row_max - shift) * LOG2_E)
    row_sum = row_sum * alpha + tl.exp2((sinks - shift) * LOG2_E)
    return acc * alpha[:, None], new_max, row_sum
