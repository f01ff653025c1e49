"""Tensor-core products of one warp: mma.sync (PTX ISA 9.7.14).

Fragments (figures of 9.7.14.5). Thread 4 g + t of a warp holds:

    A       row g in even registers, row g + 8 in odd registers
    B       column g
    C, D    the elements (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)

A 32-bit register of A or B has 1, 2 or 4 elements along k, starting at t times that number. The
first registers cover the first half of k, the others the second half.

Each term of a product is exact. The terms and the accumulator are added in f64 and rounded once to
f32, which is at least as accurate as any GPU. Truncation in a GPU's adder is not modelled.
"""

from __future__ import annotations

import re

import numba
import numpy as np

from kernels.executor.formats import decode
from kernels.executor.operands import Step, Translation, Unsupported, instruction

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
_SHAPES = {("f16", 8), ("f16", 16), ("bf16", 8), ("bf16", 16), ("tf32", 4), ("tf32", 8)}
_SHAPES |= {("s8", 16), ("s8", 32), ("u8", 16), ("u8", 32)}
_SHAPES |= {("e4m3", 16), ("e4m3", 32), ("e5m2", 16), ("e5m2", 32)}


@numba.njit(cache=True)
def _multiply(a, b, c):
    """d[w] = a[w] @ b[w] + c[w] in f64: [warps, 16, k], [warps, k, 8], [warps, 16, 8]."""
    d = np.empty(c.shape, np.float64)
    totals = np.empty(c.shape[2], np.float64)
    for warp in range(a.shape[0]):
        for row in range(a.shape[1]):
            totals[:] = c[warp, row]
            for k in range(a.shape[2]):
                factor = np.float64(a[warp, row, k])
                for column in range(len(totals)):
                    totals[column] += factor * np.float64(b[warp, k, column])
            d[warp, row] = totals
    return d


ACCUMULATORS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


def check_accumulator(kind: str, a_kind: str, b_kind: str) -> None:
    """Raise Unsupported unless `kind` can accumulate products of `a_kind` and `b_kind`."""
    integers = {a_kind, b_kind} <= {"s8", "u8"}
    allowed = ("s32",) if integers else ("f32", "f16") if a_kind == b_kind == "f16" else ("f32",)
    if kind not in allowed:
        raise Unsupported(f"accumulator .{kind} for .{a_kind} and .{b_kind} is not supported")


def rounded_sum(total: np.ndarray, dtype, saturates: bool = False) -> np.ndarray:
    """Exact f64 sums in the accumulator's dtype. int32 wraps around or saturates."""
    if dtype != np.int32:
        return total.astype(dtype)
    if saturates:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return total.astype(np.int64).astype(np.int32)


def rows_of_a(bits: list[np.ndarray], kind: str) -> np.ndarray:
    """A of each warp, [warps, 16, k], from registers."""
    halves = decode(np.stack(bits), kind).reshape(len(bits) // 2, 2, -1, 8, 128 // BITS[kind])
    return halves.transpose(2, 1, 3, 0, 4).reshape(halves.shape[2], 16, -1)


def rows_of_d(bits: np.ndarray, dtype) -> np.ndarray:
    """C or D of each warp, [warps, 16, n], from registers [.., threads] of one or two numbers."""
    numbers = np.ascontiguousarray(bits.T).view(dtype)
    split = numbers.reshape(
        -1, 8, 4, numbers.shape[1] // 4, 2, 2
    )  # w, g, t, column / 8, half, pair
    return split.transpose(0, 4, 1, 3, 2, 5).reshape(len(split), 16, -1)


def registers_of_d(rows: np.ndarray) -> np.ndarray:
    """The reverse of `rows_of_d`."""
    split = rows.reshape(-1, 2, 8, rows.shape[-1] // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5)
    threads = np.ascontiguousarray(split).reshape(len(split) * 32, -1)
    return np.ascontiguousarray(threads.view(np.uint32).T)


@instruction("mma")
def _mma(translation: Translation) -> Step:
    pattern = r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(?:\.satfinite)?\.(\w+)\.(\w+)\.(\w+)\.\2"
    matched = re.fullmatch(pattern, translation.instruction.opcode)
    if not matched:
        raise Unsupported("this form of mma is not supported")
    k, kind, a_kind, b_kind = int(matched[1]), *matched.groups()[1:]
    check_accumulator(kind, a_kind, b_kind)
    saturates = "satfinite" in translation.parts
    if (a_kind, k) not in _SHAPES or (b_kind, k) not in _SHAPES:
        raise Unsupported(f"k{k} for .{a_kind} and .{b_kind} is not supported")
    target, a, b, c = translation.operands
    per_register = 32 // BITS[a_kind]
    num_k = k // (4 * per_register)  # registers along k
    halves = 2 if kind == "f16" else 1  # numbers per register of C and D
    if (len(a), len(b), len(c), len(target)) != (2 * num_k, num_k, 4 // halves, 4 // halves):
        raise Unsupported("the number of registers does not fit the shape")
    read_a = [translation.read(one, "b32") for one in a]
    read_b = [translation.read(one, "b32") for one in b]
    read_c = [translation.read(one, "b32") for one in c]
    writes = [translation.write(one, "b32") for one in target]
    dtype = ACCUMULATORS[kind]

    def multiply(batch, mask):
        batch.whole_warps(mask)
        bits_a, bits_b, bits_c = (
            [batch.full(read(batch)) for read in reads] for reads in (read_a, read_b, read_c)
        )
        rows = rows_of_a(bits_a, a_kind)
        columns = decode(np.stack(bits_b), b_kind).reshape(num_k, len(rows), 8, 4 * per_register)
        columns = columns.transpose(1, 0, 3, 2).reshape(len(rows), k, 8)
        sums = rows_of_d(np.stack(bits_c), dtype).astype(np.float64)
        done = rounded_sum(_multiply(rows, columns, sums), dtype, saturates)
        for write, result in zip(writes, registers_of_d(done), strict=True):
            write(batch, mask, result)

    return multiply
