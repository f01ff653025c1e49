"""Shared memory of the programs of a batch, and what is in flight to and from it.

Between two barriers warps run in no order. Two warps may therefore not access the same place if one
of them writes it, unless both write the same value: Triton lets warps that hold the same part of a
result do that. The threads of one warp are taken to run together. Shared memory is unwritten at the
start, and reading unwritten memory is a fault.

cp.async (PTX ISA 9.7.9.25) writes at some time between its issue and the wait that covers it. Its
place may not be accessed during that time, nor have been accessed by another warp since the last
barrier before the issue. After the wait it counts as written by the waiting warp. wgmma (9.7.15)
and tcgen05.mma (9.7.16) read their operands until they are waited for: these may not be written
before. They read through the async proxy, which sees writes of threads after fence.proxy.async.

A record says who accessed a unit of memory last. A unit is as large as the kernel's smallest access
to shared memory, up to 16 bytes. Accesses are aligned to their size, so units lose nothing against
bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from kernels.executor.faults import FaultKind

MAX_UNIT = 16
"""Largest unit of a record; tensor-core operands are read in chunks of this size."""
_RECORD = np.dtype(
    [
        ("write_epoch", np.int32),  # barriers before the last write, + 1; 0: unwritten
        ("read_epoch", np.int32),
        ("writer", np.int16),  # warp of the batch, or that issued a copy; -1: several, atomically
        ("reader", np.int16),  # -1: several warps
        ("products", np.int16),  # products in flight that read it
        ("copying", np.bool_),  # a cp.async is in flight to it
        ("unfenced", np.bool_),  # written by threads, and no fence.proxy.async since
        ("atomic", np.bool_),  # the last write was atomic
    ]
)


class _Memory(NamedTuple):
    """The argument of compiled functions."""

    data: np.ndarray
    records: np.ndarray
    epochs: np.ndarray  # barriers that each program has passed, + 1
    capacity: int  # bytes of a program
    stride: int  # from one program to the next, a multiple of every unit
    threads: int  # of a program
    unit: int
    report: np.ndarray  # code, thread, address, other warp


_OUTSIDE, _MISALIGNED, _UNWRITTEN, _RACE_WRITTEN, _RACE_READ = range(1, 6)
_COPYING, _MULTIPLYING, _UNFENCED = range(6, 9)


@numba.njit(cache=True)
def _place(memory, address, size, alignment, thread):
    """Offset in `memory.data` of a valid access, else -1 and a report."""
    memory.report[1], memory.report[2] = thread, np.int64(address)
    end = np.uint64(memory.capacity)
    if address >= end or address + np.uint64(size) > end:
        memory.report[0] = _OUTSIDE
    elif address % np.uint64(alignment) != 0:
        memory.report[0] = _MISALIGNED
    else:
        return thread // memory.threads * memory.stride + np.int64(address)
    return -1


@numba.njit(cache=True)
def _may_read(record, warp, epoch, report):
    if record.copying:
        report[0], report[3] = _COPYING, record.writer
    elif record.write_epoch == 0:
        report[0] = _UNWRITTEN
    elif record.write_epoch == epoch and record.writer != warp:
        report[0], report[3] = _RACE_WRITTEN, record.writer
    else:
        return True
    return False


@numba.njit(cache=True)
def _may_write(record, warp, epoch, report):
    if record.copying:
        report[0], report[3] = _COPYING, record.writer
    elif record.products:
        report[0] = _MULTIPLYING
    elif record.read_epoch == epoch and record.reader != warp:
        report[0], report[3] = _RACE_READ, record.reader
    elif record.write_epoch == epoch and record.writer != warp:
        report[0], report[3] = _RACE_WRITTEN, record.writer
    else:
        return True
    return False


@numba.njit(cache=True)
def _load(memory, addresses, mask, size, alignment, out):
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        first = _place(memory, addresses[thread], size, alignment, thread)
        if first < 0:
            return
        warp, epoch = thread // 32, memory.epochs[thread // memory.threads]
        for number in range(first // memory.unit, (first + size) // memory.unit):
            record = memory.records[number]
            if not _may_read(record, warp, epoch, memory.report):
                return
            if record.read_epoch != epoch:
                record.read_epoch, record.reader = epoch, warp
            elif record.reader != warp:
                record.reader = -1
        for byte in range(size):
            out[thread, byte] = memory.data[first + byte]


@numba.njit(cache=True)
def _same(memory, number, first, data):
    """Whether a store would leave the unit as it is."""
    for at in range(number * memory.unit, (number + 1) * memory.unit):
        if memory.data[at] != data[at - first]:
            return False
    return True


@numba.njit(cache=True)
def _store(memory, addresses, mask, alignment, data):
    size = data.shape[1]
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        first = _place(memory, addresses[thread], size, alignment, thread)
        if first < 0:
            return
        warp, epoch = thread // 32, memory.epochs[thread // memory.threads]
        for number in range(first // memory.unit, (first + size) // memory.unit):
            record = memory.records[number]
            if not _may_write(record, warp, epoch, memory.report):
                raced = memory.report[0] == _RACE_WRITTEN and not record.atomic
                if not raced or not _same(memory, number, first, data[thread]):
                    return
                memory.report[0] = 0
            record.write_epoch, record.writer, record.unfenced = epoch, warp, True
            record.atomic = False
        for byte in range(size):
            memory.data[first + byte] = data[thread, byte]


@numba.njit(cache=True)
def _begin_atomics(memory, addresses, mask, size, places):
    """Check atomic accesses, note them, and give their places in `memory.data`."""
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        first = _place(memory, addresses[thread], size, size, thread)
        if first < 0:
            return
        warp, epoch = thread // 32, memory.epochs[thread // memory.threads]
        for number in range(first // memory.unit, (first + size) // memory.unit):
            record = memory.records[number]
            if record.write_epoch == 0:
                memory.report[0] = _UNWRITTEN
                return
            shared = record.atomic and record.write_epoch == epoch and record.writer != warp
            if not _may_write(record, warp, epoch, memory.report):
                if not shared or memory.report[0] != _RACE_WRITTEN:
                    return
                memory.report[0] = 0
            record.write_epoch, record.writer = epoch, -1 if shared else warp
            record.atomic, record.unfenced = True, True
        places[thread] = first


@numba.njit(cache=True)
def _issue_copies(memory, addresses, mask, size):
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        first = _place(memory, addresses[thread], size, size, thread)
        if first < 0:
            return
        warp, epoch = thread // 32, memory.epochs[thread // memory.threads]
        for number in range(first // memory.unit, (first + size) // memory.unit):
            record = memory.records[number]
            if not _may_write(record, warp, epoch, memory.report):
                return
            record.copying, record.writer = True, warp


@numba.njit(cache=True)
def _land_copies(memory, addresses, mask, data):
    size = data.shape[1]
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        program = thread // memory.threads
        first = program * memory.stride + np.int64(addresses[thread])  # checked at the issue
        for number in range(first // memory.unit, (first + size) // memory.unit):
            record = memory.records[number]
            record.copying, record.unfenced, record.atomic = False, True, False
            record.write_epoch, record.writer = memory.epochs[program], thread // 32
        for byte in range(size):
            memory.data[first + byte] = data[thread, byte]


@numba.njit(cache=True)
def _take_operand(memory, chunks, thread, out):
    epoch = memory.epochs[thread // memory.threads]
    for chunk in range(len(chunks)):
        first = _place(memory, chunks[chunk], MAX_UNIT, MAX_UNIT, thread)
        if first < 0:
            return
        for number in range(first // memory.unit, (first + MAX_UNIT) // memory.unit):
            record = memory.records[number]
            if not _may_read(record, -1, epoch, memory.report):
                return
            if record.unfenced:
                memory.report[0] = _UNFENCED
                return
            record.read_epoch, record.reader = epoch, -1
            record.products += 1
        for byte in range(MAX_UNIT):
            out[chunk, byte] = memory.data[first + byte]


@numba.njit(cache=True)
def _release_operand(memory, chunks, program, epoch):
    for address in chunks:  # checked when the operand was taken
        first = program * memory.stride + np.int64(address)
        for number in range(first // memory.unit, (first + MAX_UNIT) // memory.unit):
            record = memory.records[number]
            record.products -= 1
            record.read_epoch, record.reader = epoch, -1


@numba.njit(cache=True)
def _fence(memory, program, warps):
    per_program = memory.stride // memory.unit
    for number in range(program * per_program, (program + 1) * per_program):
        record = memory.records[number]
        if record.unfenced:
            before = record.write_epoch < memory.epochs[program]
            record.unfenced = not before and (record.writer < 0 or not warps[record.writer])


class SharedMemory:
    """Shared memory of `num_programs` programs, `capacity` bytes each, of `threads` threads.
    unit: size in bytes of the kernel's smallest access. space: "shared", or "local" for the local
    memory of threads, each a program of one thread.

    Accesses raise Fault.
    """

    def __init__(
        self, num_programs: int, capacity: int, threads: int, unit: int, space: str = "shared"
    ):
        unit = min(unit, MAX_UNIT)
        stride = -(-capacity // MAX_UNIT) * MAX_UNIT
        self.capacity, self.threads, self.space = capacity, threads, space
        self.epochs = np.ones(num_programs, np.int32)
        self._memory = _Memory(
            np.zeros(num_programs * stride, np.uint8),
            np.zeros(num_programs * stride // unit, _RECORD),
            self.epochs,
            capacity,
            stride,
            threads,
            unit,
            np.zeros(4, np.int64),
        )

    def load(self, batch, addresses, mask, size: int, alignment: int = 0) -> np.ndarray:
        """Bytes [threads, size] at the addresses."""
        out, mask = np.zeros((len(addresses), size), np.uint8), batch.every(mask)
        _load(self._memory, addresses, mask, size, alignment or size, out)
        self._check(batch, size, "read")
        self._tally(batch, addresses, mask, size)
        return out

    def store(self, batch, addresses, mask, data: np.ndarray, alignment: int = 0) -> None:
        """Write bytes [threads, size]."""
        mask, size = batch.every(mask), data.shape[1]
        _store(self._memory, addresses, mask, alignment or size, data)
        self._check(batch, size, "written")
        self._tally(batch, addresses, mask, size)

    def atomic(self, batch, addresses, mask, dtype) -> dict[int, np.ndarray]:
        """See GlobalMemory."""
        mask, size = batch.every(mask), np.dtype(dtype).itemsize
        places = np.zeros(len(addresses), np.int64)
        _begin_atomics(self._memory, addresses, mask, size, places)
        self._check(batch, size, "atomically changed")
        self._tally(batch, addresses, mask, size)
        return {
            int(thread): self._memory.data[places[thread] : places[thread] + size].view(dtype)
            for thread in np.flatnonzero(mask)
        }

    def issue_copies(self, batch, addresses, mask, size: int) -> None:
        """Begin asynchronous copies: accessing their targets before `land_copies` is a fault."""
        mask = batch.every(mask)
        _issue_copies(self._memory, addresses, mask, size)
        self._check(batch, size, "overwritten by an asynchronous copy")
        self._tally(batch, addresses, mask, size)

    def land_copies(self, addresses, mask, data: np.ndarray) -> None:
        """The data of copies arrives."""
        _land_copies(self._memory, addresses, mask, data)

    def take_operand(self, batch, thread: int, chunks: np.ndarray) -> np.ndarray:
        """Bytes [chunks, 16] at the addresses `chunks` (uint64) of a thread's program. A product
        reads them until `release_operand`."""
        out = np.empty((len(chunks), MAX_UNIT), np.uint8)
        _take_operand(self._memory, chunks, thread, out)
        self._check(batch, MAX_UNIT, "read by a product")
        return out

    def release_operand(self, program: int, chunks: np.ndarray, until_barrier: bool = True) -> None:
        """A product has read what `take_operand` gave. until_barrier: only the threads that waited
        for it may overwrite it before the program's next barrier."""
        epoch = self.epochs[program] if until_barrier else -1
        _release_operand(self._memory, chunks, program, epoch)

    def fence(self, program: int, warps: np.ndarray) -> None:
        """fence.proxy.async by `warps` (booleans): the async proxy sees what they wrote or see."""
        _fence(self._memory, program, warps)

    def _tally(self, batch, addresses, mask, size: int) -> None:
        if batch.launch.tally is not None and self.space == "shared":
            batch.launch.tally.shared_access(batch, addresses, mask, size)

    def _check(self, batch, size: int, done: str) -> None:
        code, thread, address, other = map(int, self._memory.report)
        if not code:
            return
        self._memory.report[:] = 0
        memory = f"{self.capacity} bytes of {self.space} memory"
        what = f"{size} bytes {done} at {address:#x} of {memory}"
        warps = max(self.threads // 32, 1)
        by = "several warps" if other < 0 else f"warp {other % warps}"
        kind, detail = {
            _OUTSIDE: (FaultKind.OUT_OF_BOUNDS, "past the end"),
            _MISALIGNED: (FaultKind.MISALIGNED, f"the address is not a multiple of {size}"),
            _UNWRITTEN: (FaultKind.UNWRITTEN, "nothing was stored there"),
            _RACE_WRITTEN: (FaultKind.SHARED_RACE, f"{by} wrote it since the last barrier"),
            _RACE_READ: (FaultKind.SHARED_RACE, f"{by} read it since the last barrier"),
            _COPYING: (FaultKind.COPY_IN_FLIGHT, f"a copy by {by} has not been waited for"),
            _MULTIPLYING: (FaultKind.MATRIX_IN_FLIGHT, "a product that reads it may still run"),
            _UNFENCED: (FaultKind.FENCE, "threads wrote it without a fence.proxy.async since"),
        }[code]
        raise batch.fault(kind, f"{what}: {detail}", thread, address=address)
