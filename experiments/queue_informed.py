"""Gain of eviction that sees the waiting line, by load (vLLM RFC 48485).

Slices of a trace are served by the scheduler and ``vllm_v1``, overlapping in time, on a
modelled clock (``ServiceModel``).  Only the arrivals are scaled.  Load 1 brings as many prompt
tokens as the clock computes, before any hit; hits let the engine sustain more.  LRU and ``gittins``
are told of the waiting line or not; LRU told of all arrivals of the trace bounds what it can bring.
To be quick, all lengths and the rates of the clock are divided by 8.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import cache
from cache.policies import QueueInformed
from cache.replay.overlapping import most_hits, prompt_token_ids, simulate_serving
from experiments import quantiles, style
from experiments.harness import Axis, Count, Experiment, Percent, Positive, grid
from experiments.load import workloads
from experiments.load.workloads import OnSlices

_LOOKS = {
    "lru": ("LRU", style.line(style.BLUE, "o", "dashed")),
    "lru, queue": ("LRU, told of the line", style.line(style.BLUE, "o")),
    "gittins": ("gittins (ours)", style.line(style.RED, ">", "dashed")),
    "gittins, queue": ("gittins, told of the line", style.line(style.RED, ">")),
    "lru, all": ("told of all arrivals", style.line(style.BLACK, "")),
}

_SHRINK = 8
_FULL = cache.ServiceModel()
_SERVICE = cache.ServiceModel(
    step_seconds=_FULL.step_seconds * _SHRINK,
    prefill_tokens_per_second=_FULL.prefill_tokens_per_second / _SHRINK,
    decode_seconds_per_sequence=_FULL.decode_seconds_per_sequence * _SHRINK,
    max_num_batched_tokens=_FULL.max_num_batched_tokens // _SHRINK,
)


@dataclass(frozen=True, kw_only=True)
class QueueInformedEviction(OnSlices):
    """The grid: slices of traces x loads x pools x policies."""

    policy: Axis[Literal[tuple(_LOOKS)]] = tuple(_LOOKS)
    load: Axis[Positive] = (1.0, 2.0, 4.0, 8.0, 16.0)
    """Prompt tokens that arrive per second, over those that the clock computes."""
    capacity_percent: Axis[Percent] = (20.0,)
    """Blocks of the pool, in percent of the unique blocks."""
    num_requests: Count = 1_500


def cells(options: QueueInformedEviction) -> Iterator[QueueInformedEviction]:
    yield from grid(options, trace=[*options.sliced_sources()])


def run_cell(cell: QueueInformedEviction) -> list[dict[str, Any]]:
    trace = workloads.load(cell.trace)
    trace = dataclasses.replace(
        trace,
        block_size=max(trace.block_size // _SHRINK, 1),
        input_lengths=-(-trace.input_lengths // _SHRINK),
        output_lengths=-(-trace.output_lengths // _SHRINK),
    )
    name, _, told = cell.policy.partition(", ")
    policy = QueueInformed(name) if told else cache.make_policy(name)
    num_blocks = max(1, int(trace.num_unique_blocks * cell.capacity_percent / 100))
    manager = cache.make_manager(
        "vllm_v1", num_blocks=num_blocks, block_size=trace.block_size, policy=policy
    )
    if told == "all":
        for index in range(trace.num_requests):
            manager.on_queued(
                (0, index, index), cache.Sequence(index, prompt_token_ids(trace, index))
            )
    seconds = (trace.timestamps_ms[-1] - trace.timestamps_ms[0]) / 1000
    computed = seconds * _SERVICE.prefill_tokens_per_second
    unscaled = float(trace.input_lengths.sum()) / computed
    result = simulate_serving(
        trace, manager=manager, service=_SERVICE, time_scale=unscaled / cell.load
    )
    return [
        {
            "trace": trace.name,
            "slice": cell.trace.slice,
            **cell.columns("policy", "load"),
            "requests": trace.num_requests,
            "capacity_fraction": cell.capacity_percent / 100,
            "capacity_blocks": num_blocks,
            "block_hit_rate": result.stats.block_hit_rate,
            "passed": result.stats.hit_blocks <= most_hits(trace),
            "mean_waiting": result.mean_waiting,
            "mean_running": result.mean_running,
            "preemptions": result.preemptions,
            "mean_ttft_s": float(result.ttft_seconds.mean()),
        }
    ]


def closed(rows: style.DataFrame) -> style.DataFrame:
    """Share of the way from LRU to "told of all arrivals" that each policy goes, by slice."""
    index = ["trace", "capacity_fraction", "load", "slice"]
    rates = rows.pivot(index=index, columns="policy", values="block_hit_rate")
    if not {"lru", "lru, all"} <= set(rates):
        return rates.iloc[:, :0]
    way = rates["lru, all"] - rates["lru"]
    return rates.sub(rates["lru"], axis=0).div(way.where(way > 0.002), axis=0)


def _draw(rows: style.DataFrame) -> style.Figure:
    """Gap closed against load, and the waiting line under LRU, per trace that has a gap; means over
    the slices, with bars over all of them."""
    shares = (100 * closed(rows)).stack().dropna().rename("share").reset_index()
    panels = list(rows.groupby(["trace", "capacity_fraction"], sort=False))
    panels = [one for one in panels if one[0][0] in set(shares["trace"])] or panels
    figure, axes, spare = style.panel_grid(2 * len(panels), height=1.75, columns=len(panels))
    mean = functools.partial(quantiles.draws, x="load", middle="mean")
    for ((trace, size), of_panel), above, below in zip(
        panels, axes[: len(panels)], axes[len(panels) :], strict=True
    ):
        here = shares[(shares["trace"] == trace) & (shares["capacity_fraction"] == size)]
        for policy, (label, look) in _LOOKS.items():
            share = here[here["policy"] == policy]
            if len(share) and not policy.endswith("all"):
                mean(above, share, y="share", **look, label=label)
        waits = of_panel[of_panel["policy"] == "lru"]
        mean(below, waits, y="mean_waiting", **_LOOKS["lru"][1])
        above.set_title(f"{trace}\npool of {100 * size:g} % of the unique blocks")
        below.set_yscale("symlog")
        for axis in (above, below):
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("of the way from LRU to told\nof all arrivals (%)")
    axes[len(panels)].set_ylabel("waiting requests\nunder LRU (mean)")
    return style.shared_legend(
        figure, spare, xlabel="load (prompt tokens arriving / computed, modelled)"
    )


def _summary(rows: style.DataFrame) -> style.DataFrame:
    by = ["trace", "capacity_fraction", "load", "policy"]
    shares = closed(rows).stack().rename("gap_closed")
    rows = rows.join(shares, on=["trace", "capacity_fraction", "load", "slice", "policy"])
    values = ["block_hit_rate", "gap_closed", "mean_waiting", "mean_ttft_s"]
    return quantiles.over_slices(rows, by, values)


EXPERIMENT = Experiment(
    name="queue_informed",
    figure="what the waiting line is worth to eviction, by load, modelled (vLLM RFC 48485)",
    options=QueueInformedEviction(),
    quick=QueueInformedEviction(
        policy=("lru", "lru, queue", "lru, all"), num_requests=300, slices=1, load=(1.0, 4.0)
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"queue_informed": _draw}, {"summary": (_summary, "%.4g")}),
)
