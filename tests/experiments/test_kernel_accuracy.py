"""The experiment kernel_accuracy; the kernels themselves are tested in tests/kernels."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest

from experiments import kernel_accuracy
from experiments.kernel_accuracy import KERNELS, KernelAccuracy

TINY = KernelAccuracy(block_size=(7,), dtype=("float16",), head_dim=(16,))


@pytest.fixture(scope="module")
def rows():
    cells = kernel_accuracy.cells(TINY)
    return pd.DataFrame([row for cell in cells for row in kernel_accuracy.run_cell(cell)])


@pytest.mark.slow
def test_every_kernel_and_feature_is_within_the_bound(rows):
    assert rows["passed"].all()
    assert (rows["bound"] == 2 * rows["eager_error"] + 1e-5).all()
    assert set(rows["kernel"]) == set(KERNELS)
    for name, kernel in KERNELS.items():
        of_kernel = rows[rows["kernel"] == name]
        assert set(of_kernel["feature"]) == set(kernel.features)
        assert len(of_kernel) == len(kernel.features) * of_kernel["result"].nunique()


@pytest.mark.slow
def test_every_kernel_is_within_the_bound_on_an_fp8_cache():
    """Which takes the place of the cache: quantised numbers give results of their own."""
    options = dataclasses.replace(TINY, dtype=("fp8",), feature=("none", "window"))
    fp8 = pd.DataFrame(
        [row for cell in kernel_accuracy.cells(options) for row in kernel_accuracy.run_cell(cell)]
    )
    assert fp8["passed"].all()
    assert set(fp8["kernel"]) == {name for name, k in KERNELS.items() if k.touches_cache}
    exact = fp8["kernel"].isin(["store_kvcache", "copy_blocks", "swap_blocks"])
    assert (fp8.loc[exact, "error"] == 0).all()
    assert (fp8.loc[~exact, "eager_error"] > 0).all()


def test_features_change_what_is_computed(rows):
    """A feature whose option did not arrive would repeat the errors of the plain kernel."""
    decode = rows[(rows["kernel"] == "paged_decode_attention") & (rows["result"] == "LSE")]
    errors = decode.pivot(index="feature", columns="dtype", values="eager_error")
    for feature in set(errors.index) - {"none", "split"}:  # splits are the kernel's own affair
        assert (errors.loc[feature] != errors.loc["none"]).any(), feature


def test_figures_and_table_tell_of_a_result_above_the_bound(rows, tmp_path, monkeypatch):
    drawn = []
    save = kernel_accuracy.style.save
    monkeypatch.setattr(
        kernel_accuracy.style, "save", lambda figure, *a: drawn.append(figure) or save(figure, *a)
    )
    wrong = rows.assign(error=rows["error"].where(rows.index != 3, 1.0))
    wrong["passed"] = wrong["error"] <= wrong["bound"]
    assert len(kernel_accuracy.EXPERIMENT.plot(wrong, tmp_path)) == 5
    inexact = set(wrong.loc[wrong["error"] > 0, "kernel"])
    titles = [title for axis in drawn[1].axes if (title := axis.get_title())]
    assert sum("1 above the bound" in title for title in titles) == 1
    assert sum("all within the bound" in title for title in titles) == len(inexact) - 1
    table = pd.read_csv(tmp_path / "summary.csv", index_col="kernel")
    assert set(table.index) == set(KERNELS)
    assert table["results"].sum() == len(wrong)
    assert table["above_bound"].sum() == 1
    assert table.loc[wrong["kernel"][3], "above_bound"] == 1


def test_a_kernel_without_error_has_a_line_of_the_table_and_no_panel(rows, tmp_path):
    exact = rows[rows["kernel"].isin(["copy_blocks", "swap_blocks"])]
    assert [path.name for path in kernel_accuracy.EXPERIMENT.plot(exact, tmp_path)] == [
        "summary.csv"
    ]
    assert (pd.read_csv(tmp_path / "summary.csv")["error"] == 0).all()
    panels = kernel_accuracy.EXPERIMENT.plot(rows, tmp_path)
    assert {path.stem for path in panels} == {"summary", "error", "error_over_bound"}
