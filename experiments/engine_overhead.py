"""What the engine costs beside the model: microseconds per step of scheduling, and the rest.

A closed loop keeps a number of requests running: whenever one ends, the next begins.  Prompts and
outputs are uniform between two lengths, by default those of the benchmark that Nano-vLLM publishes,
and nothing is shared, so the managers do the most work.  Steps count once all requests run.

* ``schedule``: the scheduler and the cache manager below it: choosing tokens, allocating, freeing.
* ``prepare``: block tables, slots and positions as tensors.
* ``model``: moving blocks, layers, logits.
* ``rest``: sampling, appending tokens, bookkeeping of requests.

Without a model (``model`` none) logits are zeros and no K/V are computed; what the host does is the
same.  With one, ``share`` is the part that a phase has of the time of all steps.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import cache
from experiments import quantiles, style
from experiments.harness import Axis, Count, Experiment, GridOnly, Lengths, Options, grid
from experiments.load import engine_models
from experiments.load.engine_models import Manager, Model

if TYPE_CHECKING:
    import torch

    from models import LLM

_BLOCK_SIZE = 16
_PHASE_LINES = {
    "schedule": style.line(style.BLUE, "o"),
    "prepare": style.line(style.GREEN, "^", "dashed"),
    "model": style.line(style.BLACK, "s"),
    "rest": style.line(style.ORANGE, "D", "dashed", fill=False),
}
_QUANTILES = {"": 0.5, "_p20": 0.2, "_p80": 0.8, "_mean": None}


@dataclass(frozen=True, kw_only=True)
class EngineOverhead(Options):
    """The grid: managers x running sequences without a model, and running sequences with one."""

    manager: Axis[Manager] = ("vllm_v1", *sorted(set(cache.MANAGERS) - {"vllm_v1"}))
    """Cache managers; the first one also serves a model."""
    num_sequences: Axis[Count] = (1, 4, 16, 64, 256, 1024)
    """Requests running, without a model."""
    lengths: Lengths = (100, 1024)
    """Fewest and most tokens of a prompt, and of an output."""
    num_steps: Count = 500
    """Steps that count, without a model."""
    model: Model | None = None
    """A shape of engine_models. None: qwen3-0.6b on a GPU, llama-100m on a CPU."""
    model_num_sequences: GridOnly[tuple[Count, ...]] = (1, 8, 32)
    """Requests running on the model."""
    model_lengths: GridOnly[Lengths] = (16, 128)
    """Fewest and most tokens of a prompt, and of an output, on the model."""
    model_num_steps: GridOnly[Count] = 100
    """Steps that count on the model."""


def cells(options: EngineOverhead) -> Iterator[EngineOverhead]:
    """``model`` is None where there is no model."""
    yield from grid(options, model=None)
    yield from grid(
        options,
        model=options.model or engine_models.default_model(),
        manager=options.manager[:1],
        num_sequences=options.model_num_sequences,
        lengths=options.model_lengths,
        num_steps=options.model_num_steps,
    )


class _NoModel:
    """In the place of a model: logits of zeros."""

    def __init__(self, model) -> None:
        self.config = model.config

    def __call__(self, token_ids: torch.Tensor, *_) -> torch.Tensor:
        return token_ids

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_zeros(len(hidden), 1)


def _timed(llm: LLM) -> Callable[[], tuple[int, dict[str, float]]]:
    """What runs a step of the engine, whose methods are wrapped for it: the requests that ended,
    and the seconds of each phase."""
    engine, spent = llm.engine, defaultdict(float)

    def wrap(owner: object, method: str, phase: str) -> None:
        call = getattr(owner, method)

        def timed(*args):
            begin = time.perf_counter()
            result = call(*args)
            if phase == "run" and llm.device.type == "cuda":
                import torch

                torch.cuda.synchronize(llm.device)
            spent[phase] += time.perf_counter() - begin
            return result

        setattr(owner, method, timed)

    wrap(engine.scheduler, "schedule", "schedule")
    wrap(engine.scheduler, "finish", "schedule")
    wrap(engine.runner, "prepare", "prepare")
    wrap(engine.runner, "run", "run")

    def step() -> tuple[int, dict[str, float]]:
        spent.clear()
        begin = time.perf_counter()
        _, finished = engine.step()
        total = time.perf_counter() - begin
        return len(finished), {
            "schedule": spent["schedule"],
            "prepare": spent["prepare"],
            "model": spent["run"] - spent["prepare"],
            "rest": total - spent["schedule"] - spent["run"],
        }

    return step


def run_cell(cell: EngineOverhead) -> list[dict[str, Any]]:
    from models import SamplingParams

    longest = 2 * cell.lengths[1]
    # A power of two, as contiguous reserves them.
    blocks_per_sequence = 1 << (-(-longest // _BLOCK_SIZE) - 1).bit_length()
    llm = engine_models.make_llm(
        cell.model or "tiny",
        manager=cell.manager,
        block_size=_BLOCK_SIZE,
        # With room for watermarks: nothing is preempted.
        num_blocks=cell.num_sequences * blocks_per_sequence * 21 // 20 + 1,
        max_num_seqs=cell.num_sequences,
        max_model_len=longest,
        max_num_batched_tokens=max(8192, longest),
        cuda_graphs=None if cell.model else False,  # a graph would replay the model
        overlap=False,  # phases are timed one by one
        seed=cell.seed,
    )
    if cell.model is None:
        llm.engine.runner.model = _NoModel(llm.model)
    timed_step = _timed(llm)
    generator = np.random.default_rng(cell.seed)
    least, most = cell.lengths

    def draw(least: int = least) -> int:
        return int(generator.integers(least, most + 1))

    def add(num_output_tokens: int) -> None:
        prompt = engine_models.random_tokens(llm, generator, draw())
        params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
        llm.engine.add(prompt, params)

    def step() -> dict[str, float]:
        """Run a step and add as many requests as have ended."""
        num_finished, seconds = timed_step()
        for _ in range(num_finished):
            add(draw())
        return seconds

    for _ in range(cell.num_sequences):
        add(draw(1))  # somewhere on its way, so that the first ones do not all end together
    while llm.engine.scheduler.waiting:
        step()
    steps = [step() for _ in range(cell.num_steps)]
    spans = {phase: [seconds[phase] for seconds in steps] for phase in _PHASE_LINES}
    total = sum(map(sum, spans.values()))
    return [
        {
            "model": cell.model or "none",
            "manager": cell.manager,
            "num_sequences": cell.num_sequences,
            "least_tokens": least,
            "most_tokens": most,
            "steps": cell.num_steps,
            "phase": phase,
            **quantiles.columns("us_per_step", [1e6 * s for s in seconds], _QUANTILES),
            "share": sum(seconds) / total if cell.model else None,
        }
        for phase, seconds in spans.items()
    ]


def _draw(rows: style.DataFrame) -> style.Figure:
    figure, (left, right), _ = style.panel_grid(2, height=2.1, width=3.5)
    scheduling = rows[(rows["model"] == "none") & (rows["phase"] == "schedule")]
    for manager, line in style.lines_of(scheduling["manager"].unique()).items():
        of_manager = scheduling[scheduling["manager"] == manager]
        style.curve(left, of_manager, "num_sequences", "us_per_step", **line)
    left.set(xscale="log", yscale="log", xlabel="running sequences")
    left.set(ylabel="scheduler and manager\n(µs per step)", title="without a model, median")
    left.set_ylim(top=10 * left.get_ylim()[1])

    served = rows[rows["model"] != "none"]
    for phase, line in _PHASE_LINES.items():
        of_phase = served[served["phase"] == phase]
        style.curve(right, of_phase, "num_sequences", "us_per_step_mean", **line, label=phase)
    steps = served.groupby("num_sequences")["us_per_step_mean"].sum()
    right.plot(steps.index, 0.05 * steps, color=style.GREY, linestyle="dotted", label="5 % of all")
    title = f"{served['model'].iloc[0]}, mean" if len(served) else ""
    right.set(yscale="log", xlabel="running sequences", title=title)
    style.log_x(right, steps.index)
    right.set(ylabel="time (µs per step)", ylim=(None, 10 * right.get_ylim()[1]))
    for axes, part in ((left, scheduling), (right, served)):
        axes.set_visible(len(part) > 0)
        if len(part):
            axes.legend(fontsize=6, ncols=2)
    return figure


EXPERIMENT = Experiment(
    name="engine_overhead",
    figure="microseconds per step of scheduler, manager and input preparation vs batch size",
    options=EngineOverhead(),
    quick=EngineOverhead(
        manager=("vllm_v1", "paged"),
        num_sequences=(1, 16, 256),
        num_steps=50,
        model="tiny",
        model_num_sequences=(1, 8),
        model_num_steps=20,
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"engine_overhead": _draw}),
    gpu="optional",
    timed=True,
)
