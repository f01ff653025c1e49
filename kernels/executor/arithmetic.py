"""Integer and floating-point arithmetic (PTX ISA 9.7.1, 9.7.3 to 9.7.5).

Integers wrap around. f32 rounds to nearest even. It keeps subnormal numbers unless the instruction
has .ftz, which flushes subnormal operands and results to zero. fma rounds once. f16 and bf16 are
computed in f64, which holds their products and sums, and rounded once.

Approximate functions (ex2, lg2, rcp, rsqrt, sqrt.approx, div.full, div.approx, tanh) are computed
almost exactly, well within the error bound of the ISA. The last bits on a GPU may differ. On a GPU
tanh.approx has a relative error of 2^-11. sin.approx and cos.approx have an absolute error of
2^-20.9 within [-pi, pi] and no bound beyond. div.approx and div.full have an error of 2 ulp. The
executor does not detect an op that needs higher accuracy.
"""

from __future__ import annotations

import operator

import numpy as np

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
        n = max(map(len, arrays))
        wide = [decode(np.broadcast_to(a, n), kind).astype(np.float64) for a in arrays]
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


def _arithmetic(integer, floating):
    """Translator for an opcode that takes integers or floating-point numbers."""

    def translate(translation: Translation) -> Step:
        if is_float(translation.kind):
            return _floats(translation, floating)
        translation.expect("lo")
        return elementwise(translation, integer, translation.kind)

    return translate


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


instruction("add")(_arithmetic(operator.add, operator.add))
instruction("sub")(_arithmetic(operator.sub, operator.sub))
instruction("neg")(_arithmetic(operator.neg, operator.neg))
instruction("abs")(_arithmetic(np.abs, np.abs))


@instruction("mul")
def _mul(translation: Translation) -> Step:
    kind = translation.kind
    if is_float(kind):
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
    if "cc" in translation.parts:
        return _mad_with_carry(translation)
    if "wide" not in translation.parts:
        translation.expect("lo")
        return elementwise(translation, lambda a, b, c: a * b + c, kind)
    translation.expect("wide")
    wide = DTYPES[_doubled(kind)]
    return elementwise(
        translation,
        lambda a, b, c: a.astype(wide) * b.astype(wide) + c,
        [kind, kind, _doubled(kind)],
        _doubled(kind),
    )


@instruction("madc")
def _mad_with_carry(translation: Translation) -> Step:
    """Multiply-add that sets the carry (.cc), or adds it (madc) (9.7.2); only of u32."""
    half, carry = translation.one_of(("lo", "hi")), translation.program.carry
    translation.expect(half, "cc")
    if translation.kind != "u32":
        raise Unsupported(f"a carry of .{translation.kind}")
    target, *sources = translation.operands
    reads, write = (
        [translation.read(one, "u32") for one in sources],
        translation.write(target, "u32"),
    )
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


def _divide(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(quotient rounded towards zero, remainder). Division by zero is undefined in PTX; here the
    quotient is all ones and the remainder is the dividend."""
    by_zero = b == 0
    b = np.where(by_zero, b.dtype.type(1), b)
    quotient = a // b
    if a.dtype.kind == "i":  # floor division; add 1 if the signs differ and it is inexact
        quotient = quotient + ((quotient * b != a) & ((a < 0) != (b < 0))).astype(a.dtype)
    quotient = np.where(by_zero, ~a.dtype.type(0), quotient)
    return quotient, np.where(by_zero, a, a - quotient * b)


@instruction("div", "rem")
def _div(translation: Translation) -> Step:
    kind, part = translation.kind, int(translation.parts[0] == "rem")
    if is_float(kind):
        return _floats(translation, operator.truediv)
    target, dividend, divisor = translation.operands
    dividend, divisor = translation.read(dividend, kind), translation.read(divisor, kind)
    write = translation.write(target, kind)

    def divide(batch, mask):
        by = divisor(batch)
        write(batch, mask, _divide(dividend(batch), by)[part])
        if not by.all():
            batch.undefine(target, batch.full(by == 0) & batch.every(mask), "division by zero")

    return divide


def _extremum(integer, ignoring_nan):
    """Translator for min or max (9.7.3.11, 9.7.3.12). If one operand is NaN, the result is the
    other operand, or with .NaN the NaN. -0 is less than +0."""
    sign = 1 if integer is np.maximum else -1

    def translate(translation: Translation) -> Step:
        if not is_float(translation.kind):
            translation.expect("relu")
            if "relu" in translation.parts:  # clamps negative results to 0
                return elementwise(
                    translation, lambda a, b: np.maximum(integer(a, b), 0), translation.kind
                )
            return elementwise(translation, integer, translation.kind)
        choose = integer if "NaN" in translation.parts else ignoring_nan

        def compute(first, *others):
            for other in others:  # one more, or two from sm_100 on
                chosen = choose(first, other)
                if (zero := chosen == 0).any():
                    # max gives +0 unless both are -0, min gives -0 unless both are +0.
                    both = zero & (first == 0) & (other == 0)
                    chosen = np.where(both, sign * (sign * first + sign * other), chosen)
                first = chosen
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
