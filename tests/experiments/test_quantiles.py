from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from experiments import quantiles


def test_columns_are_interpolated_quantiles():
    assert quantiles.columns("ms", [5, 0, 10]) == {"ms_p20": 2, "ms_p50": 5, "ms_p80": 8}
    assert quantiles.columns("ms", [7.0]) == {"ms_p20": 7, "ms_p50": 7, "ms_p80": 7}


def test_times_that_are_unknown_do_not_count():
    columns = quantiles.of_times("ttft", [*(i / 100 for i in range(101)), None])
    assert columns == pytest.approx(
        {"ttft_mean_s": 0.5, "ttft_p50_s": 0.5, "ttft_p90_s": 0.9, "ttft_p99_s": 0.99}
    )
    assert set(quantiles.of_times("tpot", [None, None]).values()) == {None}


def test_bars_reach_from_p20_to_p80():
    rows = pd.DataFrame([quantiles.columns("ms", values) for values in ([5, 0, 10], [1, 2, 3])])
    figure, axis = plt.subplots()
    quantiles.error_bars(axis, rows.assign(batch=[1, 4]), "batch", "ms", label="time")
    [(line, _, [bars])] = axis.containers
    assert line.get_ydata().tolist() == [5, 2]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[2, 8], [1.4, 2.6]]
    plt.close(figure)
