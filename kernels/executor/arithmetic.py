"""Arithmetic, bit operations, comparison and selection (PTX ISA 9.7.1, 9.7.3 to 9.7.8).

Integers wrap around. f32 rounds to nearest even. It keeps subnormal numbers unless the instruction
has .ftz, which flushes subnormal operands and results to zero. fma rounds once. f16 and bf16 are
computed in f64, which holds their products and sums, and rounded once.

Approximate functions are computed almost exactly. On a GPU tanh.approx has a relative error of
2^-11, div.approx and div.full one of 2 ulp, and sin.approx and cos.approx an absolute error of
2^-20.9 within [-pi, pi] and no bound beyond. An op that needs higher accuracy is not detected.
"""

import operator
from typing import Any

import numpy as np

from kernels.executor.accesses import registers_in
from kernels.executor.formats import decode, encode, flush_subnormals, fused_multiply_add
from kernels.executor.operands import (
    DTYPES,
    PACKED,
    Step,
    Translation,
    Unsupported,
    elementwise,
    instruction,
    is_float,
)


def _floats(translation: Translation, compute, *known: str) -> Step:
    """Translate a floating-point instruction. `compute` gets f32 arrays for f32, else f64."""
    if "f32" in translation.parts[1:-1]:
        return _mixed(translation, compute)
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
        raise Unsupported(f".ftz of .{kind} is not supported")
    bits = PACKED.get(kind, "b16")

    def narrow(*arrays):
        size = max(map(len, arrays))
        wide = [decode(np.broadcast_to(a, size), kind).astype(np.float64) for a in arrays]
        return encode(compute(*wide), kind).view(DTYPES[bits])

    return elementwise(translation, narrow, bits)


def _mixed(translation: Translation, compute) -> Step:
    """Mixed-precision add, sub and fma (9.7.5), computed in f32. All operands are f16 or bf16, only
    the last one is f32."""
    translation.expect("rn", "f32")
    kind = translation.kind
    if kind not in ("f16", "bf16"):
        raise Unsupported(f".f32.{kind} is not supported")
    narrow = len(translation.operands) - 2

    def mixed(*arrays):
        wide = [decode(one, kind) for one in arrays[:-1]]
        return compute(*wide, arrays[-1]).astype(np.float32)

    return elementwise(translation, mixed, [*[kind] * narrow, "f32"], "f32")


_ARITHMETIC = {"add": operator.add, "sub": operator.sub, "neg": operator.neg, "abs": np.abs}


@instruction(*_ARITHMETIC)
def _arithmetic(translation: Translation) -> Step:
    """Opcodes that take integers or floating-point numbers."""
    compute = _ARITHMETIC[translation.parts[0]]
    if is_float(translation.kind):
        return _floats(translation, compute)
    translation.expect("lo")
    return elementwise(translation, compute, translation.kind)


def _doubled(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


def _high_half(kind: str):
    """Function for mul.hi: the upper half of the product, for types of up to 64 bits."""
    width = int(kind[1:])
    if width < 64:
        wide = DTYPES[_doubled(kind)]
        return lambda a, b: ((a.astype(wide) * b.astype(wide)) >> wide(width)).astype(DTYPES[kind])

    def exact(a, b):
        product = (a.astype(object) * b.astype(object)) >> width
        return np.array(product & (2**64 - 1), np.uint64).view(DTYPES[kind])

    return exact


@instruction("mul", "mad")
def _mul(translation: Translation) -> Step:
    kind, adds = translation.kind, translation.parts[0] == "mad"
    if is_float(kind):
        return _floats(translation, operator.mul)
    if "cc" in translation.parts:
        return _mad_with_carry(translation)
    if "hi" in translation.parts and not adds:
        return elementwise(translation, _high_half(kind), kind)
    translation.expect("lo", "wide")
    result = _doubled(kind) if "wide" in translation.parts else kind
    dtype = DTYPES[result]

    def multiply(a, b, *added):
        product = a.astype(dtype, copy=False) * b.astype(dtype, copy=False)
        return product + added[0] if adds else product

    return elementwise(translation, multiply, [kind, kind, *[result] * adds], result)


@instruction("madc")
def _mad_with_carry(translation: Translation) -> Step:
    """Multiply-add that sets the carry (.cc), or adds it (madc) (9.7.2); only of u32."""
    half, carry = translation.one_of(("lo", "hi")), translation.program.carry
    translation.expect(half, "cc")
    if translation.kind != "u32":
        raise Unsupported(f"a carry of .{translation.kind}")
    target, *sources = translation.operands
    reads = [translation.read(source, "u32") for source in sources]
    write = translation.write(target, "u32")
    added = translation.read(carry, "pred") if translation.parts[0] == "madc" else None
    set_carry = translation.write(carry if "cc" in translation.parts else "_", "pred")

    def step(batch, mask):
        a, b, c = (read(batch).astype(np.uint64) for read in reads)
        product = a * b >> np.uint64(32) if half == "hi" else (a * b).astype(np.uint32)
        total = product + c + (0 if added is None else added(batch).astype(np.uint64))
        write(batch, mask, total.astype(np.uint32))
        set_carry(batch, mask, total >= 2**32)

    return step


@instruction("fma")
def _fma(translation: Translation) -> Step:
    if "f32" in translation.parts or translation.kind == "f64":
        return _floats(translation, fused_multiply_add)
    return _floats(translation, lambda a, b, c: a * b + c)


def _divide(a: np.ndarray, b: np.ndarray, remainder: bool) -> np.ndarray:
    """The quotient rounded towards zero, or the remainder. Division by zero is undefined in PTX;
    here the quotient is all ones and the remainder is the dividend."""
    by_zero = b == 0
    b = np.where(by_zero, b.dtype.type(1), b)
    if remainder:
        return np.where(by_zero, a, np.fmod(a, b))
    multiple = a - np.fmod(a, b) if a.dtype.kind == "i" else a  # // alone would round down
    return np.where(by_zero, ~a.dtype.type(0), multiple // b)


@instruction("div", "rem")
def _div(translation: Translation) -> Step:
    kind, remainder = translation.kind, translation.parts[0] == "rem"
    if is_float(kind):
        return _floats(translation, operator.truediv)
    target, dividend, divisor = translation.operands
    dividend, divisor = translation.read(dividend, kind), translation.read(divisor, kind)
    write = translation.write(target, kind)

    def divide(batch, mask):
        by = divisor(batch)
        write(batch, mask, _divide(dividend(batch), by, remainder))
        if not by.all():
            batch.undefine(target, batch.full(by == 0) & batch.every(mask), "division by zero")

    return divide


_EXTREMA = {"min": (np.minimum, np.fmin), "max": (np.maximum, np.fmax)}


@instruction(*_EXTREMA)
def _extremum(translation: Translation) -> Step:
    """Minimum and maximum (9.7.3.11, 9.7.3.12). The result is NaN if both operands are, with .NaN
    if one is. -0 is less than +0."""
    kind, (propagating, ignoring) = translation.kind, _EXTREMA[translation.parts[0]]  # a NaN
    if not is_float(kind):
        translation.expect("relu")
        if "relu" in translation.parts:  # clamps negative results to 0
            return elementwise(translation, lambda a, b: np.maximum(propagating(a, b), 0), kind)
        return elementwise(translation, propagating, kind)
    choose = propagating if "NaN" in translation.parts else ignoring
    sign = 1 if translation.parts[0] == "max" else -1

    def compute(first, *others):
        for other in others:  # one, or two from sm_100 on
            chosen = choose(first, other)
            if (zero := chosen == 0).any():
                # max gives +0 unless both are -0, min gives -0 unless both are +0.
                both = zero & (first == 0) & (other == 0)
                chosen = np.where(both, sign * (sign * first + sign * other), chosen)
            first = chosen
        return first

    return _floats(translation, compute, "NaN")


_FUNCTIONS: dict[str, Any] = {"ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "tanh": np.tanh}
_FUNCTIONS |= {"sin": np.sin, "cos": np.cos, "rcp": np.reciprocal}
_FUNCTIONS |= {"rsqrt": lambda a: np.reciprocal(np.sqrt(a))}


@instruction(*_FUNCTIONS)
def _function(translation: Translation) -> Step:
    return _floats(translation, _FUNCTIONS[translation.parts[0]])


_BITWISE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.invert}


@instruction(*_BITWISE)
def _bitwise(translation: Translation) -> Step:
    translation.expect()
    return elementwise(translation, _BITWISE[translation.parts[0]], translation.kind)


@instruction("shl", "shr")
def _shift(translation: Translation) -> Step:
    """Shifts. PTX clamps the amount to the width (9.7.8.7, 9.7.8.8). In Triton a shift by the width
    or more is undefined."""
    translation.expect()
    kind, left = translation.kind, translation.parts[0] == "shl"
    dtype = np.dtype(DTYPES[kind])
    width = dtype.itemsize * 8
    target, value, amount = translation.operands
    value, amount = translation.read(value, kind), translation.read(amount, "u32")
    write = translation.write(target, kind)

    def shift(batch, mask):
        a, by = value(batch), amount(batch)
        beyond, clamped = by >= width, np.minimum(by, np.uint32(width - 1)).astype(dtype)
        shifted = a << clamped if left else a >> clamped
        if not beyond.any():
            write(batch, mask, shifted)
            return
        all_shifted_out = a >> dtype.type(width - 1) if kind[0] == "s" else dtype.type(0)
        write(batch, mask, np.where(beyond, all_shifted_out, shifted))
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


@instruction("bfe", "bfi")
def _bit_field(translation: Translation) -> Step:
    """Extract a bit field, sign-extended for signed types, or insert the low bits of the first
    number into the second (9.7.1.22, 9.7.1.23)."""
    kind, inserts = translation.kind, translation.parts[0] == "bfi"
    width = int(kind[1:])

    def apply(a, *others):
        *into, at, size = others
        at, size = ((x & np.uint32(255)).astype(a.dtype) for x in (at, size))
        shift, unused = np.minimum(at, width - 1), width - np.clip(size, 1, width)
        empty = (size == 0) | (kind[0] != "s") & (at >= width)
        if not inserts:
            return np.where(empty, 0, a >> shift << unused >> unused)
        ones = np.where(empty, 0, ~a.dtype.type(0) >> unused)
        return into[0] & ~(ones << shift) | (a & ones) << shift

    return elementwise(translation, apply, [kind] * (1 + inserts) + ["u32"] * 2)


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
        for number in range(4):
            selector = selectors >> np.uint32(4 * number)
            shift = (selector & np.uint32(7)).astype(np.uint64) * np.uint64(8)
            byte = ((both >> shift) & np.uint64(255)).astype(np.uint32)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            byte = np.where(selector & np.uint32(8), sign, byte)
            result = result | (byte << np.uint32(8 * number))
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
    # With a NaN, comparisons whose name ends in "u" are true. All else is false, also "ne" (9.7.6).
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
    """Compare, and optionally combine the result with a predicate (9.7.7.2). A second target gets
    the result of the upper halves, or the opposite."""
    kind, name = translation.kind, translation.parts[1]
    element = kind.removesuffix("x2")
    least_normal = {"f16": 2.0**-14, "f32": 2.0**-126}.get(element)
    translation.expect(name, *_COMBINATIONS, *["ftz"] * (least_normal is not None))
    compare = _COMPARISONS[name]
    if is_float(kind) and name == "ne":
        compare = lambda a, b: (a < b) | (a > b)  # noqa: E731
    targets, first, second, *combined_with = translation.operands
    first, second = translation.read(first, kind), translation.read(second, kind)
    combine = _COMBINATIONS[translation.one_of(_COMBINATIONS)] if combined_with else None
    thirds = [translation.read(operand, "pred") for operand in combined_with]
    writes = [translation.write(target, "pred") for target in registers_in(targets)]
    narrow, ftz = element in ("f16", "bf16"), "ftz" in translation.parts

    def numbers(read, batch):
        a = decode(read(batch), kind) if narrow else read(batch)
        a = np.where(np.abs(a) < least_normal, 0, a) if ftz else a
        return a if kind == element else a.reshape(-1, 2).T

    def set_predicates(batch, mask):
        holds = compare(numbers(first, batch), numbers(second, batch))
        if kind == element:
            holds = (holds, ~holds) if len(writes) > 1 else (holds,)
        for write, one in zip(writes, holds, strict=False):
            write(batch, mask, combine(one, thirds[0](batch)) if combine else one)

    return set_predicates


@instruction("selp")
def _selp(translation: Translation) -> Step:
    translation.expect()
    kind = translation.kind
    return elementwise(translation, lambda a, b, p: np.where(p, a, b), [kind, kind, "pred"])
