"""Number formats that NumPy lacks, and fused multiply-add.

bf16 is the upper half of f32. Rounding is to nearest even, and every NaN becomes 0x7fff (PTX ISA
9.7.9.21, cvt). e4m3 and e5m2 are PyTorch's float8_e4m3fn and float8_e5m2. tf32 is f32 with the
lower 13 bits ignored.
"""

import numba
import numpy as np
import torch
from numba.extending import intrinsic

LEAST_NORMAL = np.float32(2.0**-126)


@numba.vectorize(cache=True)
def _to_bf16(bits):
    if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return np.uint16(0x7FFF)
    return np.uint16((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> 16)


def _to_odd_f32(x: np.ndarray) -> np.ndarray:
    """float64 to float32, rounded to odd: towards zero, with the last bit set if inexact. A second
    rounding to fewer bits then gives the same result as a single rounding."""
    near = x.astype(np.float32)
    bits = near.view(np.uint32).copy()
    with np.errstate(invalid="ignore"):
        too_far = np.abs(near.astype(np.float64)) > np.abs(x)
        inexact = np.isfinite(near) & (near != x)
    bits = np.where(too_far & np.isfinite(x), bits - np.uint32(1), bits)
    return np.where(inexact, bits | np.uint32(1), bits).view(np.float32)


@numba.vectorize(cache=True)
def flush_subnormals(x):
    """.ftz: replace subnormal float32 numbers by zero with the same sign."""
    return np.copysign(np.float32(0), x) if abs(x) < LEAST_NORMAL else x


_F8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_F8_VALUES = {
    kind: torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    for kind, dtype in _F8.items()
}


_PLAIN = {"f16": np.float16, "f32": np.float32, "s8": np.int8, "u8": np.uint8}


def decode(bits: np.ndarray, kind: str) -> np.ndarray:
    """The numbers in registers or bytes, as a float32 array, f64 as float64. kind: a type, or a
    packed pair, which gives two numbers."""
    kind, bits = kind.removesuffix("x2"), np.ascontiguousarray(bits)
    if kind == "f64":
        return bits
    if kind in _PLAIN:
        return bits.view(_PLAIN[kind]).astype(np.float32)
    if kind == "bf16":
        return (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "tf32":
        return (bits.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return _F8_VALUES[kind][bits.view(np.uint8)]


def encode(x: np.ndarray, kind: str) -> np.ndarray:
    """The reverse of `decode`, rounded once, for types that are rounded to."""
    kind = kind.removesuffix("x2")
    if kind == "bf16":
        x = _to_odd_f32(x) if x.dtype == np.float64 else x
        return _to_bf16(np.ascontiguousarray(x).view(np.uint32))
    if kind in _F8:  # saturating (.satfinite)
        most = torch.finfo(_F8[kind]).max
        return torch.from_numpy(x).clamp(-most, most).to(_F8[kind]).view(torch.uint8).numpy()
    return x.astype({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind])


@intrinsic
def _fma(typing_context, a, b, c):
    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return a(a, a, a), generate


@numba.vectorize(cache=True)
def fused_multiply_add(a, b, c):
    """a * b + c, rounded once, for float32 or float64."""
    return _fma(a, b, c)
