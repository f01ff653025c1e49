"""Bit operations, comparison and selection (PTX ISA 9.7.1.22-23, 9.7.6-8)."""

from __future__ import annotations

import operator

import numpy as np

from kernels.executor.formats import decode, flush_subnormals
from kernels.executor.operands import (
    DTYPES,
    Step,
    Translation,
    Unsupported,
    elementwise,
    instruction,
    is_float,
)


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
    """Shifts. PTX clamps the amount to the width (9.7.8.7, 9.7.8.8). In Triton a shift by the width
    or more is undefined."""
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
        beyond = by >= width
        if not beyond.any():
            write(batch, mask, a << by.astype(dtype) if left else a >> by.astype(dtype))
            return
        clamped = np.minimum(by, np.uint32(width - 1)).astype(dtype)
        past = (a >> most) if kind[0] == "s" else dtype.type(0)
        done = a << clamped if left else a >> clamped
        write(batch, mask, np.where(beyond, past, done))
        wrong = batch.full(beyond) & batch.every(mask)
        batch.undefine(target, wrong, f"a shift of {width} bits by {by.max()}")

    return shift


@instruction("shf")
def _funnel_shift(translation: Translation) -> Step:
    """Funnel shift (9.7.8.9): the upper (.l) or lower (.r) word of b:a shifted by an amount that is
    taken modulo 32 (.wrap)."""
    left = translation.one_of(("l", "r")) == "l"
    translation.expect("l", "r", translation.one_of(("wrap",)))

    def shift(low, high, by):
        by = (by & np.uint32(31)).astype(np.uint64)
        both = high.astype(np.uint64) << np.uint64(32) | low
        return (both << by >> np.uint64(32) if left else both >> by).astype(np.uint32)

    return elementwise(translation, shift, "b32")


@instruction("bfe")
def _bfe(translation: Translation) -> Step:
    """Extract a bit field (9.7.1.22), sign-extended for signed types. 32 bits only."""
    kind = translation.kind
    width = int(kind[1:])
    if width == 64:
        raise Unsupported("only fields of 32-bit numbers are supported")

    def extract(a, start, length):
        a, at, size = (
            a.astype(np.int64),
            start.astype(np.int64) & 255,
            length.astype(np.int64) & 255,
        )
        top = np.minimum(at + size - 1, 31)
        sign = (kind[0] == "s") & (size > 0) & (a >> np.maximum(top, 0) & 1 == 1)
        size = np.minimum(size, 32)
        held = np.clip(32 - at, 0, size)  # bits beyond the top repeat the sign
        present = a >> np.minimum(at, 32) & ((np.int64(1) << held) - 1)
        return np.where(sign, present | -1 << held, present).astype(np.uint32)

    return elementwise(translation, extract, "u32")


@instruction("lop3")
def _lop3(translation: Translation) -> Step:
    """Any logical function of three bits (9.7.8.6). Bit 4a + 2b + c of the table is the result."""
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
    """Pick four of eight bytes, or replicate their signs (9.7.9.7). Default mode only."""
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


@instruction("popc")
def _count_bits(translation: Translation) -> Step:
    count = lambda a: np.bitwise_count(a).astype(np.uint32)  # noqa: E731
    return elementwise(translation, count, translation.kind, "u32")


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
    # Floating point: a NaN makes comparisons with "u" true, the others false, also "ne" (9.7.6).
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
    """Compare, and optionally combine the result with a predicate (9.7.7.2)."""
    kind, name = translation.kind, translation.parts[1]
    translation.expect(name, *_COMBINATIONS, *["ftz"] * (kind == "f32"))
    if kind.endswith("x2"):
        raise Unsupported(f"packed numbers: .{kind}")
    compare = _COMPARISONS[name]
    if is_float(kind) and name == "ne":
        compare = lambda a, b: (a < b) | (a > b)  # noqa: E731
    target, first, second, *third = translation.operands
    first, second = translation.read(first, kind), translation.read(second, kind)
    combine = _COMBINATIONS[translation.one_of(_COMBINATIONS)] if third else None
    third = translation.read(third[0], "pred") if third else None
    write = translation.write(target, "pred")
    convert = lambda a: a  # noqa: E731
    if kind == "bf16":
        convert = lambda bits: decode(bits, kind)  # noqa: E731
    if "ftz" in translation.parts:
        convert = flush_subnormals

    def set_predicate(batch, mask):
        holds = compare(convert(first(batch)), convert(second(batch)))
        write(batch, mask, holds if combine is None else combine(holds, third(batch)))

    return set_predicate


@instruction("selp")
def _selp(translation: Translation) -> Step:
    translation.expect()
    kind = translation.kind
    return elementwise(translation, lambda a, b, p: np.where(p, a, b), [kind, kind, "pred"])
