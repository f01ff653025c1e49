"""Preemption by swapping K/V to host memory or by recomputing them.

Redoes figure 19 of the PagedAttention paper (Kwon et al., SOSP 2023): OPT-13B on an A100 40 GB,
with the clock of the experiment ``serving``.

- ``cost``: for one sequence, by context length and block size: the time to swap its blocks out and
  in, and the time to compute all its tokens as one prompt.
- ``serving``: requests with lengths like ShareGPT's, at a rate at which memory runs out.  Each draw
  has its own requests; swapping and recomputing serve the same ones.

Swapping a block takes two transfers per layer, for K and for V.  The time of a transfer is its
bytes / the bandwidth of the PCIe link + ``transfer_us``.  ``transfer_us`` is assumed.  It decides
how large blocks must be for swapping to be no slower: ``summary.csv`` has this block size for each
assumed time.  Host memory holds as many blocks as the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.serving.scheduler import Step
from experiments import quantiles, serving, style
from experiments.harness import Axis, Count, Experiment, Natural, Options, Positive, grid
from experiments.load.gpu_clock import CLOCK_DISCLAIMER, GpuClock


@dataclass(frozen=True, kw_only=True)
class Cost(Options):
    context_tokens: Axis[int]
    block_size: Axis[int]
    transfer_us: Axis[float]


@dataclass(frozen=True, kw_only=True)
class Served(Options):
    block_size: Axis[int]
    draw: Axis[int]
    transfer_us: Axis[float]
    host_ms: int
    request_rate: float
    traffic: float


@dataclass(frozen=True, kw_only=True)
class Preemption(Options):
    """The grid: transfer times x block sizes x contexts (``cost``) or draws (``serving``)."""

    block_size: Axis[Count] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Tokens per block."""
    context_tokens: Axis[Count] = (256, 1024)
    """Context lengths of the sequences in ``cost``."""
    transfer_us: Axis[Positive] = (1.0, 3.0, 10.0)
    """Assumed fixed time of a transfer, in microseconds, added to the time of its bytes."""
    host_ms: Natural = 10
    """Assumed time of the engine's own code in each step, in milliseconds."""
    request_rate: Positive = 2.0
    """Requests per second."""
    draw: Axis[Natural] = (0, 1, 2)
    """Numbers of the repetitions.  Each draws its own requests and arrivals."""
    traffic: Positive = 10.0
    """Duration of the arrivals: see ``traffic`` of the experiment ``serving``."""


def cells(options: Preemption) -> Iterator[Cost | Served]:
    yield from grid(options, Cost)
    yield from grid(options, Served)


def run_cell(cell: Cost | Served) -> list[dict[str, Any]]:
    rows = _cost(cell) if isinstance(cell, Cost) else _served(cell)
    return [
        {**row, **cell.columns("block_size", "transfer_us"), "basis": CLOCK_DISCLAIMER}
        for row in rows
    ]


def _clock(cell: Cost | Served, host_ms: int) -> GpuClock:
    times = {"host_seconds": host_ms / 1000, "transfer_seconds": 1e-6 * cell.transfer_us}
    return serving.clock_of("opt-13b", block_size=cell.block_size, **times)


def _cost(cell: Cost) -> list[dict[str, Any]]:
    clock, length = _clock(cell, host_ms=0), cell.context_tokens
    blocks = [(0, 0)] * -(-length // cell.block_size)
    seconds = {
        "recompute": clock.seconds([], [(length, length)], 1),
        "swap": clock.duration(Step(swap_out=blocks, swap_in=blocks)),
    }
    return [
        {"part": "cost", "way": way, "context_tokens": length, "ms": 1e3 * spent}
        for way, spent in seconds.items()
    ]


def _served(cell: Served) -> list[dict[str, Any]]:
    clock, rate = _clock(cell, cell.host_ms), cell.request_rate
    rows: list[dict[str, Any]] = []
    host_blocks = {"recompute": 0, "swap": serving.num_blocks(clock)}
    for way, number in host_blocks.items():
        run = serving.serve_load(cell, "sharegpt", "paged", clock, rate, num_host_blocks=number)
        row = {
            "part": "serving",
            "way": way,
            **cell.columns("draw", "host_ms", "request_rate", "traffic"),
            **serving.columns_of(run, clock),
            "swapped_tokens": sum(request.num_swapped_tokens for request in run.requests),
            "recomputed_tokens": sum(request.num_recomputed_tokens for request in run.requests),
        }
        first = rows[0] if rows else row
        ratio = row["normalized_latency_s"] / first["normalized_latency_s"]
        rows.append({**row, "latency_over_recompute": ratio})
    return rows


def summary(rows: style.DataFrame) -> style.DataFrame:
    """The smallest block size at which time of swapping / time of recomputing is <= ``at_most``.

    Gives the median and the range over the draws; infinity if there is no such block size.
    """
    import pandas as pd

    point = ["part", "transfer_us", "context_tokens", "draw"]
    rows = rows.assign(time=rows["ms"].fillna(rows["normalized_latency_s"]))
    times = rows.set_index([*point, "block_size", "way"])["time"].unstack()
    times = times.reindex(columns=["swap", "recompute"]).reset_index()
    times = times.merge(pd.DataFrame({"at_most": (1.0, 1.05)}), how="cross")
    fast = times["swap"] <= times["at_most"] * times["recompute"]
    times["first"] = times["block_size"].where(fast, np.inf)
    firsts = times.groupby(["at_most", *point], dropna=False)["first"].min()
    of_point = firsts.groupby(["at_most", *point[:-1]], dropna=False)
    return of_point.agg(block_size="median", least="min", most="max").reset_index()


def _draw(rows: style.DataFrame) -> style.Figure:
    costs, served = rows[rows["part"] == "cost"], rows[rows["part"] == "serving"]
    panels = [
        (f"a sequence of {length:,.0f} tokens", of_length, "ms", "time (ms)")
        for length, of_length in costs.groupby("context_tokens")
    ]
    if len(served):
        title = f"{served['request_rate'].iloc[0]:g} requests/s like ShareGPT's"
        panels += [
            (title, served, "normalized_latency_s", "normalised latency (s/token)"),
            (title, served, "latency_over_recompute", "latency, swap / recompute"),
        ]
    figure, axes, _ = style.panel_grid(len(panels), height=2.0, width=3.5, columns=2)
    for axis, (title, shown, column, label) in zip(axes, panels, strict=True):
        ratios = column == "latency_over_recompute"
        for of_line, look in _lines(shown)[ratios:]:
            quantiles.draws(axis, of_line, "block_size", column, **look)
        if ratios:
            axis.axhline(1, **style.BOUND)
        _mark_crossings(axis, shown, column)
        axis.set(title=title, ylabel=label, yscale="log")
        style.log_x(axis, base=4)
        style.plain_log_ticks(axis.yaxis)
    label = serving.noted(figure, "block size (tokens)")
    return style.shared_legend(figure, columns=2, xlabel=label)


def _mark_crossings(axis: style.Axes, rows: style.DataFrame, column: str) -> None:
    """Mark the smallest block sizes with which swapping is at most 5 % slower: see ``summary``."""
    ring = {**style.dots(style.BLACK, "o"), "markerfacecolor": "none", "markersize": 8}
    ring["label"] = "smallest block size at which swapping is at most 5 % slower"
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
    points = ["transfer_us", "block_size"]
    swapped = rows[rows["way"] == "swap"].groupby(points, as_index=False)[column].median()
    firsts = summary(rows).query("at_most == 1.05").merge(swapped, on=points)
    for at in firsts[["block_size", column]].itertuples(index=False, name=None):
        axis.plot(*at, **ring)
        axis.annotate(f"{at[0]:g}", at, (5, 7), textcoords="offset points", bbox=white)


def _lines(rows: style.DataFrame) -> list[tuple[style.DataFrame, dict]]:
    """A line for recomputing, which has no transfers; then one for each assumed transfer time."""
    first = rows["transfer_us"] == rows["transfer_us"].min()
    lines = {"recompute": rows[first & (rows["way"] == "recompute")]}
    for transfer, of_transfer in rows[rows["way"] == "swap"].groupby("transfer_us"):
        lines[f"swap (out and in), {transfer:g} µs a transfer (assumed)"] = of_transfer
    return list(zip(lines.values(), style.lines_of(lines).values(), strict=True))


EXPERIMENT = Experiment(
    name="preemption",
    figure="PagedAttention fig. 19: recompute vs swap vs block size, OPT-13B modelled",
    options=Preemption(),
    quick=Preemption(
        block_size=(1, 16, 256), transfer_us=(3.0,), draw=(0,), request_rate=6.0, traffic=0.3
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"preemption": _draw}, {"summary": (summary, "%g")}),
)
