"""The command line: list, run, plot, reproduce, report, try, check, gpu."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.extras import SubcommandApp

from experiments.gpu import contact
from experiments.harness import (
    Experiment,
    FolderInUse,
    NoCluster,
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
    """How the cells are run and where the results go."""

    out: Path | None = None
    """Folder of the results, in place of results."""
    jobs: int | None = None
    """Worker processes. None: one a core, one alone for timings and on a GPU."""
    fresh: bool = False
    """Run finished cells again."""
    ray: str | None = None
    """Address of a Ray cluster that runs the cells ("auto", host:port). None: this machine."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(SweepOptions):
    """How the cells are run and where the results go."""

    quick: bool = False
    """The small grid, and results/quick in place of results."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    log = logging.getLogger("experiments")
    log.addHandler(console)
    try:
        return _app(arguments).cli(
            prog="python -m experiments",
            description="The experiments.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except SystemExit as exit:
        return exit.code
    except (OptionsError, FolderInUse, NoCluster, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on where this one stopped", file=sys.stderr)
        return 130
    finally:
        log.removeHandler(console)


def _app(arguments: list[str]) -> SubcommandApp:
    """The commands, with the experiment that ``arguments`` name, or all without one.

    So an error in an option suggests options of this experiment only.
    """
    app, runs, plots = SubcommandApp(), SubcommandApp(), SubcommandApp()
    quick = "--quick" in arguments
    named = _named(arguments)
    for name, experiment in EXPERIMENTS.items():
        if named not in (None, experiment):
            continue
        runs.command(_run_command(experiment, quick=quick), name=name)
        plots.command(_plot_command(experiment), name=name, help=experiment.figure)
    app.command(_list, name="list")
    app.command(runs, name="run", help="Run an experiment, or what is missing of it.")
    app.command(plots, name="plot", help="Draw the figures of an experiment from its table.")
    app.command(_reproduce, name="reproduce")
    app.command(_report, name="report")
    app.command(_try, name="try")
    app.command(_check, name="check")
    app.command(lambda: contact.main([]), name="gpu", help="Measure on the GPU of this machine.")
    return app


def _named(arguments: list[str]) -> Experiment | None:
    """The experiment that a command line begins with, as in ``run eviction``."""
    match arguments:
        case ["run" | "plot", name, *_]:
            return EXPERIMENTS.get(name.replace("-", "_"))
    return None


def _list() -> int:
    """Show the experiments, the figure each redoes, and whether it can run here."""
    here = "an NVIDIA GPU is here" if (cuda := cuda_available()) else "no GPU here"
    needs = {
        "unused": "runs here",
        "optional": f"runs here ({here})",
        "required": "runs here" if cuda else f"cannot run here: {here}",
    }
    width = max(map(len, EXPERIMENTS))
    gpu = {"unused": "-", "optional": "GPU if there is one", "required": "GPU"}
    for experiment in EXPERIMENTS.values():
        print(f"{experiment.name:{width}}  {experiment.figure}")
        print(f"{'':{width}}  needs: {gpu[experiment.gpu]}; {needs[experiment.gpu]}")
    return 0


def _run_command(experiment: Experiment, *, quick: bool) -> Callable[..., int]:
    def run(sweep: RunOptions, options: object) -> int:
        return int(_run(experiment, options, sweep, quick=sweep.quick).went_wrong)

    default = experiment.quick if quick else experiment.options
    run.__doc__ = experiment.figure
    run.__annotations__ = {
        "sweep": tyro.conf.OmitArgPrefixes[RunOptions],
        "options": Annotated[
            tyro.conf.OmitArgPrefixes[type(default)], tyro.conf.arg(name=experiment.name)
        ],
    }
    run.__defaults__ = (RunOptions(), default)
    return run


def _plot_command(experiment: Experiment) -> Callable[..., int]:
    def plot(quick: bool = False, out: Path | None = None) -> int:
        """Draw the figures again from rows.csv, for every device.

        Args:
            quick: Draw results/quick in place of results.
            out: Folder of the results, in place of results.
        """
        folder = _folder(out, quick) / experiment.name
        tables = sorted(folder.glob("*/rows.csv"))
        if not tables:
            raise OptionsError(f"no rows.csv in a folder of {folder}: run the experiment first")
        for table in tables:
            try:
                figures = plot_results(experiment, table.parent)
            except OSError:
                raise
            except Exception as error:  # pandas and matplotlib raise anything for an edited table
                raise OptionsError(
                    f"{table}: no figure can be drawn of it ({type(error).__name__}: {error}); run "
                    "the experiment again if it was edited or is of another version"
                ) from error
            print(*figures, sep="\n")
        return 0

    return plot


def _reproduce(
    sweep: tyro.conf.OmitArgPrefixes[SweepOptions] = SweepOptions(),
    quick: Annotated[bool, tyro.conf.arg(help_behavior_hint="(default)")] = False,
    full: bool = False,
) -> int:
    """Run every experiment that can run here, draw every figure and write the report.

    Args:
        quick: The small grids, and results/quick in place of results.
        full: The full grids.
    """
    if quick and full:
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
    """Write one page of all results, beside what publications report.

    Args:
        results: Folder of the results.
        output: The page. None: report.html in that folder.
    """
    from experiments.report import write_report

    print(write_report(results, output or results / "report.html", EXPERIMENTS))
    return 0


def _try(policy: tyro.conf.Positional[str], out: Path = _RESULTS / "try") -> int:
    """Place an eviction policy between LRU and the optimum, on three real traces, in seconds.

    Args:
        policy: Your policy as file.py:Class, or one by its name.
        out: Folder of the picture.
    """
    from experiments.trials import try_policy

    try_policy(policy, out)
    return 0


def _check(kernel: tyro.conf.Positional[Path]) -> int:
    """Compare a kernel with fp64 over block sizes, dtypes and options, in a minute.

    Args:
        kernel: The file of an op, such as kernels/store_kvcache.py.
    """
    from experiments.trials import check_kernel

    return int(not check_kernel(kernel))


def _run(
    experiment: Experiment, options: object, sweep: SweepOptions, *, quick: bool
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
