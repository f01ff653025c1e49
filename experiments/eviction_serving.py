"""Time that eviction policies save: Llama 3.1 8B on an H100, in modelled time.

The scheduler and the manager serve slices of a trace under each policy and pool size, with the
lengths and shared blocks of the trace.  ``GpuClock`` gives the time.  Each slice starts with an
empty cache.  The table has the hit rate of first admissions and the time to first token, which
eviction should improve.  The bounds are ``no_cache`` (prefix caching off, same memory) and
``infinite`` (a cache that never evicts).

An H100 has about 48 GiB left for the pool beside the weights.  Larger pools stand for several GPUs.
``tier`` adds blocks in host memory.

Requests arrive at the times of the trace.  Gaps are scaled so that on average ``load`` times as
many prompt tokens arrive as can be computed.  Requests above the model's maximum of 131,072 tokens
are left out.  The time does not include the policy's own work, which ``overhead`` measures.

If the trace has think times, the loop is closed: only the first request of an agent arrives at its
scaled time.  Each later request arrives a think time after the previous answer.

``queue_informed`` (vLLM RFC 48485) is LRU that knows the waiting queue.  Its gain depends on the
number of waiting requests, so ``queue_informed`` and ``lru`` also run at a higher load.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import cache
from cache.replay.overlapping import LOOP_COLUMNS, most_hits
from experiments import quantiles, serving, style
from experiments.eviction import Policy, named_policy, policy_spec
from experiments.harness import Axis, Count, Experiment, Natural, Positive, Repeated, grid
from experiments.load import workloads
from experiments.load.gpu_clock import CLOCK_DISCLAIMER, GpuClock
from experiments.load.workloads import OnSlices, Source

_NO_CACHE, _INFINITE = "no_cache", "infinite"
"""Values of ``policy`` for the bounds: prefix caching off, and a cache that never evicts."""
_QUEUE = "queue_informed"
_MODEL, _GPU, _MOST_TOKENS = "llama-3.1-8b", "H100-SXM", 131_072


@dataclass(frozen=True, kw_only=True)
class EvictionServing(OnSlices):
    """The grid: slices of traces x policies x pools."""

    policy: Repeated[Axis[Policy]] = ()
    """A policy by name, or your own as file.py:Class.

    None: lru, fifo, lfu, ttl, session_end, safeguarded, queue_informed."""
    pool_gib: Axis[Positive] = (48.0, 192.0)
    """Memory for K/V."""
    num_requests: Count = 1_000
    load: Axis[Positive] = (0.5, 1.0)
    """Average number of prompt tokens, cached or not, that arrive while the GPU can compute one.
    Loads after the first are run only with lru and queue_informed."""
    host_ms: Natural = 1
    """Assumed time of the engine's own code in each step, in milliseconds."""


def cells(options: EvictionServing) -> Iterator[EvictionServing]:
    """Cells of the policies and of the two bounds."""
    traces = [*options.sliced_sources()]
    default = ("lru", "fifo", "lfu", "ttl", "session_end", "safeguarded", _QUEUE)
    policies = [*map(named_policy, options.policy or default)]
    load, *further_loads = options.load
    compared = [policy for policy in policies if policy in ("lru", _QUEUE)]
    for trace in traces:
        at = {"trace": [trace], "load": [load]}
        yield from grid(options, policy=[*policies, _NO_CACHE], **at)
        yield from grid(options, policy=[_INFINITE], pool_gib=[float("inf")], **at)
        yield from grid(options, policy=compared, **{**at, "load": further_loads})


def run_cell(cell: EvictionServing) -> list[dict[str, Any]]:
    trace = served(cell.trace)
    caching = cell.policy != _NO_CACHE
    clock = make_clock(host_seconds=cell.host_ms / 1000, block_size=trace.block_size)
    return [row_of(cell, trace, clock, policy_spec(cell.policy), enable_prefix_caching=caching)]


def row_of(
    cell: EvictionServing,
    trace: cache.Trace,
    clock: GpuClock,
    policy: str | cache.EvictionPolicy,
    **options: Any,
) -> dict[str, Any]:
    """Serve ``trace`` (from ``served``, perhaps with other hints) with ``policy`` in the cell's
    pool.  ``options``: options of ``make_manager``.  Returns the row of the table."""
    assert trace.block_size is not None
    block_bytes = clock.block_bytes
    if cell.policy == _INFINITE:
        longest = trace.input_lengths + trace.output_lengths
        num_blocks = int((longest // trace.block_size + 1).sum())
    else:
        num_blocks = int(cell.pool_gib * 2**30 / block_bytes)
    options |= {"num_blocks": num_blocks, "block_size": trace.block_size}
    manager = cache.make_manager("vllm_v1", policy=policy, **options)
    step = clock.max_num_batched_tokens
    offered = cell.load * step / clock.seconds([], [(step, step)], 1)
    seconds = float(trace.timestamps_ms[-1] - trace.timestamps_ms[0]) / 1000
    scale = float(trace.input_lengths.sum()) / offered / seconds
    is_closed = trace.columns.keys() >= LOOP_COLUMNS
    run = cache.simulate_serving(
        trace, manager=manager, service=clock, time_scale=scale, closed_loop=is_closed
    )
    stats, most = run.stats, most_hits(trace)
    row = {
        "trace": trace.name,
        "slice": cell.trace.slice,
        "loop": "closed" if is_closed else "open",
        "policy": str(cell.policy),
        **cell.columns("pool_gib", "load", "host_ms"),
        "model": clock.model,
        "gpu": clock.gpu,
        "requests": len(trace),
        "requests_left_out": len(workloads.load(cell.trace)) - len(trace),
        "requests_dropped": run.dropped,
        "mean_prompt_tokens": float(trace.input_lengths.mean()),
        "mean_output_tokens": float(trace.output_lengths.mean()),
        "unique_gib": trace.num_unique_blocks * block_bytes / 2**30,
        "gaps_scaled_by": scale,
        "block_hit_rate": stats.block_hit_rate,
        "most_block_hit_rate": most / max(1, stats.queried_blocks),
        "passed": stats.hit_blocks + stats.host_hit_blocks <= most,
        "resumed_block_hit_rate": stats.resumed_hit_blocks / max(1, stats.resumed_queried_blocks),
        "evictions": stats.evicted_blocks,
        "preemptions": run.preemptions,
        "mean_running": run.mean_running,
        "mean_waiting": run.mean_waiting,
        "normalized_latency_s": float(run.normalized_latency_seconds.mean()),
        **quantiles.of_times("ttft", run.ttft_seconds.tolist()),
        "basis": CLOCK_DISCLAIMER,
    }
    if manager.tier is not None:
        row["host_block_hit_rate"] = stats.host_hit_blocks / max(1, stats.queried_blocks)
        row["stored_gib"] = stats.stored_blocks * block_bytes / 2**30
        row["loaded_gib"] = stats.loaded_blocks * block_bytes / 2**30
    return row


make_clock = functools.cache(functools.partial(GpuClock, _MODEL, _GPU))
"""Function of options of ``GpuClock``: the clock of this model and GPU."""


@functools.lru_cache(maxsize=1)
def served(source: Source) -> cache.Trace:
    """The requests that do not exceed the model's maximum length."""
    trace = workloads.load(source)
    short = trace.input_lengths + trace.output_lengths <= _MOST_TOKENS
    return trace if short.all() else trace.take(np.flatnonzero(short))


def _apart(rows: style.DataFrame) -> tuple[style.DataFrame, str]:
    """The rows without the traces on which every time is within 0.5 % of LRU's, and a sentence for
    each of these traces.  If no other trace is left, all rows."""
    spread = (rows["over_lru"] - 1).abs().groupby(rows["trace"], sort=False).max()
    alike = spread[spread < 0.005]
    if len(alike) == len(spread):
        return rows, ""
    note = "On {}, all times with prefix caching are within {:.1g} % of LRU's. "
    notes = (note.format(trace, 100 * largest) for trace, largest in alike.items())
    return rows[~rows["trace"].isin(alike.index)], "".join(notes)


def _draw(rows: style.DataFrame) -> style.Figure:
    """Draw three panels per trace, at the first load: hit rate, time, and time divided by LRU's, by
    policy and pool.  Points are means over the slices, bars their range."""
    rows = rows[rows["load"] == rows["load"].iloc[0]]
    over = over_lru(rows).where(rows["policy"] != _NO_CACHE)
    rows, notes = _apart(rows.assign(over_lru=over, hits=100 * rows["block_hit_rate"]))
    names = [*rows.loc[rows["policy"] != _INFINITE, "policy"].unique()]
    lines = style.policy_lines([*names, _INFINITE]) | {_NO_CACHE: {"label": "no prefix caching"}}
    columns = {"hits": "block hit rate (%)", "ttft_mean_s": "time to first token (s)"}
    columns |= {"over_lru": "time / LRU's"}
    table = quantiles.over_slices(rows, ["trace", "loop", "policy", "pool_gib"], [*columns])
    pools = style.lines_of(sorted(set(table["pool_gib"]) - {float("inf")}))
    traces = table.groupby(["trace", "loop"], sort=False)
    figure, axes, _ = style.panel_grid(3 * len(traces), height=1.7, sharey=True)
    for number, ((trace, loop), of_trace) in enumerate(traces):
        panels = axes[3 * number : 3 * number + 3]
        for axis, (column, label) in zip(panels, columns.items(), strict=True):
            for place, (pool, look) in enumerate(pools.items()):
                some = of_trace[of_trace["pool_gib"] == pool]
                mean, low, high = (some[f"{column}_{end}"] for end in ("mean", "min", "max"))
                rows_at = some["policy"].map(names.index) + 0.25 * (place - (len(pools) - 1) / 2)
                look |= {"linestyle": "none", "label": f"pool of {pool:g} GiB", "elinewidth": 0.7}
                axis.errorbar(mean, rows_at, xerr=[mean - low, high - mean], **look)
            for x in of_trace[of_trace["policy"] == _INFINITE][f"{column}_mean"].dropna():
                axis.axvline(x, **lines[_INFINITE])
            axis.set_xlabel(label)
        style.name_rows(panels[0], [lines[name]["label"] for name in names])
        panels[0].set_title(f"{trace}, {of_trace['slices'].max()} slices, {loop} loop", loc="left")
        panels[0].set_xlim(0, 1.05 * panels[0].get_xlim()[1])
        if of_trace["ttft_mean_s_mean"].max() > 3 * of_trace["ttft_mean_s_mean"].min():
            panels[1].set_xscale("log")
            style.plain_log_ticks(panels[1].xaxis)
        panels[2].axvline(1, **style.BOUND)
    notes += f"Llama 3.1 8B on an H100; bars: all slices. {CLOCK_DISCLAIMER}"
    return style.shared_legend(figure, columns=4, xlabel=serving.noted(figure, "", notes))


def _draw_queue(rows: style.DataFrame) -> style.Figure | None:
    """Draw ``queue_informed``'s time / LRU's time against LRU's mean number of waiting requests."""
    rows = rows.assign(over_lru=over_lru(rows), waiting=_of_lru(rows, "mean_waiting"))
    rows, notes = _apart(rows[rows["policy"] == _QUEUE].dropna(subset="over_lru"))
    if rows.empty:
        return None
    traces = rows.groupby(["trace", "loop"], sort=False)
    width = 6.8 / min(2, len(traces))
    figure, axes, _ = style.panel_grid(len(traces), height=1.9, width=width, columns=2)
    pools = sorted(rows["pool_gib"].unique())
    for axis, ((trace, loop), of_trace) in zip(axes, traces, strict=True):
        for pool, look in style.lines_of(pools).items():
            points = of_trace[of_trace["pool_gib"] == pool]
            look |= {"linestyle": "none", "clip_on": False, "label": f"pool of {pool:g} GiB"}
            axis.plot("waiting", "over_lru", data=points, **look)
        axis.axhline(1, **style.BOUND)
        axis.set(title=f"{trace}, {loop} loop", xscale="symlog")
        axis.set_xlim(left=0)
        axis.xaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("time to first token / LRU's")
    label = serving.noted(figure, "waiting requests under LRU (mean)", notes + CLOCK_DISCLAIMER)
    return style.shared_legend(figure, xlabel=label)


def _of_lru(rows: style.DataFrame, column: str) -> style.Series:
    """For each row: LRU's value of ``column`` with the same slice, load and pool, and with the
    same tier if there are tiers."""
    at = ["trace", "slice", "pool_gib", "load"]
    at += [name for name in ("host_gib", "store", "link_gb_s", "transfers") if name in rows]
    lru = rows[column].where(rows["policy"] == "lru")
    return lru.groupby([rows[name] for name in at]).transform("max")


def over_lru(rows: style.DataFrame) -> style.Series:
    """Time to first token, divided by LRU's."""
    return rows["ttft_mean_s"] / _of_lru(rows, "ttft_mean_s")


def _summary(rows: style.DataFrame) -> style.DataFrame:
    rows = rows.assign(over_lru=over_lru(rows))
    by = ["trace", "loop", "load", "pool_gib", "policy"]
    values = ["block_hit_rate", "most_block_hit_rate", "mean_waiting", "ttft_mean_s", "over_lru"]
    return quantiles.over_slices(rows, by, values).assign(basis=CLOCK_DISCLAIMER)


EXPERIMENT = Experiment(
    name="eviction_serving",
    figure="time to first token under each policy and pool: Llama 3.1 8B, H100 modelled",
    options=EvictionServing(),
    quick=EvictionServing(policy=("lru", _QUEUE), pool_gib=(48.0,), num_requests=100, slices=1),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter(
        {"eviction_serving": _draw, "queue": _draw_queue}, {"summary": (_summary, "%.4g")}
    ),
)
