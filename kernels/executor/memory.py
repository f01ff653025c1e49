"""Checked memory: the base of global, shared and local memory.

A record stores the program and the warps that last read and wrote a unit of memory. A unit is as
large as the smallest access to its region so far, up to 16 bytes. Accesses are aligned to their
size, so no access covers part of a unit. By the PTX memory model (chapter 8) these are races:

- two programs access a unit and one of them writes it, unless both accesses are atomic, or the
  first program has since executed an atomic instruction with release semantics and the second one
  with acquire semantics. The addresses are not compared, so a wrong lock is not noticed.
- two warps of a program do so, and nothing orders them (barriers.py). Two cases are no races, as
  Triton compiles to them if warps hold the same part of a result: the warps store the same value,
  or load global memory by one instruction before one of them overwrites it;
- memory that the launch writes is read by ld.global.nc;
- the source of a cp.async or of a matrix product is written before its wait, or the target of a
  cp.async is accessed.

Threads of one warp do not race.
"""

import ctypes
import mmap
from typing import Any, NamedTuple

import numba
import numpy as np

from kernels.executor.faults import Fault, FaultKind

ASYNCHRONOUS = 32
"""Columns of a clock for writes by asynchronous copies, one for each mbarrier that counts them."""
WINDOW_BITS = 48  # real addresses of a process lie below
MAX_DIMS = 8
MAX_UNIT = 16
ORIGIN = 1 << 16  # the operating system keeps the memory below
SPACE = np.ctypeslib.as_array((ctypes.c_uint8 * (2**47 - ORIGIN)).from_address(ORIGIN))
"""The memory of this process as one array, so that compiled functions reach every tensor. Accesses
are checked against the windows first."""

_RECORD = np.dtype(
    [
        ("writer", np.int32),  # program + 1; 0: none
        ("reader", np.int32),  # program + 1; -1: several programs
        ("write_epoch", np.int32),  # of the warp, see barriers.py
        ("read_epoch", np.int32),
        ("write_time", np.int32),  # number of ordering atomic instructions before
        ("read_time", np.int32),
        ("read_warps", np.uint32),  # bits of the warps that read in that epoch
        ("read_by", np.int32),  # instruction, -1: several
        ("write_warp", np.int16),  # -1: several, atomically; during a copy the one that issued it
        ("reading", np.int16),  # copies in flight that read it
        ("taking", np.int16),  # products in flight that read it
        ("producing", np.int16),  # products in flight that write it
        ("constant", np.bool_),  # read by ld.global.nc
        ("atomic", np.bool_),  # the last write was atomic
        ("copying", np.bool_),  # a cp.async is in flight to it
        ("unfenced", np.bool_),  # written by threads, and no fence.proxy.async since
    ]
)


# Arrays of records, because compiled functions pass a tuple of many arrays slowly.
WINDOW = np.dtype(
    [
        ("base", np.uint64),  # address as the kernel sees it
        ("real", np.int64),  # place in SPACE
        ("span", np.int64),
        ("itemsize", np.int64),
        ("num_dims", np.int64),  # 0: every offset inside the span is an element
        ("sizes", np.int64, (MAX_DIMS,)),
        ("strides", np.int64, (MAX_DIMS,)),
        ("shadow", np.int64),  # place of its first byte among the bytes of all regions
        ("region", np.int64),  # tensors that overlap share a region
        ("unwritten", np.int64),  # place in SPACE, 0: all of it counts as written
    ]
)
REGION = np.dtype(
    [
        ("start", np.int64),  # place of its first byte, and of its first record
        ("unit", np.int64),  # bytes of a record; 0: not accessed yet
    ]
)
_PROGRAM = np.dtype([("released", np.int64), ("acquired", np.int64)])
"""Time of the last atomic instruction with release, acquire semantics."""


class Arrays(NamedTuple):
    """The argument of compiled functions."""

    space: np.ndarray
    windows: np.ndarray
    num_arguments: int  # the windows behind them are of tables; -1: each program has its own window
    regions: np.ndarray
    records: np.ndarray
    stamps: np.ndarray  # [records, warps]: epochs of reads; no columns if barriers hold all warps
    programs: np.ndarray
    clock: np.ndarray  # [1]: number of ordering atomic instructions
    report: np.ndarray  # code, thread, window, offset, other program or warp


class Threads(NamedTuple):
    """Threads of a batch."""

    programs: np.ndarray  # number in the grid, of each thread
    clocks: np.ndarray  # see barriers.py
    per_program: int
    at: int  # the instruction; -1 in shared memory


_UNCOUNTED: dict[str, Any] = {"cache": True, "_nrt": False}
compiled = numba.njit(**_UNCOUNTED)
"""Compiles without reference counts, so the functions cannot allocate. With reference counts numba
counts every array of Arrays for every thread, which takes five times longer."""
inlined = numba.njit(**_UNCOUNTED, forceinline=True)

_OUTSIDE, _HOLE, _MISALIGNED, _UNWRITTEN, _CONSTANT, _READING, _COPYING = range(1, 8)
_RACE_WRITTEN, _RACE_READ, _WARP_WRITTEN, _WARP_READ, UNFENCED, _FINER = range(8, 14)
_TAKING, _PRODUCING = 14, 15


@compiled
def _is_element(offset, window):
    """Whether the byte belongs to an element, not to a gap between rows of a strided view."""
    rest = offset
    for dim in range(window.num_dims):
        stride = window.strides[dim]
        index = rest // stride
        if index >= window.sizes[dim]:
            return False
        rest -= index * stride
    return rest < window.itemsize


@inlined
def _check(address, size, alignment, window):
    """(code, offset) of an access to a window; code 0 if all is well."""
    offset = np.int64(address - window.base)
    if offset < 0 or offset > window.span - size:
        return _OUTSIDE, offset
    if address % np.uint64(alignment) != 0:
        return _MISALIGNED, offset
    if window.num_dims > 0 and not (
        _is_element(offset, window) and _is_element(offset + size - 1, window)
    ):
        return _HOLE, offset
    return 0, offset


@inlined
def _locate(address, size, alignment, windows, num_arguments):
    """(code, window, offset) of an access; code 0 if all is well.

    Several tensors of an address table may begin at one address. One valid window is enough."""
    top = np.int64(address >> np.uint64(WINDOW_BITS))
    if 0 < top <= num_arguments:
        code, offset = _check(address, size, alignment, windows[top - 1])
        return code, top - 1, offset
    worst, window, near = _OUTSIDE, -1, np.int64(address)
    if top == 0:
        for candidate in range(num_arguments, len(windows)):
            code, offset = _check(address, size, alignment, windows[candidate])
            if code == 0:
                return code, candidate, offset
            if 0 <= offset < windows[candidate].span:
                worst, window, near = code, candidate, offset
    return worst, window, near


@inlined
def place_of(memory, threads, address, size, alignment, thread):
    """(window, offset) of a valid access, else (-1, 0) and a report. alignment: the access
    size; cp.async may read fewer bytes."""
    if memory.num_arguments < 0:
        window = np.int64(thread // threads.per_program)
        code, offset = _check(address, size, alignment, memory.windows[window])
    else:
        code, window, offset = _locate(
            address, size, alignment, memory.windows, memory.num_arguments
        )
    report = memory.report
    if code == 0:
        unit = memory.regions[memory.windows[window].region].unit
        if unit == 0 or alignment < unit:
            code = _FINER
    report[0], report[1], report[2], report[3] = code, thread, window, offset
    if code == 0:
        return window, offset
    return -1, np.int64(0)


@inlined
def _ordered(memory, other, time, program):
    """Whether program `other` - 1 did something at `time` before `program` - 1 does this."""
    if other <= 0:
        return False
    released, acquired = memory.programs[other - 1].released, memory.programs[program - 1].acquired
    return released > time and acquired > time


@inlined
def _bit(warp):
    return np.uint32(1) << np.uint32(warp)


@inlined
def concurrent(clock, warp, other, epoch):
    """Whether nothing orders what warp `other` (-1: several) did in `epoch` before `warp` now."""
    if other >= 0:
        return other != warp and clock[other] < epoch
    before = True
    for each in range(len(clock) - ASYNCHRONOUS):
        before &= each == warp or clock[each] >= epoch
    return not before


@inlined
def _recent_readers(memory, record, number, warp, clock):
    """Bits of the warps whose reads nothing orders before `warp` now, and of its own epoch."""
    if memory.stamps.shape[1] == 0:
        return record.read_warps if record.read_epoch == clock[warp] else np.uint32(0)
    recent = np.uint32(0)
    for other in range(memory.stamps.shape[1]):
        if memory.stamps[number, other] > clock[other] - (other == warp):
            recent |= record.read_warps & _bit(other)
    return recent


@inlined
def clock_of(threads, thread):
    """(program + 1, warp, clock of the warp) of a thread."""
    warp = thread % threads.per_program // 32
    return threads.programs[thread] + 1, warp, threads.clocks[thread // threads.per_program, warp]


@inlined
def may_read(memory, record, number, program, warp, clock, constant, instruction, product):
    """Whether the warp may read the unit now, else a report. product: a product reads, and it need
    not wait for earlier products."""
    report = memory.report
    if record.copying:
        report[0], report[4] = _COPYING, record.write_warp
    elif record.producing and not product:
        report[0] = _PRODUCING
    elif record.writer == 0:
        if memory.num_arguments < 0:
            report[0] = _UNWRITTEN
    elif constant:
        report[0] = _CONSTANT
    elif record.writer != program:
        if not _ordered(memory, record.writer, record.write_time, program):
            report[0], report[4] = _RACE_WRITTEN, record.writer - 1
    elif concurrent(clock, warp, record.write_warp, record.write_epoch):
        readers = np.uint32(0)
        if instruction >= 0 and record.read_by == instruction:
            readers = _recent_readers(memory, record, number, warp, clock)
        if not readers & _bit(max(record.write_warp, 0)):
            report[0], report[4] = _WARP_WRITTEN, record.write_warp
    return report[0] == 0


@inlined
def may_write(memory, record, number, program, warp, clock, atomic, product):
    """Whether the warp may write the unit now, else a report. product: see `may_read`."""
    report = memory.report
    if record.copying:
        report[0], report[4] = _COPYING, record.write_warp
    elif record.producing and not product:
        report[0] = _PRODUCING
    elif record.taking and not product:
        report[0] = _TAKING
    elif record.reading:
        report[0] = _READING
    elif record.constant:
        report[0] = _CONSTANT
    elif record.reader and record.reader != program:
        if not _ordered(memory, record.reader, record.read_time, program):
            report[0], report[4] = _RACE_READ, record.reader - 1
    elif record.reader:
        readers = _recent_readers(memory, record, number, warp, clock)
        if readers & ~_bit(warp) and not (readers & _bit(warp) and record.read_by >= 0):
            report[0], report[4] = _WARP_READ, -1
    if report[0] or record.writer == 0 or (atomic and record.atomic):
        return report[0] == 0
    if record.writer != program:
        if not _ordered(memory, record.writer, record.write_time, program):
            report[0], report[4] = _RACE_WRITTEN, record.writer - 1
    elif concurrent(clock, warp, record.write_warp, record.write_epoch):
        report[0], report[4] = _WARP_WRITTEN, record.write_warp
    return report[0] == 0


@inlined
def units(memory, window, offset, size):
    """Numbers of the records of an access."""
    region = memory.regions[memory.windows[window].region]
    start, unit = region.start, region.unit
    first = memory.windows[window].shadow + offset - start
    return range(start + first // unit, start + (first + size - 1) // unit + 1)


@inlined
def is_written(memory, window, offset, size):
    unwritten = memory.windows[window].unwritten
    if unwritten:
        for byte in range(size):
            if memory.space[unwritten + offset + byte]:
                memory.report[0] = _UNWRITTEN
                return False
    return True


@inlined
def note_read(memory, record, number, program, warp, clock, instruction):
    """Record a read by the warp. instruction: -1 if it is none that may be followed by a store."""
    joins = record.reader == program and _recent_readers(memory, record, number, warp, clock) != 0
    if memory.stamps.shape[1]:
        memory.stamps[number, warp] = clock[warp]
    if joins:
        record.read_warps |= _bit(warp)
        if record.read_by != instruction:
            record.read_by = -1
        return
    alone = record.reader in (0, program)
    if not alone and not _ordered(memory, record.reader, record.read_time, program):
        record.reader = -1
    else:
        record.reader = program
    record.read_warps, record.read_by = _bit(warp), instruction
    record.read_epoch = clock[warp]


@compiled
def _load(memory, threads, addresses, mask, sizes, alignment, constant, copies, out, begin):
    for thread in range(begin, len(addresses)):
        if not mask[thread]:
            continue
        size = sizes[thread] if len(sizes) > 1 else sizes[0]
        window, offset = place_of(memory, threads, addresses[thread], size, alignment, thread)
        if window < 0 or not is_written(memory, window, offset, size):
            return
        at = threads.at
        program, warp, clock = clock_of(threads, thread)
        for number in units(memory, window, offset, size):
            record = memory.records[number]
            if not may_read(memory, record, number, program, warp, clock, constant, at, False):
                return
            note_read(memory, record, number, program, warp, clock, at)
            record.read_time = memory.clock[0]
            record.constant |= constant
            record.reading += copies
        real = memory.windows[window].real + offset
        for byte in range(size):
            out[thread, byte] = memory.space[real + byte]


@compiled
def _end_copies(memory, threads, addresses, mask, sizes, alignment):
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        size = sizes[thread] if len(sizes) > 1 else sizes[0]
        window, offset = place_of(memory, threads, addresses[thread], size, alignment, thread)
        for number in units(memory, window, offset, size):
            memory.records[number].reading -= 1


@compiled
def _take(memory, threads, chunks, _mask, readers, size, num_warps, fenced, noted, out, _begin):
    for number in range(len(readers)):
        thread = readers[number]
        for chunk in range(chunks.shape[1]):
            address = chunks[number, chunk]
            window, offset = place_of(memory, threads, address, size, size, thread)
            if window < 0 or not is_written(memory, window, offset, size):
                return
            for unit in units(memory, window, offset, size):
                record = memory.records[unit]
                for follower in range(num_warps):
                    program, warp, clock = clock_of(threads, thread + 32 * follower)
                    if not may_read(memory, record, unit, program, warp, clock, False, -1, True):
                        return
                    if noted:
                        note_read(memory, record, unit, program, warp, clock, -1)
                        record.read_time = memory.clock[0]
                if fenced and record.unfenced:
                    memory.report[0] = UNFENCED
                    return
                record.taking += 1
            real = memory.windows[window].real + offset
            for byte in range(size):
                out[number, chunk, byte] = memory.space[real + byte]


@compiled
def _release(memory, threads, chunks, readers, size, num_warps):
    for number in range(len(readers)):
        thread = readers[number]
        for address in chunks[number]:  # checked when the chunk was taken
            window, offset = place_of(memory, threads, address, size, size, thread)
            for unit in units(memory, window, offset, size):
                record = memory.records[unit]
                record.taking -= 1
                for follower in range(num_warps):
                    program, warp, clock = clock_of(threads, thread + 32 * follower)
                    note_read(memory, record, unit, program, warp, clock, -1)


@inlined
def _same(memory, window, number, data, offset):
    """Whether a store of `data` would leave the record's unit as it is."""
    region = memory.regions[memory.windows[window].region]
    first = region.start + (number - region.start) * region.unit - memory.windows[window].shadow
    for at in range(first, first + region.unit):
        if memory.space[memory.windows[window].real + at] != data[at - offset]:
            return False
    return True


@inlined
def note_write(memory, record, program, warp, clock, atomic):
    """Record a write by the warp."""
    several = atomic and record.atomic and record.writer == program
    if several and concurrent(clock, warp, record.write_warp, record.write_epoch):
        record.write_warp, record.write_epoch = -1, max(record.write_epoch, clock[warp])
    else:
        record.write_warp, record.write_epoch = warp, clock[warp]
    record.writer, record.write_time = program, memory.clock[0]
    record.atomic, record.unfenced = atomic, True


@inlined
def _mark_written(memory, window, offset, size):
    unwritten = memory.windows[window].unwritten
    if unwritten:
        for byte in range(size):
            memory.space[unwritten + offset + byte] = 0


@compiled
def _store(memory, threads, addresses, mask, data, alignment, later, begin):
    size = data.shape[1]
    for thread in range(begin, len(addresses)):
        if not mask[thread]:
            continue
        window, offset = place_of(memory, threads, addresses[thread], size, alignment, thread)
        if window < 0:
            return
        program, warp, clock = clock_of(threads, thread)
        for number in units(memory, window, offset, size):
            record = memory.records[number]
            if not may_write(memory, record, number, program, warp, clock, False, False):
                raced = memory.report[0] == _WARP_WRITTEN and not record.atomic
                if later or not raced or not _same(memory, window, number, data[thread], offset):
                    return
                memory.report[0] = 0
            if later:
                record.copying, record.write_warp = True, warp
            else:
                note_write(memory, record, program, warp, clock, False)
        if later:
            continue
        _mark_written(memory, window, offset, size)
        real = memory.windows[window].real + offset
        for byte in range(size):
            memory.space[real + byte] = data[thread, byte]


@compiled
def _begin_atomics(memory, threads, addresses, mask, size, release, acquire, places, begin):
    """Check atomic accesses, note them, and set `places`, their indices in SPACE."""
    for thread in range(begin, len(addresses)):
        if not mask[thread]:
            continue
        window, offset = place_of(memory, threads, addresses[thread], size, size, thread)
        if window < 0 or not is_written(memory, window, offset, size):
            return
        program, warp, clock = clock_of(threads, thread)
        for number in units(memory, window, offset, size):
            record = memory.records[number]
            if memory.num_arguments < 0 and record.writer == 0:
                memory.report[0] = _UNWRITTEN
                return
            if not may_write(memory, record, number, program, warp, clock, True, False):
                return
            note_write(memory, record, program, warp, clock, True)
        _mark_written(memory, window, offset, size)
        places[thread] = memory.windows[window].real + offset
        memory.clock[0] += release or acquire
        if release:
            memory.programs[program - 1].released = memory.clock[0]
        if acquire:
            memory.programs[program - 1].acquired = memory.clock[0]


def _zeros(count: int, dtype) -> np.ndarray:
    """Zeros, of which the operating system allocates only the pages that are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    pages = mmap.mmap(-1, max(count, 1) * np.dtype(dtype).itemsize, flags=flags)
    return np.frombuffer(pages, dtype)


class CheckedMemory:
    """Windows of memory, with a record of each unit. Accesses raise Fault.

    Args:
        windows, regions, num_bytes: where memory and records are; bytes of all regions.
        num_arguments: see Arrays.
        num_programs: of the grid, 0 if programs share nothing.
        num_warps: of a program whose barriers may hold part of its warps, else 0.
    """

    race: FaultKind

    def __init__(
        self, windows, regions, num_bytes: int, num_arguments: int, num_programs: int, num_warps=0
    ):
        records, programs = _zeros(num_bytes, _RECORD), np.zeros(num_programs, _PROGRAM)
        stamps = _zeros(num_bytes * num_warps, np.int32)[: num_bytes * num_warps]
        clock, report = np.zeros(1, np.int64), np.zeros(5, np.int64)
        self.arrays = Arrays(
            SPACE, windows, num_arguments, regions, records, stamps.reshape(num_bytes, num_warps),
            programs, clock, report,
        )  # fmt: skip

    def threads(self, batch) -> Threads:
        """The threads of a batch."""
        raise NotImplementedError

    def describe(self, window: int, offset: int) -> tuple[str | None, str, int, int]:
        """(tensor, where it is, span of the window, address) of a byte."""
        raise NotImplementedError

    def records(self, number: int, stamps: bool = False) -> np.ndarray:
        """Records (or stamps) of a region in use."""
        regions, records = self.arrays.regions, self.arrays.records
        records = self.arrays.stamps if stamps else records
        start, unit = regions[number]
        end = regions[number + 1]["start"] if number + 1 < len(regions) else len(records)
        return records[start : start + (end - start) // unit]

    def run(self, batch, compiled, size: int, done: str, *arguments) -> None:
        """Run `compiled` for all threads; where it asks for records of smaller units, make them and
        let it go on. Raises Fault."""
        memory, begin = self.arrays, 0
        threads = self.threads(batch)
        compiled(memory, threads, *arguments, begin)
        while memory.report[0] == _FINER:
            number, begin = memory.windows[memory.report[2]]["region"], memory.report[1]
            region, memory.report[0] = memory.regions[number], 0
            kinds = (False, True) if region["unit"] else ()
            before = [self.records(number, stamps).copy() for stamps in kinds]
            finer = region["unit"] // min(size, MAX_UNIT)
            region["unit"] = min(size, MAX_UNIT)
            for stamps, held in zip(kinds, before, strict=True):
                self.records(number, stamps)[:] = np.repeat(held, finer, axis=0)
            compiled(memory, threads, *arguments, begin)
        code, thread, window, offset, other = map(int, memory.report)
        if code:
            memory.report[:] = 0
            raise self._fault(batch, code, thread, window, offset, other, f"{size} bytes {done}")

    def _fault(self, batch, code, thread, window, offset, other, what) -> Fault:
        tensor, where, span, address = self.describe(window, offset)
        program = "others" if other < 0 else f"program {batch.launch.coordinates(other)}"
        warp = "another warp" if other < 0 else f"warp {other}"
        race, since = self.race, "since the last barrier"
        if other >= batch.threads_per_program // 32:
            warp, since = "a TMA copy", "and the warp has not waited for its mbarrier"
        if code == _TAKING and self.race is FaultKind.GLOBAL_RACE:  # by TMA
            code = _READING
        kind, detail = {
            _OUTSIDE: (FaultKind.OUT_OF_BOUNDS, f"it spans {span} bytes"),
            _HOLE: (FaultKind.OUT_OF_BOUNDS, "between the rows of a strided view"),
            _MISALIGNED: (FaultKind.MISALIGNED, "the address is not a multiple of the size"),
            _UNWRITTEN: (FaultKind.UNWRITTEN, "nothing was stored there"),
            _CONSTANT: (race, "ld.global.nc reads it, which no program may write"),
            _READING: (FaultKind.COPY_IN_FLIGHT, "a copy from it has not been waited for"),
            _TAKING: (FaultKind.MATRIX_IN_FLIGHT, "a product that reads it may still run"),
            _PRODUCING: (FaultKind.MATRIX_IN_FLIGHT, "a product that writes it may still run"),
            _COPYING: (FaultKind.COPY_IN_FLIGHT, f"a copy by {warp} has not been waited for"),
            _RACE_WRITTEN: (race, f"{program} wrote there"),
            _RACE_READ: (race, f"{program} read there"),
            _WARP_WRITTEN: (race, f"{warp} of the program wrote it {since}"),
            _WARP_READ: (race, f"{warp} of the program read it {since}"),
            UNFENCED: (FaultKind.FENCE, "threads wrote it without a fence.proxy.async since"),
        }[code]
        detail = f"{what} at {where}: {detail}"
        return batch.fault(kind, detail, thread, address=address, tensor=tensor)

    def load(
        self, batch, addresses, mask, size: int, *, sizes=None, alignment: int = 0, constant=False,
        copies=False,
    ) -> np.ndarray:  # fmt: skip
        """Bytes [threads, size] at the addresses. sizes: fewer bytes for each thread, int64.
        constant: by ld.global.nc. copies: by cp.async, which may read until `end_copies`."""
        out, mask = np.zeros((len(addresses), size), np.uint8), batch.every(mask)
        sizes = np.array([size], np.int64) if sizes is None else sizes
        arguments = addresses, mask, sizes, alignment or size, constant, copies, out
        self.run(batch, _load, size, "read", *arguments)
        return out

    def end_copies(self, batch, addresses, mask, sizes, alignment: int) -> None:
        """Copies that `load` began have been waited for."""
        _end_copies(self.arrays, self.threads(batch), addresses, mask, sizes, alignment)

    def store(
        self, batch, addresses, mask, data: np.ndarray, *, later: bool = False, alignment: int = 0
    ) -> None:
        """Write bytes [threads, size]. later: only begin a copy; `land_copies` writes the bytes."""
        mask, size = batch.every(mask), data.shape[1]
        done = "overwritten by an asynchronous copy" if later else "written"
        self.run(batch, _store, size, done, addresses, mask, data, alignment or size, later)

    def take(
        self, batch, threads: np.ndarray, chunks: np.ndarray, *, size: int = MAX_UNIT,
        num_warps: int = 1, fenced: bool = True, noted: bool = False, by: str = "a product",
    ) -> np.ndarray:  # fmt: skip
        """Bytes [n, chunks, size] at addresses (uint64, [n, chunks]), read until `end_take` by
        num_warps warps from that of each of n threads on. fenced: by the async proxy. noted:
        record it now."""
        out, mask = np.empty((*chunks.shape, size), np.uint8), np.zeros(batch.num_threads, np.bool_)
        mask[threads] = True
        done, fixed = f"read by {by}", (size, num_warps, fenced, noted, out)
        self.run(batch, _take, size, done, chunks, mask, threads, *fixed)
        return out

    def end_take(self, batch, threads, chunks, size: int = MAX_UNIT, num_warps: int = 0) -> None:
        """What `take` began has ended. num_warps: before a barrier, only these warps of each thread
        know it."""
        _release(self.arrays, self.threads(batch), chunks, threads, size, num_warps)

    def atomic(
        self, batch, addresses, mask, dtype, *, release: bool, acquire: bool
    ) -> dict[int, np.ndarray]:
        """For each masked thread a view of the number at its address, an array of one element. The
        caller reads and writes it thread by thread."""
        mask, size = batch.every(mask), np.dtype(dtype).itemsize
        places = np.zeros(len(addresses), np.int64)
        arguments = addresses, mask, size, release, acquire, places
        self.run(batch, _begin_atomics, size, "atomically changed", *arguments)
        return {
            int(thread): SPACE[places[thread] : places[thread] + size].view(dtype)
            for thread in np.flatnonzero(mask)
        }
