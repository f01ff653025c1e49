"""Serving at the scale of the PagedAttention paper: rates that memory managers sustain.

Redoes figures 12a, 12b and 13 of Kwon et al. (SOSP 2023): OPT-13B on an A100 40 GB, requests with
lengths like ShareGPT's and Alpaca's, Poisson arrivals, the paper's three kinds of contiguous
reservations and paging.  The project's scheduler and managers serve every request, and ``GpuClock``
gives the time: the measured card has 80 GB, and what its memory bounds is scaled by the bandwidth.

Lengths are log-normal with the paper's means; their spread is assumed.  The KV cache has 12 GB (the
paper's table 1) in blocks of 16 tokens, and a request at most 2,048 tokens.

Normalised latency is the mean over requests of the time from arrival to the last token, divided by
the output tokens.  A manager *sustains* a rate at which it is at most 0.25 s a token.  A cell
raises the rate until it does not, and bisects the last interval on a logarithmic scale; its middle
is the ``sustained_rate`` (0 if the first rate was too high).  Requests arrive for ``traffic`` times
the latency allowed to a mean request (10: 14 minutes of ShareGPT), and all are served.  Absolute
rates hang on the assumed host time.  Ratios do much less: compare these with the paper's.  The
summary has the batched requests at the highest rate, where requests wait for memory.
"""

from __future__ import annotations

import functools
import textwrap
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from cache import make_manager
from cache.serving import open_loop
from experiments import serving, style
from experiments.harness import Axis, Count, Experiment, Natural, Options, Positive, one_of
from experiments.load.gpu_clock import HONEST, GpuClock

_LENGTHS = {
    # Mean prompt and output tokens (the paper's figure 11), and assumed sigmas.
    "sharegpt": ((161.31, 1.25), (337.99, 0.95)),
    "alpaca": ((19.31, 0.6), (58.45, 1.0)),
}
_FIRST_RATE = {"sharegpt": 0.5, "alpaca": 3.0}
_GROWTH = 1.5
_SYSTEMS = ("contiguous_max", "contiguous_pow2", "contiguous_oracle", "paged")
_SUSTAINED_S = 0.25
_MAX_MODEL_LEN = 2048
_KV_BYTES = 12e9


@dataclass(frozen=True, kw_only=True)
class PaperServing(Options):
    """The grid: lengths x host times x draws x systems; a cell looks for the rate."""

    lengths: Axis[Annotated[str, one_of(_LENGTHS)]] = tuple(_LENGTHS)
    """The data set whose lengths requests resemble."""
    host_ms: Axis[Natural] = (0, 10)
    """Assumed time of the engine's own code in each step."""
    draw: Axis[Natural] = (0, 1, 2)
    """Runs of every point, each with its own requests and arrivals."""
    system: Axis[Annotated[str, one_of(_SYSTEMS)]] = _SYSTEMS
    traffic: Positive = 10.0
    """Time in which requests arrive, in latencies allowed to a mean request."""
    bisections: Count = 3
    """Rates between the last that is sustained and the first that is not."""


def run_cell(cell: PaperServing) -> list[dict[str, Any]]:
    low, high = 0.0, _FIRST_RATE[cell.lengths]
    rows = [_row(cell, high)]
    while _sustains(rows[-1]):
        low, high = high, high * _GROWTH
        rows.append(_row(cell, high))
    for _ in range(cell.bisections if low else 0):
        middle = (low * high) ** 0.5
        rows.append(_row(cell, middle))
        low, high = (middle, high) if _sustains(rows[-1]) else (low, middle)
    return [{**row, "sustained_rate": (low * high) ** 0.5} for row in rows]


def _sustains(row: dict[str, Any]) -> bool:
    return row["normalized_latency_s"] <= _SUSTAINED_S


def _row(cell: PaperServing, rate: float) -> dict[str, Any]:
    rng = np.random.default_rng((cell.seed, cell.draw))
    mean_output = _LENGTHS[cell.lengths][1][0]
    count = max(1, round(rate * cell.traffic * _SUSTAINED_S * mean_output))
    prompts, outputs = (draw_lengths(rng, count, *of) for of in _LENGTHS[cell.lengths])
    arrivals = open_loop.poisson_arrivals(rate, count, rng)
    clock = _clock(cell.host_ms)
    run = serve(cell.system, clock, prompts, outputs, arrivals)
    return {
        **cell.columns("lengths", "host_ms", "draw", "system", "traffic"),
        "model": clock.model,
        "gpu": clock.gpu,
        "request_rate": rate,
        "requests": count,
        "normalized_latency_s": float(np.mean([r.normalized_latency for r in run.requests])),
        "mean_batched_requests": run.mean_of_steps("running"),
        "preemptions": sum(request.num_preemptions for request in run.requests),
        "mean_step_s": run.busy_seconds / len(run.steps),
        "mean_prompt_tokens": float(np.mean(prompts)),
        "mean_output_tokens": float(np.mean(outputs)),
        "cache_slots": clock.block_size * _num_blocks(clock),
        "basis": HONEST,
    }


def draw_lengths(rng: np.random.Generator, count: int, mean: float, sigma: float) -> list[int]:
    """Log-normal numbers of tokens, at most half of the longest request, with exactly this mean."""
    tokens = np.exp(sigma * rng.standard_normal(count))
    for _ in range(50):  # clipping lowers the mean
        tokens *= mean / np.clip(tokens, 1, _MAX_MODEL_LEN // 2).mean()
    return np.clip(np.rint(tokens), 1, _MAX_MODEL_LEN // 2).astype(int).tolist()


@functools.cache
def _clock(host_ms: int) -> GpuClock:
    return GpuClock(
        "opt-13b", "A100-SXM-40GB", host_seconds=host_ms / 1000, max_num_batched_tokens=2560
    )


def serve(
    system: str,
    clock: GpuClock,
    prompts: list[int],
    outputs: list[int],
    arrivals: list[float],
    *,
    prefill_first: bool = False,
) -> open_loop.Run:
    """Serve requests of these lengths by one manager."""
    sizes = {"num_blocks": _num_blocks(clock), "block_size": clock.block_size}
    design, _, reservation = system.partition("_")
    if reservation:
        sizes |= {"reservation": reservation, "max_model_len": _MAX_MODEL_LEN}
        sizes["final_length"] = lambda seq: seq.num_prompt_tokens + seq.request.max_tokens
    engine = open_loop.engine_without_model(
        make_manager(design, **sizes),
        max_num_seqs=clock.max_num_seqs,
        max_num_batched_tokens=clock.max_num_batched_tokens,
        max_model_len=_MAX_MODEL_LEN + 1,
    )
    engine.scheduler.prefill_first = prefill_first
    return open_loop.serve(engine, list(map(bytes, prompts)), outputs, arrivals, service=clock)


def _num_blocks(clock: GpuClock) -> int:
    return int(_KV_BYTES / (clock.block_size * clock.kv_bytes_per_token))


def _summary(rows: style.DataFrame) -> style.DataFrame:
    """Medians of the draws, with the range of the ratios."""
    cells = rows.groupby(["lengths", "host_ms", "draw", "system"], sort=False)
    busiest = rows.loc[cells["request_rate"].idxmax()]
    paged = busiest[busiest["system"] == "paged"]
    paged = paged[["lengths", "host_ms", "draw", "sustained_rate"]]
    on_paged = busiest.merge(
        paged, how="left", on=["lengths", "host_ms", "draw"], suffixes=("", "_of_paged")
    )
    on_paged["ratio"] = on_paged["sustained_rate_of_paged"] / on_paged["sustained_rate"]
    return on_paged.groupby(["lengths", "host_ms", "system"], sort=False, as_index=False).agg(
        sustained_rate=("sustained_rate", "median"),
        paged_over_this=("ratio", "median"),
        paged_over_this_least=("ratio", "min"),
        paged_over_this_most=("ratio", "max"),
        batched_requests=("mean_batched_requests", "median"),
        basis=("basis", "first"),
    )


def _draw(rows: style.DataFrame) -> style.Figure:
    panels = rows.groupby(["lengths", "host_ms"], sort=False)
    figure, axes, _ = style.panel_grid(len(panels), columns=2, height=2.1, width=3.5)
    for axis, ((lengths, host_ms), points) in zip(axes, panels, strict=True):
        for system, (label, look) in serving.SYSTEMS.items():
            of_system = points[points["system"] == system]
            for _, of_draw in of_system.groupby("draw"):
                style.curve(
                    axis, of_draw, "request_rate", "normalized_latency_s", label=label, **look
                )
        axis.axhline(_SUSTAINED_S, **style.BOUND)
        axis.set(title=f"OPT-13B, {lengths}-like, host {host_ms:g} ms", yscale="log")
        axis.set_ylabel("normalised latency (s/token)")
        style.log_x(axis, (0.5, 1, 2, 4) if lengths == "sharegpt" else (3, 6, 12, 24, 48))
        style.plain_log_ticks(axis.yaxis)
    notes = f"The card: the measured one of 80 GB, scaled by bandwidth. {HONEST}"
    xlabel = "request rate (requests/s); a line a draw\n"
    xlabel += textwrap.fill(notes, int(13 * figure.get_figwidth()))
    return style.shared_legend(figure, columns=4, xlabel=xlabel)


EXPERIMENT = Experiment(
    name="paper_serving",
    figure="PagedAttention figs. 12, 13 at their scale: OPT-13B on a modelled A100 40 GB",
    options=PaperServing(),
    quick=PaperServing(
        lengths=("sharegpt",),
        host_ms=(0,),
        draw=(0,),
        system=("contiguous_max", "paged"),
        traffic=0.5,
        bisections=1,
    ),
    run_cell=run_cell,
    plot=style.plotter({"paper_serving": _draw}, {"summary": (_summary, "%.4g")}),
)
