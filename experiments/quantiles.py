"""Measurements as quantiles in columns of a table, and as a line with error bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_PERCENTS = (20, 50, 80)


def columns(
    name: str, values: Iterable[float], percents: Sequence[int] = _PERCENTS, unit: str = ""
) -> dict[str, float | None]:
    """``<name>_p20<unit>``, ``_p50`` (the median) ... of ``values``; None without any."""
    import numpy as np

    values = list(values)
    return {
        f"{name}_p{percent}{unit}": float(np.quantile(values, percent / 100)) if values else None
        for percent in percents
    }


def of_times(name: str, seconds: Iterable[float | None]) -> dict[str, float | None]:
    """``<name>_mean_s``, ``_p50_s``, ``_p90_s`` and ``_p99_s`` of the times that are known; None
    without any."""
    known = [value for value in seconds if value is not None]
    mean = sum(known) / len(known) if known else None
    return {f"{name}_mean_s": mean, **columns(name, known, (50, 90, 99), "_s")}


def error_bars(axis: Axes, x: pd.Series, rows: pd.DataFrame, name: str, **look: object) -> None:
    """A line through the medians of the columns ``<name>_*``, with bars from p20 to p80.

    ``look`` goes to ``Axes.errorbar``.
    """
    low, median, high = (rows[f"{name}_p{percent}"] for percent in _PERCENTS)
    error = [median - low, high - median]
    axis.errorbar(x, median, error, elinewidth=0.7, capsize=1.5, **look)
