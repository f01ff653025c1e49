"""Conversion between fp8 KV caches and the kernels' operands.

An fp8 cache holds x / scale as e4m3 numbers (OCP: bias 7, largest 448, no infinity, NaN 0x7f and
0xff). K and V each have one scale for all heads, or one per KV head. Storing saturates, so no
finite number becomes NaN. A scale is constant within a program, so the K scale is multiplied into
the scale of the scores and the V scale into the output. Tiles only need conversion.

Kernels get an fp8 cache as uint8. On sm_89 and later an instruction converts e4m3. Elsewhere Triton
has no e4m3 type, and integer operations give the same result.
"""

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_cuda

from kernels.checks import FP8_DTYPE, Scale
from kernels.primitives import INTERPRETED


@triton.jit
def load_scale(scale, kv_heads, stride):
    """Return the scale of KV heads: a number (stride None), or load it (stride 0 or 1)."""
    if stride is None:
        return scale
    else:
        return tl.load(scale + kv_heads * stride)


@triton.jit
def e4m3_to_float(bits, dtype: tl.constexpr):
    """Convert e4m3 numbers (uint8) to fp16, bf16 or fp32. The result is exact."""
    if not INTERPRETED and cuda_capability_geq(8, 9):
        x = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # Bits moved to fp16's exponent (bias 15) and mantissa mean x / 256, also for subnormal
        # numbers. NaN gives 1.875, the only value that overflows when multiplied by 36000.
        if not INTERPRETED and is_cuda():
            x = bits.to(tl.float8e4b15, bitcast=True).to(tl.float16)  # four at a time
        else:
            wide = bits.to(tl.uint16)
            x = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        x = x * 256.0 + x * 36000.0 * 0.0
    if dtype == tl.float16:
        return x
    else:
        return x.to(tl.float32).to(dtype)  # the direct fp16-to-bf16 instruction is slow


@triton.jit
def float_to_e4m3(x):
    """Convert fp32 to e4m3 (uint8): to nearest even, saturating at +-448. NaN stays NaN."""
    if not INTERPRETED and cuda_capability_geq(9, 0):  # on sm_89 Triton would round twice
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        magnitude = tl.minimum(tl.abs(x), 448.0)
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # fp32 numbers near 2^14 are 2^-9 apart, and so are subnormal e4m3 numbers.
        subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0.015625, subnormal, normal)
        code = tl.where(x == x, code, 0x7F)
        return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _once(x):
    """Return x, converted once before warps share it.

    mma.sync reads operands from registers, and Triton would let each warp fetch and convert all
    bytes that it needs. Triton moves no conversion past an instruction that may have side effects,
    like this mov. From sm_90, operands are in shared memory, and threads convert only their part.
    """
    if not INTERPRETED and is_cuda() and not cuda_capability_geq(9, 0):
        pack: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, pack)
    else:
        return x


@triton.jit
def from_cache(x, dtype: tl.constexpr, ONCE: tl.constexpr = False):
    """Convert elements of a cache to operands of `dtype`, without applying the fp8 scale.

    ONCE: convert once, not in every warp. This pays if many warps need all elements.
    """
    if x.dtype == tl.uint8:
        x = e4m3_to_float(x, dtype)
        return _once(x) if ONCE else x
    else:
        return x


@triton.jit
def values_from_cache(x, dtype: tl.constexpr, ONCE: tl.constexpr = False):
    """`from_cache` for values. With bf16 queries, values become fp16: e4m3 to fp16 takes a quarter
    of the instructions, and fp16 represents weights (0 to 1) more precisely than bf16."""
    if x.dtype == tl.uint8 and dtype == tl.bfloat16:
        return from_cache(x, tl.float16, ONCE)
    else:
        return from_cache(x, dtype, ONCE)


@triton.jit
def queries_for_cache(q, k_ptr):
    """Return queries in the dtype that keys are converted to, and the unit of their scores.

    For an fp8 cache bf16 queries become fp16: e4m3 to fp16 takes a quarter of the instructions.
    Queries are divided by the unit, a power of two, so that the tile's largest finite element
    becomes about 2^14. Elements down to 2^-31 of the largest are then exact.
    """
    if k_ptr.dtype.element_ty == tl.uint8 and q.dtype == tl.bfloat16:
        magnitude = tl.abs(q.to(tl.float32))
        largest = tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0))
        exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 28), 254)
        down = ((127 + 14 + 127 - exponent) << 23).to(tl.float32, bitcast=True)
        unit = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        return (q.to(tl.float32) * down).to(tl.float16), unit
    else:
        return q, 1.0


@triton.jit
def to_cache(x, scale, dtype: tl.constexpr):
    """Convert rows to the `dtype` of a cache. scale: an fp8 cache's scale: number, [rows] or
    None."""
    if dtype == tl.uint8:
        x = x.to(tl.float32)
        if scale is not None:
            x = tl.div_rn(x, scale[:, None] if len(scale.shape) else scale)
        return float_to_e4m3(x)
    else:
        return x


def cache_argument(cache: torch.Tensor) -> torch.Tensor:
    """Return the tensor that kernels get for a cache. An fp8 cache is viewed as uint8."""
    return cache.view(torch.uint8) if cache.dtype == FP8_DTYPE else cache


def byte_strides(cache: torch.Tensor) -> list[int]:
    """Return a cache's strides over blocks, slots and heads in bytes."""
    return [stride * cache.itemsize for stride in cache.stride()[:3]]


def has_value_pairs(v_cache: torch.Tensor) -> bool:
    """Whether the values of an fp8 cache can be read in pairs: no row starts at an odd address."""
    if v_cache.dtype != FP8_DTYPE:
        return False
    head_dim = v_cache.shape[3]
    starts = (v_cache.data_ptr(), *v_cache.stride()[:3])
    return head_dim > 16 and head_dim % 2 == 0 and not any(start % 2 for start in starts)


def scale_arguments(scale: Scale) -> tuple[torch.Tensor | float | None, int | None]:
    """Return a checked scale's kernel arguments: the scale, and a tensor's stride per head."""
    if isinstance(scale, torch.Tensor):
        return scale, int(scale.numel() > 1)
    return None if scale is None else float(scale), None
