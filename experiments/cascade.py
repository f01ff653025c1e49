"""Decode of sequences that share a prefix: reading it once for all against once for each.

Shared-prefix (cascade) attention, as in Hydragen (Juravsky et al., 2024) and FlashInfer: the
queries of the group attend to the prefix together, each then to its own suffix, and the two results
are merged.  Plain decode of the same block tables reads the prefix again for every sequence.  Both
are checked against fp64 and timed as in ``kernel_latency``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments import style
from experiments.bench import kernel_problems
from experiments.bench.kernel_problems import OURS, Shape
from experiments.harness import Cell, Experiment, Options

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

PLAIN = "paged_decode"


@dataclass(frozen=True, kw_only=True)
class CascadeOptions(Options):
    """The grid: prefix lengths x batch sizes, shared-prefix and plain decode."""

    prefix_len: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    """Tokens that all sequences share; whole blocks."""
    suffix_len: int = 256
    """Tokens of its own of each sequence."""
    batch: tuple[int, ...] = (1, 4, 16, 64, 256)
    block_size: int = 16
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: Literal["float16", "bfloat16", "float32"] = "bfloat16"
    budget_ms: float = 60.0
    """Device time for the samples of a cell."""


@dataclass(frozen=True, kw_only=True)
class CascadeCell(Cell):
    shape: Shape
    implementation: str
    budget_ms: float


def cells(options: CascadeOptions) -> Iterator[CascadeCell]:
    for name in ("suffix_len", "block_size"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if min(options.batch, default=1) < 1:
        raise ValueError("--batch must be at least 1")
    for prefix_len in options.prefix_len:
        if prefix_len < 1 or prefix_len % options.block_size:
            raise ValueError(
                f"--prefix-len must be a multiple of the block size {options.block_size}, "
                f"got {prefix_len}"
            )
        for batch in options.batch:
            shape = Shape(
                op="cascade",
                batch=batch,
                context_len=prefix_len + options.suffix_len,
                prefix_len=prefix_len,
                block_size=options.block_size,
                num_q_heads=options.num_q_heads,
                num_kv_heads=options.num_kv_heads,
                head_dim=options.head_dim,
                dtype=options.dtype,
                seed=options.seed,
            )
            for implementation in (OURS, PLAIN):
                yield CascadeCell(
                    seed=options.seed,
                    shape=shape,
                    implementation=implementation,
                    budget_ms=options.budget_ms,
                )


def run_cell(cell: CascadeCell) -> list[dict[str, Any]]:
    return [kernel_problems.run(cell.shape, cell.implementation, budget_ms=cell.budget_ms)]


def plot(rows: pd.DataFrame, folder: Path) -> list[Path]:
    """The figure cascade: latency of both, and how much faster the shared prefix makes it."""
    rows = rows[rows["p50_us"].notna()]
    if rows.empty:
        return []
    with style.figures():
        return style.save(_draw(rows), folder, "cascade")


_LINES = [
    {"color": style.BLUE, "marker": "o"},
    {"color": style.ORANGE, "marker": "s"},
    {"color": style.GREEN, "marker": "^"},
    {"color": style.RED, "marker": "v"},
    {"color": style.PINK, "marker": "D"},
    {"color": style.GREY, "marker": "P"},
]


def _draw(rows: pd.DataFrame) -> Figure:
    figure, (latency, speedup), _ = style.panel_grid(2, height=2.6, columns=2)
    times = rows.pivot_table("p50_us", ["batch", "prefix_len"], "implementation")
    for index, (batch, of_batch) in enumerate(times.groupby(level="batch")):
        look = _LINES[index % len(_LINES)]
        of_batch = of_batch.droplevel("batch")
        if OURS in of_batch:
            latency.plot(of_batch[OURS], label=f"batch {batch}", **look)
        if PLAIN in of_batch:
            hollow = {**look, "linestyle": "dotted", "markerfacecolor": "white"}
            latency.plot(of_batch[PLAIN], **hollow)
        if {OURS, PLAIN} <= set(of_batch):
            speedup.plot(of_batch[PLAIN] / of_batch[OURS], label=f"batch {batch}", **look)
        # What reading less can bring at most: the bytes of plain decode over those of cascade.
        shape = rows[(rows["batch"] == batch) & (rows["implementation"] == OURS)]
        kv_bytes = shape["bytes"] + (batch - 1) * _prefix_bytes(shape)
        bound = (kv_bytes / shape["bytes"]).set_axis(shape["prefix_len"]).sort_index()
        speedup.plot(bound, color=look["color"], ls="dashed", lw=0.8)
    speedup.axhline(1, color="black", lw=0.8)
    latency.set(title="solid: shared prefix; hollow: plain decode", ylabel="latency, p50 (µs)")
    speedup.set(title="dashed: bound by bytes read", ylabel="plain / shared prefix (times)")
    for axis in (latency, speedup):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K")
        axis.set_xlabel("shared prefix (tokens)")
    style.shared_legend(figure, columns=6)
    return figure


def _prefix_bytes(rows: pd.DataFrame) -> pd.Series:
    """K and V of the prefix."""
    itemsize = rows["kv_dtype"].map(lambda name: 4 if name == "float32" else 2)
    return 2 * rows["prefix_len"] * rows["num_kv_heads"] * rows["head_dim"] * itemsize


EXPERIMENT = Experiment(
    name="cascade",
    figure="shared-prefix decode vs plain decode on a GPU, over prefix length and batch",
    options=CascadeOptions(),
    quick=CascadeOptions(prefix_len=(1024, 8192, 32768), batch=(1, 16, 256), budget_ms=30.0),
    cells=cells,
    run_cell=run_cell,
    plot=plot,
    gpu="required",
    timed=True,
)
