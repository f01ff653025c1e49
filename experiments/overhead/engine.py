"""Engine steps: microseconds of scheduling and of the rest, beside the model.

A closed loop keeps a number of requests running: whenever one ends, the next begins.  Prompts and
outputs are uniform between two lengths, by default as in Nano-vLLM's published benchmark.  Nothing
is shared, so the managers do the most work.  Steps count once all requests run.

* ``schedule``: ``Scheduler.schedule`` with the cache manager below it.  It hashes full blocks.
* ``finish``: ``Scheduler.finish``, which frees the blocks of finished sequences.
* ``prepare``: block tables, slots and positions as tensors.
* ``model``: moving blocks, layers, logits.
* ``rest``: sampling, appending tokens, bookkeeping of requests.

Without a model (``model`` none) logits are zeros and no K/V are computed; the host does the same
work.  With a model, ``share`` is the fraction of the time of all steps that a phase takes.
vLLM's scheduler serves the same loop where it can be imported.  Only its ``schedule()`` is timed,
which neither hashes blocks (that is done when tokens are added) nor frees them (that is done in
``update_from_output``).  ``engine.csv`` has the ratio of our ``schedule`` to it, once alone and
once with ``finish``.
"""

from __future__ import annotations

import importlib.util
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import cache
from experiments import style
from experiments.harness import Absent, Axis, Count, GridOnly, Lengths, Options, grid
from experiments.load import engine_models
from experiments.load.engine_models import Manager, Model
from experiments.overhead import timing
from experiments.overhead.baselines import VLLMScheduler

if TYPE_CHECKING:
    import torch

    from models import LLM

_BLOCK_SIZE = 16
_LINES = {
    "schedule": style.line(style.BLUE, "o"),
    "finish": style.line(style.RED, "v", "dotted"),
    "prepare": style.line(style.GREEN, "^", "dashed"),
    "model": style.line(style.BLACK, "s"),
    "rest": style.line(style.ORANGE, "D", "dashed", fill=False),
}


@dataclass(frozen=True, kw_only=True)
class Engine(Options):
    """The grid: managers x running sequences without a model, and running sequences with one."""

    manager: Axis[Manager] = ("vllm_v1", *sorted(set(cache.MANAGERS) - {"vllm_v1"}))
    """Cache managers of the engine; the first one also serves a model."""
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
    cuda_graphs: bool = True
    """Replay CUDA graphs of decode steps, on a GPU."""


def cells(options: Engine) -> Iterator[Engine | Absent]:
    """``model`` is None without a model; ``manager`` is "vLLM" for vLLM's scheduler."""
    yield from grid(options, Engine, model=None)
    if importlib.util.find_spec("vllm"):
        yield from grid(options, Engine, model=None, manager=("vLLM",))
    else:
        yield Absent("vLLM is not installed")
    yield from grid(
        options,
        Engine,
        model=options.model or engine_models.default_model(),
        manager=options.manager[:1],
        num_sequences=options.model_num_sequences,
        lengths=options.model_lengths,
        num_steps=options.model_num_steps,
    )


class _NoModel:
    """Stands in for a model: logits of zeros."""

    def __init__(self, model) -> None:
        self.config = model.config

    def __call__(self, token_ids: torch.Tensor, *_) -> torch.Tensor:
        return token_ids

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_zeros(len(hidden), 1)


class _Ours:
    """An LLM whose steps are timed phase by phase."""

    version = ""

    def __init__(self, cell: Engine) -> None:
        longest = 2 * cell.lengths[1]
        # A power of two, as contiguous reserves them.
        blocks_per_sequence = 1 << (-(-longest // _BLOCK_SIZE) - 1).bit_length()
        self.llm = engine_models.make_llm(
            cell.model or "tiny",
            manager=cell.manager,
            block_size=_BLOCK_SIZE,
            # With room for watermarks: nothing is preempted.
            num_blocks=cell.num_sequences * blocks_per_sequence * 21 // 20 + 1,
            max_num_seqs=cell.num_sequences,
            max_model_len=longest,
            max_num_batched_tokens=max(8192, longest),
            # A graph would replay the model that _NoModel replaces.
            cuda_graphs=None if cell.model and cell.cuda_graphs else False,
            overlap=False,  # phases are timed one by one
            seed=cell.seed,
        )
        if cell.model is None:
            self.llm.engine.runner.model = _NoModel(self.llm.model)
        self._step = _timed_step(self.llm)

    def add(self, token_ids: list[int], num_output_tokens: int) -> None:
        from models import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
        self.llm.engine.add(token_ids, params)

    @property
    def num_waiting(self) -> int:
        return len(self.llm.engine.scheduler.waiting)

    def step(self) -> tuple[int, dict[str, float]]:
        """Number of requests that ended in this step, and the seconds of its phases."""
        return self._step()


def _timed_step(llm: LLM) -> Callable[[], tuple[int, dict[str, float]]]:
    """Wrap the engine's methods with timers; the result runs one step."""
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
    wrap(engine.scheduler, "finish", "finish")
    wrap(engine.runner, "prepare", "prepare")
    wrap(engine.runner, "run", "run")

    def step() -> tuple[int, dict[str, float]]:
        spent.clear()
        begin = time.perf_counter()
        _, finished = engine.step()
        total = time.perf_counter() - begin
        return len(finished), {
            "schedule": spent["schedule"],
            "finish": spent["finish"],
            "prepare": spent["prepare"],
            "model": spent["run"] - spent["prepare"],
            "rest": total - spent["schedule"] - spent["finish"] - spent["run"],
        }

    return step


def run_cell(cell: Engine) -> list[dict[str, Any]]:
    least, most = cell.lengths
    if cell.manager == "vLLM":
        engine = VLLMScheduler(cell.num_sequences, 2 * most, _BLOCK_SIZE)
        vocab_size = 32_000
    else:
        engine = _Ours(cell)
        vocab_size = engine.llm.config.vocab_size
    generator = np.random.default_rng(cell.seed)

    def sample(least: int = least) -> int:
        return int(generator.integers(least, most + 1))

    def add(num_output_tokens: int) -> None:
        prompt = generator.integers(vocab_size, size=sample()).tolist()
        engine.add(prompt, num_output_tokens)

    def step() -> dict[str, float]:
        """Run a step and add as many requests as have ended."""
        num_finished, seconds = engine.step()
        for _ in range(num_finished):
            add(sample())
        return seconds

    for _ in range(cell.num_sequences):
        add(sample(1))  # outputs partly done, so that the first requests do not all end together
    while engine.num_waiting:
        step()
    steps = [step() for _ in range(cell.num_steps)]
    spans = {phase: [seconds[phase] for seconds in steps] for phase in steps[0]}
    total = sum(map(sum, spans.values()))
    return [
        {
            "model": cell.model or "none",
            "implementation": cell.manager,
            "version": engine.version,
            "num_sequences": cell.num_sequences,
            "least_tokens": least,
            "most_tokens": most,
            "steps": cell.num_steps,
            "phase": phase,
            **timing.columns("step", seconds),
            "share": sum(seconds) / total if cell.model else None,
        }
        for phase, seconds in spans.items()
    ]


def _scheduling(rows: style.DataFrame) -> style.DataFrame:
    return rows[(rows["model"] == "none") & (rows["phase"] == "schedule")]


def table(rows: style.DataFrame) -> style.DataFrame | None:
    """Time of a scheduler step, and its ratio to vLLM's, by running sequences.

    Medians of ``schedule``; with ``finish``, which few steps call, means of both.
    """
    finishing = rows[(rows["model"] == "none") & (rows["phase"] == "finish")]
    rows = _scheduling(rows).astype({"num_sequences": int})
    if rows.empty:
        return None
    by = ["implementation", "num_sequences"]
    finish = finishing.set_index(by)["us_mean"].reindex(rows.set_index(by).index, fill_value=0.0)
    rows["mean_with_finish_us"] = rows["us_mean"] + finish.to_numpy()
    rows = rows.rename(columns={"us": "schedule_us"})
    theirs = rows[rows["implementation"] == "vLLM"].set_index("num_sequences")
    times = ["schedule_us", "mean_with_finish_us"]
    ratios = rows[times] / theirs[times].reindex(rows["num_sequences"]).to_numpy()
    rows[["ratio_to_vllm", "ratio_with_finish"]] = ratios
    return rows[[*by, *times, "ratio_to_vllm", "ratio_with_finish"]]


def draw(rows: style.DataFrame) -> style.Figure:
    figure, (left, right), _ = style.panel_grid(2, height=2.1, width=3.5)
    scheduling = _scheduling(rows)
    for name, line in style.lines_of(scheduling["implementation"].unique()).items():
        of_name = scheduling[scheduling["implementation"] == name]
        style.curve(left, of_name, "num_sequences", "us", **line)
    left.set(xscale="log", yscale="log", xlabel="running sequences")
    left.set(ylabel="scheduler and manager\n(µs per step)", title="without a model, median")
    left.set_ylim(top=10 * left.get_ylim()[1])

    served = rows[rows["model"] != "none"]
    for phase, line in _LINES.items():
        of_phase = served[served["phase"] == phase]
        style.curve(right, of_phase, "num_sequences", "us_mean", **line, label=phase)
    steps = served.groupby("num_sequences")["us_mean"].sum()
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
