"""Modelled GPU times compared with published serving times.

The clock (experiments/load/gpu_clock.py) sums up operator times.  This table compares the sums with
measured engines: time per token of decoding batches and of prompts, time to first token, and
throughput of a whole run (with this project's scheduler). README.md lists the sources and the facts
that they leave out. A launch of 10 steps is compared with the mean of four steps.

The host time is 0, except for ``anyscale``, whose launcher sleeps 10 ms a step. ``hosts.csv`` has,
for each engine, the host time with the smallest error on the ``chosen`` cases (the first, third,
...), and the errors on the ``judged`` cases with and without this host time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from cache import make_manager
from cache.serving import open_loop
from experiments import gpu_times, serving, style
from experiments.engine import nano_vllm_requests
from experiments.harness import Axis, Experiment, Options, one_of
from experiments.load.gpu_clock import CLOCK_DISCLAIMER, GpuClock

_CASES = """
    lambda_a100_10 lambda_h100_10 lambda_h100_320 prompts_h100 bench_8b bench_70b vllm_16937
    a100_40gb qwen_a100 qwen_a100_first nano_vllm ours ours_128 ours_512 ours_first_128
    ours_first_512 anyscale
"""
_PER_SECOND = "tokens per second"
_HOST_MS = np.arange(0, 5.01, 0.05)
_STEPS = (1, 4, 7, 10)
"""The steps, of the 10 in a launch, whose mean time is modelled."""


@dataclass(frozen=True, kw_only=True)
class PublishedServing(Options):
    case: Axis[Annotated[str, one_of(_CASES.split())]] = tuple(_CASES.split())
    """Published runs, see README.md."""


def run_cell(cell: PublishedServing) -> list[dict[str, Any]]:
    about = _of_case("cases.csv", cell.case).iloc[0].to_dict()
    rows = []
    for x, published in _of_case("published.csv", cell.case)[["x", "published"]].itertuples(False):
        modelled, batch = _modelled(about, x, cell.seed, about["host_ms"])
        later, _ = _modelled(about, x, cell.seed, about["host_ms"] + 1)
        growth = modelled / later if about["unit"] == _PER_SECOND else later / modelled
        point = {"x": x, "batch": batch, "published": published, "modelled": modelled}
        error = {"error": modelled / published - 1, "growth_per_host_ms": growth - 1}
        rows.append({**about, **point, **error, "basis": CLOCK_DISCLAIMER})
    return rows


def _modelled(about: dict[str, Any], x: int, seed: int, host_ms: float) -> tuple[float, int | None]:
    """The modelled value at ``x`` of a case, and the number of sequences if the table has it."""
    place, kind = (about["model"], about["gpu"], about["tensor_parallel"]), about["kind"]
    tokens, batch = (about["tokens"], x) if about["tokens"] else (x, 1)
    most = 256 if kind == "anyscale" else 320
    clock = GpuClock(*place, host_seconds=host_ms / 1000, max_num_seqs=most)
    prompts = [(tokens, tokens)] * batch
    if kind == "launch":
        return _launch(clock, about["case"], x)
    if kind == "decode":
        return 1000 * clock.seconds([tokens] * batch), batch
    if kind == "first":
        return 1000 * clock.seconds([], prompts, batch), batch
    if kind == "batch":  # of 128 output tokens each
        decode = 127 * clock.seconds([tokens + 64] * batch)
        return 128 * batch / (clock.seconds([], prompts, batch) + decode), batch
    run = {"prompts": _prompt_token, "anyscale": _throughput, "nano": _nano_vllm_bench}[kind]
    return run(clock, x, seed), None


def _of_case(name: str, case: str) -> style.DataFrame:
    return gpu_times.rows(Path(__file__).with_name(name), case=case)


def _launch(clock: GpuClock, case: str, number: int) -> tuple[float, int]:
    """Milliseconds per step of a launch, and the number of sequences in it.

    A sequence that ends within a launch stays until the launch ends.
    """
    prompts = _of_case("prompts.csv", case)
    done = 10 * number + 1
    lengths = prompts["prompt_tokens"][prompts["output_tokens"] > done].to_numpy() + done
    seconds = [clock.seconds((lengths + step).tolist()) for step in _STEPS]
    return 1000 * float(np.mean(seconds)), len(lengths)


def _prompt_token(clock: GpuClock, step_tokens: int, seed: int) -> float:
    """Microseconds per prompt token, in steps of whole prompts of about ``step_tokens`` tokens."""
    lengths = _of_case("prompts.csv", "lambda_h100_320")["prompt_tokens"]
    steps = lengths.groupby(lengths.cumsum() // step_tokens)
    seconds = sum(clock.seconds([], [(n, n) for n in step], len(step)) for _, step in steps)
    return 1e6 * seconds / lengths.sum()


def _throughput(clock: GpuClock, most_tokens: int, seed: int) -> float:
    """Tokens per second (prompt and output tokens) of the case ``anyscale``."""
    drawn = np.rint(np.random.default_rng(seed).exponential(128, 200_000))
    outputs = np.maximum(drawn[drawn <= most_tokens][:1000], 1).astype(int).tolist()
    prompts = [[1] * 512] * 1000
    run = serving.serve("paged", clock, prompts, outputs, [0.0] * 1000, prefill_first=True)
    return (512_000 + sum(outputs)) / run.seconds


def _nano_vllm_bench(clock: GpuClock, sequences: int, seed: int) -> float:
    """Output tokens per second."""
    prompts, outputs = nano_vllm_requests()
    manager = make_manager("vllm_v1", num_blocks=30_000, block_size=16)
    limits: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_model_len": 4096}
    engine = open_loop.engine_without_model(manager, max_num_seqs=sequences, **limits)
    run = open_loop.serve(engine, prompts, outputs, [0.0] * len(prompts), service=clock)
    return sum(outputs) / run.seconds


def _draw(rows: style.DataFrame) -> style.Figure:
    """Draw the error of each point, with a row per case that names the published values."""
    cases = rows.groupby("title", sort=False)
    figure, [axis], _ = style.panel_grid(1, height=0.5 + 0.17 * len(cases), width=6.8)
    names = []
    for place, (title, points) in enumerate(cases):
        errors, published = 100 * points["error"], points["published"]
        ends = sorted({published.min(), published.max()})
        extent = " to ".join(f"{round(end, 1 if end < 100 else None):,}" for end in ends)
        names.append(f"{title}: {extent} {points['unit'].iloc[0]}")
        axis.plot(errors, [place] * len(errors), **style.dots(style.BLUE, "o", fill=False))
        mean = f"{errors.abs().mean():.1f} %"
        axis.text(1.01, place, mean, fontsize=6, va="center", transform=axis.get_yaxis_transform())
    style.name_rows(axis, names)
    axis.axvline(0, **style.BOUND)
    axis.set_xlabel("error: modelled / published - 1 (%); at the right: mean |error|")
    figure.supxlabel(serving.noted(figure, ""))
    return figure


def _summary(rows: style.DataFrame) -> style.DataFrame:
    rows = rows.assign(size=rows["error"].abs())
    summary = rows.groupby(["case", "title", "host_ms", "unit"], sort=False, as_index=False)
    return summary.agg(
        points=("error", "size"),
        mean_error=("error", "mean"),
        mean_absolute_error=("size", "mean"),
        largest_absolute_error=("size", "max"),
        basis=("basis", "first"),
    )


def _error(rows: style.DataFrame, host_ms: float) -> float:
    """Mean over the cases of the mean error, if the host time is ``host_ms``."""
    longer = 1 + host_ms * rows["growth_per_host_ms"]
    modelled = (1 + rows["error"]) * longer.where(rows["unit"] != _PER_SECOND, 1 / longer)
    return (modelled - 1).abs().groupby(rows["case"]).mean().mean()


def _hosts(rows: style.DataFrame) -> style.DataFrame:
    """The host time of each engine, and the errors of its cases without and with this host time."""
    import pandas as pd

    table = []
    for engine, some in rows[rows["half"] != "given"].groupby("engine", sort=False):
        chosen, judged = (some[some["half"] == half] for half in ("chosen", "judged"))
        row = {"engine": engine, "host_ms": min(_HOST_MS, key=functools.partial(_error, chosen))}
        for name, ms in (("error", 0), ("error_with_host", row["host_ms"])):
            row |= {f"chosen_{name}": _error(chosen, ms), f"judged_{name}": _error(judged, ms)}
        table.append(row)
    return pd.DataFrame(table)


EXPERIMENT = Experiment(
    name="published_serving",
    figure="published times of engines on A100 and H100 GPUs beside the clock that serving runs on",
    options=PublishedServing(),
    quick=PublishedServing(case=("lambda_h100_10", "bench_8b", "bench_70b")),
    run_cell=run_cell,
    plot=style.plotter(
        {"published_serving": _draw},
        {"summary": (_summary, "%.4g"), "hosts": (_hosts, "%.3g")},
    ),
)
