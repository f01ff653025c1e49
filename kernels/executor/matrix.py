"""Tensor-core products of one warp: mma.sync (PTX ISA 9.7.14).

Fragments (figures of 9.7.14.5). Thread 4 g + t of a warp holds:

    A       row g in even registers, row g + 8 in odd registers
    B       column g
    C, D    the elements (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)

A 32-bit register of A or B has n = 1, 2 or 4 elements along k, starting at element t n. The first
registers hold the first half of k, the last registers the second half.

Each term of a product is exact. The terms and the accumulator are added in f64 and rounded once to
f32, which is at least as accurate as any GPU.
"""

import re

import numpy as np

from kernels.executor.formats import decode
from kernels.executor.operands import Step, Translation, Unsupported, instruction

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
ACCUMULATORS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


def check_accumulator(kind: str, a_kind: str, b_kind: str) -> None:
    """Raise Unsupported unless `kind` can accumulate products of `a_kind` and `b_kind`."""
    integers = {a_kind, b_kind} <= {"s8", "u8"}
    allowed = ("s32",) if integers else ("f32", "f16") if a_kind == b_kind == "f16" else ("f32",)
    if kind not in allowed:
        raise Unsupported(f"accumulator .{kind} for .{a_kind} and .{b_kind} is not supported")


def rows_of_a(bits: list[np.ndarray], kind: str) -> np.ndarray:
    """A of each warp, [warps, 16, k], from registers."""
    halves = decode(np.stack(bits), kind).reshape(len(bits) // 2, 2, -1, 8, 128 // BITS[kind])
    return halves.transpose(2, 1, 3, 0, 4).reshape(halves.shape[2], 16, -1)


def fragments(product: np.ndarray) -> np.ndarray:
    """Rearrange the products [..., n] of warps, 16 rows each, as threads hold D: [numbers of a
    thread, threads]."""
    n = product.shape[-1]
    halves = product.reshape(-1, 2, 8, n // 8, 4, 2)  # warp, half, group, ..., thread, number
    return halves.transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, -1)


def numbers_of(registers: list[np.ndarray], dtype) -> np.ndarray:
    """C or D in f64, [numbers of a thread, threads], from registers of one or two numbers."""
    numbers = np.concatenate(registers).view(dtype).reshape(len(registers), len(registers[0]), -1)
    wide = numbers.transpose(0, 2, 1).astype(np.float64, order="C")
    return wide.reshape(-1, len(registers[0]))


def registers_of(sums: np.ndarray, dtype, saturates: bool) -> np.ndarray:
    """The reverse of `numbers_of`, rounded. int32 wraps around or saturates."""
    if dtype == np.int32:
        sums = np.clip(sums, -(2**31), 2**31 - 1) if saturates else sums
        sums = sums.astype(np.int64)
    per_register = 4 // np.dtype(dtype).itemsize
    pairs = sums.astype(dtype).reshape(-1, per_register, sums.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(pairs).view(np.uint32)[..., 0]


@instruction("mma")
def _mma(translation: Translation) -> Step:
    pattern = r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(?:\.satfinite)?\.(\w+)\.(\w+)\.(\w+)\.\2"
    matched = re.fullmatch(pattern, translation.instruction.opcode)
    if not matched:
        raise Unsupported("this form of mma is not supported")
    k, kind, a_kind, b_kind = int(matched[1]), *matched.groups()[1:]
    check_accumulator(kind, a_kind, b_kind)
    saturates = "satfinite" in translation.parts
    if any(k * BITS.get(one, 0) not in (128, 256) for one in (a_kind, b_kind)):
        raise Unsupported(f"k{k} for .{a_kind} and .{b_kind} is not supported")
    target, a, b, c = translation.operands
    per_register = 32 // BITS[a_kind]
    num_k = k // (4 * per_register)  # registers along k
    halves = 2 if kind == "f16" else 1  # numbers per register of C and D
    if (len(a), len(b), len(c), len(target)) != (2 * num_k, num_k, 4 // halves, 4 // halves):
        raise Unsupported("the number of registers does not fit the shape")
    reads = [[translation.read(one, "b32") for one in registers] for registers in (a, b, c)]
    writes = [translation.write(one, "b32") for one in target]
    dtype = ACCUMULATORS[kind]

    def multiply(batch, mask):
        a, b, c = ([batch.full(read(batch)) for read in some] for some in reads)
        columns = decode(np.stack(b), b_kind).reshape(num_k, -1, 8, 4 * per_register)
        columns = columns.transpose(1, 0, 3, 2).reshape(-1, k, 8).astype(np.float64)
        product = rows_of_a(a, a_kind).astype(np.float64) @ columns
        sums = numbers_of(c, dtype) + fragments(product)
        for write, result in zip(writes, registers_of(sums, dtype, saturates), strict=True):
            write(batch, mask, result)

    return multiply
