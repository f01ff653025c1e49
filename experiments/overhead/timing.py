"""Timing helpers of the parts of ``overhead``."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

from experiments import quantiles

_QUANTILES = {"": 0.5, "_p20": 0.2, "_p80": 0.8, "_mean": None}


def columns(per: str, seconds: Sequence[float]) -> dict[str, Any]:
    """Median, p20, p80 and mean of timings as columns of a row, in microseconds.

    per: the unit of work of each timing: block, step or reference.
    """
    return {"per": per, **quantiles.columns("us", [1e6 * s for s in seconds], _QUANTILES)}


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable Python's garbage collector.  Its pauses would slow a random implementation."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
