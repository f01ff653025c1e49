"""Serving under load: normalised latency and batched requests against the request rate.

Redoes figures 12, 13 and 17 of the PagedAttention paper (Kwon et al., SOSP 2023).  The engine
serves requests in real time.  They arrive open loop: by a Poisson process, as in the paper, or at a
trace's own times.  All systems have the same engine, kernels, block size and KV memory.  They
differ in the allocation of that memory, and so in the request rate at which the queue grows.

* ``contiguous_max``, ``contiguous_pow2``, ``contiguous_oracle``: a reservation per request, up to
  the maximum length, to the next power of two of the true output length, and to the true final
  length; a buddy allocator places them (the paper's three versions of Orca).
* ``paged``: blocks on demand, nothing shared.
* ``vllm_v1``, ``vllm_v0``, ``nano_vllm``, ``radix``: also share the K/V of equal prefixes.  They
  run on traces whose requests share prefixes (the paper's chat workload, figure 17).
* ``vllm_v1_prompts_first``: ``vllm_v1`` with steps that either compute prompts or decode, as in
  vLLM's first engine and Nano-vLLM: new requests get their first token sooner, the others wait.

Normalised latency is the mean over requests of the time from arrival to the last token, divided by
the output tokens.  The weights are random, and outputs have exactly the lengths of the trace.

All lengths of a trace are divided by one number (``length_divisor``), so that a request has
``mean_tokens`` tokens on average.  The defaults keep the paper's ratios (a maximum of 2048 tokens
to a mean of 499 on ShareGPT, a cache of about 8 sequences of the maximum) for a model with steps of
milliseconds on a laptop.  On a GPU, raise them with the model:

    python -m experiments run serving --model qwen3-0.6b --mean-tokens 512 --max-model-len 2048 \\
        --block-size 16 --sequences-in-cache 32 --duration-s 60 --request-rate 2 4 8 16 32

A cell is stopped ``drain_s`` after the arrival of its last request.  If requests are unfinished
then, it is *saturated*: they count with their time so far, so its latencies are lower bounds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from cache.serving import open_loop
from experiments import quantiles, style
from experiments.harness import (
    Axis,
    Count,
    Experiment,
    Natural,
    Positive,
    Repeated,
    grid,
    one_of,
)
from experiments.load import engine_models, workloads
from experiments.load.engine_models import Model
from experiments.load.scaled_trace import ScaledTrace, shrink
from experiments.load.workloads import LogNormalLengths, OnTraces, Source, Workload

if TYPE_CHECKING:
    from models import LLM

SYSTEMS = {
    "contiguous_max": ("contiguous (max)", style.line(style.RED, "v")),
    "contiguous_pow2": ("contiguous (pow2)", style.line(style.ORANGE, "s")),
    "contiguous_oracle": ("contiguous (oracle)", style.line(style.GREEN, "^", "dashed")),
    "paged": ("paged", style.line(style.BLUE, "o")),
    "vllm_v1": ("vllm_v1 (prefix caching)", style.line(style.BLACK, "D", "dashed")),
    "vllm_v1_prompts_first": ("vllm_v1, prompts first", style.line(style.ORANGE, "d", "dotted")),
    "radix": ("radix (prefix caching)", style.line(style.PINK, "X", "dotted")),
    "vllm_v0": ("vllm_v0 (prefix caching)", style.line(style.SKY, "P", "dashdot")),
    "nano_vllm": ("nano_vllm (prefix caching)", style.line(style.GREY, "p", "dashdot")),
}
"""Labels and lines."""
_LENGTHS_ONLY = ("contiguous_max", "contiguous_pow2", "contiguous_oracle", "paged")
_PROMPTS_FIRST = "_prompts_first"
_WITH_PREFIXES = (
    "contiguous_max",
    "contiguous_oracle",
    "paged",
    "vllm_v1",
    "vllm_v1_prompts_first",
    "radix",
)
"""Systems that run by default."""
_NUM_TRACE_REQUESTS = 2_000
"""First requests of a trace, over which ``length_divisor`` is computed; it does not depend on the
number sent."""
_NUM_WARM_UP_REQUESTS = 32


@dataclass(frozen=True, kw_only=True)
class Serving(OnTraces):
    """The grid: traces x systems x request rates."""

    system: Repeated[Axis[Annotated[str, one_of(SYSTEMS)]]] = ()
    """A manager, or contiguous_(max|pow2|oracle). None: the paper's systems, by trace."""
    request_rate: Axis[Positive] = (12.5, 25, 50, 100, 200)
    """Requests per second."""
    draw: Axis[Natural] = (0, 1, 2)
    """Runs of every point, each with its own arrivals. A draw runs for all systems before the next,
    so that a slow hour of the machine affects all of them."""
    arrivals: Literal["poisson", "trace"] = "poisson"
    """A Poisson process, or the times of the trace with their gaps scaled to the rate."""
    model: Model = "tiny"
    """A shape of engine_models."""
    threads: Count = 1
    """CPU threads of the model. More than one pays for larger ones on an idle machine."""
    mean_tokens: Positive = 256.0
    """Mean tokens of a request, prompt and output; the lengths of a trace are divided to match."""
    max_model_len: Count = 1024
    """Longest request, prompt and output; longer ones are left out."""
    block_size: Count = 4
    """Tokens per block, of all systems."""
    sequences_in_cache: Count = 8
    """KV memory of all systems, in requests of the maximum length."""
    duration_s: Positive = 4.0
    """Time in which requests arrive in each cell."""
    drain_s: Positive = 4.0
    """Time to finish them after that."""

    @property
    def group(self) -> tuple[str, ...]:
        return str(self.draw), self.trace.name, self.system


def cells(options: Serving) -> Iterator[Serving]:
    """Cells of the traces; without a trace, of chat requests with and without their histories."""
    if options.max_model_len % options.block_size:
        raise ValueError(
            f"--block-size {options.block_size}: needs a divisor of --max-model-len "
            f"{options.max_model_len}"
        )
    default = (
        LogNormalLengths(120, 240, options.seed, _NUM_TRACE_REQUESTS),
        Workload("multi_turn_chat", options.seed, _NUM_TRACE_REQUESTS),
    )
    traces = [*options.sources(_NUM_TRACE_REQUESTS, lengths_suffice=True, default=default)]
    for draw, trace in itertools.product(options.draw, traces):
        systems = options.system or _default_systems(trace)
        yield from grid(options, trace=[trace], system=systems, draw=[draw])


def _default_systems(trace: Source) -> tuple[str, ...]:
    return _WITH_PREFIXES if workloads.load(trace).has_blocks else _LENGTHS_ONLY


def run_cell(cell: Serving) -> list[dict[str, Any]]:
    without_rate = dataclasses.replace(cell, request_rate=1.0, draw=0)
    scaled = _scaled(without_rate)
    _warm_up(without_rate)
    trace = scaled.trace.head(max(1, round(cell.request_rate * cell.duration_s)))
    if cell.arrivals == "poisson":
        rng = np.random.default_rng((cell.seed, cell.draw))
        arrivals = open_loop.poisson_arrivals(cell.request_rate, len(trace), rng)
    else:
        arrivals = open_loop.scaled_arrivals(trace.timestamps_ms.tolist(), cell.request_rate)
    llm = _make_llm(cell)
    run = engine_models.serve_trace(llm, trace, arrivals, stop_s=arrivals[-1] + cell.drain_s)
    manager, requests = llm.manager, run.requests
    finished = sum(request.finished for request in requests)
    return [
        {
            "trace": trace.name,
            **cell.columns("arrivals", "system", "model", "threads", "request_rate", "draw"),
            "requests": len(requests),
            "requests_finished": finished,
            "saturated": run.saturated,
            "normalized_latency_s": float(np.mean([r.normalized_latency for r in requests])),
            "mean_batched_requests": run.mean_of_steps("running"),
            "peak_batched_requests": max(step.running for step in run.steps),
            "mean_waiting_requests": run.mean_of_steps("waiting"),
            "mean_cache_usage": run.mean_of_steps("used_blocks") / manager.num_blocks,
            "preemptions": sum(request.num_preemptions for request in requests),
            "cached_prompt_fraction": run.cached_prompt_fraction,
            "requests_per_second": finished / run.seconds,
            "output_tokens_per_second": run.generated_tokens / run.seconds,
            **quantiles.of_times("ttft", [r.time_to_first_token for r in requests]),
            **quantiles.of_times("tpot", [r.time_per_output_token for r in requests]),
            "seconds": run.seconds,
            "length_divisor": scaled.divisor,
            "requests_left_out": scaled.num_left_out,
            "mean_prompt_tokens": float(trace.input_lengths.mean()),
            "mean_output_tokens": float(trace.output_lengths.mean()),
            "cache_slots": manager.num_blocks * manager.block_size,
            **cell.columns("max_model_len", "block_size"),
        }
    ]


@functools.lru_cache(maxsize=1)
def _scaled(cell: Serving) -> ScaledTrace:
    """The requests of ``cell``; the rate does not matter."""
    return shrink(
        workloads.load(cell.trace),
        mean_tokens=cell.mean_tokens,
        max_tokens=cell.max_model_len,
        vocab_size=engine_models.model_config(cell.model).vocab_size,
    )


@functools.lru_cache(maxsize=1)
def _warm_up(cell: Serving) -> None:
    """Serve a few requests uncounted: the first requests of a process pay for its set-up."""
    trace = _scaled(cell).trace.head(_NUM_WARM_UP_REQUESTS)
    engine_models.serve_trace(_make_llm(cell), trace, [0.0] * len(trace))


def _make_llm(cell: Serving) -> LLM:
    system = cell.system.removesuffix(_PROMPTS_FIRST)
    manager, _, reservation = system.partition("contiguous_")
    options = {"reservation": reservation, "max_model_len": cell.max_model_len}
    return engine_models.make_llm(
        cell.model,
        manager=manager or "contiguous",
        manager_options={} if manager else options,
        scheduling="mixed" if system == cell.system else "prefill_first",
        num_blocks=cell.sequences_in_cache * cell.max_model_len // cell.block_size,
        **cell.columns("threads", "block_size", "max_model_len", "seed"),
    )


_LATENCY_PANELS = {
    "normalized_latency_s": "normalised latency (ms/token)",
    "mean_batched_requests": "batched requests (mean)",
}
_TOKEN_PANELS = {
    "ttft_p50_s": "time to first token, median (ms)",
    "tpot_p50_s": "time per token, median (ms)",
}


def _draw(rows: style.DataFrame, panels: dict[str, str]) -> style.Figure:
    rates = sorted(rows["request_rate"].unique())
    figure, axes, _ = style.panel_grid(
        2 * rows["trace"].nunique(), columns=2, height=2.1, width=3.5, sharex=True
    )
    for row, (_, of_trace) in enumerate(rows.groupby("trace", sort=False)):
        for axis, (column, label) in zip(axes[2 * row :], panels.items(), strict=False):
            _draw_systems(axis, of_trace, column)
            axis.set(ylabel=label, title=_title(of_trace.iloc[0]))
            style.log_x(axis, rates)
            if column.endswith("_s"):
                axis.set_yscale("log")
                style.plain_log_ticks(axis.yaxis)
            else:
                axis.set_ylim(bottom=0)
    hollow = style.line(style.BLACK, "o", fill=False) | {"linestyle": "none"}
    axes[-1].plot([], [], **hollow, label="saturated (lower bound)")
    return style.shared_legend(figure, columns=4, xlabel="request rate (requests/s)")


def _draw_systems(axis: style.Axes, rows: style.DataFrame, column: str) -> None:
    """A line per system through the medians of the draws, with bars from minimum to maximum.

    Times are in ms; white markers are points with a saturated draw.
    """
    unit = 1000 if column.endswith("_s") else 1
    for system, (label, line) in SYSTEMS.items():
        points = rows[rows["system"] == system].groupby("request_rate")
        low, median, high = (unit * points[column].quantile(q) for q in (0, 0.5, 1))
        if len(median):
            bars = {"yerr": [median - low, high - median], "elinewidth": 0.5, "capsize": 1.5}
            axis.errorbar(median.index, median, **bars, **line, label=label)
            hollow = {**line, "linestyle": "none", "markerfacecolor": "white", "zorder": 3}
            beyond = median[points["saturated"].any()]
            axis.plot(beyond.index, beyond, **hollow)


_TITLES = {"log_normal_120_240": "log-normal, 120 tokens in, 240 out"}


def _title(row: style.Series) -> str:
    divisor = row["length_divisor"]
    divided = f"{divisor:,.0f}" if divisor >= 100 else f"{divisor:.3g}"
    name = _TITLES.get(row["trace"], row["trace"].replace("_", " "))
    return name if divisor == 1 else f"{name}\nlengths divided by {divided}"


def _summary(rows: style.DataFrame) -> style.DataFrame:
    """Medians of the draws per trace and system.

    The highest measured rate at which no draw is saturated (0 if there is none), and the batched
    requests and preemptions at the highest rate of all.
    """
    points = rows.groupby(["trace", "system", "request_rate"], sort=False)
    medians = points.median(numeric_only=True).assign(saturated=points["saturated"].any())
    medians = medians.reset_index().sort_values("request_rate", kind="stable")
    medians["kept_up"] = medians["request_rate"].where(~medians["saturated"], 0.0)
    return medians.groupby(["trace", "system"], sort=False, as_index=False).agg(
        highest_rate_kept_up=("kept_up", "max"),
        requests_per_second_at_most=("requests_per_second", "max"),
        highest_rate=("request_rate", "last"),
        batched_requests_there=("mean_batched_requests", "last"),
        cached_prompt_fraction_there=("cached_prompt_fraction", "last"),
        preemptions_there=("preemptions", "last"),
    )


EXPERIMENT = Experiment(
    name="serving",
    figure="PagedAttention figs. 12, 13, 17: normalised latency, batched requests vs request rate",
    options=Serving(),
    quick=Serving(
        system=("contiguous_max", "paged", "vllm_v1"),
        request_rate=(50, 400),
        draw=(0,),
        mean_tokens=32,
        max_model_len=128,
        duration_s=0.2,
        drain_s=0.2,
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter(
        {
            "serving": functools.partial(_draw, panels=_LATENCY_PANELS),
            "serving_tokens": functools.partial(_draw, panels=_TOKEN_PANELS),
        },
        {"summary": (_summary, "%.4g")},
    ),
    gpu="optional",
    timed=True,
)
