"""mov and cvt, with packed pairs (PTX ISA 9.7.9)."""

import numpy as np

from kernels.executor.accesses import registers_in
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
    if not isinstance(target, tuple) and not isinstance(source, tuple):
        return elementwise(translation, lambda a: a, kind)
    targets, sources = registers_in(target), registers_in(source)
    width = int(kind[1:])
    from_kind, to_kind = f"b{width // len(sources)}", f"b{width // len(targets)}"
    reads = [translation.read(one, from_kind) for one in sources]
    writes = [translation.write(one, to_kind) for one in targets]

    def move(batch, mask):
        given = np.broadcast_arrays(*[read(batch) for read in reads])
        pieces = np.stack(given, 1).view(DTYPES[to_kind]).reshape(-1, len(writes))
        for number, write in enumerate(writes):
            write(batch, mask, np.ascontiguousarray(pieces[:, number]))

    return move


@instruction("cvta")
def _cvta(translation: Translation) -> Step:
    """A generic address equals the global, local or parameter's; shared memory is not supported."""
    if not {"global", "local", "param"} & {*translation.parts}:
        raise Unsupported("only addresses of global and local memory and of parameters")
    return elementwise(translation, lambda a: a, translation.kind)


@instruction("cvt")
def _cvt(translation: Translation) -> Step:
    *modifiers, to, source = translation.parts[1:]
    if to == "tf32":  # to nearest, ties away from zero
        translation.expect("rna", to)
        return elementwise(
            translation, lambda a: (a + np.uint32(0x1000)) & np.uint32(0xFFFFE000), "b32"
        )
    if {to, source} <= _FLOATS | PACKED.keys():
        return _cvt_float(translation, to, source)
    if source in _FLOATS:
        return _cvt_to_integer(translation, modifiers, to, source)
    translation.expect("rn", to)
    if to not in DTYPES or (to == "f16" and int(source[1:]) == 64):
        raise Unsupported(f".{source} to .{to}")
    return elementwise(translation, lambda a: a.astype(DTYPES[to]), source, to)


_FLOATS = {"f16", "bf16", "f32", "f64"}
_PAIRS = {"f32": {"f16x2", "bf16x2", "e4m3x2", "e5m2x2"}, "f16x2": {"e4m3x2", "e5m2x2"}}
_PAIRS |= {"bf16x2": _PAIRS["f16x2"], "e4m3x2": {"f16x2"}, "e5m2x2": {"f16x2"}}
"""Source type to the packed pairs that it is converted to."""


def _cvt_float(translation: Translation, to: str, source: str) -> Step:
    """Between floating-point types or packed pairs (9.7.9.21). Of two sources the first goes to the
    upper half."""
    to_f8, is_pair = to[0] == "e", len(translation.operands) == 3
    packs = to.endswith("x2") and not source.endswith("x2")
    known = _PAIRS.get(source, ()) if to not in _FLOATS else _FLOATS if source in _FLOATS else ()
    if to not in known or is_pair != packs or to_f8 != ("satfinite" in translation.parts):
        raise Unsupported(f".{source} to .{to}")
    plain = {"ftz", *_TO_INTEGER} if to in _FLOATS else {"satfinite"}
    translation.expect("rn", *plain, to)
    rounded = _TO_INTEGER.get(translation.one_of(_TO_INTEGER, default=""), lambda a: a)
    flush = flush_subnormals if "ftz" in translation.parts else lambda a: a
    result = PACKED.get(to, to)

    def convert(*given):
        numbers = np.stack(np.broadcast_arrays(*reversed(given)), 1)
        done = encode(rounded(flush(decode(numbers, source).reshape(-1))), to)
        return (flush(done) if to == "f32" else done).view(DTYPES[result])

    return elementwise(translation, convert, PACKED.get(source, source), result)


def _cvt_to_integer(translation: Translation, modifiers: list[str], to: str, source: str) -> Step:
    """Integers from f16, f32, f64 (9.7.9.21): they saturate; NaN gives 0, or if f64 or 64-bit
    integers are involved the upper bit alone."""
    translation.expect("ftz", *_TO_INTEGER, to)
    dtype, rounded = DTYPES[to], _TO_INTEGER[translation.one_of(_TO_INTEGER)]
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
