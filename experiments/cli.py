"""The command line: list, run, plot, reproduce, report, try, check.

``__main__`` hands the commands generate and gpu to their own command lines.
"""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.extras import SubcommandApp

from cache.retired import advice
from experiments.harness import (
    Experiment,
    FolderInUse,
    NoCluster,
    Options,
    OptionsError,
    RayCluster,
    SweepReport,
    plot_results,
    run_sweep,
)
from experiments.harness.environment import cuda_available
from experiments.registry import EXPERIMENTS

_RESULTS = Path("results")
_QUICK_RESULTS = _RESULTS / "quick"


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options for how cells run and where results are written."""

    quick: bool = False
    """Run the small grid and write to results/quick. The default of reproduce."""
    out: Path | None = None
    """Folder of the results. None: results, in the current folder."""
    jobs: int | None = None
    """Number of worker processes. None: one per core, but only one for timed cells and on a GPU."""
    fresh: bool = False
    """Run finished cells again."""
    ray: str | None = None
    """Address of a Ray cluster that runs the cells ("auto", host:port). None: this machine."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line.  Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    log = logging.getLogger("experiments")
    log.addHandler(console)
    try:
        _refuse_what_is_gone(arguments)
        return _app(arguments).cli(
            prog="pagelab",
            description="Experiments on paged KV caches: run them, draw them, add your own.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except SystemExit as exit:
        return int(exit.code or 0)
    except BrokenPipeError:
        raise
    except (OptionsError, FolderInUse, NoCluster, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resumes = arguments[0] in ("run", "reproduce")
        goes_on = ": the same command continues this run" if resumes else ""
        print(f"interrupted{goes_on}", file=sys.stderr)
        return 130
    finally:
        log.removeHandler(console)


def _refuse_what_is_gone(arguments: list[str]) -> None:
    """Raise OptionsError for an experiment, an option of one, or a value of an option."""
    command, name, *words = [*" ".join(arguments).replace("=", " ").split(), "", ""]
    names, option = [f"experiment {name.replace('-', '_')}"], ""
    for word in words:
        option = word if word.startswith("--") else option
        names += [f"{name} {option}", f"{name} {option} {word}"]
    if command in ("run", "plot") and (line := advice(*names)):
        raise OptionsError(line)


def _app(arguments: list[str]) -> SubcommandApp:
    """The commands, with only the experiment that ``arguments`` name, or with all experiments.

    With only one experiment, a message about a wrong option suggests only its options.
    """
    app, runs = SubcommandApp(), SubcommandApp()
    quick = "--quick" in arguments
    second = [argument.replace("-", "_") for argument in arguments[1:2]]
    for name in EXPERIMENTS.keys() & second or EXPERIMENTS:
        experiment = EXPERIMENTS[name]
        runs.command(name=name)(_run_command(experiment, quick=quick))
    app.command(name="list")(_list)
    app.command(runs, name="run", help="Run an experiment, without the cells that are finished.")
    app.command(name="plot")(_plot)
    app.command(name="reproduce")(_reproduce)
    app.command(name="report")(_report)
    app.command(name="try")(_try)
    app.command(name="check")(_check)
    app.command(name="generate", help="Generate text with a model.")(lambda: None)
    app.command(name="gpu", help="Measure on the GPU of this machine.")(lambda: None)
    return app


def _list() -> int:
    """List the experiments, their figures and whether they use a GPU."""
    here = "one is here" if cuda_available() else "none here"
    gpu = {"unused": "", "optional": "uses a GPU if there is one", "required": "needs a GPU"}
    width = max(map(len, EXPERIMENTS))
    for experiment in EXPERIMENTS.values():
        print(f"{experiment.name:{width}}  {experiment.figure}")
        if experiment.gpu != "unused":
            print(f"{'':{width}}  ({gpu[experiment.gpu]}: {here})")
    return 0


def _run_command(experiment: Experiment, *, quick: bool) -> Callable[..., int]:
    def run(sweep: SweepOptions, options: Options) -> int:
        return int(_run(experiment, options, sweep, quick=sweep.quick).went_wrong)

    default = experiment.quick if quick else experiment.options
    without_prefix: Any = tyro.conf.OmitArgPrefixes
    named = tyro.conf.arg(name=experiment.name)
    run.__doc__ = experiment.figure
    run.__annotations__ = {
        "sweep": without_prefix[SweepOptions],
        "options": Annotated[without_prefix[type(default)], named],
    }
    run.__defaults__ = (SweepOptions(), default)
    return run


def _plot(
    experiment: tyro.conf.Positional[str], quick: bool = False, out: Path | None = None
) -> int:
    """Draw the figures of an experiment from its table, for every device.

    Args:
        experiment: Its name.
        quick: Draw results/quick.
        out: Folder of the results. None: results, in the current folder.
    """
    chosen = EXPERIMENTS.get(experiment.replace("-", "_"))
    if chosen is None:
        raise OptionsError(f"{experiment} is unknown; choose from {', '.join(EXPERIMENTS)}")
    folder = _folder(out, quick) / chosen.name
    tables = sorted(folder.glob("*/rows.csv"))
    if not tables:
        raise OptionsError(f"no rows.csv in a folder of {folder}: run the experiment first")
    for table in tables:
        try:
            _check_cells(table)
            figures = plot_results(chosen, table.parent)
        except OSError:
            raise
        except Exception as error:  # for an edited table pandas and matplotlib may raise any error
            kind = "no column" if isinstance(error, KeyError) else type(error).__name__
            raise OptionsError(
                f"{table}: no figure can be drawn of it ({kind}: {error}); run the experiment "
                "again if it was edited or is of another version"
            ) from error
        print("\n".join(map(str, figures)) or f"{table}: no row that a figure shows")
    return 0


def _check_cells(table: Path) -> None:
    """Raise ValueError unless ``table`` has rows and all are complete: pandas fills what lacks."""
    text = table.read_text("utf-8")
    header, *rows = [*csv.reader(io.StringIO(text))] or [[]]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} cells, the header {len(header)}")
    if not rows or not text.endswith("\n") or "\0" in text:
        raise ValueError("no rows, no end of the last row, or bytes that are not text")


def _reproduce(
    sweep: tyro.conf.OmitArgPrefixes[SweepOptions] = SweepOptions(), full: bool = False
) -> int:
    """Run every experiment that can run here, draw every figure and write the report.

    Args:
        full: Run the full grids and write to results.
    """
    if sweep.quick and full:
        raise OptionsError("give --quick or --full, not both")
    grids = "full grids: hours" if full else "quick grids: about three minutes on two cores"
    print(f"{len(EXPERIMENTS)} experiments on their {grids}", flush=True)
    reports = []
    for number, experiment in enumerate(EXPERIMENTS.values(), start=1):
        print(f"[{number}/{len(EXPERIMENTS)}] {experiment.name}: {experiment.figure}", flush=True)
        options = experiment.options if full else experiment.quick
        reports.append(_run(experiment, options, sweep, quick=not full))
    with contextlib.suppress(OptionsError):  # there are no results
        _report(_folder(sweep.out, not full))
    return int(any(report.went_wrong for report in reports))


def _report(results: Path = _RESULTS, output: Path | None = None) -> int:
    """Write one page with all results beside published numbers.

    Args:
        results: Folder of the results.
        output: The page. None: report.html in that folder.
    """
    from experiments.report import write_report

    print(write_report(results, output or results / "report.html", EXPERIMENTS))
    return 0


def _try(
    policy: tyro.conf.Positional[str],
    trace: tyro.conf.UseAppendAction[tuple[Path, ...]] = (),
    columns: str | None = None,
    capacity_percent: tuple[float, ...] = (1, 5, 10),
    out: Path = _RESULTS / "try",
) -> int:
    """Compare an eviction policy with LRU and the optimum on three real traces, in seconds.

    Args:
        policy: Your policy as file.py:Class, or the name of a policy.
        trace: A trace (.jsonl, .csv, .gz, .zst) or a synthetic workload by its name. None: those
            in experiments/traces.
        columns: Columns of .csv traces, such as time=ts,hash_ids=blocks. See docs/traces.md.
        capacity_percent: Sizes of the pool, in percent of the unique blocks of a trace.
        out: Folder of the figure.
    """
    from experiments.eviction import Eviction
    from experiments.trials import try_policy

    traces = Eviction(trace=trace, trace_columns=columns, capacity_percent=capacity_percent)
    try_policy(policy, traces, out)
    return 0


def _check(kernel: tyro.conf.Positional[Path]) -> int:
    """Compare a kernel with fp64 over block sizes, dtypes, options and splits, in a minute.

    Args:
        kernel: File of an op, such as kernels/store_kvcache.py or a changed copy of it.
    """
    from experiments.check import check_kernel

    return int(not check_kernel(kernel))


def _run(
    experiment: Experiment, options: Options, sweep: SweepOptions, *, quick: bool
) -> SweepReport:
    with RayCluster(sweep.ray) if sweep.ray else contextlib.nullcontext() as cluster:
        report = run_sweep(
            experiment,
            options,
            out=_folder(sweep.out, quick),
            jobs=sweep.jobs,
            fresh=sweep.fresh,
            cluster=cluster,
        )
    figures = (f"  {figure}" for figure in report.figures)
    print(f"{experiment.name}: {report}", *figures, sep="\n", flush=True)
    return report


def _folder(out: Path | None, quick: bool) -> Path:
    return out or (_QUICK_RESULTS if quick else _RESULTS)
