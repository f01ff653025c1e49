"""Compiles, beside a GPU experiment and before it gets there, the kernels that it will launch.

A GPU experiment on one process spends more time in the compiler than on the GPU, while the other
cores idle.  The shapes of its cells are known beforehand, so other processes call the ops on meta
tensors of these shapes, by which ``kernels/compiled/compile.py`` compiles what would be launched;
the result lies in Triton's cache when the experiment looks for it.  Comparisons of
``kernel_accuracy`` need values: they are done in host memory, where nothing is launched, for what
they would launch.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from experiments.bench.problem import OURS, Shape
from experiments.bench.tiles import with_tile


@runtime_checkable
class Checked(Protocol):
    """A cell that compares a kernel with its reference."""

    def check(self, device: str) -> object: ...


@dataclass(frozen=True)
class Job:
    """An op at a shape, with a tile of another size than the table's or not; or a comparison."""

    work: Checked | Shape
    tile: tuple[int, ...] | None
    """As in ``tiles.with_tile``; None for the table's."""


def jobs_of(cells: Iterable[Any]) -> list[Job]:
    """What the cells launch of ours, each once; other experiments' cells are passed over."""
    jobs = (
        Job(work, getattr(cell, "tile", None))
        for cell in cells
        if isinstance(work := getattr(cell, "shape", cell), Shape | Checked)
        and getattr(cell, "implementation", OURS) == OURS
    )
    return list(dict.fromkeys(jobs))


class CompileAhead:
    """Processes that compile for the GPU of this one into TRITON_CACHE_DIR.

    A context manager, which ends them.  Errors are left to the experiment that will meet them.
    """

    def __init__(self, num_processes: int) -> None:
        import torch

        properties = torch.cuda.get_device_properties()
        arch = properties.major * 10 + properties.minor
        self._gpu = (arch, properties.multi_processor_count)
        self._pool = multiprocessing.get_context("spawn").Pool(num_processes, _without_gpu)

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()

    def add(self, jobs: Iterable[Job]) -> None:
        """Compile ``jobs`` after those that were added before; returns at once."""
        for job in jobs:
            self._pool.apply_async(compile_job, (job, *self._gpu))


def _without_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.nice(5)


def compile_job(job: Job, arch: int, num_multiprocessors: int) -> int:
    """Compile what a job launches on a GPU; returns how many kernels that are.

    arch: compute capability as an integer.  Must run without TRITON_INTERPRET.
    """
    from kernels.compiled.architectures import ARCHITECTURES
    from kernels.compiled.compile import compile_call
    from kernels.executor.launch import cpu_tensors_are_welcome
    from kernels.tiles import force_target

    known = ARCHITECTURES[f"sm_{arch}"]
    target = dataclasses.replace(known, num_multiprocessors=num_multiprocessors)

    def call() -> None:
        if isinstance(job.work, Checked):
            with cpu_tensors_are_welcome():
                job.work.check("cpu")
            return
        tiles = target.tiles_target
        if job.tile is not None:
            tiles = with_tile(job.work, job.tile, tiles)
        with force_target(tiles):
            launch_on_meta(job.work)

    return len(compile_call(call, target))


def launch_on_meta(shape: Shape) -> None:
    """Call our op for ``shape`` on its problem's inputs, made of meta tensors."""
    import torch

    from experiments.bench.kernel_problems import OPS

    OPS[shape.op](shape, torch.device("meta")).implementations[OURS]()
