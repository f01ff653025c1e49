"""Eviction policies in the engine: a slice of a trace served under each policy and capacity.

The engine serves the first requests of a trace from KV caches of 10 to 40 % of the blocks of the
slice.  The table has its hit rate, time to first token and throughput beside the predictions of two
replays of the same requests: serial (``cache.simulate``) and overlapping
(``cache.simulate_serving``).  ``no_cache`` (prefix caching off, same memory) and ``infinite``
(nothing is ever evicted) bound the engine's times; ``infinite`` and ``belady`` bound the hit rate.
Belady's optimum needs the future, so it has a replayed hit rate and no engine run.

Time is modelled.  Scheduling, hits, evictions and attention (with random weights) are the engine's
on the small ``model``.  A step takes the time of a step of ``timed_model`` with the same number of
prompt tokens and decoding sequences, by a linear model with three parameters measured on this
machine (``service_times``).  So policies differ only by the blocks that they keep.
These times contain neither the policy's own work (the ``managers`` part of ``overhead`` measures
it) nor the cost of attention to long contexts.

Each block of the trace becomes a block of ``tokens_per_block`` tokens in the engine, chosen so that
the prompts of the slice stay within ``slice_tokens``.  The engine has the same block size, so its
blocks correspond one to one to the replay's.  A prompt has one token more than its blocks, since
the engine always computes the last token of a prompt.  Outputs are divided by the same factor and
cut to ``max_output_tokens``.  Requests arrive at the trace's own times, with gaps scaled so that on
average ``load`` times as many prompt tokens arrive as can be computed.

Differences between the engine's hit rate and the serial replay's:

* With serial arrivals, outputs of one token and a policy that evicts a prompt from its tail, the
  engine's pool of N + 1 blocks (one for the last token of the running prompt) has exactly the hits
  of the replay with N blocks.  For ``lru`` on N blocks the replay must give the partly filled last
  block of a prompt its own content: in vLLM's free queue it waits like a cached one.
* Policies that evict the head of a prompt before its tail (``fifo``, ``mru``, ``random``) leave
  tails that the replay finds when the head is back, and the engine computes again.
* Policies that divide the pool into queues divide N + 1 blocks.
* Decoded tokens fill blocks that no later request of the trace needs.
* Running requests overlap: fewer blocks can be evicted, a request is looked up at its admission,
  and its blocks are released when it ends.  Only the first look-up of a preempted request counts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import cache
from cache.serving import open_loop
from experiments import quantiles, style
from experiments.eviction import Policy, named_policy, policy_spec
from experiments.eviction_serving.service_times import measure_service
from experiments.harness import (
    Axis,
    Count,
    Experiment,
    Percent,
    Positive,
    Repeated,
    Unavailable,
    grid,
)
from experiments.load import engine_models, workloads
from experiments.load.engine_models import Model
from experiments.load.scaled_trace import ScaledTrace, shrink_blocks
from experiments.load.workloads import OnTraces

_NO_CACHE, _INFINITE = "no_cache", "infinite"
"""Values in place of a policy: prefix caching off, and a cache that never evicts."""


@dataclass(frozen=True, kw_only=True)
class EvictionServing(OnTraces):
    """The grid: traces x policies x capacities."""

    policy: Repeated[Axis[Policy]] = ()
    """A policy by name, or your own as file.py:Class.

    None: lru, lfu, arc, tlru, safeguarded, belady."""
    capacity_percent: Axis[Percent] = (10, 20, 40)
    """Blocks of the cache, in percent of the unique blocks of the slice."""
    num_requests: Count = 600
    """Requests of the slice, at most."""
    slice_tokens: Count = 60_000
    """Most prompt tokens of the slice; determines the tokens per block of the trace."""
    max_output_tokens: Count = 16
    """Longest output."""
    arrivals: Literal["trace", "serial"] = "trace"
    """Scaled times of the trace, or each request when the one before it has ended."""
    load: Positive = 1.0
    """Prompt tokens, cached or not, that arrive on average while one can be computed."""
    manager: Literal["vllm_v1", "radix"] = "vllm_v1"
    """Cache manager."""
    model: Model = "tiny"
    """A shape of engine_models; computes the tokens."""
    timed_model: Model | None = None
    """The shape that step times are measured on. None: qwen3-0.6b on a GPU, else llama-100m."""
    threads: Count = 1
    """CPU threads of the models. More than one pays for larger ones on an idle machine."""


def cells(options: EvictionServing) -> Iterator[EvictionServing]:
    """Policies and the two bounds."""
    traces = [*options.sources(options.num_requests)]
    default = ("lru", "lfu", "arc", "tlru", "safeguarded", "belady")
    policies = [*map(named_policy, options.policy or default), _NO_CACHE]
    timed_model = options.timed_model or engine_models.default_model()
    given = {"trace": traces, "timed_model": timed_model}
    yield from grid(options, policy=policies, **given)
    yield from grid(options, policy=[_INFINITE], capacity_percent=[100.0], **given)


def run_cell(cell: EvictionServing) -> list[dict[str, Any]]:
    scaled = _slice(dataclasses.replace(cell, policy="", capacity_percent=100.0))
    trace = scaled.trace
    capacity = max(1, int(trace.num_unique_blocks * cell.capacity_percent / 100))
    row = {
        "trace": trace.name,
        "policy": str(cell.policy),
        "capacity_fraction": cell.capacity_percent / 100,
        "capacity_blocks": capacity,
        **cell.columns("arrivals", "manager", "model", "threads", "timed_model"),
        "requests": len(trace),
        "requests_left_out": scaled.num_left_out,
        "block_references": trace.num_block_references,
        "unique_blocks": trace.num_unique_blocks,
        "tokens_per_block": trace.block_size,
        "length_divisor": scaled.divisor,
        "mean_prompt_tokens": float(trace.input_lengths.mean()),
        "mean_output_tokens": float(trace.output_lengths.mean()),
        "load": None if cell.arrivals == "serial" else cell.load,
    }
    if cell.policy == _INFINITE:
        row |= {"replay_block_hit_rate": trace.infinite_cache_hit_rate, "replay_evictions": 0}
    elif cell.policy != _NO_CACHE:
        policy = policy_spec(cell.policy)
        replay = cache.simulate(trace, policy=policy, capacity_blocks=capacity)
        row |= {
            "replay_block_hit_rate": replay.block_hit_rate,
            "replay_evictions": replay.evictions,
        }
        if cache.make_policy(policy).needs_future:
            return [row]
    longest = int(_num_blocks(trace).max())
    if capacity < longest:
        raise Unavailable(
            f"{trace.name}: a cache of {cell.capacity_percent:g} % of the blocks of the slice "
            "does not hold its longest request"
        )
    return [row | _served(cell, trace, capacity)]


def _served(cell: EvictionServing, trace: cache.Trace, capacity: int) -> dict[str, Any]:
    """Columns measured on the engine, and by the replay with overlapping requests."""
    service = measure_service(cell.timed_model, threads=cell.threads)
    options = {
        "num_blocks": capacity,
        "block_size": trace.block_size,
        "policy": policy_spec(cell.policy),
        "enable_prefix_caching": cell.policy != _NO_CACHE,
    }
    if cell.policy == _INFINITE:
        options["num_blocks"] = int(_num_blocks(trace).sum())
    arrivals = _arrivals(cell, trace, service)
    llm = engine_models.make_llm(cell.model, manager=cell.manager, seed=cell.seed, **options)
    run = engine_models.serve_trace(llm, trace, arrivals, service=service)
    requests, busy = run.requests, run.busy_seconds
    hits = sum(request.num_cached_tokens // trace.block_size for request in requests)
    row = {
        "engine_block_hit_rate": hits / trace.num_block_references,
        "engine_token_hit_rate": run.cached_prompt_fraction,
        "engine_evictions": llm.manager.stats.evicted_blocks,
        "preemptions": sum(request.num_preemptions for request in requests),
        "mean_running": run.mean_of_steps("running"),
        **quantiles.of_times("ttft", [request.time_to_first_token for request in requests]),
        **quantiles.of_times("tpot", [request.time_per_output_token for request in requests]),
        "seconds": run.seconds,
        "busy_seconds": busy,
        "requests_per_second": len(requests) / run.seconds,
        "output_tokens_per_second": run.generated_tokens / run.seconds,
        "prompt_tokens_per_busy_second": int(trace.input_lengths.sum()) / busy,
    }
    if arrivals is not None:
        overlapping = cache.simulate_serving(
            dataclasses.replace(trace, timestamps_ms=1000 * np.array(arrivals)),
            manager=cache.make_manager(cell.manager, **options),
            service=service,
        )
        row |= {
            "overlap_block_hit_rate": overlapping.stats.block_hit_rate,
            "overlap_ttft_mean_s": float(overlapping.ttft_seconds.mean()),
            "overlap_preemptions": overlapping.preemptions,
        }
    return row | {
        "offered_prompt_tokens_per_second": (
            None if arrivals is None else cell.load * service.prefill_tokens_per_second
        ),
        "service_step_s": service.step_seconds,
        "service_prefill_tokens_per_second": service.prefill_tokens_per_second,
        "service_decode_s_per_sequence": service.decode_seconds_per_sequence,
    }


@functools.lru_cache(maxsize=1)
def _slice(cell: EvictionServing) -> ScaledTrace:
    """The requests of ``cell``; policy and capacity do not matter."""
    return shrink_blocks(
        workloads.load(cell.trace),
        slice_tokens=cell.slice_tokens,
        max_output_tokens=cell.max_output_tokens,
        vocab_size=engine_models.model_config(cell.model).vocab_size,
    )


def _arrivals(
    cell: EvictionServing, trace: cache.Trace, service: cache.ServiceModel
) -> list[float] | None:
    if cell.arrivals == "serial":
        return None
    offered = cell.load * service.prefill_tokens_per_second
    rate = offered / float(trace.input_lengths.mean())
    return open_loop.scaled_arrivals(trace.timestamps_ms.tolist(), rate)


def _num_blocks(trace: cache.Trace):
    """Blocks of each request at its end.  The K/V of the last token are never stored."""
    return -(-(trace.input_lengths + trace.output_lengths - 1) // trace.block_size)


_REPLAY = {"linewidth": 0.8, "linestyle": (0, (1, 1.2))}


def _draw(rows: style.DataFrame) -> style.Figure:
    lines = style.policy_lines(rows["policy"].unique())
    lines[_NO_CACHE] = style.line(style.GREY, "", "dashdot") | {"label": "no prefix caching"}
    figure, axes, _ = style.panel_grid(
        2 * rows["trace"].nunique(), columns=2, width=3.5, height=2.0, sharex=True
    )
    ticks = sorted(100 * rows[rows["policy"] != _INFINITE]["capacity_fraction"].unique())
    for row, (_, of_trace) in enumerate(rows.groupby("trace", sort=False)):
        left, right = axes[2 * row : 2 * row + 2]
        of_trace = of_trace.assign(size=100 * of_trace["capacity_fraction"])
        for policy, curve in of_trace.groupby("policy", sort=False):
            curve = curve.sort_values("size")
            _draw_hit_rate(left, policy, curve, lines[policy])
            _draw_ttft(right, policy, curve, lines[policy])
        first = of_trace.iloc[0]
        left.set(title=_title(first), ylabel="block hit rate (%)", ylim=(0, None))
        right.set(title=_load(first), ylabel="time to first token (s)", yscale="log")
        for axis in (left, right):
            style.log_x(axis, ticks)
        style.plain_log_ticks(right.yaxis)
    axes[-1].plot([], [], color=style.BLACK, **_REPLAY, label="the same policy replayed")
    xlabel = "cache size (% of the unique blocks of the slice)"
    return style.shared_legend(figure, columns=5, xlabel=xlabel)


def _draw_hit_rate(axis: style.Axes, policy: str, curve: style.DataFrame, line: dict) -> None:
    """The engine's hit rate, with the replay's as a thin dotted line; bounds by replay alone."""
    replayed = 100 * curve["replay_block_hit_rate"]
    if policy == _INFINITE:
        axis.axhline(replayed.iloc[0], **line)
    elif not _has_engine(curve):
        axis.plot(curve["size"], replayed, **line)
    elif policy != _NO_CACHE:
        axis.plot(curve["size"], replayed, color=line["color"], **_REPLAY)
        axis.plot(curve["size"], 100 * curve["engine_block_hit_rate"], **line)


def _draw_ttft(axis: style.Axes, policy: str, curve: style.DataFrame, line: dict) -> None:
    if policy == _INFINITE:
        axis.axhline(curve["ttft_mean_s"].iloc[0], **line)
    elif _has_engine(curve):
        axis.plot(curve["size"], curve["ttft_mean_s"], **line)


def _has_engine(curve: style.DataFrame) -> bool:
    return "ttft_mean_s" in curve and curve["ttft_mean_s"].notna().any()


def _title(row: style.Series) -> str:
    blocks = f"{row['requests']} requests, {row['unique_blocks']:,} unique blocks"
    return f"{row['trace']}\n{blocks} of {row['tokens_per_block']} tokens"


def _load(row: style.Series) -> str:
    load, title = row["load"], f"modelled time of {row['timed_model']}"
    if load != load or load is None:
        return f"{title}\none request at a time"
    return f"{title}\noffered: {load:g} x the prompt tokens that it can compute"


def _summary(rows: style.DataFrame) -> style.DataFrame:
    """Hit rates, and time to first token relative to no prefix caching in the same memory.

    A row per trace, policy and capacity.
    """
    columns = ["trace", "policy", "capacity_fraction", "replay_block_hit_rate"]
    measured = ("overlap_block_hit_rate", "engine_block_hit_rate", "ttft_mean_s")
    summary = rows[columns + [column for column in measured if column in rows]].copy()
    if _has_engine(summary):
        at = ["trace", "capacity_fraction"]
        uncached = rows[rows["policy"] == _NO_CACHE].set_index(at)["ttft_mean_s"]
        summary["ttft_to_no_cache"] = (
            summary["ttft_mean_s"] / uncached.reindex(summary.set_index(at).index).to_numpy()
        )
    return summary


EXPERIMENT = Experiment(
    name="eviction_serving",
    figure="a slice of a trace served under each policy and capacity, beside what replays predict",
    options=EvictionServing(),
    quick=EvictionServing(
        policy=("lru", "belady"),
        capacity_percent=(40, 80),
        num_requests=40,
        slice_tokens=4_000,
        max_output_tokens=4,
        timed_model="tiny",
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"eviction_serving": _draw}, tables={"summary": (_summary, "%.4g")}),
    gpu="optional",
    timed=True,
)
