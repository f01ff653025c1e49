"""Asynchronous copies and products in flight, in groups that threads wait for.

commit_group closes a group of all operations that the thread issued since its last commit_group.
wait_group n waits until at most the n youngest groups of the thread are pending.

cp.async (PTX ISA 9.7.9.25.3): the data arrives at the wait. Until then an access to its destination
in shared memory is a fault, so the moment of arrival makes no difference.

wgmma (9.7.15): a product is computed when it is issued. Until the wait, an accumulator holds an
`InFlight`, which raises Fault when a thread reads the register. Operands in shared memory are
marked as being read and may not be overwritten. wgmma.fence orders register accesses before a
product. Between the thread's last fence and a product, only other products may change the
accumulators and the register operands of this product.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.executor.faults import FaultKind


class Queue:
    """Operations in flight, for all threads of a batch."""

    def __init__(self, batch):
        self._batch = batch
        self._committed = np.zeros(batch.num_threads, np.int64)
        self._queue: list[list] = []
        """For each instruction: the threads that have not waited for it, the number of groups that
        each thread had committed before, and the operation."""

    def _end(self, operation: Any, ending: np.ndarray, pending: np.ndarray) -> None:
        """End an operation for threads whose wait ends now; pending: threads that did not wait."""
        raise NotImplementedError

    def commit(self, mask: np.ndarray) -> None:
        """commit_group: close the current group of each masked thread."""
        self._committed += mask

    def wait(self, mask: np.ndarray, max_pending: int) -> None:
        """wait_group: complete all but the `max_pending` youngest groups of the masked threads."""
        for issued in self._queue:
            pending, group, operation = issued
            ending = pending & mask & (group < self._committed - max_pending)
            if ending.any():
                issued[0] = pending & ~ending
                self._end(operation, ending, issued[0])
        self._queue = [issued for issued in self._queue if issued[0].any()]

    def wait_all(self, mask: np.ndarray) -> None:
        """wait_all: complete all that the masked threads issued, committed or not."""
        self.commit(mask)
        self.wait(mask, 0)

    def push(self, mask: np.ndarray, *operation) -> None:
        """The masked threads have issued an operation."""
        self._queue.append([mask, self._committed.copy(), operation])


class CopyQueue(Queue):
    """cp.async in flight."""

    def issue(self, addresses: np.ndarray, mask: np.ndarray, data: np.ndarray, source) -> None:
        """Start copying data[thread] to the address of each masked thread. source: (addresses,
        threads that read, sizes), as given to `GlobalMemory.load`."""
        self._batch.shared.store(self._batch, addresses, mask, data, later=True)
        self.push(mask, addresses, data, *source)

    def _end(self, copies, ending: np.ndarray, _pending) -> None:
        batch, (addresses, data, origin, reading, sizes) = self._batch, copies
        batch.shared.land_copies(batch, addresses, ending, data)
        batch.memory.end_copies(batch, origin, ending & reading, sizes, data.shape[1])


class InFlight:
    """Replaces the array of a register while a product or load in flight writes the register."""

    def __init__(self, batch, array, threads, kind: FaultKind):
        self.batch, self.array, self.threads, self.kind = batch, array, threads, kind

    def _arrived(self) -> np.ndarray:
        early = self.threads & self.batch.every(self.batch.mask)
        detail = "the asynchronous instruction that writes this register has not been waited for"
        self.batch.refuse(early, self.kind, detail)
        return self.array

    def holding(self, array) -> InFlight:
        """A copy with another array, after threads without operations in flight wrote to it."""
        return InFlight(self.batch, array, self.threads, self.kind)

    def view(self, dtype):
        return self._arrived().view(dtype)

    def astype(self, dtype):
        return self._arrived().astype(dtype)

    def __array__(self, dtype=None, copy=None):
        return self._arrived()


class MatrixQueue(Queue):
    """wgmma products in flight."""

    def __init__(self, batch):
        super().__init__(batch)
        self._fences: list[tuple[np.ndarray, list]] = []

    def fence(self, mask: np.ndarray) -> None:
        """wgmma.fence: products may use the registers as they are now."""
        older = [(threads & ~mask, seen) for threads, seen in self._fences]
        self._fences = [fence for fence in older if fence[0].any()]
        registers: list[Any] = self._batch.registers
        seen = [
            held.holding(held.array) if isinstance(held, InFlight) else held for held in registers
        ]
        self._fences.append((mask.copy(), seen))

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
                if isinstance(then, InFlight):  # perhaps of other threads only
                    lacking |= here & then.threads
                    then = then.array
                lacking |= here & (now != then)
        detail = "a register of wgmma changed since the last wgmma.fence, or no fence came before"
        self._batch.refuse(lacking, FaultKind.FENCE, detail)

    def accumulator(self, index: int) -> np.ndarray:
        """Value of an accumulator. A product may use it while an earlier product is in flight."""
        held = self._batch.registers[index]
        return self._batch.full(held.array if isinstance(held, InFlight) else held)

    def occupy(self, mask: np.ndarray, results: dict[int, np.ndarray], kind: FaultKind) -> None:
        """The masked threads have operations in flight that write `results` to registers."""
        registers, everyone = self._batch.registers, mask.all()
        for index, result in results.items():
            threads = mask
            if not everyone:
                result = np.where(mask, result, self.accumulator(index))
            if isinstance(registers[index], InFlight):
                threads = mask | registers[index].threads
            registers[index] = InFlight(self._batch, result, threads, kind)

    def issue(self, mask: np.ndarray, results: dict[int, np.ndarray], operands: list) -> None:
        """Start a product of the masked threads. results: the value of each accumulator."""
        self.occupy(mask, results, FaultKind.MATRIX_IN_FLIGHT)
        self.push(mask, [*results], operands)

    def _end(self, product, _ending, pending: np.ndarray) -> None:
        held: Any = pending.reshape(-1, 128).any(1)
        for number, (groups, chunks) in enumerate(operands := product[1]):
            over, batch = ~held[groups], self._batch
            batch.shared.end_take(batch, 128 * groups[over], chunks[over], num_warps=4)
            operands[number] = groups[~over], chunks[~over]

    def wait(self, mask: np.ndarray, max_pending: int) -> None:
        """See Queue. Restores the arrays of registers that no product in flight writes."""
        super().wait(mask, max_pending)
        registers = self._batch.registers
        busy: dict[int, np.ndarray] = {}
        for pending, _, (results, _) in self._queue:
            for index in results:
                busy[index] = busy[index] | pending if index in busy else pending
        for index, held in enumerate(registers):
            if isinstance(held, InFlight):
                if index in busy:
                    held.threads = busy[index]
                else:
                    registers[index] = held.array
