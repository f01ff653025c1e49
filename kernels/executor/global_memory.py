"""Global memory of a launch: the tensors that are its arguments, and nothing else.

A kernel does not see a tensor's real address but one in a window of its own, far from every other,
with the lower bits that it would have on a GPU, whose allocators begin storages at multiples of
512: so lines and sectors do not depend on where this process has its memory. What leaves the
tensor, by any distance, therefore hits no other one, and the fault can say which argument's pointer
strayed. Memory that a kernel finds by addresses in a tensor (`tables`) is known by its real
addresses.

Every byte remembers which program of the launch wrote it and which read it: programs run in no
order, so that one may only read or write what another writes with atomic instructions (PTX ISA,
chapter 8, memory consistency model), of which the executor knows none.
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
        """(size, stride) of the dimensions, widest first, if an offset tells the element; else []:
        dimensions that overlap are only checked as a span."""
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


class Windows(NamedTuple):
    """The tensors as arrays for compiled functions, one row each; tables come last."""

    base: np.ndarray  # as the kernel sees it
    real: np.ndarray  # place in _SPACE, as of `unwritten`, too
    span: np.ndarray
    itemsize: np.ndarray
    num_dims: np.ndarray  # 0: every offset inside the span is an element
    sizes: np.ndarray
    strides: np.ndarray
    shadow: np.ndarray  # where its bytes begin in the shadow arrays
    unwritten: np.ndarray


_OUTSIDE, _HOLE, _MISALIGNED, _UNWRITTEN, _RACE_WRITTEN, _RACE_READ = range(1, 7)


@numba.njit(cache=True)
def _is_element(offset, window, windows):
    """Whether the byte belongs to an element, not to a gap between rows of a strided view."""
    rest = offset
    for dim in range(windows.num_dims[window]):
        stride = windows.strides[window, dim]
        index = rest // stride
        if index >= windows.sizes[window, dim]:
            return False
        rest -= index * stride
    return rest < windows.itemsize[window]


@numba.njit(cache=True)
def _check(address, size, alignment, window, windows):
    """(code, offset) of an access to a tensor; code 0 if all is well."""
    offset = np.int64(address - windows.base[window])
    if offset < 0 or offset + size > windows.span[window]:
        return _OUTSIDE, offset
    if address % np.uint64(alignment) != 0:
        return _MISALIGNED, offset
    if windows.num_dims[window] > 0 and not (
        _is_element(offset, window, windows) and _is_element(offset + size - 1, window, windows)
    ):
        return _HOLE, offset
    return 0, offset


@numba.njit(cache=True)
def _locate(address, size, alignment, windows, num_arguments):
    """(code, window, offset) of an access; code 0 if all is well.

    Of the tensors that tables name several may begin at one address; one that fits is enough.
    """
    top = np.int64(address >> np.uint64(_WINDOW_BITS))
    if 0 < top <= num_arguments:
        code, offset = _check(address, size, alignment, top - 1, windows)
        return code, top - 1, offset
    worst, window, place = _OUTSIDE, -1, np.int64(address)
    if top == 0:
        for candidate in range(num_arguments, len(windows.base)):
            code, offset = _check(address, size, alignment, candidate, windows)
            if code == 0:
                return code, candidate, offset
            if 0 <= offset < windows.span[candidate]:
                worst, window, place = code, candidate, offset
    return worst, window, place


@numba.njit(cache=True)
def _load(addresses, mask, size, alignment, out, programs, space, windows, shadows, report):
    num_arguments, writers, readers = shadows
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        size_here = size[thread] if len(size) > 1 else size[0]
        code, window, offset = _locate(
            addresses[thread], size_here, alignment, windows, num_arguments
        )
        report[:4] = code, thread, window, offset
        if code:
            return
        program = programs[thread] + 1
        shadow = windows.shadow[window] + offset
        real = windows.real[window] + offset
        unwritten = windows.unwritten[window]
        for byte in range(size_here):
            if unwritten and space[unwritten + offset + byte]:
                report[0] = _UNWRITTEN
                return
            writer = writers[shadow + byte]
            if writer and writer != program:
                report[0], report[4] = _RACE_WRITTEN, writer - 1
                return
            reader = readers[shadow + byte]
            if reader != program:
                readers[shadow + byte] = program if reader == 0 else -1
            out[thread, byte] = space[real + byte]


@numba.njit(cache=True)
def _store(addresses, mask, alignment, data, programs, space, windows, shadows, report):
    num_arguments, writers, readers = shadows
    size = data.shape[1]
    for thread in range(len(addresses)):
        if not mask[thread]:
            continue
        code, window, offset = _locate(addresses[thread], size, alignment, windows, num_arguments)
        report[:4] = code, thread, window, offset
        if code:
            return
        program = programs[thread] + 1
        shadow = windows.shadow[window] + offset
        real = windows.real[window] + offset
        unwritten = windows.unwritten[window]
        for byte in range(size):
            writer, reader = writers[shadow + byte], readers[shadow + byte]
            if writer and writer != program:
                report[0], report[4] = _RACE_WRITTEN, writer - 1
                return
            if reader and reader != program:
                report[0], report[4] = _RACE_READ, reader - 1
                return
            writers[shadow + byte] = program
            if unwritten:
                space[unwritten + offset + byte] = 0
            space[real + byte] = data[thread, byte]


def _reserve(count: int) -> np.ndarray:
    """int32 zeros of which only the touched pages exist."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return np.frombuffer(mmap.mmap(-1, max(4 * count, 1), flags=flags), np.int32)


class GlobalMemory:
    """The tensors of one launch; `pointers` are the addresses that the kernel gets for them."""

    def __init__(self, tensors: Sequence[TensorWindow], tables: Sequence[TensorWindow] = ()):
        self.tensors = [*tensors, *tables]
        self.pointers = [
            ((number + 1) << _WINDOW_BITS) | 1 << (_WINDOW_BITS - 8) | (tensor.place & 0xFFFF)
            for number, tensor in enumerate(tensors)
        ]
        shadow, num_bytes = self._place_shadows()
        count = len(self.tensors)
        sizes, strides = np.zeros((2, count, _MAX_DIMS), np.int64)
        num_dims = np.zeros(count, np.int64)
        for number, tensor in enumerate(self.tensors):
            dims = tensor.nested()
            num_dims[number] = len(dims)
            for place, dim in enumerate(dims):
                sizes[number, place], strides[number, place] = dim

        def column(values, dtype=np.int64):
            return np.array(list(values), dtype)

        self._windows = Windows(
            column([*self.pointers, *(table.address for table in tables)], np.uint64),
            column(tensor.address - _ORIGIN for tensor in self.tensors),
            column(tensor.span for tensor in self.tensors),
            column(tensor.itemsize for tensor in self.tensors),
            num_dims,
            sizes,
            strides,
            shadow,
            column(max(tensor.unwritten - _ORIGIN, 0) for tensor in self.tensors),
        )
        self._shadows = len(tensors), _reserve(num_bytes), _reserve(num_bytes)
        self._report = np.zeros(5, np.int64)

    def _place_shadows(self) -> tuple[np.ndarray, int]:
        """Where the bytes of each tensor have their shadows: those that overlap share them."""
        order = sorted(range(len(self.tensors)), key=lambda n: self.tensors[n].address)
        shadow = np.zeros(len(self.tensors), np.int64)
        end, shift, used = -1, 0, 0
        for number in order:
            tensor = self.tensors[number]
            if tensor.address > end:
                shift = used - tensor.address
                end = tensor.address
            end = max(end, tensor.address + tensor.span)
            shadow[number] = tensor.address + shift
            used = end + shift
        return shadow, used

    def load(self, batch, addresses, mask, size: int, sizes=None, alignment: int = 0) -> np.ndarray:
        """Bytes [threads, size] at the addresses; sizes: fewer bytes for each thread, uint32."""
        out = np.zeros((len(addresses), size), np.uint8)
        mask = batch.every(mask)
        sizes = np.array([size], np.int64) if sizes is None else sizes.astype(np.int64)
        _load(
            addresses,
            mask,
            sizes,
            alignment or size,
            out,
            batch.program_of_thread,
            _SPACE,
            self._windows,
            self._shadows,
            self._report,
        )
        if self._report[0]:
            self._fail(batch, size, "read")
        if batch.launch.tally is not None:
            batch.launch.tally.global_access(batch, addresses, mask, sizes, "read")
        return out

    def store(self, batch, addresses, mask, data: np.ndarray) -> None:
        """Write bytes [threads, size]."""
        mask = batch.every(mask)
        _store(
            addresses,
            mask,
            data.shape[1],
            data,
            batch.program_of_thread,
            _SPACE,
            self._windows,
            self._shadows,
            self._report,
        )
        if self._report[0]:
            self._fail(batch, data.shape[1], "written")
        if batch.launch.tally is not None:
            sizes = np.array([data.shape[1]], np.int64)
            batch.launch.tally.global_access(batch, addresses, mask, sizes, "written")

    def touched(self) -> tuple[int, int]:
        """(bytes, lines of 128) that programs have touched so far."""
        _, writers, readers = self._shadows
        touched = (writers != 0) | (readers != 0)
        lines = set()
        for number, tensor in enumerate(self.tensors):
            first = int(self._windows.shadow[number])
            places = np.flatnonzero(touched[first : first + tensor.span]) + tensor.place
            lines.update((tensor.storage, line) for line in np.unique(places // 128).tolist())
        return int(touched.sum()), len(lines)

    def _fail(self, batch, size: int, done: str) -> None:
        code, thread, window, offset, other = map(int, self._report)
        self._report[:] = 0
        if window < 0:
            detail = f"{size} bytes {done} at address {offset:#x}, which is in no tensor"
            raise batch.fault(FaultKind.OUT_OF_BOUNDS, detail, thread, address=offset)
        tensor = self.tensors[window]
        place = f"{tensor.name} + {offset}" if offset >= 0 else f"{tensor.name} - {-offset}"
        what = f"{size} bytes {done} at {place} bytes"
        other_program = "others" if other < 0 else f"program {batch.launch.coordinates(other)}"
        kind, detail = {
            _OUTSIDE: (FaultKind.OUT_OF_BOUNDS, f"the tensor spans {tensor.span} bytes"),
            _HOLE: (FaultKind.OUT_OF_BOUNDS, "between the rows of a strided view"),
            _MISALIGNED: (FaultKind.MISALIGNED, f"the address is no multiple of {size}"),
            _UNWRITTEN: (FaultKind.UNWRITTEN, "the tensor is fresh memory"),
            _RACE_WRITTEN: (FaultKind.GLOBAL_RACE, f"{other_program} wrote there"),
            _RACE_READ: (FaultKind.GLOBAL_RACE, f"{other_program} read there"),
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

    def _check(self, batch, mask) -> None:
        early = batch.every(mask) & self._early
        if early.any():
            detail = "no griddepcontrol.wait came before the access"
            raise batch.fault(FaultKind.LAUNCH_RACE, detail, int(np.flatnonzero(early)[0]))
