"""Memory saved by sharing blocks: parallel sampling and beam search with 2 to 6 sequences.

Redoes figure 15 of the PagedAttention paper (Kwon et al., SOSP 2023): the blocks saved by sharing,
divided by the blocks of the same sequences without sharing.  The engine serves one request at a
time with a real cache manager: a prompt is allocated once and forked, and appending to a shared
block copies this block.  Prefix caching is off.  Blocks are summed over all decode steps.

Lengths are log-normal with the paper's means: 19.31 prompt and 58.45 output tokens for Alpaca,
161.31 and 337.99 for ShareGPT.  Their spread is assumed.  No model runs: scores of tokens are
random, so beams survive by chance.  A beam that branched off later shares more blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from cache.managers import make_manager, manager_class
from cache.serving import open_loop
from cache.serving.scheduler import Step
from experiments import style
from experiments.harness import Absent, Axis, Count, Experiment, Options, grid, one_of
from experiments.load.engine_models import Manager
from experiments.load.own_class import named, spec_of
from experiments.load.workloads import LONGEST, PAPER_LENGTHS, draw_lengths

_MODES = {"parallel": "n", "beam": "beam_width"}
"""The argument of SamplingParams for each mode."""


@dataclass(frozen=True, kw_only=True)
class Sharing(Options):
    """The grid: data sets x modes x sequences x managers."""

    like: Axis[Annotated[str, one_of(PAPER_LENGTHS)]] = ("alpaca", "sharegpt")
    """Data set whose prompt and output lengths the requests resemble."""
    mode: Axis[Literal["parallel", "beam"]] = ("parallel", "beam")
    """Parallel sampling, or beam search."""
    num_sequences: Axis[Count] = (2, 3, 4, 5, 6)
    """Samples or beams per request."""
    manager: Axis[Manager] = ("vllm_v1",)
    """A cache manager. Managers without ``fork`` store each sequence apart and have no beams."""
    block_size: Axis[Count] = (16,)
    num_requests: Count = 50
    """Number of requests of each data set."""


def cells(options: Sharing) -> Iterator[Sharing | Absent]:
    for cell in grid(options, manager=map(named, options.manager)):
        can_run = cell.mode == "parallel" or manager_class(spec_of(cell.manager)).can_fork
        yield cell if can_run else Absent(f"beam search: {cell.manager} does not offer fork")


def run_cell(cell: Sharing) -> list[dict[str, Any]]:
    prompts, outputs = draw_lengths(np.random.default_rng(cell.seed), cell.num_requests, cell.like)
    manager = make_manager(
        spec_of(cell.manager),
        # Room for watermarks, and for new beams, which are forked before old beams are freed.
        num_blocks=2 * (cell.num_sequences + 1) * -(-2 * LONGEST // cell.block_size),
        block_size=cell.block_size,
        enable_prefix_caching=False,
    )
    limits: dict[str, Any] = {"max_num_seqs": 512, "max_num_batched_tokens": 2 * LONGEST}
    engine = open_loop.engine_without_model(manager, **limits, max_model_len=2 * LONGEST + 1)
    shared = apart = 0

    def count_blocks(step: Step, seconds: float) -> None:
        nonlocal shared, apart
        if step.num_tokens == len(step.sequences):  # not a prompt, which is forked after its step
            shared += manager.num_blocks - manager.num_free_blocks
            apart += sum(-(-seq.num_computed_tokens // cell.block_size) for seq in step.sequences)

    engine.on_step = count_blocks
    tokens = [array("I", bytes(4 * length)) for length in prompts]
    sampling = {_MODES[cell.mode]: cell.num_sequences}
    serial = [None, *range(len(tokens) - 1)]
    open_loop.serve(
        engine, tokens, outputs, [0.0] * len(tokens), previous=serial, sampling=sampling
    )
    return [
        {
            "trace": f"{cell.like}_like",
            **cell.columns("mode", "num_sequences", "manager", "block_size"),
            "manager": str(cell.manager),
            "requests": cell.num_requests,
            "mean_prompt_tokens": float(np.mean(prompts)),
            "mean_output_tokens": float(np.mean(outputs)),
            "block_steps": shared,
            "block_steps_apart": apart,
            "copied_blocks": manager.stats.copied_blocks,
            "saved_fraction": 1 - shared / apart,
        }
    ]


_LOOKS = {
    "parallel": {"label": "parallel sampling", **style.line(style.BLUE, "o")},
    "beam": {"label": "beam search", **style.line(style.ORANGE, "s", "dashed")},
}


def _draw(rows: style.DataFrame) -> style.Figure:
    """Draw a panel per data set, for the first manager and the first block size in the table."""
    for column in ("manager", "block_size"):
        rows = rows[rows[column] == rows[column].iloc[0]]
    traces = rows.groupby("trace", sort=False)
    figure, axes, _ = style.panel_grid(len(traces), height=2.1, width=3.5, columns=2)
    for axis, (trace, of_trace) in zip(axes, traces, strict=True):
        for mode, look in _LOOKS.items():
            of_mode = of_trace[of_trace["mode"] == mode]
            style.curve(axis, of_mode, "num_sequences", "saved_fraction", 100, **look)
        prompt, output = of_trace[["mean_prompt_tokens", "mean_output_tokens"]].iloc[0]
        axis.set(title=f"{trace}: {prompt:,.0f} prompt, {output:,.0f} output tokens")
        axis.set(ylim=(0, 100), xticks=sorted(of_trace["num_sequences"].unique()))
    ylabel = "blocks saved by sharing (%)"
    return style.shared_legend(figure, xlabel="sequences per request", ylabel=ylabel)


EXPERIMENT = Experiment(
    name="sharing",
    figure="PagedAttention fig. 15: blocks saved by parallel sampling and beam search",
    options=Sharing(),
    quick=Sharing(num_sequences=(2, 4, 6), num_requests=8),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"sharing": _draw}),
)
