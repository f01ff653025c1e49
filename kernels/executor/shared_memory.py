"""Shared memory of the programs of a batch, and what is in flight to and from it.

Every byte remembers who wrote it and who read it since the program's last barrier. Between barriers
warps run in no order, so two warps may not touch a byte if one of them writes it, unless both write
the same value, as the compiler lets warps do that hold the same part of a result; the threads of
one warp are taken to run together. Dynamic shared memory holds nothing at the start, and what
nothing wrote may not be read.

cp.async (PTX ISA 9.7.9.25) writes at some time between its issue and the wait that covers it. Until
then its bytes may be neither read nor written, by anyone; when it is issued, nobody else may have
touched them since the last barrier, and when it has been waited for, it counts as written by the
waiting warp. wgmma (9.7.15) and tcgen05.mma (9.7.16) read their operands until they are waited for:
these may not be written before. They read through the async proxy, which sees what threads wrote
after a fence.proxy.async.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from kernels.executor.faults import FaultKind


class State(NamedTuple):
    """One element for each byte of shared memory of each program; warps are those of the batch."""

    data: np.ndarray
    write_epoch: np.ndarray  # number of barriers before the last write; -1: nothing wrote
    writer: np.ndarray
    read_epoch: np.ndarray
    reader: np.ndarray  # -1: several warps
    copying: np.ndarray  # 1 + warp whose cp.async is in flight to it
    multiplying: np.ndarray  # number of products that still read it
    unfenced: np.ndarray  # written by threads, and no fence.proxy.async since


_OUTSIDE, _MISALIGNED, _UNWRITTEN, _RACE_WRITTEN, _RACE_READ = range(1, 6)
_COPYING, _MULTIPLYING, _UNFENCED = range(6, 9)


@numba.njit(cache=True)
def _place(address, size, alignment, capacity, report):
    """Whether an access lies inside shared memory and is aligned; reports if not."""
    if address >= np.uint64(capacity) or address + np.uint64(size) > np.uint64(capacity):
        report[0] = _OUTSIDE
    elif address % np.uint64(alignment) != 0:
        report[0] = _MISALIGNED
    return report[0] == 0


@numba.njit(cache=True)
def _may_read(at, warp, epoch, state, report):
    if state.copying[at]:
        report[0], report[3] = _COPYING, state.copying[at] - 1
    elif state.write_epoch[at] < 0:
        report[0] = _UNWRITTEN
    elif state.write_epoch[at] == epoch and state.writer[at] != warp:
        report[0], report[3] = _RACE_WRITTEN, state.writer[at]
    return report[0] == 0


@numba.njit(cache=True)
def _may_write(at, warp, epoch, state, report):
    if state.copying[at]:
        report[0], report[3] = _COPYING, state.copying[at] - 1
    elif state.multiplying[at]:
        report[0] = _MULTIPLYING
    elif state.read_epoch[at] == epoch and state.reader[at] != warp:
        report[0], report[3] = _RACE_READ, state.reader[at]
    elif state.write_epoch[at] == epoch and state.writer[at] != warp:
        report[0], report[3] = _RACE_WRITTEN, state.writer[at]
    return report[0] == 0


@numba.njit(cache=True)
def _load(addresses, mask, size, alignment, out, shape, epochs, state, report):
    capacity, threads = shape
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        report[1], report[2] = thread, np.int64(addresses[thread])
        if not _place(addresses[thread], size, alignment, capacity, report):
            return
        program, warp = thread // threads, thread // 32
        first, epoch = program * capacity + np.int64(addresses[thread]), epochs[program]
        for byte in range(size):
            at = first + byte
            if not _may_read(at, warp, epoch, state, report):
                return
            if state.read_epoch[at] != epoch:
                state.read_epoch[at], state.reader[at] = epoch, warp
            elif state.reader[at] != warp:
                state.reader[at] = -1
            out[thread, byte] = state.data[at]


@numba.njit(cache=True)
def _store(addresses, mask, alignment, data, shape, epochs, state, report):
    capacity, threads = shape
    size = data.shape[1]
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        report[1], report[2] = thread, np.int64(addresses[thread])
        if not _place(addresses[thread], size, alignment, capacity, report):
            return
        program, warp = thread // threads, thread // 32
        first, epoch = program * capacity + np.int64(addresses[thread]), epochs[program]
        for byte in range(size):
            at = first + byte
            if not _may_write(at, warp, epoch, state, report):
                if report[0] != _RACE_WRITTEN or state.data[at] != data[thread, byte]:
                    return
                report[0] = 0
            state.write_epoch[at], state.writer[at] = epoch, warp
            state.unfenced[at] = 1
            state.data[at] = data[thread, byte]


@numba.njit(cache=True)
def _issue(addresses, mask, size, shape, epochs, state, report):
    """Mark the bytes that asynchronous copies will write."""
    capacity, threads = shape
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        report[1], report[2] = thread, np.int64(addresses[thread])
        if not _place(addresses[thread], size, size, capacity, report):
            return
        program, warp = thread // threads, thread // 32
        first, epoch = program * capacity + np.int64(addresses[thread]), epochs[program]
        for at in range(first, first + size):
            if not _may_write(at, warp, epoch, state, report):
                return
            state.copying[at] = warp + 1


@numba.njit(cache=True)
def _land(addresses, mask, data, shape, epochs, state):
    capacity, threads = shape
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        program, warp = thread // threads, thread // 32
        first = program * capacity + np.int64(addresses[thread])
        for byte in range(data.shape[1]):
            at = first + byte
            state.copying[at] = 0
            state.write_epoch[at], state.writer[at] = epochs[program], warp
            state.unfenced[at] = 1
            state.data[at] = data[thread, byte]


@numba.njit(cache=True)
def _take_operand(offsets, program, out, shape, epochs, state, report):
    """Read an operand of a product, bytes at `offsets`, and hold it until `_give_back`."""
    capacity, _ = shape
    epoch = epochs[program]
    for number in range(len(offsets)):
        report[2] = offsets[number]
        if offsets[number] < 0 or offsets[number] >= capacity:
            report[0] = _OUTSIDE
            return
        at = program * capacity + offsets[number]
        if not _may_read(at, -1, epoch, state, report):
            return
        if state.unfenced[at]:
            report[0] = _UNFENCED
            return
        state.read_epoch[at], state.reader[at] = epoch, -1
        state.multiplying[at] += 1
        out[number] = state.data[at]


@numba.njit(cache=True)
def _give_back(offsets, program, capacity, epoch, state):
    for offset in offsets:
        at = program * capacity + offset
        state.multiplying[at] -= 1
        state.read_epoch[at], state.reader[at] = epoch, -1


class SharedMemory:
    """Shared memory of `num_programs` programs, `capacity` bytes each, of `threads` threads."""

    def __init__(self, num_programs: int, capacity: int, threads: int):
        total = num_programs * capacity
        self.capacity, self.threads = capacity, threads
        self.epochs = np.zeros(num_programs, np.int32)
        self.state = State(
            np.full(total, 0xFF, np.uint8),
            np.full(total, -1, np.int32),
            np.zeros(total, np.int16),
            np.full(total, -1, np.int32),
            np.zeros(total, np.int16),
            np.zeros(total, np.int16),
            np.zeros(total, np.int16),
            np.zeros(total, np.uint8),
        )
        self._shape = capacity, threads
        self._report = np.zeros(4, np.int64)

    def load(self, batch, addresses, mask, size: int, alignment: int = 0) -> np.ndarray:
        """Bytes [threads, size] at the addresses."""
        out = np.zeros((len(addresses), size), np.uint8)
        mask = batch.every(mask)
        _load(
            addresses,
            mask,
            size,
            alignment or size,
            out,
            self._shape,
            self.epochs,
            self.state,
            self._report,
        )
        self._check(batch, size, "read")
        self._tally(batch, addresses, mask, size)
        return out

    def store(self, batch, addresses, mask, data: np.ndarray, alignment: int = 0) -> None:
        """Write bytes [threads, size]."""
        mask, size = batch.every(mask), data.shape[1]
        _store(
            addresses,
            mask,
            alignment or size,
            data,
            self._shape,
            self.epochs,
            self.state,
            self._report,
        )
        self._check(batch, size, "written")
        self._tally(batch, addresses, mask, size)

    def issue_copies(self, batch, addresses, mask, size: int) -> None:
        """Asynchronous copies begin: their bytes belong to nobody until `land_copies`."""
        mask = batch.every(mask)
        _issue(addresses, mask, size, self._shape, self.epochs, self.state, self._report)
        self._check(batch, size, "overwritten by an asynchronous copy")
        self._tally(batch, addresses, mask, size)

    def land_copies(self, addresses, mask, data: np.ndarray) -> None:
        """The data of copies arrives."""
        _land(addresses, mask, data, self._shape, self.epochs, self.state)

    def take_operand(self, batch, program: int, thread: int, offsets: np.ndarray) -> np.ndarray:
        """Bytes at `offsets` of a program, read by a product until `give_back`."""
        out = np.empty(len(offsets), np.uint8)
        self._report[1] = thread
        _take_operand(offsets, program, out, self._shape, self.epochs, self.state, self._report)
        self._check(batch, 1, "read by a product")
        return out

    def give_back(self, program: int, offsets: np.ndarray, until_barrier: bool = True) -> None:
        """A product has read what `take_operand` took. until_barrier: of this only the threads know
        that waited, the others after the next barrier."""
        epoch = self.epochs[program] if until_barrier else -1
        _give_back(offsets, program, self.capacity, epoch, self.state)

    def fence(self, program: int, warps: np.ndarray) -> None:
        """fence.proxy.async by `warps`: the async proxy sees what they wrote or can see."""
        part = slice(program * self.capacity, (program + 1) * self.capacity)
        state = self.state
        seen = state.write_epoch[part] < self.epochs[program]
        seen |= np.isin(state.writer[part], warps)
        state.unfenced[part][seen] = 0

    def _tally(self, batch, addresses, mask, size: int) -> None:
        if batch.launch.tally is not None:
            batch.launch.tally.shared_access(batch, addresses, mask, size)

    def _check(self, batch, size: int, done: str) -> None:
        code, thread, address, other = map(int, self._report)
        if not code:
            return
        self._report[:] = 0
        warps = self.threads // 32
        what = f"{size} bytes {done} at {address:#x} of {self.capacity} bytes of shared memory"
        by = "several warps" if other < 0 else f"warp {other % warps}"
        kind, detail = {
            _OUTSIDE: (FaultKind.OUT_OF_BOUNDS, "past the end"),
            _MISALIGNED: (FaultKind.MISALIGNED, f"the address is no multiple of {size}"),
            _UNWRITTEN: (FaultKind.UNWRITTEN, "nothing was stored there"),
            _RACE_WRITTEN: (FaultKind.SHARED_RACE, f"{by} wrote it since the last barrier"),
            _RACE_READ: (FaultKind.SHARED_RACE, f"{by} read it since the last barrier"),
            _COPYING: (FaultKind.COPY_IN_FLIGHT, f"a copy by {by} has not been waited for"),
            _MULTIPLYING: (FaultKind.MATRIX_IN_FLIGHT, "a product that reads it may still run"),
            _UNFENCED: (FaultKind.FENCE, "threads wrote it without a fence.proxy.async since"),
        }[code]
        raise batch.fault(kind, f"{what}: {detail}", thread, address=address)
