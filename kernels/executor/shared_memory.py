"""Shared memory of the programs of a batch, and the copies and products in flight on it.

memory.py has the checks. Shared memory is unwritten at the start, and reading unwritten memory is
a fault.

cp.async (PTX ISA 9.7.9.25) writes at some time between its issue and the wait that covers it. In
that time nothing may access its destination, nor may another warp have accessed it since the last
barrier before the issue. After the wait it counts as written by the waiting warp. wgmma (9.7.15)
and tcgen05.mma (9.7.16) read their operands until they are waited for, so nothing may write these
before. They read through the async proxy, which sees writes of threads after fence.proxy.async.
"""

from typing import Any

import numpy as np

from kernels.executor.faults import FaultKind
from kernels.executor.memory import (
    MAX_UNIT,
    ORIGIN,
    REGION,
    UNFENCED,
    WINDOW,
    CheckedMemory,
    Threads,
    clock_of,
    compiled,
    concurrent,
    may_write,
    note_write,
    place_of,
    units,
)


@compiled
def _land_copies(memory, threads, addresses, mask, data):
    size = data.shape[1]
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        in_batch, address = thread // threads.per_program, np.int64(addresses[thread])
        program, warp, clock = clock_of(threads, thread)
        for number in units(memory, in_batch, address, size):  # checked at the issue
            record = memory.records[number]
            record.copying = False
            note_write(memory, record, program, warp, clock, False)
        real = memory.windows[in_batch].real + address
        for byte in range(size):
            memory.space[real + byte] = data[thread, byte]


@compiled
def claim(memory, threads, strips, size, alignment, claimers, product, copies, _begin):
    """Check that threads may write their strips. A product writes until `_end_products`, a copy
    until `_land_box`."""
    for number in range(len(claimers)):
        thread = claimers[number]
        program, warp, clock = clock_of(threads, thread)
        for strip in strips[number]:
            window, offset = place_of(memory, threads, strip, size, alignment, thread)
            if window < 0:
                return
            for unit in units(memory, window, offset, size):
                record = memory.records[unit]
                if not may_write(memory, record, unit, program, warp, clock, False, product):
                    return
                record.producing += product
                if copies:
                    if record.unfenced:
                        memory.report[0] = UNFENCED
                        return
                    record.copying, record.write_warp = True, warp


@compiled
def _land_box(memory, threads, chunks, thread, column, clock, data):
    program = threads.programs[thread] + 1
    for number in range(len(chunks)):  # checked when the copy began
        window, offset = place_of(memory, threads, chunks[number], MAX_UNIT, MAX_UNIT, thread)
        for unit in units(memory, window, offset, MAX_UNIT):
            record = memory.records[unit]
            note_write(memory, record, program, column, clock, False)
            record.copying = record.unfenced = False
        real = memory.windows[window].real + offset
        for byte in range(MAX_UNIT):
            memory.space[real + byte] = data[number, byte]


@compiled
def _fence(records, clocks, warps):
    for number in range(len(records)):
        record = records[number]
        for warp in range(len(warps)):
            if record.unfenced and warps[warp]:
                other, epoch = record.write_warp, record.write_epoch
                record.unfenced = concurrent(clocks[warp], warp, other, epoch)


class SharedMemory(CheckedMemory):
    """Shared memory of several programs, `capacity` bytes each, of `threads` threads.

    clocks: see barriers.py. partial: whether barriers may hold part of a program's warps. space:
    "shared", or "local": every thread is a program. Records have `unit` bytes at first.
    """

    race, unit = FaultKind.SHARED_RACE, MAX_UNIT

    def __init__(self, clocks, capacity: int, threads: int, space="shared", partial=False):
        stride = -(-capacity // MAX_UNIT) * MAX_UNIT
        self.space, self._threads_per_program = space, threads
        self.clocks, num_programs = clocks, len(clocks)
        self._data = np.zeros(max(num_programs * stride, 1), np.uint8)
        windows = np.zeros(num_programs, WINDOW)
        windows["span"], windows["shadow"] = capacity, stride * np.arange(num_programs)
        windows["real"] = windows["shadow"] + self._data.ctypes.data - ORIGIN
        regions = np.array([(0, self.unit)], REGION)
        num_warps = clocks.shape[1] if partial else 0
        super().__init__(windows, regions, num_programs * stride, -1, 0, num_warps)

    def threads(self, batch) -> Threads:
        return Threads(batch.program_of_thread, self.clocks, self._threads_per_program, -1)

    def land_copies(self, batch, addresses, mask, data: np.ndarray) -> None:
        """The data of copies arrives."""
        _land_copies(self.arrays, self.threads(batch), addresses, mask, data)

    def begin_box(self, batch, thread: int, chunks: np.ndarray) -> None:
        """A thread starts an asynchronous copy to 16-byte chunks [n], which `land_box` ends."""
        done, claimers = "overwritten by a TMA copy", np.array([thread])
        sizes = MAX_UNIT, MAX_UNIT
        self.run(batch, claim, MAX_UNIT, done, chunks[None], *sizes, claimers, False, True)

    def land_box(self, batch, thread: int, chunks, column: int, clock, data: np.ndarray) -> None:
        """The data [n, 16] arrives. column: of the clock of its mbarrier, see barriers.py."""
        _land_box(self.arrays, self.threads(batch), chunks, thread, column, clock, data)

    def fence(self, mask: np.ndarray) -> None:
        """fence.proxy.async by the warps of masked threads: the async proxy sees their writes, and
        those that barriers order before the fence."""
        warps: Any = mask.reshape(*self.clocks.shape[:2], 32).any(2)
        records = self.records(0).reshape(len(warps), -1)
        for program in np.flatnonzero(warps.any(1)):
            _fence(records[program], self.clocks[program], warps[program])

    def describe(self, _window: int, offset: int) -> tuple[str | None, str, int, int]:
        span = int(self.arrays.windows[0]["span"])
        return None, f"{offset:#x} of {self.space} memory", span, offset
