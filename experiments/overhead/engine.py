"""Engine steps: microseconds of scheduling, compared with vLLM's scheduler.

A closed loop keeps a number of requests running: when a request ends, the next begins.  Lengths of
prompts and outputs are uniform, by default as in Nano-vLLM's benchmark.  No blocks are shared, so
the managers do the most work.  Steps are timed once all requests run.  No model runs.

* ``schedule``: ``Scheduler.schedule`` with its cache manager.  It hashes full blocks.
* ``finish``: ``Scheduler.finish``, which frees the blocks of finished sequences.

vLLM's scheduler serves the same loop if it can be imported.  Only vLLM's ``schedule()`` is timed.
vLLM hashes blocks when tokens are added and frees blocks in ``update_from_output``, so both are not
timed.  ``engine.csv`` has the ratio of our time to vLLM's: for ``schedule`` alone and with
``finish``.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import cache
from cache.managers import manager_class
from cache.serving.open_loop import engine_without_model
from cache.serving.sampling_params import SamplingParams
from experiments import quantiles, style
from experiments.harness import Absent, Axis, Count, Lengths, Options, grid
from experiments.load.engine_models import Manager
from experiments.load.own_class import named, spec_of
from experiments.overhead.baselines import VLLMScheduler

_BLOCK_SIZE = 16
_VOCABULARY = 32_000


@dataclass(frozen=True, kw_only=True)
class Engine(Options):
    """The grid: managers x running sequences."""

    manager: Axis[Manager] = ("vllm_v1", *sorted(set(cache.MANAGERS) - {"vllm_v1"}))
    """Cache managers of the engine."""
    num_sequences: Axis[Count] = (1, 4, 16, 64, 256, 1024)
    """Requests running."""
    lengths: Lengths = (100, 1024)
    """Minimum and maximum length of a prompt, and of an output, in tokens."""
    num_steps: Count = 500
    """Steps that count."""


def cells(options: Engine) -> Iterator[Engine | Absent]:
    """``manager`` is "vLLM" for vLLM's scheduler."""
    yield from grid(options, Engine, manager=map(named, options.manager))
    if importlib.util.find_spec("vllm"):
        yield from grid(options, Engine, manager=("vLLM",))
    else:
        yield Absent("vLLM is not installed")


class _Ours:
    """An engine that times the calls of its scheduler."""

    version = ""

    def __init__(self, cell: Engine) -> None:
        longest = 2 * cell.lengths[1]
        # Contiguous managers reserve powers of two.
        blocks_per_sequence = 1 << (-(-longest // _BLOCK_SIZE) - 1).bit_length()
        design = manager_class(spec_of(cell.manager))
        reserved: Any = {"max_model_len": longest} if design.reserves else {}
        manager = cache.make_manager(
            design,
            block_size=_BLOCK_SIZE,
            # Includes room for watermarks, so that nothing is preempted.
            num_blocks=cell.num_sequences * blocks_per_sequence * 21 // 20 + 1,
            **reserved,
        )
        self._engine = engine_without_model(
            manager,
            max_num_seqs=cell.num_sequences,
            max_num_batched_tokens=max(8192, longest),
            max_model_len=longest,
        )
        self._spent = {"schedule": 0.0, "finish": 0.0}
        for phase in self._spent:
            self._time(phase)

    def _time(self, phase: str) -> None:
        call = getattr(self._engine.scheduler, phase)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args)
            self._spent[phase] += time.perf_counter() - begin
            return result

        setattr(self._engine.scheduler, phase, timed)

    def add(self, token_ids: list[int], num_output_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
        self._engine.add(token_ids, params)

    @property
    def num_waiting(self) -> int:
        return len(self._engine.scheduler.waiting)

    def step(self) -> tuple[int, dict[str, float]]:
        """Run a step.  Returns the number of requests that ended, and the seconds of its phases."""
        self._spent.update(schedule=0.0, finish=0.0)
        _, finished = self._engine.step()
        return len(finished), dict(self._spent)


def run_cell(cell: Engine) -> list[dict[str, Any]]:
    shortest, longest = cell.lengths
    engine: _Ours | VLLMScheduler
    if cell.manager == "vLLM":
        engine = VLLMScheduler(cell.num_sequences, 2 * longest, _BLOCK_SIZE)
    else:
        engine = _Ours(cell)
    generator = np.random.default_rng(cell.seed)

    def sample(minimum: int = shortest) -> int:
        return int(generator.integers(minimum, longest + 1))

    def add(num_output_tokens: int) -> None:
        prompt = generator.integers(_VOCABULARY, size=sample()).tolist()
        engine.add(prompt, num_output_tokens)

    def step() -> dict[str, float]:
        """Run a step and add as many requests as have ended."""
        num_finished, seconds = engine.step()
        for _ in range(num_finished):
            add(sample())
        return seconds

    for _ in range(cell.num_sequences):
        add(sample(1))  # shorter outputs, so that the first requests end at different times
    while engine.num_waiting:
        step()
    steps = [step() for _ in range(cell.num_steps)]
    return [
        {
            "implementation": str(cell.manager),
            "version": engine.version,
            "num_sequences": cell.num_sequences,
            "least_tokens": shortest,
            "most_tokens": longest,
            "steps": cell.num_steps,
            "phase": phase,
            **quantiles.of_work("step", [seconds[phase] for seconds in steps]),
        }
        for phase in steps[0]
    ]


def table(rows: style.DataFrame) -> style.DataFrame:
    """Time of a scheduler step and ratio to vLLM's time, by number of running sequences.

    Medians for ``schedule`` alone.  Means with ``finish``, because few steps call it.
    """
    rows = rows.astype({"num_sequences": int})
    by = ["implementation", "num_sequences"]
    finish = rows[rows["phase"] == "finish"].set_index(by)["us_mean"]
    rows = rows[rows["phase"] == "schedule"]
    finish = finish.reindex(rows.set_index(by).index, fill_value=0.0)
    rows = rows.assign(mean_with_finish_us=rows["us_mean"] + finish.to_numpy())
    rows = rows.rename(columns={"us": "schedule_us"})
    theirs = rows[rows["implementation"] == "vLLM"].set_index("num_sequences")
    times = ["schedule_us", "mean_with_finish_us"]
    ratios = rows[times] / theirs[times].reindex(rows["num_sequences"]).to_numpy()
    rows[["ratio_to_vllm", "ratio_with_finish"]] = ratios
    return rows[[*by, *times, "ratio_to_vllm", "ratio_with_finish"]]


def draw(rows: style.DataFrame) -> style.Figure:
    """Median of ``schedule`` against the number of running sequences."""
    figure, (axes,), _ = style.panel_grid(1, height=2.4, width=4.5)
    rows = rows[rows["phase"] == "schedule"]
    for name, line in style.lines_of(rows["implementation"].unique()).items():
        style.curve(axes, rows[rows["implementation"] == name], "num_sequences", "us", **line)
    axes.set(yscale="log", xlabel="running sequences")
    axes.set(ylabel="scheduler and manager\n(µs per step, median)")
    style.log_x(axes, sorted(set(rows["num_sequences"])))
    axes.legend(fontsize=6, ncols=2)
    return figure
