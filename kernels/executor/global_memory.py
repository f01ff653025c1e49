"""Global memory of a launch: the tensors that are its arguments, and nothing else.

A kernel does not see a tensor's real address but one in a window of its own, far from every other.
The lower bits are those that the tensor would have on a GPU, where storages begin at multiples of
512, so lines and sectors do not depend on where this process has its memory. An access that leaves
its tensor therefore hits no other one, and the fault can name the argument. Memory that a kernel
finds by addresses in a tensor (`tables`) is known by its real addresses. memory.py has the checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.executor.faults import FaultKind
from kernels.executor.memory import (
    MAX_DIMS,
    ORIGIN,
    REGION,
    WINDOW,
    WINDOW_BITS,
    CheckedMemory,
    Threads,
)


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
        if covered == self.span or not all(reaches) or len(dims) > MAX_DIMS:
            return []
        return dims


class GlobalMemory(CheckedMemory):
    """The tensors of one launch; `pointers` are the addresses that the kernel gets for them."""

    race = FaultKind.GLOBAL_RACE

    def __init__(
        self,
        tensors: Sequence[TensorWindow],
        tables: Sequence[TensorWindow] = (),
        num_programs: int = 1,
    ):
        self.tensors = [*tensors, *tables]
        self.pointers = [
            ((number + 1) << WINDOW_BITS) | 1 << (WINDOW_BITS - 8) | (tensor.place & 0xFFFF)
            for number, tensor in enumerate(tensors)
        ]
        windows = np.zeros(len(self.tensors), WINDOW)
        addresses = [*self.pointers, *(table.address for table in tables)]
        for window, tensor, base in zip(windows, self.tensors, addresses, strict=True):
            dims = tensor.nested()
            window["base"], window["real"] = base, tensor.address - ORIGIN
            window["span"], window["itemsize"] = tensor.span, tensor.itemsize
            window["num_dims"] = len(dims)
            for place, dim in enumerate(dims):
                window["sizes"][place], window["strides"][place] = dim
            window["unwritten"] = max(tensor.unwritten - ORIGIN, 0)
        regions, num_bytes = self._place_shadows(windows)
        super().__init__(windows, regions, num_bytes, len(tensors), num_programs)

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
        regions = np.zeros(len(starts), REGION)
        regions["start"] = starts
        return regions, used

    def run(self, batch, compiled, size: int, done: str, addresses, mask, *arguments) -> None:
        """See CheckedMemory. Before its griddepcontrol.wait no thread of a dependent launch may
        access global memory."""
        detail = "no griddepcontrol.wait came before the access"
        batch.refuse(mask & batch.early, FaultKind.LAUNCH_RACE, detail)
        super().run(batch, compiled, size, done, addresses, mask, *arguments)

    def threads(self, batch) -> Threads:
        """See CheckedMemory."""
        epochs, per_program = batch.shared.epochs, batch.threads_per_program
        return Threads(batch.program_of_thread, epochs, per_program, batch.at)

    def tally(self, batch, addresses, mask, sizes, *kinds: str) -> None:
        """Count an access; kinds: "read", "written"."""
        for kind in kinds if batch.launch.tally is not None else ():
            batch.launch.tally.global_access(addresses, mask, sizes, kind)

    def touched(self) -> tuple[int, int]:
        """(bytes, lines of 128) that programs have touched so far."""
        num_bytes, lines = 0, set()
        for number, (start, unit) in enumerate(self.arrays.regions.tolist()):
            if not unit:
                continue
            records = self.records(number)
            units = np.flatnonzero((records["writer"] != 0) | (records["reader"] != 0))
            num_bytes += len(units) * unit
            for window, tensor in zip(self.arrays.windows, self.tensors, strict=True):
                places = start + units * unit - window["shadow"]
                inside = (places > -unit) & (places < tensor.span) & (window["region"] == number)
                found = np.unique((places[inside] + tensor.place) // 128).tolist()
                lines.update((tensor.storage, line) for line in found)
        return num_bytes, len(lines)

    def place(self, window: int, offset: int) -> tuple[str | None, str, int, int]:
        """(name, place, span, offset) of a tensor and a byte of it."""
        if window < 0:
            return None, f"address {offset:#x}, which is in no tensor", 0, offset
        tensor = self.tensors[window]
        place = f"{tensor.name} + {offset}" if offset >= 0 else f"{tensor.name} - {-offset}"
        return tensor.name, f"{place} bytes", tensor.span, offset
