"""Options, their checks, and the cells that they stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from experiments.harness import (
    Axis,
    Count,
    Lengths,
    Needs,
    Options,
    Percent,
    Positive,
    Repeated,
    grid,
    one_of,
)
from experiments.harness.grid import check


def even(value: int) -> bool:
    if value < 0:
        raise ValueError("says more of a negative one")
    return value % 2 == 0


@dataclass(frozen=True, kw_only=True)
class Part(Options):
    size: Axis[Count] = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Whole(Part):
    name: Repeated[Axis[Annotated[str, one_of(("a", "b"))]]] = ()
    kind: Axis[Literal["x", "y"]] = ("x", "y")
    share: Axis[Percent] = (50.0,)
    load: Positive = 1.0
    tokens: Lengths = (1, 8)
    even: Annotated[int, Needs("an even number", even)] = 0
    pairs: tuple[tuple[Count, Percent], ...] = ((1, 1.0),)


def test_a_cell_has_one_value_of_each_axis_the_last_one_fastest():
    cells = list(grid(Whole(name=("a",), seed=3)))
    assert [(c.size, c.name, c.kind, c.share) for c in cells] == [
        (1, "a", "x", 50), (1, "a", "y", 50), (2, "a", "x", 50), (2, "a", "y", 50),
    ]  # fmt: skip
    assert {(c.seed, c.load, c.tokens) for c in cells} == {(3, 1, (1, 8))}


def test_a_part_has_its_own_fields_and_axes_alone():
    assert list(grid(Whole(seed=2), Part)) == [Part(seed=2, size=1), Part(seed=2, size=2)]


def test_what_stands_in_the_place_of_an_axis():
    items = list(grid(Whole(), size=(5,), name=iter(["a", "c"]), kind=("z",), load=0.5))
    assert [(c.size, c.name, c.kind, c.load) for c in items] == [
        (5, "a", "z", 0.5), (5, "c", "z", 0.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (3, 0)}, "--size 0: needs an int of at least 1"),
        ({"kind": ("z",)}, "--kind z: needs one of x, y"),
        ({"share": (100.5,)}, "--share 100.5: needs a number above 0, at most 100"),
        ({"load": float("nan")}, "--load nan: needs a number above 0"),
        ({"load": float("inf")}, "--load inf: needs a number above 0"),
        ({"tokens": (0, 8)}, "--tokens 0 8: needs fewest and most, at least 1"),
        ({"even": 3}, "--even 3: needs an even number"),
        ({"even": -2}, "--even -2: says more of a negative one"),
        ({"pairs": ((1, 1.0), (2, 0.0))}, "--pairs 0: needs a number above 0, at most 100"),
    ],
)
def test_a_value_that_will_not_do_is_named_with_its_option(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check(Whole(**options))
