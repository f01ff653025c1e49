"""Tensor memory of the programs of a batch, and the loads, stores and products in flight.

Tensor memory has 128 lanes of 512 columns of 32 bits (PTX ISA 9.7.16.1). An address has the lane in
bits 16-31 and the column in bits 0-15. Only columns from tcgen05.alloc may be accessed. A warp can
access lanes 32 w to 32 w + 31, where w is its index modulo four. Unwritten cells are NaN and may be
loaded: Triton loads them, without using them, when a pipelined loop has no iterations.

tcgen05.ld and tcgen05.st are in flight until tcgen05.wait. Until then their cells may not be
accessed, nor the registers of a load. Barriers order the loads, stores and products of different
warps, with the checks of shared memory.

The products of a thread run in issue order. They are computed when they are issued, and in flight
until a thread has waited for the mbarrier of a tcgen05.commit. Until then their results may not be
accessed and their operands may not be overwritten.
"""

from dataclasses import dataclass

import numpy as np

from kernels.executor.faults import FaultKind
from kernels.executor.in_flight import InFlight, Queue
from kernels.executor.memory import compiled, units
from kernels.executor.shared_memory import SharedMemory, claim

LANES, COLUMNS = 128, 512
_BYTES = 4
_NOTHING = np.uint32(0xFFFFFFFF)


@compiled
def _end_products(memory, windows, strips, sizes):
    for strip in range(len(strips)):
        for number in units(memory, windows[strip], np.int64(strips[strip]), sizes[strip]):
            memory.records[number].producing -= 1
            memory.records[number].write_epoch = -1


@dataclass(eq=False)
class Product:
    """A tcgen05.mma in flight."""

    thread: int
    written: np.ndarray  # strips of D
    size: int  # bytes of a strip
    taken: list[tuple[SharedMemory, np.ndarray]]  # 16-byte chunks of its operands


class _Moves(Queue):
    """tcgen05.ld or tcgen05.st in flight: (strips, data of a store, registers of a load)."""

    def _end(self, move, ending: np.ndarray, _pending) -> None:
        batch, (strips, data, registers) = self._batch, move
        if data is not None:
            batch.tensor_memory.land_copies(batch, strips, ending, data)
            return
        sizes = np.array([_BYTES * len(registers)])
        batch.tensor_memory.end_copies(batch, strips, ending, sizes, _BYTES)
        for index in registers:
            held = batch.registers[index]
            if isinstance(held, InFlight):
                held.threads = held.threads & ~ending
                if not held.threads.any():
                    batch.registers[index] = held.array


class TensorMemory(SharedMemory):
    """Tensor memory of the programs of a batch.

    A strip is several columns of one lane, given by the offset of its first byte."""

    race, unit = FaultKind.TENSOR_RACE, _BYTES

    def __init__(self, batch):
        capacity, threads = LANES * COLUMNS * _BYTES, batch.threads_per_program
        super().__init__(batch.clocks, capacity, threads, "tensor", batch.launch.kernel.partial)
        self._batch = batch
        self._data.view(np.uint32)[:] = _NOTHING
        self.numbers = self._data.view(np.float32).reshape(-1, LANES, COLUMNS)
        self._allocated = np.zeros((batch.num_programs, COLUMNS), np.bool_)
        self._allocated_before = np.zeros((batch.num_programs, COLUMNS + 1), np.int64)
        self._loads, self._stores = _Moves(batch), _Moves(batch)
        self.products: list[Product] = []

    def strips(self, threads: np.ndarray, lanes, columns, count: int) -> np.ndarray:
        """Strips of `count` columns from lanes and columns on, in the programs of threads; the
        three broadcast. Raises Fault for columns that are not allocated."""
        threads, lanes, columns = np.broadcast_arrays(threads, lanes, columns)
        programs = threads // self._threads_per_program
        first, last = np.minimum(columns, COLUMNS), np.minimum(columns + count, COLUMNS)
        allocated = self._allocated_before[programs, last] - self._allocated_before[programs, first]
        wrong = (allocated < count) | (lanes >= LANES)
        strips = (lanes * COLUMNS + columns) * _BYTES
        if wrong.any():
            at = int(np.argmax(wrong))
            _, where, _, address = self.describe(0, int(strips.flat[at]))
            detail, kind = f"{where}: the column is not allocated", FaultKind.OUT_OF_BOUNDS
            raise self._batch.fault(kind, detail, int(threads.flat[at]), address=address)
        return strips.astype(np.uint64)

    def describe(self, _window: int, offset: int) -> tuple[str | None, str, int, int]:
        lane, column = divmod(offset // _BYTES, COLUMNS)
        where = f"tensor memory, lane {lane}, column {column}"
        return None, where, COLUMNS * _BYTES, lane << 16 | column

    # -- tcgen05.ld and tcgen05.st

    def begin_load(self, mask: np.ndarray, strips: np.ndarray, registers: list[int]) -> None:
        """Start loading a strip of each masked thread into registers."""
        batch, size = self._batch, _BYTES * len(registers)
        data = self.load(batch, strips, mask, size, alignment=_BYTES, copies=True)
        self._loads.push(mask, strips, None, registers)
        columns = np.ascontiguousarray(data.view(np.uint32).T)
        results = dict(zip(registers, columns, strict=True))
        batch.products.occupy(mask, results, FaultKind.COPY_IN_FLIGHT)

    def begin_store(self, mask: np.ndarray, strips: np.ndarray, values: np.ndarray) -> None:
        """Start storing values [threads, columns] to a strip of each masked thread."""
        data = values.view(np.uint8)
        self.store(self._batch, strips, mask, data, later=True, alignment=_BYTES)
        self._stores.push(mask, strips, data, [])

    def wait(self, mask: np.ndarray, loads: bool) -> None:
        """Complete the loads (else the stores) of the masked threads."""
        (self._loads if loads else self._stores).wait_all(mask)

    # -- products

    def claim(self, threads: np.ndarray, strips: np.ndarray, count: int, product: bool) -> int:
        """Raise Fault unless n threads may write their strips [n, m] of `count` columns. product:
        whether a product writes them, until it is complete. Returns the bytes of a strip."""
        size, done = _BYTES * count, "written by a product" if product else "given back"
        self.run(self._batch, claim, size, done, strips, size, _BYTES, threads, product, False)
        return size

    def complete(self, products: list[Product]) -> None:
        """Complete products that threads have waited for."""
        ending = [one for one in self.products if one in products]
        if not ending:
            return
        self.products = [one for one in self.products if one not in products]
        programs = np.array([one.thread // self._threads_per_program for one in ending])
        counts = [len(one.written) for one in ending]
        strips = np.concatenate([one.written for one in ending])
        sizes = np.repeat([one.size for one in ending], counts)
        _end_products(self.arrays, programs.repeat(counts), strips, sizes)
        for one in ending:
            for memory, chunks in one.taken:
                memory.end_take(self._batch, np.array([one.thread]), chunks[None])

    # -- columns

    def allocate(self, program: int, count: int) -> int | None:
        """Allocate `count` columns. Returns the first, or None if too few are free."""
        free = ~self._allocated[program].reshape(-1, count).any(1)
        if not free.any():
            return None
        first = count * int(np.argmax(free))
        self._set_allocated(program, slice(first, first + count), True)
        records = self.records(0).reshape(-1, LANES, COLUMNS)[program, :, first : first + count]
        records["writer"], records["write_epoch"] = self._batch.programs[program] + 1, -1
        return first

    def _set_allocated(self, program: int, columns: slice, allocated: bool) -> None:
        self._allocated[program, columns] = allocated
        self._allocated_before[program, 1:] = self._allocated[program].cumsum()

    def release(self, thread: int, first: int, count: int) -> None:
        """tcgen05.dealloc. Raises Fault for columns that are not allocated or still in use."""
        strips = self.strips(np.array([thread]), np.arange(LANES), np.array([first]), count)
        self.claim(np.array([thread]), strips[None], count, False)
        program, columns = thread // self._threads_per_program, slice(first, first + count)
        self._set_allocated(program, columns, False)
        self.numbers.view(np.uint32)[program, :, columns] = _NOTHING
