"""Repeated measurements as three columns of a table, and as a line with error bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_QUANTILES = {"p20": 0.2, "p50": 0.5, "p80": 0.8}


def columns(name: str, values: Sequence[float]) -> dict[str, float]:
    """``<name>_p20``, ``_p50`` (the median) and ``_p80`` of ``values``, at least one."""
    import numpy as np

    return {f"{name}_{suffix}": float(np.quantile(values, q)) for suffix, q in _QUANTILES.items()}


def error_bars(axis: Axes, x: pd.Series, rows: pd.DataFrame, name: str, **look: object) -> None:
    """A line through the medians of the columns ``<name>_*``, with bars from p20 to p80.

    ``look`` goes to ``Axes.errorbar``.
    """
    low, median, high = (rows[f"{name}_{suffix}"] for suffix in _QUANTILES)
    error = [median - low, high - median]
    axis.errorbar(x, median, error, elinewidth=0.7, capsize=1.5, **look)
