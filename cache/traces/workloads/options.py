"""Checked options of all workloads, and the step from sampled requests to a ``Trace``."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from cache.traces.trace import Trace
from cache.traces.workloads.prompts import Prompt


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


Requests = Iterator[tuple[int, Prompt, int]]
"""``(timestamp_ms, prompt, output_length)`` of each request, in order of time."""


def workload(requests: Callable[..., Requests]) -> Callable[..., Trace]:
    """Turn ``requests``, an endless generator, into a function that returns a ``Trace`` of them.

    It takes the options of ``requests``, whose annotations bound the values, and ends after
    ``num_requests``.  It raises ValueError for an unknown option and a value out of its bounds.
    """
    name = requests.__name__
    parameters = inspect.signature(requests, eval_str=True).parameters

    @functools.wraps(requests)
    def make(**options) -> Trace:
        unknown = [option for option in options if option not in parameters]
        if unknown:
            raise ValueError(
                f"unknown option {', '.join(unknown)} of workload {name!r}; "
                f"choose from {', '.join(parameters)}"
            )
        options = {option: p.default for option, p in parameters.items()} | options
        for option, value in options.items():
            (bounds,) = parameters[option].annotation.__metadata__
            if (
                isinstance(value, bool)
                or not isinstance(value, bounds.kind)
                or not math.isfinite(value)
                or not bounds.allows(value)
            ):
                raise ValueError(f"{option} must be {bounds.says}, got {value!r}")
        drawn = islice(requests(**options), options["num_requests"])
        return Trace.from_requests(
            ((time, prompt.num_tokens, output, prompt.block_ids) for time, prompt, output in drawn),
            name=name,
            block_size=options["block_size"],
        )

    return make
