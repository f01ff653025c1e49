"""An experiment of tiny cells that fail, sleep or die on demand.

``python tiny_experiment.py run tiny ...`` is the real command line with no other experiment in it.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from experiments import style
from experiments.harness import (
    Absent,
    Axis,
    Experiment,
    InputFile,
    Natural,
    Options,
    Unavailable,
    grid,
)


@dataclass(frozen=True, kw_only=True)
class TinyOptions(Options):
    cells: Natural = 4
    groups: int = 1
    file: Path | None = None
    """A file that every cell reads."""
    absent: tuple[str, ...] = ()
    """Reasons for cells that cannot be made."""


@dataclass(frozen=True, kw_only=True)
class TinyCell(TinyOptions):
    number: Axis[int]
    of: int

    @property
    def setup_key(self) -> tuple[str, ...]:
        return ("common", str(self.number % self.groups))


def cells(options: TinyOptions) -> Iterator[TinyCell | Absent]:
    yield from map(Absent, options.absent)
    file = options.file and InputFile.of(options.file)
    known = {"cells": None, "absent": None, "of": options.cells, "file": file}
    yield from grid(options, TinyCell, number=range(options.cells), **known)


def run_cell(cell: TinyCell) -> list[dict]:
    """Behave as the JSON in TINY_BEHAVIOUR says, on which no result depends.

    journal: file for the number and process of each run of a cell.  sleep: seconds of the first
    cell; later cells take less.  raises, dies, unavailable: numbers of cells.  message: of raised
    errors.  no_scalar: the row holds a list.  wrong: numbers of cells with a wrong first row.
    """
    import numpy as np

    behaviour = json.loads(os.environ.get("TINY_BEHAVIOUR", "{}"))
    if "journal" in behaviour:
        with Path(behaviour["journal"]).open("a") as journal:
            journal.write(f"{cell.number} {os.getpid()}\n")
    time.sleep(behaviour.get("sleep", 0) * (1 - cell.number / cell.of))
    if cell.number in behaviour.get("raises", ()):
        raise RuntimeError(behaviour.get("message", "this cell raises"))
    if cell.number in behaviour.get("dies", ()):
        os.kill(os.getpid(), signal.SIGKILL)
    if cell.number in behaviour.get("unavailable", ()):
        raise Unavailable("no such device")
    if behaviour.get("no_scalar"):
        return [{"value": [1, 2]}]
    value = np.float64(cell.number) / 3 + cell.seed
    rows = [
        {"number": np.int64(cell.number), "half": half, "value": value, "note": None}
        for half in (False, True)
    ]
    if cell.number in behaviour.get("wrong", ()):
        rows[0]["passed"] = False
    return rows


def thread_limits(cell: TinyCell) -> list[dict]:
    """A row with the thread limits of a worker's libraries."""
    return [{name: int(os.environ[name]) for name in os.environ if name.endswith("_NUM_THREADS")}]


def draw(rows):
    figure, [axis], _ = style.panel_grid(1, height=2)
    style.curve(axis, rows, "number", "value")
    return figure


EXPERIMENT = Experiment(
    name="tiny",
    figure="a line",
    options=TinyOptions(),
    quick=TinyOptions(cells=2),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"line": draw}),
)
EXPERIMENTS = {
    "tiny": EXPERIMENT,
    "tiny_gpu": replace(EXPERIMENT, name="tiny_gpu", gpu="required"),
}

if __name__ == "__main__":
    from experiments import cli

    cli.EXPERIMENTS = EXPERIMENTS
    raise SystemExit(cli.main())
