"""Memory saved by sharing blocks: parallel sampling and beam search with 2 to 6 sequences.

Redoes figure 15 of the PagedAttention paper (Kwon et al., SOSP 2023): the blocks saved by sharing,
as a fraction of the blocks of the same sequences without sharing.  A request is decoded with n
sequences through a real cache manager: the prompt is allocated once and forked, and appending to a
shared block copies it.  Requests do not share with each other (prefix caching is off).  Blocks are
counted after every step and summed over all steps of all requests.

Lengths are log-normal with the means of the paper's Alpaca and ShareGPT requests (19.31 prompt and
58.45 output tokens, 161.31 and 337.99; the spread is assumed).

* Parallel sampling: n independent samples of the request's output length.
* Beam search: n beams.  Random choice stands in for a model's scores: in each step every beam but
  the best is dropped with probability ``drop_probability`` and replaced by a fork of a random kept
  beam.  The higher the probability, the younger the last common ancestor of the beams, and the more
  they share.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from cache import CacheManager, Sequence, make_manager
from experiments import style
from experiments.harness import Axis, Count, Experiment, Needs, Options, grid, one_of
from experiments.load.engine_models import Manager
from experiments.load.workloads import LONGEST, PAPER_LENGTHS, draw_lengths

_Probability = Needs("a number from 0 to 1", lambda value: 0 <= value <= 1)


@dataclass(frozen=True, kw_only=True)
class Sharing(Options):
    """The grid: data sets x sequences x (parallel sampling and beam searches) x managers."""

    like: Axis[Annotated[str, one_of(PAPER_LENGTHS)]] = ("alpaca", "sharegpt")
    """The data set whose lengths the requests resemble."""
    num_sequences: Axis[Count] = (2, 3, 4, 5, 6)
    """Samples or beams per request."""
    drop_probability: Axis[Annotated[float, _Probability]] = (0.01, 0.05, 0.2)
    """Probability that a beam is dropped in a step.  None in a cell: parallel sampling."""
    manager: Axis[Manager] = ("vllm_v1",)
    """A cache manager with fork."""
    block_size: Axis[Count] = (16,)
    num_requests: Count = 50
    """Requests of each data set."""


def cells(options: Sharing) -> Iterator[Sharing]:
    yield from grid(options, drop_probability=(None, *options.drop_probability))


def run_cell(cell: Sharing) -> list[dict[str, Any]]:
    lengths = draw_lengths(np.random.default_rng(cell.seed), cell.num_requests, cell.like)
    blocks_per_sequence = -(-2 * LONGEST // cell.block_size)
    manager = make_manager(
        cell.manager,
        num_blocks=(cell.num_sequences + 1) * blocks_per_sequence,  # 1 of room for watermarks
        block_size=cell.block_size,
        enable_prefix_caching=False,
    )
    rng = random.Random(cell.seed)
    counts = [
        decode(manager, prompt, output, cell.num_sequences, cell.drop_probability, rng)
        for prompt, output in zip(*lengths, strict=True)
    ]
    shared, apart = map(sum, zip(*counts, strict=True))
    prompt, output = map(np.mean, lengths)
    return [
        {
            "trace": f"{cell.like}_like",
            "mode": "parallel" if cell.drop_probability is None else "beam",
            **cell.columns("drop_probability", "num_sequences", "manager", "block_size"),
            "requests": cell.num_requests,
            "mean_prompt_tokens": float(prompt),
            "mean_output_tokens": float(output),
            "block_steps": shared,
            "block_steps_apart": apart,
            "copied_blocks": manager.stats.copied_blocks,
            "saved_fraction": 1 - shared / apart,
        }
    ]


def decode(
    manager: CacheManager,
    prompt_length: int,
    output_length: int,
    num_sequences: int,
    drop_probability: float | None,
    rng: random.Random,
) -> tuple[int, int]:
    """Decode one request in the empty ``manager``, and free it.

    Returns the blocks in use and the blocks that the same sequences would use without sharing, both
    summed over the steps.
    """
    shared = apart = 0
    sequences = [Sequence(0, array("I", bytes(4 * prompt_length)))]
    manager.allocate(sequences[0])
    for seq_id in range(1, num_sequences):
        sequences.append(_forked(manager, sequences[0], seq_id))
    next_id = num_sequences
    for length in range(prompt_length + 1, prompt_length + output_length + 1):
        if drop_probability is not None and length > prompt_length + 1:
            kept = [i == 0 or rng.random() >= drop_probability for i in range(num_sequences)]
            parents = [seq for seq, stays in zip(sequences, kept, strict=True) if stays]
            for i, stays in enumerate(kept):
                if not stays:
                    child = _forked(manager, rng.choice(parents), next_id)
                    manager.free(sequences[i])
                    sequences[i] = child
                    next_id += 1
        for token_id, seq in enumerate(sequences):
            seq.append_token(token_id)
            manager.append(seq)
        shared += manager.num_blocks - manager.num_free_blocks
        apart += num_sequences * -(-length // manager.block_size)
    for seq in sequences:
        manager.free(seq)
    return shared, apart


def _forked(manager: CacheManager, parent: Sequence, seq_id: int) -> Sequence:
    child = parent.fork(seq_id)
    manager.fork(parent, child)
    return child


def _draw(rows: style.DataFrame) -> style.Figure:
    """A panel per data set, for the first manager and block size of the table."""
    for column in ("manager", "block_size"):
        rows = rows[rows[column] == rows[column].iloc[0]]
    probabilities = sorted(rows["drop_probability"].dropna().unique())
    labels = [f"beam search, drop probability {probability:g}" for probability in probabilities]
    lines = style.lines_of(["parallel sampling", *labels]).values()
    figure, axes, _ = style.panel_grid(rows["trace"].nunique(), height=2.1, width=3.5, columns=2)
    for axis, (trace, of_trace) in zip(axes, rows.groupby("trace", sort=False), strict=True):
        for probability, line in zip((-1, *probabilities), lines, strict=True):
            same = of_trace[of_trace["drop_probability"].fillna(-1) == probability]
            style.curve(axis, same, "num_sequences", "saved_fraction", 100, **line)
        prompt, output = of_trace[["mean_prompt_tokens", "mean_output_tokens"]].iloc[0]
        axis.set(title=f"{trace}: {prompt:,.0f} prompt, {output:,.0f} output tokens")
        axis.set(ylim=(0, 100), xticks=sorted(of_trace["num_sequences"].unique()))
    labels = {"xlabel": "sequences per request", "ylabel": "blocks saved by sharing (%)"}
    return style.shared_legend(figure, columns=2, **labels)


EXPERIMENT = Experiment(
    name="sharing",
    figure="PagedAttention fig. 15: blocks saved by parallel sampling and beam search",
    options=Sharing(),
    quick=Sharing(num_sequences=(2, 4, 6), num_requests=8),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"sharing": _draw}),
)
