"""wgmma: products of a warp group (four warps) with operands in shared memory (PTX ISA 9.7.15).

Accumulator D, m64nN: warp w of the group holds rows 16 w to 16 w + 15. Register i of its thread
4 g + t holds row g + 8 (i / 2 % 2), column 8 (i / 4) + 2 t + i % 2. A in registers has the layout
of mma.m16n8.

A descriptor (9.7.15.5.1.2.2) locates a matrix in shared memory. It has the start, leading and
stride byte offsets, in units of 16 bytes, in bits 0-13, 16-29 and 32-45, and the swizzle mode in
bits 62-63. The matrix consists of rows of w bytes: w = 128, 64 or 32 with swizzling, 16 without.
Rows run along k if the matrix is K-major, along m or n if it is MN-major, "transposed"
(9.7.15.5.1.2.1). The 16-byte chunk c of row r is at:

    start + r % 8 * w + r / 8 * stride + ...
        ... + 16 c                                               K-major, swizzled
        ... + c * leading                                        K-major, not swizzled
        ... + c % (w / 16) * 16 + c / (w / 16) * leading         MN-major, swizzled

Swizzling permutes chunks: address bits 4-6 (w = 128), 4-5 (64) or 4 (32) are XORed with bits 7-9,
7-8 or 7.
"""

import functools
import re

import numpy as np

from kernels.executor.faults import FaultKind
from kernels.executor.formats import decode
from kernels.executor.matrix import (
    ACCUMULATORS,
    BITS,
    check_accumulator,
    fragments,
    numbers_of,
    registers_of,
    rows_of_a,
)
from kernels.executor.operands import Step, Translation, Unsupported, instruction

_SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}


@functools.lru_cache(maxsize=4096)
def operand_chunks(descriptor: int, rows: int, itemsize: int, transposed: bool) -> np.ndarray:
    """Addresses (uint64) of the 16-byte chunks of a [rows, 32 bytes of k] matrix, row by row as
    stored: [rows, 2], or [k, rows * itemsize / 16] if transposed.

    Raises:
        Unsupported: the matrix layout is not supported.
    """
    if descriptor >> 49 & 7:
        raise Unsupported("descriptors with a base offset are not supported")
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    width = _SWIZZLES[descriptor >> 62]
    if transposed and width == 16:
        raise Unsupported("transposed matrices without swizzling are not supported")
    row = np.arange(32 // itemsize if transposed else rows)[:, None]
    chunk = np.arange(rows * itemsize // 16 if transposed else 2)[None, :]
    per_row = width // 16
    address = start + row // 8 * stride + row % 8 * width
    if width == 16:
        address = address + chunk * leading
    else:
        address = address + chunk % per_row * 16 + chunk // per_row * leading * transposed
    address = address ^ ((address >> 7 & (per_row - 1)) << 4)
    return address.astype(np.uint64)


def fetch_operands(batch, threads, chunks, kind: str, transposed: bool, num_warps: int = 1):
    """Read a [rows, k] matrix of type `kind` as f32 for each thread, by a product of `num_warps`
    warps from its own on. chunks: of each thread, from `operand_chunks`."""
    count, rows, _ = chunks.shape
    data = batch.shared.take(batch, threads, chunks.reshape(count, -1), num_warps=num_warps)
    values = decode(data, kind).reshape(count, rows, -1)
    return values.transpose(0, 2, 1) if transposed else values


@instruction("wgmma")
def _wgmma(translation: Translation) -> Step:
    opcode = translation.instruction.opcode
    if opcode == "wgmma.fence.sync.aligned":
        return lambda batch, mask: batch.products.fence(batch.every(mask))
    if opcode == "wgmma.commit_group.sync.aligned":
        return lambda batch, mask: batch.products.commit(batch.every(mask))
    if opcode == "wgmma.wait_group.sync.aligned":
        max_pending = int(translation.operands[0], 0)
        return lambda batch, mask: batch.products.wait(batch.every(mask), max_pending)
    return _multiply(translation)


def _multiply(translation: Translation) -> Step:
    pattern = (
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)(?:\.satfinite)?\.(\w+)\.(\w+)\.(\w+)"
    )
    matched = re.fullmatch(pattern, translation.instruction.opcode)
    if not matched or matched[4] not in BITS or matched[5] not in BITS:
        raise Unsupported("this form of wgmma is not supported")
    n, kind, a_kind, b_kind = int(matched[1]), *matched.groups()[2:]
    check_accumulator(kind, a_kind, b_kind)
    dtype, saturates = ACCUMULATORS[kind], "satfinite" in translation.parts
    halves = 2 if kind == "f16" else 1  # numbers per register of D
    itemsize = BITS[a_kind] // 8
    if int(matched[2]) * itemsize != 32:
        raise Unsupported(f"k{matched[2]} for .{a_kind} is not supported")
    target, a, b, scale_d, *texts = translation.operands
    immediates = [int(text, 0) for text in texts]
    scale_a, scale_b, *transposed = immediates if kind != "s32" else (1, 1)
    in_registers = isinstance(a, tuple)
    flags = transposed or [0] * (2 - in_registers)
    if scale_a != 1 or scale_b != 1 or len(flags) != 2 - in_registers:
        raise Unsupported("these immediates are not supported")
    if len(target) != n // 2 // halves:
        raise Unsupported("the number of registers does not fit the shape")
    read_a = [
        translation.read(one, "b32" if in_registers else "b64")
        for one in (a if in_registers else (a,))
    ]
    read_b, keep = translation.read(b, "b64"), translation.read(scale_d, "pred")
    accumulators = [register.index for register in target]
    translation.effects.writes += accumulators
    fenced = accumulators + ([register.index for register in a] if in_registers else [])

    def multiply(batch, mask):
        """Computes all warp groups at once. The threads of a group share the descriptors."""
        active = batch.every(mask)
        batch.products.check_fenced(active, fenced)
        batch.whole_warps(active, 128)
        groups, operands = np.flatnonzero(active.reshape(-1, 128).any(1)), []

        def operand(bits, kind, rows, is_transposed):
            matrices, taken = _fetch(batch, bits, kind, rows, bool(is_transposed), groups)
            operands.append(taken)
            return matrices

        a_bits, b_bits = [batch.full(read(batch)) for read in read_a], batch.full(read_b(batch))
        if in_registers:
            left = rows_of_a(a_bits, a_kind).reshape(-1, 64, 32 // itemsize)[groups]
        else:
            left = operand(a_bits[0], a_kind, 64, flags[0])
        right = operand(b_bits, b_kind, n, flags[-1]).transpose(0, 2, 1)
        left, right = (matrix.astype(np.float64, order="C") for matrix in (left, right))
        sums = numbers_of([batch.products.accumulator(i) for i in accumulators], dtype)
        held = np.where(batch.full(keep(batch))[active], sums[:, active], 0.0)
        sums[:, active] = held + fragments(left @ right)
        results = registers_of(sums, dtype, saturates)
        batch.products.issue(active, dict(zip(accumulators, results, strict=True)), operands)

    return multiply


def _fetch(batch, descriptors, kind: str, rows: int, transposed: bool, groups: np.ndarray):
    """([rows, k] matrices of warp groups as f32, (groups, chunks) that they occupy)."""
    by_group = descriptors.reshape(-1, 128)[groups]
    differ = (by_group != by_group[:, :1]).any(1)
    if differ.any():
        detail = "threads of a warp group have different descriptors"
        raise batch.fault(FaultKind.DIVERGENCE, detail, 128 * int(groups[np.argmax(differ)]))
    layout = rows, BITS[kind] // 8, transposed
    chunks = np.stack([operand_chunks(int(one), *layout) for one in by_group[:, 0]])
    matrices = fetch_operands(batch, 128 * groups, chunks, kind, transposed, 4)
    return matrices, (groups, chunks.reshape(len(groups), -1))


@instruction("fence", "membar")
def _fence(translation: Translation) -> Step:
    """fence.proxy.async: later accesses by the async proxy see earlier writes of these threads
    (9.7.13.4)."""
    opcode = translation.instruction.opcode
    if opcode == "fence.mbarrier_init.release.cluster":  # mbarriers have no proxies here
        return lambda batch, mask: None
    if opcode not in ("fence.proxy.async", "fence.proxy.async.shared::cta"):
        raise Unsupported("fences of this kind are not supported")
    return lambda batch, mask: batch.shared.fence(batch.every(mask))
