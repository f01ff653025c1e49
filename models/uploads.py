"""Copies of arrays from the host to the device."""

from __future__ import annotations

import numpy as np
import torch

_ALIGNMENT = 16  # bytes: the widest access of a kernel


class Uploads:
    """Copies arrays to a device, all arrays of a call at once and without waiting.

    On a GPU a call packs its arrays into a buffer of pinned host memory, which is reused when its
    copy is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def __call__(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Tensors of the arrays' shapes and dtypes.  They are views of one new tensor on a GPU, and
        of the arrays on a CPU."""
        tensors = [torch.from_numpy(array) for array in arrays]
        if self._device.type == "cpu":
            return tensors
        parts, size = [], 0
        for tensor in tensors:
            parts.append(slice(size, size + tensor.nbytes))
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        pinned, copied = self._free_buffer(size)
        for tensor, part in zip(tensors, parts, strict=True):
            pinned[part].view(tensor.dtype).copy_(tensor.flatten())
        packed = pinned[:size].to(self._device, non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))
        return [
            packed[part].view(tensor.dtype).view(tensor.shape)
            for tensor, part in zip(tensors, parts, strict=True)
        ]

    def _free_buffer(self, size: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Pinned memory of at least ``size`` bytes that no copy reads, and its event."""
        free = next((buffer for buffer in self._buffers if buffer[1].query()), None)
        if free is None or len(free[0]) < size:
            if free is not None:
                self._buffers.remove(free)
            free = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
            self._buffers.append(free)
        return free
