"""Time that eviction policies save: Llama 3.1 8B on an H100, in modelled time.

The scheduler and the manager serve slices of a trace under each policy and pool size, with the
lengths and shared blocks of the trace.  ``GpuClock`` gives the time.  Each slice starts with an
empty cache.  The table has the hit rate of first admissions and the time to first token, which
eviction should improve.  The bounds are ``no_cache`` (prefix caching off, same memory) and
``infinite`` (a cache that never evicts).

An H100 has about 48 GiB left for the pool beside the weights.  Larger pools stand for several GPUs.

``host_gib`` adds a tier in host memory to the smallest pool, see ``HostTier``.  Then the pool uses
``lru``, and the tier uses the policy.

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
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import cache
from cache.replay.overlapping import LOOP_COLUMNS, most_hits
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
from experiments.load.gpu_clock import CLOCK_DISCLAIMER, GpuClock
from experiments.load.workloads import OnSlices, Source

_NO_CACHE, _INFINITE = "no_cache", "infinite"
"""Values of ``policy`` for the bounds: prefix caching off, and a cache that never evicts."""
_QUEUE = "queue_informed"
_NO_TIER = "ttl", "session_end", _QUEUE
"""Policies that equal LRU in a tier: it has no queue and stores prompts before hints are known."""
_MODEL, _GPU, _MOST_TOKENS = "llama-3.1-8b", "H100-SXM", 131_072


@dataclass(frozen=True, kw_only=True)
class EvictionServing(OnSlices):
    """The grid: slices of traces x policies x pools."""

    policy: Repeated[Axis[Policy]] = ()
    """A policy by name, or your own as file.py:Class.

    None: lru, fifo, lfu, ttl, session_end, safeguarded, queue_informed."""
    pool_gib: Axis[Positive] = (48.0, 192.0)
    """Memory for K/V."""
    host_gib: Axis[Positive] = (512.0,)
    """Host memory of the tier; 0 in cells without a tier."""
    num_requests: Count = 1_000
    load: Axis[Positive] = (0.5, 1.0)
    """Average number of prompt tokens, cached or not, that arrive while the GPU can compute one.
    Loads after the first are run only with lru and queue_informed, without a tier."""
    host_ms: Natural = 1
    """Assumed time of the engine's own code in each step, in milliseconds."""


def cells(options: EvictionServing) -> Iterator[EvictionServing]:
    """Cells of the policies and of the two bounds."""
    traces = [*options.sliced_sources()]
    default = ("lru", "fifo", "lfu", "ttl", "session_end", "safeguarded", _QUEUE)
    policies = [*map(named_policy, options.policy or default)]
    load, *further_loads = options.load
    compared = [policy for policy in policies if policy in ("lru", _QUEUE)]
    with_tier = [policy for policy in policies if policy not in _NO_TIER]
    for trace in traces:
        at = {"trace": [trace], "load": [load]}
        alone = {**at, "host_gib": [0.0]}
        yield from grid(options, policy=[*policies, _NO_CACHE], **alone)
        yield from grid(options, policy=[_INFINITE], pool_gib=[float("inf")], **alone)
        yield from grid(options, policy=with_tier, pool_gib=options.pool_gib[:1], **at)
        yield from grid(options, policy=compared, **{**alone, "load": further_loads})


def run_cell(cell: EvictionServing) -> list[dict[str, Any]]:
    return [row_of(cell, served(cell.trace), policy_spec(cell.policy))]


def row_of(
    cell: EvictionServing, trace: cache.Trace, policy: str | cache.EvictionPolicy
) -> dict[str, Any]:
    """Serve ``trace`` (from ``served``, perhaps with other hints) with ``policy`` in the cell's
    pool, or in its tier if there is one; returns the row of the table."""
    clock = _clock(cell.host_ms)
    assert trace.block_size is not None
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
        policy="lru" if cell.host_gib else policy,
        enable_prefix_caching=cell.policy != _NO_CACHE,
    )
    step = clock.max_num_batched_tokens
    offered = cell.load * step / clock.seconds([], [(step, step)], 1)
    seconds = float(trace.timestamps_ms[-1] - trace.timestamps_ms[0]) / 1000
    scale = float(trace.input_lengths.sum()) / offered / seconds
    tier = None
    if cell.host_gib:
        host_blocks = int(cell.host_gib * 2**30 / block_bytes)
        sizes: dict[str, Any] = {"num_blocks": host_blocks, "block_size": trace.block_size}
        host = cache.make_manager("vllm_v1", **sizes, policy=policy)
        tier = HostTier(clock, manager, host)
    is_closed = trace.columns.keys() >= LOOP_COLUMNS
    run = cache.simulate_serving(
        trace,
        manager=manager,
        service=tier or clock,
        time_scale=scale,
        closed_loop=is_closed,
        runner=tier,
    )
    stats, most = run.stats, most_hits(trace)
    loaded = tier.loaded_blocks if tier else 0
    return {
        "trace": trace.name,
        "slice": cell.trace.slice,
        "loop": "closed" if is_closed else "open",
        "policy": str(cell.policy),
        **cell.columns("pool_gib", "host_gib", "load", "host_ms"),
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
        "host_block_hit_rate": loaded / max(1, stats.queried_blocks),
        "most_block_hit_rate": most / max(1, stats.queried_blocks),
        "passed": stats.hit_blocks + loaded <= most,
        "resumed_block_hit_rate": stats.resumed_hit_blocks / max(1, stats.resumed_queried_blocks),
        "evictions": stats.evicted_blocks,
        "preemptions": run.preemptions,
        "mean_running": run.mean_running,
        "mean_waiting": run.mean_waiting,
        "normalized_latency_s": float(run.normalized_latency_seconds.mean()),
        **quantiles.of_times("ttft", run.ttft_seconds.tolist()),
        "basis": CLOCK_DISCLAIMER,
    }


class HostTier:
    """A tier of K/V blocks in host memory, managed by ``tier``.  ``duration`` adds its loads to
    ``clock``'s time.

    An admitted request's prompt is allocated in the tier and freed, so its blocks stay in the tier
    until they are evicted.  Where the pool's hit ends, further blocks that the tier has are loaded
    over the PCIe link instead of computed.  Their tokens still count in the scheduler's token
    budget.  Storing costs no time, because this direction of the link is idle.  ``loaded_blocks``
    counts first admissions only, like the hit rates of managers."""

    def __init__(
        self, clock: GpuClock, manager: cache.CacheManager, tier: cache.CacheManager
    ) -> None:
        self.max_num_seqs = clock.max_num_seqs
        self.max_num_batched_tokens = clock.max_num_batched_tokens
        self.loaded_blocks = 0
        self._clock, self._manager, self._tier = clock, manager, tier
        self._loaded_to: dict[Hashable, int] = {}
        self._step_blocks = 0
        block_bytes = tier.block_size * clock.kv_bytes_per_token
        self._block_seconds = block_bytes / clock.host_bandwidth

    def run(self, step: Step, manager: cache.CacheManager) -> None:
        """Look up and store the blocks of the sequences that the step admits."""
        self._step_blocks = 0
        for seq in step.admitted:
            loaded = self._admit(seq)
            self._step_blocks += loaded
            if not seq.request.stats.num_preemptions:
                self.loaded_blocks += loaded

    def duration(self, step: Step) -> float:
        computed = Step(copies=step.copies)
        for seq, count in zip(step.sequences, step.counts, strict=True):
            start = seq.num_computed_tokens - count
            skipped = max(0, self._loaded_to.get(seq.seq_id, 0) - start)
            if skipped < count:
                computed.sequences.append(seq)
                computed.counts.append(count - skipped)
        return self._clock.duration(computed) + self._step_blocks * self._block_seconds

    def _admit(self, seq: ScheduledSequence) -> int:
        """Look up and store the blocks of ``seq``; returns the number of blocks to load."""
        self._tier.clock = self._manager.clock
        stored = cache.Sequence(seq.seq_id, seq.token_ids)
        stored.hints = (math.nan, *seq.hints[1:])  # a client tells hints, not what the answer calls
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
def served(source: Source) -> cache.Trace:
    """The requests that do not exceed the model's maximum length."""
    trace = workloads.load(source)
    short = trace.input_lengths + trace.output_lengths <= _MOST_TOKENS
    return trace if short.all() else trace.take(np.flatnonzero(short))


def _draw(rows: style.DataFrame) -> style.Figure:
    """A row of panels per trace, at the first load: hit rate and time by pool; time divided by
    LRU's time by pool and by tier.  Points are means over the slices, bars their range."""
    rows = rows[rows["load"] == rows["load"].iloc[0]]
    rows = rows.assign(over_lru=over_lru(rows))
    lines = style.policy_lines(rows["policy"].unique())
    lines[_NO_CACHE] = style.line(style.GREY, "", "dashdot") | {"label": "no prefix caching"}
    pools = sorted(rows[rows["pool_gib"] < float("inf")]["pool_gib"].unique())
    tiers = sorted(rows["host_gib"].unique())
    rows["pool"] = rows["pool_gib"].map(dict(zip(pools, range(len(pools)), strict=True)))
    rows["tier"] = rows["host_gib"].map(tiers.index)
    traces = rows.groupby("trace", sort=False)
    figure, axes, _ = style.panel_grid(4 * len(traces), columns=4, height=1.9, width=1.75)
    mean = functools.partial(quantiles.draws, middle="mean")
    for number, (trace, of_trace) in enumerate(traces):
        panels = axes[4 * number : 4 * number + 4]
        alone = of_trace[of_trace["host_gib"] == 0]
        for policy, some in alone.groupby("policy", sort=False):
            look = lines[policy]
            if policy == _INFINITE:
                panels[0].axhline(100 * some["most_block_hit_rate"].mean(), **look)
                panels[1].axhline(some["ttft_mean_s"].mean(), **look)
                continue
            mean(panels[1], some, "pool", "ttft_mean_s", **look)
            if policy == _NO_CACHE:
                continue
            mean(panels[0], some.assign(hits=100 * some["block_hit_rate"]), "pool", "hits", **look)
            mean(panels[2], some, "pool", "over_lru", **look)
            if policy not in _NO_TIER:
                behind = (of_trace["policy"] == policy) & (of_trace["pool"] == 0)
                mean(panels[3], of_trace[behind], "tier", "over_lru", **look)
        count, loop = of_trace["slice"].nunique(), of_trace["loop"].iloc[0]
        tier = f"tier behind {pools[0]:g} GiB" if pools else ""
        titles = f"{trace}\n{count} slices, {loop} loop", "", "", tier
        labels = "block hit rate (%)", "time to first token (s)", *("time / LRU's",) * 2
        for axis, title, label in zip(panels, titles, labels, strict=True):
            axis.set(title=title, ylabel=label, xlabel="pool (GiB)")
            axis.set_xticks(range(len(pools)), map("{:g}".format, pools))
        panels[3].set_xticks(range(len(tiers)), map("{:g}".format, tiers))
        panels[3].set_xlabel("tier (GiB)")
        panels[1].set_yscale("log")
        style.plain_log_ticks(panels[1].yaxis)
        panels[0].set_ylim(0, 1.1 * panels[0].get_ylim()[1])
        for axis in panels[2:]:
            axis.set_ylim(min(0.9, axis.get_ylim()[0]), max(1.1, axis.get_ylim()[1]))
    notes = f"Llama 3.1 8B on an H100; bars: all slices. {CLOCK_DISCLAIMER}"
    return style.shared_legend(figure, columns=4, xlabel=serving.noted(figure, "", notes))


def _draw_queue(rows: style.DataFrame) -> style.Figure | None:
    """Draw ``queue_informed``'s time / LRU's time against LRU's mean number of waiting requests."""
    rows = rows.assign(over_lru=over_lru(rows), waiting=_of_lru(rows, "mean_waiting"))
    rows = rows[(rows["policy"] == _QUEUE) & (rows["host_gib"] == 0)].dropna(subset="over_lru")
    if rows.empty:
        return None
    traces = rows.groupby("trace", sort=False)
    figure, axes, _ = style.panel_grid(len(traces), height=1.9)
    pools = sorted(rows["pool_gib"].unique())
    for axis, (trace, of_trace) in zip(axes, traces, strict=True):
        for pool, look in style.lines_of(pools).items():
            points = of_trace[of_trace["pool_gib"] == pool]
            look |= {"linestyle": "none", "clip_on": False, "label": f"pool of {pool:g} GiB"}
            axis.plot("waiting", "over_lru", data=points, **look)
        axis.axhline(1, **style.BOUND)
        axis.set_title(f"{trace}\n{of_trace['loop'].iloc[0]} loop")
        axis.set_xscale("symlog")
        axis.set_xlim(left=0)
    axes[0].set_ylabel("time to first token / LRU's")
    label = "waiting requests under LRU (mean)"
    return style.shared_legend(figure, xlabel=serving.noted(figure, label))


def _of_lru(rows: style.DataFrame, column: str) -> style.Series:
    """For each row: LRU's value of ``column`` with the same slice, load, pool and tier."""
    at = ["trace", "slice", "pool_gib", "host_gib", "load"]
    lru = rows[column].where(rows["policy"] == "lru")
    return lru.groupby([rows[name] for name in at]).transform("max")


def over_lru(rows: style.DataFrame) -> style.Series:
    """Time to first token, divided by LRU's."""
    return rows["ttft_mean_s"] / _of_lru(rows, "ttft_mean_s")


def _summary(rows: style.DataFrame) -> style.DataFrame:
    rows = rows.assign(over_lru=over_lru(rows))
    by = ["trace", "loop", "load", "pool_gib", "host_gib", "policy"]
    values = ["block_hit_rate", "host_block_hit_rate", "most_block_hit_rate"]
    values += ["mean_waiting", "ttft_mean_s", "over_lru"]
    return quantiles.over_slices(rows, by, values).assign(basis=CLOCK_DISCLAIMER)


EXPERIMENT = Experiment(
    name="eviction_serving",
    figure="time to first token under each policy and pool: Llama 3.1 8B, H100 modelled",
    options=EvictionServing(),
    quick=EvictionServing(
        policy=("lru", _QUEUE), pool_gib=(48.0,), host_gib=(512.0,), num_requests=100, slices=1
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter(
        {"eviction_serving": _draw, "queue": _draw_queue}, {"summary": (_summary, "%.4g")}
    ),
)
