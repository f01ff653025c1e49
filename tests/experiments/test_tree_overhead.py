"""The radix tree part of manager_overhead."""

from __future__ import annotations

import pandas as pd
import pytest

from experiments import tree_overhead
from experiments.harness import Unavailable
from experiments.rivals import SGLangRadixCache
from experiments.tree_overhead import OPERATIONS, TreeOverheadCell


class Rival(tree_overhead._Ours):
    """Stands in for SGLang's tree."""

    name = "SGLang"
    version = "0.0"

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size, 1_000_000)


@pytest.fixture
def without_sglang(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sglang", None)


def test_without_sglang_its_rows_are_absent(without_sglang):
    with pytest.raises(Unavailable, match=r"SGLang 0.5.23 is not installed"):
        SGLangRadixCache(16)
    rows = tree_overhead.run_cell(TreeOverheadCell(seed=0, page_size=16, prompts=3))
    assert [row["phase"] for row in rows] == list(OPERATIONS)
    assert {row["implementation"] for row in rows} == {"radix"}


@pytest.mark.parametrize("page_size", [1, 16, 1024])
def test_rows_and_figure(monkeypatch, tmp_path, page_size):
    monkeypatch.setattr(tree_overhead, "SGLangRadixCache", Rival)
    cell = TreeOverheadCell(seed=0, page_size=page_size, prompts=23)
    rows = pd.DataFrame(tree_overhead.run_cell(cell))
    assert set(zip(rows["implementation"], rows["phase"], strict=True)) == {
        (name, phase) for name in ("radix", "SGLang") for phase in OPERATIONS
    }
    assert (rows["us_per_prompt_p10"] > 0).all()
    assert (rows["us_per_prompt_p10"] <= rows["us_per_prompt"]).all()
    assert (rows["us_per_prompt"] <= rows["us_per_prompt_p90"]).all()
    tree_overhead.plot(rows, tmp_path)
    table = pd.read_csv(tmp_path / "radix_tree.csv", index_col=["page_size", "operation"])
    assert list(table.columns) == ["SGLang_us_per_prompt", "radix_us_per_prompt"]
    assert list(table.loc[page_size].index) == list(OPERATIONS.values())
    assert (tmp_path / "radix_tree.png").stat().st_size > 10_000


class Forgetful(Rival):
    def insert(self, prompt) -> None:
        super().insert((prompt[0], prompt[1][:-1]))


def test_a_tree_that_does_less_work_is_no_comparison(monkeypatch):
    monkeypatch.setattr(tree_overhead, "SGLangRadixCache", Forgetful)
    with pytest.raises(RuntimeError, match=r"SGLang: .* tokens, 4080 of a prompt found"):
        tree_overhead.run_cell(TreeOverheadCell(seed=0, page_size=16, prompts=3))
