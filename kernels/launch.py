"""Kernel launches, and how an op repeats the launches of an equal call without the host's work.

Argument checks, the choice of tiles and Triton's search for the compiled kernel take longer than
the driver's launch. They depend only on the layouts of the tensors (shape, strides, dtype, device,
address modulo 16) and on numbers. So an op records the kernels that a call launches,
and launches them again on the tensors of an equal call.
"""

import threading
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from kernels import tiles
from kernels.primitives import INTERPRETED

_CAPACITY = 1024
"""Calls that an op remembers. When it is full, it forgets all of them."""
_ALIGNMENT = 16
"""Triton compiles for pointers that are a multiple of this, or for any pointer."""
_recording = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a kernel, `kernel[grid](*args, **constants)`. Other launches are not remembered."""
    compiled = kernel[grid](*args, **constants)
    launches = getattr(_recording, "launches", None)
    if launches is not None:
        repeatable = kernel if INTERPRETED else compiled
        again = repeatable and repeatable[(*grid, 1, 1)[:3]]
        launches.append((again, [*args, *map(constants.get, kernel.arg_names[len(args) :])]))


def remembered(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """A function like an op's launcher, which repeats what an equal call has launched.

    The launcher may pass to kernels and return its own arguments, views of them as another dtype,
    and new tensors without values. It must not compute with PyTorch, nor call another such
    function. Errors are not remembered.
    """
    repeats: dict[tuple, Callable[[list], Any] | None] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        key = (tiles.forced_target(), *kwargs, *map(_layout, values))
        try:
            repeat = repeats.get(key)
        except TypeError:  # a list, say: the launcher raises an error
            return launcher(*args, **kwargs)
        if repeat is not None:
            return repeat(values)
        launches: list[tuple[Any, list]] = []
        _recording.launches = launches
        try:
            result = launcher(*args, **kwargs)
        finally:
            _recording.launches = None
        if all(again for again, _ in launches):  # if not, something stopped Triton from launching
            if len(repeats) >= _CAPACITY:
                repeats.clear()
            repeats[key] = _repeat(values, launches, result)
        return result

    return call


def _layout(value: object) -> tuple:
    """The properties of an argument that the host's work for a call depends on."""
    if isinstance(value, torch.Tensor):
        address = value.data_ptr() % _ALIGNMENT
        return value.shape, value.stride(), value.dtype, value.device, address
    return type(value), value  # 1 == 1.0 == True, but not all are taken for an integer


def _repeat(values: list[Any], launches: list, result: Any) -> Callable[[list], Any] | None:
    """A function that launches the same kernels on other values with the same layouts, and returns
    the call's results. None if arguments share memory, or parts of them are passed on.

    It picks the arguments of each launch from a pool: the values, new tensors, constants. A kernel
    takes a view as another dtype by its address alone.
    """
    new: list[torch.Tensor] = []
    constants: list[Any] = []
    places = {_memory(x): i for i, x in enumerate(values) if isinstance(x, torch.Tensor)}
    if len(places) < sum(isinstance(x, torch.Tensor) for x in values):
        return None
    storages = {storage for storage, *_ in places}

    def place(x: object) -> int:
        if not isinstance(x, torch.Tensor):
            constants.insert(0, x)
            return -len(constants)
        memory = _memory(x)
        if memory not in places:
            places[memory] = len(values) + len(new)
            new.append(x)
        return places[memory]

    picks = [(again, itemgetter(*map(place, args))) for again, args in launches]
    is_tuple = isinstance(result, tuple)
    returned = [place(x) for x in (result if is_tuple else (result,))]
    if any(_memory(x)[0] in storages for x in new):
        return None
    makers = [
        partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for x in new
    ]

    def repeat(values: list[Any]) -> Any:
        pool = [*values, *(make() for make in makers), *constants]
        for again, pick in picks:
            again(*pick(pool))
        results = tuple(pool[i] for i in returned)
        return results if is_tuple else results[0]

    return repeat


def _memory(x: torch.Tensor) -> tuple:
    """The elements in memory that a tensor has."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()
