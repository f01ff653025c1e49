"""Rotary position embedding (RoPE; Su et al., 2021) of queries or keys.

The first rotary_dim elements of a head form pairs. Pair i of a token at position p is rotated by an
angle whose cosine is cos[p, i] and whose sine is sin[p, i]:

    (a, b) -> (a cos - b sin, b cos + a sin)

Pairs are (i, i + rotary_dim / 2) (GPT-NeoX, Llama) or, if interleaved, (2 i, 2 i + 1) (GPT-J).
Elements at or after rotary_dim are copied.
"""

import torch
import triton
import triton.language as tl

from kernels import checks
from kernels.checks import FLOAT_DTYPES, Arg, TensorSpec
from kernels.fp8_cache import to_cache
from kernels.launch import launch, op
from kernels.primitives import cast, load_gain, reciprocal_rms
from kernels.tiles import cdiv, next_power_of_2, padded_dim, rotary_tile

_TENSORS = TensorSpec(
    Arg("x", "num_tokens num_heads head_dim", FLOAT_DTYPES),
    *checks.ROTARY_ARGS,
    rules=(checks.ROTARY_RULE,),
)


@triton.jit
def rotate_rows(
    dst_ptrs, src_ptrs, cos_ptrs, sin_ptrs, row_mask, scales,
    norm_weight_ptr, norm_eps, norm_offset,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr, HALF_PADDED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate rows of head_dim elements. The pointers, [rows], point to the start of each row.

    scales: scale of the fp8 cache that the rows are written to: a scalar, [rows] or None.
    norm_weight_ptr: weight of an RMSNorm over each row before the rotation, or None. The result of
        the norm is rounded to the source dtype, see `add_rms_norm`.
    HALF_PADDED: rotary_dim / 2 rounded up to a tile size.
    Source and destination may be the same memory.
    """
    dtype: tl.constexpr = src_ptrs.dtype.element_ty
    dst_dtype: tl.constexpr = dst_ptrs.dtype.element_ty
    HALF: tl.constexpr = ROTARY_DIM // 2
    PAIRS: tl.constexpr = HEAD_DIM_PADDED // 2 if INTERLEAVED else HALF_PADDED
    pairs = tl.arange(0, PAIRS)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    in_half = pairs < HALF
    pair_mask = row_mask[:, None] & in_half[None, :]  # [rows, PAIRS]
    cos = tl.load(cos_ptrs[:, None] + pairs[None, :], mask=pair_mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptrs[:, None] + pairs[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    if INTERLEAVED:
        mask = row_mask[:, None] & (offs_d < HEAD_DIM)[None, :]  # [rows, HEAD_DIM_PADDED]
        x = tl.load(src_ptrs[:, None] + offs_d[None, :], mask=mask, other=0.0)
        if norm_weight_ptr is not None:
            gain = load_gain(norm_weight_ptr + offs_d, offs_d < HEAD_DIM, norm_offset)
            wide = x.to(tl.float32)
            unit = reciprocal_rms(tl.sum(wide * wide, axis=1), norm_eps, HEAD_DIM)
            x = cast(wide * unit * gain[None, :], dtype)
        a, b = tl.split(tl.reshape(x, (x.shape[0], PAIRS, 2)))
        new_a = cast(a.to(tl.float32) * cos - b.to(tl.float32) * sin, dtype)
        new_b = cast(b.to(tl.float32) * cos + a.to(tl.float32) * sin, dtype)
        rotated = in_half[None, :]
        y = tl.join(tl.where(rotated, new_a, a), tl.where(rotated, new_b, b))
        y = to_cache(tl.reshape(y, x.shape), scales, dst_dtype)
        tl.store(dst_ptrs[:, None] + offs_d[None, :], y, mask=mask)
    else:
        a = tl.load(src_ptrs[:, None] + pairs[None, :], mask=pair_mask, other=0.0).to(tl.float32)
        b = tl.load(src_ptrs[:, None] + HALF + pairs[None, :], mask=pair_mask, other=0.0).to(
            tl.float32
        )
        if ROTARY_DIM < HEAD_DIM:
            in_rest = (offs_d >= ROTARY_DIM) & (offs_d < HEAD_DIM)
            rest_mask = row_mask[:, None] & in_rest[None, :]  # [rows, HEAD_DIM_PADDED]
            rest = tl.load(src_ptrs[:, None] + offs_d[None, :], mask=rest_mask, other=0.0)
        if norm_weight_ptr is not None:
            square_sums = tl.sum(a * a + b * b, axis=1)  # [rows]
            if ROTARY_DIM < HEAD_DIM:
                wide = rest.to(tl.float32)
                square_sums += tl.sum(wide * wide, axis=1)
            unit = reciprocal_rms(square_sums, norm_eps, HEAD_DIM)
            gain_a = load_gain(norm_weight_ptr + pairs, in_half, norm_offset)
            gain_b = load_gain(norm_weight_ptr + HALF + pairs, in_half, norm_offset)
            a = cast(a * unit * gain_a[None, :], dtype).to(tl.float32)
            b = cast(b * unit * gain_b[None, :], dtype).to(tl.float32)
            if ROTARY_DIM < HEAD_DIM:
                gain = load_gain(norm_weight_ptr + offs_d, in_rest, norm_offset)
                rest = cast(wide * unit * gain[None, :], dtype)
        new_a = to_cache(cast(a * cos - b * sin, dtype), scales, dst_dtype)
        new_b = to_cache(cast(b * cos + a * sin, dtype), scales, dst_dtype)
        tl.store(dst_ptrs[:, None] + pairs[None, :], new_a, pair_mask)
        tl.store(dst_ptrs[:, None] + HALF + pairs[None, :], new_b, pair_mask)
        if ROTARY_DIM < HEAD_DIM:
            rest = to_cache(rest, scales, dst_dtype)
            tl.store(dst_ptrs[:, None] + offs_d[None, :], rest, mask=rest_mask)


@triton.jit(do_not_specialize=["num_rows"])
def _apply_rotary_embedding_kernel(
    out_ptr, x_ptr, positions_ptr, cos_ptr, sin_ptr,
    num_rows,
    stride_x_token, stride_x_head, stride_cos, stride_sin,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr, HALF_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One program: TILE_ROWS rows of head_dim elements; row = token * NUM_HEADS + head."""
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    row_mask = rows < num_rows
    tokens = rows // NUM_HEADS
    heads = rows % NUM_HEADS
    positions = tl.load(positions_ptr + tokens, mask=row_mask, other=0).to(tl.int64)
    rotate_rows(
        out_ptr + rows * HEAD_DIM,
        x_ptr + tokens * stride_x_token + heads * stride_x_head,
        cos_ptr + positions * stride_cos,
        sin_ptr + positions * stride_sin,
        row_mask,
        None,
        None, 0.0, 0.0,
        HEAD_DIM, HEAD_DIM_PADDED, ROTARY_DIM, HALF_PADDED, INTERLEAVED,
    )  # fmt: skip


@op
def apply_rotary_embedding(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
) -> torch.Tensor:
    """Apply rotary position embedding to queries or keys.

    Args:
        x: (num_tokens, num_heads, head_dim), fp16, bf16 or fp32, any stride on the first two
            dimensions.
        positions: (num_tokens,) int32 or int64, the row of cos and sin for each token.
        cos, sin: (num_positions, rotary_dim / 2), any float dtype; rotary_dim <= head_dim. Products
            are computed in fp32.
        interleaved: pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).

    Returns:
        A new contiguous tensor shaped like x.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit. For tensors in host memory also:
            a position is not a row of cos.
    """
    sizes = _TENSORS(x, positions, cos, sin)
    checks.check_values("positions", positions, 0, sizes.num_positions - 1, "rows of cos")
    num_tokens, num_heads, head_dim = x.shape
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=x.dtype, device=x.device)
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return out
    head_dim_padded = padded_dim(head_dim)
    tile = rotary_tile(head_dim_padded)
    launch(_apply_rotary_embedding_kernel, (cdiv(num_rows, tile.rows),),
        out, x, positions, cos, sin,
        num_rows,
        *x.stride()[:2], cos.stride(0), sin.stride(0),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, HEAD_DIM_PADDED=head_dim_padded,
        ROTARY_DIM=sizes.rotary_dim, HALF_PADDED=next_power_of_2(sizes.rotary_dim // 2),
        TILE_ROWS=tile.rows, INTERLEAVED=interleaved,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return out
