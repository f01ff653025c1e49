"""Shared memory of the programs of a batch, and the copies and products in flight on it.

memory.py has the checks. Shared memory is unwritten at the start, and reading unwritten memory is
a fault.

cp.async (PTX ISA 9.7.9.25) writes at some time between its issue and the wait that covers it. In
that time nothing may access its destination, nor may another warp have accessed it since the last
barrier before the issue. After the wait it counts as written by the waiting warp. wgmma (9.7.15)
and tcgen05.mma (9.7.16) read their operands until they are waited for, so nothing may write these
before. They read through the async proxy, which sees writes of threads after fence.proxy.async.
"""

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
    compiled,
    inlined,
    may_read,
    note_write,
    place_of,
    units,
)

_PRODUCT = -2
"""Stands for the warp of a tensor-core product."""


@compiled
def _land_copies(memory, threads, addresses, mask, data):
    size = data.shape[1]
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        in_batch, address = thread // threads.per_program, np.int64(addresses[thread])
        program, warp = threads.programs[thread] + 1, thread % threads.per_program // 32
        for number in units(memory, in_batch, address, size):  # checked at the issue
            record = memory.records[number]
            record.copying = False
            note_write(memory, record, program, warp, threads.epochs[in_batch], False)
        real = memory.windows[in_batch].real + address
        for byte in range(size):
            memory.space[real + byte] = data[thread, byte]


@inlined
def _note_product(record, program, epoch):
    record.reader, record.read_epoch = program, epoch
    record.read_warps, record.read_by = np.uint32(0xFFFFFFFF), -1


@compiled
def _take_operands(memory, threads, chunks, readers, fenced, out, _begin):
    for number in range(len(readers)):
        thread = readers[number]
        program, epoch = threads.programs[thread] + 1, threads.epochs[thread // threads.per_program]
        warp = _PRODUCT if fenced else thread % threads.per_program // 32
        for chunk in range(chunks.shape[1]):
            address = chunks[number, chunk]
            window, offset = place_of(memory, threads, address, MAX_UNIT, MAX_UNIT, thread)
            if window < 0:
                return
            for unit in units(memory, window, offset, MAX_UNIT):
                record = memory.records[unit]
                if not may_read(memory, record, program, warp, epoch, False, -1, True):
                    return
                if fenced and record.unfenced:
                    memory.report[0] = UNFENCED
                    return
                if fenced:
                    _note_product(record, program, epoch)
                record.taking += 1
            real = memory.windows[window].real + offset
            for byte in range(MAX_UNIT):
                out[number, chunk, byte] = memory.space[real + byte]


@compiled
def _release_operands(memory, chunks, windows, epochs, noted):
    for number in range(len(windows)):
        for address in chunks[number]:  # checked when the operand was taken
            for unit in units(memory, windows[number], np.int64(address), MAX_UNIT):
                record = memory.records[unit]
                record.taking -= 1
                if noted:
                    _note_product(record, record.reader, epochs[number])


@compiled
def _fence(records, epoch, warps):
    for number in range(len(records)):
        record = records[number]
        if record.unfenced:
            before = record.write_epoch < epoch
            record.unfenced = not before and (record.write_warp < 0 or not warps[record.write_warp])


class SharedMemory(CheckedMemory):
    """Shared memory of `num_programs` programs, `capacity` bytes each, of `threads` threads.

    space: "shared", or "local": every thread is a program. Records have `unit` bytes at first.
    """

    race, unit = FaultKind.SHARED_RACE, MAX_UNIT

    def __init__(self, num_programs: int, capacity: int, threads: int, space: str = "shared"):
        stride = -(-capacity // MAX_UNIT) * MAX_UNIT
        self.space, self._threads_per_program = space, threads
        self.epochs = np.ones(num_programs, np.int32)
        self._data = np.zeros(max(num_programs * stride, 1), np.uint8)
        windows = np.zeros(num_programs, WINDOW)
        windows["span"], windows["shadow"] = capacity, stride * np.arange(num_programs)
        windows["real"] = windows["shadow"] + self._data.ctypes.data - ORIGIN
        regions = np.array([(0, self.unit)], REGION)
        super().__init__(windows, regions, num_programs * stride, -1, 0)

    def threads(self, batch) -> Threads:
        return Threads(batch.program_of_thread, self.epochs, self._threads_per_program, -1)

    def land_copies(self, batch, addresses, mask, data: np.ndarray) -> None:
        """The data of copies arrives."""
        _land_copies(self.arrays, self.threads(batch), addresses, mask, data)

    def take_operands(self, batch, threads: np.ndarray, chunks: np.ndarray) -> np.ndarray:
        """Bytes [n, chunks, 16] at the addresses `chunks` (uint64, [n, chunks]) of the programs of
        n threads. A product reads them until `release_operands`."""
        out, fenced = np.empty((*chunks.shape, MAX_UNIT), np.uint8), self.space == "shared"
        self.run(batch, _take_operands, MAX_UNIT, "read by a product", chunks, threads, fenced, out)
        return out

    def release_operands(self, programs: np.ndarray, chunks, until_barrier: bool = True) -> None:
        """Products of these programs have read their operands. until_barrier: before the program's
        next barrier only the threads that waited may overwrite them."""
        epochs = self.epochs[programs] if until_barrier else np.full(len(programs), -1, np.int32)
        _release_operands(self.arrays, chunks, programs, epochs, self.space == "shared")

    def fence(self, program: int, warps: np.ndarray) -> None:
        """fence.proxy.async by `warps` (booleans) of the program: the async proxy sees their
        writes, and those before the last barrier."""
        records = self.records(0).reshape(len(self.epochs), -1)[program]
        _fence(records, self.epochs[program], warps)

    def tally(self, batch, addresses, mask, sizes, *_kinds: str) -> None:
        if batch.launch.tally is not None and self.space == "shared":
            batch.launch.tally.shared_access(addresses, mask, int(sizes[0]))

    def describe(self, _window: int, offset: int) -> tuple[str | None, str, int, int]:
        span = int(self.arrays.windows[0]["span"])
        return None, f"{offset:#x} of {self.space} memory", span, offset
