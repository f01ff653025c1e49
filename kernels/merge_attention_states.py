"""Combine two partial attentions of the same queries over disjoint sets of keys.

With the LSE of both parts, attention over the union of the keys is

    m = max(lse_a, lse_b)    w = exp(lse - m)
    out = (w_a out_a + w_b out_b) / (w_a + w_b)    lse = m + log(w_a + w_b)

A part with weight 0 is not read, so the output of an empty part may have any value.
"""

import torch
import triton
import triton.language as tl

from kernels.checks import FLOAT_DTYPES, FP32, Arg, TensorSpec, same_dtype
from kernels.launch import launch, op
from kernels.primitives import LN_2, LOG2_E, cast, finite_shift
from kernels.tiles import cdiv, padded_dim, store_tile

_TENSORS = TensorSpec(
    Arg("out_a", "num_tokens num_heads head_dim", FLOAT_DTYPES),
    Arg("lse_a", "num_tokens num_heads", FP32, any_strides=True),
    Arg("out_b", "num_tokens num_heads head_dim", same_dtype("out_a")),
    Arg("lse_b", "num_tokens num_heads", FP32, any_strides=True),
)


@triton.jit
def _load_lse(ptrs, mask):
    """Load LSEs. +inf, which flash-attn reports for a row without keys, becomes -inf."""
    lse = tl.load(ptrs, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_attention_states_kernel(
    out_ptr, lse_ptr, out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr,
    num_rows,
    stride_a_token, stride_a_head, stride_lse_a_token, stride_lse_a_head,
    stride_b_token, stride_b_head, stride_lse_b_token, stride_lse_b_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """One program: TILE_ROWS rows of head_dim elements; row = token * NUM_HEADS + head."""
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    row_mask = rows < num_rows
    dim_mask = (offs_d < HEAD_DIM)[None, :]
    tokens = rows // NUM_HEADS
    heads = rows % NUM_HEADS
    lse_a = _load_lse(lse_a_ptr + tokens * stride_lse_a_token + heads * stride_lse_a_head, row_mask)
    lse_b = _load_lse(lse_b_ptr + tokens * stride_lse_b_token + heads * stride_lse_b_head, row_mask)
    shift = finite_shift(tl.maximum(lse_a, lse_b))
    weight_a = tl.exp2((lse_a - shift) * LOG2_E)
    weight_b = tl.exp2((lse_b - shift) * LOG2_E)
    empty = weight_a + weight_b == 0.0
    total = tl.where(empty, 1.0, weight_a + weight_b)

    a_rows = tokens * stride_a_token + heads * stride_a_head
    b_rows = tokens * stride_b_token + heads * stride_b_head
    a_mask = (weight_a > 0.0)[:, None] & dim_mask
    b_mask = (weight_b > 0.0)[:, None] & dim_mask
    a = tl.load(out_a_ptr + a_rows[:, None] + offs_d[None, :], mask=a_mask, other=0.0)
    b = tl.load(out_b_ptr + b_rows[:, None] + offs_d[None, :], mask=b_mask, other=0.0)
    out = a.to(tl.float32) * weight_a[:, None] + b.to(tl.float32) * weight_b[:, None]
    out = out / total[:, None]  # [TILE_ROWS, HEAD_DIM_PADDED]
    lse = tl.where(empty, float("-inf"), shift + tl.log2(total) * LN_2)

    out_ptrs = out_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptrs, cast(out, out_ptr.dtype.element_ty), mask=row_mask[:, None] & dim_mask)
    tl.store(lse_ptr + rows, lse, mask=row_mask)


@op
def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention over the union of two disjoint sets of keys from the attention over each
    set.

    Flash-decoding, cascade (Hydragen, Juravsky et al., 2024) and ring attention use this recursion.

    Args:
        out_a, out_b: (num_tokens, num_heads, head_dim), fp16, bf16 or fp32, both of one dtype, any
            strides on the first two dimensions. Rows whose LSE is -inf are not read.
        lse_a, lse_b: (num_tokens, num_heads), natural log, fp32. Any strides, so that flash-attn's
            (num_heads, num_tokens) can be passed transposed. -inf, or flash-attn's +inf, marks a
            part without keys.

    Returns:
        (out, lse): out is contiguous with the shape and dtype of out_a; lse is (num_tokens,
        num_heads) fp32. Both are computed in fp32. If both parts are empty, they are 0 and -inf.
        With attention sinks, include the sinks in exactly one of the two parts.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit.
    """
    _TENSORS(out_a, lse_a, out_b, lse_b)
    num_tokens, num_heads, head_dim = out_a.shape
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=out_a.device)
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return out, lse
    head_dim_padded = padded_dim(head_dim)
    tile = store_tile(head_dim_padded)
    launch(_merge_attention_states_kernel, (cdiv(num_rows, tile.rows),),
        out, lse, out_a, lse_a, out_b, lse_b,
        num_rows,
        *out_a.stride()[:2], *lse_a.stride(), *out_b.stride()[:2], *lse_b.stride(),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, HEAD_DIM_PADDED=head_dim_padded,
        TILE_ROWS=tile.rows,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return out, lse
