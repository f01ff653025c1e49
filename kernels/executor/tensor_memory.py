"""Tensor memory of the programs of a batch, and the loads, stores and products in flight.

Tensor memory has 128 lanes of 512 columns of 32 bits (PTX ISA 9.7.16.1). An address has the lane in
bits 16-31 and the column in bits 0-15. Only columns from tcgen05.alloc may be accessed. A warp can
access lanes 32 w to 32 w + 31, where w is its index modulo four. Unwritten cells are NaN and may be
loaded: Triton loads them, without using them, when a pipelined loop has no iterations.

tcgen05.ld and tcgen05.st are in flight until tcgen05.wait. Until then the cells may not be
accessed, nor the registers of a load. As in shared memory, barriers order the loads, stores and
products of different warps.

The products of a thread run in issue order. They are computed when they are issued, and in flight
until a thread has waited for the mbarrier of a tcgen05.commit. Until then their results may not be
accessed and their operands may not be overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.executor.faults import FaultKind
from kernels.executor.in_flight import InFlight

LANES, COLUMNS = 128, 512
_NOTHING = np.uint32(0xFFFFFFFF)
_BUSY = "a tcgen05.mma may still use it"
_MOVING = "a tcgen05.ld or tcgen05.st has not been waited for"
_RACED = "another warp accessed it since the last barrier"


@dataclass(eq=False)
class Product:
    """A tcgen05.mma in flight."""

    program: int
    thread: int
    written: np.ndarray  # cells of D
    read: np.ndarray  # cells of A
    operands: list[np.ndarray]  # 16-byte chunks of shared memory, [1, chunks]


@dataclass
class _Move:
    """A tcgen05.ld or tcgen05.st in flight."""

    threads: np.ndarray
    cells: np.ndarray  # [threads, registers]
    registers: list[int]  # targets of a load; empty for a store
    pending: np.ndarray  # for each of `threads`: it has not waited


class TensorMemory:
    """Tensor memory of the programs of a batch. A cell is an index into all of it: (program, lane,
    column), flattened."""

    def __init__(self, batch):
        self._batch = batch
        cells = batch.num_programs * LANES * COLUMNS
        self.data = np.full(cells, _NOTHING)
        self._allocated = np.zeros((batch.num_programs, COLUMNS), np.bool_)
        self._write_epoch, self._read_epoch = np.full((2, cells), -1, np.int32)
        self._writer, self._reader = np.zeros((2, cells), np.int16)
        # In flight, for each cell: loads, stores, products that write it, products that read it.
        self._loads, self._stores, self._results, self._inputs = np.zeros((4, cells), np.int16)
        self._moves: list[_Move] = []
        self.products: list[Product] = []

    def cells(self, threads: np.ndarray, lanes: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Cells [threads, n] at these lanes and columns, in the program of each thread. lanes and
        columns broadcast to this shape. Raises Fault for columns that are not allocated."""
        programs = threads[:, None] // self._batch.threads_per_program
        programs, lanes, columns = np.broadcast_arrays(programs, lanes, columns)
        known = (lanes < LANES) & (columns < COLUMNS)
        known[known] = self._allocated[programs[known], columns[known]]
        if not known.all():
            row, number = np.argwhere(~known)[0]
            self._fail(
                FaultKind.OUT_OF_BOUNDS,
                "the column is not allocated",
                threads[row],
                lanes[row, number],
                columns[row, number],
            )
        return (programs * LANES + lanes) * COLUMNS + columns

    def check(self, cells: np.ndarray, threads: np.ndarray, *, write: bool, product: bool) -> None:
        """Raise Fault unless the threads may access cells [threads, n] now.

        product: the access is by a product, which need not wait for earlier products."""
        warps, epochs = threads[:, None] // 32, self._epochs(threads)
        raced = (self._write_epoch[cells] == epochs) & (self._writer[cells] != warps)
        moving, busy = self._stores[cells], self._results[cells]
        if write:
            raced |= (self._read_epoch[cells] == epochs) & (self._reader[cells] != warps)
            moving, busy = moving + self._loads[cells], busy + self._inputs[cells]
        for wrong, kind, why in (
            ((busy > 0) & (not product), FaultKind.MATRIX_IN_FLIGHT, _BUSY),
            (moving > 0, FaultKind.COPY_IN_FLIGHT, _MOVING),
            (raced, FaultKind.TENSOR_RACE, _RACED),
        ):
            if wrong.any():
                row, number = np.argwhere(wrong)[0]
                lane, column = divmod(int(cells[row, number]) % (LANES * COLUMNS), COLUMNS)
                self._fail(kind, why, threads[row], lane, column)

    def _fail(self, kind: FaultKind, why: str, thread, lane, column) -> None:
        detail = f"tensor memory, lane {lane}, column {column}: {why}"
        address = int(lane) << 16 | int(column)
        raise self._batch.fault(kind, detail, int(thread), address=address)

    def _epochs(self, threads: np.ndarray) -> np.ndarray:
        """Number of barriers that the program of each thread has passed, [threads, 1]."""
        return self._batch.shared.epochs[threads // self._batch.threads_per_program][:, None]

    # -- tcgen05.ld and tcgen05.st

    def load(self, threads: np.ndarray, cells: np.ndarray, registers: list[int]) -> None:
        """Start loading cells [threads, registers] into registers."""
        self.check(cells, threads, write=False, product=False)
        warps, epochs = threads[:, None] // 32, self._epochs(threads)
        others = (self._read_epoch[cells] == epochs) & (self._reader[cells] != warps)
        self._read_epoch[cells], self._reader[cells] = epochs, np.where(others, -1, warps)
        self._loads[cells] += 1
        self._moves.append(_Move(threads, cells, registers, np.ones(len(threads), np.bool_)))
        held = self._batch.registers
        for index, column in zip(registers, cells.T, strict=True):
            waiting = np.zeros(self._batch.num_threads, np.bool_)
            if isinstance(held[index], InFlight):
                waiting |= held[index].threads
            waiting[threads] = True
            loaded = self._batch.products.accumulator(index).copy()
            loaded[threads] = self.data[column]
            held[index] = InFlight(self._batch, loaded, waiting, FaultKind.COPY_IN_FLIGHT)

    def store(self, threads: np.ndarray, cells: np.ndarray, values: np.ndarray) -> None:
        """Start storing values to cells, both [threads, registers]."""
        self.check(cells, threads, write=True, product=False)
        self._write_epoch[cells], self._writer[cells] = (
            self._epochs(threads),
            threads[:, None] // 32,
        )
        self._stores[cells] += 1
        self._moves.append(_Move(threads, cells, [], np.ones(len(threads), np.bool_)))
        self.data[cells] = values

    def wait(self, mask: np.ndarray, loads: bool) -> None:
        """Complete the loads (else the stores) of the masked threads."""
        for move in self._moves:
            if loads != bool(move.registers):
                continue
            ending = move.pending & mask[move.threads]
            (self._loads if loads else self._stores)[move.cells[ending]] -= 1
            move.pending &= ~ending
            for index in move.registers:
                held = self._batch.registers[index]
                if isinstance(held, InFlight):
                    held.threads = held.threads & ~mask
                    if not held.threads.any():
                        self._batch.registers[index] = held.array
        self._moves = [move for move in self._moves if move.pending.any()]

    # -- products

    def issue(self, product: Product) -> None:
        """Start a product. Its result is already in its cells."""
        self._inputs[product.read] += 1
        self._results[product.written] += 1
        self.products.append(product)

    def complete(self, products: list[Product]) -> None:
        """Complete products that a thread has waited for."""
        for product in products:
            if product in self.products:
                self.products.remove(product)
                self._inputs[product.read] -= 1
                self._results[product.written] -= 1
                self._write_epoch[product.written] = -1
                for chunks in product.operands:
                    programs = np.array([product.program])
                    self._batch.shared.release_operands(programs, chunks, until_barrier=False)

    # -- columns

    def allocate(self, program: int, count: int) -> int | None:
        """Allocate `count` columns. Returns the first, or None if too few are free."""
        free = ~self._allocated[program].reshape(-1, count).any(1)
        if not free.any():
            return None
        first = count * int(np.argmax(free))
        self._allocated[program, first : first + count] = True
        return first

    def release(self, thread: int, first: int, count: int) -> None:
        """tcgen05.dealloc. Raises Fault for columns that are not allocated or still in use."""
        columns, threads = np.arange(first, first + count), np.array([thread])
        cells = self.cells(threads, np.arange(LANES)[:, None], columns[None]).reshape(1, -1)
        self.check(cells, threads, write=True, product=False)
        self._allocated[thread // self._batch.threads_per_program, columns] = False
        self.data[cells] = _NOTHING
