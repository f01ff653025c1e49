"""Types of workload options: the annotation says what a value must be, and is checked."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class _Bounds:
    kind: type[numbers.Number]
    says: str
    allows: Callable[[Any], bool]


Count = Annotated[int, _Bounds(numbers.Integral, "an integer of at least 1", lambda n: n >= 1)]
Seed = Annotated[int, _Bounds(numbers.Integral, "an integer of at least 0", lambda n: n >= 0)]
Positive = Annotated[float, _Bounds(numbers.Real, "a finite number above 0", lambda x: x > 0)]
NonNegative = Annotated[
    float, _Bounds(numbers.Real, "a finite number of at least 0", lambda x: x >= 0)
]
AtLeastOne = Annotated[
    float, _Bounds(numbers.Real, "a finite number of at least 1", lambda x: x >= 1)
]
Probability = Annotated[float, _Bounds(numbers.Real, "a number from 0 to 1", lambda x: 0 <= x <= 1)]


def check_options(workload: str, generate: Callable, options: dict[str, Any]) -> None:
    """Raise ValueError unless ``options`` are parameters of ``generate`` within their bounds."""
    parameters = inspect.signature(generate, eval_str=True).parameters
    unknown = [option for option in options if option not in parameters]
    if unknown:
        raise ValueError(
            f"unknown option {', '.join(unknown)} of workload {workload!r}; "
            f"choose from {', '.join(parameters)}"
        )
    for option, value in options.items():
        (bounds,) = parameters[option].annotation.__metadata__
        if (
            isinstance(value, bool)
            or not isinstance(value, bounds.kind)
            or not math.isfinite(value)
            or not bounds.allows(value)
        ):
            raise ValueError(f"{option} must be {bounds.says}, got {value!r}")
