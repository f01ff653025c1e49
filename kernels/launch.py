"""Kernel launches. An op repeats the launches of an equal earlier call without the host's work.

Argument checks, the choice of tiles and Triton's search for the compiled kernel take longer than
the driver's launch. These three steps depend only on numbers and on the layouts of tensors (shape,
strides, dtype, device, address modulo 16). So an op records the kernels that a call launches, and
launches them again on the tensors of an equal call.
"""

import functools
import threading
from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from kernels import tiles
from kernels.primitives import INTERPRETED

_CAPACITY = 1024
"""Maximum number of calls that an op remembers. At this number it forgets all calls."""
_ALIGNMENT = 16
"""Triton compiles a kernel for pointers that are multiples of this number, or for any pointers."""
_recording = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel[grid](*args, **constants)`. Only launches by this function are remembered."""
    compiled = kernel[grid](*args, **constants)
    launches = getattr(_recording, "launches", None)
    if launches is not None:
        repeatable = kernel if INTERPRETED else compiled
        again = repeatable and repeatable[(*grid, 1, 1)[:3]]
        launches.append((again, [*args, *map(constants.get, kernel.arg_names[len(args) :])]))


def remembered(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an op's launcher: a call equal to an earlier call repeats the earlier call's launches.

    The launcher may pass to kernels, and return, only its arguments, views of arguments as another
    dtype, and new uninitialised tensors. It must not compute with PyTorch. If it calls another
    remembered function, that call is part of its own. Errors are not remembered.
    """
    repeats: dict[tuple, Callable[[list], Any] | None] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_recording, "launches", None) is not None:
            return launcher(*args, **kwargs)
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


def on_gpu_of_tensors(
    launcher: Callable[..., Any], on_gpu: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Wrap an op's launcher: the GPU of the tensors becomes the current one for the call, because
    Triton launches on the current device. torch.compile does not trace the launcher.

    on_gpu: called instead of the launcher if a tensor is not in host memory.
    """
    on_gpu = on_gpu or launcher

    def eager(*args: Any, **kwargs: Any) -> Any:
        for arg in chain(args, kwargs.values()):
            if not getattr(arg, "is_cpu", True):
                if arg.is_cuda and (gpu := arg.get_device()) != torch.cuda.current_device():
                    with torch.cuda.device(gpu):
                        return on_gpu(*args, **kwargs)
                return on_gpu(*args, **kwargs)
        return launcher(*args, **kwargs)

    @functools.wraps(launcher)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(eager)(*args, **kwargs)
        return eager(*args, **kwargs)

    return call


def op(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an op's launcher: `on_gpu_of_tensors`, and calls on a GPU are `remembered`."""
    return on_gpu_of_tensors(launcher, remembered(launcher))


def _layout(value: object) -> tuple:
    """Return the properties of an argument on which the host's work for a call depends."""
    if isinstance(value, torch.Tensor):
        address = value.data_ptr() % _ALIGNMENT
        return value.shape, value.stride(), value.dtype, value.device, address
    return type(value), value  # 1 == 1.0 == True, but not all are taken for an integer


def _repeat(values: list[Any], launches: list, result: Any) -> Callable[[list], Any] | None:
    """Return a function that launches the same kernels on other values with the same layouts, and
    returns the call's results. None if arguments share memory or a kernel gets a part of one.

    The function picks each launch's arguments from a pool of values, new tensors and constants. For
    a view as another dtype it passes the viewed argument, because kernels use only the address.
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
        functools.partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)
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
    """Return a key for the memory elements that a tensor covers."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()
