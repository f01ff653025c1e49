"""The experiment kernel_accuracy; the kernels themselves are tested in tests/kernels."""

import dataclasses

import pandas as pd
import pytest

from experiments import kernel_accuracy, style
from experiments.kernel_accuracy import KernelAccuracy
from kernels.testing.cases import OPS

_ATTENTION = ("none", *OPS["paged_decode_attention"].features)
TINY = KernelAccuracy(block_size=(7,), dtype=("float16",), head_dim=(16,))


@pytest.fixture(scope="module")
def rows():
    """Every kernel, and decode with every feature, on an fp16 and on an fp8 cache."""
    cells = [
        cell
        for dtype, features in (("float16", 6), ("fp8", 2))
        for cell in kernel_accuracy.cells(dataclasses.replace(TINY, dtype=(dtype,)))
        if cell.feature == "none"
        or (cell.kernel == "paged_decode_attention" and cell.feature in _ATTENTION[:features])
    ]
    return pd.DataFrame([row for cell in cells for row in kernel_accuracy.run_cell(cell)])


def test_every_kernel_is_within_the_bound(rows):
    assert rows["passed"].all()
    assert (rows["bound"] == 2 * rows["eager_error"] + 1e-5).all()
    fp8 = rows["dtype"] == "fp8"
    assert set(rows.loc[~fp8, "kernel"]) == set(OPS)
    assert set(rows.loc[fp8, "kernel"]) == {name for name, k in OPS.items() if k.takes_fp8}
    exact = rows["kernel"].isin(["store_kvcache", "copy_blocks", "swap_blocks"])
    assert (rows.loc[exact, "error"] == 0).all()
    assert (rows.loc[fp8 & ~exact & (rows["result"] == "out"), "eager_error"] > 0).all()


def test_features_change_what_is_computed(rows):
    """A feature whose option did not arrive would repeat the errors of the plain kernel."""
    decode = rows[(rows["kernel"] == "paged_decode_attention") & (rows["result"] == "lse")]
    errors = decode.pivot(index="feature", columns="dtype", values="eager_error")
    for feature in set(_ATTENTION) - {"none", "split"}:  # splitting leaves the result as it is
        assert (errors.loc[feature] != errors.loc["none"]).any(), feature


def test_a_result_above_the_bound_shows_in_figures_and_table(rows, tmp_path, drawn):
    rows = rows[rows["dtype"] == "float16"]
    wrong = rows.assign(error=rows["error"].where(rows.index != 3, 1.0))
    wrong["passed"] = wrong["error"] <= wrong["bound"]
    files = kernel_accuracy.EXPERIMENT.plot(wrong, tmp_path)
    assert {path.stem for path in files} == {"summary", "error_over_bound"}
    (axis,) = drawn["error_over_bound"].axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert [name.partition(" ")[0] for name in names] == list(OPS)
    assert sum("1 WRONG" in name for name in names) == 1
    inexact = set(wrong.loc[wrong["error"] > 0, "kernel"])
    table = pd.read_csv(tmp_path / "summary.csv", index_col="kernel")
    assert set(table.index) == set(OPS)
    assert table["results"].sum() == len(wrong)
    assert table["above_bound"].sum() == 1
    assert table.loc[wrong["kernel"][3], "above_bound"] == 1
    assert (table.loc[sorted({*OPS} - inexact), "error"] == 0).all()


def test_wrong_results_are_marked_in_red_on_a_logarithmic_axis(rows, drawn, tmp_path):
    """Also if their error is 2.5e7 times the bound or no number; nothing else is red."""
    of_op = rows[rows["kernel"] == "paged_decode_attention"].reset_index(drop=True)
    of_op = of_op.assign(dtype="bfloat16", passed=of_op.index > 1)
    of_op.loc[0, "error"] = 2.5e7 * of_op.loc[0, "bound"]
    of_op.loc[1, "error"] = float("nan")
    kernel_accuracy.EXPERIMENT.plot(of_op, tmp_path)
    (axis,) = drawn["error_over_bound"].axes
    assert axis.get_xscale() == "log"
    red = [line for line in axis.lines if line.get_color() == style.RED]
    assert [line.get_label() for line in red] == ["WRONG: above the bound"]
    assert len(red[0].get_xdata()) == 2
    assert min(red[0].get_xdata()) > 1e7
