"""A sweep runs the grid of an experiment and writes one table to one folder."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.harness import environment, provenance
from experiments.harness.experiment import Experiment, cell_id, identity, input_files
from experiments.harness.grid import Absent, Options
from experiments.harness.ray_cluster import RayCluster
from experiments.harness.store import Store
from experiments.harness.workers import Executor, Outcome, Task, run_locally

log = logging.getLogger("experiments")
log.setLevel(logging.INFO)

_ASSEMBLE_SECONDS = 1
"""Minimum time between two writes of the table while a sweep runs, in seconds."""
_MAX_LISTED = 10
"""Maximum number of failed cells, and of wrong rows, that the console lists."""


class OptionsError(ValueError):
    """Options that the experiment does not support."""


@dataclass
class SweepReport:
    """Counts and messages of a sweep."""

    cells: int
    reused: int = 0
    """Number of cells that an earlier run had finished."""
    finished: int = 0
    """Number of cells that this run finished."""
    unavailable: Counter[str] = field(default_factory=Counter)
    """Number of cells that could not run here, by reason."""
    failed: list[str] = field(default_factory=list)
    """Each cell that failed, with its error."""
    wrong: list[str] = field(default_factory=list)
    """Rows of this run or an earlier run whose check failed (``passed`` is False)."""
    figures: list[Path] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        """One line: the number of cells of each status, and the duration."""
        absent, failed = self.unavailable.total(), len(self.failed)
        left = self.cells - self.reused - self.finished - absent - failed
        counts = {"absent": absent, "FAILED": failed, "rows WRONG": len(self.wrong), "left": left}
        others = "".join(f", {count} {what}" for what, count in counts.items() if count > 0)
        done = f"{self.finished} run, {self.reused} finished earlier"
        return f"{self.cells} cells, {done}{others} ({self.seconds:.1f} s)"

    @property
    def went_wrong(self) -> bool:
        """Whether a cell failed or a result is wrong."""
        return bool(self.failed or self.wrong)


def run_sweep(
    experiment: Experiment,
    options: Options,
    *,
    out: Path,
    jobs: int | None = None,
    fresh: bool = False,
    cluster: RayCluster | None = None,
    execute: Executor | None = None,
) -> SweepReport:
    """Run the unfinished cells of a grid and write ``out/<experiment>/<device>/`` with its figures.

    ``jobs`` is the number of worker processes (None: one per core, but only one for timed cells and
    on a GPU).  ``fresh`` runs finished cells again.  ``cluster`` or ``execute`` runs the cells
    instead of worker processes.  A cell that raises is reported, not raised.

    Raises OptionsError if the options give no grid or the folder cannot be created, and FolderInUse
    if another sweep is writing to the folder.
    """
    started = time.perf_counter()
    device = (cluster or environment).device_slug(experiment)
    if jobs is None:
        jobs = 1 if experiment.timed or device != "cpu" else len(os.sched_getaffinity(0))
    if jobs < 1:
        raise OptionsError(f"jobs must be at least 1, got {jobs}")
    cells, absent = _grid(experiment, options)
    try:
        store = Store(out / experiment.name / device)
    except OSError as error:
        raise OptionsError(f"--out: cannot write to {error.filename}: {error.strerror}") from error
    with store.locked(), _log_file(store.folder / "sweep.log"):
        sweep = _Sweep(experiment, store, cells, fresh=fresh)
        report = sweep.report
        run_cell, records = experiment.run_cell, sweep.records
        tasks = [Task(key, run_cell, cell) for key, cell in cells.items() if key not in records]
        if experiment.gpu == "required" and device == "cpu":
            absent += ["there is no GPU here"] * len(tasks)
            tasks = []
        report.unavailable.update(absent)
        try:
            if tasks:
                program = Path(sys.argv[0]).name.replace("__main__.py", "pagelab")
                command = [program, *sys.argv[1:]]
                described = (cluster or environment).describe(experiment, command)
                execute = execute or functools.partial(run_locally, jobs=jobs)
                if cluster:
                    execute = functools.partial(cluster.run, experiment)
                sweep.run(tasks, execute, {"device": device, **described, "seed": options.seed})
        finally:
            sweep.assemble()
        sweep.summarise()
        if records:
            report.figures = plot_results(experiment, store.folder)
        report.seconds = time.perf_counter() - started
        log.info("done in %.1f s", report.seconds)
    return report


def plot_results(experiment: Experiment, folder: Path) -> list[Path]:
    """Draw the figures of ``folder`` from its rows.csv alone; returns the files written."""
    import pandas as pd

    return list(experiment.plot(pd.read_csv(folder / "rows.csv"), folder))


def _grid(experiment: Experiment, options: Options) -> tuple[dict[str, Options], list[str]]:
    """The cells by id, and the reasons why cells are absent."""
    cells, absent = {}, []
    try:
        for cell in experiment.checked_cells(options):
            if isinstance(cell, Absent):
                absent.append(cell.reason)
            else:
                cells[cell_id(experiment.name, cell)] = cell
    except (ValueError, OSError) as error:
        raise OptionsError(str(error)) from error
    if not cells:
        reasons = "; ".join(dict.fromkeys(absent)) or f"nothing follows from {options}"
        raise OptionsError(f"the grid of {experiment.name} is empty: {reasons}")
    return cells, absent


class _Sweep:
    """A running sweep: the records of its finished cells, and its report."""

    def __init__(
        self, experiment: Experiment, store: Store, cells: dict[str, Options], *, fresh: bool
    ) -> None:
        self.experiment, self.store, self.cells = experiment, store, cells
        if fresh:
            for key in cells:
                store.discard_cell(key)
        self.records = self._reusable()
        self.report = SweepReport(cells=len(cells), reused=len(self.records))

    def _reusable(self) -> dict[str, dict[str, Any]]:
        """The records of cells that an earlier run finished with the same code."""
        records, present = {}, functools.cache(provenance.present)  # reads each file once
        outdated: Counter[tuple[str, ...]] = Counter()
        for key in self.cells:
            try:
                record = self.store.load_cell(key)
            except ValueError as error:
                log.warning("a cell is run again, as its record is damaged: %s", error)
                continue
            if record is None:
                continue
            code = record["code"].items()
            if changed := tuple(name for name, was in code if was != present(name)):
                outdated[changed] += 1
            else:
                records[key] = record
        for names, count in outdated.items():
            log.warning("%d cells are run again, as these changed: %s", count, ", ".join(names))
        return records

    def run(self, tasks: list[Task], execute: Executor, described: dict[str, Any]) -> None:
        """Run ``tasks`` and store each as it finishes."""
        run = {"started": datetime.now(UTC).isoformat(timespec="microseconds"), **described}
        log.info("commit %s: %d of %d cells", described["commit"], len(tasks), len(self.cells))
        progress = tqdm(
            desc=self.experiment.name,
            total=len(self.cells),
            initial=len(self.records),
            unit="cell",
            disable=not sys.stderr.isatty(),
        )
        assembled = time.monotonic()
        with progress, contextlib.closing(execute(tasks)) as outcomes:
            for outcome in outcomes:
                self._settle(outcome, run)
                progress.update()
                if time.monotonic() - assembled > _ASSEMBLE_SECONDS:
                    self.assemble()
                    assembled = time.monotonic()

    def _settle(self, outcome: Outcome, run: dict[str, Any]) -> None:
        """Store a finished cell, or log why it has no result."""
        cell = identity(self.cells[outcome.key])
        if outcome.status == "finished":
            record = {"cell": cell, "run": run, "seconds": outcome.seconds}
            record |= {"rows": outcome.rows, "code": outcome.code}
            self.store.save_cell(outcome.key, record)
            self.records[outcome.key] = record
            self.report.finished += 1
        elif outcome.status == "unavailable":
            self.report.unavailable[outcome.message] += 1
            log.info("absent: %s: %s", cell, outcome.message)
        else:
            self.report.failed.append(f"{self._name(outcome.key)}: {outcome.message}")
            log.info("failed: %s: %s\n%s", cell, outcome.message, outcome.details)

    def _name(self, key: str) -> str:
        """The fields of a cell that are not equal in all cells of the grid."""
        cells = [identity(cell) for cell in self.cells.values()]
        differing = (
            f"{name}={_short(value)}"
            for name, value in identity(self.cells[key]).items()
            if any(cell.get(name) != value for cell in cells)
        )
        return ", ".join(differing) or "the cell"

    def assemble(self) -> None:
        """Write rows.csv in the order of the grid, and environment.json.

        In environment.json the newest run is at the top level, older runs are in ``earlier_runs``.
        Running a finished sweep again changes neither file.  Without rows, no file is written.
        """
        finished = [self.records[key] for key in self.cells if key in self.records]
        if not finished:
            return
        rows = [row for record in finished for row in record["rows"]]
        self.store.write_rows(rows)
        self.report.wrong = [
            ", ".join(f"{name}={value}" for name, value in row.items() if name != "passed")
            for row in rows
            if row.get("passed") is False
        ]
        runs = {record["run"]["started"]: record["run"] for record in finished}
        cells = Counter(record["run"]["started"] for record in finished)
        newest, *earlier = (
            {**runs[started], "cells": cells[started]} for started in sorted(runs, reverse=True)
        )
        files = {(f.name, f.sha256) for cell in self.cells.values() for f in input_files(cell)}
        self.store.write_environment(
            {
                "experiment": self.experiment.name,
                **newest,
                "inputs": [{"file": name, "sha256": sha256} for name, sha256 in sorted(files)],
                "unavailable_cells": dict(sorted(self.report.unavailable.items())),
                "failed_cells": len(self.report.failed),
                "failed_checks": len(self.report.wrong),
                "earlier_runs": earlier,
            }
        )

    def summarise(self) -> None:
        """Log absent cells, failed cells and wrong rows, to the file and the console."""
        for what, cases in (("wrong", self.report.wrong), ("failed", self.report.failed)):
            for case in cases[:_MAX_LISTED]:
                log.error("%s: %s", what, case)
            if len(cases) > _MAX_LISTED:
                log.error("%s: %d more", what, len(cases) - _MAX_LISTED)
        for reason, count in self.report.unavailable.items():
            log.warning("absent (%d): %s", count, reason)
        if self.report.failed:
            log.error("tracebacks: %s", self.store.folder / "sweep.log")


def _short(value: Any) -> str:
    """A field of a cell as text.  A file or a trace is shown by its name."""
    while isinstance(value, dict):
        value = value.get("file") or value.get("name") or str(value)
    return str(value)


@contextlib.contextmanager
def _log_file(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path, encoding="utf-8", errors="surrogateescape")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
