"""Hit rate against capacity: every eviction policy, Belady's optimum and an infinite cache.

A request trace is replayed serially (``cache.simulate``) with pools of 0.02 to 50 % of its unique
blocks.  Belady's policy knows the future; its hit rate bounds all policies at the same capacity.
The hit rate of a cache that never evicts bounds all policies at all capacities.
Publications of KV cache traces have this figure, e.g. Mooncake (FAST 2025) and "KVCache Cache in
the Wild" (USENIX ATC 2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import cache
from experiments import style
from experiments.harness import Axis, Count, Experiment, Needs, Percent, Repeated, grid
from experiments.load import workloads
from experiments.load.own_class import OwnClass, spec_of
from experiments.load.own_class import named as named_policy
from experiments.load.workloads import OnTraces

_TICKS = (0.02, 0.1, 0.5, 2, 10, 50)
FIRST, LAST = "first_hit_rate", "last_hit_rate"
_LEAST_GAP = 0.002
"""The closed share is computed only if Belady's hit rate minus LRU's is larger than this."""
OURS = "safeguarded"
"""The policy of this repository that has a curve of its own."""


Policy = Annotated[str, Needs("a policy", lambda name: cache.make_policy(name) is not None)]


@dataclass(frozen=True, kw_only=True)
class Eviction(OnTraces):
    """The grid: traces x policies x capacities."""

    policy: Repeated[Axis[Policy]] = ()
    """A policy by name, or your own as file.py:Class. None: every policy."""
    capacity_percent: Axis[Percent] = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
    """Size of the pool, in percent of the unique blocks of the trace."""
    num_requests: Count | None = None
    """Number of requests: the first of a trace file. None: all of a file, a workload's default."""

    @property
    def setup_key(self) -> tuple[str, ...]:
        return (str(self.policy),)


def cells(options: Eviction) -> Iterator[Eviction]:
    """Cells of the policies, and of "infinite": a cache that never evicts."""
    policies = map(named_policy, options.policy or cache.POLICIES)
    traces = [*options.sources(options.num_requests)]
    same = {"trace": traces, "num_requests": None}
    yield from grid(options, policy=policies, **same)
    yield from grid(options, policy=["infinite"], capacity_percent=[100.0], **same)


def policy_spec(policy: str | OwnClass) -> str:
    """The argument of ``cache.make_policy`` for a cell; "lru" for a bound like "infinite"."""
    known = isinstance(policy, OwnClass) or policy in cache.POLICIES
    return spec_of(policy) if known else "lru"


def run_cell(cell: Eviction) -> list[dict[str, Any]]:
    """Hit rates of all requests, of the first two thirds and of the last third.

    The first two thirds choose the policy and warm up its pool; the last third judges it.
    """
    trace = workloads.load(cell.trace)
    capacity = max(1, int(trace.num_unique_blocks * cell.capacity_percent / 100))
    result = cache.simulate(trace, policy=policy_spec(cell.policy), capacity_blocks=capacity)
    assert result.block_hit_rate <= trace.infinite_cache_hit_rate, "more than can hit"
    cut = trace.num_requests * 2 // 3
    before = int(trace.offsets[cut])
    hits_before = int(result.hits[:cut].sum())
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
            FIRST: hits_before / max(before, 1),
            LAST: (result.hit_blocks - hits_before) / max(trace.num_block_references - before, 1),
            "token_hit_rate": result.token_hit_rate,
            "evictions": result.evictions,
            "compiled": result.compiled,
        }
    ]


def is_online(policy: str) -> bool:
    """Whether ``policy`` is a built-in policy that does not know the future."""
    return policy in cache.POLICIES and not cache.POLICIES[policy].needs_future


def _draw(rows: style.DataFrame) -> style.Figure:
    """A column per trace: hit rates above, the closed share of the LRU-to-Belady gap below.

    The bounds, OURS, LRU, MQ, the user's policies and the best other built-in policy have a curve
    each.  A band shows the range of the other built-in policies.  In the panels below, OURS was
    chosen on the first two thirds of a trace (dashed) and is judged on the last third (solid).
    """
    num_traces = rows["trace"].nunique()
    figure, axes, _ = style.panel_grid(
        2 * num_traces, height=1.75, columns=num_traces, sharex="col"
    )
    sizes = 100 * _bounded(rows)["capacity_fraction"]
    ticks = [tick for tick in _TICKS if sizes.min() <= tick <= sizes.max()]
    looks = style.policy_lines(["infinite", *_bounded(rows)["policy"].unique()])
    for policy in filter(is_online, looks):  # dashes tell the parts of a trace apart
        looks[policy] |= style.line(looks[policy]["color"], looks[policy]["marker"])
    for (_, of_trace), above, below in zip(
        rows.groupby("trace", sort=False), axes[:num_traces], axes[num_traces:], strict=True
    ):
        rates = by_policy(of_trace, "capacity_fraction")
        others = [p for p in rates if is_online(p) and p not in (OURS, "gittins", "lru")]
        best = rates[others].dropna().mean().idxmax() if others else None
        own = [policy for policy in rates if policy not in cache.POLICIES]
        for rate in of_trace[of_trace["policy"] == "infinite"]["block_hit_rate"]:
            above.axhline(100 * rate, **looks["infinite"])
        shown = dict.fromkeys([best, "mq", OURS, *own])
        for policy in filter(rates.__contains__, ["belady", "lru", *shown]):
            replayed = rates[policy].dropna()
            above.plot(100 * replayed.index, 100 * replayed, **looks[policy], zorder=3)
        title = _title(of_trace.iloc[0])
        if best:
            band = 100 * rates[others].agg(["min", "max"], axis=1)
            label = "the others, built in"
            look: style.Look = {"color": style.GREY, "alpha": 0.2, "lw": 0, "label": label}
            above.fill_between(100 * rates.index, band["min"], band["max"], **look)
            title += f"\nbest of the others: {looks[best]['label']}"
        above.margins(y=0.05)
        above.set(title=title, ylim=(0, None))
        for part, dashes in ((FIRST, "dashed"), (LAST, "solid")):
            closed = _closed(by_policy(of_trace, "capacity_fraction", part))
            for policy in filter(closed.__contains__, shown):
                look = {**looks[policy], "linestyle": dashes}
                if dashes == "dashed":
                    look["markerfacecolor"] = "white"
                replayed = closed.loc[rates[policy].dropna().index, policy]
                below.plot(100 * replayed.index, 100 * replayed, **look)
        below.axhline(0, **looks.get("lru", {}) | {"marker": ""})
        below.set_ylim(-40, 105)
        for axis in (above, below):
            style.log_x(axis, ticks)
    axes[0].set_ylabel("block hit rate (%)")
    axes[num_traces].set_ylabel("of the way from LRU\nto the optimum (%)")
    chosen = style.line(style.GREY, "o", "dashed") | {"markerfacecolor": "white"}
    below.plot([], [], **chosen, label="first two thirds (chosen on)")
    below.plot([], [], **style.line(style.GREY, "o"), label="last third (judged on)")
    return style.shared_legend(figure, xlabel="pool size (% of the unique blocks of the trace)")


def by_policy(
    rows: style.DataFrame, index: str | list[str], value: str = "block_hit_rate"
) -> style.DataFrame:
    """Table of the column ``value`` of ``rows``, with a column per policy."""
    return _bounded(rows).pivot(index=index, columns="policy", values=value)


def _closed(rates: style.DataFrame) -> style.DataFrame:
    """Share of the LRU-to-Belady gap that each policy closes; empty if LRU or Belady is missing."""
    if not {"lru", "belady"} <= set(rates):
        return rates.iloc[:, :0]
    way = rates["belady"] - rates["lru"]
    return rates.sub(rates["lru"], axis=0).div(way.where(way > _LEAST_GAP), axis=0)


def in_common_pools(rows: style.DataFrame) -> style.DataFrame:
    """The rows of pools in which every policy of the trace was replayed, except "infinite"."""
    rows = _bounded(rows)
    policies = rows.groupby("trace")["policy"]
    of_pool = rows.groupby(["trace", "capacity_fraction"])["policy"]
    return rows[of_pool.transform("nunique") == policies.transform("nunique")]


def _bounded(rows: style.DataFrame) -> style.DataFrame:
    return rows[rows["policy"] != "infinite"]


def _title(row: style.Series) -> str:
    size = row["block_size"]  # NaN if the trace has no block size
    of_size = f" of {size:g} tokens" if size > 0 else ""
    return f"{row['trace']}\n{row['unique_blocks']:,} blocks{of_size}"


def _summary(rows: style.DataFrame) -> style.DataFrame:
    """For each trace and policy: the mean hit rate over the pools that all policies have, the share
    of the LRU-to-Belady gap that it closes (negative: worse than LRU), and its mean gain over LRU
    in percentage points, in the first two thirds of the trace and in the last third."""
    rows, index = in_common_pools(rows), ["trace", "capacity_fraction"]
    means = {
        value: by_policy(rows, index, value).groupby("trace", sort=False).mean()
        for value in ("block_hit_rate", FIRST, LAST)
    }
    summary = means["block_hit_rate"].stack().rename("mean_block_hit_rate").to_frame()
    closed = _closed(means["block_hit_rate"])
    if len(closed.columns):
        summary["lru_to_optimum_closed"] = closed.stack()
        for value, column in ((FIRST, "first_points_over_lru"), (LAST, "last_points_over_lru")):
            summary[column] = 100 * means[value].sub(means[value]["lru"], axis=0).stack()
    order = ["trace", "mean_block_hit_rate"]
    return summary.reset_index().sort_values(order, ascending=[True, False], kind="stable")


EXPERIMENT = Experiment(
    name="eviction",
    figure="hit rate vs capacity per eviction policy, with the optimum and the infinite cache",
    options=Eviction(),
    # The numbers in published.toml are for whole traces.
    quick=Eviction(policy=("lru", "lfu", "mq", "belady"), capacity_percent=(0.5, 5, 20, 50)),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"hit_rate": _draw}, {"summary": (_summary, "%.4f")}),
)
