"""Cost of the block size: hits lost to coarse blocks, empty slots in last blocks, latency.

Redoes the trade-off of fig. 18 of the PagedAttention paper (Kwon et al., SOSP 2023).

- ``hit_rate``: traces whose blocks are merged to larger blocks are replayed serially with
  ``policy``, in a cache of a fixed number of tokens and in a cache that never evicts.  Block sizes
  below the trace's own are impossible.
- ``waste``: share of empty slots in the blocks of a request when its last token is stored.  It
  follows from the lengths alone, so every block size is possible.
- ``serving``: normalised latency of OPT-13B with the clock of the experiment ``serving``, near the
  rate that blocks of 16 tokens sustain.  Large blocks leave slots empty, so fewer requests run at
  once.  The clock gives attention the same time at every block size, so it does not show the cost
  of small blocks in a kernel.
- ``latency``: decode steps of ``kernel_latency`` with 64 sequences at each block size, on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import cache
from experiments import quantiles, serving, style
from experiments.eviction import Policy
from experiments.gpu import kernel_latency
from experiments.gpu.kernel_latency import KernelLatency, LatencyCell
from experiments.harness import (
    Absent,
    Axis,
    Count,
    Experiment,
    Natural,
    Options,
    Percent,
    Positive,
    grid,
)
from experiments.harness.environment import cuda_available
from experiments.load import workloads
from experiments.load.workloads import LONGEST, MAX_OUTPUT_TOKENS, OnTraces

Part = Literal["hit_rate", "waste", "serving", "latency"]
_RATES = {"sharegpt": 1.75, "alpaca": 40.0}
"""Requests per second."""
_HOST_MS = 10


@dataclass(frozen=True, kw_only=True)
class BlockSize(OnTraces):
    """The grid: traces x block sizes x cache sizes, and contexts x block sizes on a GPU."""

    part: Axis[Part] = ("hit_rate", "waste", "serving", "latency")
    """Hit rates, empty slots, modelled serving, or decode latency (on a GPU)."""
    policy: Policy = "lru"
    """Eviction policy of the replays."""
    capacity_percent: Axis[Percent] = (2, 10)
    """Size of the cache, in percent of the unique tokens of the trace."""
    block_size: Axis[Count] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    """Tokens per block.  Hit rates need a multiple of the trace's own block size."""
    num_requests: Count | None = None
    """Number of requests: the first of a trace file. None: all of a file, a workload's default."""
    draw: Axis[Natural] = (0, 1, 2)
    """Numbers of the repetitions of ``serving``.  Each draws its own requests and arrivals."""
    traffic: Positive = 10.0
    """Duration of the arrivals: see ``traffic`` of the experiment ``serving``."""
    latency_context_len: tuple[Count, ...] = (1024, 4096, 16384)
    """Context lengths of the sequences in ``latency``."""


@dataclass(frozen=True, kw_only=True)
class OfTrace(OnTraces):
    part: str
    block_size: Axis[int]
    policy: str
    capacity_percent: Axis[float]
    """Infinity: the cache never evicts.  0: the part ``waste``, which has no cache."""


@dataclass(frozen=True, kw_only=True)
class Served(Options):
    load: Axis[str]
    block_size: Axis[int]
    draw: Axis[int]
    traffic: float


def cells(options: BlockSize) -> Iterator[LatencyCell | OfTrace | Served | Absent]:
    if "latency" in options.part and not cuda_available():
        yield Absent("latency: there is no GPU here")
    elif "latency" in options.part:
        sizes = {"context_len": options.latency_context_len, "block_size": options.block_size}
        steps = KernelLatency(part=("decode",), batch=(64,), seed=options.seed, **sizes)
        yield from kernel_latency.cells(steps)
    if "serving" in options.part:
        served = [size for size in options.block_size if size <= LONGEST]
        yield from grid(options, Served, load=_RATES, block_size=served)
    if set(options.part) & {"hit_rate", "waste"}:
        caches = (*options.capacity_percent, float("inf"))
        for source in options.sources(options.num_requests, lengths_suffice=True):
            trace, cell = workloads.load(source), {"trace": [source]}
            if "waste" in options.part:
                yield from grid(options, OfTrace, **cell, part="waste", capacity_percent=[0.0])
            if "hit_rate" in options.part and (own := trace.has_blocks and trace.block_size):
                cell |= {"block_size": [size for size in options.block_size if size % own == 0]}
                yield from grid(options, OfTrace, **cell, part="hit_rate", capacity_percent=caches)


def run_cell(cell: OfTrace | Served | LatencyCell) -> list[dict[str, Any]]:
    if isinstance(cell, LatencyCell):
        return [{**row, "part": "latency"} for row in kernel_latency.run_cell(cell)]
    if isinstance(cell, Served):
        return [_served(cell)]
    trace = workloads.load(cell.trace)
    row = {"part": cell.part, "trace": trace.name, "block_size": cell.block_size}
    if cell.part == "waste":
        return [row | _waste(cell, trace)]
    assert trace.block_size is not None, "a trace of lengths has waste only"
    coarse = trace.coarsened(cell.block_size // trace.block_size)
    if cell.capacity_percent == float("inf"):
        capacity = coarse.num_unique_blocks
    else:
        tokens = int(trace.num_unique_blocks * trace.block_size * cell.capacity_percent / 100)
        capacity = max(1, tokens // cell.block_size)
    row |= {
        "policy": cell.policy,
        "capacity_fraction": cell.capacity_percent / 100,
        "capacity_tokens": capacity * cell.block_size,
    }
    if not coarse.has_blocks:
        return []  # every prompt is shorter than a block
    result = cache.simulate(coarse, policy=cell.policy, capacity_blocks=capacity)
    assert result.block_hit_rate <= coarse.infinite_cache_hit_rate, "more than can hit"
    return [row | {"requests": trace.num_requests, "token_hit_rate": result.token_hit_rate}]


def _served(cell: Served) -> dict[str, Any]:
    rate = _RATES[cell.load]
    seconds = _HOST_MS / 1000
    clock = serving.clock_of("opt-13b", host_seconds=seconds, block_size=cell.block_size)
    run = serving.serve_load(cell, cell.load, "paged", clock, rate)
    columns = {"part": "serving", **cell.columns("load", "block_size", "draw", "traffic")}
    more = {"request_rate": rate, "host_ms": _HOST_MS}
    return {**columns, **more, **serving.columns_of(run, clock)}


def _waste(cell: OfTrace, trace: cache.Trace) -> dict[str, Any]:
    sane = trace.output_lengths <= MAX_OUTPUT_TOKENS
    lengths = (trace.input_lengths + trace.output_lengths)[sane]
    slots = -(-lengths // cell.block_size) * cell.block_size
    return {
        "requests": int(sane.sum()),
        "damaged_requests": int((~sane).sum()),
        "stored_tokens": int(lengths.sum()),
        "empty_slots": int((slots - lengths).sum()),
        "waste": float((slots - lengths).sum() / slots.sum()),
    }


def _draw_latency(rows: style.DataFrame) -> style.Figure | None:
    """Draw bandwidth / measured peak, with a panel per context length."""
    rows = rows.dropna(subset="p50_us")
    if rows.empty:
        return None
    looks = style.lines_of(rows["implementation"].unique())
    contexts = rows.groupby("context_len")
    figure, axes, _ = style.panel_grid(len(contexts), height=2.0, sharey=True)
    for axis, (context_len, of_context) in zip(axes, contexts, strict=True):
        for name, some in of_context.groupby("implementation", sort=False):
            style.curve(axis, some, "block_size", "bandwidth_fraction", 100, **looks[name])
        # Every implementation and every block size has the same number of bytes.
        least = (of_context["bytes"] / of_context["peak_gb_per_s"]).iloc[0] / 1e3
        axis.axhline(100, **style.BOUND, label="bound: bytes at the measured peak")
        axis.set(title=f"{context_len:,} tokens; bound: {least:,.0f} µs", ylim=(0, 110))
        style.log_x(axis, base=4)
    axes[0].set_ylabel("% of the measured peak")
    xlabel = f"block size (tokens); decode of {rows['batch'].iloc[0]} sequences"
    return style.shared_legend(figure, columns=4, xlabel=xlabel)


def _draw_serving(rows: style.DataFrame) -> style.Figure:
    loads = rows.groupby("load", sort=False)
    figure, axes, _ = style.panel_grid(len(loads), height=2.1, width=3.5, columns=2)
    for axis, (load, points) in zip(axes, loads, strict=True):
        look = style.line(style.BLUE, "o")
        quantiles.draws(axis, points, "block_size", "normalized_latency_s", **look)
        title = f"OPT-13B, {points['request_rate'].iloc[0]:g} requests/s like {load}'s"
        axis.set(title=title, ylabel="normalised latency (s/token)", yscale="log")
        style.log_x(axis, base=4)
        style.plain_log_ticks(axis.yaxis)
    figure.supxlabel(serving.noted(figure, "block size (tokens); median and range of the draws"))
    return figure


def _draw(rows: style.DataFrame) -> style.Figure:
    """Draw a panel of hit rates per capacity, and a panel of waste."""
    lines = style.lines_of(rows["trace"].unique())
    hit_rates, waste = (rows[rows["part"] == part] for part in ("hit_rate", "waste"))
    panels = []
    if len(hit_rates):
        for capacity, of_size in hit_rates.groupby("capacity_fraction"):
            infinite = capacity == float("inf")
            share = f"cache of {100 * capacity:g} % of unique tokens"
            title = "infinite cache" if infinite else share
            panels.append((of_size, "token_hit_rate", title))
    if len(waste):
        panels.append((waste, "waste", "empty slots of the blocks used"))

    figure, axes, spare = style.panel_grid(len(panels), height=1.9, width=3.5, columns=2)
    for axis, (part, column, title) in zip(axes, panels, strict=True):
        for trace, curve in part.groupby("trace", sort=False):
            style.curve(axis, curve, "block_size", column, 100, **lines[trace])
        axis.set(title=title, ylim=(0, None if column == "waste" else 100))
        style.log_x(axis, base=4)
        axis.set_ylabel("share of slots (%)" if column == "waste" else "token hit rate (%)")
    return style.shared_legend(figure, spare, columns=5, xlabel="block size (tokens)")


EXPERIMENT = Experiment(
    name="block_size",
    figure="PagedAttention fig. 18: latency (modelled), hit rate, wasted slots vs block size",
    options=BlockSize(),
    quick=BlockSize(
        num_requests=150,
        block_size=(4, 16, 64, 256),
        draw=(0,),
        traffic=0.3,
        latency_context_len=(4096,),
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter(
        {
            "block_size": style.of_parts(_draw, "hit_rate", "waste"),
            "block_size_serving": style.of_parts(_draw_serving, "serving"),
            "block_size_latency": style.of_parts(_draw_latency, "latency"),
        }
    ),
    gpu="optional",
)
