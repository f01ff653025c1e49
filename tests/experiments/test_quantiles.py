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


def test_bars_reach_from_the_least_to_the_most():
    rows = pd.DataFrame({"batch": [4, 1, 1, 4, 1, 4], "ms": [1, 5, 0, 3, 10, 2]})
    figure, axis = plt.subplots()
    quantiles.draws(axis, rows, "batch", "ms", label="time")
    [(line, _, [bars])] = axis.containers
    assert line.get_ydata().tolist() == [5, 2]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[0, 10], [1, 3]]
    plt.close(figure)
