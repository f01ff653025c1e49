"""Gain of eviction that sees the waiting line, by load (vLLM RFC 48485).

The first requests of a trace are served by the scheduler and ``vllm_v1``, overlapping in time, on a
modelled clock (``ServiceModel``).  Only the arrivals are scaled.  Load 1 brings as many prompt
tokens as the clock computes, before any hit; hits let the engine sustain more.  LRU and ``gittins``
are told of the waiting line or not; LRU told of all arrivals of the trace bounds what it can bring.
To be quick, all lengths and the rates of the clock are divided by 8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import cache
from cache.policies import QueueInformed
from cache.replay.overlapping import prompt_token_ids, simulate_serving
from experiments import style
from experiments.harness import Axis, Count, Experiment, Percent, Positive, grid
from experiments.load import workloads
from experiments.load.workloads import OnTraces

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
class QueueInformedEviction(OnTraces):
    """The grid: traces x loads x pools x policies."""

    policy: Axis[Literal[tuple(_LOOKS)]] = tuple(_LOOKS)
    load: Axis[Positive] = (0.7, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    """Prompt tokens that arrive per second, over those that the clock computes."""
    capacity_percent: Axis[Percent] = (20.0,)
    """Blocks of the pool, in percent of the unique blocks."""
    num_requests: Count = 3000
    """Requests of each trace, the first of a file."""


def cells(options: QueueInformedEviction) -> Iterator[QueueInformedEviction]:
    yield from grid(options, trace=[*options.sources(options.num_requests)])


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
            manager.expect((index, index), cache.Sequence(index, prompt_token_ids(trace, index)))
    seconds = (trace.timestamps_ms[-1] - trace.timestamps_ms[0]) / 1000
    computed = seconds * _SERVICE.prefill_tokens_per_second
    unscaled = float(trace.input_lengths.sum()) / computed
    result = simulate_serving(
        trace, manager=manager, service=_SERVICE, time_scale=unscaled / cell.load
    )
    return [
        {
            "trace": trace.name,
            **cell.columns("policy", "load"),
            "requests": trace.num_requests,
            "capacity_fraction": cell.capacity_percent / 100,
            "capacity_blocks": num_blocks,
            "block_hit_rate": result.stats.block_hit_rate,
            "mean_waiting": result.mean_waiting,
            "mean_running": result.mean_running,
            "preemptions": result.preemptions,
            "mean_ttft_s": float(result.ttft_seconds.mean()),
        }
    ]


def closed(rows: style.DataFrame) -> style.DataFrame:
    """Share of the way from LRU to "told of all arrivals" that each policy goes."""
    index = ["trace", "capacity_fraction", "load"]
    rates = rows.pivot(index=index, columns="policy", values="block_hit_rate")
    if not {"lru", "lru, all"} <= set(rates):
        return rates.iloc[:, :0]
    way = rates["lru, all"] - rates["lru"]
    return rates.sub(rates["lru"], axis=0).div(way.where(way > 0.002), axis=0)


def _draw(rows: style.DataFrame) -> style.Figure:
    """Gap closed against load, and the mean waiting line under LRU, per trace that has a gap."""
    shares = 100 * closed(rows)
    panels = list(rows.groupby(["trace", "capacity_fraction"], sort=False))
    panels = [one for one in panels if one[0] in shares.dropna(how="all").index] or panels
    figure, axes, spare = style.panel_grid(2 * len(panels), height=1.75, columns=len(panels))
    for ((trace, size), of_panel), above, below in zip(
        panels, axes[: len(panels)], axes[len(panels) :], strict=True
    ):
        for policy, (label, look) in _LOOKS.items():
            if policy in shares and not policy.endswith("all"):
                share = shares.loc[(trace, size), policy]
                above.plot(share.index, share, **look, label=label)
            waits = of_panel[of_panel["policy"] == policy]
            if policy == "lru":
                style.curve(below, waits, "load", "mean_waiting", **look)
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


EXPERIMENT = Experiment(
    name="queue_informed",
    figure="what the waiting line is worth to eviction, by load, modelled (vLLM RFC 48485)",
    options=QueueInformedEviction(),
    quick=QueueInformedEviction(
        policy=("lru", "lru, queue", "lru, all"), num_requests=300, load=(1.0, 4.0)
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"queue_informed": _draw}),
)
