"""Summarise repeated measurements: as columns of a table, or as a line with error bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from experiments import style

_SPREAD = {"_p20": 0.2, "_p50": 0.5, "_p80": 0.8}
_OF_TIMES = {"_mean_s": None, "_p50_s": 0.5, "_p90_s": 0.9, "_p99_s": 0.99}
_OF_WORK = {"": 0.5, "_p20": 0.2, "_p80": 0.8, "_mean": None}


def of_times(name: str, seconds: Iterable[float | None]) -> dict[str, float | None]:
    """Columns ``<name>_mean_s``, ``<name>_p50_s``, ``<name>_p90_s`` and ``<name>_p99_s``."""
    return columns(name, seconds, _OF_TIMES)


def of_work(per: str, seconds: Iterable[float]) -> dict[str, Any]:
    """Median, p20, p80 and mean of timings as columns of a row, in microseconds.

    per: the unit of work of each timing: block, step or reference.
    """
    return {"per": per, **columns("us", [1e6 * s for s in seconds], _OF_WORK)}


def columns(
    name: str, values: Iterable[float | None], at: Mapping[str, float | None] = _SPREAD
) -> dict[str, float | None]:
    """Quantiles of the ``values`` that are not None, as columns of a row.  If all values are None,
    the columns are None.

    at: for each column, by the suffix of its name: an (interpolated) quantile; None is the mean."""
    known = [value for value in values if value is not None]
    if not known:
        return dict.fromkeys(name + suffix for suffix in at)
    return {
        name + suffix: float(np.mean(known) if q is None else np.quantile(known, q))
        for suffix, q in at.items()
    }


def draws(
    axis: style.Axes,
    rows: style.DataFrame,
    x: str | style.Series,
    y: str,
    middle: str = "median",
    **look: Any,
) -> None:
    """Draw the median of ``y`` at each ``x``, with a bar from the smallest to the largest ``y``.

    x: name of a column, or values of the rows.  middle: "median" or "mean".  look: options of
    ``Axes.errorbar``.
    """
    points = rows.groupby(x)[y]
    low, middles, high = points.min(), points.agg(middle), points.max()
    error = [middles - low, high - middles]
    axis.errorbar(middles.index, middles, error, elinewidth=0.7, capsize=1.5, **look)


def over_slices(rows: style.DataFrame, by: list[str], values: list[str]) -> style.DataFrame:
    """A row for each value of ``by``: mean, minimum and maximum of ``values`` over the slices."""
    groups = rows.groupby(by, sort=False)
    table = groups[values].agg(["mean", "min", "max"])
    table.columns = ["_".join(column) for column in table]
    return table.assign(slices=groups.size()).reset_index()
