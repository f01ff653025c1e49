"""A sweep: the grid of an experiment, run to one table in one folder."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.harness.environment import describe, device_slug
from experiments.harness.experiment import (
    Absent,
    Cell,
    Experiment,
    Options,
    cell_id,
    identity,
    input_files,
)
from experiments.harness.store import Store
from experiments.harness.workers import Executor, Outcome, Task, run_locally

log = logging.getLogger("experiments")
log.setLevel(logging.INFO)

_ASSEMBLE_EVERY_S = 2.0


@dataclass
class SweepReport:
    """What became of a sweep."""

    folder: Path
    cells: int
    reused: int = 0
    """Cells that an earlier run had finished."""
    finished: int = 0
    """Cells that this run finished."""
    unavailable: Counter[str] = field(default_factory=Counter)
    """Reasons why cells could not run here, and how many."""
    failed: Counter[str] = field(default_factory=Counter)
    """Errors of the cells that failed, and how many."""
    figures: list[Path] = field(default_factory=list)
    seconds: float = 0.0


def run_sweep(
    experiment: Experiment,
    options: Options,
    *,
    out: Path,
    jobs: int | None = None,
    fresh: bool = False,
    executor: Executor | None = None,
) -> SweepReport:
    """Run what is missing of the grid, write ``out/<experiment>/<device>/`` and draw its figures.

    ``jobs`` is the number of worker processes (None: one a core; one for timed cells and on a
    GPU), ``fresh`` runs finished cells again, ``executor`` runs the cells elsewhere.  A cell that
    raises is reported, not raised.

    Raises ValueError or OSError for options that the grid cannot serve, FolderInUse if another
    sweep is writing to the folder.
    """
    started = time.perf_counter()
    device = device_slug(experiment)
    if jobs is None:
        one_at_a_time = experiment.timed or device != "cpu"
        jobs = 1 if one_at_a_time else len(os.sched_getaffinity(0))
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    cells, absent = _grid(experiment, options)
    store = Store(out / experiment.name / device)
    with store.locked(), _log_file(store.folder / "sweep.log"):
        if fresh:
            for key in cells:
                store.discard_cell(key)
        records = _finished(store, cells)
        report = SweepReport(store.folder, cells=len(cells), reused=len(records))
        for reason in absent:
            report.unavailable[reason] += 1
            log.info("absent: %s", reason)
        tasks = [
            Task(key, experiment.run_cell, cell)
            for key, cell in cells.items()
            if key not in records
        ]
        run = {"device": device, **describe(experiment, _command()), "seed": options.seed}
        log.info("commit %s: %d cells, %d finished", run["commit"], len(cells), len(records))
        run_id = None
        if tasks:
            run_id = _start_run(store, run)
            _warn_of_other_commits(store, records, run)
        assembled_at = time.monotonic()
        try:
            with _progress(experiment, cells, records) as progress:
                execute = executor or partial(run_locally, jobs=jobs)
                with contextlib.closing(execute(tasks)) as outcomes:
                    for outcome in outcomes:
                        _settle(outcome, cells[outcome.key], store, run_id, records, report)
                        progress.update()
                        if time.monotonic() - assembled_at > _ASSEMBLE_EVERY_S:
                            _assemble(experiment, store, cells, records, report)
                            assembled_at = time.monotonic()
        finally:
            _assemble(experiment, store, cells, records, report)
        _summarise(report)
        if records:
            report.figures = plot_results(experiment, store.folder)
        report.seconds = time.perf_counter() - started
        log.info("done in %.1f s", report.seconds)
    return report


def plot_results(experiment: Experiment, folder: Path) -> list[Path]:
    """Draw the figures of ``folder`` from its rows.csv alone; returns the files written."""
    import pandas as pd

    rows = pd.read_csv(folder / "rows.csv")
    return list(experiment.plot(rows, folder))


def _grid(experiment: Experiment, options: Options) -> tuple[dict[str, Cell], list[str]]:
    """The cells by id, and the reasons for those that are absent."""
    cells, absent = {}, []
    for cell in experiment.cells(options):
        if isinstance(cell, Absent):
            absent.append(cell.reason)
        else:
            cells[cell_id(experiment.name, cell)] = cell
    if not cells:
        reasons = "; ".join(absent) or f"nothing follows from {options}"
        raise ValueError(f"the grid of {experiment.name} is empty: {reasons}")
    return cells, absent


def _finished(store: Store, cells: dict[str, Cell]) -> dict[str, dict[str, Any]]:
    records = {key: store.load_cell(key) for key in cells}
    return {key: record for key, record in records.items() if record is not None}


def _start_run(store: Store, run: dict[str, Any]) -> str:
    now = datetime.now(UTC)
    run_id = f"{now:%Y%m%dT%H%M%S.%fZ}-{os.getpid()}"
    store.save_run(run_id, {"started": now.isoformat(timespec="seconds"), **run})
    return run_id


def _warn_of_other_commits(store: Store, records: dict[str, Any], run: dict[str, Any]) -> None:
    commits = Counter(store.load_run(record["run"])["commit"] for record in records.values())
    for commit, count in commits.items():
        if commit != run["commit"]:
            log.warning("keeps %d cells of commit %s; --fresh runs them again", count, commit)


def _settle(
    outcome: Outcome,
    cell: Cell,
    store: Store,
    run_id: str,
    records: dict[str, dict[str, Any]],
    report: SweepReport,
) -> None:
    """Store a finished cell, or log why there is none."""
    if outcome.status == "finished":
        record = {
            "cell": identity(cell),
            "run": run_id,
            "seconds": outcome.seconds,
            "rows": outcome.rows,
        }
        store.save_cell(outcome.key, record)
        records[outcome.key] = record
        report.finished += 1
    elif outcome.status == "unavailable":
        report.unavailable[outcome.message] += 1
        log.info("absent: %s: %s", identity(cell), outcome.message)
    else:
        report.failed[outcome.message] += 1
        log.info("failed: %s: %s\n%s", identity(cell), outcome.message, outcome.details)


def _assemble(
    experiment: Experiment,
    store: Store,
    cells: dict[str, Cell],
    records: dict[str, dict[str, Any]],
    report: SweepReport,
) -> None:
    """rows.csv in the order of the grid, and environment.json of the runs that made the rows.

    The newest of these runs is told at the top level, older ones under ``earlier_runs``, so going
    over a finished sweep once more changes neither file.
    """
    finished = [records[key] for key in cells if key in records]
    if not finished:
        return
    store.write_rows([row for record in finished for row in record["rows"]])
    runs = Counter(record["run"] for record in finished)
    newest, *earlier = [
        {**store.load_run(run), "cells": runs[run]} for run in sorted(runs, reverse=True)
    ]
    files = set().union(*(input_files(cell) for cell in cells.values()))
    store.write_environment(
        {
            "experiment": experiment.name,
            **newest,
            "inputs": sorted(({"file": f.name, "sha256": f.sha256} for f in files), key=str),
            "unavailable_cells": dict(sorted(report.unavailable.items())),
            "failed_cells": report.failed.total(),
            "earlier_runs": earlier,
        }
    )


def _summarise(report: SweepReport) -> None:
    for reason, count in report.unavailable.items():
        log.warning("absent (%d): %s", count, reason)
    for error, count in report.failed.items():
        log.error("failed (%d of %d cells): %s", count, report.cells, error)
    if report.failed:
        log.error("tracebacks: %s", report.folder / "sweep.log")


def _command() -> list[str]:
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return ["python", "-m", program.parent.name, *sys.argv[1:]]
    return [program.name, *sys.argv[1:]]


def _progress(experiment: Experiment, cells: dict, records: dict) -> tqdm:
    return tqdm(
        desc=experiment.name,
        total=len(cells),
        initial=len(records),
        unit="cell",
        disable=not sys.stderr.isatty(),
    )


@contextlib.contextmanager
def _log_file(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
