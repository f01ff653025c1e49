"""An experiment: its options, cells, rows and figures."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.harness.grid import Absent, Options, check, grid

if TYPE_CHECKING:
    import pandas as pd


class Unavailable(Exception):
    """Raised by ``run_cell`` with the reason why a cell cannot run on this machine."""


@dataclass(frozen=True)
class InputFile:
    """A file that cells read: found by ``path``, identified by its name and content."""

    path: Path
    sha256: str

    @classmethod
    def of(cls, path: Path) -> InputFile:
        """The file at ``path``, read once for its digest.  Raises OSError if it cannot be read."""
        with path.open("rb") as file:
            return cls(path, hashlib.file_digest(file, "sha256").hexdigest())

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Experiment:
    """One figure (or a family of them) and how to get it.

    ``run_cell`` runs in a worker process, returns rows of scalars, and raises ``Unavailable`` if it
    cannot run here.  ``plot`` draws from the table alone, which may lack cells, and returns the
    files it wrote.
    """

    name: str
    figure: str
    """The figure it redoes, in a few words."""
    options: Options
    """The full grid."""
    quick: Options
    """The same experiment in well under a minute."""
    run_cell: Callable[[Any], list[dict[str, Any]]]
    plot: Callable[[pd.DataFrame, Path], Sequence[Path]]
    cells: Callable[[Any], Iterable[Options | Absent]] = grid
    """From options to cells; raises ValueError or OSError for invalid options."""
    gpu: Literal["unused", "optional", "required"] = "unused"
    timed: bool = False
    """Cells measure time, so by default they run one by one."""

    def checked_cells(self, options: Options) -> Iterator[Options | Absent]:
        """The cells of ``options``.  Raises ValueError, naming the option, or OSError."""
        check(options)
        yield from self.cells(options)


def identity(value: Any) -> Any:
    """``value`` (a cell, or part of one) as JSON in which a file is its name and digest."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, InputFile):
        return {"file": value.name, "sha256": value.sha256}
    if isinstance(value, (tuple, list)):
        return [identity(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {f.name: identity(getattr(value, f.name)) for f in dataclasses.fields(value)}
    raise TypeError(f"a cell may not hold a {type(value).__name__}: {value!r}")


def cell_id(experiment: str, cell: Options) -> str:
    """Name of the cell's result: the same for the same parameters and input contents."""
    document = json.dumps([experiment, identity(cell)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(document.encode()).hexdigest()[:24]


def input_files(value: Any) -> Iterator[InputFile]:
    """Every file that ``value`` (a cell, or part of one) names."""
    if isinstance(value, InputFile):
        yield value
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from input_files(item)
