"""The engine with a model of random weights, on the GPU if there is one, else on the CPU.

- ``throughput``: nano-vLLM's benchmark.  nano-vLLM itself runs too, if installed beside a GPU.
- ``transformers``: prefill and greedy decode of prompts of equal length, compared with ``generate``
  of Hugging Face transformers on the same weights.  The two systems alternate in going first.
- ``block_size``, ``policy``, ``manager``: requests of a trace.  All arrive at the start.

The lengths of prompts and blocks of a trace are divided by ``scale``, so prompts share the same
blocks as before.  The requests are also served without a model.  Policies see no clock, so both
runs must have the same hit rate (``passed``).  Equal prompts are an exception: only with a model do
they also share blocks of their outputs.  A cell is timed once; on a GPU an earlier run compiles its
kernels.  The hit rate of a cell is exact, and its time has the noise of the machine.
"""

from __future__ import annotations

import itertools
import math
import random
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Annotated, Any, Literal

import numpy as np

import cache
from cache.managers import manager_class
from cache.serving.open_loop import engine_without_model
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import Scheduler, Step
from experiments import quantiles, style
from experiments.harness import Absent, Axis, Count, Experiment, Needs, Percent, Unavailable
from experiments.harness.environment import cpu_model, cuda_available
from experiments.harness.grid import grid, one_of
from experiments.load import engine_models, workloads
from experiments.load.own_class import named, spec_of
from experiments.load.workloads import OnTraces, Workload

NO_CACHE = "no_cache"
"""Value of ``policy`` that turns prefix caching off."""
_POLICIES = f"lru {NO_CACHE} gittins fifo lfu arc mq safeguarded s3fifo random"
_AXES: dict[str, tuple[str, ...]] = {
    "throughput": ("system", "graphs", "overlap"),
    "block_size": ("block_size",),
    "policy": ("policy", "pool_percent"),
    "manager": ("manager",),
    "transformers": ("sequences", "prompt_tokens"),
}
_TEMPERATURE = 0.6
"""Temperature in nano-vLLM's benchmark.  On a trace sampling is greedy, to compare outputs."""
_ONLINE = tuple(name for name in cache.POLICIES if name not in ("belady", "reuse_oracle"))


@dataclass(frozen=True, kw_only=True)
class OnDevice(OnTraces):
    """The grid: parts, each with its own axes.

    The default trace is claude_code_512_a.  ``policy`` also serves the workload agent_loops.
    """

    part: Axis[Annotated[str, one_of(_AXES)]] = tuple(_AXES)
    model: Annotated[str, one_of(engine_models.NAMES)] | None = None
    """A model shape, or `make model`'s checkpoint. None: qwen3-0.6b on a GPU, else llama-100m."""
    scale: Count | None = None
    """Divisor of prompt lengths, and of the benchmark's output lengths. None: on a CPU a quarter of
    the trace's block size, at most 64; on a GPU the least power of two with which the K/V of all
    tokens fit half of the memory."""
    threads: Count = 2
    system: Axis[Literal["pagelab", "nano_vllm"]] = ("pagelab", "nano_vllm")
    graphs: Axis[bool] = (True, False)
    overlap: Axis[bool] = (True, False)
    bench_requests: Count = 256
    sequences: Axis[Count] = (1, 8)
    prompt_tokens: Axis[Count] = (128, 512)
    repeats: Count = 3
    num_requests: Count | None = None
    """Number of requests: the first of the trace with at most ``longest`` prompt tokens. None: 40
    on a GPU, 18 on a CPU."""
    longest: Count = 16_384
    output_tokens: Annotated[int, Needs("an int of at least 2", lambda count: count >= 2)] = 16
    block_size: Axis[Count] = (8, 16, 32, 64, 128, 256)
    policy: Axis[Annotated[str, one_of((NO_CACHE, *_ONLINE))]] = tuple(_POLICIES.split())
    manager: Axis[engine_models.Manager] = tuple(cache.MANAGERS)
    pool_percent: Axis[Percent] = (20.0, 50.0)
    """Size of the pool in percent of the unique tokens of the requests; at least 1.25 times the
    longest sequence. ``block_size`` and ``manager`` use only the last size."""
    setup_key = ()  # consecutive cells share an engine


@dataclass(frozen=True, kw_only=True)
class Cell(OnDevice):
    model: str
    num_requests: int


def cells(options: OnDevice) -> Iterator[Cell | Absent]:
    gpu, sources = cuda_available(), []
    fixed: dict[str, Any] = {name: [None] for names in _AXES.values() for name in names}
    fixed |= {"model": options.model or ("qwen3-0.6b" if gpu else "llama-100m")}
    fixed |= {"num_requests": options.num_requests or (40 if gpu else 18)}
    fixed |= {"graphs": [gpu], "overlap": [gpu], "policy": ["lru"], "manager": ["vllm_v1"]}
    if set(options.part) - {"throughput", "transformers"}:
        sources = list(options.sources())
        if not options.trace:
            sources = [Workload("agent_loops", options.seed, None), sources[0]]
    for part in options.part:
        own = {"part": [part], "trace": sources, "pool_percent": options.pool_percent[-1:]}
        if part != "policy" and not options.trace:
            own["trace"] = sources[-1:]
        own |= {name: getattr(options, name) for name in _AXES[part]}
        if part == "manager":
            own |= {"manager": map(named, options.manager)}
        if part in ("throughput", "transformers"):
            own |= {"trace": [None], "pool_percent": [100.0]}
        if part == "throughput" and not gpu:
            own |= {"system": ["pagelab"], "graphs": [False]}
            yield Absent("throughput with CUDA graphs and of nano-vLLM: there is no GPU here")
        for cell in grid(options, Cell, **fixed | own):
            if cell.system != "nano_vllm" or (cell.graphs and not cell.overlap):
                yield cell


def nano_vllm_requests(requests: int = 256) -> tuple[list, list[int]]:
    """Prompts (token ids) and output lengths, drawn in the same way as in nano-vLLM's bench.py."""
    draw = random.Random(0).randint
    prompts = [[draw(0, 10_000) for _ in range(draw(100, 1024))] for _ in range(requests)]
    return prompts, [draw(100, 1024) for _ in range(requests)]


def _requests(cell: Cell) -> tuple[list, list[int], int, int, int]:
    """Prompts, output lengths, number of unique tokens, scale, and block size of the prompts."""
    import torch

    config = engine_models.model_config(cell.model)
    if cell.trace is None:
        prompts, outputs = nano_vllm_requests(cell.bench_requests)
        unique, block_size = sum(map(len, prompts)) + sum(outputs), 256
    else:
        trace = workloads.load(cell.trace)
        short = np.flatnonzero(trace.input_lengths <= cell.longest)
        if not len(short):
            raise ValueError(f"--longest {cell.longest}: no prompt of {trace.name} is as short")
        trace = trace.take(short[: cell.num_requests])
        assert trace.block_size is not None
        unique, block_size = trace.num_unique_blocks * trace.block_size, trace.block_size
    scale = cell.scale or max(1, min(64, block_size // 4))
    if cuda_available() and cell.scale is None:
        memory = torch.cuda.mem_get_info()[1]  # not the free memory: it depends on earlier cells
        share = unique * config.kv_block_bytes(1, config.dtype) / memory
        scale = 2 ** max(0, math.ceil(math.log2(2 * share)))
    if cell.trace and block_size % scale:
        blocks = f"needs a divisor of the {block_size} tokens of a block of {trace.name}"
        raise ValueError(f"--scale {scale}: {blocks}; or fewer --num-requests")
    if cell.trace is None:
        prompts = [[t % config.vocab_size for t in p[: max(1, len(p) // scale)]] for p in prompts]
        outputs = [max(1, output // scale) for output in outputs]
    else:
        lengths = np.maximum(trace.input_lengths // scale, 1)
        trace = replace(trace, block_size=block_size // scale, input_lengths=lengths)
        prompts = [cache.prompt_token_ids(trace, i, config.vocab_size) for i in range(len(trace))]
        outputs = np.clip(trace.output_lengths, 1, cell.output_tokens).tolist()
    return prompts, outputs, unique // scale, scale, block_size // scale


@lru_cache(maxsize=1)
def _prepare(cell: Cell) -> tuple:
    """A warmed-up LLM, the limits of its steps, and the results of ``_requests``."""
    _prepare.cache_clear()  # drops the old model: a GPU may not have room for two
    prompts, outputs, unique, scale, trace_block = requests = _requests(cell)
    longest, block_size = max(map(len, prompts)) + max(outputs), cell.block_size
    block_size = block_size or math.gcd(16, trace_block)
    seqs = min(len(prompts), 256 if cell.trace is None else 16)
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": max(8192 // scale, longest)}
    sizes = {"block_size": block_size, "num_blocks": -(-max(2 * longest, unique) // block_size)}
    options = {"threads": cell.threads, "seed": cell.seed, "cuda_graphs": cell.graphs}
    llm = engine_models.make_llm(cell.model, max_model_len=longest, **options, **limits, **sizes)
    warm = len(prompts) if cuda_available() else 8  # compiles the kernels of the cells
    few = [min(4, count) for count in outputs[:warm]]
    _serve(llm.engine, prompts[:warm], few, 0.0 if cell.trace else _TEMPERATURE)
    return llm, limits, *requests


def run_cell(cell: Cell) -> list[dict[str, Any]]:
    import torch

    try:
        if cell.part == "transformers":
            return _beside_transformers(cell)
        return [_nano_vllm(cell) if cell.system == "nano_vllm" else _served(cell)]
    except (ImportError, FileNotFoundError) as error:  # a package or the checkpoint is missing
        raise Unavailable(str(error)) from error
    except torch.OutOfMemoryError as error:
        _prepare.cache_clear()
        raise Unavailable(str(error).partition(". ")[0]) from error


def _nano_vllm(cell: Cell) -> dict[str, Any]:
    _prepare.cache_clear()
    prompts, outputs, _, scale, _ = _requests(cell)
    seconds = engine_models.nano_vllm_seconds(cell.model, prompts, outputs)
    row = cell.columns("part", "model", "graphs", "overlap", "trace", "pool_percent")
    row |= {"seconds": seconds, "tokens_per_s": sum(outputs) / seconds, "scale": scale}
    row |= {"all_output_tokens": sum(outputs), "dtype": "bfloat16", "variant": cell.system}
    return row


def _served(cell: Cell) -> dict[str, Any]:
    shared: Any = dict.fromkeys(("part", "overlap", "policy", "manager", "pool_percent"))
    llm, limits, prompts, outputs, unique, scale, _ = _prepare(replace(cell, **shared))
    engine, longest, block_size = llm.engine, llm.max_model_len, llm.manager.block_size
    engine.overlap = cell.overlap and block_size > 1  # overlap needs block_size > 1
    reserves = manager_class(spec_of(cell.manager)).reserves
    least = (2.0 if reserves else 1.25) * longest
    tokens = math.ceil(max(least, unique * cell.pool_percent / 100))
    options: dict[str, Any] = {"num_blocks": -(-tokens // block_size), "block_size": block_size}
    options |= engine_models.hash_option(spec_of(cell.manager))
    options |= {"enable_prefix_caching": cell.policy != NO_CACHE}
    options |= {"policy": cell.policy.replace(NO_CACHE, "lru")}
    if reserves:
        options |= {"max_model_len": longest, "final_length": attrgetter("max_num_tokens")}
    new_manager = partial(cache.make_manager, spec_of(cell.manager), **options)
    for _ in range(2 if cell.trace and cuda_available() else 1):  # the first run compiles kernels
        engine.restart(Scheduler(new_manager(), **limits))
        row, requests = _serve(engine, prompts, outputs, 0.0 if cell.trace else _TEMPERATURE)
    tokens = _tokens(requests)
    replay = engine_without_model(new_manager(), max_model_len=longest, **limits)
    replay.overlap = engine.overlap
    again, _ = _serve(replay, prompts, outputs)
    row["replay_hit_rate"] = again["hit_rate"]
    is_whole = [*map(len, tokens)] == outputs
    row |= {"block_size": block_size, "pool_tokens": options["num_blocks"] * block_size}
    row |= {"scale": scale, "tokens_checksum": zlib.crc32(str(tokens).encode())}
    row |= {"passed": is_whole and row["hit_rate"] == again["hit_rate"], **_columns(cell, llm)}
    row |= cell.columns("policy", "manager", "pool_percent") | {"manager": str(cell.manager)}
    return row | {"overlap": engine.overlap, "trace": cell.trace and cell.trace.name}


def _columns(cell: Cell, llm: Any) -> dict[str, Any]:
    row = cell.columns("part", "model", "threads", "graphs", "overlap") | {"cpu": cpu_model()}
    values = [(name, getattr(cell, name)) for name in _AXES[cell.part]]
    shown = [("" if v else "no ") + n if isinstance(v, bool) else str(v) for n, v in values]
    return row | {"variant": ", ".join(shown), "dtype": str(llm.dtype).partition(".")[2]}


def _serve(
    engine: Any, prompts: list, outputs: list[int], temperature: float = 0.0
) -> tuple[dict[str, Any], list]:
    """Serve requests that all arrive at the start; returns columns of a row, and the requests."""
    steps: list[tuple[float, bool]] = []

    def on_step(step: Step, seconds: float) -> None:
        steps.append((time.perf_counter(), step.num_tokens == len(step.sequences) > 0))

    engine.on_step, engine.manager.clock = on_step, None
    fixed: dict[str, Any] = {"temperature": temperature, "ignore_eos": True}
    begin = time.perf_counter()
    params = [SamplingParams(**fixed, max_tokens=length) for length in outputs]
    ids = [engine.add(*pair) for pair in zip(prompts, params, strict=True)]
    requests = [engine.requests[number] for number in ids]
    while engine.has_unfinished:
        engine.step()
    engine.on_step = None
    seconds = time.perf_counter() - begin
    stats, prompt_tokens = [request.stats for request in requests], sum(map(len, prompts))
    decoding = [b - a for (a, _), (b, decodes) in itertools.pairwise(steps) if decodes]
    row: dict[str, Any] = {"requests": len(stats)}
    row |= {"all_prompt_tokens": prompt_tokens, "seconds": seconds}
    row |= {"all_output_tokens": sum(outputs), "tokens_per_s": sum(outputs) / seconds}
    row |= quantiles.columns("decode_step_s", decoding)
    row |= quantiles.of_times("ttft", [request.time_to_first_token for request in stats])
    row["preemptions"] = sum(request.num_preemptions for request in stats)
    row["hit_rate"] = sum(request.num_cached_tokens for request in stats) / prompt_tokens
    return row, requests


def _tokens(requests: list) -> list:
    return [request.sequences[0].output_token_ids for request in requests]


def _beside_transformers(cell: Cell) -> list[dict[str, Any]]:
    import torch

    _prepare.cache_clear()
    size, longest = (cell.sequences, cell.prompt_tokens), cell.prompt_tokens + cell.output_tokens
    options = {"threads": cell.threads, "seed": cell.seed, "enable_prefix_caching": False}
    options |= {"max_num_seqs": size[0], "num_blocks": size[0] * (longest // 16 + 2)}
    llm = engine_models.make_llm(cell.model, max_model_len=longest, **options)
    model = engine_models.transformers_model(llm)

    def ours(prompts: list) -> tuple[list, float, float]:
        row, requests = _serve(llm.engine, prompts, [cell.output_tokens] * size[0])
        first = max(request.stats.time_to_first_token for request in requests)
        return _tokens(requests), first, row["seconds"] - first

    def theirs(prompts: list) -> tuple[list, float, float]:
        times = [time.perf_counter()]

        def clock(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            ids[:, -1].tolist()  # waits for the GPU, if there is one
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        ids, count = torch.tensor(prompts, device=llm.device), cell.output_tokens
        lengths = {"min_new_tokens": count, "max_new_tokens": count}
        made = model.generate(ids, do_sample=False, stopping_criteria=[clock], **lengths)
        return made[:, ids.shape[1] :].tolist(), times[1] - times[0], times[-1] - times[1]

    rng, same, seconds = np.random.default_rng(cell.seed), True, np.zeros((cell.repeats + 1, 2, 2))
    for repeat in range(len(seconds)):
        prompts: list = rng.integers(llm.config.vocab_size, size=size).tolist()
        tokens: list = [None, None]
        for system in (0, 1)[:: 1 - repeat % 2 * 2]:
            tokens[system], *seconds[repeat, system] = (ours, theirs)[system](prompts)
        same &= tokens[0] == tokens[1]
    rows = []
    for phase, count in enumerate((cell.prompt_tokens, cell.output_tokens - 1)):
        rates = size[0] * count / seconds[1:, :, phase].T  # the first repeat warms up
        row = cell.columns("sequences", "prompt_tokens", "output_tokens", "trace", "pool_percent")
        row |= _columns(cell, llm)
        row |= {"phase": ("prefill", "decode")[phase], "same_tokens": same}
        row["variant"] = f"{row['phase']}, {row['variant']}"
        row["tokens_per_s"], row["transformers_tokens_per_s"] = np.median(rates, axis=1)
        rows.append(row | quantiles.columns("over_transformers", rates[0] / rates[1]))
    return rows


def _draw(rows: style.DataFrame) -> style.Figure:
    """Draw a panel of bars per part.  Policies have a panel per trace and pool, and hit rates."""
    panels = list(rows.groupby(["part", "trace", "pool_percent"], sort=False, dropna=False))
    figure, axes, _ = style.panel_grid(len(panels), height=1.65, width=3.5, columns=2)
    for axis, ((part, trace, percent), some) in zip(axes, panels, strict=True):
        title = f"{part}: {some['model'].iloc[0]}, {some['dtype'].iloc[0]}"
        column, xlabel, number = "tokens_per_s", "output tokens/s", "{:,.0f}"
        if part == "transformers":
            column, xlabel, number = "over_transformers_p50", "speed / transformers'", "{:.2f}"
        elif part == "policy":
            title = f"{trace.partition('.')[0]}, pool of {percent:g} %"
            column, xlabel, number = "ttft_mean_s", "time to first token (s), hit rate", "{:.1%}"
        bars = axis.barh(range(len(some)), some[column], **style.bar(style.SKY))
        printed = some["hit_rate" if part == "policy" else column]
        axis.bar_label(bars, printed.map(number.format), padding=2, fontsize=6)
        style.name_rows(axis, some["policy"] if part == "policy" else some["variant"])
        axis.set(title=title, xlabel=xlabel)
        axis.margins(x=0.15)
    return figure


EXPERIMENT = Experiment(
    name="engine",
    figure="the engine on the device: throughput, block sizes, eviction policies, managers",
    options=OnDevice(),
    quick=OnDevice(
        model="tiny", threads=1, num_requests=8, repeats=1, policy=("lru", "gittins"),
        block_size=(16, 64), manager=("paged", "vllm_v1"), sequences=(2,), prompt_tokens=(128,),
        pool_percent=(50.0,),
    ),
    cells=cells, run_cell=run_cell, plot=style.plotter({"engine": _draw}),
    gpu="optional", timed=True,
)  # fmt: skip
