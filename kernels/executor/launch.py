"""Ordinary launches of Triton kernels, executed here: `with execute_ptx("sm_90"): op(cpu_tensors)`.

Inside the `with` block, Triton uses a driver that compiles kernels for this architecture to PTX
(without ptxas) and executes the PTX of each launch on CPU tensors. The launchers, checks, tiles and
split counts of the ops are the ones that a GPU of this architecture would use.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import FileCacheManager
from triton.runtime.driver import driver

from kernels.executor.global_memory import GlobalMemory, TensorWindow
from kernels.executor.machine import MAX_THREADS, Batch, Kernel
from kernels.executor.project import ops_of_this_project
from kernels.executor.ptx import MAP
from kernels.executor.targets import MULTIPROCESSORS, SHARED_BYTES, check_launch
from kernels.executor.tensors import AddressBook, FreshMemory, window_of
from kernels.executor.tma import TensorMap

_FORMATS = {"i1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I"}
_FORMATS |= {"i64": "q", "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d"}
_FORMATS |= {"fp16": "e", "f16": "e", "f64": "d"}

_kernel = functools.lru_cache(maxsize=512)(Kernel)


@dataclass(frozen=True)
class LaunchRecord:
    """One launch that was executed."""

    kernel: str
    grid: tuple[int, int, int]
    num_warps: int
    warp_instructions: int
    """Instructions, counted once for each warp that executed them."""


@dataclass
class Execution:
    """One `with execute_ptx`."""

    _seed: int | None
    _edit: Callable[[str, str], str] | None
    _fresh: FreshMemory
    _addresses: AddressBook
    launches: list[LaunchRecord] = field(default_factory=list)
    """All launches, in order."""

    @property
    def warp_instructions(self) -> int:
        return sum(launch.warp_instructions for launch in self.launches)

    def _run(self, function: _Function, grid, metadata, arguments: list) -> None:
        ptx = self._edit(function.name, function.ptx) if self._edit else function.ptx
        tables = self._addresses.named_in([value for _, kind, value in arguments if kind == "*i64"])
        launch = Launch(
            ptx, grid, metadata.num_warps, function.shared_bytes, arguments, tables=tables,
            fresh=self._fresh, seed=self._seed, dependent=metadata.launch_pdl,
        )  # fmt: skip
        name, instructions = launch.kernel.program.name, launch.run()
        self.launches.append(LaunchRecord(name, grid, metadata.num_warps, instructions))


class Launch:
    """One launch of a kernel."""

    def __init__(
        self, ptx: str, grid: tuple[int, int, int], num_warps: int, shared_bytes: int,
        arguments: list[tuple], *, tables: Sequence[TensorWindow] = (), fresh: FreshMemory | None,
        seed: int | None, dependent: bool,
    ):  # fmt: skip
        """arguments: (name, type, value) of each. tables: tensors that are known by their
        addresses. dependent: it may begin while the previous launch runs (programmatic dependent
        launch). Raises ValueError if a GPU would refuse it."""
        self.kernel, self.grid, self.num_warps = _kernel(ptx), grid, num_warps
        self.shared_bytes, self.seed, self.dependent = shared_bytes, seed, dependent
        check_launch(self.kernel.program.target, grid, num_warps, shared_bytes)
        tensors = [
            window_of(name, tensor, fresh.unwritten(tensor) if fresh else 0)
            for name, kind, value in arguments
            if (tensor := value[0].base if kind == MAP else value if kind[0] == "*" else None)
            is not None
        ]
        constants = [
            TensorWindow(name, array.ctypes.data, 1, array.shape, (1,), array.ctypes.data)
            for name, array in self.kernel.program.constants.items()
        ]
        self.memory = GlobalMemory(
            tensors, [*tables, *constants], math.prod(grid), num_warps * self.kernel.partial
        )
        self.parameters = {name: bytes(8) for name, _ in self.kernel.program.parameters}
        """Bytes of each parameter. Those that Triton appends are 0."""
        self.maps: dict[int, TensorMap] = {}
        """Tensor maps by the addresses of the parameters."""
        pointers = iter(self.memory.pointers)
        for name, (argument, kind, value) in zip(self.parameters, arguments, strict=False):
            if kind.startswith("*") and value is not None:
                self.parameters[name] = struct.pack("<Q", next(pointers))
            elif kind == MAP:
                where = self.kernel.program.symbols[name]
                self.maps[where] = TensorMap.of(argument, value[0], value[1], next(pointers))
            elif kind == "bf16":
                bits = torch.tensor(value, dtype=torch.bfloat16).view(torch.int16)
                self.parameters[name] = bits.numpy().tobytes()
            elif not kind.startswith("*"):
                self.parameters[name] = struct.pack("<" + _FORMATS[kind], value)

    def coordinates(self, program: int) -> tuple[int, int, int]:
        """(x, y, z) of a program of the grid."""
        x, y, _ = self.grid
        return program % x, program // x % y, program // (x * y)

    def run(self) -> int:
        """Execute every program. Returns the warp instructions. Raises Fault."""
        order = list(range(math.prod(self.grid)))
        rng = None if self.seed is None else random.Random(self.seed)
        if rng is not None:
            rng.shuffle(order)
        at_once = 1 if self.kernel.one_by_one else max(1, MAX_THREADS // (32 * self.num_warps))
        with np.errstate(all="ignore"):
            return sum(
                Batch(self, order[first : first + at_once], rng).run()
                for first in range(0, len(order), at_once)
            )


def run_ptx(
    ptx: str, arguments: Sequence[Any], *, grid: tuple[int, int, int] = (1, 1, 1),
    num_warps: int = 1, shared_bytes: int = 0, seed: int | None = None,
    fresh: FreshMemory | None = None, dependent: bool = False,
) -> None:  # fmt: skip
    """Execute one kernel given as PTX, without Triton: its parameters are `arguments` in order.

    Args:
        arguments: tensors, numbers, and (tensor descriptor, meta) as `TensorMap.of` takes them.
        fresh: records which memory nothing has written.
        dependent: whether the kernel must wait for the previous launch (griddepcontrol.wait).

    Raises Fault and UnknownInstruction.
    """
    parameters = _kernel(ptx).program.parameters
    kinds = {"u": "u", "s": "i", "b": "u", "f": "fp"}
    kind_of = {torch.Tensor: "*", tuple: MAP}
    named = [
        (name, kind_of.get(type(value)) or kinds[kind[0]] + kind[1:], value)
        for (name, kind), value in zip(parameters, arguments, strict=True)
    ]
    options: Any = {"fresh": fresh, "seed": seed, "dependent": dependent}
    Launch(ptx, grid, num_warps, shared_bytes, named, **options).run()


_SESSIONS: list[Execution] = []


@dataclass(frozen=True)
class _Function:
    """Handle of a loaded kernel, which Triton passes to the launcher."""

    name: str
    ptx: str
    shared_bytes: int


class _Launcher:
    """Launcher of one compiled kernel; Triton creates and calls it."""

    def __init__(self, source, metadata):
        self._arguments = [(str(name), kind) for name, kind in source.signature.items()]
        self._metadata = metadata
        self._maps = getattr(metadata, "tensordesc_meta", None) or ()

    def __call__(self, x, y, z, _stream, function, _packed, _metadata, _enter, _exit, *values):
        arguments, maps = [], iter(self._maps)
        for (name, kind), value in zip(self._arguments, values, strict=True):
            arguments += _flattened(name, kind, value, maps)
        if x and y and z:
            _SESSIONS[-1]._run(function, (x, y, z), self._metadata, arguments)


def _flattened(name: str, kind, value, maps: Iterator[dict]) -> list[tuple]:
    """(name, type, value) of an argument, or of each element of a tuple. A tensor descriptor has a
    map, sizes and strides. maps: see `TensorMap.of`."""
    if isinstance(kind, tuple):
        parts = zip(kind, value, strict=True)
        elements = [_flattened(f"{name}[{n}]", *part, maps) for n, part in enumerate(parts)]
        return [one for element in elements for one in element]
    if kind.startswith("tensordesc"):
        both = value.shape, value.strides
        sizes, strides = ([(name, "i64", number) for number in numbers] for numbers in both)
        flags = [(name, "i1", value.padding == "nan"), (name, "i1", value.round_f32_to_tf32)]
        meta = next(maps, None)
        first = [(name, MAP, (value, meta))]
        if not meta:  # the kernel does without TMA
            first = [(name, "*", value.base), *sizes, *strides, *flags]
        return [*first, *((name, "i32", size) for size in value.shape), *strides]
    return [] if kind == "constexpr" else [(name, kind, value)]


def _count_instructions(call, quantiles=None, **_options):
    """Benchmark for autotuning: returns the warp instructions of `call` instead of a time. Its
    launches are not recorded."""
    execution = _SESSIONS[-1]
    before, launches = execution.warp_instructions, len(execution.launches)
    call()
    instructions = execution.warp_instructions - before
    del execution.launches[launches:]
    return [instructions] * len(quantiles) if quantiles else instructions


class _Driver:
    """A Triton driver for a GPU that is not here."""

    launcher_cls = _Launcher

    def __init__(self, target: GPUTarget):
        self._target, self.utils = target, self
        self._ptx: dict[str, Path] = {}

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"executor:{self._target.arch}"

    def get_current_stream(self, _device) -> int:
        return 0

    def get_device_properties(self, _device) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_BYTES[self._target.arch],
            "multiprocessor_count": MULTIPROCESSORS[f"sm_{self._target.arch}"],
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def get_benchmarker(self):
        return _count_instructions

    def remember_ptx(self, _module, _function, name: str, files: dict, _hash) -> None:
        """Hook that Triton calls before it loads a kernel; files: paths of the compiled stages."""
        self._ptx[name] = Path(next(path for path in files.values() if str(path).endswith(".ptx")))

    def load_binary(self, name: str, _binary, shared_bytes: int, _device):
        function = _Function(name, self._ptx.pop(name).read_text(), shared_bytes)
        return None, function, 0, 0, 1024


def _stop_at_ptx(*arguments):
    """Hook into Triton's compilation. Called without arguments it returns a cache key."""
    if not arguments:
        return "PTX only", "PTX only"
    _backend, stages, *_ = arguments
    stages["cubin"] = lambda _ptx, _metadata: b""
    return None


@contextlib.contextmanager
def execute_ptx(
    architecture: str = "sm_90",
    *,
    seed: int | None = None,
    edit: Callable[[str, str], str] | None = None,
) -> Iterator[Execution]:
    """Execute the PTX of every Triton kernel that is launched inside, on CPU tensors.

    Args:
        architecture: one of MULTIPROCESSORS.
        seed: run programs in random order and their warps in random turns. None runs them in step.
        edit: called with a kernel's name and its PTX, returns the PTX to execute instead.

    Yields:
        an Execution, to which each launch is added when it has run.

    Raises:
        ValueError: an unknown architecture.
        RuntimeError: the process runs kernels in Triton's interpreter.
        Fault: (from a launch) the kernel did something forbidden. Its earlier writes remain.
        UnknownInstruction: (from a launch) the kernel has an unsupported instruction.
    """
    if architecture not in MULTIPROCESSORS:
        known = ", ".join(MULTIPROCESSORS)
        raise ValueError(f"architecture: expected one of {known}, got {architecture!r}")
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "kernels are bound to the interpreter: unset TRITON_INTERPRET to execute PTX"
        )
    version = int(architecture.removeprefix("sm_"))
    ours = _Driver(GPUTarget("cuda", version, 32))
    runtime, replace = triton.knobs.runtime, mock.patch.object
    with contextlib.ExitStack() as stack:
        fresh = stack.enter_context(FreshMemory())
        addresses = stack.enter_context(AddressBook())
        stack.enter_context(ops_of_this_project(version, MULTIPROCESSORS[architecture]))
        if not _SESSIONS:
            # The cubins are empty. Triton 3.6 would load them on a GPU: its key ignores the hook.
            cache = triton.knobs.cache
            stack.enter_context(cache.scope())
            cache.dir, cache.manager_class = str(Path(cache.dir) / "executor"), FileCacheManager
        session = Execution(seed, edit, fresh, addresses)
        _SESSIONS.append(session)
        stack.callback(_SESSIONS.remove, session)
        stack.enter_context(replace(driver, "_active", ours))
        stack.enter_context(replace(runtime, "add_stages_inspection_hook", _stop_at_ptx))
        runtime.kernel_load_start_hook.add(ours.remember_ptx)
        stack.callback(runtime.kernel_load_start_hook.remove, ours.remember_ptx)
        yield session
