"""Eviction policies by the time they save: Llama 3.1 8B on an H100, in modelled time.

The scheduler and the manager serve the first requests of a trace, with their own lengths and shared
blocks, under each policy and pool size; ``GpuClock`` gives the time.  Beside the hit rate the table
has time to first token, which a policy is there to shorten.  ``no_cache`` (prefix caching off, same
memory) and ``infinite`` (nothing is ever evicted) are the bounds.

A pool of 48 GiB is what an H100 has left beside the weights.  Larger ones stand for several GPUs.

``host_gib`` adds a tier in host memory to the smallest pool, with ``lru`` in the pool and a policy
of its own in the tier, see ``TieredClock``.  The tier is looked up for what the pool lacks, and its
blocks cross the PCIe link.

Requests arrive at the trace's own times, with gaps scaled so that on average ``load`` times as many
prompt tokens arrive as can be computed.  Requests of more than 65,536 tokens are left out: the
clock's tables end there.  The policy's own work is not part of the time; ``overhead`` measures it.

Where the trace has think times there are rows of a closed loop too: only the first request of an
agent arrives at its scaled time, and the others a think time after the answer before them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import cache
from cache.replay.overlapping import LOOP_COLUMNS
from cache.serving.request import ScheduledSequence
from cache.serving.scheduler import Step
from experiments import quantiles, serving, style
from experiments.eviction import Policy, named_policy, policy_spec
from experiments.harness import (
    Axis,
    Count,
    Experiment,
    Natural,
    Positive,
    Repeated,
    grid,
)
from experiments.load import workloads
from experiments.load.gpu_clock import HONEST, GpuClock
from experiments.load.workloads import OnTraces, Source

_NO_CACHE, _INFINITE = "no_cache", "infinite"
"""Values in place of a policy: prefix caching off, and a cache that never evicts."""
_HINTED = "ttl", "session_end"
"""Policies without a tier: it stores a prompt before hints are known, so they are LRU there."""
_LABELS = ("block hit rate (%)", *("time to first token (s)",) * 2, "time / LRU's")
_MODEL, _GPU, _MOST_TOKENS = "llama-3.1-8b", "H100-SXM", 65_536


@dataclass(frozen=True, kw_only=True)
class EvictionServing(OnTraces):
    """The grid: traces x policies x pools."""

    policy: Repeated[Axis[Policy]] = ()
    """A policy by name, or your own as file.py:Class.

    None: lru, fifo, lfu, ttl, session_end, safeguarded."""
    pool_gib: Axis[Positive] = (48.0, 192.0, 768.0)
    """Memory for K/V."""
    host_gib: Axis[Positive] = (128.0, 512.0, 2048.0)
    """Host memory of the tier; 0 in cells without one."""
    num_requests: Count = 3_000
    """First requests of each trace."""
    load: Positive = 0.5
    """Prompt tokens, cached or not, that arrive on average while one can be computed."""
    host_ms: Natural = 1
    """Assumed time of the engine's own code in each step."""


def cells(options: EvictionServing) -> Iterator[EvictionServing]:
    """Policies and the two bounds."""
    traces = [*options.sources(options.num_requests)]
    default = ("lru", "fifo", "lfu", "ttl", "session_end", "safeguarded")
    policies = [*map(named_policy, options.policy or default)]
    for trace in traces:
        alone = {"trace": [trace], "host_gib": [0.0]}
        yield from grid(options, policy=[*policies, _NO_CACHE], **alone)
        yield from grid(options, policy=[_INFINITE], pool_gib=[float("inf")], **alone)
        untold = [policy for policy in policies if policy not in _HINTED]
        yield from grid(options, trace=[trace], policy=untold, pool_gib=options.pool_gib[:1])


def run_cell(cell: EvictionServing) -> list[dict[str, Any]]:
    loops = ["open"]
    if not cell.host_gib and workloads.load(cell.trace).columns.keys() >= LOOP_COLUMNS:
        loops.append("closed")
    return [_row(cell, loop) for loop in loops]


def _row(cell: EvictionServing, loop: str) -> dict[str, Any]:
    whole, clock = workloads.load(cell.trace), _clock(cell.host_ms)
    trace = _served(cell.trace)
    block_bytes = trace.block_size * clock.kv_bytes_per_token
    if cell.policy == _INFINITE:
        longest = trace.input_lengths + trace.output_lengths
        num_blocks = int((longest // trace.block_size + 1).sum())
    else:
        num_blocks = int(cell.pool_gib * 2**30 / block_bytes)
    manager = cache.make_manager(
        "vllm_v1",
        num_blocks=num_blocks,
        block_size=trace.block_size,
        policy="lru" if cell.host_gib else policy_spec(cell.policy),
        enable_prefix_caching=cell.policy != _NO_CACHE,
    )
    step = clock.max_num_batched_tokens
    offered = cell.load * step / clock.seconds([], [(step, step)], 1)
    seconds = float(trace.timestamps_ms[-1] - trace.timestamps_ms[0]) / 1000
    scale = float(trace.input_lengths.sum()) / offered / seconds
    service = clock
    if cell.host_gib:
        host_blocks = int(cell.host_gib * 2**30 / block_bytes)
        sizes = {"num_blocks": host_blocks, "block_size": trace.block_size}
        tier = cache.make_manager("vllm_v1", **sizes, policy=policy_spec(cell.policy))
        service = TieredClock(clock, manager, tier)
    run = cache.simulate_serving(
        trace, manager=manager, service=service, time_scale=scale, closed_loop=loop == "closed"
    )
    loaded = service.loaded_blocks if cell.host_gib else 0
    return {
        "trace": trace.name,
        "loop": loop,
        "policy": str(cell.policy),
        **cell.columns("pool_gib", "host_gib", "load", "host_ms"),
        "model": clock.model,
        "gpu": clock.gpu,
        "requests": len(trace),
        "requests_left_out": len(whole) - len(trace),
        "requests_dropped": run.dropped,
        "mean_prompt_tokens": float(trace.input_lengths.mean()),
        "mean_output_tokens": float(trace.output_lengths.mean()),
        "unique_gib": trace.num_unique_blocks * block_bytes / 2**30,
        "gaps_scaled_by": scale,
        "block_hit_rate": run.stats.block_hit_rate,
        "host_block_hit_rate": loaded / trace.num_block_references,
        "evictions": run.stats.evicted_blocks,
        "preemptions": run.preemptions,
        "mean_running": run.mean_running,
        "normalized_latency_s": float(run.normalized_latency_seconds.mean()),
        **quantiles.of_times("ttft", run.ttft_seconds.tolist()),
        "basis": HONEST,
    }


class TieredClock:
    """``clock`` with a tier of K/V blocks in host memory, whose blocks ``tier`` manages.

    When a request is admitted, its prompt is allocated in the tier and given back, so its blocks
    are stored there until they are evicted.  Those that the tier had behind the pool's hit cross
    the PCIe link, which takes the place of computing their tokens; these still count in the
    scheduler's token budget.  Storing costs no time: that direction of the link is free.
    """

    def __init__(
        self, clock: GpuClock, manager: cache.CacheManager, tier: cache.CacheManager
    ) -> None:
        self.max_num_seqs = clock.max_num_seqs
        self.max_num_batched_tokens = clock.max_num_batched_tokens
        self.loaded_blocks = 0
        self._clock, self._manager, self._tier = clock, manager, tier
        self._loaded_to: dict[int, int] = {}
        block_bytes = tier.block_size * clock.kv_bytes_per_token
        self._block_seconds = block_bytes / clock.host_bandwidth

    def duration(self, step: Step) -> float:
        loaded = sum(map(self._admit, step.admitted))
        computed = Step(copies=step.copies)
        for seq, count in zip(step.sequences, step.counts, strict=True):
            start = seq.num_computed_tokens - count
            skipped = max(0, self._loaded_to.get(seq.seq_id, 0) - start)
            if skipped < count:
                computed.sequences.append(seq)
                computed.counts.append(count - skipped)
        self.loaded_blocks += loaded
        return self._clock.duration(computed) + loaded * self._block_seconds

    def _admit(self, seq: ScheduledSequence) -> int:
        """Look up and store the blocks of ``seq``; returns how many are loaded."""
        self._tier.clock = self._manager.clock
        stored = cache.Sequence(seq.seq_id, seq.token_ids)
        try:
            found = self._tier.allocate(stored)
        except cache.OutOfBlocks:
            return 0
        self._tier.free(stored)
        self._loaded_to[seq.seq_id] = found
        return max(0, found - seq.num_cached_tokens) // self._tier.block_size


@functools.cache
def _clock(host_ms: int) -> GpuClock:
    return GpuClock(_MODEL, _GPU, host_seconds=host_ms / 1000)


@functools.lru_cache(maxsize=1)
def _served(source: Source) -> cache.Trace:
    """The requests that the clock's tables allow."""
    trace = workloads.load(source)
    short = trace.input_lengths + trace.output_lengths <= _MOST_TOKENS
    return trace if short.all() else trace.take(np.flatnonzero(short))


def _draw(rows: style.DataFrame) -> style.Figure:
    """A row per trace: hit rate and time by pool, time by tier, and the same over LRU's."""
    rows = rows.assign(over_lru=_over_lru(rows))[rows["loop"] == "open"]
    lines = style.policy_lines(rows["policy"].unique())
    lines[_NO_CACHE] = style.line(style.GREY, "", "dashdot") | {"label": "no prefix caching"}
    pools = sorted(rows[rows["pool_gib"] < float("inf")]["pool_gib"].unique())
    tiers = sorted(rows["host_gib"].unique())
    rows["tier"] = rows["host_gib"].map(tiers.index)
    traces = rows.groupby("trace", sort=False)
    figure, axes, _ = style.panel_grid(4 * len(traces), columns=4, height=1.9, width=1.75)
    for number, (trace, of_trace) in enumerate(traces):
        panels = axes[4 * number : 4 * number + 4]
        for policy, some in of_trace.groupby("policy", sort=False):
            look, alone = lines[policy], some[some["host_gib"] == 0]
            if policy == _INFINITE:
                panels[0].axhline(100 * alone["block_hit_rate"].iloc[0], **look)
                panels[1].axhline(alone["ttft_mean_s"].iloc[0], **look)
                continue
            style.curve(panels[1], alone, "pool_gib", "ttft_mean_s", **look)
            if policy != _NO_CACHE:
                behind = some[some["pool_gib"] == pools[0]]
                style.curve(panels[0], alone, "pool_gib", "block_hit_rate", 100, **look)
                style.curve(panels[2], behind, "tier", "ttft_mean_s", **look)
                style.curve(panels[3], behind, "tier", "over_lru", **look)
        first = of_trace.iloc[0]
        titles = (f"{trace}\n{first['requests']} requests", f"of {first['unique_gib']:,.0f} GiB")
        titles += (f"tier behind {pools[0]:g} GiB" if pools else "",) * 2
        for axis, title, label in zip(panels, titles, _LABELS, strict=True):
            axis.set(title=title, ylabel=label)
        for axis in panels[:2]:
            style.log_x(axis, pools)
            axis.set_xlabel("pool (GiB)")
        for axis in panels[2:]:
            axis.set_xticks(range(len(tiers)), map("{:g}".format, tiers))
            axis.set_xlabel("tier (GiB)")
        panels[1].set_yscale("log")
        style.plain_log_ticks(panels[1].yaxis)
        for axis in (panels[0], panels[2]):
            axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
        panels[3].set_ylim(min(0.9, panels[3].get_ylim()[0]), max(1.1, panels[3].get_ylim()[1]))
    notes = f"Llama 3.1 8B on an H100. {HONEST}"
    return style.shared_legend(figure, columns=4, xlabel=serving.noted(figure, "", notes))


def _over_lru(rows: style.DataFrame) -> style.Series:
    """Time to first token over LRU's in the same pool and tier."""
    at = ["trace", "loop", "pool_gib", "host_gib"]
    lru = rows["ttft_mean_s"].where(rows["policy"] == "lru")
    return rows["ttft_mean_s"] / lru.groupby([rows[name] for name in at]).transform("max")


def _summary(rows: style.DataFrame) -> style.DataFrame:
    columns = ["trace", "loop", "pool_gib", "host_gib", "policy", "block_hit_rate"]
    columns += ["host_block_hit_rate", "ttft_mean_s"]
    return rows[columns].assign(ttft_over_lru=_over_lru(rows), basis=rows["basis"])


EXPERIMENT = Experiment(
    name="eviction_serving",
    figure="time to first token under each policy and pool: Llama 3.1 8B, H100 modelled",
    options=EvictionServing(),
    quick=EvictionServing(
        policy=("lru", "lfu"), pool_gib=(48.0,), host_gib=(512.0,), num_requests=100
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"eviction_serving": _draw}, tables={"summary": (_summary, "%.4g")}),
)
