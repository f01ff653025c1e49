"""``pagelab gpu``: experiments and tests for a few minutes on a GPU, the most important first.

    pagelab gpu --seconds 560
    pagelab gpu --stages tests policies

Without an installation, ``python -m experiments gpu`` is the same command in a checkout.

It needs a checkout with PyTorch, Triton, pandas and pytest, and no network.  A stage is a process
with a time limit.  It runs tests, or experiments whose cells are stored one by one.  A stage or the
whole command may be killed at any time: results so far are kept, and the same command resumes.
Meanwhile the other cores compile the kernels of later stages.

Results are written to ``--out`` as by ``pagelab run``, without figures.  ``first_contact/log.txt``
logs the stages.  ``pagelab plot`` and ``pagelab report`` show the results.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.bench.shapes import OURS
from experiments.harness import Absent, run_sweep
from experiments.harness.environment import REPOSITORY, version_of
from experiments.harness.workers import end_with_parent, run_here, run_locally
from experiments.registry import EXPERIMENTS

_FORK = multiprocessing.get_context("fork")
"""A stage inherits the parent's imports.  The parent never uses the GPU."""
_WENT_WRONG = 3
"""Exit status of a stage if a result was wrong or a cell or test failed."""
_AT_ONCE: dict[signal.Signals, float] = {signal.SIGKILL: 5}
_GRACE: dict[signal.Signals, float] = {signal.SIGINT: 8, **_AT_ONCE}
"""Signals and seconds to wait after each.  On SIGINT a stage writes its tables."""


Step = Callable[[Path], Iterator[str]]
"""A function that writes results to a folder and yields lines for the log."""


@dataclass(frozen=True)
class Sweep:
    """A step that runs cells of an experiment."""

    experiment: str
    options: dict[str, Any]
    implementations: tuple[str, ...] = ()
    """Run only these implementations.  Empty means all."""
    jobs: int | None = None
    """Number of worker processes.  A worker is replaced after a device error.  None: the cells run
    in the stage's own process, which saves imports."""

    def cells(self) -> Iterator[Any]:
        """The cells on this machine."""
        experiment = EXPERIMENTS[self.experiment]
        options: Any = experiment.options
        for cell in experiment.checked_cells(dataclasses.replace(options, **self.options)):
            name = getattr(cell, "implementation", None)
            if isinstance(cell, Absent) or not self.implementations or name in self.implementations:
                yield cell

    def __call__(self, out: Path) -> Iterator[str]:
        """Run the cells.  Rows of other stages stay in the table."""
        own = list(self.cells())
        cells = dict.fromkeys(own)
        for step in (step for _, steps in STAGES.values() for step in steps):
            if isinstance(step, Sweep) and step.experiment == self.experiment:
                with contextlib.suppress(Exception):  # the step's own stage will report the error
                    cells |= dict.fromkeys(c for c in step.cells() if not isinstance(c, Absent))
        whole = EXPERIMENTS[self.experiment]
        some = dataclasses.replace(whole, cells=lambda _: cells, plot=lambda rows, folder: [])
        run: Any = partial(run_locally, jobs=self.jobs) if self.jobs else run_here
        report = run_sweep(
            some, whole.options, out=out, execute=lambda ts: run([t for t in ts if t.cell in own])
        )
        yield f"{self.experiment}: {report}"
        yield from (f"WRONG {row}" for row in report.wrong)
        yield from (f"FAILED {cell.partition(chr(10))[0]}" for cell in report.failed)
        yield from (f"absent ({count}) {reason}" for reason, count in report.unavailable.items())


def device_tests(*options: str) -> Step:
    """A step that runs device tests, in one process per core, up to 12."""

    def run(out: Path) -> Iterator[str]:
        parallel = ["-n", str(min(12, os.cpu_count() or 1))] if version_of("pytest-xdist") else []
        words = ["pytest", "--on-device", "-q", "--tb=short", "-p", "no:cacheprovider", *parallel]
        command, last = [sys.executable, "-m", *words, *options], ""
        pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with (
            (out / "first_contact" / "pytest.txt").open("a", buffering=1) as log,
            subprocess.Popen(command, cwd=REPOSITORY, text=True, **pipe) as process,
        ):
            # At its limit pytest prints its failures so far, if this process still reads.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for line in process.stdout or ():
                log.write(line)
                last = line.strip() or last
                if line.startswith(("FAILED", "ERROR")):
                    yield line.strip()
        yield f"pytest {' '.join(options)}: {last} (status {process.returncode})"

    return run


_SMOKE = {"block_size": (16,), "head_dim": (128,), "dtype": ("bfloat16", "fp8")}
_SMOKE |= {"feature": ("none", "split", "window")}
_HEADLINE: dict[str, Any] = {"part": ("decode", "prefill"), "batch": (64,)}
_HEADLINE |= {"context_len": (4096,), "prefill": ((1, 4096, 4096), (1, 16384, 16384))}
_FP8 = {"part": ("decode",), "kv_dtype": "float8_e4m3fn"}
_LATENCY = {
    "part": ("decode", "prefill", "mla", "cascade", "norm", "gate", "store", "copy", "swap_out",
             "swap_in"), "has_producer": (True,),
    "batch": (1, 8, 32, 256), "context_len": (512, 2048, 8192), "budget_ms": 20.0,
    "prefill": ((1, 512, 8192), (1, 2048, 2048), (1, 8192, 8192), (1, 16, 32768), (16, 256, 4096),
                (64, 4, 4096)),
    "prefix_len": (1024, 32768), "cascade_batch": (1, 16, 256),
}  # fmt: skip
_BESIDE = ("paged_decode", "torch", "copy_engine", "flash_attn_2", "flash_attn_3")
STAGES: dict[str, tuple[float, tuple[Step, ...]]] = {
    "smoke": (75, (Sweep("kernel_accuracy", _SMOKE, jobs=1),)),
    "races": (60, (device_tests("tests/kernels/test_repeats.py"),)),
    "headline": (100, (
        Sweep("kernel_latency", _HEADLINE, (OURS, *_BESIDE), jobs=1),
        Sweep("kernel_latency", _HEADLINE | _FP8, (OURS,), jobs=1),
    )),
    "block_size": (70, (
        Sweep("block_size", {"part": ("latency",)}, (OURS, "flash_attn_2"), jobs=1),
    )),
    "engine": (90, (Sweep("engine", {"part": ("throughput",)}),)),
    "policies": (110, (Sweep("engine", {"part": ("policy",)}),)),
    "tests": (180, (device_tests("-k", "not repeats"),)),
    "engine_more": (120, (
        Sweep("engine", {"part": ("block_size", "manager", "transformers")}),
    )),
    "latency": (120, (Sweep("kernel_latency", _LATENCY, (OURS, *_BESIDE)),)),
    "accuracy": (120, (
        Sweep("kernel_accuracy", {"block_size": (16, 24), "head_dim": (64, 128)}, jobs=12),
    )),
}  # fmt: skip
"""Time limit of each stage in seconds, and its steps.  The most important stage is first."""
_MIN_SHARE = 0.3
"""A stage starts only if at least this share of its time limit is left."""
_UNTIMED = ("smoke", "races", "tests", "accuracy")
"""Stages during which other cores may compile, because they time nothing."""


Log = Callable[[str, str], None]
"""A function of a stage's name and a line."""


def _write(path: Path, began: float, stage: str, text: str) -> None:
    """Write a line, with the time, to the console and to a file."""
    line = f"{time.time() - began:6.1f} s  {stage}: {text}"
    print(line, flush=True)
    with path.open("a") as file:
        file.write(line + "\n")


def run_stage(name: str, out: Path, log: Log) -> bool:
    """Run the steps of a stage in this process.  An error ends only the step that raised it.

    Returns whether nothing failed and no result was wrong.
    """
    went_well = True
    for step in STAGES[name][1]:
        try:
            for line in step(out):
                log(name, line)
                went_well &= not line.startswith(("WRONG", "FAILED", "ERROR"))
        except Exception as error:
            log(name, f"{type(error).__name__}: {str(error)[:400]}")
            went_well = False
    return went_well


def main(arguments: list[str] | None = None) -> int:
    """Run one command line.  Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="pagelab gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=560, help="for all stages together")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds:g}: needs a number above 0")
    if not (REPOSITORY / "tests").is_dir():
        parser.error(f"needs a checkout of the repository: there is no {REPOSITORY / 'tests'}")
    end = time.monotonic() + options.seconds
    for module in ("torch", "kernels.testing.cases", "models"):  # one import for all stages
        importlib.import_module(module)
    with ProcessPoolExecutor(1, _FORK) as other:
        capability = other.submit(_capability).result()
    if capability is None:
        print("error: needs a CUDA GPU that PyTorch finds; there is none", file=sys.stderr)
        return 2
    folder = options.out / "first_contact"
    folder.mkdir(parents=True, exist_ok=True)
    log, arch = partial(_write, folder / "log.txt", time.time()), "sm_{}{}".format(*capability)
    found = [f"{name} {version_of(name)}" for name in ("torch", "triton") if version_of(name)]
    log("start", f"{', '.join(found)}, Python {platform.python_version()}, {os.cpu_count()} cores")
    compiling = _FORK.Process(target=_compile_ahead, args=(options.stages, arch, log))
    compiling.start()
    process, statuses = None, []
    try:
        for name in options.stages:
            if name not in _UNTIMED:
                compiling.join(min(40, max(0, (end - time.monotonic()) / 3)))
                _end(compiling, _AT_ONCE)
            allowed, left = STAGES[name][0], end - time.monotonic() - 5
            if left < _MIN_SHARE * allowed:
                log(name, f"not started: {left:.0f} s are left")
                continue
            process = _FORK.Process(target=_in_child, args=(name, options.out, log))
            process.start()
            process.join(min(allowed, left))
            if process.is_alive():
                log(name, f"cut off after {min(allowed, left):.0f} s; its cells so far are kept")
            _end(process, _GRACE)
            statuses.append(process.exitcode)
            if process.exitcode not in (0, _WENT_WRONG):
                log(name, f"its process died, status {process.exitcode}")
    finally:
        for child in filter(None, (process, compiling)):
            _end(child, _AT_ONCE)
    return int(any(statuses) or not statuses)


def _capability() -> tuple[int, int] | None:
    """Compute capability of the GPU, or None."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _in_child(name: str, out: Path, log: Log) -> None:
    """Run a stage as the leader of a process group."""
    _lead_group()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(0 if run_stage(name, out, log) else _WENT_WRONG)


def _lead_group() -> None:
    """Make this process the leader of a process group.  The group ends with its parent."""
    os.setsid()
    end_with_parent(partial(os.killpg, 0, signal.SIGKILL))


def _end(process: Any, signals: dict[signal.Signals, float]) -> None:
    """Send each signal to a process and its children, and wait some seconds after each."""
    for number, seconds in signals.items():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        process.join(seconds)


def _compile_ahead(stages: list[str], arch: str, log: Log) -> None:
    """Compile the kernels of the sweeps of ``stages``, in their order."""
    _lead_group()
    os.nice(5)
    began, cells = time.time(), list[Any]()
    for step in (step for name in stages for step in STAGES[name][1]):
        if isinstance(step, Sweep) and step.jobs in (None, 1):
            with contextlib.suppress(Exception):
                cells += step.cells()
    usable = min(16, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(max(1, usable - 3), _FORK) as pool:
        count = sum(pool.map(compile_cell, itertools.repeat(arch), cells))
    log("compile", f"{count} kernels for {arch} in {time.time() - began:.0f} s")


def compile_cell(arch: str, cell: Any) -> int:
    """Compile our kernels of a cell into Triton's cache.  Returns the number of kernels."""
    import torch

    from experiments.bench import timed_ops
    from kernels.compiled.architectures import ARCHITECTURES
    from kernels.compiled.compile import compile_call

    if getattr(cell, "implementation", OURS) != OURS:
        return 0
    with contextlib.suppress(Exception):  # the cell will report the error
        meta = torch.device("meta")
        case = timed_ops.case_of(cell.shape, meta) if hasattr(cell, "shape") else cell.case("meta")
        return len(compile_call(case.call, ARCHITECTURES[arch]))
    return 0
