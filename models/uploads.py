"""Copies of arrays from the host to the device."""

import numpy as np
import torch

_ALIGNMENT = 16  # in bytes: kernels access at most 16 bytes at a time


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Copy arrays to a device in one transfer, without waiting for it.

    Returns contiguous tensors of the arrays' shapes and dtypes.  On a CPU they are views of the
    arrays that are contiguous, and copies of others.  On a GPU the arrays are packed into pinned
    memory and copied to one new tensor; the results are views of this tensor.  PyTorch caches the
    pinned memory and reuses it after the copy.
    """
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    if device.type == "cpu":
        return tensors
    parts, size = [], 0
    for tensor in tensors:
        parts.append(slice(size, size + tensor.nbytes))
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for tensor, part in zip(tensors, parts, strict=True):
        pinned[part].view(tensor.dtype).copy_(tensor.flatten())
    packed = pinned.to(device, non_blocking=True)
    return [
        packed[part].view(tensor.dtype).view(tensor.shape)
        for tensor, part in zip(tensors, parts, strict=True)
    ]
