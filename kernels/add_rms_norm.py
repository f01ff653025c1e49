"""RMSNorm (Zhang & Sennrich, 2019) and the residual addition before it, in one launch.

    residual <- residual + x        y = residual / sqrt(mean(residual^2) + eps) * (offset + weight)

vLLM calls this op fused_add_rms_norm. Separate kernels would write the sum once and then read it
twice. Both results are computed in fp32 and rounded once. The mean is computed from the rounded
sum, as in models whose addition and norm are two modules.
"""

import torch
import triton
import triton.language as tl

from kernels.checks import FLOAT_DTYPES, Arg, TensorSpec, bounded, check_number, same_dtype
from kernels.launch import launch, op
from kernels.primitives import await_launches_before, cast, load_gain, reciprocal_rms
from kernels.tiles import MAX_NORM_SIZE, cdiv, next_power_of_2, norm_tile, pdl_options

_TENSORS = TensorSpec(
    Arg("x", "num_tokens hidden_size", FLOAT_DTYPES),
    Arg("residual", "num_tokens hidden_size", same_dtype("x"), optional=True, written=True),
    Arg("weight", "hidden_size", FLOAT_DTYPES),
    rules=(bounded("x", "hidden_size", 0, MAX_NORM_SIZE),),
)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_rms_norm_kernel(
    out_ptr, x_ptr, residual_ptr, weight_ptr,
    eps, offset,
    num_tokens, stride_x, stride_residual,
    HIDDEN_SIZE: tl.constexpr, HIDDEN_SIZE_PADDED: tl.constexpr, TILE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: TILE_ROWS whole rows."""
    await_launches_before(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    offs = tl.arange(0, HIDDEN_SIZE_PADDED)
    mask = (rows < num_tokens)[:, None] & (offs < HIDDEN_SIZE)[None, :]  # [TILE_ROWS, padded size]
    x = tl.load(x_ptr + rows[:, None] * stride_x + offs[None, :], mask=mask, other=0.0)
    gain = load_gain(weight_ptr + offs, offs < HIDDEN_SIZE, offset)
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + rows[:, None] * stride_residual + offs[None, :]
        residual = tl.load(residual_ptrs, mask=mask, other=0.0)
        x = cast(x.to(tl.float32) + residual.to(tl.float32), dtype)
        tl.store(residual_ptrs, x, mask=mask)
    x = x.to(tl.float32)
    y = x * reciprocal_rms(tl.sum(x * x, axis=1), eps, HIDDEN_SIZE) * gain[None, :]
    tl.store(out_ptr + rows[:, None] * HIDDEN_SIZE + offs[None, :], cast(y, dtype), mask=mask)


@op
def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> torch.Tensor:
    """Add x to the residual stream in place, and return the RMSNorm of the sum.

    Args:
        x: (num_tokens, hidden_size), fp16, bf16 or fp32, any stride on the first dimension;
            hidden_size up to 32768.
        residual: shape and dtype of x, any stride on the first dimension. It becomes residual + x.
            None: normalise x alone.
        weight: (hidden_size,), any float dtype.
        eps: number >= 0, added to the mean of the squares.
        offset: number added to weight: 1 in Gemma, 0 elsewhere.

    Mutates residual. Sums and products are computed in fp32.

    Returns:
        A new contiguous tensor shaped like x.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit, or eps is negative.
        TypeError: an argument is not a tensor, or eps or offset is not a number.
    """
    _TENSORS(x, residual, weight)
    num_tokens, hidden_size = x.shape
    eps, offset = check_number("eps", eps, 0), check_number("offset", offset)
    out = torch.empty(num_tokens, hidden_size, dtype=x.dtype, device=x.device)
    if num_tokens * hidden_size == 0:
        return out
    hidden_size_padded = next_power_of_2(hidden_size)
    tile = norm_tile(hidden_size_padded)
    launch(_add_rms_norm_kernel, (cdiv(num_tokens, tile.rows),),
        out, x, residual, weight,
        float(eps), float(offset),
        num_tokens, x.stride(0), 0 if residual is None else residual.stride(0),
        HIDDEN_SIZE=hidden_size, HIDDEN_SIZE_PADDED=hidden_size_padded, TILE_ROWS=tile.rows,
        num_warps=tile.num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return out
