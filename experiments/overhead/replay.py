"""Trace replay: time per block reference of ``cache.simulate`` and of libcachesim.

Both replay the same block ids with the same policy and number of blocks.  They run on one core in
turn, so a change of the machine's speed affects both.  The time of our replay excludes compilation
(``SimulationResult.replay_seconds``). libcachesim runs ``process_trace``, its C loop over
oracleGeneral records with precomputed ids, sizes and next accesses.  Its hash table starts at the
pool's size, which is several times faster here than the default of 2**24 buckets.

libcachesim replays single block references.  We replay whole requests: a request's blocks stay
pinned, and the deepest counts as accessed first.  So the hit rates differ a little.  With
``random`` they differ a lot, because blocks after a missing block of a prompt never hit in our
replay.  Default parameters are the same.  For requests of one block the hits are equal, except that
``random`` draws other victims and libcachesim's ``gdsf`` starts a block at an old victim's value.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import cache
from experiments import quantiles, style
from experiments.harness import Absent, Axis, Count, Percent, grid, one_of
from experiments.load import workloads
from experiments.load.workloads import OnTraces

_LIBCACHESIM = {
    "lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "slru": "SLRU", "lru_k": "LRUK", "two_q": "TwoQ",
    "arc": "ARC", "s3fifo": "S3FIFO", "sieve": "Sieve", "mq": "MQ", "gdsf": "GDSF",
    "random": "Random", "belady": "Belady",
}  # fmt: skip
_LOOKS = {"pagelab": style.bar(style.BLUE), "libcachesim": style.bar(style.ORANGE)}


@dataclass(frozen=True, kw_only=True)
class Replay(OnTraces):
    """The grid: traces x policies."""

    policy: Axis[Annotated[str, one_of(_LIBCACHESIM)]] = tuple(_LIBCACHESIM)
    """Policies to replay.  By default all policies that libcachesim also has."""
    capacity_percent: Percent = 10.0
    """Blocks of the replayed pool, in percent of the unique blocks of the trace."""
    repeats: Count = 7
    """Number of replays of each trace and policy."""
    trace_requests: Count | None = None
    """Number of requests from the start of each trace.  None: all, or a workload's default."""


@dataclass(frozen=True, kw_only=True)
class ReplayCell(Replay):
    libcachesim: bool
    """Whether libcachesim takes part."""


def cells(options: Replay) -> Iterator[ReplayCell | Absent]:
    libcachesim = importlib.util.find_spec("libcachesim") is not None
    libcachesim &= os.access(os.path.expanduser("~"), os.W_OK)  # it makes a folder there
    if not libcachesim:
        yield Absent("libcachesim is not installed, or HOME cannot be written")
    traces = options.sources(options.trace_requests)
    known = {"trace_requests": None, "libcachesim": libcachesim}
    yield from grid(options, ReplayCell, trace=traces, **known)


def run_cell(cell: ReplayCell) -> list[dict[str, Any]]:
    trace = workloads.load(cell.trace)
    references = trace.num_block_references
    capacity = max(1, int(trace.num_unique_blocks * cell.capacity_percent / 100))
    implementations = ["pagelab", *(["libcachesim"] if cell.libcachesim else [])]
    seconds: dict[str, list[float]] = {name: [] for name in implementations}
    hit_rates = {}
    with tempfile.TemporaryDirectory() as folder:
        stream = Path(folder) / "stream.oracleGeneral.bin"
        if cell.libcachesim:
            oracle_general(trace.block_ids).tofile(stream)
        for _ in range(cell.repeats):
            ours = cache.simulate(trace, policy=cell.policy, capacity_blocks=capacity)
            timings = {"pagelab": (ours.replay_seconds, ours.block_hit_rate)}
            if cell.libcachesim:
                timings["libcachesim"] = _time_libcachesim(stream, cell.policy, capacity)
            for name, (spent, hit_rates[name]) in timings.items():
                seconds[name].append(spent / references)
    return [
        {
            "trace": trace.name,
            "block_references": references,
            "unique_blocks": trace.num_unique_blocks,
            "capacity_blocks": capacity,
            "policy": cell.policy,
            "implementation": name,
            "block_hit_rate": hit_rates[name],
            **quantiles.of_work("reference", spent),
        }
        for name, spent in seconds.items()
    ]


def _time_libcachesim(stream: Path, policy: str, capacity: int) -> tuple[float, float]:
    """Seconds and hit rate of one replay."""
    import libcachesim

    parameters = libcachesim.ReaderInitParam()
    parameters.ignore_obj_size = True
    reader = libcachesim.TraceReader(
        str(stream), libcachesim.TraceType.ORACLE_GENERAL_TRACE, parameters
    )
    make = getattr(libcachesim, _LIBCACHESIM[policy])
    pool = make(capacity, hashpower=max(10, capacity.bit_length()))
    missed = []
    seconds = timeit.timeit(lambda: missed.append(pool.process_trace(reader)[0]), number=1)
    return seconds, 1 - missed[0]


def oracle_general(block_ids: np.ndarray) -> np.ndarray:
    """The references as libcachesim's oracleGeneral records.

    The next access is an index into the references, or -1 for never.  Ids start at 1, sizes are 1.
    """
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


def table(rows: style.DataFrame) -> style.DataFrame:
    """Million references per second by trace and policy, and our speed / libcachesim's speed."""
    us = rows.pivot(index=["trace", "policy"], columns="implementation", values="us")
    speeds = (1 / us).add_suffix("_million_references_per_second")
    if "libcachesim" in us:
        speeds["ratio"] = us["libcachesim"] / us["pagelab"]
    return speeds.reset_index()


def draw(rows: style.DataFrame) -> style.Figure:
    """Median speeds, with error bars from p20 to p80.  One panel per trace."""
    lines = style.policy_lines(rows["policy"].unique())
    names = [line["label"].split()[0] for line in lines.values()]
    figure, axes, spare = style.panel_grid(rows["trace"].nunique(), height=1.8, sharey=True)
    for axis, (trace, of_trace) in zip(axes, rows.groupby("trace", sort=False), strict=True):
        by_policy = of_trace.pivot(index="policy", columns="implementation").reindex(lines)
        fastest, median, slowest = (1 / by_policy[column] for column in ("us_p20", "us", "us_p80"))
        shown = [name for name in _LOOKS if name in median]
        for number, name in enumerate(shown):
            places = np.arange(len(lines)) + 0.8 * ((number + 0.5) / len(shown) - 0.5)
            errors = [(median - slowest)[name], (fastest - median)[name]]
            look = {"label": name, **_LOOKS[name], "capsize": 2, "error_kw": {"lw": 0.7}}
            axis.bar(places, median[name], width=0.76 / len(shown), yerr=errors, **look)
        axis.grid(axis="x", visible=False)
        axis.set_xticks(range(len(names)), names, rotation=90)
        axis.set(title=trace)
    return style.shared_legend(figure, spare, ylabel="million block references/s")
