"""What the executor knows of PyTorch's tensors: their extents, which are fresh, whose address an op
asked for."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from kernels.executor.global_memory import TensorWindow

_MAX_FRESH_BYTES = 2**28
_MAX_TABLE = 2**16


def window_of(name: str, tensor: torch.Tensor, unwritten: int = 0) -> TensorWindow:
    """A CPU tensor as a kernel may access it.

    Raises:
        ValueError: not a CPU tensor.
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cpu:
        raise ValueError(f"{name}: the executor runs kernels on CPU tensors, got {tensor!r:.80}")
    strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
    address = _DATA_PTR(tensor)
    return TensorWindow(
        name,
        address,
        tensor.itemsize,
        tuple(tensor.shape),
        strides,
        tensor.untyped_storage().data_ptr(),
        unwritten,
    )


_DATA_PTR = torch.Tensor.data_ptr


class AddressBook:
    """While it is entered, remembers tensors whose `data_ptr()` is asked for: the tensors that a
    kernel may reach through addresses in a table."""

    def __init__(self):
        self._tensors: dict[int, dict[tuple, weakref.ref]] = {}

    def __enter__(self) -> AddressBook:
        def data_ptr(tensor):
            address = _DATA_PTR(tensor)
            if tensor.is_cpu:
                known = self._tensors.setdefault(address, {})
                known[tensor.shape, tensor.stride(), tensor.dtype] = weakref.ref(tensor)
            return address

        self._previous = torch.Tensor.data_ptr
        torch.Tensor.data_ptr = data_ptr
        return self

    def __exit__(self, *_) -> None:
        torch.Tensor.data_ptr = self._previous

    def named_in(self, tables: Sequence[torch.Tensor]) -> list[TensorWindow]:
        """The tensors that begin at an address that one of the int64 `tables` holds."""
        windows = []
        for table in tables:
            if table is None or table.numel() > _MAX_TABLE:
                continue
            for address in set(table.flatten().tolist()) & self._tensors.keys():
                alive = [ref() for ref in self._tensors[address].values()]
                name = f"tensor at {address:#x}"
                windows += [window_of(name, tensor) for tensor in alive if tensor is not None]
        return windows


class FreshMemory:
    """While it is entered, remembers tensors from `torch.empty` and its like, and which of their
    bytes a kernel has written since. Once PyTorch writes to one, all of it counts as written.

    Up to 256 MiB are kept alive, so that no address is taken for one of a tensor that has gone.
    """

    _MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"))
    _MAKERS += ((torch.Tensor, "new_empty"),)

    def __init__(self):
        self._fresh: OrderedDict[int, tuple[torch.Tensor, int, np.ndarray]] = OrderedDict()
        self._num_bytes = 0

    def __enter__(self) -> FreshMemory:
        self._originals = [getattr(owner, name) for owner, name in self._MAKERS]
        for (owner, name), original in zip(self._MAKERS, self._originals, strict=True):
            setattr(owner, name, self._remembering(original))
        return self

    def __exit__(self, *_) -> None:
        for (owner, name), original in zip(self._MAKERS, self._originals, strict=True):
            setattr(owner, name, original)

    def _remembering(self, make):
        @functools.wraps(make)
        def wrapper(*args, **kwargs):
            made = make(*args, **kwargs)
            if torch.compiler.is_compiling():  # traced, it makes nothing yet
                return made
            if type(made) is torch.Tensor and made.device.type == "cpu":
                self._remember(made)
            return made

        return wrapper

    def _remember(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if not num_bytes or num_bytes > _MAX_FRESH_BYTES:
            return
        unwritten = np.ones(num_bytes, np.uint8)
        self._fresh[storage.data_ptr()] = (tensor, tensor._version, unwritten)
        self._num_bytes += num_bytes
        while self._num_bytes > _MAX_FRESH_BYTES:
            _, (_, _, dropped) = self._fresh.popitem(last=False)
            self._num_bytes -= len(dropped)

    def unwritten(self, tensor: torch.Tensor) -> int:
        """Address of a byte for each byte of the tensor, 1 where nothing wrote it; 0 if unknown."""
        entry = self._fresh.get(tensor.untyped_storage().data_ptr())
        if entry is None:
            return 0
        made, version, unwritten = entry
        if not made._version == tensor._version == version:  # a detached one counts by itself
            return 0
        return unwritten.ctypes.data + tensor.storage_offset() * tensor.itemsize
