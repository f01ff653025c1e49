"""Serving at the scale of the PagedAttention paper: request rates that memory managers sustain.

Redoes figures 12, 13, 14 and 17 of Kwon et al. (SOSP 2023): OPT-13B on an A100 40 GB, Poisson
arrivals, the paper's three kinds of contiguous reservations, and paging.  The project's scheduler
and managers serve every request, and ``GpuClock`` gives the time.  Its times were measured on a
card of 80 GB; memory-bound times are scaled by the bandwidth.

- ``sharegpt``, ``alpaca`` (figures 12, 13): one output per request.
- ``alpaca_6_samples``, ``alpaca_6_beams`` and so on (figure 14): several samples of a prompt, or a
  beam search in which beams survive by chance.  Paging shares their blocks.  With reservations each
  sample or beam computes the prompt itself; the copies that beams would need cost no time.
- ``chat`` (figure 17): a prompt is the last 1,024 tokens of a conversation with, on average, five
  earlier rounds like ShareGPT's (assumed).  K/V are not kept between rounds.

Lengths are log-normal with the paper's means; their spread is assumed.  The KV cache has 12 GB (the
paper's table 1) in blocks of 16 tokens.  At most 512 sequences run at once.

Normalised latency is the time from arrival to the last token divided by the number of output
tokens, averaged over requests.  A manager *sustains* a rate if its normalised latency is at most
0.25 s per token.  A cell raises the rate until the manager does not sustain it, then bisects the
last interval on a logarithmic scale.  ``sustained_rate`` is the middle of the final interval (0 if
the first rate was too high).  Rates are a factor of 1.05 apart (1.5 to the power 1/8), so ratios
that are equal in all draws may differ by 5 %.  Requests arrive for ``traffic`` times the latency
allowed to a mean request (10: 14 minutes of ShareGPT), and all are served.  Absolute rates depend
on the assumed host time.  Ratios depend on it much less, so compare ratios with the paper's.  The
summary gives batched requests at the highest rate, where requests wait for memory."""

from __future__ import annotations

import functools
import textwrap
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any

import numpy as np

from cache import make_manager
from cache.managers import manager_class
from cache.serving import open_loop
from experiments import style
from experiments.harness import Axis, Count, Experiment, Natural, Options, Positive, grid, one_of
from experiments.load.gpu_clock import CLOCK_DISCLAIMER, GpuClock
from experiments.load.workloads import LONGEST, PAPER_LENGTHS, draw_lengths

SYSTEMS = {
    "contiguous_max": ("contiguous (max)", style.line(style.RED, "v", "dashdot")),
    "contiguous_pow2": ("contiguous (pow2)", style.line(style.ORANGE, "s", "dotted")),
    "contiguous_oracle": ("contiguous (oracle)", style.line(style.GREEN, "^", "dashed")),
    "paged": ("paged", style.line(style.BLUE, "o")),
    "vllm_v1": ("paged, prefix shared", style.line(style.BLACK, "D", "dashed")),
}
"""Labels and lines.  ``paged`` shares blocks only within a request, ``vllm_v1`` also prefixes."""
_MANAGERS: dict[str, tuple[str, dict[str, Any]]] = {
    f"contiguous_{reservation}": ("contiguous", {"reservation": reservation})
    for reservation in ("max", "pow2", "oracle")
}
_MANAGERS |= {"paged": ("vllm_v1", {"enable_prefix_caching": False}), "vllm_v1": ("vllm_v1", {})}
"""Managers of the systems, and options."""


@dataclass(frozen=True)
class Load:
    """Requests of one kind."""

    like: str
    """Data set whose prompt and output lengths the requests resemble."""
    first_rate: float
    """Lowest rate of a cell, in requests per second."""
    sampling: tuple[str, int] = ("n", 1)
    """Argument of SamplingParams ("n" or "beam_width"), and the number of samples or beams."""
    mean_earlier_rounds: int = 0
    """Mean number of earlier turns that a prompt repeats."""
    prefix: int = 0
    """Length in tokens of a prefix that all prompts share."""
    model: str = "opt-13b"

    def draw(self, rng: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
        """Prompt lengths and output lengths of ``count`` requests, in tokens."""
        own, outputs = draw_lengths(rng, count, self.like)
        rounds = rng.geometric(1 / (1 + self.mean_earlier_rounds), count) - 1
        earlier = np.sum(draw_lengths(rng, max(1, sum(rounds)), self.like), 0)[: sum(rounds)]
        owner = np.repeat(np.arange(count), rounds)
        prompts = own + np.bincount(owner, earlier, count) + self.prefix
        return np.minimum(prompts, LONGEST).astype(int).tolist(), outputs


LOADS = {
    "sharegpt": Load("sharegpt", 0.5),
    "alpaca": Load("alpaca", 3.0),
    **{f"alpaca_{n}_samples": Load("alpaca", 9 / n, ("n", n)) for n in (2, 6)},
    **{f"alpaca_{n}_beams": Load("alpaca", 9 / n, ("beam_width", n)) for n in (2, 6)},
    "chat": Load("sharegpt", 0.3, mean_earlier_rounds=5),
    "one_shot": Load("translation", 4.0, prefix=80, model="llama-13b"),
    "five_shot": Load("translation", 4.0, prefix=341, model="llama-13b"),
}
_ALONE = ("sharegpt", "alpaca", "chat")
"""Loads for which all systems are compared."""
_PUBLISHED = ("sharegpt", "alpaca", "alpaca_6_samples", "alpaca_6_beams", "chat")
_GROWTH = 1.5
_SUSTAINED_S = 0.25
_MAX_MODEL_LEN = 2 * LONGEST
_KV_BYTES = 12e9


@dataclass(frozen=True, kw_only=True)
class Serving(Options):
    """The grid: loads x host times x draws x systems.  A cell searches the sustained rate."""

    load: Axis[Annotated[str, one_of(LOADS)]] = _PUBLISHED
    """Kind of requests: data set, samples or beams, conversations."""
    host_ms: Axis[Natural] = (0, 10)
    """Assumed milliseconds of the engine's own code per step.  Only sharegpt runs all times; the
    other loads run the last one."""
    draw: Axis[Natural] = (0, 1, 2)
    """Numbers of the repetitions.  Each draws its own requests and arrivals."""
    system: Axis[Annotated[str, one_of(SYSTEMS)]] = tuple(SYSTEMS)[:-1]
    """Managers.  Samples and beams do not run contiguous_max and contiguous_pow2."""
    traffic: Positive = 10.0
    """Duration of the arrivals, divided by the latency allowed to a mean request."""
    bisections: Count = 3
    """Number of rates tried between the last sustained rate and the first that is not."""


def cells(options: Serving) -> Iterator[Serving]:
    for load in options.load:
        hosts = options.host_ms if load == "sharegpt" else options.host_ms[-1:]
        few = {"contiguous_max", "contiguous_pow2"} if load not in _ALONE else set()
        systems = [system for system in options.system if system not in few]
        yield from grid(options, load=[load], host_ms=hosts, system=systems)


def run_cell(cell: Serving) -> list[dict[str, Any]]:
    low, high = 0.0, LOADS[cell.load].first_rate
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


def _row(cell: Serving, rate: float) -> dict[str, Any]:
    clock = clock_of(LOADS[cell.load].model, host_seconds=cell.host_ms / 1000)
    run = serve_load(cell, cell.load, cell.system, clock, rate)
    return {
        **cell.columns("load", "host_ms", "draw", "system", "traffic"),
        **columns_of(run, clock, LOADS[cell.load].sampling[1]),
        "request_rate": rate,
    }


def columns_of(run: open_loop.Run, clock: GpuClock, outputs_each: int = 1) -> dict[str, Any]:
    """Columns of a row that describe a run on the clock."""
    latencies = np.array([request.normalized_latency for request in run.requests], float)
    return {
        "model": clock.model,
        "gpu": clock.gpu,
        "requests": len(run.requests),
        "normalized_latency_s": float(np.mean(latencies)),
        "mean_batched_requests": run.mean_of_steps("running") / outputs_each,
        "preemptions": sum(request.num_preemptions for request in run.requests),
        "mean_step_s": run.busy_seconds / len(run.steps),
        "mean_prompt_tokens": float(np.mean([r.num_prompt_tokens for r in run.requests])),
        "mean_output_tokens": float(np.mean([r.max_tokens for r in run.requests])),
        "cached_prompt_fraction": run.cached_prompt_fraction,
        "cache_slots": clock.block_size * num_blocks(clock),
        "basis": CLOCK_DISCLAIMER,
    }


_CARD: dict[str, Any] = {"gpu": "A100-SXM-40GB", "max_num_seqs": 512}
clock_of = functools.cache(functools.partial(GpuClock, **_CARD, max_num_batched_tokens=2560))
"""Function of a model and options of ``GpuClock``: the clock of the paper's card."""


def num_blocks(clock: GpuClock) -> int:
    """Number of blocks of the KV cache."""
    return int(_KV_BYTES / (clock.block_size * clock.kv_bytes_per_token))


def serve_load(
    cell: Any, name: str, system: str, clock: GpuClock, rate: float, **options: Any
) -> open_loop.Run:
    """Serve requests of the load ``name`` of LOADS, which arrive at ``rate`` per second.

    cell: has ``seed``, ``draw`` and ``traffic``."""
    load, rng = LOADS[name], np.random.default_rng((cell.seed, cell.draw))
    mean_output = PAPER_LENGTHS[load.like][1][0]
    count = max(1, round(rate * cell.traffic * _SUSTAINED_S * mean_output))
    lengths, outputs = load.draw(rng, count)
    prefix = array("I", bytes(4 * load.prefix))
    prompts = [
        prefix + array("I", [1 + number]) * (length - load.prefix)
        for number, length in enumerate(lengths)
    ]
    arrivals = open_loop.poisson_arrivals(rate, count, rng)
    argument, outputs_each = load.sampling
    if not manager_class(_MANAGERS[system][0]).can_fork:
        argument = "n"  # samples replace beams
    sampling = {argument: outputs_each}
    return serve(system, clock, prompts, outputs, arrivals, sampling=sampling, **options)


def serve(
    system: str,
    clock: GpuClock,
    prompts: Sequence[Sequence[int]],
    outputs: list[int],
    arrivals: list[float],
    *,
    sampling: dict[str, int] | None = None,
    **options: Any,
) -> open_loop.Run:
    """Serve these requests with one manager.  options: options of ``Scheduler``."""
    sizes: dict[str, Any] = {"num_blocks": num_blocks(clock), "block_size": clock.block_size}
    name, own = _MANAGERS[system]
    if manager_class(name).reserves:
        sizes["max_model_len"] = _MAX_MODEL_LEN
        sizes["final_length"] = attrgetter("max_num_tokens")
    engine = open_loop.engine_without_model(
        make_manager(name, **sizes, **own),
        max_num_seqs=clock.max_num_seqs,
        max_num_batched_tokens=clock.max_num_batched_tokens,
        max_model_len=_MAX_MODEL_LEN + 1,
        **options,
    )
    return open_loop.serve(
        engine, prompts, outputs, arrivals, service=clock, sampling=sampling or {}
    )


_POINT = ["load", "host_ms", "draw"]


def summary(rows: style.DataFrame) -> style.DataFrame:
    """Medians over the draws, and the range over the draws of the ratios of sustained rates."""
    busiest = rows.loc[rows.groupby([*_POINT, "system"], sort=False)["request_rate"].idxmax()]
    for baseline in ("oracle", "max"):
        rates = busiest[busiest["system"] == f"contiguous_{baseline}"]
        rates = rates.set_index(_POINT)["sustained_rate"].reindex(busiest.set_index(_POINT).index)
        busiest[f"over_{baseline}"] = busiest["sustained_rate"] / rates.to_numpy()
    return busiest.groupby(["load", "host_ms", "system"], sort=False, as_index=False).agg(
        sustained_rate=("sustained_rate", "median"),
        over_oracle=("over_oracle", "median"),
        over_oracle_least=("over_oracle", "min"),
        over_oracle_most=("over_oracle", "max"),
        over_max=("over_max", "median"),
        over_max_least=("over_max", "min"),
        over_max_most=("over_max", "max"),
        batched_requests=("mean_batched_requests", "median"),
        basis=("basis", "first"),
    )


def draw(rows: style.DataFrame) -> style.Figure:
    """Draw latency against the rate, with a panel per load and host time."""
    panels = rows.groupby(["load", "host_ms"], sort=False)
    width = 7.0 / min(2, len(panels))
    figure, axes, _ = style.panel_grid(len(panels), columns=2, height=1.9, width=width)
    for axis, ((load, host_ms), points) in zip(axes, panels, strict=True):
        for system, (label, look) in SYSTEMS.items():
            _draw_latency(axis, points[points["system"] == system], label=label, **look)
        axis.axhline(_SUSTAINED_S, **style.BOUND)
        name = points["model"].iloc[0].upper()
        axis.set(title=f"{name}, {load.replace('_', ' ')}, host {host_ms:g} ms", yscale="log")
        axis.set_xscale("log")
        style.plain_log_ticks(axis.xaxis)
        style.plain_log_ticks(axis.yaxis)
    notes = "Median and range of the draws. "
    if rows["load"].str.endswith("beams").any():
        notes += "Reservations serve beams as samples, so both loads have one curve for oracle. "
    notes += f"The card: an A100 of 80 GB, scaled by bandwidth to 40 GB. {CLOCK_DISCLAIMER}"
    xlabel = noted(figure, "request rate (requests/s)", notes)
    ylabel = "normalised latency (s/token)"
    return style.shared_legend(figure, columns=4, xlabel=xlabel, ylabel=ylabel)


def _draw_latency(axis: style.Axes, rows: style.DataFrame, **look: Any) -> None:
    """Draw the median latency of the draws, and a band from the smallest to the largest.

    Latencies between two rates of a draw are interpolated.  Above its last rate, which it does not
    sustain, a draw's latency counts as infinite."""
    at, latency = np.log(rows["request_rate"]).round(6), np.log(rows["normalized_latency_s"])
    rates = np.unique(at)
    draws = [
        np.interp(rates, at[of_draw.index], latency[of_draw.index], right=np.inf)
        for _, of_draw in rows.sort_values("request_rate").groupby("draw")
    ]
    if not draws:
        return
    axis.plot(np.exp(rates), np.exp(np.median(draws, axis=0)), **look)
    band = np.exp(np.clip([np.min(draws, axis=0), np.max(draws, axis=0)], None, latency.max()))
    axis.fill_between(np.exp(rates), *band, color=look["color"], alpha=0.2, linewidth=0)


def noted(figure: style.Figure, label: str, notes: str = CLOCK_DISCLAIMER) -> str:
    """The label, and below it the notes in lines that fit the width of ``figure``."""
    return f"{label}\n{textwrap.fill(notes, int(13 * figure.get_figwidth()))}".strip()


QUICK: dict[str, Any] = {"host_ms": (10,), "draw": (0,), "traffic": 0.2, "bisections": 1}
"""Options for a search that takes about a second."""

EXPERIMENT = Experiment(
    name="serving",
    figure="PagedAttention figs. 12, 13, 14, 17: sustained rates of OPT-13B, A100 40 GB modelled",
    options=Serving(),
    quick=Serving(load=("sharegpt", "alpaca", "alpaca_6_beams", "chat"), **QUICK),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"serving": draw}, {"summary": (summary, "%.4g")}),
)
