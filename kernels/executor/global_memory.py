"""Global memory of a launch: the tensors that are its arguments, and nothing else.

A kernel does not see a tensor's real address but one in a window of its own, far from every other.
The lower bits are those that the tensor would have on a GPU, where storages begin at multiples of
512, so lines and sectors do not depend on where this process has its memory. An access that leaves
its tensor therefore hits no other one, and the fault can name the argument. Memory that a kernel
finds by addresses in a tensor (`tables`) is known by its real addresses.

A record says which program and which of its warps read and wrote a unit of a tensor last. A unit is
as large as the smallest access to the tensor so far, up to 16 bytes. By the memory consistency
model (PTX ISA, chapter 8) these are races:

- two programs access a unit and one of them writes it, unless both accesses are atomic, or the
  first program has since executed an atomic instruction with release semantics and the second one
  with acquire semantics. To which address is not checked: a wrong lock is not noticed.
- two warps of a program do so without a barrier between them. Threads that hold the same part of
  a result are allowed what Triton makes them do: to store the same value, and to load by one
  instruction what one of them then overwrites;
- memory that the launch writes is read by ld.global.nc;
- the source of a cp.async is written before the copy has been waited for.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np

from kernels.executor.faults import FaultKind

_WINDOW_BITS = 48  # real addresses of a process lie below
_MAX_DIMS = 8
_MAX_UNIT = 16
_ORIGIN = 1 << 16  # the operating system keeps the memory below
_SPACE = np.frombuffer((ctypes.c_uint8 * (2**47 - _ORIGIN)).from_address(_ORIGIN), np.uint8)
"""The memory of this process as one array, so that compiled functions reach every tensor. Accesses
are checked against the tensors of the launch first."""


@dataclass(frozen=True)
class TensorWindow:
    """A tensor that a kernel may access.

    sizes, strides: as of a tensor, the strides in bytes and not negative.
    storage: where the memory begins that it is a view of.
    unwritten: address of one byte for each byte of the tensor's span, 1 where nothing wrote it
        yet; 0 if all of it counts as written.
    """

    name: str
    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    unwritten: int = 0

    @property
    def place(self) -> int:
        """Its address if the storage began at a multiple of 512, or as far behind one as it is
        behind a multiple of 64 (PyTorch's of CPU memory)."""
        return self.address - self.storage + self.storage % 64

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.sizes:
            return 0
        reach = sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        return reach + self.itemsize

    def nested(self) -> list[tuple[int, int]]:
        """(size, stride) of the dimensions, widest first, or [] if the tensor has no gaps or its
        dimensions overlap: then only its span is checked."""
        dims = [(n, s) for n, s in zip(self.sizes, self.strides, strict=True) if n > 1 and s]
        dims.sort(key=lambda dim: -dim[1])
        inner = [*dims[1:], (1, self.itemsize)][: len(dims)]
        reaches = [stride >= n * s for (_, stride), (n, s) in zip(dims, inner, strict=True)]
        covered = self.itemsize
        for n, _ in dims:
            covered *= n
        if covered == self.span or not all(reaches) or len(dims) > _MAX_DIMS:
            return []
        return dims


_RECORD = np.dtype(
    [
        ("writer", np.int32),  # program + 1; 0: none
        ("reader", np.int32),  # program + 1; -1: several programs
        ("write_epoch", np.int32),  # barriers that the program had passed
        ("read_epoch", np.int32),
        ("write_time", np.int32),  # number of ordering atomic instructions before
        ("read_time", np.int32),
        ("read_warps", np.uint32),  # bits of the warps that read in that epoch
        ("read_by", np.int32),  # instruction, -1: several
        ("write_warp", np.int16),
        ("copies", np.int16),  # cp.async in flight that read it
        ("constant", np.bool_),  # read by ld.global.nc
        ("atomic", np.bool_),  # the last write was atomic
    ]
)


# Arrays of records, because compiled functions pass a tuple of many arrays slowly.
_WINDOW = np.dtype(
    [
        ("base", np.uint64),  # address as the kernel sees it
        ("real", np.int64),  # place in _SPACE
        ("span", np.int64),
        ("itemsize", np.int64),
        ("num_dims", np.int64),  # 0: every offset inside the span is an element
        ("sizes", np.int64, (_MAX_DIMS,)),
        ("strides", np.int64, (_MAX_DIMS,)),
        ("shadow", np.int64),  # place of its first byte among the bytes of all regions
        ("region", np.int64),  # tensors that overlap share a region
        ("unwritten", np.int64),  # place in _SPACE, 0: all of it counts as written
    ]
)
_REGION = np.dtype(
    [
        ("start", np.int64),  # place of its first byte, and of its first record
        ("unit", np.int64),  # bytes of a record, 0: not accessed yet
    ]
)
_PROGRAM = np.dtype([("released", np.int64), ("acquired", np.int64)])
"""Time of the last atomic instruction with release, acquire semantics."""


class _Memory(NamedTuple):
    """The argument of compiled functions."""

    space: np.ndarray
    windows: np.ndarray
    num_arguments: int  # the windows behind them are of tables
    regions: np.ndarray
    records: np.ndarray
    programs: np.ndarray
    clock: np.ndarray  # [1]: number of ordering atomic instructions
    report: np.ndarray  # code, thread, window, offset, other program or warp


class _Threads(NamedTuple):
    """Threads of a batch."""

    programs: np.ndarray  # number in the grid, of each thread
    epochs: np.ndarray  # of each program of the batch
    per_program: int
    at: int  # the instruction


_OUTSIDE, _HOLE, _MISALIGNED, _UNWRITTEN, _CONSTANT, _COPYING = range(1, 7)
_RACE_WRITTEN, _RACE_READ, _WARP_WRITTEN, _WARP_READ, _FINER = range(7, 12)


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def _check(address, size, alignment, window):
    """(code, offset) of an access to a tensor; code 0 if all is well."""
    offset = np.int64(address - window.base)
    if offset < 0 or offset + size > window.span:
        return _OUTSIDE, offset
    if address % np.uint64(alignment) != 0:
        return _MISALIGNED, offset
    if window.num_dims > 0 and not (
        _is_element(offset, window) and _is_element(offset + size - 1, window)
    ):
        return _HOLE, offset
    return 0, offset


@numba.njit(cache=True)
def _locate(address, size, alignment, windows, num_arguments):
    """(code, window, offset) of an access; code 0 if all is well.

    Several tensors of an address table may begin at one address. One that fits is enough.
    """
    top = np.int64(address >> np.uint64(_WINDOW_BITS))
    if 0 < top <= num_arguments:
        code, offset = _check(address, size, alignment, windows[top - 1])
        return code, top - 1, offset
    worst, window, place = _OUTSIDE, -1, np.int64(address)
    if top == 0:
        for candidate in range(num_arguments, len(windows)):
            code, offset = _check(address, size, alignment, windows[candidate])
            if code == 0:
                return code, candidate, offset
            if 0 <= offset < windows[candidate].span:
                worst, window, place = code, candidate, offset
    return worst, window, place


@numba.njit(cache=True)
def _place(memory, address, size, alignment, thread):
    """(window, offset) of a valid access, else (-1, 0) and a report. alignment: the access
    size; cp.async may read fewer bytes."""
    code, window, offset = _locate(address, size, alignment, memory.windows, memory.num_arguments)
    report = memory.report
    if code == 0:
        unit = memory.regions[memory.windows[window].region].unit
        if unit == 0 or alignment < unit:
            code = _FINER
    report[0], report[1], report[2], report[3] = code, thread, window, offset
    if code == 0:
        return window, offset
    return -1, np.int64(0)


@numba.njit(cache=True)
def _ordered(memory, other, time, program):
    """Whether program `other` - 1 did something at `time` before `program` - 1 does this."""
    if other <= 0:
        return False
    released, acquired = memory.programs[other - 1].released, memory.programs[program - 1].acquired
    return released > time and acquired > time


@numba.njit(cache=True)
def _bit(warp):
    return np.uint32(1) << np.uint32(warp)


@numba.njit(cache=True)
def _may_read(memory, record, program, warp, epoch, constant):
    report = memory.report
    if record.writer == 0:
        return True
    if constant:
        report[0] = _CONSTANT
    elif record.writer != program:
        if _ordered(memory, record.writer, record.write_time, program):
            return True
        report[0], report[4] = _RACE_WRITTEN, record.writer - 1
    elif record.write_epoch == epoch and record.write_warp != warp:
        report[0], report[4] = _WARP_WRITTEN, record.write_warp
    return report[0] == 0


@numba.njit(cache=True)
def _may_write(memory, record, program, warp, epoch, atomic):
    report = memory.report
    if record.copies:
        report[0] = _COPYING
    elif record.constant:
        report[0] = _CONSTANT
    elif record.reader and record.reader != program:
        if not _ordered(memory, record.reader, record.read_time, program):
            report[0], report[4] = _RACE_READ, record.reader - 1
    elif record.reader and record.read_epoch == epoch:
        others, own = record.read_warps & ~_bit(warp), record.read_warps & _bit(warp)
        if others and not (own and record.read_by >= 0):
            report[0], report[4] = _WARP_READ, -1
    if report[0] or record.writer == 0 or (atomic and record.atomic):
        return report[0] == 0
    if record.writer != program:
        if not _ordered(memory, record.writer, record.write_time, program):
            report[0], report[4] = _RACE_WRITTEN, record.writer - 1
    elif record.write_epoch == epoch and record.write_warp != warp:
        report[0], report[4] = _WARP_WRITTEN, record.write_warp
    return report[0] == 0


@numba.njit(cache=True)
def _units(memory, window, offset, size):
    """Records of an access."""
    region = memory.regions[memory.windows[window].region]
    start, unit = region.start, region.unit
    first = memory.windows[window].shadow + offset - start
    return range(start + first // unit, start + (first + size - 1) // unit + 1)


@numba.njit(cache=True)
def _is_written(memory, window, offset, size):
    unwritten = memory.windows[window].unwritten
    if unwritten:
        for byte in range(size):
            if memory.space[unwritten + offset + byte]:
                memory.report[0] = _UNWRITTEN
                return False
    return True


@numba.njit(cache=True)
def _note_read(memory, record, program, warp, epoch, instruction):
    if record.reader == program and record.read_epoch == epoch:
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


@numba.njit(cache=True)
def _load(memory, threads, addresses, mask, sizes, alignment, constant, copies, out, begin):
    for thread in range(begin, len(addresses)):
        if not mask[thread]:
            continue
        size = sizes[thread] if len(sizes) > 1 else sizes[0]
        window, offset = _place(memory, addresses[thread], size, alignment, thread)
        if window < 0 or not _is_written(memory, window, offset, size):
            return
        program, warp = threads.programs[thread] + 1, thread % threads.per_program // 32
        epoch = threads.epochs[thread // threads.per_program]
        for number in _units(memory, window, offset, size):
            record = memory.records[number]
            if not _may_read(memory, record, program, warp, epoch, constant):
                return
            _note_read(memory, record, program, warp, epoch, threads.at)
            record.read_epoch, record.read_time = epoch, memory.clock[0]
            record.constant |= constant
            record.copies += copies
        real = memory.windows[window].real + offset
        for byte in range(size):
            out[thread, byte] = memory.space[real + byte]


@numba.njit(cache=True)
def _end_copies(memory, addresses, mask, sizes, alignment):
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        size = sizes[thread] if len(sizes) > 1 else sizes[0]
        window, offset = _place(memory, addresses[thread], size, alignment, thread)
        for number in _units(memory, window, offset, size):
            memory.records[number].copies -= 1


@numba.njit(cache=True)
def _same(memory, window, number, data, offset):
    """Whether a store of `data` would leave the record's unit as it is."""
    region = memory.regions[memory.windows[window].region]
    first = region.start + (number - region.start) * region.unit - memory.windows[window].shadow
    for at in range(first, first + region.unit):
        if memory.space[memory.windows[window].real + at] != data[at - offset]:
            return False
    return True


@numba.njit(cache=True)
def _note_write(memory, window, offset, size, record, program, warp, epoch):
    record.writer, record.write_warp = program, warp
    record.write_epoch, record.write_time = epoch, memory.clock[0]
    unwritten = memory.windows[window].unwritten
    if unwritten:
        for byte in range(size):
            memory.space[unwritten + offset + byte] = 0


@numba.njit(cache=True)
def _store(memory, threads, addresses, mask, data, begin):
    size = data.shape[1]
    for thread in range(begin, len(addresses)):
        if not mask[thread]:
            continue
        window, offset = _place(memory, addresses[thread], size, size, thread)
        if window < 0:
            return
        program, warp = threads.programs[thread] + 1, thread % threads.per_program // 32
        epoch = threads.epochs[thread // threads.per_program]
        for number in _units(memory, window, offset, size):
            record = memory.records[number]
            if not _may_write(memory, record, program, warp, epoch, False):
                raced = memory.report[0] == _WARP_WRITTEN and not record.atomic
                if not raced or not _same(memory, window, number, data[thread], offset):
                    return
                memory.report[0] = 0
            record.atomic = False
            _note_write(memory, window, offset, size, record, program, warp, epoch)
        real = memory.windows[window].real + offset
        for byte in range(size):
            memory.space[real + byte] = data[thread, byte]


@numba.njit(cache=True)
def _begin_atomics(memory, threads, addresses, mask, size, release, acquire, places, begin):
    """Check atomic accesses, note them, and give their places in _SPACE."""
    for thread in range(begin, len(addresses)):
        if not mask[thread]:
            continue
        window, offset = _place(memory, addresses[thread], size, size, thread)
        if window < 0 or not _is_written(memory, window, offset, size):
            return
        program, warp = threads.programs[thread] + 1, thread % threads.per_program // 32
        epoch = threads.epochs[thread // threads.per_program]
        for number in _units(memory, window, offset, size):
            record = memory.records[number]
            if not _may_write(memory, record, program, warp, epoch, True):
                return
            record.atomic = True
            _note_write(memory, window, offset, size, record, program, warp, epoch)
        places[thread] = memory.windows[window].real + offset
        memory.clock[0] += release or acquire
        if release:
            memory.programs[program - 1].released = memory.clock[0]
        if acquire:
            memory.programs[program - 1].acquired = memory.clock[0]


def _reserve(count: int, dtype: np.dtype) -> np.ndarray:
    """Zeros; the operating system allocates only the pages that are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return np.frombuffer(mmap.mmap(-1, max(count, 1) * dtype.itemsize, flags=flags), dtype)


class GlobalMemory:
    """The tensors of one launch; `pointers` are the addresses that the kernel gets for them.

    Accesses raise Fault.
    """

    def __init__(
        self,
        tensors: Sequence[TensorWindow],
        tables: Sequence[TensorWindow] = (),
        num_programs: int = 1,
    ):
        self.tensors = [*tensors, *tables]
        self.pointers = [
            ((number + 1) << _WINDOW_BITS) | 1 << (_WINDOW_BITS - 8) | (tensor.place & 0xFFFF)
            for number, tensor in enumerate(tensors)
        ]
        windows = np.zeros(len(self.tensors), _WINDOW)
        addresses = [*self.pointers, *(table.address for table in tables)]
        for window, tensor, base in zip(windows, self.tensors, addresses, strict=True):
            dims = tensor.nested()
            window["base"], window["real"] = base, tensor.address - _ORIGIN
            window["span"], window["itemsize"] = tensor.span, tensor.itemsize
            window["num_dims"] = len(dims)
            for place, dim in enumerate(dims):
                window["sizes"][place], window["strides"][place] = dim
            window["unwritten"] = max(tensor.unwritten - _ORIGIN, 0)
        regions, num_bytes = self._place_shadows(windows)
        self._memory = _Memory(
            _SPACE,
            windows,
            len(tensors),
            regions,
            _reserve(num_bytes, _RECORD),
            np.zeros(num_programs, _PROGRAM),
            np.zeros(1, np.int64),
            np.zeros(5, np.int64),
        )

    def _place_shadows(self, windows: np.ndarray) -> tuple[np.ndarray, int]:
        """Place the windows among the bytes of all regions; returns the regions, and the number of
        bytes. A place has the alignment of the address."""
        starts, end, used = [], -1, 0
        for number in sorted(range(len(windows)), key=lambda n: self.tensors[n].address):
            tensor = self.tensors[number]
            if tensor.address > end:
                starts.append(used)
                shift = used - tensor.address // 64 * 64
                end = tensor.address
            end = max(end, tensor.address + tensor.span)
            windows[number]["shadow"] = tensor.address + shift
            windows[number]["region"] = len(starts) - 1
            used = -(-(end + shift) // 64) * 64
        regions = np.zeros(len(starts), _REGION)
        regions["start"] = starts
        return regions, used

    def _records(self, number: int) -> np.ndarray:
        """Records of a region in use."""
        regions, records = self._memory.regions, self._memory.records
        start, unit = regions[number]
        end = regions[number + 1]["start"] if number + 1 < len(regions) else len(records)
        return records[start : start + (end - start) // unit]

    def _run(self, batch, compiled, size: int, done: str, *arguments) -> None:
        """Run `compiled` for all threads; where it asks for records of smaller units, make them and
        let it go on. Raises Fault."""
        memory, begin = self._memory, 0
        threads = _Threads(
            batch.program_of_thread, batch.shared.epochs, batch.threads_per_program, batch.at
        )
        compiled(memory, threads, *arguments, begin)
        while memory.report[0] == _FINER:
            number, begin = memory.windows[memory.report[2]]["region"], memory.report[1]
            region, memory.report[0] = memory.regions[number], 0
            before = self._records(number).copy() if region["unit"] else None
            finer = region["unit"] // min(size, _MAX_UNIT)
            region["unit"] = min(size, _MAX_UNIT)
            if before is not None:
                self._records(number)[:] = np.repeat(before, finer)
            compiled(memory, threads, *arguments, begin)
        self._check(batch, size, done)

    def load(
        self,
        batch,
        addresses,
        mask,
        size: int,
        *,
        sizes=None,
        alignment: int = 0,
        constant: bool = False,
        copies: bool = False,
    ) -> np.ndarray:
        """Bytes [threads, size] at the addresses. sizes: fewer bytes for each thread, int64.
        constant: by ld.global.nc. copies: by cp.async, which may read until `end_copies`."""
        out = np.zeros((len(addresses), size), np.uint8)
        mask = batch.every(mask)
        sizes = np.array([size], np.int64) if sizes is None else sizes
        alignment = alignment or size
        arguments = addresses, mask, sizes, alignment, constant, copies, out
        self._run(batch, _load, size, "read", *arguments)
        self._tally(batch, addresses, mask, sizes, "read")
        return out

    def end_copies(self, addresses, mask, sizes, alignment: int) -> None:
        """Copies that `load` began have been waited for."""
        _end_copies(self._memory, addresses, mask, sizes, alignment)

    def store(self, batch, addresses, mask, data: np.ndarray) -> None:
        """Write bytes [threads, size]."""
        mask, size = batch.every(mask), data.shape[1]
        self._run(batch, _store, size, "written", addresses, mask, data)
        self._tally(batch, addresses, mask, np.array([size], np.int64), "written")

    def atomic(
        self, batch, addresses, mask, dtype, *, release: bool, acquire: bool
    ) -> dict[int, np.ndarray]:
        """For each masked thread the number of `dtype` at its address, an array of one element to
        read and write. The caller does so thread by thread."""
        mask, size = batch.every(mask), np.dtype(dtype).itemsize
        places = np.zeros(len(addresses), np.int64)
        arguments = addresses, mask, size, release, acquire, places
        self._run(batch, _begin_atomics, size, "atomically changed", *arguments)
        for done in ("read", "written"):
            self._tally(batch, addresses, mask, np.array([size], np.int64), done)
        return {
            int(thread): _SPACE[places[thread] : places[thread] + size].view(dtype)
            for thread in np.flatnonzero(mask)
        }

    def _tally(self, batch, addresses, mask, sizes, done: str) -> None:
        if batch.launch.tally is not None:
            batch.launch.tally.global_access(batch, addresses, mask, sizes, done)

    def touched(self) -> tuple[int, int]:
        """(bytes, lines of 128) that programs have touched so far."""
        num_bytes, lines = 0, set()
        for number, (start, unit) in enumerate(self._memory.regions.tolist()):
            if not unit:
                continue
            records = self._records(number)
            units = np.flatnonzero((records["writer"] != 0) | (records["reader"] != 0))
            num_bytes += len(units) * unit
            for window, tensor in zip(self._memory.windows, self.tensors, strict=True):
                places = start + units * unit - window["shadow"]
                inside = (places > -unit) & (places < tensor.span) & (window["region"] == number)
                found = np.unique((places[inside] + tensor.place) // 128).tolist()
                lines.update((tensor.storage, line) for line in found)
        return num_bytes, len(lines)

    def _check(self, batch, size: int, done: str) -> None:
        code, thread, window, offset, other = map(int, self._memory.report)
        if not code:
            return
        self._memory.report[:] = 0
        if window < 0:
            detail = f"{size} bytes {done} at address {offset:#x}, which is in no tensor"
            raise batch.fault(FaultKind.OUT_OF_BOUNDS, detail, thread, address=offset)
        tensor = self.tensors[window]
        place = f"{tensor.name} + {offset}" if offset >= 0 else f"{tensor.name} - {-offset}"
        what = f"{size} bytes {done} at {place} bytes"
        program = "others" if other < 0 else f"program {batch.launch.coordinates(other)}"
        warp = "another warp" if other < 0 else f"warp {other}"
        since = "since the last barrier"
        race = FaultKind.GLOBAL_RACE
        kind, detail = {
            _OUTSIDE: (FaultKind.OUT_OF_BOUNDS, f"the tensor spans {tensor.span} bytes"),
            _HOLE: (FaultKind.OUT_OF_BOUNDS, "between the rows of a strided view"),
            _MISALIGNED: (FaultKind.MISALIGNED, f"the address is not a multiple of {size}"),
            _UNWRITTEN: (FaultKind.UNWRITTEN, "the tensor is fresh memory"),
            _CONSTANT: (race, "ld.global.nc reads it, which no program may write"),
            _COPYING: (FaultKind.COPY_IN_FLIGHT, "a copy from it has not been waited for"),
            _RACE_WRITTEN: (race, f"{program} wrote there"),
            _RACE_READ: (race, f"{program} read there"),
            _WARP_WRITTEN: (race, f"{warp} of the program wrote there {since}"),
            _WARP_READ: (race, f"{warp} of the program read there {since}"),
        }[code]
        raise batch.fault(kind, f"{what}: {detail}", thread, address=offset, tensor=tensor.name)


class AwaitedMemory:
    """Global memory as a launch finds it that may begin before the one before it has ended: no
    thread accesses it before its griddepcontrol.wait."""

    def __init__(self, batch):
        self._memory, self._early = batch.memory, np.ones(batch.num_threads, np.bool_)

    def end_wait(self, batch, mask) -> None:
        """These threads may go on."""
        self._early &= ~batch.every(mask)
        if not self._early.any():
            batch.memory = self._memory

    def load(self, batch, addresses, mask, *args, **kwargs) -> np.ndarray:
        """See GlobalMemory."""
        self._check(batch, mask)
        return self._memory.load(batch, addresses, mask, *args, **kwargs)

    def store(self, batch, addresses, mask, data: np.ndarray) -> None:
        """See GlobalMemory."""
        self._check(batch, mask)
        self._memory.store(batch, addresses, mask, data)

    def atomic(self, batch, addresses, mask, *args, **kwargs) -> dict[int, np.ndarray]:
        """See GlobalMemory."""
        self._check(batch, mask)
        return self._memory.atomic(batch, addresses, mask, *args, **kwargs)

    def _check(self, batch, mask) -> None:
        early = batch.every(mask) & self._early
        if early.any():
            detail = "no griddepcontrol.wait came before the access"
            raise batch.fault(FaultKind.LAUNCH_RACE, detail, int(np.flatnonzero(early)[0]))
