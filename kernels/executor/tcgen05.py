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

import re
from collections.abc import Callable

import numpy as np

from kernels.executor.accesses import registers_in
from kernels.executor.barriers import find, touch
from kernels.executor.faults import FaultKind
from kernels.executor.formats import decode
from kernels.executor.memory import MAX_UNIT
from kernels.executor.operands import Step, Translation, Unsupported, instruction
from kernels.executor.ptx import Address
from kernels.executor.tensor_memory import LANES, Product
from kernels.executor.warpgroup import fetch_operands, operand_chunks

_K = 16
_KINDS = {0: "f16", 1: "bf16"}
_KNOWN_BITS = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 15 | 1 << 16 | 0x3F << 17 | 0x1F << 24


@instruction("tcgen05")
def _tcgen05(translation: Translation) -> Step:
    for pattern, form in _FORMS.items():
        if matched := re.fullmatch(pattern, translation.instruction.opcode):
            return form(translation, *matched.groups())
    raise Unsupported("this form of tcgen05 is not supported")


def _alloc(translation: Translation) -> Step:
    """One warp allocates columns for its program and writes their address to shared memory."""
    target, columns = translation.operands
    address, count = translation.address(target), int(columns, 0)
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
        batch.shared.fence(first_lanes)  # Triton reuses the memory without a fence

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
    return batch.every(mask) & (np.arange(batch.num_threads) % 32 == 0)


def _move(translation: Translation, direction: str, shape: str, count: str) -> Step:
    operands = [*translation.operands]
    registers = registers_in(operands.pop(0 if direction == "ld" else -1))
    strip, *offsets = operands
    halved = shape == "16x32bx2"
    if len(registers) != int(count) or len(offsets) != halved:
        raise Unsupported("the operands do not fit")
    address, offset = translation.address(strip), int(offsets[0], 0) if halved else 0
    reads = [translation.read(register, "b32") for register in registers]
    if direction == "ld":
        translation.effects.writes, translation.effects.reads = translation.effects.reads, []

    def move(batch, mask):
        active, threads = batch.every(mask), np.arange(batch.num_threads)
        cells = np.where(active, address(batch).astype(np.int64), 0)
        lane, column, rows = cells >> 16, cells & 0xFFFF, 16 if halved else 32
        beyond = active & ((lane // 32 != threads // 32 % 4) | (lane % 32 + rows > 32))
        if beyond.any():
            thread = int(np.argmax(beyond))
            detail = f"{rows} lanes of tensor memory from {lane[thread]} on are not the warp's"
            raise batch.fault(FaultKind.OUT_OF_BOUNDS, detail, thread, address=int(cells[thread]))
        lanes, columns = lane + threads % rows, column + threads % 32 // rows * offset
        strips = np.zeros(batch.num_threads, np.uint64)
        strips[active] = batch.tensor_memory.strips(
            threads[active], lanes[active], columns[active], len(registers)
        )
        if direction == "ld":
            indices = [register.index for register in registers]
            batch.tensor_memory.begin_load(active, strips, indices)
        else:
            values = np.stack([batch.full(read(batch)) for read in reads], 1)
            batch.tensor_memory.begin_store(active, strips, values)

    return move


def _commit(translation: Translation) -> Step:
    address = translation.address(translation.operands[0])

    def commit(batch, mask):
        active, addresses = batch.every(mask), address(batch)
        touch(batch, addresses, active)
        for thread in map(int, np.flatnonzero(active)):
            products = [one for one in batch.tensor_memory.products if one.thread == thread]
            find(batch, int(addresses[thread]), thread).arrivals.append((None, products))

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
        threads = np.flatnonzero(batch.every(mask))
        operands = [batch.full(read(batch))[threads].astype(np.uint64) for read in reads]
        operands.append(threads.astype(np.uint64) % np.uint64(batch.threads_per_program))
        operands = np.stack(operands, 1)
        for values in np.unique(operands, axis=0):  # programs that issue the same product
            alike = threads[(operands == values).all(1)]
            _multiply(batch, alike, isinstance(a, Address), *values[:-1].tolist())

    return multiply


def _multiply(
    batch, threads: np.ndarray, a_in_tensor: bool, d: int, a: int, b: int, form: int, keep: int
) -> None:
    """Issue a product by one thread of each of n programs. d, a, b, form, keep: values of the
    operands of tcgen05.mma. a_in_tensor: A is in tensor memory."""
    memory, programs, operands = batch.tensor_memory, threads // batch.threads_per_program, []
    a_kind, b_kind = _KINDS[form >> 7 & 1], _KINDS[form >> 10 & 1]
    m, n = (form >> 24 & 0x1F) * 16, (form >> 17 & 0x3F) * 8
    if form & ~_KNOWN_BITS or not form >> 4 & 1 or m not in (64, 128):
        raise Unsupported(f"an instruction descriptor of {form:#x} is not supported")
    rows = np.arange(m) if m == LANES else np.arange(m) // 16 * 32 + np.arange(m) % 16

    def strips(address, count):
        return memory.strips(threads[:, None], (address >> 16) + rows, address & 0xFFFF, count)

    def fetch(descriptor, count, transposed, kind):
        if descriptor >> 46 & 0x7F != 1 or descriptor >> 61 & 1:
            raise Unsupported(f"a matrix descriptor of {descriptor:#x} is not supported")
        chunks = operand_chunks(descriptor & ~(7 << 46), count, 2, bool(transposed))
        chunks = np.tile(chunks, (len(threads), 1, 1))
        operands.append((batch.shared, chunks.reshape(len(threads), -1)))
        return fetch_operands(batch, threads, chunks, kind, bool(transposed)).astype(np.float64)

    result = strips(d, n)
    size = memory.claim(threads, result, n, product=True)
    if a_in_tensor:
        chunks = strips(a, _K // 2)[..., None] + np.array([0, MAX_UNIT], np.uint64)
        operands.append((memory, chunks.reshape(len(threads), -1)))
        data = memory.take(batch, threads, operands[0][1], fenced=False)
        left = decode(data, a_kind).reshape(-1, m, _K).astype(np.float64)
    else:
        left = fetch(a, m, form >> 15 & 1, a_kind)
    total = left @ fetch(b, n, form >> 16 & 1, b_kind).transpose(0, 2, 1)
    cells = programs[:, None], (d >> 16) + rows, slice(d & 0xFFFF, (d & 0xFFFF) + n)
    memory.numbers[cells] = total + memory.numbers[cells] if keep else total
    for number, thread in enumerate(threads):
        taken = [(where, chunks[number]) for where, chunks in operands]
        memory.products.append(Product(thread, result[number], size, taken))


_FORMS: dict[str, Callable[..., Step]] = {
    r"tcgen05\.alloc\.cta_group::1\.sync\.aligned\.shared::cta\.b32": _alloc,
    r"tcgen05\.dealloc\.cta_group::1\.sync\.aligned\.b32": _dealloc,
    # It lets other programs allocate. Here they do not share tensor memory.
    r"tcgen05\.relinquish_alloc_permit\.cta_group::1\.sync\.aligned": lambda _: lambda *_: None,
    r"tcgen05\.(ld|st)\.sync\.aligned\.(32x32b|16x32bx2)\.x(\d+)\.b32": _move,
    r"tcgen05\.wait::(ld|st)\.sync\.aligned": lambda _, moves: (
        lambda batch, mask: batch.tensor_memory.wait(batch.every(mask), moves == "ld")
    ),
    r"tcgen05\.mma\.cta_group::1\.kind::f16": _mma,
    r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one(?:\.shared::cluster)?\.b64": _commit,
}
