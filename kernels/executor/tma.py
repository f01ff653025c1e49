"""Bulk copies of boxes of a tensor to shared memory (TMA; PTX ISA 5.5 and 9.7.9.27).

The host makes a tensor map, 128 bytes in the kernel's parameters. A box lies dense in shared
memory, its innermost dimension first. Elements outside the tensor are zero. Swizzling permutes the
16-byte chunks as for wgmma (warpgroup.py). The copy reads when it is issued and writes when the
phase of its mbarrier completes (barriers.py). Until then its source and target are in use.
"""

import re
from dataclasses import dataclass

import numpy as np

from kernels.executor.barriers import MBarrier, find, touch
from kernels.executor.faults import FaultKind
from kernels.executor.memory import MAX_UNIT
from kernels.executor.operands import Step, Translation, Unsupported

_MAX_BOX = 256
_WIDTHS = (MAX_UNIT, 32, 64, 128)
"""Bytes of a row by swizzle mode; the first is not swizzled."""


@dataclass(frozen=True)
class TensorMap:
    """What cuTensorMapEncodeTiled is told; dimensions from the innermost on."""

    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    box: tuple[int, ...]
    width: int  # of swizzling, in bytes; 16: none

    @staticmethod
    def of(name: str, descriptor, meta: dict, address: int) -> "TensorMap":
        """The map of a tensor descriptor of Triton. meta: `tensordesc_meta` of the kernel.

        Raises:
            ValueError: cuTensorMapEncodeTiled refuses it.
            NotImplementedError: NaN or tf32 elements, or fp4.
        """
        if descriptor.padding != "zero" or descriptor.round_f32_to_tf32 or meta["fp4_padded"]:
            raise NotImplementedError(f"{name}: the executor knows only zeros as padding")
        itemsize = meta["elem_size"]
        strides = [stride * itemsize for stride in reversed(descriptor.strides)]
        box = tuple(reversed(meta["block_size"]))
        width, row = _WIDTHS[meta["swizzle"]], box[0] * itemsize
        if address % MAX_UNIT or any(stride % MAX_UNIT for stride in strides[1:]):
            raise ValueError(f"{name}: expected a base and strides that are multiples of 16 bytes")
        if not all(1 <= size <= _MAX_BOX for size in box) or row % MAX_UNIT:
            raise ValueError(f"{name}: a box of {box} elements of {itemsize} bytes")
        if width > MAX_UNIT and row != width:
            raise ValueError(f"{name}: rows of {row} bytes with swizzling of {width} bytes")
        sizes = tuple(reversed(descriptor.shape))
        return TensorMap(address, itemsize, sizes, tuple(strides), box, width)

    def read(self, batch, thread: int, corner: list[int]):
        """(data [n, 16] of the box at `corner`; threads, addresses and size of its m sources)."""
        edges = MAX_UNIT, corner[0] * self.itemsize, self.sizes[0] * self.itemsize
        size = int(np.gcd.reduce(edges))  # in such pieces a row is inside or outside
        place, inside = np.zeros(1, np.int64), np.ones(1, np.bool_)
        dims = zip(corner, self.box, self.sizes, self.strides, strict=True)
        for dim, (start, count, extent, stride) in enumerate(dims):
            at = start + np.arange(0, count, 1 if dim else size // self.itemsize)
            place = (place + (at * stride)[:, None]).reshape(-1)
            inside = (inside & ((at >= 0) & (at < extent))[:, None]).reshape(-1)
        sources = (place[inside] + self.address).astype(np.uint64)[:, None]
        data, readers = np.zeros((len(place), size), np.uint8), np.full(len(sources), thread)
        if len(sources):
            how = {"size": size, "noted": True, "by": "TMA"}
            data[inside] = batch.memory.take(batch, readers, sources, **how)[:, 0]
        return data.reshape(-1, MAX_UNIT), readers, sources, size

    def copy(self, batch, thread: int, corner: list[int], target: int, barrier: MBarrier) -> None:
        """Begin a copy of the box at `corner` to shared memory, counted by an mbarrier."""
        chunks = target + np.arange(0, int(np.prod(self.box)) * self.itemsize, MAX_UNIT)
        chunks ^= (chunks >> 7 & (self.width // MAX_UNIT - 1)) << 4
        chunks = chunks.astype(np.uint64)
        batch.shared.begin_box(batch, thread, chunks)
        data, readers, sources, size = self.read(batch, thread, corner)

        def land(column, clock):
            batch.shared.land_box(batch, thread, chunks, column, clock, data)
            batch.memory.end_take(batch, readers, sources, size)

        barrier.copies.append(land)
        barrier.copied += data.size


_LOAD = re.compile(
    r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::(?:cta|cluster)\.global(?:\.tile)?"
    r"\.mbarrier::complete_tx::bytes(\.L2::cache_hint)?"
)
_ALIGNMENT = 128


def load_box(translation: Translation) -> Step:
    """cp.async.bulk.tensor from global to shared memory."""
    matched = _LOAD.fullmatch(translation.instruction.opcode)
    if not matched or len(translation.operands[1][1]) != int(matched[1]):
        raise Unsupported("this form of cp.async.bulk is not supported")
    target, (tensor, corner), barrier, *_hint = translation.operands
    addresses = [translation.address(one) for one in (target, tensor, barrier)]
    reads = [translation.read(one, "s32") for one in corner]

    def load(batch, mask):
        active = batch.every(mask)
        targets, maps, barriers = (address(batch) for address in addresses)
        corners = np.stack([batch.full(read(batch)) for read in reads], 1)
        touch(batch, barriers, active)
        for thread in map(int, np.flatnonzero(active)):
            tensor_map, to = batch.launch.maps.get(int(maps[thread])), int(targets[thread])
            if tensor_map is None or len(tensor_map.box) != len(reads):
                detail = f"no tensor map of {len(reads)} dimensions at {maps[thread]:#x}"
                raise batch.fault(FaultKind.OUT_OF_BOUNDS, detail, thread)
            if to % _ALIGNMENT:
                detail = f"shared memory {to:#x} is no multiple of {_ALIGNMENT}"
                raise batch.fault(FaultKind.MISALIGNED, detail, thread, address=to)
            counted = find(batch, int(barriers[thread]), thread)
            tensor_map.copy(batch, thread, corners[thread].tolist(), to, counted)

    return load
