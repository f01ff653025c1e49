"""Time of Triton attention kernels on a GPU, from their machine code and the launch's shape.

    measured = gpu_times.rows("attention", kernel="triton", gpu="H100-SXM")
    launched = launches(measured)
    microseconds("H100-SXM", launched, fit("H100-SXM", launched, measured["microseconds"]))

``compiled.py`` writes ``kernels.csv``; ``launch.py`` computes grids as the launching code does. A
pass of the tile loop takes the sum of

- the cycles of one warp (``sass.py``), at L2's and memory's latency in proportion to their bytes;
- half of the instructions, shared-memory wavefronts and tensor-core cycles of the other warps on
  the multiprocessor;
- the cycles of the tile's bytes (64 bytes per cycle) and of spilled registers.

This sum, the time of all resident programs' bytes at the memory's bandwidth, and the time of the
tensor cores are combined by a 4-norm. Later programs follow without a gap, and half a program at
the end runs alone. Merging splits costs one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from experiments import gpu_times

if TYPE_CHECKING:
    import pandas as pd

TABLE = Path(__file__).with_name("kernels.csv")

# Chosen by the errors on all rows of the H100, B200 and L40S, before other GPUs were compared.
CROWDING, L2_LATENCY, TAIL, NORM = 0.5, 0.3, 0.5, 4
"""Share of other warps' work that a warp waits for; L2's / memory's latency; part that runs
alone."""
SPILL_CYCLES, DISPATCH_CYCLES, LAUNCH_US = 2, 200, 1.6
"""Cycles per spilled register of a warp; cycles per program start; time of a launch after two."""


class Constants(NamedTuple):
    """Fitted values of a GPU."""

    latency_ns: float
    """Latency of memory under load."""
    bandwidth: float
    """Share of the data sheet's bandwidth."""
    floor_us: float
    """Microseconds of two launches that do nothing."""


class Launch(NamedTuple):
    """The kernel launches of one call of attention."""

    kernel: str
    programs: int
    """Number of programs with work."""
    empty: int
    tiles: int
    """Number of passes of the tile loop in the longest program."""
    work: int
    """Number of passes in all programs."""
    launches: int
    tile_flops: float
    asked: float
    """Bytes of keys and values that all programs read."""
    moved: float
    """Bytes that are read or written, each counted once."""
    items: int = 1
    """Number of work items of the longest program, which runs them one after another."""
    cycles: float = 0
    """Additional cycles of every program."""


@functools.cache
def gpu_of(name: str) -> Any:
    """The GPU's row in gpu_times/gpus.csv.  Raises ValueError, with the known GPUs."""
    return next(gpu_times.rows("gpus", gpu=name).itertuples())


@functools.cache
def _kernels(arch: str) -> pd.DataFrame:
    return gpu_times.rows(TABLE, arch=arch).set_index("kernel")


def microseconds(name: str, launched: pd.DataFrame, constants: Constants) -> np.ndarray:
    """Modelled microseconds of each launch (columns of ``Launch``) on the GPU ``name``.

    Raises ValueError, with the known names, for an unknown GPU or a kernel that was not compiled
    for the GPU.
    """
    gpu = gpu_of(name)
    one, compiled = launched, _kernels(gpu.arch)
    if unknown := set(one["kernel"]) - set(compiled.index):
        there = ", ".join(compiled.index)
        raise ValueError(f"{min(unknown)!r} is not in {TABLE} for {gpu.arch}; it has {there}")
    code = compiled.loc[one["kernel"]].set_index(one.index)
    hertz = gpu.ghz * 1e3  # cycles per microsecond
    tile_bytes = one["asked"] / one["work"]
    cold = (one["moved"] / (gpu.l2_mb * 1e6) - 1).clip(0, 1)
    from_memory = (cold * one["moved"] / one["asked"]).clip(upper=1)
    latency = constants.latency_ns * gpu.ghz * (from_memory + (1 - from_memory) * L2_LATENCY)

    resident = np.minimum(one["programs"], code["programs"] * gpu.multiprocessors)
    on_each = np.ceil(resident / gpu.multiprocessors)
    warps = on_each * code["warps"]
    tensor = one["tile_flops"] / (gpu.tflops * 1e3 / gpu.multiprocessors / gpu.ghz)
    others = (warps / 4 - 1).clip(0) * code["instructions"] + (warps - 1) * code["wavefronts"]
    others += (on_each - (4 / code["warps"]).clip(upper=1)).clip(0) * tensor
    alone = code["tile_cycles"] + latency * code["tile_trips"] + tile_bytes / 64
    alone += CROWDING * others + SPILL_CYCLES * warps * code["spills"]
    memory = resident * tile_bytes * from_memory / (gpu.bandwidth * constants.bandwidth / 1e6)
    bounds = alone / hertz, memory, on_each * tensor / hertz
    tile = sum(bound**NORM for bound in bounds) ** (1 / NORM)
    rest = (code["fixed_cycles"] + latency * code["fixed_trips"]) / hertz

    longest = one["items"] * rest + one["tiles"] * tile + one["cycles"] / hertz
    average = (one["programs"] * rest + one["work"] * tile) / resident
    time = longest.where(one["programs"] <= resident, average + TAIL * longest)
    started = (one["programs"] + one["empty"]) / gpu.multiprocessors * DISPATCH_CYCLES / hertz
    return (time + started + LAUNCH_US * (one["launches"] - 2) + constants.floor_us).to_numpy()


def score(
    name: str, launched: pd.DataFrame, measured: pd.Series, constants: Sequence[float]
) -> float:
    """Median of the relative errors, plus half of their 90th percentile."""
    error = np.abs(microseconds(name, launched, Constants(*constants)) / measured - 1)
    return float(np.median(error) + np.quantile(error, 0.9) / 2)


def fit(name: str, launched: pd.DataFrame, measured: pd.Series) -> Constants:
    """The constants with the smallest ``score``."""
    best, step = np.array([800, 0.8, 5]), 0.3
    while step > 0.02:
        factors = (1 + step) ** np.vstack([np.zeros(3), np.eye(3), -np.eye(3)])
        tries = np.minimum(best * factors, [np.inf, 1, np.inf])
        least = np.argmin([score(name, launched, measured, tried) for tried in tries])
        best, step = tries[least], step if least else step / 2
    return Constants(*best.tolist())
