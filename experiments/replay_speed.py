"""How fast ``cache.simulate`` replays a trace, beside libcachesim on the same stream.

Both are given the same block ids, policy and number of blocks, on one core and in turn, so that a
change of the machine's speed meets both.  Ours is timed without the compilation
(``SimulationResult.replay_seconds``); of libcachesim ``process_trace``, its C loop over a file in
memory of its own oracleGeneral records, whose ids, sizes and next accesses are precomputed.  Its
hash table starts at the size that the pool needs, which is several times faster here than its
default of 2**24 buckets.

libcachesim takes one block reference at a time where ours takes a request (its blocks stay pinned,
the deepest counts as accessed first), so the hit rates of the two differ a little.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import cache
from experiments import style
from experiments.harness import Absent, Axis, Count, Experiment, GridOnly, Percent, grid
from experiments.load import workloads
from experiments.load.workloads import OnTraces

_LIBCACHESIM = {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "belady": "Belady"}


@dataclass(frozen=True, kw_only=True)
class ReplaySpeed(OnTraces):
    """The grid: traces x policies."""

    policy: Axis[Literal["lru", "fifo", "lfu", "belady"]] = ("lru", "fifo", "lfu", "belady")
    """Policies that both have."""
    capacity_percent: Percent = 10.0
    """Blocks of the pool, in percent of the unique blocks of the trace."""
    repeats: Count = 7
    """Timings of each; the median is drawn."""
    num_requests: GridOnly[Count | None] = None
    """Requests of each trace, the first of a file. None: all, and a workload's own number."""


@dataclass(frozen=True, kw_only=True)
class ReplaySpeedCell(ReplaySpeed):
    libcachesim: bool
    """Whether libcachesim takes part."""


def cells(options: ReplaySpeed) -> Iterator[ReplaySpeedCell | Absent]:
    libcachesim = importlib.util.find_spec("libcachesim") is not None
    if not libcachesim:
        yield Absent("libcachesim is not installed")
    traces = options.sources(options.num_requests)
    yield from grid(options, ReplaySpeedCell, trace=traces, libcachesim=libcachesim)


def run_cell(cell: ReplaySpeedCell) -> list[dict[str, Any]]:
    trace = workloads.load(cell.trace)
    capacity = max(1, int(trace.num_unique_blocks * cell.capacity_percent / 100))
    common = {
        "trace": trace.name,
        "block_references": trace.num_block_references,
        "unique_blocks": trace.num_unique_blocks,
        "capacity_blocks": capacity,
        "policy": cell.policy,
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        stream = Path(folder) / "stream.oracleGeneral.bin"
        if cell.libcachesim:
            oracle_general(trace.block_ids).tofile(stream)
        for repeat in range(cell.repeats):
            ours = cache.simulate(trace, policy=cell.policy, capacity_blocks=capacity)
            timings = {"pagelab": (ours.replay_seconds, ours.block_hit_rate)}
            if cell.libcachesim:
                timings["libcachesim"] = _time_libcachesim(stream, cell.policy, capacity)
            for implementation, (seconds, hit_rate) in timings.items():
                rows.append(
                    {
                        **common,
                        "implementation": implementation,
                        "repeat": repeat,
                        "block_hit_rate": hit_rate,
                        "replay_seconds": seconds,
                        "references_per_second": trace.num_block_references / seconds,
                    }
                )
    return rows


def _time_libcachesim(stream: Path, policy: str, capacity: int) -> tuple[float, float]:
    import libcachesim

    parameters = libcachesim.ReaderInitParam()
    parameters.ignore_obj_size = True
    reader = libcachesim.TraceReader(
        str(stream), libcachesim.TraceType.ORACLE_GENERAL_TRACE, parameters
    )
    make = getattr(libcachesim, _LIBCACHESIM[policy])
    pool = make(capacity, hashpower=max(10, capacity.bit_length()))
    started = time.perf_counter()
    miss_rate, _ = pool.process_trace(reader)
    return time.perf_counter() - started, 1 - miss_rate


def oracle_general(block_ids: np.ndarray) -> np.ndarray:
    """The references as libcachesim's oracleGeneral records: a next access is the index of the
    reference, -1 for never; an id of 0 is avoided, an object has size 1."""
    record = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
    records = np.zeros(len(block_ids), record)
    records["time"] = np.arange(len(block_ids))
    records["id"] = block_ids.astype(np.uint64) + 1
    records["size"] = 1
    order = np.argsort(block_ids, kind="stable")
    repeated = block_ids[order][1:] == block_ids[order][:-1]
    records["next"] = -1
    records["next"][order[:-1][repeated]] = order[1:][repeated]
    return records


_LOOKS = {"pagelab": style.bar(style.BLUE), "libcachesim": style.bar(style.ORANGE)}


def _speeds(rows: style.DataFrame, *of_repeats: str) -> style.DataFrame:
    """Million references per second by trace, policy and implementation."""
    speed = rows["references_per_second"] / 1e6
    by = [rows[name] for name in ("trace", "policy", "implementation")]
    return speed.groupby(by, sort=False).agg(of_repeats)


def _summary(rows: style.DataFrame) -> style.DataFrame:
    medians = _speeds(rows, "median")["median"].unstack()
    summary = medians.add_suffix("_million_references_per_second")
    if "libcachesim" in medians:
        summary["ratio"] = medians["pagelab"] / medians["libcachesim"]
    return summary.reset_index()


def _draw(rows: style.DataFrame) -> style.Figure:
    """Medians, with bars from the slowest to the fastest; a panel per trace."""
    lines = style.policy_lines(rows["policy"].unique())
    names = [line["label"].split()[0] for line in lines.values()]
    figure, axes, spare = style.panel_grid(rows["trace"].nunique(), height=1.8, sharey=True)
    for axis, (trace, of_trace) in zip(axes, rows.groupby("trace", sort=False), strict=True):
        speeds = _speeds(of_trace, "min", "median", "max").loc[trace].unstack().reindex(lines)
        median = speeds["median"]
        errors = median - speeds["min"], speeds["max"] - median
        style.bars(axis, median, _LOOKS, errors=errors)
        axis.set_xticks(range(len(names)), names)
        axis.set(title=trace)
    return style.shared_legend(figure, spare, ylabel="million block references/s")


EXPERIMENT = Experiment(
    name="replay_speed",
    figure="block references per second of the trace replay, beside libcachesim",
    options=ReplaySpeed(),
    quick=ReplaySpeed(repeats=2, num_requests=1_000),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"replay_speed": _draw}, {"summary": (_summary, "%.3f")}),
    timed=True,
)
