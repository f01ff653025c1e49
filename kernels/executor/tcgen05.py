"""tcgen05: products in tensor memory (PTX ISA 9.7.16), for one CTA and 16-bit elements.

The accumulator D is [m, n] f32 in tensor memory. Row i is lane i; for m = 64, rows 16 w to
16 w + 15 are in lanes 32 w to 32 w + 15. A is in shared memory, or in tensor memory with the lanes
of D and two elements per column. B is [n, k] in shared memory.

Matrix descriptors are the same as for wgmma (warpgroup.py), except that the swizzle has bits 61-63.
The instruction descriptor (9.7.16.4) has these fields:

    bits 4-5, 7-9, 10-12    formats of D, A and B
    bits 15, 16             1 if A, B is MN-major
    bits 17-22              n / 8
    bits 24-28              m / 16

tcgen05.ld and tcgen05.st move register i of thread t of a warp from or to lane t, column i
(32x32b), or lane t % 16, column i + t / 16 * offset (16x32bx2).
"""

from __future__ import annotations

import re

import numpy as np

from kernels.executor.faults import FaultKind, UnknownInstruction
from kernels.executor.formats import decode
from kernels.executor.mbarriers import find, touch
from kernels.executor.operands import Step, Translation, Unsupported, instruction
from kernels.executor.ptx import Address
from kernels.executor.tensor_memory import LANES, Product
from kernels.executor.warpgroup import fetch_operands, operand_chunks

_K = 16
_KINDS = {0: "f16", 1: "bf16"}
_KNOWN_BITS = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 15 | 1 << 16 | 0x3F << 17 | 0x1F << 24


@instruction("tcgen05")
def _tcgen05(translation: Translation) -> Step:
    opcode = translation.instruction.opcode
    for pattern, form in _FORMS.items():
        if matched := re.fullmatch(pattern, opcode):
            return form(translation, *matched.groups())
    raise Unsupported("this form of tcgen05 is not supported")


def _alloc(translation: Translation) -> Step:
    """One warp allocates columns for its program. The address is written to shared memory."""
    place, count = translation.operands
    address, count = translation.address(place), int(count, 0)
    if count not in (32, 64, 128, 256, 512):
        raise Unsupported(f"expected 32, 64, 128, 256 or 512 columns, got {count}")

    def alloc(batch, mask):
        first_lanes = _first_lanes(batch, mask)
        columns = np.zeros(batch.num_threads, np.uint32)
        for thread in map(int, np.flatnonzero(first_lanes)):
            program = thread // batch.threads_per_program
            first = batch.tensor_memory.allocate(program, count)
            if first is None:
                detail = f"no {count} free columns of tensor memory: the allocation waits forever"
                raise batch.fault(FaultKind.ENDLESS, detail, thread)
            columns[thread] = first
        data = columns.view(np.uint8).reshape(-1, 4)
        batch.shared.store(batch, address(batch), first_lanes, data)

    return alloc


def _dealloc(translation: Translation) -> Step:
    read, count = translation.read(translation.operands[0], "u32"), int(translation.operands[1], 0)

    def dealloc(batch, mask):
        first_lanes, addresses = _first_lanes(batch, mask), batch.full(read(batch))
        for thread in map(int, np.flatnonzero(first_lanes)):
            batch.tensor_memory.release(thread, int(addresses[thread]), count)

    return dealloc


def _first_lanes(batch, mask) -> np.ndarray:
    """Mask of the first thread of each active warp."""
    batch.whole_warps(mask)
    return batch.every(mask) & (np.arange(batch.num_threads) % 32 == 0)


def _relinquish(translation: Translation) -> Step:
    """Permits other programs to allocate. No effect here: programs do not share tensor memory."""

    def relinquish(batch, mask):
        batch.whole_warps(mask)

    return relinquish


def _wait(translation: Translation, moves: str) -> Step:
    def wait(batch, mask):
        batch.whole_warps(mask)
        batch.tensor_memory.wait(batch.every(mask), moves == "ld")

    return wait


def _move(translation: Translation, direction: str, shape: str, count: str) -> Step:
    operands = [*translation.operands]
    registers = operands.pop(0 if direction == "ld" else -1)
    registers = registers if isinstance(registers, tuple) else (registers,)
    place, *offset = operands
    halved = shape == "16x32bx2"
    if len(registers) != int(count) or len(offset) != halved:
        raise Unsupported("the operands do not fit")
    address, offset = translation.address(place), int(offset[0], 0) if halved else 0
    reads = [translation.read(register, "b32") for register in registers]
    if direction == "ld":
        translation.effects.writes, translation.effects.reads = translation.effects.reads, []

    def move(batch, mask):
        batch.whole_warps(mask)
        threads = np.flatnonzero(batch.every(mask))
        place = address(batch).astype(np.int64)[threads]
        lane, column, rows = place >> 16, place & 0xFFFF, 16 if halved else 32
        beyond = (lane // 32 != threads // 32 % 4) | (lane % 32 + rows > 32)
        if beyond.any():
            number = int(np.argmax(beyond))
            detail = f"{rows} lanes of tensor memory from {lane[number]} on are not the warp's"
            thread, at = int(threads[number]), int(place[number])
            raise batch.fault(FaultKind.OUT_OF_BOUNDS, detail, thread, address=at)
        lanes = lane + threads % rows
        columns = (column + threads % 32 // rows * offset)[:, None] + np.arange(len(registers))
        cells = batch.tensor_memory.cells(threads, lanes[:, None], columns)
        if direction == "ld":
            indices = [register.index for register in registers]
            batch.tensor_memory.load(threads, cells, indices)
        else:
            values = np.stack([batch.full(read(batch))[threads] for read in reads], 1)
            batch.tensor_memory.store(threads, cells, values)

    return move


def _commit(translation: Translation) -> Step:
    address = translation.address(translation.operands[0])

    def commit(batch, mask):
        active, addresses = batch.every(mask), address(batch)
        touch(batch, addresses, active)
        for thread in map(int, np.flatnonzero(active)):
            products = [one for one in batch.tensor_memory.products if one.thread == thread]
            find(batch, int(addresses[thread]), thread).arrivals.append(products)

    return commit


def _mma(translation: Translation) -> Step:
    d, a, b, form, keep = translation.operands
    reads = (
        translation.address(d),
        translation.address(a) if isinstance(a, Address) else translation.read(a, "b64"),
        translation.read(b, "b64"),
        translation.read(form, "b32"),
        translation.read(keep, "pred"),
    )

    def multiply(batch, mask):
        operands = [batch.full(read(batch)) for read in reads]
        for thread in map(int, np.flatnonzero(batch.every(mask))):
            _multiply(batch, translation, thread, *[int(values[thread]) for values in operands])

    return multiply


def _multiply(
    batch, translation: Translation, thread: int, d: int, a: int, b: int, form: int, keep: int
) -> None:
    """Issue a product. d, a, b, form, keep: values of the operands of tcgen05.mma."""
    memory, threads = batch.tensor_memory, np.array([thread])
    program, operands = thread // batch.threads_per_program, []
    a_kind, b_kind = _KINDS[form >> 7 & 1], _KINDS[form >> 10 & 1]
    m, n = (form >> 24 & 0x1F) * 16, (form >> 17 & 0x3F) * 8
    if form & ~_KNOWN_BITS or not form >> 4 & 1 or m not in (64, 128):
        raise _unknown(translation, f"an instruction descriptor of {form:#x} is not supported")
    rows = np.arange(m) if m == LANES else np.arange(m) // 16 * 32 + np.arange(m) % 16

    def cells(address, num_columns):
        lanes, columns = (address >> 16) + rows, (address & 0xFFFF) + np.arange(num_columns)
        found = memory.cells(threads, lanes.repeat(num_columns), np.tile(columns, m))
        return found.reshape(1, -1)

    def fetch(descriptor, count, transposed, kind):
        chunks = _operand_chunks(translation, descriptor, count, bool(transposed))
        operands.append(chunks.reshape(1, -1))
        return fetch_operands(batch, threads, chunks[None], kind, bool(transposed))[0]

    result, source = cells(d, n), np.zeros((1, 0), np.int64)
    memory.check(result, threads, write=True, product=True)
    if isinstance(translation.operands[1], Address):
        source = cells(a, _K // 2)
        memory.check(source, threads, write=False, product=True)
        left = decode(memory.data[source], a_kind).reshape(m, _K)
    else:
        left = fetch(a, m, form >> 15 & 1, a_kind)
    total = left.astype(np.float64) @ fetch(b, n, form >> 16 & 1, b_kind).T.astype(np.float64)
    if keep:
        total += memory.data[result].view(np.float32).reshape(m, n)
    memory.data[result] = total.astype(np.float32).reshape(1, -1).view(np.uint32)
    memory.issue(Product(program, thread, result, source, operands))
    if batch.launch.tally is not None:
        batch.launch.tally.product(batch.programs[program], 2 * m * n * _K)


def _operand_chunks(translation: Translation, descriptor: int, rows: int, transposed: bool):
    """16-byte chunks of shared memory that hold a [rows, k] matrix."""
    if descriptor >> 46 & 0x7F != 1 or descriptor >> 61 & 1:
        raise _unknown(translation, f"a matrix descriptor of {descriptor:#x} is not supported")
    descriptor &= ~(7 << 46)
    try:
        return operand_chunks(descriptor, rows, 2, transposed)
    except Unsupported as error:
        raise _unknown(translation, str(error)) from None


def _unknown(translation: Translation, why: str) -> UnknownInstruction:
    one = translation.instruction
    return UnknownInstruction(translation.program.name, one.text, one.location, why)


_FORMS = {
    r"tcgen05\.alloc\.cta_group::1\.sync\.aligned\.shared::cta\.b32": _alloc,
    r"tcgen05\.dealloc\.cta_group::1\.sync\.aligned\.b32": _dealloc,
    r"tcgen05\.relinquish_alloc_permit\.cta_group::1\.sync\.aligned": _relinquish,
    r"tcgen05\.(ld|st)\.sync\.aligned\.(32x32b|16x32bx2)\.x(\d+)\.b32": _move,
    r"tcgen05\.wait::(ld|st)\.sync\.aligned": _wait,
    r"tcgen05\.mma\.cta_group::1\.kind::f16": _mma,
    r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one(?:\.shared::cluster)?\.b64": _commit,
}
