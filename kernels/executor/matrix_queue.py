"""wgmma products in flight (PTX ISA 9.7.15).

A product is computed when it is issued. It is in flight until a wgmma.wait_group covers its group
(wgmma.commit_group). Until then its accumulators may not be accessed: they hold an `InFlight`,
which raises when a thread reads it. Its operands in shared memory are marked as being read and may
not be overwritten.

wgmma.fence orders register accesses before a product. Since the thread's last fence only other
products may have changed the accumulators and the operands in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.executor.faults import FaultKind


class InFlight:
    """Stands in for the array of a register that a product or load in flight writes."""

    def __init__(self, batch, array, threads, kind=FaultKind.MATRIX_IN_FLIGHT):
        self.batch, self.array, self.threads, self.kind = batch, array, threads, kind

    def _arrived(self) -> np.ndarray:
        early = self.threads & self.batch.every(self.batch.mask)
        if early.any():
            raise self.batch.fault(
                self.kind,
                "the asynchronous instruction that writes this register has not been waited for",
                int(np.flatnonzero(early)[0]),
            )
        return self.array

    def view(self, dtype):
        return self._arrived().view(dtype)

    def astype(self, dtype):
        return self._arrived().astype(dtype)

    def __array__(self, dtype=None, copy=None):
        return self._arrived()


@dataclass
class _Product:
    pending: np.ndarray  # threads that have not waited for the product
    group: np.ndarray  # for each thread: number of groups it had committed before
    registers: list[int]
    operands: list[tuple[int, np.ndarray]]  # (program of the batch, 16-byte chunks)


class MatrixQueue:
    """wgmma products in flight, for all threads of a batch."""

    def __init__(self, batch):
        self._batch = batch
        self._committed = np.zeros(batch.num_threads, np.int64)
        self._queue: list[_Product] = []
        self._fences: list[tuple[np.ndarray, list]] = []

    def fence(self, mask: np.ndarray) -> None:
        """wgmma.fence: products may use the registers as they are now."""
        older = [(threads & ~mask, seen) for threads, seen in self._fences]
        self._fences = [fence for fence in older if fence[0].any()]
        self._fences.append((mask.copy(), list(self._batch.registers)))

    def check_fenced(self, mask: np.ndarray, registers: list[int]) -> None:
        """Raise Fault if a register has changed since the last fence of a masked thread."""
        lacking = mask.copy()
        for threads, seen in self._fences:
            here = threads & mask
            lacking &= ~threads
            for index in registers:
                now, then = self._batch.registers[index], seen[index]
                if now is then or isinstance(now, InFlight) or not here.any():
                    continue
                changed = np.ones(1, np.bool_)
                if not isinstance(then, InFlight):
                    changed = now != then
                lacking |= here & changed
        if lacking.any():
            raise self._batch.fault(
                FaultKind.FENCE,
                "a register of wgmma changed since the last wgmma.fence, or no fence came before",
                int(np.flatnonzero(lacking)[0]),
            )

    def accumulator(self, index: int) -> np.ndarray:
        """Value of an accumulator. A product may use it while an earlier product is in flight."""
        held = self._batch.registers[index]
        return self._batch.full(held.array if isinstance(held, InFlight) else held)

    def issue(self, mask: np.ndarray, results: dict[int, np.ndarray], operands: list) -> None:
        """Start a product of the masked threads. results: the value of each accumulator."""
        registers = self._batch.registers
        for index, result in results.items():
            threads = mask
            before = self.accumulator(index)
            if isinstance(registers[index], InFlight):
                threads = mask | registers[index].threads
            registers[index] = InFlight(self._batch, np.where(mask, result, before), threads)
        self._queue.append(_Product(mask.copy(), self._committed.copy(), [*results], operands))

    def commit(self, mask: np.ndarray) -> None:
        """wgmma.commit_group: close the current group of each masked thread."""
        self._committed += mask

    def wait(self, mask: np.ndarray, most_pending: int) -> None:
        """wgmma.wait_group: complete all but the `most_pending` youngest groups of the threads."""
        still = []
        for product in self._queue:
            ending = product.pending & mask & (product.group < self._committed - most_pending)
            product.pending = product.pending & ~ending
            by_program = product.pending.reshape(self._batch.num_programs, -1).any(1)
            held = []
            for program, chunks in product.operands:
                if by_program[program]:
                    held.append((program, chunks))
                else:
                    self._batch.shared.release_operand(program, chunks)
            product.operands = held
            if product.pending.any():
                still.append(product)
        self._queue = still
        self._release()

    def _release(self) -> None:
        """Restore the arrays of registers that no product in flight writes."""
        registers = self._batch.registers
        busy: dict[int, np.ndarray] = {}
        for product in self._queue:
            for index in product.registers:
                busy[index] = busy.get(index, False) | product.pending
        for index, held in enumerate(registers):
            if isinstance(held, InFlight):
                if index in busy:
                    held.threads = busy[index]
                else:
                    registers[index] = held.array
