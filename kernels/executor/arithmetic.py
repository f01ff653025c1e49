"""Integer, logic, comparison and floating-point instructions (PTX ISA 9.7.1 to 9.7.8).

Integers wrap around. f32 rounds to nearest even and keeps subnormal numbers unless the instruction
says .ftz, which takes and gives subnormal numbers as zeros. The approximations (ex2, lg2, rcp, rsqrt,
sqrt.approx, div.full, div.approx, tanh) are given nearly exactly, well within the error that the ISA
allows a GPU; a GPU's last bits may differ. fma rounds once. f16 and bf16 are computed in f64, which
holds their products and sums, and rounded once.
"""

from __future__ import annotations

import operator

import numpy as np

from kernels.executor.formats import (
    bf16_to_f32,
    f32_to_bf16,
    flush_subnormals,
    fused_multiply_add,
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


def _is_float(kind: str) -> bool:
    return "f" in kind


def _floats(translation: Translation, compute, *known: str) -> Step:
    """A floating-point instruction; `compute` gets f32, f64, or for narrower types f64 arrays."""
    translation.expect("rn", "ftz", "approx", "full", *known)
    kind = translation.kind
    if kind == "f64":
        return elementwise(translation, compute, kind)
    if kind == "f32":
        if "ftz" not in translation.parts:
            return elementwise(translation, lambda *a: compute(*a).astype(np.float32), kind)
        return elementwise(
            translation,
            lambda *a: flush_subnormals(compute(*map(flush_subnormals, a)).astype(np.float32)),
            kind,
        )
    if "ftz" in translation.parts:
        raise Unsupported(f".ftz of .{kind} is not known")
    bits = PACKED.get(kind, "b16")

    def narrow(*arrays):
        n = max(map(len, arrays))
        dtype = {"bf16": np.uint16, "bf16x2": np.uint16, "f32x2": np.float32}.get(kind, np.float16)
        values = [np.broadcast_to(a, n).copy().view(dtype) for a in arrays]
        if dtype == np.uint16:
            done = compute(*[bf16_to_f32(value).astype(np.float64) for value in values])
            return f32_to_bf16(done).view(DTYPES[bits])
        done = compute(*[value.astype(np.float64) for value in values])
        return done.astype(dtype).view(DTYPES[bits])

    return elementwise(translation, narrow, bits)


def _arithmetic(integer, floating):
    """Translator of an opcode for integers and floating-point numbers alike."""

    def translate(translation: Translation) -> Step:
        if _is_float(translation.kind):
            return _floats(translation, floating)
        translation.expect("lo")
        return elementwise(translation, integer, translation.kind)

    return translate


def _doubled(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


def _high_half(kind: str):
    """The upper half of a product, for types of up to 64 bits."""
    width = int(kind[1:])
    if width < 64:
        wide = DTYPES[_doubled(kind)]
        return lambda a, b: ((a.astype(wide) * b.astype(wide)) >> wide(width)).astype(DTYPES[kind])

    def exact(a, b):
        product = (a.astype(object) * b.astype(object)) >> width
        return np.array(product & (2**64 - 1), np.uint64).view(DTYPES[kind])

    return exact


instruction("add")(_arithmetic(operator.add, operator.add))
instruction("sub")(_arithmetic(operator.sub, operator.sub))
instruction("neg")(_arithmetic(operator.neg, operator.neg))
instruction("abs")(_arithmetic(np.abs, np.abs))


@instruction("mul")
def _mul(translation: Translation) -> Step:
    kind = translation.kind
    if _is_float(kind):
        return _floats(translation, operator.mul)
    if "wide" in translation.parts:
        wide = DTYPES[_doubled(kind)]
        return elementwise(
            translation, lambda a, b: a.astype(wide) * b.astype(wide), kind, _doubled(kind)
        )
    if "hi" in translation.parts:
        return elementwise(translation, _high_half(kind), kind)
    translation.expect("lo")
    return elementwise(translation, operator.mul, kind)


@instruction("mad")
def _mad(translation: Translation) -> Step:
    kind = translation.kind
    if "wide" not in translation.parts:
        translation.expect("lo")
        return elementwise(translation, lambda a, b, c: a * b + c, kind)
    translation.expect("wide")
    wide = DTYPES[_doubled(kind)]
    target, *factors, addend = translation.operands
    first, second = (translation.read(factor, kind) for factor in factors)
    third, write = (
        translation.read(addend, _doubled(kind)),
        translation.write(target, _doubled(kind)),
    )
    return lambda batch, mask: write(
        batch, mask, first(batch).astype(wide) * second(batch).astype(wide) + third(batch)
    )


@instruction("fma")
def _fma(translation: Translation) -> Step:
    if translation.kind == "f32":
        return _floats(translation, fused_multiply_add)
    if translation.kind == "f64":
        raise Unsupported("fused products in f64")
    return _floats(translation, lambda a, b, c: a * b + c)


def _divide(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quotient towards zero and remainder; by zero, all ones and the dividend (undefined in PTX)."""
    by_zero = b == 0
    b = np.where(by_zero, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        quotient = a // b
    else:  # floor division, mended where signs differ and it is not exact
        quotient = a // b
        quotient = quotient + ((quotient * b != a) & ((a < 0) != (b < 0))).astype(a.dtype)
    quotient = np.where(by_zero, ~a.dtype.type(0), quotient)
    return quotient, np.where(by_zero, a, a - quotient * b)


@instruction("div")
def _div(translation: Translation) -> Step:
    if _is_float(translation.kind):
        return _floats(translation, operator.truediv)
    return elementwise(translation, lambda a, b: _divide(a, b)[0], translation.kind)


@instruction("rem")
def _rem(translation: Translation) -> Step:
    return elementwise(translation, lambda a, b: _divide(a, b)[1], translation.kind)


def _extremum(integer, ignoring_nan):
    """min and max: of a NaN and a number the number, with .NaN the NaN (9.7.3.11, 9.7.3.12)."""

    def translate(translation: Translation) -> Step:
        if not _is_float(translation.kind):
            translation.expect("relu")
            if "relu" in translation.parts:  # negative results become 0
                return elementwise(
                    translation, lambda a, b: np.maximum(integer(a, b), 0), translation.kind
                )
            return elementwise(translation, integer, translation.kind)
        choose = integer if "NaN" in translation.parts else ignoring_nan

        def compute(first, *others):
            for other in others:  # two or, from sm_100 on, three
                first = choose(first, other)
            return first

        return _floats(translation, compute, "NaN")

    return translate


instruction("min")(_extremum(np.minimum, np.fmin))
instruction("max")(_extremum(np.maximum, np.fmax))


def _function(compute):
    return lambda translation: _floats(translation, compute)


instruction("ex2")(_function(np.exp2))
instruction("lg2")(_function(np.log2))
instruction("rcp")(_function(lambda a: 1 / a))
instruction("sqrt")(_function(np.sqrt))
instruction("rsqrt")(_function(lambda a: 1 / np.sqrt(a)))
instruction("tanh")(_function(np.tanh))
instruction("sin")(_function(np.sin))
instruction("cos")(_function(np.cos))


# ------------------------------------------------------------------------- bits


def _bitwise(compute):
    def translate(translation: Translation) -> Step:
        translation.expect()
        return elementwise(translation, compute, translation.kind)

    return translate


instruction("and")(_bitwise(operator.and_))
instruction("or")(_bitwise(operator.or_))
instruction("xor")(_bitwise(operator.xor))
instruction("not")(_bitwise(operator.invert))


@instruction("shl", "shr")
def _shift(translation: Translation) -> Step:
    """Shifts; an amount beyond the width counts as the width (9.7.8.7, 9.7.8.8)."""
    translation.expect()
    kind, left = translation.kind, translation.parts[0] == "shl"
    dtype = np.dtype(DTYPES[kind])
    width = dtype.itemsize * 8
    most = dtype.type(width - 1)
    target, value, amount = translation.operands
    value, amount = translation.read(value, kind), translation.read(amount, "u32")
    write = translation.write(target, kind)

    def shift(batch, mask):
        a, by = value(batch), amount(batch)
        clamped = np.minimum(by, np.uint32(width - 1)).astype(dtype)
        if left:
            done = np.where(by < width, a << clamped, dtype.type(0))
        else:
            done = np.where(
                by < width, a >> clamped, (a >> most) if kind[0] == "s" else dtype.type(0)
            )
        write(batch, mask, done)

    return shift


@instruction("bfe")
def _bfe(translation: Translation) -> Step:
    """Extract a field, its sign extended for signed types (9.7.1.22); 32 and 64 bits."""
    kind = translation.kind
    width = int(kind[1:])
    target, value, start, length = translation.operands
    value = translation.read(value, f"u{width}")
    start, length = translation.read(start, "u32"), translation.read(length, "u32")
    write = translation.write(target, f"b{width}")
    if width == 64:
        raise Unsupported("fields of 64-bit numbers")

    def extract(batch, mask):
        a = value(batch).astype(np.int64)
        at, size = start(batch).astype(np.int64) & 255, length(batch).astype(np.int64) & 255
        if kind[0] == "s":
            a = a.astype(np.uint32).view(np.int32).astype(np.int64)
            top = np.minimum(at + size - 1, width - 1)
            sign = np.where(size > 0, a >> top & 1, 0)
        else:
            sign = np.zeros_like(a)
        at, size = np.minimum(at, 63), np.minimum(size, 32)
        low = (np.int64(1) << size) - 1
        present = (a & 0xFFFFFFFF) >> at & low
        held = np.clip(width - at, 0, size)  # bits beyond the top repeat the sign
        above = low & ~((np.int64(1) << held) - 1)
        field = present | np.where(sign > 0, above | ~low, 0)
        write(batch, mask, (field & 0xFFFFFFFF).astype(np.uint32))

    return extract


@instruction("bfi")
def _bfi(translation: Translation) -> Step:
    """Insert a field of a into b (9.7.1.23); 32 bits."""
    if translation.kind != "b32":
        raise Unsupported("only fields of 32-bit numbers are known")

    def insert(a, b, start, length):
        start, length = start.astype(np.uint64) & 255, length.astype(np.uint64) & 255
        start, length = np.minimum(start, 63), np.minimum(length, 32)
        field = ((np.uint64(1) << length) - np.uint64(1)) << start
        return ((b & ~field) | ((a.astype(np.uint64) << start) & field)).astype(np.uint32)

    return elementwise(translation, insert, "b32")


@instruction("lop3")
def _lop3(translation: Translation) -> Step:
    """Any function of three bits by its table (9.7.8.6): bit 4a + 2b + c of it is the result."""
    *operands, table = translation.operands
    table = int(table, 0)
    translation.operands = tuple(operands)

    def combine(a, b, c):
        result = np.zeros(max(map(len, (a, b, c))), np.uint32)
        for row in range(8):
            if table >> row & 1:
                chosen = (x if row & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1)))
                first, second, third = chosen
                result = result | (first & second & third)
        return result

    return elementwise(translation, combine, "b32")


@instruction("prmt")
def _prmt(translation: Translation) -> Step:
    """Pick four of eight bytes, or replicate their signs (9.7.9.7); the mode without a name."""
    translation.expect()

    def permute(a, b, selectors):
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        result = np.zeros(max(map(len, (a, b, selectors))), np.uint32)
        for place in range(4):
            selector = selectors >> np.uint32(4 * place)
            shift = (selector & np.uint32(7)).astype(np.uint64) * np.uint64(8)
            byte = ((both >> shift) & np.uint64(255)).astype(np.uint32)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            byte = np.where(selector & np.uint32(8), sign, byte)
            result = result | (byte << np.uint32(8 * place))
        return result

    return elementwise(translation, permute, "b32")


@instruction("popc", "clz", "brev")
def _count_bits(translation: Translation) -> Step:
    width = int(translation.kind[1:])
    count = {
        "popc": lambda x: x.bit_count(),
        "clz": lambda x: width - x.bit_length(),
        "brev": lambda x: int(f"{x:0{width}b}"[::-1], 2),
    }[translation.parts[0]]
    result = f"b{width}" if translation.parts[0] == "brev" else "u32"
    dtype = DTYPES[result]

    def compute(a):
        return np.array([count(int(x)) for x in a], dtype)

    return elementwise(translation, compute, f"b{width}", result)


# ------------------------------------------------------------------ comparisons

_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    # Of floating-point numbers: with u true for a NaN, without false, also "ne" (9.7.6, set).
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": lambda a, b: ~(a == b),
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
_COMBINATIONS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@instruction("setp")
def _setp(translation: Translation) -> Step:
    """Compare, and combine with a predicate if the opcode names how."""
    kind, name = translation.kind, translation.parts[1]
    translation.expect(name, "ftz", *_COMBINATIONS)
    compare = _COMPARISONS[name]
    if _is_float(kind) and name == "ne":
        compare = lambda a, b: (a < b) | (a > b)  # noqa: E731
    target, first, second, *third = translation.operands
    if isinstance(target, tuple):
        raise Unsupported("two destinations")
    source = PACKED.get(kind, kind)
    first, second = translation.read(first, source), translation.read(second, source)
    combine = _COMBINATIONS[translation.one_of(_COMBINATIONS)] if third else None
    third = translation.read(third[0], "pred") if third else None
    write = translation.write(target, "pred")
    convert = {"bf16": bf16_to_f32}.get(kind, lambda a: a)
    if "ftz" in translation.parts:
        convert = flush_subnormals

    def set_predicate(batch, mask):
        holds = compare(convert(first(batch)), convert(second(batch)))
        if combine is not None:
            holds = combine(holds, third(batch))
        write(batch, mask, holds)

    return set_predicate


@instruction("selp")
def _selp(translation: Translation) -> Step:
    translation.expect()
    kind = translation.kind
    target, first, second, predicate = translation.operands
    first, second = translation.read(first, kind), translation.read(second, kind)
    predicate, write = translation.read(predicate, "pred"), translation.write(target, kind)
    return lambda batch, mask: write(
        batch, mask, np.where(predicate(batch), first(batch), second(batch))
    )
