"""Decode of sequences that share a prefix: reading it once for all against once for each.

Shared-prefix (cascade) attention, as in Hydragen (Juravsky et al., 2024) and FlashInfer: the
queries of the group attend to the prefix together, each then to its own suffix, and the two results
are merged.  Plain decode of the same block tables reads the prefix again for every sequence.  Both
are checked against fp64 and timed as in ``kernel_latency``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from experiments import style
from experiments.bench.problem import OURS, OnHeads, Timed, run_timed, timed_cells
from experiments.harness import Count, Experiment

PLAIN = "paged_decode"


@dataclass(frozen=True, kw_only=True)
class Cascade(OnHeads):
    """The grid: prefix lengths x batch sizes, shared-prefix and plain decode."""

    prefix_len: tuple[Count, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    """Tokens that all sequences share; whole blocks."""
    suffix_len: Count = 256
    """Tokens of its own of each sequence."""
    batch: tuple[Count, ...] = (1, 4, 16, 64, 256)
    block_size: Count = 16


def cells(options: Cascade) -> Iterator[Timed]:
    for prefix_len, batch in itertools.product(options.prefix_len, options.batch):
        if prefix_len % options.block_size:
            raise ValueError(
                f"--prefix-len {prefix_len}: needs a multiple of the block size "
                f"{options.block_size}"
            )
        shape = options.shape(
            "cascade",
            batch=batch,
            context_len=prefix_len + options.suffix_len,
            prefix_len=prefix_len,
            block_size=options.block_size,
        )
        yield from timed_cells(options, shape, (OURS, PLAIN))


def _draw(rows: style.DataFrame) -> style.Figure:
    """Latency of both, and how much faster the shared prefix makes it."""
    figure, (latency, speedup), _ = style.panel_grid(2, height=2.6, columns=2)
    times = rows.pivot_table("p50_us", ["batch", "prefix_len"], "implementation")
    times = times.reindex(columns=[OURS, PLAIN])
    looks = style.lines_of(times.index.unique("batch"))
    for batch, of_batch in times.groupby(level="batch"):
        of_batch = of_batch.droplevel("batch")
        look = looks[batch] | {"linestyle": "solid", "label": f"batch {batch}"}
        hollow = look | {"linestyle": "dotted", "markerfacecolor": "white", "label": None}
        latency.plot(of_batch[OURS], **look)
        latency.plot(of_batch[PLAIN], **hollow)
        speedup.plot(of_batch[PLAIN] / of_batch[OURS], **look)
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
    return style.shared_legend(figure, xlabel="shared prefix (tokens)")


def _prefix_bytes(rows: style.DataFrame) -> style.Series:
    """K and V of the prefix."""
    itemsize = rows["kv_dtype"].map({"float32": 4, "float8_e4m3fn": 1}).fillna(2)
    return 2 * rows["prefix_len"] * rows["num_kv_heads"] * rows["head_dim"] * itemsize


EXPERIMENT = Experiment(
    name="cascade",
    figure="shared-prefix decode vs plain decode on a GPU, over prefix length and batch",
    options=Cascade(),
    quick=Cascade(prefix_len=(1024, 8192, 32768), batch=(1, 16, 256), budget_ms=30.0),
    cells=cells,
    run_cell=run_timed,
    plot=style.plotter({"cascade": _draw}, measured="p50_us"),
    gpu="required",
    timed=True,
)
