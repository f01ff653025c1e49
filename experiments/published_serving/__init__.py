"""The clock of GPUs against serving times that others published.

The clock (experiments/load/gpu_clock.py) sums up operator times.  This table compares the sums with
engines that ran: time per token of decoding batches and of prompts, and throughput of a whole run.
README.md has the sources, and what they leave open.  Nothing was fitted to them.

A published launch of 10 steps is compared with the mean of four of these steps on the clock.  For a
throughput, the project's own scheduler serves the same requests, prompts first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from experiments import gpu_times, serving, style
from experiments.harness import Axis, Experiment, Options, one_of
from experiments.load.gpu_clock import HONEST, GpuClock

_CASES = (
    "lambda_a100_10",
    "lambda_h100_10",
    "lambda_h100_320",
    "prompts_h100",
    "bench_8b",
    "bench_70b",
    "anyscale",
)
_BENCH_CONTEXT = 150
_STEPS = (1, 4, 7, 10)
"""The steps of a launch of 10 over which the clock takes its mean."""


@dataclass(frozen=True, kw_only=True)
class PublishedServing(Options):
    case: Axis[Annotated[str, one_of(_CASES)]] = _CASES
    """Published runs, see README.md."""


def run_cell(cell: PublishedServing) -> list[dict[str, Any]]:
    about = _of_case("cases.csv", cell.case).iloc[0].to_dict()
    clock = GpuClock(
        about["model"],
        about["gpu"],
        about["tensor_parallel"],
        host_seconds=about["host_ms"] / 1000,
        max_num_seqs=256 if cell.case == "anyscale" else 320,
    )
    rows = []
    for published in _of_case("published.csv", cell.case).itertuples():
        batch = None
        if cell.case.startswith("lambda"):
            modelled, batch = _launch(clock, cell.case, published.x)
        elif cell.case.startswith("bench"):
            batch = published.x
            modelled = 1000 * clock.seconds([_BENCH_CONTEXT] * batch)
        elif cell.case.startswith("prompts"):
            modelled = _prompt_token(clock, published.x)
        else:
            modelled = _throughput(clock, published.x, cell.seed)
        error = modelled / published.published - 1
        point = {"x": published.x, "batch": batch, "published": published.published}
        rows.append({**about, **point, "modelled": modelled, "error": error, "basis": HONEST})
    return rows


def _of_case(name: str, case: str) -> style.DataFrame:
    return gpu_times.rows(Path(__file__).with_name(name), case=case)


def _launch(clock: GpuClock, case: str, number: int) -> tuple[float, int]:
    """Milliseconds per step of a launch, and its sequences.

    A sequence that ends within a launch stays to its end.
    """
    prompts = _of_case("prompts.csv", case)
    done = 10 * number + 1
    lengths = prompts["prompt_tokens"][prompts["output_tokens"] > done].to_numpy() + done
    seconds = [clock.seconds((lengths + step).tolist()) for step in _STEPS]
    return 1000 * float(np.mean(seconds)), len(lengths)


def _prompt_token(clock: GpuClock, step_tokens: int) -> float:
    """Microseconds per prompt token, in steps of whole prompts of about ``step_tokens`` tokens."""
    lengths = _of_case("prompts.csv", "lambda_h100_320")["prompt_tokens"]
    steps = lengths.groupby(lengths.cumsum() // step_tokens)
    seconds = sum(clock.seconds([], [(n, n) for n in step], len(step)) for _, step in steps)
    return 1e6 * seconds / lengths.sum()


def _throughput(clock: GpuClock, most_tokens: int, seed: int) -> float:
    """Prompt and output tokens per second of the run of ``anyscale``."""
    drawn = np.rint(np.random.default_rng(seed).exponential(128, 200_000))
    outputs = np.maximum(drawn[drawn <= most_tokens][:1000], 1).astype(int).tolist()
    run = serving.serve("paged", clock, [512] * 1000, outputs, [0.0] * 1000, prefill_first=True)
    return (512_000 + sum(outputs)) / run.seconds


def _draw(rows: style.DataFrame) -> style.Figure:
    cases = rows.groupby("title", sort=False)
    figure, axes, _ = style.panel_grid(len(cases), height=1.9)
    for axis, (title, points) in zip(axes, cases, strict=True):
        published, modelled = style.dots(style.BLACK, "o"), style.line(style.BLUE, "x")
        style.curve(axis, points, "x", "published", label="published", **published)
        style.curve(axis, points, "x", "modelled", label="modelled", markersize=2, **modelled)
        mean = 100 * points["error"].abs().mean()
        top = 1.15 * points[["published", "modelled"]].to_numpy().max()
        axis.set(title=f"{title}\nmean |error| {mean:.1f} %", xlim=(0, None), ylim=(0, top))
        axis.set(xlabel=points["x_label"].iloc[0], ylabel=points["unit"].iloc[0])
    return style.shared_legend(figure, xlabel=serving.noted(figure, ""))


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


EXPERIMENT = Experiment(
    name="published_serving",
    figure="published times of engines on A100 and H100 GPUs beside the clock that serving runs on",
    options=PublishedServing(),
    quick=PublishedServing(case=("lambda_h100_10", "bench_8b", "bench_70b")),
    run_cell=run_cell,
    plot=style.plotter({"published_serving": _draw}, {"summary": (_summary, "%.4g")}),
)
