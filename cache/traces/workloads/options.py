"""Checks options of workloads, and makes a ``Trace`` from sampled requests."""

import functools
import inspect
import numbers
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Annotated, Any

from cache.checks import shown
from cache.traces.trace import Trace
from cache.traces.workloads.prompts import Prompt

Count = Annotated[int, numbers.Integral, 1, 2**24]
Seed = Annotated[int, numbers.Integral, 0, 2**64 - 1]
Positive = Annotated[float, numbers.Real, 1e-6, 1e6]
NonNegative = Annotated[float, numbers.Real, 0, 1e9]
AtLeastOne = Annotated[float, numbers.Real, 1, 1e9]
Probability = Annotated[float, numbers.Real, 0, 1]
"""Type of an option, and the kind of number, least and most that it may be."""

Requests = Iterator[tuple[int, Prompt, int]]
"""``(timestamp_ms, prompt, output_length)`` of each request, in order of time."""


def workload(requests: Callable[..., Requests]) -> Callable[..., Trace]:
    """Turn ``requests``, an endless generator, into a function that returns a ``Trace``.

    The function has the options of ``requests``; their annotations bound the values.  The trace has
    ``num_requests`` requests.  Raises ValueError for unknown options and values out of bounds.
    """
    name = requests.__name__
    parameters = inspect.signature(requests, eval_str=True).parameters

    @functools.wraps(requests)
    def make(**options: Any) -> Trace:
        unknown = [option for option in options if option not in parameters]
        if unknown:
            raise ValueError(
                f"unknown option {', '.join(unknown)} of workload {name!r}; "
                f"choose from {', '.join(parameters)}"
            )
        options = {option: p.default for option, p in parameters.items()} | options
        for option, value in options.items():
            kind, least, most = parameters[option].annotation.__metadata__
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if not is_number or not least <= value <= most:
                needs = "an integer" if kind is numbers.Integral else "a number"
                says = f"{needs} from {least} to {most}"
                raise ValueError(f"{option} must be {says}, got {shown(value)}")
        drawn = islice(requests(**options), options["num_requests"])
        return Trace.from_requests(
            ((time, prompt.num_tokens, output, prompt.block_ids) for time, prompt, output in drawn),
            name=name,
            block_size=options["block_size"],
        )

    return make
