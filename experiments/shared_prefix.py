"""Time to first token and throughput with a cached prefix, measured on the engine.

- ``ttft``: a prompt whose leading tokens are in the cache, alone in the engine; the time from its
  arrival to its first token, by the engine's own statistics.  The ideal line is proportional to
  the remaining tokens.  The measured time is higher: cached tokens are attended to, and the
  weights are read for any number of tokens.
- ``throughput``: requests that arrive together and share a prefix, with and without prefix caching:
  output tokens per second from their arrival to the last token.  As in figure 16 of the
  PagedAttention paper (Kwon et al., SOSP 2023), the prefix is in the cache before they arrive, and
  each has a suffix of its own.

The weights are random, outputs have a fixed length, and the unshared tokens of each request are
new.  The first round is not counted: it compiles kernels and touches memory.  The sizes suit a
model on a CPU.  On a GPU, raise them:

    python -m experiments run shared_prefix --prompt-tokens 8192 32768 --requests 32 \\
        --prefix-tokens 0 2048 8192 16384 --suffix-tokens 256 --output-tokens 64
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

import cache
from experiments import quantiles, style
from experiments.harness import Axis, Count, Experiment, Natural, Needs, grid, one_of
from experiments.load import engine_models
from experiments.load.engine_models import EngineOptions

if TYPE_CHECKING:
    from models import LLM

_MANAGERS = {
    "vllm_v1": style.line(style.BLUE, "o"),
    "vllm_v0": style.line(style.ORANGE, "s", "dashed"),
    "nano_vllm": style.line(style.GREEN, "^", "dashdot"),
    "radix": style.line(style.RED, "D", "dotted", fill=False),
}
"""Managers that cache prefixes, and their lines."""


_CACHING = [name for name, manager in cache.MANAGERS.items() if manager.prefix_caching]
_Share = Annotated[float, Needs("a number from 0 to below 100", lambda value: 0 <= value < 100)]


@dataclass(frozen=True, kw_only=True)
class _Engines(EngineOptions):
    manager: Axis[Annotated[str, one_of(_CACHING)]] = tuple(_MANAGERS)
    """Managers with prefix caching; throughput is measured on the first."""
    block_size: Count = 16


@dataclass(frozen=True, kw_only=True)
class FirstToken(_Engines):
    prompt_tokens: Axis[int]
    cached_percent: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Throughput(_Engines):
    prefix_tokens: Axis[int]
    prefix_caching: Axis[bool]
    requests: int
    suffix_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class SharedPrefix(_Engines):
    """The grid: managers x prompts x cached shares, and prefixes with and without caching."""

    prompt_tokens: Axis[Count] = (512, 2048)
    """Lengths of the prompts of ``ttft``."""
    cached_percent: Axis[_Share] = (0, 25, 50, 75, 90)
    """Cached share of such a prompt, rounded down to whole blocks."""
    prefix_tokens: Axis[Natural] = (0, 128, 512, 1024)
    """Lengths of the prefix that the requests of a batch share."""
    requests: Count = 8
    """Requests of a batch."""
    suffix_tokens: Count = 64
    """Tokens of its own in each prompt of a batch."""
    output_tokens: Count = 32
    """Tokens that each request of a batch generates."""
    repeats: Count = 4
    """Measurements of each point."""


def cells(options: SharedPrefix) -> Iterator[FirstToken | Throughput]:
    model = options.model or engine_models.default_model()
    yield from grid(options, FirstToken, model=model)
    batches = {"manager": options.manager[:1], "prefix_caching": (False, True)}
    yield from grid(options, Throughput, model=model, **batches)


def run_cell(cell: FirstToken | Throughput) -> list[dict[str, Any]]:
    measure = _first_token if isinstance(cell, FirstToken) else _throughput
    llm, rows = measure(cell)
    return [{**cell.describe(llm), **row} for row in rows]


def _num_blocks(cell: _Engines, num_sequences: int, longest: int) -> int:
    """Blocks that hold ``num_sequences`` of ``longest`` tokens, and some more."""
    return (num_sequences + 2) * (longest // cell.block_size + 2)


def _first_token(cell: FirstToken) -> tuple[LLM, list[dict[str, Any]]]:
    from models import SamplingParams

    length = cell.prompt_tokens
    llm = cell.make_llm(
        manager=cell.manager,
        num_blocks=_num_blocks(cell, 2, length),
        max_num_seqs=1,
        max_num_batched_tokens=length + 1,
    )
    generator = np.random.default_rng(cell.seed)
    one_token = SamplingParams(temperature=0, max_tokens=1)
    shared = engine_models.random_tokens(llm, generator, length)
    shares = (percent / 100 for percent in cell.cached_percent)
    cached = [int(length * share) // cell.block_size * cell.block_size for share in shares]
    seconds: list[list[float]] = [[] for _ in cached]
    for _ in range(1 + cell.repeats):
        for num_cached, measured in zip(cached, seconds, strict=True):
            if num_cached:
                llm.generate(shared[: num_cached + 1], one_token)
            own = engine_models.random_tokens(llm, generator, length - num_cached)
            [output] = llm.generate(shared[:num_cached] + own, one_token)
            if output.stats.num_cached_tokens != num_cached:
                raise RuntimeError(
                    f"{cell.manager} found {output.stats.num_cached_tokens} of {num_cached} tokens"
                )
            measured.append(output.stats.time_to_first_token)
    return llm, [
        {
            "part": "ttft",
            "prompt_tokens": length,
            "cached_tokens": num_cached,
            "cached_fraction": num_cached / length,
            **quantiles.columns("ttft_ms", [1e3 * value for value in measured[1:]]),
        }
        for num_cached, measured in zip(cached, seconds, strict=True)
    ]


def _throughput(cell: Throughput) -> tuple[LLM, list[dict[str, Any]]]:
    from models import SamplingParams

    prompt_tokens = cell.prefix_tokens + cell.suffix_tokens
    llm = cell.make_llm(
        manager=cell.manager,
        num_blocks=_num_blocks(cell, cell.requests, prompt_tokens + cell.output_tokens),
        max_num_seqs=cell.requests,
        enable_prefix_caching=cell.prefix_caching,
    )
    generator = np.random.default_rng(cell.seed)
    params = SamplingParams(temperature=0, max_tokens=cell.output_tokens, ignore_eos=True)
    prefix = engine_models.random_tokens(llm, generator, cell.prefix_tokens)
    rates, cached = [], []
    for _ in range(1 + cell.repeats):
        prompts = [
            prefix + engine_models.random_tokens(llm, generator, cell.suffix_tokens)
            for _ in range(cell.requests)
        ]
        if cell.prefix_caching:
            llm.generate(prompts[0][: cell.prefix_tokens + 1], SamplingParams(max_tokens=1))
        stats = [output.stats for output in llm.generate(prompts, params)]
        begin, end = min(s.arrival_time for s in stats), max(s.finish_time for s in stats)
        rates.append(sum(s.num_output_tokens for s in stats) / (end - begin))
        cached.append(sum(s.num_cached_tokens for s in stats) / cell.requests)
    return llm, [
        {
            "part": "throughput",
            "prefix_caching": cell.prefix_caching,
            "prefix_tokens": cell.prefix_tokens,
            "prompt_tokens": prompt_tokens,
            "output_tokens": cell.output_tokens,
            "requests": cell.requests,
            "cached_tokens": cached[-1],
            "cached_fraction": cached[-1] / prompt_tokens,
            **quantiles.columns("output_tokens_per_second", rates[1:]),
        }
    ]


def summarise(rows: style.DataFrame) -> style.DataFrame:
    """Speed-up of the median time to first token by cached tokens (at best 1 / (1 - cached
    fraction)), and of the median throughput by prefix caching."""
    import pandas as pd

    tables = []
    first = rows[rows["part"] == "ttft"]
    if len(first):
        prompt = ["manager", "prompt_tokens"]
        nothing_cached = first[first["cached_tokens"] == 0].set_index(prompt)["ttft_ms_p50"]
        first = first.join(nothing_cached.rename("nothing_cached"), on=prompt)
        first["gain"] = first["nothing_cached"] / first["ttft_ms_p50"]
        first["ideal_gain"] = 1 / (1 - first["cached_fraction"])
        tables.append(first)
    batches = rows[rows["part"] == "throughput"]
    if len(batches):
        rates = batches.pivot(
            index=["part", "manager", "prefix_tokens", "prompt_tokens"],
            columns="prefix_caching",
            values="output_tokens_per_second_p50",
        ).reindex(columns=[False, True])
        gain = (rates[True] / rates[False]).rename("gain")
        tables.append(gain.dropna().reset_index())
    columns = ["part", "manager", "prompt_tokens", "prefix_tokens", "cached_fraction", "gain"]
    return pd.concat(tables).reindex(columns=[*columns, "ideal_gain"])


def _draw(rows: style.DataFrame) -> style.Figure:
    first, batches = rows[rows["part"] == "ttft"], rows[rows["part"] == "throughput"]
    lengths = sorted(first["prompt_tokens"].unique()) if len(first) else []
    num_panels = len(lengths) + bool(len(batches))
    columns = 3 if num_panels == 3 else 2
    figure, axes, _ = style.panel_grid(num_panels, height=2.2, columns=columns)
    for axis, length in zip(axes, lengths, strict=False):
        _draw_first_token(axis, first[first["prompt_tokens"] == length])
    if len(batches):
        _draw_throughput(axes[-1], batches)
    for axis in axes:
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
        axis.legend(fontsize=6, loc="upper right")
    return figure


def _draw_first_token(axis: style.Axes, rows: style.DataFrame) -> None:
    unit = "ms" if rows["ttft_ms_p50"].max() < 1000 else "s"
    times = [f"ttft_ms_{suffix}" for suffix in ("p20", "p50", "p80")]
    rows = rows.assign(**(rows[times] / (1 if unit == "ms" else 1000)))
    rows = rows.assign(cached_percent=100 * rows["cached_fraction"])
    for manager, curve in rows.groupby("manager", sort=False):
        look = _MANAGERS.get(manager, style.line(style.PINK, "P"))
        quantiles.error_bars(axis, curve, "cached_percent", "ttft_ms", label=manager, **look)
    uncached = rows[rows["cached_tokens"] == 0]["ttft_ms_p50"]
    if len(uncached):
        ideal = {"color": style.BLACK, "linestyle": "dashed", "linewidth": 0.8}
        label = "ideal: uncached share"
        axis.plot([0, 100], [uncached.iloc[0], 0], label=label, zorder=1, **ideal)
    length = rows["prompt_tokens"].iloc[0]
    axis.set(title=f"prompt of {length:,} tokens", xlabel="cached share of the prompt (%)")
    axis.set_ylabel(f"time to first token ({unit})")


def _draw_throughput(axis: style.Axes, rows: style.DataFrame) -> None:
    looks = {
        True: style.line(style.BLUE, "o") | {"label": "with prefix caching"},
        False: style.line(style.GREY, "s", "dashed", fill=False) | {"label": "without it"},
    }
    for caching, curve in rows.groupby("prefix_caching"):
        quantiles.error_bars(
            axis, curve, "prefix_tokens", "output_tokens_per_second", **looks[caching]
        )
    axis.set_title(f"batches of {rows['requests'].iloc[0]:.0f} requests")
    axis.set(xlabel="shared prefix (tokens)", ylabel="output tokens/s")


EXPERIMENT = Experiment(
    name="shared_prefix",
    figure="PagedAttention fig. 16: time to first token and throughput with cached prefixes",
    options=SharedPrefix(),
    quick=SharedPrefix(
        model="tiny",
        manager=("vllm_v1", "radix"),
        prompt_tokens=(512, 2048),
        cached_percent=(0, 50, 90),
        prefix_tokens=(0, 256, 1024),
        requests=4,
        output_tokens=8,
        repeats=3,
        threads=1,
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"shared_prefix": _draw}, {"summary": (summarise, "%.4g")}),
    gpu="optional",
    timed=True,
)
