"""mov, cvt and what packs numbers into registers (PTX ISA 9.7.9)."""

from __future__ import annotations

import numpy as np

from kernels.executor.formats import decode, encode, flush_subnormals
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
    if to == "tf32":  # to nearest, ties away from zero
        _only(modifiers, "rna")
        return elementwise(
            translation,
            lambda a: (a + np.uint32(0x1000)) & np.uint32(0xFFFFE000),
            "b32",
        )
    if to in PACKED or source in PACKED:
        return _recode(translation, modifiers, to, source)
    return _cvt_number(translation, modifiers, to, source)


def _only(modifiers: list[str], *known: str) -> None:
    for modifier in modifiers:
        if modifier not in known:
            raise Unsupported(f".{modifier} is not supported")


_RECODED = {
    "f32": {"f16x2", "bf16x2", "e4m3x2", "e5m2x2", "bf16"},
    "f16": {"bf16"},
    "bf16": {"f32", "f64"},
    "f16x2": {"e4m3x2", "e5m2x2"},
    "bf16x2": {"e4m3x2", "e5m2x2"},
    "e4m3x2": {"f16x2"},
    "e5m2x2": {"f16x2"},
}
"""Source type to the types that it is converted to."""


def _recode(translation: Translation, modifiers: list[str], to: str, source: str) -> Step:
    """Between numbers or packed pairs. Of two sources the first goes to the upper half."""
    to_f8, is_pair = to[0] == "e", len(translation.operands) == 3
    _only(modifiers, "rn", *["satfinite"] * to_f8)
    if to_f8 and "satfinite" not in modifiers:
        raise Unsupported("expected .satfinite")
    packs = to.endswith("x2") and not source.endswith("x2")
    if to not in _RECODED.get(source, ()) or is_pair != packs:
        raise Unsupported(f".{source} to .{to}")
    result = PACKED.get(to, to)

    def convert(*given):
        numbers = np.stack(np.broadcast_arrays(*reversed(given)), 1)
        return encode(decode(numbers, source).reshape(-1), to).view(DTYPES[result])

    return elementwise(translation, convert, PACKED.get(source, source), result)


def _cvt_number(translation: Translation, modifiers: list[str], to: str, source: str) -> Step:
    """Between integers and f16, f32, f64 (9.7.9.21): integers from floats saturate; NaN gives
    0, or if f64 or 64-bit integers are involved the upper bit alone;
    integers to narrower ones keep the low bits unless .sat."""
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
        _only(modifiers, "rn", "ftz", *_TO_INTEGER)
        rounded = next((_TO_INTEGER[m] for m in modifiers if m in _TO_INTEGER), lambda a: a)
        flush = flush_subnormals if "ftz" in modifiers else lambda a: a

        def convert(a):
            a = flush(a) if a.dtype == np.float32 else a
            done = rounded(a).astype(dtype)
            return flush(done) if dtype == np.float32 else done

        return elementwise(translation, convert, source, to)
    _only(modifiers, "rn")
    if to == "f16" and int(source[1:]) == 64:
        raise Unsupported("64-bit integers to f16")
    return elementwise(translation, lambda a: a.astype(dtype), source, to)
