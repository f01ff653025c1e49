"""A fake CUDA device, to run host code that otherwise needs a GPU.

Its tensors report cuda:0 and lie in host memory.  PyTorch computes on the CPU, and kernels run in
Triton's interpreter.  Operands on two devices, pageable host memory in a kernel, and waits of the
host during a graph capture raise.  A graph repeats the functions and launches of its capture.
Waits, replays and the memory of live tensors are counted.  Copies are done at once, but an event is
over only when the host has waited for it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._utils import _get_device_index
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA = torch.device("cuda", 0)


class CudaTensor(torch.Tensor):
    """A CPU tensor that reports CUDA."""

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return CUDA.index

    def is_pinned(self) -> bool:
        return False


class PinnedTensor(torch.Tensor):
    def is_pinned(self) -> bool:
        return True


_T = torch.Tensor
_MOVES = {_T.to, _T.cpu, _T.cuda}
_SUBSCRIPTS = {_T.__getitem__, _T.__setitem__}
_FROM_VALUES = {torch.tensor, torch.as_tensor}
_READ_BY_THE_HOST = {
    _T.item, _T.tolist, _T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.equal, torch.equal,
    _T.nonzero, torch.nonzero,
}  # fmt: skip


class _Functions(TorchFunctionMode):
    """Runs PyTorch's functions on host memory and decides where their results are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _MOVES:
            return self._move(func, *args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        on_gpu = _on_gpu(*tensors)
        to_gpu, pin = on_gpu, kwargs.pop("pin_memory", False)
        if func is _T.pin_memory:
            func, pin = _T.clone, True
        if kwargs.get("device") is not None:
            to_gpu = _is_cuda(kwargs["device"])
            kwargs |= {"device": "cpu"} if to_gpu else {}
        if func is _T.copy_:
            target, source, *_ = args
            asynchronous = kwargs.get("non_blocking") and any(t.is_pinned() for t in tensors)
            if _on_gpu(target) != _on_gpu(source) and not asynchronous:
                _gpu.wait()
        elif func in _SUBSCRIPTS:
            index = [t for t in tree_leaves(args[1]) if isinstance(t, torch.Tensor)]
            if on_gpu and any(t.dtype == torch.bool for t in index):
                _gpu.wait()
        elif on_gpu and any(t.dim() and t.numel() and not _on_gpu(t) for t in tensors):
            raise RuntimeError(f"Expected all tensors on one device: {func} got two")
        if (on_gpu and func in _READ_BY_THE_HOST) or (to_gpu and func in _FROM_VALUES):
            _gpu.wait()
        pin |= not to_gpu and any(isinstance(t, PinnedTensor) for t in tensors)  # views
        return _gpu.run(func, args, kwargs, PinnedTensor if pin else CudaTensor if to_gpu else None)

    def _move(self, func, x, *args, non_blocking=False, **kwargs):
        """``x.to``, ``x.cpu`` or ``x.cuda``."""
        devices = [arg for arg in args if isinstance(arg, (str, torch.device))]
        devices += [kwargs.pop("device")] if kwargs.get("device") is not None else []
        devices += {_T.cpu: ["cpu"], _T.cuda: ["cuda"]}.get(func, [])
        others = [arg for arg in args if isinstance(arg, (torch.dtype, torch.Tensor))]
        if not devices or devices == [torch.device("meta")] or _is_cuda(devices[0]) == _on_gpu(x):
            kind = CudaTensor if _on_gpu(x) else None
            return _gpu.run(_T.to, (x, *others), kwargs, kind) if others or kwargs else x
        kind = CudaTensor if _is_cuda(devices[0]) else PinnedTensor if non_blocking else None
        if not (non_blocking and (x.is_pinned() or _on_gpu(x))):
            _gpu.wait()
        return _gpu.run(_T.to, (x, *others), kwargs | {"copy": True}, kind)


def _on_gpu(*tensors: object) -> bool:
    return any(isinstance(tensor, CudaTensor) for tensor in tensors)


def _is_cuda(device: object) -> bool:
    return str(device).partition(":")[0] == "cuda"


class _Generator(torch.Generator):
    def __new__(cls, device: object = None) -> _Generator:
        return super().__new__(cls, "cpu")


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.is_over = True

    def record(self, stream: None = None) -> None:
        self.at, self.is_over = time.perf_counter(), False
        _gpu.events.append(self)

    def synchronize(self) -> None:
        if not self.is_over:
            _gpu.wait(self)

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.at - self.at)


class _Graph:
    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def pool(self) -> tuple[int, int]:
        return 0, 1

    def replay(self) -> None:
        _gpu.replays += 1
        for repeat in self.work:
            repeat()


class FakeGpu:
    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.allocated = self.peak = 0
        """Bytes of the tensors that live, and the most since the peak was reset."""
        self.waits = self.replays = 0
        self.events: list[_Event] = []
        """Recorded, and not over."""
        self._capturing: _Graph | None = None

    def run(self, func, args: tuple, kwargs: dict[str, Any], kind: type[torch.Tensor] | None):
        """Call a function; its new tensors are of ``kind``."""
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **kwargs)
        if kind is None or isinstance(made, torch.Size):
            return made
        made = tree_map_only(torch.Tensor, lambda t: self._place(t, kind), made)
        if self._capturing is not None:
            self._capturing.work.append(lambda: _repeat(func, args, kwargs, made))
        return made

    def _place(self, tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
        if type(tensor) is not torch.Tensor:  # an argument, changed in place
            return tensor
        storage = tensor.untyped_storage()
        if kind is CudaTensor and not hasattr(storage, "is_counted"):
            storage.is_counted = True
            self._count(storage.nbytes())
            weakref.finalize(storage, self._count, -storage.nbytes())
        return tensor.as_subclass(kind)

    def _count(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)

    def wait(self, last: _Event | None = None) -> None:
        """The host waits for the device: for all that it was given, or up to an event."""
        if self._capturing is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.waits += 1
        end = len(self.events) if last is None else self.events.index(last) + 1
        for event in self.events[:end]:
            event.is_over = True
        del self.events[:end]

    @contextlib.contextmanager
    def capture(self, graph: _Graph, pool: object = None) -> Iterator[None]:
        """torch.cuda.graph."""
        self.wait()
        self._capturing = graph
        try:
            yield
        finally:
            self._capturing = None

    def launch(self, grid_launch: Callable, executor, args: tuple, kwargs: dict) -> None:
        """A kernel on a grid."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not _on_gpu(value) and not value.is_pinned():
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

        def launch() -> None:
            with torch._C.DisableTorchFunction():
                grid_launch(executor, *args, **kwargs)
            gc.collect(1)  # the interpreter leaves cycles that hold the tensors of a launch

        launch()
        if self._capturing is not None:
            self._capturing.work.append(launch)

    def answers(self) -> dict[str, Callable]:
        """Functions of torch.cuda."""
        name, total = "NVIDIA H200", self.total_bytes
        properties = types.SimpleNamespace(
            name=name, major=9, minor=0, multi_processor_count=132, L2_cache_size=2**10
        )
        return {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "set_device": _get_device_index,  # which refuses a device without an index
            "get_device_properties": lambda device=None: properties,
            "get_device_name": lambda device=None: name,
            "get_device_capability": lambda device=None: (9, 0),
            "mem_get_info": lambda device=None: (total - self.allocated, total),
            "memory_reserved": lambda device=None: self.allocated,
            "max_memory_allocated": lambda device=None: self.peak,
            "reset_peak_memory_stats": lambda device=None: setattr(self, "peak", self.allocated),
            "empty_cache": lambda: None,
            "synchronize": lambda device=None: self.wait(),
            "current_stream": lambda device=None: None,
            "is_current_stream_capturing": lambda: self._capturing is not None,
            "Event": _Event,
            "CUDAGraph": _Graph,
            "graph": self.capture,
        }


def _repeat(func, args: tuple, kwargs: dict[str, Any], made: Any) -> None:
    """Call a captured function again; new results replace the old ones in place."""
    with torch._C.DisableTorchFunction():
        again = func(*args, **kwargs)
        for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


_gpu: FakeGpu


@contextlib.contextmanager
def fake_gpu(monkeypatch, total_bytes: int) -> Iterator[FakeGpu]:
    """Inside, torch.cuda has one H200 of so much memory.  Triton has to be in its interpreter."""
    global _gpu
    from triton import language as tl
    from triton.runtime.interpreter import GridExecutor

    from kernels import tiles

    _gpu = FakeGpu(total_bytes)
    for name, answer in _gpu.answers().items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch, "Generator", _Generator)
    grid_launch = GridExecutor.__call__
    monkeypatch.setattr(
        GridExecutor, "__call__", lambda executor, *a, **k: _gpu.launch(grid_launch, executor, a, k)
    )
    # On the host the ops behave as on a GPU; the kernels know that they are interpreted.
    for name in ("tiles", "checks", "swap_blocks"):
        module = importlib.import_module(f"kernels.{name}")
        monkeypatch.setattr(module, "INTERPRETED", tl.constexpr(False))
    try:
        with _Functions():
            yield _gpu
    finally:
        tiles._cuda_target.cache_clear()
