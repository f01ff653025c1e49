"""mov, cvt and what packs numbers into registers (PTX ISA 9.7.9)."""

from __future__ import annotations

import numpy as np

from kernels.executor.formats import (
    bf16_to_f32,
    f8_values,
    f32_to_bf16,
    f32_to_f8,
    flush_subnormals,
)
from kernels.executor.operands import (
    DTYPES,
    PACKED,
    Step,
    Translation,
    Unsupported,
    elementwise,
    instruction,
)

_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@instruction("mov")
def _mov(translation: Translation) -> Step:
    """A value, or the pieces of one register to several, or several to the pieces of one."""
    translation.expect()
    target, source = translation.operands
    kind = translation.kind
    if isinstance(target, tuple):
        return _unpack(translation, target, source, kind)
    if isinstance(source, tuple):
        return _pack(translation, target, source, kind)
    return elementwise(translation, lambda a: a, kind)


def _piece(kind: str, count: int) -> str:
    return f"b{int(kind[1:]) // count}"


def _unpack(translation: Translation, targets: tuple, source, kind: str) -> Step:
    piece = _piece(kind, len(targets))
    read, count = translation.read(source, kind), len(targets)
    writes = [translation.write(target, piece) for target in targets]

    def unpack(batch, mask):
        pieces = read(batch).view(DTYPES[piece]).reshape(-1, count)
        for number, write in enumerate(writes):
            write(batch, mask, np.ascontiguousarray(pieces[:, number]))

    return unpack


def _pack(translation: Translation, target, sources: tuple, kind: str) -> Step:
    piece = _piece(kind, len(sources))
    reads = [translation.read(source, piece) for source in sources]
    write = translation.write(target, kind)

    def pack(batch, mask):
        pieces = np.broadcast_arrays(*[read(batch) for read in reads])
        write(batch, mask, np.stack(pieces, 1).view(DTYPES[kind]).reshape(-1))

    return pack


@instruction("cvta")
def _cvta(translation: Translation) -> Step:
    """A generic address equals the global or local one; shared memory is not supported."""
    if not {"global", "local"} & {*translation.parts}:
        raise Unsupported("only addresses of global and local memory")
    return elementwise(translation, lambda a: a, translation.kind)


@instruction("cvt")
def _cvt(translation: Translation) -> Step:
    *modifiers, to, source = translation.parts[1:]
    if len(translation.operands) == 3:
        return _narrow_pair(translation, modifiers, to, source)
    if source in ("e4m3x2", "e5m2x2") and to == "f16x2":
        _only(modifiers, "rn")
        table = f8_values(source[:4]).astype(np.float16)
        return elementwise(
            translation, lambda a: table[a.view(np.uint8)].view(np.uint32), "b16", "b32"
        )
    if source in ("f16x2", "bf16x2") and to in ("e4m3x2", "e5m2x2"):
        return _narrow_packed(translation, modifiers, to, source)
    if to == "tf32":  # to nearest, ties away from zero
        _only(modifiers, "rna")
        return elementwise(
            translation,
            lambda a: (a + np.uint32(0x1000)) & np.uint32(0xFFFFE000),
            "b32",
        )
    if source == "bf16":
        _only(modifiers)
        dtype = {"f32": np.float32, "f64": np.float64}[to]
        return elementwise(translation, lambda a: bf16_to_f32(a).astype(dtype), "b16", to)
    if to == "bf16":
        _only(modifiers, "rn")
        if source not in ("f16", "f32"):
            raise Unsupported(f".{source} to .bf16")
        return elementwise(translation, lambda a: f32_to_bf16(a.astype(np.float32)), source, "b16")
    return _cvt_number(translation, modifiers, to, source)


def _only(modifiers: list[str], *known: str) -> None:
    for modifier in modifiers:
        if modifier not in known:
            raise Unsupported(f".{modifier} is not supported")


def _narrow_pair(translation: Translation, modifiers: list[str], to: str, source: str) -> Step:
    """Two f32 numbers to one register, the first in its upper half."""
    if source != "f32":
        raise Unsupported(f"pairs of .{source}")
    if to in ("f16x2", "bf16x2"):
        _only(modifiers, "rn")
        half, result = 16, "b32"
    else:
        _only(modifiers, "rn", "satfinite")
        if "satfinite" not in modifiers:
            raise Unsupported("expected .satfinite")
        half, result = 8, "b16"
    narrow = {
        "f16x2": lambda x: x.astype(np.float16).view(np.uint16),
        "bf16x2": f32_to_bf16,
        "e4m3x2": lambda x: f32_to_f8(x, "e4m3"),
        "e5m2x2": lambda x: f32_to_f8(x, "e5m2"),
    }[to]
    dtype = DTYPES[result]

    def convert(high, low):
        return (narrow(high).astype(dtype) << dtype(half)) | narrow(low).astype(dtype)

    return elementwise(translation, convert, "f32", result)


def _narrow_packed(translation: Translation, modifiers: list[str], to: str, source: str) -> Step:
    """A pair of f16 or bf16 to a pair of fp8."""
    _only(modifiers, "rn", "satfinite")
    if "satfinite" not in modifiers:
        raise Unsupported("expected .satfinite")

    def convert(pairs):
        halves = np.ascontiguousarray(pairs).view(np.uint16)
        wide = bf16_to_f32(halves) if source == "bf16x2" else halves.view(np.float16)
        return f32_to_f8(wide.astype(np.float32), to[:4]).view(np.uint16)

    return elementwise(translation, convert, "b32", "b16")


def _towards_zero(a: np.ndarray, dtype) -> np.ndarray:
    near = a.astype(dtype)
    return np.where(np.abs(near) > np.abs(a), np.nextafter(near, dtype(0)), near).astype(dtype)


def _cvt_number(translation: Translation, modifiers: list[str], to: str, source: str) -> Step:
    """Between integers and f16, f32, f64 (9.7.9.21): integers from floats saturate; NaN gives
    0, or if f64 or 64-bit integers are involved the upper bit alone;
    integers to narrower ones keep the low bits unless .sat."""
    if to in PACKED or source in PACKED:
        raise Unsupported("these types are not supported together")
    dtype = DTYPES[to]
    if "f" not in to and "f" in source:
        _only(modifiers, "ftz", *_TO_INTEGER)
        rounded = _TO_INTEGER[next(m for m in modifiers if m != "ftz")]
        flush = flush_subnormals if "ftz" in modifiers else lambda a: a
        limits = np.iinfo(dtype)
        wide_type = source == "f64" or limits.bits == 64
        of_nan = np.array(1 << limits.bits - 1 if wide_type else 0, f"u{limits.bits // 8}")

        def to_integer(a):
            wide = rounded(flush(a).astype(np.float64))
            inside = np.clip(wide, float(limits.min), float(limits.max))
            over = wide >= float(limits.max)  # as a float64 the largest int64 is one too large
            there = np.where(over | np.isnan(wide), 0, inside).astype(dtype)
            found = np.where(over, limits.max, there)
            return np.where(np.isnan(wide), of_nan.view(dtype), found)

        return elementwise(translation, to_integer, source, to)
    if "f" in to and "f" in source:
        _only(modifiers, "rn", "rz", "ftz", *_TO_INTEGER)
        rounded = next((_TO_INTEGER[m] for m in modifiers if m in _TO_INTEGER), lambda a: a)
        narrow = _towards_zero if "rz" in modifiers else lambda a, dtype: a.astype(dtype)
        flush = flush_subnormals if "ftz" in modifiers else lambda a: a

        def convert(a):
            a = flush(a) if a.dtype == np.float32 else a
            done = narrow(rounded(a), dtype)
            return flush(done) if dtype == np.float32 else done

        return elementwise(translation, convert, source, to)
    _only(modifiers, "rn")
    if to == "f16" and int(source[1:]) == 64:
        raise Unsupported("64-bit integers to f16")
    return elementwise(translation, lambda a: a.astype(dtype), source, to)
