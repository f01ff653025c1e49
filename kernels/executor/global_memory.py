"""Global memory of a launch: the tensors that are its arguments, and nothing else.

A kernel sees each tensor in an address window of its own, far from every other window. An access
that leaves its tensor therefore hits no other tensor, and the fault can name the argument. The
lower address bits are those that the tensor would have on a GPU, where storages begin at multiples
of 512. Memory that a kernel finds by addresses in a tensor (`tables`) is known by its real
addresses. memory.py has the checks.
"""

import math
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
    storage: address of the first byte of its storage.
    unwritten: address of one byte for each byte of the tensor's span, 1 where nothing wrote it
        yet. 0 means that all of it counts as written.
    """

    name: str
    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    unwritten: int = 0

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
        covered = self.itemsize * math.prod(n for n, _ in dims)
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
        num_warps: int = 0,
    ):
        self.tensors = [*tensors, *tables]
        lowest = [one.address - one.storage + one.storage % 64 & 0xFFFF for one in tensors]
        self.pointers = [
            ((number + 1) << WINDOW_BITS) | 1 << (WINDOW_BITS - 8) | bits
            for number, bits in enumerate(lowest)
        ]
        windows = np.zeros(len(self.tensors), WINDOW)
        addresses = [*self.pointers, *(table.address for table in tables)]
        for window, tensor, base in zip(windows, self.tensors, addresses, strict=True):
            dims = tensor.nested()
            window["base"], window["real"] = base, tensor.address - ORIGIN
            window["span"], window["itemsize"] = tensor.span, tensor.itemsize
            window["num_dims"] = len(dims)
            for axis, dim in enumerate(dims):
                window["sizes"][axis], window["strides"][axis] = dim
            window["unwritten"] = max(tensor.unwritten - ORIGIN, 0)
        regions, num_bytes = self._place_shadows(windows)
        super().__init__(windows, regions, num_bytes, len(tensors), num_programs, num_warps)

    def _place_shadows(self, windows: np.ndarray) -> tuple[np.ndarray, int]:
        """Set `shadow` and `region` of the windows. A shadow has the alignment of the address.

        Returns the regions and their number of bytes."""
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
        """See CheckedMemory. A thread of a dependent launch may not access global memory before its
        griddepcontrol.wait."""
        detail = "no griddepcontrol.wait came before the access"
        batch.refuse(mask & batch.early, FaultKind.LAUNCH_RACE, detail)
        super().run(batch, compiled, size, done, addresses, mask, *arguments)

    def threads(self, batch) -> Threads:
        return Threads(batch.program_of_thread, batch.clocks, batch.threads_per_program, batch.at)

    def describe(self, window: int, offset: int) -> tuple[str | None, str, int, int]:
        if window < 0:
            return None, f"address {offset:#x}, which is in no tensor", 0, offset
        tensor = self.tensors[window]
        where = f"{tensor.name} {'-' if offset < 0 else '+'} {abs(offset)} bytes"
        return tensor.name, where, tensor.span, offset
