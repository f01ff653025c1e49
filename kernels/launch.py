"""Kernel launches, and calls of ops that launch the same kernels again without the host's work.

Checking a call's arguments, choosing tiles and Triton's own search for the compiled kernel take
longer than the driver's launch. All of it depends only on the layouts of the tensors (shape,
strides, dtype, device, address modulo 16) and on the other arguments. So `Remembered` records which
kernels a call launched, and an equal call launches them again with its own tensors in place of the
recorded ones: a CUDA graph's replay with the pointers left open, and without a capture. Triton's
compiled kernels can be launched directly, `compiled[grid](*arguments)`, as in its tutorials.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.compiler import CompiledKernel

from kernels import tiles
from kernels.primitives import INTERPRETED

_CAPACITY = 1024
"""Calls that an op remembers. Then it forgets all and begins again."""
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_NUMBERS = frozenset((type(None), bool, int, float, str))
_ALIGNMENT = 16
"""Triton compiles for pointers that are a multiple of this, or for any."""
_ALLOCATIONS = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty")
)
_recording = threading.local()
Launched = tuple[Callable[..., Any] | None, list[Any]]
"""A function that launches a kernel again, None if there is none, and its arguments."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a kernel: `kernel[grid](*args, **constants)`.

    All launches of an op that is decorated by `kernels.torch_ops` go through this function.
    """
    recorder: _Recorder | None = getattr(_recording, "recorder", None)
    if recorder is None:
        kernel[grid](*args, **constants)
        return
    recorder.is_launching = True  # the interpreter computes with PyTorch
    compiled = kernel[grid](*args, **constants)
    recorder.is_launching = False
    kernel_again = kernel if INTERPRETED else compiled
    can_repeat = INTERPRETED or isinstance(compiled, CompiledKernel)
    again = kernel_again[(*grid, 1, 1)[:3]] if can_repeat else None
    recorder.launches.append((again, [*args, *map(constants.get, kernel.arg_names[len(args) :])]))


class _Recorder(TorchDispatchMode):
    """Records launches, the memory that PyTorch allocates, and whether it writes to memory."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launched] = []
        self.allocated: list[torch.Tensor] = []
        self.is_launching = self.has_written = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not self.is_launching:
            self.has_written |= function._schema.is_mutable
            if function.overloadpacket in _ALLOCATIONS:
                self.allocated.append(result)
        return result


class Remembered:
    """A function that calls `function`, an op's launcher, or repeats what an equal call launched.

    It takes and returns what `function` does. Calls whose arguments are others than tensors,
    numbers, strings and None are not remembered. Nor are those in which PyTorch writes to a tensor,
    or whose launches take what PyTorch has computed or a part of an argument. Errors are never
    remembered.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._repeats: dict[tuple, Callable[[list], Any] | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(_recording, "recorder", None) is not None:  # part of another call
            return self._function(*args, **kwargs)
        values = [*args, *kwargs.values()]
        key = _layouts(values, tuple(kwargs))
        repeat = self._repeats.get(key)
        if repeat is not None:
            return repeat(values)
        if key is None or key in self._repeats:
            return self._function(*args, **kwargs)
        _recording.recorder = recorder = _Recorder()
        try:
            with recorder:
                result = self._function(*args, **kwargs)
        finally:
            _recording.recorder = None
        if len(self._repeats) >= _CAPACITY:
            self._repeats.clear()
        self._repeats[key] = _repeat(values, recorder, result)
        return result


def _layouts(values: list[Any], names: tuple[str, ...]) -> tuple | None:
    """All that the host's work for a call depends on, None if it may depend on more."""
    key = [tiles.forced_target(), names]
    for value in values:
        kind = type(value)
        if kind in _TENSORS:
            address = value.data_ptr() % _ALIGNMENT
            key += (value.shape, value.stride(), value.dtype, value.device, address)
        elif kind in _NUMBERS:
            key += (kind, value)  # 1 == 1.0 == True, but not all are taken for an integer
        else:
            return None
    return tuple(key)


def _repeat(values: list[Any], recorder: _Recorder, result: Any) -> Callable | None:
    """A function of other values with the same layouts that launches the same kernels on them and
    returns what the call does; None if these values do not tell how.

    It makes a list of the values, new tensors and constants, and takes the arguments of each launch
    from that list by their places. A view as another dtype is passed as what it is a view of: a
    compiled kernel takes the address alone.
    """
    launches = recorder.launches
    if not launches or recorder.has_written or any(launcher is None for launcher, _ in launches):
        return None
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    used = {_memory(x) for x in chain(*(args for _, args in launches), results)} - {None}
    new = [x for x in recorder.allocated if _memory(x) in used]
    pool, places = [*values, *new], {}
    for place, memory in enumerate(map(_memory, pool)):
        if memory in used and memory in places:
            return None
        places[memory] = place
    places.pop(None, None)
    if not used <= places.keys():
        return None
    constants, picks = [], []
    for launcher, args in launches:
        first = len(pool) + len(constants)
        picked = (places.get(_memory(x), first + n) for n, x in enumerate(args))
        picks.append((launcher, itemgetter(*picked)))
        constants += [x if _memory(x) is None else None for x in args]
    made = [places.get(_memory(x)) for x in results]
    if any(
        place is None or x.dtype != pool[place].dtype
        for x, place in zip(results, made, strict=True)
    ):
        return None
    layouts = [(x.shape, x.stride(), x.dtype, x.device) for x in new]
    is_tuple = isinstance(result, tuple)

    def repeat(values: list[Any]) -> Any:
        new = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, device in layouts
        ]
        pool = [*values, *new, *constants]
        for launcher, pick in picks:
            launcher(*pick(pool))
        results = tuple(pool[place] for place in made)
        return results if is_tuple else results[0] if results else None

    return repeat


def _memory(x: object) -> tuple | None:
    """The elements in memory that a tensor has, None if x is no tensor."""
    if not isinstance(x, torch.Tensor):
        return None
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()
