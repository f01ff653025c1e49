"""Options of an experiment, and the grid of cells that they describe.

An experiment has one frozen dataclass.  On the command line its fields are the options.  A cell is
an instance with one value per axis:

    @dataclass(frozen=True, kw_only=True)
    class Waste(Options):
        block_size: Axis[Count] = (1, 16)  # --block-size 1 16
        load: Positive = 2.0

    list(grid(Waste())) == [Waste(block_size=1), Waste(block_size=16)]

The type of an option states its allowed values (``Count``, ``Annotated[str, one_of(...)]``).  They
are checked before the grid is made: ``--load 0: needs a number above 0``.  On an axis, a cell may
hold another value than the command line, such as a trace's digest for its path.  The experiment's
``cells`` passes these values: ``grid(options, trace=sources(...))``.  A part with its own axes has
its own class of cells: ``grid(options, Part)``.
"""

from __future__ import annotations

import itertools
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

T = TypeVar("T")
_AXIS = object()

if not TYPE_CHECKING and find_spec("tyro") is None:  # only the command line needs tyro
    Repeated, arg = Annotated[T, None], dict
else:
    from tyro.conf import UseAppendAction as Repeated  # noqa: F401
    from tyro.conf import arg  # noqa: F401
"""``Repeated[Axis[X]]``: an axis whose option takes one value and may be given several times.
``Annotated[X, arg(aliases=("--short",))]``: an option with another name."""

if TYPE_CHECKING:  # type checkers know no type that is a tuple in options and one value in cells
    from typing_extensions import TypeAliasType

    Axis = TypeAliasType("Axis", Any, type_params=(T,))
else:
    Axis = Annotated[tuple[T, ...], _AXIS]
"""``Axis[X]``: several X in the options, at least one unless none is the default; one in a cell."""


@dataclass(frozen=True)
class Needs:
    """A condition on a value: ``Annotated[X, Needs("...", test)]``.  None is always allowed.

    ``test`` may raise a ValueError with a better message than ``what``.
    """

    what: str
    test: Callable[[Any], bool]


def one_of(names: Iterable[str]) -> Needs:
    """One of ``names``."""
    return Needs(f"one of {', '.join(names)}", frozenset(names).__contains__)


def check_names(option: str, chosen: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError unless the values of an option are known names.  For names that only
    ``cells`` knows, because the module that has them imports torch."""
    names = list(known)
    for name in chosen:
        if name not in names:
            raise ValueError(f"--{option} {name}: needs one of {', '.join(names)}")


Count = Annotated[int, Needs("an int of at least 1", lambda value: value >= 1)]
Natural = Annotated[int, Needs("an int of at least 0", lambda value: value >= 0)]
Positive = Annotated[float, Needs("a number above 0", lambda value: 0 < value < float("inf"))]
Percent = Annotated[float, Needs("a number above 0, at most 100", lambda value: 0 < value <= 100)]
Lengths = Annotated[
    tuple[int, int], Needs("fewest and most, at least 1", lambda pair: 1 <= pair[0] <= pair[1])
]
"""Minimum and maximum number of tokens."""


@dataclass(frozen=True)
class Absent:
    """The reason why cells cannot be made.  ``cells`` yields it in place of these cells."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of options and cells: frozen and typed; every option has a default.

    Fields of a cell are numbers, strings, None, ``InputFile``, tuples of these and dataclasses of
    these.  A cell's result depends only on its fields.
    """

    seed: Natural = 0
    """Seed of all random draws."""

    @property
    def setup_key(self) -> tuple[str, ...]:
        """What the cell sets up.  One worker should run the cells with the same key."""
        return ()

    def columns(self, *names: str) -> dict[str, Any]:
        """The named fields, as columns of a row."""
        return {name: getattr(self, name) for name in names}


def grid(options: Options, cell: type | None = None, /, **values: Any) -> Iterator[Any]:
    """Yield a cell for each combination of the axes' values.  The last axis changes fastest.

    cell: the class of the cells.  None: the class of ``options``.
    values: replacements for fields of the options; for an axis, a tuple of all its values.
    """
    cell = cell or type(options)
    axes = {}
    for name, hint in _hints(cell).items():
        if name not in values:
            values[name] = getattr(options, name)
        if _AXIS in typing.get_args(hint) and values[name] is not None:
            axes[name] = tuple(values[name])
    for point in itertools.product(*axes.values()):
        yield cell(**{**values, **dict(zip(axes, point, strict=True))})


def check(options: Options) -> None:
    """Raise ValueError, with the option's name, if an annotation does not allow the value."""
    defaults = {field.name: field.default for field in fields(options)}
    for name, hint in _hints(type(options)).items():
        flag, value = f"--{name.replace('_', '-')}", getattr(options, name)
        if _AXIS in typing.get_args(hint) and not value and defaults[name]:
            raise ValueError(f"{flag}: needs at least one value")
        _check(flag, value, hint)


def _check(flag: str, value: Any, hint: Any) -> None:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    shown = " ".join(map(_shown, value)) if isinstance(value, tuple) else _shown(value)
    if value is None:
        return
    if origin is Annotated:
        for needs in arguments[1:]:
            try:
                allowed = not isinstance(needs, Needs) or needs.test(value)
            except ValueError as error:
                raise ValueError(f"{flag} {shown}: {error}") from error
            if not allowed:
                raise ValueError(f"{flag} {shown}: needs {needs.what}")
        _check(flag, value, arguments[0])
    elif origin is Literal and value not in arguments:
        raise ValueError(f"{flag} {shown}: needs one of {', '.join(map(str, arguments))}")
    elif origin in (types.UnionType, typing.Union):
        _check(flag, value, arguments[0])
    elif origin is tuple:
        each = itertools.repeat(arguments[0]) if arguments[-1] is ... else arguments
        for item, item_hint in zip(value, each, strict=False):
            _check(flag, item, item_hint)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _hints(cls: type) -> dict[str, Any]:
    """Annotation of each field of a dataclass, in the order of the fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}
