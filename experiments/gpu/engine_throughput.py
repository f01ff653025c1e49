"""Throughput of the whole engine on a GPU, on the load of Nano-vLLM's published numbers.

256 requests at once, prompts and outputs of 100 to 1024 tokens drawn uniformly, sampled at
temperature 0.6 without stopping early, on the shape of Qwen3-0.6B (random weights: the time of a
step does not depend on them).  Lengths are drawn as in Nano-vLLM's bench.py, so the requests are
equal: 133,966 output tokens.  Each engine serves them twice.  The first time nothing is cached; the
second time every full block of the prompts is, the most that prefix caching can bring.  Engines
differ in attention backend, in CUDA graphs for decoding, and in overlap (a step is launched before
the tokens of the last are read).
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from experiments import style
from experiments.bench.shapes import use_device
from experiments.harness import Axis, Count, Experiment, Lengths, Options, Unavailable, one_of
from experiments.load import engine_models

if TYPE_CHECKING:
    from cache.serving.outputs import RequestOutput
    from models import LLM

TEMPERATURE = 0.6
LARGEST_TOKEN = 10_000
_OURS = {"attention_backend": "triton", "cuda_graphs": True, "block_size": 16}
_ENGINES = {
    "triton, CUDA graphs": _OURS,
    "triton, CUDA graphs, no overlap": _OURS | {"overlap": False},
    "triton, eager": _OURS | {"cuda_graphs": False},
    "triton, CUDA graphs, block 256": _OURS | {"block_size": 256},
    "flash_attn, CUDA graphs, block 256": _OURS
    | {"attention_backend": "flash_attn", "block_size": 256},
}


@dataclass(frozen=True, kw_only=True)
class EngineThroughput(Options):
    """The grid: engines."""

    engine: Axis[Annotated[str, one_of(_ENGINES)]] = tuple(_ENGINES)
    """Attention backend, decoding mode and block size, by name."""
    model: Annotated[str, one_of(engine_models.MODEL_NAMES)] = "qwen3-0.6b"
    """A shape of engine_models."""
    num_requests: Count = 256
    lengths: Lengths = (100, 1024)
    """Fewest and most tokens of a prompt, and of an output."""
    max_model_len: Count = 4096


def requests(
    num_requests: int, lengths: tuple[int, int], *, seed: int, vocab_size: int
) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths, drawn in the order of Nano-vLLM's bench.py."""
    draw = random.Random(seed)
    largest = min(LARGEST_TOKEN, vocab_size - 1)
    prompts = [
        [draw.randint(0, largest) for _ in range(draw.randint(*lengths))]
        for _ in range(num_requests)
    ]
    return prompts, [draw.randint(*lengths) for _ in range(num_requests)]


def run_cell(cell: EngineThroughput) -> list[dict[str, Any]]:
    import torch

    device = use_device()
    options = _ENGINES[cell.engine]
    if options["cuda_graphs"] and device.type != "cuda":
        raise Unavailable("CUDA graphs need a CUDA device")
    llm = engine_models.make_llm(
        cell.model,
        device=device,
        max_num_seqs=cell.num_requests,
        max_model_len=cell.max_model_len,
        **options,
    )
    try:
        return _serve(llm, cell)
    finally:
        del llm
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _serve(llm: LLM, cell: EngineThroughput) -> list[dict[str, Any]]:
    import torch

    from models import SamplingParams

    timed = torch.cuda.is_available()
    vocab_size = llm.config.vocab_size
    prompts, output_lens = requests(
        cell.num_requests, cell.lengths, seed=cell.seed, vocab_size=vocab_size
    )
    params = [
        SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count)
        for count in output_lens
    ]
    # Compiles prefill and decode of one and of several sequences; shares no block with the load.
    others = [[(token + 1) % vocab_size for token in prompt] for prompt in prompts[:4]]
    for warm_up in (others[:1], others):
        llm.generate(warm_up, SamplingParams(max_tokens=4, ignore_eos=True))
    rows = []
    for turn in ("nothing cached", "prompts cached"):
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - started
        rows.append(_row(cell, turn, outputs, seconds if timed else None))
    return rows


def _row(
    cell: EngineThroughput, turn: str, outputs: list[RequestOutput], seconds: float | None
) -> dict[str, Any]:
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(output.stats.num_output_tokens for output in outputs)
    firsts = sorted(output.stats.time_to_first_token for output in outputs)
    per_token = [output.stats.time_per_output_token for output in outputs]
    per_token = [value for value in per_token if value is not None]
    return {
        "model": cell.model,
        "engine": cell.engine,
        **_ENGINES[cell.engine],
        "turn": turn,
        "requests": len(outputs),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(output.stats.num_cached_tokens for output in outputs),
        "output_tokens": output_tokens,
        "preemptions": sum(output.stats.num_preemptions for output in outputs),
        "seconds": seconds,
        "output_tokens_per_s": output_tokens / seconds if seconds else None,
        "all_tokens_per_s": (prompt_tokens + output_tokens) / seconds if seconds else None,
        "median_time_to_first_token_s": firsts[len(firsts) // 2] if seconds else None,
        "mean_time_per_output_token_s": sum(per_token) / len(per_token) if seconds else None,
    }


_LOOKS = {
    "nothing cached": style.bar(style.BLUE),
    "prompts cached": style.bar(style.ORANGE, "////"),
}


def _draw(rows: style.DataFrame) -> style.Figure:
    """Output tokens per second, engine by engine."""
    rates = rows.pivot(index="engine", columns="turn", values="output_tokens_per_s")
    rates = rates.loc[rows["engine"].unique()]
    figure, (axis,), _ = style.panel_grid(1, width=5.2, height=0.5 + 0.5 * len(rates))
    style.bars(axis, rates, _LOOKS, horizontal=True)
    for bars in axis.containers:
        axis.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=6)
    style.name_rows(axis, rates.index)
    axis.margins(x=0.12)
    model, count = rows[["model", "requests"]].iloc[0]
    axis.set_xlabel(f"output tokens per second ({model}, {count} requests at once)")
    return style.shared_legend(figure, columns=2)


EXPERIMENT = Experiment(
    name="engine_throughput",
    figure="throughput of the engine on Nano-vLLM's published load, with and without prefix hits",
    options=EngineThroughput(),
    quick=EngineThroughput(
        engine=("triton, CUDA graphs", "triton, eager"), num_requests=32, lengths=(32, 128)
    ),
    run_cell=run_cell,
    plot=style.plotter({"engine_throughput": _draw}, measured="seconds"),
    gpu="required",
    timed=True,
)
