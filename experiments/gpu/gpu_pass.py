"""Ten minutes on a GPU: ``python -m experiments gpu-pass --out DIR --minutes 9``.

Measures in order of importance until the time is up: correctness, latencies of every kernel beside
the baselines and the rates of the card, tiles and split counts to choose from, block sizes,
throughput of the engine, eviction policies served.  Each stage is a registered experiment on a
chosen grid, run by the harness, so a result is stored as soon as it is there.  Stages of one
experiment share its table.

    DIR/summary.txt         what was done and found, for reading
    DIR/environment.json    commit, packages, GPU, driver
    DIR/results/            experiment/device/ as in results/: tables, environments, figures
    DIR/decision.md         what ``kernels/tiles.py`` should decide, from the tile sweep

A pass that was killed goes on where it stopped with the same ``--out``, also on another machine
that has a copy of the folder.  ``--tiny`` goes through the same stages at tiny sizes, on a CPU in
Triton's interpreter, where there are no times.  Needs PyTorch 2.11 and Triton 3.6 or later, pandas,
matplotlib and tqdm; flash-attn is compared with where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.bench.compile_ahead import CompileAhead, jobs_of
from experiments.gpu import kernel_latency, tile_sweep
from experiments.harness import Experiment, Options, OptionsError, Workers, plot_results, run_sweep
from experiments.harness.environment import cuda_available, describe
from experiments.harness.store import write_atomically
from experiments.harness.workers import Outcome, Task

if TYPE_CHECKING:
    import pandas as pd

_RESERVED_S = 15.0
"""At the end, for figures."""
_CELL_LIMIT_S = 120.0
"""A cell that takes longer is given up: a kernel that hangs must not cost the other stages."""


@dataclass(frozen=True)
class Stage:
    """An experiment on a grid of its own."""

    name: str
    experiment: str
    """Its module in ``experiments``, which ends with its name."""
    options: dict[str, Any]
    tiny: dict[str, Any] | None = field(default_factory=dict)
    """Options that differ with --tiny; None: left out there."""
    fills_gpu: bool = False
    """It leaves little of the GPU's memory, so it is begun and followed by a fresh process."""

    def load(self, *, tiny: bool) -> tuple[Experiment, Options]:
        """The experiment, which may run without a GPU if tiny, and its options."""
        experiment = _experiment(self.experiment)
        if tiny:
            experiment = dataclasses.replace(experiment, gpu="optional")
        values = self.options | (self.tiny if tiny else {})
        return experiment, dataclasses.replace(experiment.options, **values)


_TINY_HEADS = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16}
_TINY_LATENCY = {
    **_TINY_HEADS,
    "batch": (2,),
    "context_len": (20,),
    "prefill": ((1, 5, 20),),
    "store_tokens": (3,),
    "move_tokens": (20,),
    "num_layers": 1,
}
STAGES: tuple[Stage, ...] = (
    Stage(
        "accuracy",
        "kernel_accuracy",
        {
            "block_size": (16,),
            "dtype": ("bfloat16", "float16"),
            "head_dim": (128,),
            "feature": ("none",),
        },
        {"head_dim": (16,), "dtype": ("bfloat16",), "block_size": (7,)},
    ),
    Stage(
        "large_accuracy",
        "gpu.large_accuracy",
        {},
        {**_TINY_HEADS, "scale": 1000, "past_32_bits": False, "dtype": ("bfloat16",)},
    ),
    Stage(
        "decode",
        "gpu.kernel_latency",
        {"part": ("decode",), "batch": (1, 8, 64, 256), "context_len": (512, 4096, 32768)},
        _TINY_LATENCY,
    ),
    Stage("prefill", "gpu.kernel_latency", {"part": ("prefill",)}, _TINY_LATENCY),
    Stage(
        "moves",
        "gpu.kernel_latency",
        {
            "part": ("norm", "gate", "store", "copy", "swap_out", "swap_in"),
            "store_tokens": (16, 256, 4096, 65536),
            "move_tokens": (256, 4096),
        },
        _TINY_LATENCY,
    ),
    Stage(
        "cascade",
        "gpu.cascade",
        {"prefix_len": (1024, 8192, 32768), "batch": (1, 16, 64, 256)},
        {**_TINY_HEADS, "prefix_len": (16,), "suffix_len": 4, "batch": (2,)},
    ),
    Stage(
        "decode_fp8",
        "gpu.kernel_latency",
        {
            "part": ("decode",),
            "batch": (1, 64, 256),
            "context_len": (4096, 32768),
            "block_size": (16,),
            "kv_dtype": "float8_e4m3fn",
        },
        None,
    ),
    Stage(
        "splits",
        "gpu.tile_sweep",
        {"part": ("splits", "prefill_splits")},
        {
            **_TINY_HEADS,
            "splits": (2,),
            "splits_batch": (1,),
            "splits_context": (70,),
            "splits_prefill": ((1, 3, 70),),
        },
    ),
    Stage(
        "tiles",
        "gpu.tile_sweep",
        {"part": ("decode", "prefill", "cascade")},
        {
            **_TINY_HEADS,
            "decode": ((1, 20),),
            "decode_tile": ((16, 4, 1),),
            "prefill": ((1, 5, 20),),
            "prefill_tile": ((16, 16, 4, 1),),
            "cascade": ((2, 16),),
        },
    ),
    Stage(
        "features",
        "kernel_accuracy",
        {"block_size": (16,), "dtype": ("bfloat16",), "head_dim": (128,)},
        None,
    ),
    Stage(
        "block_size",
        "block_size",
        {"part": ("latency",)},
        {
            "latency_block_size": (3,),
            "latency_context_len": (5,),
            "latency_batch": 1,
            "latency_implementation": ("pagelab",),
        },
    ),
    Stage("engine_throughput", "gpu.engine_throughput", {}, None, fills_gpu=True),
    Stage(
        "eager_decode",
        "gpu.kernel_latency",
        {
            "part": ("decode",),
            "launch": ("eager",),
            "batch": (1, 16, 64),
            "context_len": (512, 4096),
        },
        None,
    ),
    Stage("launch_overhead", "launch_overhead", {"num_samples": 200}, None),
    Stage(
        "eviction_serving",
        "eviction_serving",
        {"model": "qwen3-0.6b", "real_time": True, "capacity_percent": (10, 40)},
        None,
        fills_gpu=True,
    ),
    Stage("all_latencies", "gpu.kernel_latency", {}, None),
)
"""In order of importance."""


class GpuPass:
    """One pass: the stages that fit the time, and the files in ``out`` that tell of them."""

    def __init__(self, out: Path, *, deadline: float, tiny: bool) -> None:
        self.out, self.deadline, self.tiny = out, deadline, tiny
        self.results = out / "results"
        self.failed = 0
        self._started = time.monotonic()
        self._grids: dict[str, list[Options]] = {}
        """Of the stages so far, by experiment."""
        self._settled: dict[str, Outcome] = {}
        """Cells without a result in this pass: not to be tried again by a later stage."""
        self.results.mkdir(parents=True, exist_ok=True)

    def run(self, stages: Sequence[Stage] = STAGES) -> int:
        """Run ``stages`` until the time is up; returns how many cells failed or rows are wrong."""
        command = ["python", "-m", "experiments", "gpu-pass", *sys.argv[2:]]
        any_device = dataclasses.replace(stages[0].load(tiny=self.tiny)[0], gpu="optional")
        environment = json.dumps(describe(any_device, command), indent=2, ensure_ascii=False)
        write_atomically(self.out / "environment.json", environment + "\n")
        stages = [stage for stage in stages if not (self.tiny and stage.tiny is None)]
        with Workers(1, self.deadline, _CELL_LIMIT_S) as worker, self._compiling(stages):
            for stage in stages:
                if time.monotonic() >= self.deadline:
                    self.say(f"{stage.name}: not reached")
                    continue
                if stage.fills_gpu:
                    worker.end()
                self._run_stage(stage, worker)
                if stage.fills_gpu:
                    worker.end()
        self._draw(stages)
        return self.failed

    @contextlib.contextmanager
    def _compiling(self, stages: Sequence[Stage]) -> Iterator[None]:
        """Other cores compile what the stages will launch."""
        spare = len(os.sched_getaffinity(0)) - 3
        if self.tiny or spare < 1:
            yield
            return
        with CompileAhead(min(spare, 12)) as processes:
            for stage in stages:
                with contextlib.suppress(ImportError, ValueError, OSError):
                    experiment, options = stage.load(tiny=False)
                    processes.add(jobs_of(experiment.cells(options)))
            yield

    def say(self, text: str) -> None:
        """A line of the summary, which is printed too."""
        line = f"[{time.monotonic() - self._started:5.0f} s] {text}"
        print(line, flush=True)
        with (self.out / "summary.txt").open("a") as summary:
            print(line, file=summary)

    def _run_stage(self, stage: Stage, worker: Workers) -> None:
        def execute(tasks: Sequence[Task]) -> Generator[Outcome]:
            yield from (self._settled[task.key] for task in tasks if task.key in self._settled)
            for outcome in worker([task for task in tasks if task.key not in self._settled]):
                if outcome.status != "finished":
                    self._settled[outcome.key] = outcome
                self.failed += outcome.status == "failed"
                yield outcome

        try:
            experiment, options = stage.load(tiny=self.tiny)
            grids = self._grids.setdefault(experiment.name, [])
            grids.append(options)
            # With the cells of earlier stages, which are finished, so that the table has them all.
            whole = dataclasses.replace(
                experiment,
                cells=lambda _: itertools.chain.from_iterable(map(experiment.cells, grids)),
            )
            report = run_sweep(whole, options, out=self.results, executor=execute, draw=False)
        except (ImportError, OptionsError) as error:
            self.say(f"{stage.name}: absent: {error}")
            return
        except Exception:  # what the other stages have to tell must not be lost with it
            self.failed += 1
            self.say(f"{stage.name}: FAILED: {traceback.format_exc()}")
            return
        self.failed += len(report.wrong)
        self.say(f"{stage.name}: {report}")
        for reasons in (report.unavailable, report.failed):
            for reason, count in reasons.most_common(8):
                self.say(f"    {count} x {reason[:300]}")
        for table in self._tables(experiment.name):
            import pandas as pd

            rows = pd.read_csv(table)
            parts = getattr(options, "part", ())
            for column in ("part", "op"):
                if column in rows and set(parts) & set(rows[column]):
                    rows = rows[rows[column].isin(parts)]
                    break
            for line in digest(rows).splitlines():
                self.say(f"    {line}")

    def _tables(self, experiment: str) -> list[Path]:
        return sorted(self.results.glob(f"{experiment}/*/rows.csv"))

    def _draw(self, stages: Sequence[Stage]) -> None:
        """Figures, and the decision of the tile sweep, as far as time allows."""
        for module in dict.fromkeys(stage.experiment for stage in stages):
            experiment = _experiment(module)
            for table in self._tables(experiment.name):
                if time.monotonic() >= self.deadline + _RESERVED_S / 2:
                    return
                try:
                    plot_results(experiment, table.parent)
                except Exception as error:  # must not cost the pass what it has measured
                    self.say(f"{experiment.name}: no figures: {type(error).__name__}: {error}")
        for decision in self.results.glob("tile_sweep/*/decision.md"):
            write_atomically(self.out / "decision.md", decision.read_text())


def _experiment(module: str) -> Experiment:
    return importlib.import_module(f"experiments.{module}").EXPERIMENT


def digest(rows: pd.DataFrame) -> str:
    """What a table says, in few lines."""
    lines = []
    if "passed" in rows:
        wrong = rows[~rows["passed"]]
        lines.append(f"{len(rows) - len(wrong)} of {len(rows)} results within the bound")
        if len(wrong):
            names = ("op", "kernel", "result", "feature", "dtype", "kv_dtype", "block_size")
            shown = [name for name in (*names, "error", "bound") if name in wrong]
            lines.append(wrong[shown].head(20).to_string(index=False))
    if "by_table" in rows:
        return tile_sweep.decision(rows) if rows["p50_us"].notna().any() else ""
    if "p50_us" in rows and "implementation" in rows and rows["p50_us"].notna().any():
        names = ["op", "batch", "query_len", "prefix_len", "context_len", "block_size", "kv_dtype"]
        names = [name for name in names if name in rows and rows[name].nunique() > 1]
        best = rows.assign(
            shape=rows[names or ["op"]].astype(str).agg(" ".join, axis=1),
            column=rows["implementation"].str.replace("flash_attn", "fa")
            + rows["launch"].map({"eager": " (eager)"}).fillna(""),
        )
        ours = best[best["column"] == "pagelab"].groupby("shape", sort=False)
        table = best.pivot_table("p50_us", "shape", "column", sort=False)
        for name, column in (("copy %", "bandwidth_fraction"), ("matmul %", "matmul_fraction")):
            table[name] = 100 * ours[column].max()
        table.index.name = " ".join(names)
        if "peak_gb_per_s" in rows:
            rates = kernel_latency.rates(rows).itertuples(index=False)
            lines.append("; ".join(f"{what}: {value:,.0f} {unit}" for what, value, unit in rates))
        lines.append("p50 in µs; shares of the measured rates are pagelab's")
        lines.append(table.head(40).to_string(float_format="{:.1f}".format, na_rep="-"))
    names = ["engine", "turn", "seconds", "output_tokens_per_s", "cached_tokens"]
    if set(names) <= set(rows.columns):
        lines.append(rows[names].to_string(index=False))
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns 1 if a cell failed or a row is wrong, 2 without a device."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments gpu-pass", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU without times")
    parser.add_argument(
        "--stage", action="append", choices=[stage.name for stage in STAGES], metavar="NAME",
        help="only this stage, repeatable: " + ", ".join(stage.name for stage in STAGES),
    )  # fmt: skip
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes - _RESERVED_S
    if not options.tiny and not cuda_available():
        print("error: there is no GPU here; --tiny tries the stages without one", file=sys.stderr)
        return 2
    if options.minutes * 60 <= _RESERVED_S:
        print(f"error: --minutes must be above {_RESERVED_S / 60}", file=sys.stderr)
        return 2
    console = logging.StreamHandler()
    console.setLevel(logging.ERROR)
    log = logging.getLogger("experiments")
    log.addHandler(console)
    try:
        run = GpuPass(options.out, deadline=deadline, tiny=options.tiny)
        wanted = [s for s in STAGES if not options.stage or s.name in options.stage]
        return int(run.run(wanted) > 0)
    finally:
        log.removeHandler(console)
