"""The experiment cascade: its grid and its figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.gpu import cascade
from experiments.gpu.cascade import Cascade


def test_a_prefix_is_whole_blocks():
    with pytest.raises(ValueError, match="--prefix-len 100: needs a multiple of the block size 16"):
        list(cascade.cells(Cascade(prefix_len=(100,))))


def test_the_figure_bounds_the_gain_by_the_bytes_read(timed_rows, drawn):
    rows = timed_rows(cascade.cells(Cascade(prefix_len=(1024, 4096), batch=(1, 64))))
    qo_bytes = 2 * rows["batch"] * 32 * 128 * 2
    rows["bytes"] = 2 * 2 * (rows["prefix_len"] + rows["batch"] * 256) * 8 * 128 + qo_bytes
    cascade.EXPERIMENT.plot(rows, Path())
    _, speedup = (axis for axis in drawn["cascade"].axes if axis.get_title())
    bounds = [line for line in speedup.get_lines() if line.get_linestyle() == "--"]
    plain = 2 * 2 * 64 * (4096 + 256) * 8 * 128 + 2 * 64 * 32 * 128 * 2
    shared = 2 * 2 * (4096 + 64 * 256) * 8 * 128 + 2 * 64 * 32 * 128 * 2
    assert bounds[0].get_ydata() == pytest.approx([1.0, 1.0])
    assert bounds[1].get_ydata()[-1] == pytest.approx(plain / shared)


def test_a_table_without_times_has_no_figure(timed_rows):
    rows = timed_rows(cascade.cells(Cascade())).assign(p50_us=float("nan"))
    assert cascade.EXPERIMENT.plot(rows, Path()) == []
