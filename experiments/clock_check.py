"""The sum of measured operations, against an engine that computes every step.

``GpuClock`` adds up times of operations on GPUs that are not here.  This experiment makes the same
clock of operations on this CPU, and serves the same requests twice: by the engine on it, and by the
engine with the model, whose time is counted.  So it says how far the clock's arithmetic goes wrong:
batches of unequal contexts, chunks of prompts beside decoding sequences, interpolation.

Attention and the LM head are timed apart from the rest of a step (products, norms, sampling and the
engine's own code), each by its sizes.  Time is that of the process's one thread on the processor,
which is also what passes on an idle machine.

Lengths are like Alpaca's; requests arrive by a Poisson process at ``load`` times the rate that full
batches could decode, and the clock is judged by the mean normalised latency and the output tokens
per second.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from cache import make_manager
from cache.serving import open_loop
from cache.serving.scheduler import Step
from experiments import gpu_times, style
from experiments.harness import Axis, Count, Experiment, Natural, Options, Positive
from experiments.load import engine_models
from experiments.load.engine_models import Model
from experiments.load.gpu_clock import GpuClock
from experiments.load.workloads import draw_lengths

if TYPE_CHECKING:
    from models import LLM

_BATCHES, _CONTEXTS = (1, 2, 4, 8, 16), (16, 64, 256, 1024)
_MOST_TOKENS = 2048
"""Tokens of the largest batch that is timed: larger ones are taken in proportion."""
_LIMITS = {"max_num_seqs": _BATCHES[-1], "max_num_batched_tokens": _MOST_TOKENS}
_MAX_MODEL_LEN = 2048
_MANAGER = {"num_blocks": 2048, "block_size": 16, "enable_prefix_caching": False}


@dataclass(frozen=True, kw_only=True)
class ClockCheck(Options):
    """The grid: loads x draws."""

    model: Model = "llama-100m"
    """A shape of engine_models."""
    load: Axis[Positive] = (0.3, 0.5, 0.7)
    """Rate of the requests, over that of full batches that only decode."""
    draw: Axis[Natural] = (0, 1)
    """Runs of every point, each with its own requests and arrivals."""
    requests: Count = 30
    """Requests of a run."""

    @property
    def group(self) -> tuple[str, ...]:
        return (self.model,)


class ProcessorTime:
    """Counts the time of this thread on the processor from one step to the next."""

    max_num_seqs, max_num_batched_tokens = _LIMITS.values()

    def __init__(self) -> None:
        self._last = time.thread_time()

    def duration(self, step: Step) -> float:
        now = time.thread_time()
        self._last, last = now, self._last
        return now - last


class CpuClock(GpuClock):
    """The clock of operations of ``llm`` that are timed on this CPU, now."""

    def __init__(self, llm: LLM) -> None:
        config = llm.config
        self.max_num_seqs, self.max_num_batched_tokens = _LIMITS.values()
        self.tensor_parallel, self.block_size = 1, _MANAGER["block_size"]
        self.host_seconds = self.transfer_seconds = 0.0  # part of the rest of a step
        self._shape = SimpleNamespace(
            layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )
        self._card = SimpleNamespace(bandwidth=np.inf, host_bandwidth=np.inf)
        self._slow, self._folds = 1.0, 1
        times = _timed_operations(llm)
        self._prefill, self._decode = (
            _grid(phase, times[phase], ("batch_size", "context_tokens"))
            for phase in ("prefill", "decode")
        )
        self._dense = _by_number(times["rest"], self.max_num_batched_tokens)
        self._head = _by_number(times["head"], self.max_num_seqs)
        self._longest = _CONTEXTS[-1]
        self._floor = 0.0  # kernels are not launched
        self._share = functools.cache(self._tabulate_share)


def _grid(name: str, times: dict[Any, list[float]], axes: tuple[str, ...]) -> gpu_times.Grid:
    import pandas as pd

    index = pd.MultiIndex.from_tuples(sorted(times), names=axes)
    return gpu_times.Grid(name, pd.Series([np.median(times[at]) for at in index], index))


def _by_number(times: dict[int, list[float]], most: int) -> np.ndarray:
    """Seconds of 0 to ``most`` tokens or rows, interpolated."""
    known = sorted(times)
    seconds = np.interp(range(1, most + 1), known, [np.median(times[at]) for at in known])
    return np.append(0.0, seconds)


def _timed_operations(llm: LLM) -> dict[str, dict[Any, list[float]]]:
    """Seconds of operations in steps of equal sequences, by their sizes.

    ``prefill`` and ``decode``: attention of one layer, by batch and context.  ``head``: by rows.
    ``rest``: all else, by tokens.
    """
    # The first run of a process takes 0.1 s longer.
    open_loop.serve(llm.engine, [[1] * _CONTEXTS[0]], [10], [0.0], service=ProcessorTime())
    model, attention, head = llm.model, [], []
    layers = [layer.self_attn for layer in model.model.layers]
    backends, logits = [layer.backend for layer in layers], model.logits
    for layer in layers:
        layer.backend = _timed(layer.backend, attention)
    model.logits = _timed(logits, head)
    times = {name: defaultdict(list) for name in ("prefill", "decode", "head", "rest")}
    for context, batch in itertools.product(2 * _CONTEXTS, _BATCHES):
        if batch * context > _MOST_TOKENS:
            continue
        attention.clear(), head.clear()
        prompts, lengths, arrivals = [[1] * context] * batch, [10] * batch, [0.0] * batch
        run = open_loop.serve(llm.engine, prompts, lengths, arrivals, service=ProcessorTime())
        of_layer = np.reshape(attention, (len(run.steps), len(layers))).mean(1)
        rest = [step.seconds for step in run.steps] - len(layers) * of_layer - head
        times["prefill"][batch, context].append(of_layer[0])
        times["decode"][batch, context].extend(of_layer[1:])
        times["head"][batch].extend(head)
        times["rest"][batch * context].append(rest[0])
        times["rest"][batch].extend(rest[1:])
    model.logits = logits
    for layer, backend in zip(layers, backends, strict=True):
        layer.backend = backend
    return times


def _timed(call: Callable, spent: list[float]) -> Callable:
    def timed(*arguments: Any) -> Any:
        begin = time.thread_time()
        result = call(*arguments)
        spent.append(time.thread_time() - begin)
        return result

    return timed


@functools.lru_cache(maxsize=1)
def _engine_and_clock(model: str, seed: int) -> tuple[LLM, CpuClock]:
    limits = {**_LIMITS, "max_model_len": _MAX_MODEL_LEN}
    llm = engine_models.make_llm(
        model, threads=1, manager="vllm_v1", seed=seed, **_MANAGER, **limits
    )
    return llm, CpuClock(llm)


def run_cell(cell: ClockCheck) -> list[dict[str, Any]]:
    llm, clock = _engine_and_clock(cell.model, cell.seed)
    rng = np.random.default_rng((cell.seed, cell.draw))
    prompts, outputs = draw_lengths(rng, cell.requests, "alpaca")
    full = clock.max_num_seqs / clock.seconds([64] * clock.max_num_seqs)
    rate = cell.load * full / float(np.mean(outputs))
    arrivals = open_loop.poisson_arrivals(rate, cell.requests, rng)
    tokens = [rng.integers(llm.config.vocab_size, size=length).tolist() for length in prompts]
    without_model = open_loop.engine_without_model(
        make_manager("vllm_v1", **_MANAGER), max_model_len=_MAX_MODEL_LEN, **_LIMITS
    )
    row = {**cell.columns("model", "load", "draw", "requests"), "request_rate": rate}
    for name, engine, service in (
        ("computed", llm.engine, ProcessorTime()),
        ("clock", without_model, clock),
    ):
        run = open_loop.serve(engine, tokens, outputs, arrivals, service=service)
        latencies = [request.normalized_latency for request in run.requests]
        row[f"{name}_normalized_latency_s"] = float(np.mean(latencies))
        row[f"{name}_output_tokens_per_second"] = run.generated_tokens / run.seconds
        row[f"{name}_mean_batched_requests"] = run.mean_of_steps("running")
    for column in ("normalized_latency_s", "output_tokens_per_second"):
        row[f"{column}_error"] = row[f"clock_{column}"] / row[f"computed_{column}"] - 1
    return [row]


def _draw(rows: style.DataFrame) -> style.Figure:
    columns = {
        "normalized_latency_s": ("normalised latency (ms/token)", 1000),
        "output_tokens_per_second": ("output tokens/s", 1),
    }
    figure, axes, _ = style.panel_grid(2, columns=2, height=2.6, width=3.5)
    for axis, (column, (title, unit)) in zip(axes, columns.items(), strict=True):
        looks = style.lines_of(f"load {load:g}" for load in sorted(rows["load"].unique()))
        for (_, some), look in zip(rows.groupby("load"), looks.values(), strict=True):
            x, y = unit * some[f"computed_{column}"], unit * some[f"clock_{column}"]
            axis.plot(x, y, **{**look, "linestyle": "none"})
        ends = np.array(axis.get_xlim())
        axis.plot(ends, ends, **style.BOUND)
        axis.fill_between(ends, 0.9 * ends, 1.1 * ends, color=style.GREY, alpha=0.2, linewidth=0)
        worst = 100 * rows[f"{column}_error"].abs().max()
        axis.set(title=f"{title}: largest |error| {worst:.1f} %", xlim=ends)
    labels = {"xlabel": f"computed: {rows['model'].iloc[0]} on one processor; band: 10 %"}
    return style.shared_legend(figure, ylabel="on the clock", **labels)


EXPERIMENT = Experiment(
    name="clock_check",
    figure="an engine on a clock of operations timed on this CPU, beside the engine with a model",
    options=ClockCheck(),
    quick=ClockCheck(model="tiny", load=(0.5,), draw=(0,), requests=20),
    run_cell=run_cell,
    plot=style.plotter({"clock_check": _draw}),
    timed=True,
)
