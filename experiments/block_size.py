"""What the block size costs: hits lost to coarse blocks, and slots left empty in last blocks.

The trade-off of fig. 18 of the PagedAttention paper (Kwon et al., SOSP 2023), for the cache alone.
Small blocks match a shared prefix more closely and waste less of their last block; what large ones
gain is kernel time.

- ``hit_rate``: serial replay with ``policy`` of traces whose blocks are regrouped, in a cache of
  the same number of tokens whatever the block size, and in one that never evicts.  A trace cannot
  be cut finer than the blocks that it was published in.
- ``waste``: each request by itself, when its last token is stored: slots of its blocks that are
  empty, as a share of all slots of its blocks.  From lengths alone, so any block size will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

import cache
from experiments import style, workloads
from experiments.harness import Absent, Cell, Experiment, Options
from experiments.workloads import Source

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LONGEST_OUTPUT = 100_000
"""Requests that claim to have generated more tokens than this are damaged rows, and left out."""


@dataclass(frozen=True, kw_only=True)
class BlockSizeOptions(Options):
    """The grid: traces x block sizes x cache sizes."""

    trace: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """A request trace (.jsonl, .csv, .gz, .zst). None: $TRACES_DIR's, else synthetic ones."""
    policy: str = "lru"
    """Eviction policy of the replays."""
    capacity_percent: tuple[float, ...] = (2, 10)
    """Tokens of the cache, in percent of the unique tokens of the trace."""
    block_size: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    """Tokens per block; hit rates only for multiples of the trace's own."""
    num_requests: int | None = None
    """Requests of each synthetic trace. None: as many as the workload has by itself."""


@dataclass(frozen=True, kw_only=True)
class BlockSizeCell(Cell):
    source: Source
    block_size: int
    policy: str
    capacity_percent: float | None
    """None: waste alone; infinity: a cache that never evicts."""

    @property
    def group(self) -> tuple[str, ...]:
        return (self.source.name,)


def cells(options: BlockSizeOptions) -> Iterator[BlockSizeCell | Absent]:
    cache.make_policy(options.policy)  # raises for an unknown one
    for block_size in options.block_size:
        if block_size < 1:
            raise ValueError(f"--block-size must be at least 1, got {block_size}")
    for percent in options.capacity_percent:
        if not 0 < percent <= 100:
            raise ValueError(f"--capacity-percent must be above 0 and at most 100, got {percent}")
    sources = workloads.sources(
        options.trace,
        seed=options.seed,
        num_requests=options.num_requests,
        lengths_suffice=True,
    )
    for source in sources:
        if isinstance(source, Absent):
            yield source
            continue
        trace = workloads.load(source)
        for block_size in options.block_size:
            replayed = trace.has_blocks and not block_size % (trace.block_size or block_size + 1)
            for percent in (None, *((*options.capacity_percent, float("inf")) if replayed else ())):
                yield BlockSizeCell(
                    seed=options.seed,
                    source=source,
                    block_size=block_size,
                    policy=options.policy,
                    capacity_percent=percent,
                )


def run_cell(cell: BlockSizeCell) -> list[dict[str, Any]]:
    trace = workloads.load(cell.source)
    row = {"trace": trace.name, "block_size": cell.block_size}
    if cell.capacity_percent is None:
        return [{"part": "waste", **row, **_waste(trace, cell.block_size)}]
    coarse = trace.coarsened(cell.block_size // trace.block_size)
    if not coarse.has_blocks:
        return []  # no prompt fills a block of this size
    unbounded = cell.capacity_percent == float("inf")
    unique_tokens = trace.num_unique_blocks * trace.block_size
    share = 1.0 if unbounded else cell.capacity_percent / 100
    capacity = max(1, int(unique_tokens * share) // cell.block_size)
    if unbounded:
        capacity = coarse.num_unique_blocks
    result = cache.simulate(coarse, policy=cell.policy, capacity_blocks=capacity)
    return [
        {
            "part": "hit_rate",
            **row,
            "policy": cell.policy,
            "capacity_fraction": float("inf") if unbounded else share,
            "capacity_tokens": capacity * cell.block_size,
            "token_hit_rate": result.token_hit_rate,
        }
    ]


def _waste(trace: cache.Trace, block_size: int) -> dict[str, Any]:
    sane = trace.output_lengths <= LONGEST_OUTPUT
    lengths = (trace.input_lengths + trace.output_lengths)[sane]
    slots = -(-lengths // block_size) * block_size
    return {
        "requests": int(sane.sum()),
        "damaged_requests": int((~sane).sum()),
        "stored_tokens": int(lengths.sum()),
        "empty_slots": int((slots - lengths).sum()),
        "waste": float((slots - lengths).sum() / slots.sum()),
    }


def plot(rows: pd.DataFrame, folder: Path) -> list[Path]:
    """The figure block_size: hit rates and waste against the block size."""
    with style.figures():
        return style.save(_draw(rows), folder, "block_size")


_LINES = [
    {"color": style.BLUE, "marker": "o"},
    {"color": style.ORANGE, "marker": "s"},
    {"color": style.GREEN, "marker": "^", "linestyle": "dashed"},
    {"color": style.RED, "marker": "v", "linestyle": "dashdot"},
    {"color": style.PINK, "marker": "D", "linestyle": "dotted"},
]


def _draw(rows: pd.DataFrame) -> Figure:
    hit_rates = rows[rows["part"] == "hit_rate"]
    waste = rows[rows["part"] == "waste"]
    capacities = sorted(hit_rates["capacity_fraction"].unique())
    figure, axes, spare = style.panel_grid(len(capacities) + 1, height=2.1, columns=4)
    lines = {trace: _LINES[i % len(_LINES)] for i, trace in enumerate(rows["trace"].unique())}
    for axis, capacity in zip(axes, [*capacities, None], strict=True):
        if capacity is None:
            part, column, title = waste, "waste", "empty slots of the blocks used"
        else:
            part = hit_rates[hit_rates["capacity_fraction"] == capacity]
            column = "token_hit_rate"
            unbounded = capacity == float("inf")
            title = "infinite cache" if unbounded else f"cache of {100 * capacity:g} %"
        for trace, curve in part.groupby("trace", sort=False):
            curve = curve.sort_values("block_size")
            axis.plot(curve["block_size"], 100 * curve[column], label=trace, **lines[trace])
        axis.set(title=title, ylim=(0, None))
        axis.set_xscale("log", base=4)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.set_ylabel("share of slots (%)" if capacity is None else "token hit rate (%)")
    figure.supxlabel("block size (tokens)", fontsize=8)
    style.shared_legend(figure, spare, columns=5)
    return figure


EXPERIMENT = Experiment(
    name="block_size",
    figure="PagedAttention fig. 18: hit rate and wasted slots vs block size",
    options=BlockSizeOptions(),
    quick=BlockSizeOptions(num_requests=1_000, block_size=(1, 4, 16, 64, 256, 1024)),
    cells=cells,
    run_cell=run_cell,
    plot=plot,
)
