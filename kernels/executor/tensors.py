"""PyTorch tensors as the executor sees them: extents, unwritten memory, and addresses in tables."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from kernels.executor.global_memory import TensorWindow

_MAX_FRESH_BYTES = 2**28
_MAX_TABLE = 2**16
_NO_BYTES = np.zeros(0, np.uint8)


def window_of(name: str, tensor: torch.Tensor, unwritten: int = 0) -> TensorWindow:
    """The window of memory that a kernel may access through a CPU tensor.

    Raises:
        ValueError: not a CPU tensor.
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cpu:
        raise ValueError(f"{name}: the executor runs kernels on CPU tensors, got {tensor!r:.80}")
    strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
    where = _DATA_PTR(tensor), tensor.itemsize, tuple(tensor.shape), strides
    return TensorWindow(name, *where, tensor.untyped_storage().data_ptr(), unwritten)


_DATA_PTR = torch.Tensor.data_ptr


class AddressBook(contextlib.ExitStack):
    """Context manager that records tensors whose `data_ptr()` is called. Kernels may access them
    through an address table."""

    def __enter__(self) -> AddressBook:
        self._tensors: dict[int, dict[tuple, weakref.ref]] = {}

        def data_ptr(tensor):
            address = _DATA_PTR(tensor)
            if tensor.is_cpu:
                known = self._tensors.setdefault(address, {})
                known[tensor.shape, tensor.stride(), tensor.dtype] = weakref.ref(tensor)
            return address

        self.enter_context(mock.patch.object(torch.Tensor, "data_ptr", data_ptr))
        return self

    def named_in(self, tables: Sequence[torch.Tensor]) -> list[TensorWindow]:
        """Windows of the recorded tensors whose address is in one of the int64 `tables`."""
        windows = []
        for table in tables:
            if table is None or table.numel() > _MAX_TABLE:
                continue
            for address in set(table.flatten().tolist()) & self._tensors.keys():
                alive = [ref() for ref in self._tensors[address].values()]
                name = f"tensor at {address:#x}"
                windows += [window_of(name, tensor) for tensor in alive if tensor is not None]
        return windows


class FreshMemory(contextlib.ExitStack):
    """Context manager that tracks unwritten ("fresh") memory.

    Memory from torch.empty, empty_like, empty_strided, empty_permuted and Tensor.new_empty is
    fresh, and so is memory that Tensor.resize_ adds. It is filled with a pattern (a NaN, a large
    integer). Writes of kernels are tracked per byte. If the host changes the pattern anywhere, the
    whole tensor counts as written. torch.Tensor(n), tensors made earlier and tensors allocated by
    PyTorch's C++ code count as written. Reads by PyTorch are not checked.

    Up to 256 MiB of tensors are kept alive, so that their addresses are not reused.
    """

    _MAKERS: tuple[tuple[Any, str], ...] = (
        *((torch, f"empty{suffix}") for suffix in ("", "_like", "_strided", "_permuted")),
        *((torch.Tensor, name) for name in ("new_empty", "resize_")),
    )

    def __enter__(self) -> FreshMemory:
        self._fresh: OrderedDict[int, tuple[torch.Tensor, np.ndarray]] = OrderedDict()
        self._num_bytes = 0
        for owner, name in self._MAKERS:
            wrap = self._resizing if name == "resize_" else self._making
            wrapper = wrap(getattr(owner, name))
            self.enter_context(mock.patch.object(owner, name, wrapper))
        return self

    def _making(self, make):
        @functools.wraps(make)
        def wrapper(*args, **kwargs):
            made = make(*args, **kwargs)
            if not torch.compiler.is_compiling():  # tracing allocates nothing
                self._remember(made)
            return made

        return wrapper

    def _resizing(self, resize):
        @functools.wraps(resize)
        def wrapper(tensor, *args, **kwargs):
            if torch.compiler.is_compiling() or not tensor.is_cpu:
                return resize(tensor, *args, **kwargs)
            before = tensor.untyped_storage().nbytes()
            _, unwritten = self._fresh.pop(tensor.untyped_storage().data_ptr(), (None, None))
            resize(tensor, *args, **kwargs)
            self._num_bytes -= 0 if unwritten is None else before
            kept = np.zeros(before, np.uint8) if unwritten is None else unwritten
            self._remember(tensor, kept)
            return tensor

        return wrapper

    def _remember(self, tensor: torch.Tensor, kept: np.ndarray = _NO_BYTES) -> None:
        """Mark the tensor's memory as fresh, except that its first bytes get the marks `kept`."""
        if type(tensor) is not torch.Tensor or not tensor.is_cpu:
            return
        held = _bytes_of(tensor)
        if not len(held) or len(held) > _MAX_FRESH_BYTES:
            return
        unwritten = np.ones(len(held), np.uint8)
        unwritten[: len(kept)] = kept[: len(held)]
        held[len(kept) :] = _pattern(len(held))[len(kept) :]
        self._fresh[tensor.untyped_storage().data_ptr()] = (tensor, unwritten)
        self._num_bytes += len(held)
        while self._num_bytes > _MAX_FRESH_BYTES:
            _, (_, dropped) = self._fresh.popitem(last=False)
            self._num_bytes -= len(dropped)

    def unwritten(self, tensor: torch.Tensor) -> int:
        """Address of the tensor's marks: one byte per byte of the tensor, 1 if unwritten. Returns 0
        if the whole tensor counts as written."""
        _, unwritten = self._fresh.get(tensor.untyped_storage().data_ptr(), (None, _NO_BYTES))
        held = _bytes_of(tensor)
        if len(held) != len(unwritten):
            return 0
        if ((held != _pattern(len(held))) & (unwritten != 0)).any():
            unwritten[:] = 0
        return unwritten.ctypes.data + int(tensor.storage_offset()) * tensor.itemsize


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of the tensor's storage."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return _NO_BYTES
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return np.ctypeslib.as_array(memory)


def _pattern(count: int) -> np.ndarray:
    """0x7fa5 repeated: a NaN in fp16, bf16 and fp32."""
    return np.full(-(-count // 2), 0x7FA5, np.uint16).view(np.uint8)[:count]
