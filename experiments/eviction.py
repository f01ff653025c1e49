"""Hit rate against capacity: every eviction policy between the optimum and the infinite cache.

A request trace is replayed serially (``cache.simulate``) through pools of 0.5 to 50 % of its unique
blocks.  Belady's policy, which knows the future, bounds every policy from above at each capacity;
a cache that never evicts bounds them all.  The kind of figure by which KV cache traces are
published, e.g. Mooncake (FAST 2025) and "KVCache Cache in the Wild" (USENIX ATC 2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cache
from experiments import style
from experiments.harness import (
    Absent,
    Axis,
    Count,
    Experiment,
    GridOnly,
    InputFile,
    Needs,
    Percent,
    Repeated,
    grid,
)
from experiments.load import workloads
from experiments.load.workloads import OnTraces

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class OwnPolicy:
    """A policy class in a file of the user's."""

    file: InputFile
    name: str

    def __str__(self) -> str:
        return f"{self.file.name}:{self.name}"

    @property
    def spec(self) -> str:
        """What ``cache.make_policy`` takes."""
        return f"{self.file.path}:{self.name}"


Policy = Annotated[str, Needs("a policy", lambda name: cache.make_policy(name) is not None)]


@dataclass(frozen=True, kw_only=True)
class Eviction(OnTraces):
    """The grid: traces x policies x capacities."""

    policy: Repeated[Axis[Policy]] = ()
    """A policy by name, or your own as file.py:Class. None: every built-in one."""
    capacity_percent: Axis[Percent] = (0.5, 1, 2, 3, 5, 7, 10, 20, 30, 50)
    """Blocks of the pool, in percent of the unique blocks of the trace."""
    num_requests: GridOnly[Count | None] = None
    """Requests of each synthetic trace. None: as many as the workload has by itself."""

    @property
    def group(self) -> tuple[str, ...]:
        return str(self.policy), self.trace.name


def cells(options: Eviction) -> Iterator[Eviction | Absent]:
    """Policies, and "infinite" in the place of one."""
    policies = map(named_policy, options.policy or cache.POLICIES)
    traces = [*options.sources(options.num_requests)]
    yield from grid(options, trace=traces, policy=policies)
    yield from grid(options, trace=traces, policy=["infinite"], capacity_percent=[100.0])


def named_policy(name: str) -> str | OwnPolicy:
    """A policy as a cell holds it, from its name or file.py:Class."""
    if ".py:" not in name:
        return name
    path, _, class_name = name.rpartition(":")
    return OwnPolicy(InputFile.of(Path(path)), class_name)


def run_cell(cell: Eviction) -> list[dict[str, Any]]:
    trace = workloads.load(cell.trace)
    capacity = max(1, int(trace.num_unique_blocks * cell.capacity_percent / 100))
    if isinstance(cell.policy, OwnPolicy):
        policy = cell.policy.spec
    else:
        # Nothing is evicted from a pool that holds everything, by any policy.
        policy = "lru" if cell.policy == "infinite" else cell.policy
    result = cache.simulate(trace, policy=policy, capacity_blocks=capacity)
    return [
        {
            "trace": trace.name,
            "block_size": trace.block_size,
            "requests": trace.num_requests,
            "block_references": trace.num_block_references,
            "unique_blocks": trace.num_unique_blocks,
            "policy": str(cell.policy),
            "capacity_fraction": cell.capacity_percent / 100,
            "capacity_blocks": capacity,
            "block_hit_rate": result.block_hit_rate,
            "token_hit_rate": result.token_hit_rate,
            "evictions": result.evictions,
            "compiled": result.compiled,
            "replay_seconds": result.replay_seconds,
            "references_per_second": result.references_per_second,
        }
    ]


def plot(rows: pd.DataFrame, folder: Path) -> list[Path]:
    """The figure hit_rate, a panel per trace, and the table summary.csv."""
    with style.figures():
        written = style.save(_draw(rows), folder, "hit_rate")
    return written + style.save_table(_summary(rows), folder, "summary")


def _draw(rows: pd.DataFrame) -> Figure:
    lines = style.policy_lines(rows["policy"].unique())
    figure, axes, spare = style.panel_grid(rows["trace"].nunique(), height=2.1, sharex=True)
    ticks = [tick for tick in _TICKS if tick <= 100 * _bounded(rows)["capacity_fraction"].max()]
    for axis, (_, of_trace) in zip(axes, rows.groupby("trace", sort=False), strict=True):
        for policy, curve in of_trace.groupby("policy", sort=False):
            if policy == "infinite":
                axis.axhline(100 * curve["block_hit_rate"].iloc[0], **lines[policy])
            else:
                curve = curve.sort_values("capacity_fraction")
                x, y = 100 * curve["capacity_fraction"], 100 * curve["block_hit_rate"]
                axis.plot(x, y, **lines[policy])
        axis.set(title=_title(of_trace.iloc[0]), ylim=(0, None))
        style.log_x(axis, ticks)
    figure.supxlabel("pool size (% of the unique blocks of the trace)", fontsize=8)
    figure.supylabel("block hit rate (%)", fontsize=8)
    style.shared_legend(figure, spare)
    return figure


def _bounded(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["policy"] != "infinite"]


def _title(row: pd.Series) -> str:
    size = row["block_size"]  # NaN if the trace tells none
    of_size = f" of {size:g} tokens" if size > 0 else ""
    return f"{row['trace']}\n{row['unique_blocks']:,} unique blocks{of_size}"


def _summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Per trace and policy: the mean hit rate over the capacities, and the share of the way from
    LRU to the optimum that it goes (LRU 0, Belady 1, worse than LRU negative)."""
    means = (
        _bounded(rows).groupby(["trace", "policy"], sort=False)["block_hit_rate"].mean().unstack()
    )
    summary = means.stack().rename("mean_block_hit_rate").reset_index()
    if {"lru", "belady"} <= set(means.columns):
        way = means["belady"] - means["lru"]
        closed = means.sub(means["lru"], axis=0).div(way, axis=0)
        summary["lru_to_optimum_closed"] = closed.stack().to_numpy()
    order = ["trace", "mean_block_hit_rate"]
    return summary.sort_values(order, ascending=[True, False], kind="stable")


EXPERIMENT = Experiment(
    name="eviction",
    figure="hit rate vs capacity per eviction policy, with the optimum and the infinite cache",
    options=Eviction(),
    quick=Eviction(capacity_percent=(0.5, 1, 2, 5, 10, 20, 50), num_requests=1_000),
    cells=cells,
    run_cell=run_cell,
    plot=plot,
)
