"""Hit rate against capacity: every eviction policy between the optimum and the infinite cache.

A request trace is replayed serially (``cache.simulate``) through pools of 0.02 to 50 % of its
unique blocks.  Belady's policy, which knows the future, bounds every policy from above at each
capacity; a cache that never evicts bounds them all; ``cache.replay.bounds`` has what can be known.
The kind of figure by which KV cache traces are published, e.g. Mooncake (FAST 2025) and "KVCache
Cache in the Wild" (USENIX ATC 2025).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import cache
from experiments import style
from experiments.harness import (
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

_TICKS = (0.02, 0.1, 0.5, 2, 10, 50)
_LEAST_GAP = 0.002
"""Smallest LRU-to-Belady gap in hit rate for which the closed share is computed."""
_LABEL_WIDTH = 44
"""Characters per line of a label."""
_NUM_BEST = 3
"""Number of the best policies that have curves of their own."""


@dataclass(frozen=True)
class OwnPolicy:
    """A policy class in a file of the user's."""

    file: InputFile
    name: str

    def __str__(self) -> str:
        return f"{self.file.name}:{self.name}"


BOUND = "fluid"
"""Accepted in place of a policy: ``cache.replay.bounds.fluid_hits`` (slow to import)."""

Policy = Annotated[str, Needs("a policy", lambda name: cache.make_policy(name) is not None)]
PolicyOrBound = Annotated[
    str, Needs("a policy", lambda name: name == BOUND or cache.make_policy(name) is not None)
]

PARTS = {"all": (0, 1), "first": (0, 2 / 3), "last": (2 / 3, 1)}
"""Parts of a trace whose requests count; those before them warm the pool up."""
Part = Annotated[str, Needs(f"one of {', '.join(PARTS)}", PARTS.__contains__)]


@dataclass(frozen=True, kw_only=True)
class Eviction(OnTraces):
    """The grid: traces x policies x capacities."""

    policy: Repeated[Axis[PolicyOrBound]] = ()
    """A policy by name, your own as file.py:Class, or a bound. None: every one there is."""
    capacity_percent: Axis[Percent] = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
    """Blocks of the pool, in percent of the unique blocks of the trace."""
    part: Axis[Part] = ("all",)
    """Requests that count: all, the first two thirds (to choose by), the last third (to judge)."""
    num_requests: GridOnly[Count | None] = None
    """Requests of each trace, the first of a file. None: all, and a workload's own number."""

    @property
    def group(self) -> tuple[str, ...]:
        return str(self.policy), self.trace.name


def cells(options: Eviction) -> Iterator[Eviction]:
    """Policies, and "infinite" in the place of one."""
    policies = map(named_policy, options.policy or [*cache.POLICIES, BOUND])
    traces = [*options.sources(options.num_requests)]
    for cell in grid(options, trace=traces, policy=policies):
        if cell.part == "all" or cell.policy != BOUND:
            yield cell  # the bound is one of the whole trace
    if "all" in options.part:
        infinite = {"policy": ["infinite"], "capacity_percent": [100.0], "part": ["all"]}
        yield from grid(options, trace=traces, **infinite)


def named_policy(name: str) -> str | OwnPolicy:
    """A policy as a cell holds it, from its name or file.py:Class."""
    if ".py:" not in name:
        return name
    path, _, class_name = name.rpartition(":")
    return OwnPolicy(InputFile.of(Path(path)), class_name)


def policy_spec(policy: str | OwnPolicy) -> str:
    """The argument of ``cache.make_policy`` for a cell; LRU stands in for a bound."""
    if isinstance(policy, OwnPolicy):
        return f"{policy.file.path}:{policy.name}"
    return policy if policy in cache.POLICIES else "lru"


def run_cell(cell: Eviction) -> list[dict[str, Any]]:
    trace = workloads.load(cell.trace)
    capacity = max(1, int(trace.num_unique_blocks * cell.capacity_percent / 100))
    begin, end = (int(trace.num_requests * share) for share in PARTS[cell.part])
    row = {
        "trace": trace.name if cell.part == "all" else f"{trace.name}, {cell.part}",
        "block_size": trace.block_size,
        "requests": trace.num_requests,
        "block_references": trace.num_block_references,
        "unique_blocks": trace.num_unique_blocks,
        "policy": str(cell.policy),
        "capacity_fraction": cell.capacity_percent / 100,
        "capacity_blocks": capacity,
    }
    if cell.policy == BOUND:
        from cache.replay.bounds import fluid_hits

        hits = fluid_hits(trace, capacity)
        return [{**row, "block_hit_rate": hits / trace.num_block_references}]
    result = cache.simulate(
        trace,
        policy=policy_spec(cell.policy),
        capacity_blocks=capacity,
        counted=slice(begin, end),
    )
    return [
        {
            **row,
            "block_hit_rate": result.block_hit_rate,
            "token_hit_rate": result.token_hit_rate,
            "evictions": result.evictions,
            "compiled": result.compiled,
        }
    ]


def _draw(rows: style.DataFrame) -> style.Figure:
    """Hit rates above; below how much of the way from LRU to the optimum a policy closes.

    Curves of their own have the bounds, our own, LRU, FIFO, the user's, and of the others those
    that hit most on average; policies with the same hits everywhere share a curve.
    """
    num_traces = rows["trace"].nunique()
    figure, axes, _ = style.panel_grid(
        2 * num_traces, height=1.75, columns=num_traces, sharex="col"
    )
    sizes = 100 * _bounded(rows)["capacity_fraction"]
    ticks = [tick for tick in _TICKS if sizes.min() <= tick <= sizes.max()]
    lines = _lines(rows)
    for (_, of_trace), above, below in zip(
        rows.groupby("trace", sort=False), axes[:num_traces], axes[num_traces:], strict=True
    ):
        rates = _by_policy(of_trace, "capacity_fraction")
        for policy in filter(rates.__contains__, lines):
            above.plot(100 * rates.index, 100 * rates[policy], **lines[policy])
        for rate in of_trace[of_trace["policy"] == "infinite"]["block_hit_rate"]:
            above.axhline(100 * rate, **lines["infinite"])
        above.set(title=_title(of_trace.iloc[0]), ylim=(0, None))
        closed = _closed(rates)
        for policy in filter(closed.__contains__, lines):
            below.plot(100 * closed.index, 100 * closed[policy], **lines[policy])
        below.set_ylim(-40, 105)
        for axis in (above, below):
            style.log_x(axis, ticks)
    axes[0].set_ylabel("block hit rate (%)")
    axes[num_traces].set_ylabel("of the way from LRU\nto the optimum (%)")
    return style.shared_legend(figure, xlabel="pool size (% of the unique blocks of the trace)")


def _lines(rows: style.DataFrame) -> dict[str, dict]:
    """Line properties and labels of the policies, the most important first."""
    rates = _by_policy(rows, ["trace", "capacity_fraction"])
    means = rates.mean()
    lines, others = {}, []
    looks = style.policy_lines(["infinite", *rates.columns])
    first = ["belady", "fluid", "reuse_oracle", "safeguarded", "lru", "fifo"]
    first = [policy for policy in first if policy in rates]
    own = [p for p in rates if p not in cache.POLICIES and p != BOUND]
    rest = means.drop([*first, *own]).sort_values(ascending=False, kind="stable").index
    for policy in [*first, *own, *rest]:
        same = next((p for p in lines if rates[p].equals(rates[policy])), None)
        if same is not None:
            lines[same]["label"] += f" = {looks[policy]['label']}"
        elif policy in rest and len(lines) >= len(first) + len(own) + _NUM_BEST:
            others.append(looks[policy]["label"])
            lines[policy] = {"color": style.GREY, "linewidth": 0.5, "alpha": 0.6, "marker": ""}
            lines[policy]["label"] = "others"
        else:
            lines[policy] = looks[policy]
    for height, look in enumerate(reversed(lines.values())):
        look["zorder"] = 2 + 0.01 * height  # the first on top
        if look["label"] == "others":
            look["label"] = textwrap.fill(f"others ({', '.join(others)})", _LABEL_WIDTH)
    return {"infinite": looks["infinite"], **lines}


def _by_policy(rows: style.DataFrame, index: str | list[str]) -> style.DataFrame:
    """Hit rates, a column per policy."""
    return _bounded(rows).pivot(index=index, columns="policy", values="block_hit_rate")


def _closed(rates: style.DataFrame) -> style.DataFrame:
    """Share of the LRU-to-Belady gap that each policy closes; empty without both."""
    if not {"lru", "belady"} <= set(rates):
        return rates.iloc[:, :0]
    way = rates["belady"] - rates["lru"]
    return rates.sub(rates["lru"], axis=0).div(way.where(way > _LEAST_GAP), axis=0)


def _bounded(rows: style.DataFrame) -> style.DataFrame:
    return rows[rows["policy"] != "infinite"]


def _title(row: style.Series) -> str:
    size = row["block_size"]  # NaN if the trace has none
    of_size = f" of {size:g} tokens" if size > 0 else ""
    return f"{row['trace']}\n{row['unique_blocks']:,} blocks{of_size}"


def _summary(rows: style.DataFrame) -> style.DataFrame:
    """Per trace and policy: the mean hit rate over the capacities, and the share of the way from
    LRU to the optimum that it goes (LRU 0, Belady 1, worse than LRU negative)."""
    means = _by_policy(rows, ["trace", "capacity_fraction"]).groupby("trace", sort=False).mean()
    summary = means.stack().rename("mean_block_hit_rate").reset_index()
    closed = _closed(means)
    if len(closed.columns):
        summary["lru_to_optimum_closed"] = closed.stack().to_numpy()
    order = ["trace", "mean_block_hit_rate"]
    return summary.sort_values(order, ascending=[True, False], kind="stable")


EXPERIMENT = Experiment(
    name="eviction",
    figure="hit rate vs capacity per eviction policy, with the optimum and the infinite cache",
    options=Eviction(),
    quick=Eviction(capacity_percent=(0.5, 2, 10), num_requests=600),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"hit_rate": _draw}, {"summary": (_summary, "%.4f")}),
)
