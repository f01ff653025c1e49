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
    """A file that cells read.  ``path`` locates it; its name and content identify it."""

    path: Path
    sha256: str

    @classmethod
    def of(cls, path: Path) -> InputFile:
        """Read the file at ``path`` for its digest.  Raises OSError if it cannot be read."""
        with path.open("rb") as file:
            return cls(path, hashlib.file_digest(file, "sha256").hexdigest())

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Experiment:
    """One figure, or a family of figures, and the code that computes and draws it.

    ``run_cell`` runs in a worker process, returns rows of scalars, and raises ``Unavailable`` if
    the cell cannot run here.  ``plot`` draws from the table alone and returns the files written.
    The table may lack cells.
    """

    name: str
    figure: str
    """The figure, in a few words."""
    options: Options
    """The full grid."""
    quick: Options
    """A small grid, which runs in well under a minute."""
    run_cell: Callable[[Any], list[dict[str, Any]]]
    plot: Callable[[pd.DataFrame, Path], Sequence[Path]]
    cells: Callable[[Any], Iterable[Options | Absent]] = grid
    """Function from options to cells.  Raises ValueError or OSError for invalid options."""
    gpu: Literal["unused", "optional", "required"] = "unused"
    timed: bool = False
    """Whether cells measure time.  If so, cells run one by one by default."""

    def checked_cells(self, options: Options) -> Iterator[Options | Absent]:
        """The cells of ``options``.  Raises OSError, or ValueError with the option's name."""
        check(options)
        yield from self.cells(options)


def identity(value: Any) -> Any:
    """Convert ``value`` (a cell or a field) to JSON.  A file becomes its name and digest."""
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
    """Name of the cell's result.  It depends only on the parameters and input contents."""
    document = json.dumps([experiment, identity(cell)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(document.encode()).hexdigest()[:24]


def input_files(value: Any) -> Iterator[InputFile]:
    """Every ``InputFile`` in ``value`` (a cell, or a field of a cell)."""
    if isinstance(value, InputFile):
        yield value
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from input_files(item)
