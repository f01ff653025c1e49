"""A fake CUDA device, to run host code that otherwise needs a GPU.

Its tensors report cuda:0 and keep their data in host memory.  PyTorch's ops run on the CPU, kernels
in Triton's interpreter.  Errors of a GPU are raised: operands on two devices, a generator of
another device, pageable host memory in a kernel, and waits of the host during a graph capture.
Results of a capture are NaN until the graph is replayed, which repeats its ops and launches in
place.  Waits, replays and the memory of live tensors are counted.  A copy of pinned memory is done
only after the host waits for it: before, its event is not done, its target is garbage, and a write
to its source raises.

This says nothing about speed, compiled kernels or overlapping work.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._utils import _get_device_index
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_aten = torch.ops.aten
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}
_SUBSCRIPTS = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_READ_BY_THE_HOST = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.equal.default,
}
_UNINITIALISED = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default}


class CudaTensor(torch.Tensor):
    """Reports CUDA; ``host`` has its data.  PyTorch's C++ is told that it is a meta tensor: of a
    CUDA tensor's device it would ask the driver."""

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> CudaTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="meta",
        )

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)

    def get_device(self) -> int:
        return CUDA.index

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def cpu(self) -> torch.Tensor:
        return _gpu.run(_aten._to_copy.default, (self,), {"device": CPU})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"{self.host!r} on {CUDA}"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _gpu.run(func, args, kwargs or {})


class _Ops(TorchDispatchMode):
    """Ops without a tensor, those that make one, too; composed ones as what they consist of, also
    in inference mode, which does not take them apart before."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        return _gpu.run(func, args, kwargs)


class _Functions(TorchFunctionMode):
    """Conversions of arguments for which PyTorch's C++ would ask the driver."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CUDA
        if func is torch.Tensor.to:
            args = tuple(CUDA if _is_cuda(arg) else arg for arg in args)
            if isinstance(args[0], CudaTensor):  # it is there already
                args = tuple(arg for arg in args if arg is not CUDA)
                if kwargs.get("device") is CUDA:
                    del kwargs["device"]
                if len(args) == 1 and kwargs.keys() <= {"non_blocking"}:
                    return args[0]
        if func in _SUBSCRIPTS and isinstance(args[0], CudaTensor):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            places = tuple(torch.tensor(p).to(CUDA) if type(p) is list else p for p in places)
            args = (args[0], places, *args[2:])
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is CUDA:
            return func(*args, **{**kwargs, "device": CPU}).to(CUDA)
        if kwargs.get("device") in ("meta", torch.device("meta")):
            with _gpu.wanting_meta_tensors():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_cuda(value: object) -> bool:
    return isinstance(value, (str, torch.device)) and str(value) in ("cuda", "cuda:0")


class _Generator(torch.Generator):
    def __new__(cls, device: torch.device | str = CPU) -> _Generator:
        made = super().__new__(cls, CPU)
        # An op is given another Python object of the same generator.
        _gpu.serves[made._cdata] = torch.device(device).type
        return made


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.after = 0

    def record(self, stream: None = None) -> None:
        self.at, self.after = time.perf_counter(), _gpu.copies

    def query(self) -> bool:
        return self.after <= _gpu.copied

    def synchronize(self) -> None:
        if not self.query():
            _gpu.wait("an event", self.after)

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
        self.copies = self.copied = 0
        """Copies between device and pinned memory so far, and those that are over for certain."""
        self._under_way: deque[Callable[[], object]] = deque()
        self._read_by_copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.serves: dict[int, str] = {}
        """Type of the device that a generator was made for."""
        self._capturing: _Graph | None = None
        self._captured: list[torch.Tensor] = []
        self._pinned: dict[int, StorageWeakRef] = {}
        self._meta_is_meant = False

    def run(self, func, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An op of PyTorch."""
        if func is _aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func is _aten._foreach_copy_.default:  # a loop where the devices differ
            for target, source in zip(*args[:2], strict=True):
                self.run(_aten.copy_.default, (target, source, *args[2:]), kwargs)
            return None
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        on_gpu = [t for t in tensors if isinstance(t, CudaTensor)]
        to_gpu, pin = bool(on_gpu), kwargs.get("pin_memory") or func is _aten._pin_memory.default
        if func is _aten.copy_.default:
            to_gpu = isinstance(args[0], CudaTensor)
        elif (device := kwargs.get("device")) is not None:
            kind = torch.device(device).type
            to_gpu = kind == "cuda" or (kind == "meta" and not self._meta_is_meant)
        if not (on_gpu or to_gpu or pin):
            return func(*args, **kwargs)
        self._check(func, args, kwargs, tensors, to_gpu)
        given = {id(t.host): t for t in on_gpu}
        args, kwargs = tree_map_only(CudaTensor, lambda t: t.host, (args, kwargs))
        kwargs.pop("pin_memory", None)
        if to_gpu and kwargs.get("device") is not None:
            kwargs["device"] = CPU
        with _on_the_host():
            made = args[0].clone() if func is _aten._pin_memory.default else func(*args, **kwargs)
            if func is _aten._to_copy.default and made is args[0]:
                made = made.clone()
        if self._capturing is not None:
            self._record(func, args, kwargs, made)
        if func is _aten._to_copy.default and on_gpu and not to_gpu and kwargs.get("non_blocking"):
            made = self._arriving(made)
            pin = True
        if pin:
            storage = made.untyped_storage()
            self._pinned[storage._cdata] = StorageWeakRef(storage)
        to_gpu = to_gpu and not pin

        def result(host: torch.Tensor) -> torch.Tensor:
            if id(host) in given:
                return given[id(host)]
            return self._hold(host) if to_gpu else host

        return tree_map_only(torch.Tensor, result, made)

    def _check(self, func, args, kwargs, tensors: list[torch.Tensor], to_gpu: bool) -> None:
        """Refuse what a GPU would, and count what the host waits for."""
        on_host = [t for t in tensors if not isinstance(t, CudaTensor)]
        if func in (_aten.copy_.default, _aten._to_copy.default):
            if any(isinstance(t, CudaTensor) != to_gpu for t in tensors):
                non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
                if not (non_blocking and all(map(self.is_pinned, on_host))):
                    self.wait("a copy between host and device")
                elif on_host and to_gpu:
                    self._leaving(on_host[0])
                else:  # the device writes there after the copies that it was given before
                    self._end_reading(self.copies)
        elif func in _INDEXING and isinstance(args[0], CudaTensor):
            indices = [index for index in args[1] if index is not None]
            if not all(isinstance(index, CudaTensor) for index in indices):
                self.wait("indexing by host memory")
            if any(index.dtype == torch.bool for index in indices):
                self.wait("indexing by a mask")
        elif len(on_host) < len(tensors) and any(t.dim() and t.numel() for t in on_host):
            raise RuntimeError(f"Expected all tensors on one device, {func} got {CUDA} and {CPU}")
        if func in _READ_BY_THE_HOST:
            self.wait(func)
        if generator := kwargs.get("generator"):
            serves = self.serves.get(generator._cdata, "cpu")
            if (serves == "cuda") != to_gpu:
                raise RuntimeError(f"{func}: got a generator of {serves}")

    def _leaving(self, pinned: torch.Tensor) -> None:
        """A copy to the device begins."""
        with _on_the_host():
            content = pinned.clone()

        self.copies += 1
        copy = self.copies
        self._read_by_copies[copy] = pinned, content
        self._under_way.append(lambda: self._end_reading(copy))

    def _end_reading(self, last: int) -> None:
        """The copies to the device up to ``last`` are over."""
        for copy in [copy for copy in self._read_by_copies if copy <= last]:
            pinned, content = self._read_by_copies.pop(copy)
            same = torch.equal(
                pinned.flatten().view(torch.uint8), content.flatten().view(torch.uint8)
            )
            assert same, "pinned memory was written to during its copy"

    def _arriving(self, content: torch.Tensor) -> torch.Tensor:
        """Pinned memory that a copy from the device begins to fill: nonsense until it is over."""
        with _on_the_host():
            pinned = torch.full_like(content, 99)
        self.copies += 1
        self._under_way.append(lambda: pinned.copy_(content))
        return pinned

    def wait(self, why: object = "synchronize", copies: int | None = None) -> None:
        """The host waits for the device: for all that it was given, or its first ``copies``."""
        if self._capturing is not None:
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing: {why}"
            )
        self.waits += 1
        while self.copied < (self.copies if copies is None else copies):
            self._under_way.popleft()()
            self.copied += 1

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, CudaTensor):
            return False
        known = self._pinned.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def _hold(self, host: torch.Tensor) -> CudaTensor:
        storage = host.untyped_storage()
        if not hasattr(storage, "is_counted"):
            storage.is_counted = True
            self._count(storage.nbytes())
            weakref.finalize(storage, self._count, -storage.nbytes())
        with torch.inference_mode(False):
            return CudaTensor(host)

    def _count(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)

    @contextlib.contextmanager
    def wanting_meta_tensors(self) -> Iterator[None]:
        self._meta_is_meant = True
        yield
        self._meta_is_meant = False

    @contextlib.contextmanager
    def capture(self, graph: _Graph, pool: object = None) -> Iterator[None]:
        """torch.cuda.graph."""
        self.wait()
        self._capturing = graph
        try:
            yield
        finally:
            self._capturing, captured = None, self._captured
            self._captured = []
        with _on_the_host():
            for tensor in captured:
                if tensor.dtype.is_floating_point and tensor.itemsize > 1:
                    tensor.fill_(torch.nan)

    def _record(self, func, args, kwargs, made) -> None:
        old = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is_tensor(t)}
        fresh = [_is_tensor(t) and t.untyped_storage()._cdata not in old for t in tree_leaves(made)]
        self._captured += [t for t, new in zip(tree_leaves(made), fresh, strict=True) if new]
        if func in _UNINITIALISED or not (any(fresh) or func._schema.is_mutable):
            return

        def repeat() -> None:
            with _on_the_host():
                again = tree_leaves(func(*args, **kwargs))
                for before, now, new in zip(tree_leaves(made), again, fresh, strict=True):
                    if new:
                        before.copy_(now)

        self._capturing.work.append(repeat)

    def launch(self, grid_launch: Callable, executor, args: tuple, kwargs: dict) -> None:
        """A kernel on a grid."""
        for value in (*args, *kwargs.values()):
            on_host = _is_tensor(value) and not isinstance(value, CudaTensor)
            if on_host and not self.is_pinned(value):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        args, kwargs = tree_map_only(CudaTensor, lambda t: t.host, (args, kwargs))

        def launch() -> None:
            with _on_the_host():
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


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _on_the_host() -> contextlib.AbstractContextManager:
    """Results of ops must be usable in and outside inference mode."""
    return torch.inference_mode(False)


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
        with _Functions(), _Ops():
            yield _gpu
    finally:
        tiles._cuda_target.cache_clear()
