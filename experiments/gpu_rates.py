"""What the GPU can do at best: copy bandwidth, transfers to and from the host, and matrix products.

The ceilings that the other GPU experiments hold their results against (they measure them again in
their own process).  See ``bench/gpu_timing.py`` for what is copied and multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import style
from experiments.bench import gpu_timing
from experiments.harness import Cell, Experiment, Options

if TYPE_CHECKING:
    import pandas as pd

_RATES = {
    "copy": ("device copy, read and written", "GB/s"),
    "device_to_host": ("to pinned host memory", "GB/s"),
    "host_to_device": ("from pinned host memory", "GB/s"),
    "matmul": ("bf16 matrix product", "TFLOP/s"),
}


@dataclass(frozen=True, kw_only=True)
class GpuRatesOptions(Options):
    """Every rate."""


@dataclass(frozen=True, kw_only=True)
class GpuRatesCell(Cell):
    rate: str


def cells(options: GpuRatesOptions) -> Iterator[GpuRatesCell]:
    for rate in _RATES:
        yield GpuRatesCell(seed=options.seed, rate=rate)


def run_cell(cell: GpuRatesCell) -> list[dict[str, Any]]:
    import torch

    what, unit = _RATES[cell.rate]
    value = None
    if torch.cuda.is_available():
        if cell.rate == "matmul":
            value = gpu_timing.matmul_rate() / 1e12
        else:
            value = gpu_timing.copy_bandwidth(cell.rate) / 1e9
    return [{"rate": cell.rate, "what": what, "value": value, "unit": unit}]


def plot(rows: pd.DataFrame, folder: Path) -> list[Path]:
    """The figure gpu_rates: a bar for each rate."""
    rows = rows[rows["value"].notna()]
    if rows.empty:
        return []
    with style.figures():
        figure, axes, _ = style.panel_grid(rows["unit"].nunique(), height=1.6, columns=2)
        for axis, (unit, part) in zip(axes, rows.groupby("unit"), strict=True):
            bars = axis.barh(
                part["what"], part["value"], color=style.SKY, edgecolor="black", lw=0.4
            )
            axis.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=6)
            axis.margins(x=0.2)
            axis.set_xlabel(unit)
            axis.grid(axis="y", visible=False)
        return style.save(figure, folder, "gpu_rates")


EXPERIMENT = Experiment(
    name="gpu_rates",
    figure="copy bandwidth, host transfers and matmul rate of the GPU",
    options=GpuRatesOptions(),
    quick=GpuRatesOptions(),
    cells=cells,
    run_cell=run_cell,
    plot=plot,
    gpu="required",
    timed=True,
)
