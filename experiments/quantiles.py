"""Repeated measurements as columns of a table, and as a line with error bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_SPREAD = {"_p20": 0.2, "_p50": 0.5, "_p80": 0.8}
_OF_TIMES = {"_mean_s": None, "_p50_s": 0.5, "_p90_s": 0.9, "_p99_s": 0.99}


def of_times(name: str, seconds: Iterable[float | None]) -> dict[str, float | None]:
    """``<name>_mean_s``, ``_p50_s``, ``_p90_s`` and ``_p99_s``."""
    return columns(name, seconds, _OF_TIMES)


def columns(
    name: str, values: Iterable[float | None], at: Mapping[str, float | None] = _SPREAD
) -> dict[str, float | None]:
    """Quantiles of the ``values`` that are known, as columns of a row; None without any.

    at: from what follows ``name`` in a column to its quantile, interpolated; None: the mean.
    """
    import numpy as np

    known = [value for value in values if value is not None]
    if not known:
        return dict.fromkeys(name + suffix for suffix in at)
    return {
        name + suffix: float(np.mean(known) if q is None else np.quantile(known, q))
        for suffix, q in at.items()
    }


def error_bars(axis: Axes, x: pd.Series, rows: pd.DataFrame, name: str, **look: object) -> None:
    """A line through the medians of the columns ``<name>_*``, with bars from p20 to p80.

    ``look`` goes to ``Axes.errorbar``.
    """
    low, median, high = (rows[name + suffix] for suffix in _SPREAD)
    error = [median - low, high - median]
    axis.errorbar(x, median, error, elinewidth=0.7, capsize=1.5, **look)
