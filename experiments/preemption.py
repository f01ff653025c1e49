"""Preemption by swapping K/V to host memory or by recomputing them.

Redoes figure 19 of the PagedAttention paper (Kwon et al., SOSP 2023) on the engine.

- ``cost``: one sequence, by context length and block size.  ``ModelRunner`` swaps its blocks out
  and in, and recomputes all its tokens as one prompt, as for a resumed sequence.
- ``serving``: requests that arrive together, in a cache that is too small for them, served in both
  preemption modes.  Normalised latency is the mean over requests of the time from arrival to the
  last token, divided by the output tokens.  The cache has a fixed number of tokens; prefix caching
  is off, as in the paper.  The lengths alone determine which sequences are preempted, so each draw
  has its own requests; both modes serve the same requests and are compared draw by draw.

On a GPU the blocks cross the bus to pinned memory.  Without one the "device" is host memory too,
and swapping is a copy from host to host: such times say nothing about a GPU.  The sizes suit a
model on a CPU.  On a GPU, raise them:

    python -m experiments run preemption --context-tokens 4096 16384 --cache-tokens 49152 \\
        --requests 64 --prompt-tokens 512 2048 --output-tokens 256 768
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import quantiles, style
from experiments.harness import Axis, Count, Experiment, Lengths, grid
from experiments.load import engine_models
from experiments.load.engine_models import EngineOptions, Manager

if TYPE_CHECKING:
    from models import LLM

_LINES = {
    "recompute": style.line(style.BLUE, "o") | {"label": "recompute"},
    "swap": style.line(style.ORANGE, "s", "dashed") | {"label": "swap out and in"},
    "swap_out": style.line(style.GREEN, "^", "dashdot") | {"label": "swap out"},
    "swap_in": style.line(style.RED, "v", "dotted", fill=False) | {"label": "swap in"},
}
_WAYS = ("recompute", "swap")


@dataclass(frozen=True, kw_only=True)
class _Engines(EngineOptions):
    block_size: Axis[Count] = (1, 4, 16, 64, 256)
    """Tokens per block."""


@dataclass(frozen=True, kw_only=True)
class Cost(_Engines):
    context_tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Serving(_Engines):
    manager: str
    cache_tokens: int
    requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Preemption(_Engines):
    """The grid: block sizes x context lengths, and block sizes x preemption modes."""

    manager: Manager = "vllm_v1"
    """Cache manager of ``serving``."""
    context_tokens: Axis[Count] = (256, 1024)
    """Lengths of the sequences of ``cost``."""
    cache_tokens: Count = 768
    """Token slots of the cache of ``serving``."""
    requests: Count = 12
    """Requests per draw."""
    prompt_tokens: Lengths = (32, 128)
    """Fewest and most tokens of a prompt, drawn uniformly."""
    output_tokens: Lengths = (32, 96)
    """Fewest and most tokens of an output."""
    draws: Count = 6
    """Draws of the requests."""


def cells(options: Preemption) -> Iterator[Cost | Serving]:
    longest = options.prompt_tokens[1] + options.output_tokens[1]
    for block_size in options.block_size:
        if options.cache_tokens // block_size < -(-longest // block_size):
            raise ValueError(
                f"--cache-tokens {options.cache_tokens}: does not hold a request of {longest} "
                f"tokens in blocks of {block_size}"
            )
    model = options.model or engine_models.default_model()
    yield from grid(options, Cost, model=model)
    yield from grid(options, Serving, model=model, repeats=options.draws)


def run_cell(cell: Cost | Serving) -> list[dict[str, Any]]:
    measure = _cost if isinstance(cell, Cost) else _serving
    llm, rows = measure(cell)
    return [{**cell.describe(llm), **row} for row in rows]


def _cost(cell: Cost) -> tuple[LLM, list[dict[str, Any]]]:
    from models import SamplingParams

    longest = max(cell.context_tokens)
    num_blocks = longest // cell.block_size + 1
    llm = cell.make_llm(
        enable_prefix_caching=False,
        num_blocks=num_blocks,
        num_host_blocks=num_blocks,
        preemption="swap",
        max_num_seqs=1,
        max_num_batched_tokens=longest,
    )
    engine = llm.engine
    generator = np.random.default_rng(cell.seed)
    rows = []
    for length in cell.context_tokens:
        spans = []
        for _ in range(1 + cell.repeats):  # the first is not counted: kernels are compiled there
            tokens = engine_models.random_tokens(llm, generator, length)
            request_id = engine.add(tokens, SamplingParams(max_tokens=1))
            spans.append(sequence_costs(llm))
            engine.abort(request_id)
        blocks = -(-length // cell.block_size)
        size = blocks * llm.config.kv_block_bytes(cell.block_size, llm.dtype) / 2**20
        rows += [
            {
                "part": "cost",
                "way": way,
                "context_tokens": length,
                "blocks": blocks,
                "mebibytes": size,
                **quantiles.columns("ms", [1e3 * spent[way] for spent in spans[1:]]),
            }
            for way in _LINES
        ]
    return llm, rows


def sequence_costs(llm: LLM) -> dict[str, float]:
    """Seconds of computing the one waiting prompt of ``llm`` at once, and of swapping its blocks.

    On a GPU until the work is complete.
    """
    import torch

    from cache.serving.scheduler import Step

    engine = llm.engine
    runner, manager = engine.runner, engine.manager

    def timed(step: Step) -> float:
        begin = time.perf_counter()
        runner.run(step, manager)
        if llm.device.type == "cuda":
            torch.cuda.synchronize(llm.device)
        return time.perf_counter() - begin

    step = engine.scheduler.schedule()
    [seq] = step.sequences
    blocks = manager.block_table(seq)
    spent = {
        "recompute": timed(step),
        "swap_out": timed(Step(swap_out=[(block, host) for host, block in enumerate(blocks)])),
        "swap_in": timed(Step(swap_in=list(enumerate(blocks)))),
    }
    return {**spent, "swap": spent["swap_out"] + spent["swap_in"]}


def _serving(cell: Serving) -> tuple[LLM, list[dict[str, Any]]]:
    num_blocks = cell.cache_tokens // cell.block_size
    longest = cell.prompt_tokens[1] + cell.output_tokens[1]
    llms = {
        way: cell.make_llm(
            manager=cell.manager,
            enable_prefix_caching=False,
            num_blocks=num_blocks,
            num_host_blocks=cell.requests * -(-longest // cell.block_size),
            preemption=way,
            max_num_seqs=cell.requests,
        )
        for way in _WAYS
    }
    served: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
    for draw in range(cell.repeats):
        generator = np.random.default_rng([cell.seed, draw])
        prompt_lengths, output_lengths = (
            generator.integers(least, most, size=cell.requests, endpoint=True).tolist()
            for least, most in (cell.prompt_tokens, cell.output_tokens)
        )
        prompts = [
            engine_models.random_tokens(llms["swap"], generator, length)
            for length in prompt_lengths
        ]
        for way in _WAYS if draw % 2 else _WAYS[::-1]:
            if draw == 0 and llms[way].device.type == "cuda":  # kernels are compiled there
                _serve(llms[way], prompts, output_lengths)
            served[way].append(_serve(llms[way], prompts, output_lengths))
    rows = []
    for way, draws in served.items():
        latencies, theirs = (
            np.array([draw["latency"] for draw in of_way])
            for of_way in (draws, served["recompute"])
        )
        totals = ("requests", "tokens", "output_tokens", "preemptions", "swapped_tokens")
        rates = [draw["output_tokens"] / draw["seconds"] for draw in draws]
        rows.append(
            {
                "part": "serving",
                "way": way,
                "cache_tokens": num_blocks * cell.block_size,
                **{name: sum(draw[name] for draw in draws) for name in totals},
                **quantiles.columns("output_tokens_per_second", rates),
                **quantiles.columns("normalized_latency_ms", 1e3 * latencies),
                **quantiles.columns("latency_over_recompute", latencies / theirs),
            }
        )
    return llms["swap"], rows


def _serve(llm: LLM, prompts: list[list[int]], output_lengths: list[int]) -> dict[str, float]:
    """Seconds of serving the requests, and the preemptions meanwhile."""
    from models import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        for length in output_lengths
    ]
    stats = [output.stats for output in llm.generate(prompts, params)]
    spans = [s.finish_time - s.arrival_time for s in stats]
    return {
        "seconds": max(s.finish_time for s in stats) - stats[0].arrival_time,
        "latency": float(np.mean(np.divide(spans, output_lengths))),
        "requests": len(prompts),
        "tokens": sum(map(len, prompts)) + sum(output_lengths),
        "output_tokens": sum(output_lengths),
        "preemptions": sum(s.num_preemptions for s in stats),
        "swapped_tokens": sum(s.num_swapped_tokens for s in stats),
    }


def _draw(rows: style.DataFrame) -> style.Figure:
    costs, serving = rows[rows["part"] == "cost"], rows[rows["part"] == "serving"]
    lengths = sorted(costs["context_tokens"].unique()) if len(costs) else []
    num_panels = len(lengths) + 2 * bool(len(serving))
    figure, axes, _ = style.panel_grid(num_panels, height=2.1, width=3.5, columns=2)
    for axis, length in zip(axes, lengths, strict=False):
        _draw_costs(axis, costs[costs["context_tokens"] == length])
    if len(serving):
        _draw_serving(*axes[-2:], serving)
    for axis in axes:
        style.log_x(axis, base=4)
        axis.set_xlabel("block size (tokens)")
        axis.legend()
    return figure


def _draw_costs(axis: style.Axes, rows: style.DataFrame) -> None:
    for way, line in _LINES.items():
        quantiles.error_bars(axis, rows[rows["way"] == way], "block_size", "ms", **line)
    row = rows.iloc[0]
    where = "host to host" if row["device"] == "cpu" else "GPU to host"
    axis.set(
        title=f"sequence of {row['context_tokens']:,.0f} tokens; swapping {where}",
        yscale="log",
        ylabel="time (ms)",
    )


def _draw_serving(latency: style.Axes, ratio: style.Axes, rows: style.DataFrame) -> None:
    for way, curve in rows.groupby("way", sort=False):
        look = {**_LINES[way], "label": way}
        quantiles.error_bars(latency, curve, "block_size", "normalized_latency_ms", **look)
    swap = rows[rows["way"] == "swap"]
    look = {**_LINES["swap"], "label": "median of the draws, p20 to p80"}
    quantiles.error_bars(ratio, swap, "block_size", "latency_over_recompute", **look)
    ratio.axhline(1, color="black", linewidth=0.8)
    row = rows.iloc[0]
    latency.set(
        title=f"{row['repeats']:.0f} x {row['requests'] / row['repeats']:.0f} requests of "
        f"{row['tokens'] / row['requests']:.0f} tokens, cache of {rows['cache_tokens'].max():,.0f}",
        ylabel="normalised latency (ms/token)",
        ylim=(0, None),
    )
    each = (swap["preemptions"] / swap["requests"]).mean()
    ratio.set(
        title=f"the same requests, {each:.2g} preemptions each",
        ylabel="latency, swap / recompute",
    )


EXPERIMENT = Experiment(
    name="preemption",
    figure="PagedAttention fig. 19: recompute vs swap vs block size",
    options=Preemption(),
    quick=Preemption(
        model="tiny",
        block_size=(4, 16, 64),
        context_tokens=(256, 1024),
        cache_tokens=256,
        requests=8,
        prompt_tokens=(16, 64),
        output_tokens=(16, 64),
        draws=3,
        threads=1,
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"preemption": _draw}),
    gpu="optional",
    timed=True,
)
