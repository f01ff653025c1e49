"""fp8 KV caches: what a cache holds, as the kernels read and write it.

An fp8 cache holds x / scale as e4m3 numbers (OCP: bias 7, largest 448, no infinity, NaN 0x7f and
0xff), with a scale for K and one for V, of all heads or of each KV head. Storing saturates, so no
finite number becomes NaN. A scale is constant within a program: that of K is folded into the scale
of the scores, that of V into the output, and tiles are only converted.

Kernels get such a cache as uint8. GPUs from sm_89 on convert by instruction; elsewhere, where
Triton has no e4m3 type, bits are moved, with the same result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_cuda

from kernels.checks import FP8_DTYPE, Scale
from kernels.primitives import INTERPRETED


@triton.jit
def load_scale(scale, kv_heads, stride):
    """Scale of KV heads: a number as it is (no stride), or from memory, for all heads or each."""
    if stride is None:
        return scale
    else:
        return tl.load(scale + kv_heads * stride)


@triton.jit
def load_row_scales(scale, kv_heads, stride):
    """The same for rows of various heads, [rows]: a number, or [rows, 1]."""
    if stride is None:
        return scale
    else:
        return tl.load(scale + kv_heads * stride)[:, None]


@triton.jit
def e4m3_to_float(bits, dtype: tl.constexpr):
    """e4m3 numbers, uint8, to fp16, bf16 or fp32, exactly."""
    if not INTERPRETED and cuda_capability_geq(8, 9):
        x = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # Exponent and mantissa at the place that fp16, of bias 15, has for them: x / 256, subnormal
        # numbers included, and 1.875 for NaN, which alone overflows times 36000.
        if not INTERPRETED and is_cuda():
            x = bits.to(tl.float8e4b15, bitcast=True).to(tl.float16)  # does it four at a time
        else:
            wide = bits.to(tl.uint16)
            x = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        x = x * 256.0 + x * 36000.0 * 0.0
    if dtype == tl.float16:
        return x
    else:
        return x.to(tl.float32).to(dtype)  # from fp16 to bf16 there is only a slow instruction


@triton.jit
def float_to_e4m3(x):
    """fp32 to e4m3, uint8: to nearest even, saturating at 448 in magnitude; NaN stays NaN."""
    if not INTERPRETED and cuda_capability_geq(8, 9):
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        magnitude = tl.minimum(tl.abs(x), 448.0)
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Next to 2^14 fp32 numbers are 2^-9 apart, as the subnormal ones of e4m3 are.
        subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0.015625, subnormal, normal)
        code = tl.where(x == x, code, 0x7F)
        return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _once(x):
    """x, converted before warps share it: where mma.sync takes its operands from registers, Triton
    would let each warp fetch all bytes it needs and convert them itself.

    It moves no conversion past an instruction that may have effects. On GPUs from sm_90 on operands
    lie in shared memory, which each thread fills with its part.
    """
    if not INTERPRETED and is_cuda() and not cuda_capability_geq(9, 0):
        pack: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, pack)
    else:
        return x


@triton.jit
def from_cache(x, dtype: tl.constexpr, ONCE: tl.constexpr = False):
    """Elements of a cache as operands of `dtype`, up to the scale of an fp8 cache. ONCE: converted
    once, not by each warp; pays where many warps need all."""
    if x.dtype == tl.uint8:
        x = e4m3_to_float(x, dtype)
        return _once(x) if ONCE else x
    else:
        return x


@triton.jit
def values_from_cache(x, dtype: tl.constexpr, ONCE: tl.constexpr = False):
    """The same for values, which meet weights from 0 to 1: fp16 holds those better than bf16, and
    e4m3 becomes fp16 at a quarter of the instructions."""
    if x.dtype == tl.uint8 and dtype == tl.bfloat16:
        return from_cache(x, tl.float16, ONCE)
    else:
        return from_cache(x, dtype, ONCE)


@triton.jit
def queries_for_cache(q, k_ptr):
    """(queries for the keys of a cache, unit of their scores): bf16 ones as fp16 for an fp8 cache.

    e4m3 becomes fp16 at a quarter of the instructions. The unit is the power of two that puts the
    largest finite query of the tile next to 2^14, so all that are within 2^-31 of it are exact.
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
def value_ptrs(ptrs, PAIRED: tl.constexpr):
    """Pointers to rows of values, to pairs of elements if PAIRED."""
    if PAIRED:
        return ptrs.to(tl.pointer_type(tl.uint16))
    else:
        return ptrs


@triton.jit
def values_of_pairs(pairs, dtype: tl.constexpr):
    """Pairs of values, uint16, as for `values_from_cache`: the elements 0, 2, ... and 1, 3, ...

    mma.sync wants values transposed on their way from shared memory to registers. There is an
    instruction for that, of elements of two bytes: bytes would be fetched one by one.
    """
    even = values_from_cache((pairs & 0xFF).to(tl.uint8), dtype)
    odd = values_from_cache((pairs >> 8).to(tl.uint8), dtype)
    return even, odd


@triton.jit
def to_cache(x, scale, dtype: tl.constexpr):
    """Elements as a cache of `dtype` holds them; scale: of an fp8 cache (uint8), or None for 1."""
    if dtype == tl.uint8:
        x = x.to(tl.float32)
        if scale is not None:
            x = tl.div_rn(x, scale)
        return float_to_e4m3(x)
    else:
        return x


def cache_argument(cache: torch.Tensor) -> torch.Tensor:
    """A cache as kernels take it."""
    return cache.view(torch.uint8) if cache.dtype == FP8_DTYPE else cache


def has_value_pairs(v_cache: torch.Tensor) -> bool:
    """Whether the values of an fp8 cache can be read in pairs: no row starts at an odd address."""
    if v_cache.dtype != FP8_DTYPE:
        return False
    head_dim = v_cache.shape[3]
    starts = (v_cache.data_ptr(), *v_cache.stride()[:3])
    return head_dim > 16 and head_dim % 2 == 0 and not any(start % 2 for start in starts)


def scale_arguments(scale: Scale) -> tuple[torch.Tensor | float | None, int | None]:
    """A checked scale as kernels take it, and for a tensor the stride from head to head."""
    if isinstance(scale, torch.Tensor):
        return scale, int(scale.numel() > 1)
    return None if scale is None else float(scale), None
