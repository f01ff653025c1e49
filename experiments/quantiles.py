"""Repeated measurements as columns of a table, and as a line with error bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from experiments import style

_SPREAD = {"_p20": 0.2, "_p50": 0.5, "_p80": 0.8}
_OF_TIMES = {"_mean_s": None, "_p50_s": 0.5, "_p90_s": 0.9, "_p99_s": 0.99}


def of_times(name: str, seconds: Iterable[float | None]) -> dict[str, float | None]:
    """``<name>_mean_s``, ``_p50_s``, ``_p90_s`` and ``_p99_s``."""
    return columns(name, seconds, _OF_TIMES)


def columns(
    name: str, values: Iterable[float | None], at: Mapping[str, float | None] = _SPREAD
) -> dict[str, float | None]:
    """Quantiles of the ``values`` that are not None, as columns of a row; None without any.

    at: maps the suffix of a column to its quantile (interpolated), or to None for the mean.
    """
    known = [value for value in values if value is not None]
    if not known:
        return dict.fromkeys(name + suffix for suffix in at)
    return {
        name + suffix: float(np.mean(known) if q is None else np.quantile(known, q))
        for suffix, q in at.items()
    }


def draws(axis: style.Axes, rows: style.DataFrame, x: str, y: str, **look: object) -> None:
    """A line through the medians of ``y`` against ``x``, with bars from the smallest to the
    largest.  ``look`` goes to ``Axes.errorbar``."""
    points = rows.groupby(x)[y]
    low, median, high = points.min(), points.median(), points.max()
    error = [median - low, high - median]
    axis.errorbar(median.index, median, error, elinewidth=0.7, capsize=1.5, **look)


def band(axis: style.Axes, rows: style.DataFrame, x: str, **look: object) -> None:
    """A line of the column ``p50_us`` against ``x``, in a band from ``p20_us`` to ``p80_us``."""
    style.curve(axis, rows, x, "p50_us", **look)
    rows = rows.sort_values(x)
    spread = {"color": look["color"], "alpha": 0.2, "linewidth": 0}
    axis.fill_between(rows[x], rows["p20_us"], rows["p80_us"], **spread)
