"""The experiment manager_overhead."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pytest

import cache
from experiments import manager_overhead
from experiments.harness import Unavailable
from experiments.manager_overhead import trees
from experiments.manager_overhead.baselines import SGLangRadixCache, VLLMBlockPool


@pytest.mark.slow
def test_every_manager_has_every_phase_and_its_quantiles(tiny_run):
    run = tiny_run("manager_overhead")
    rows = run.rows
    of_trees = rows["phase"].str.startswith("tree_")
    assert set(rows[of_trees]["page_size"]) == {16, 1}
    rows = rows[~of_trees]
    ours = rows[rows["implementation"] == "vllm_v1"]
    assert set(ours["phase"]) == {
        "make_pool", "sequence", "cycle", "hash", "lookup", "allocate", "free",
    }  # fmt: skip
    assert set(rows["implementation"]) >= {"vllm_v1", "vllm_v0", "nano_vllm", "radix", "paged"}
    timed = rows[rows["phase"] != "make_pool"]
    assert (timed["us_per_block_p10"] <= timed["us_per_block"]).all()
    assert (timed["us_per_block"] <= timed["us_per_block_p90"]).all()
    columns = ["name", "pool_blocks", "cycle_us_per_block", "make_pool_seconds", "mebibytes"]
    assert list(run.summary.columns) == columns
    groups = rows.groupby(["implementation", "hash_algorithm"], dropna=False).ngroups
    assert len(run.summary) == 2 * groups
    assert not run.summary.isna().any(axis=None)


def test_half_of_each_prompt_is_cached():
    """The condition under which the figures are quoted holds once the pool is full."""
    pool_blocks = 1024
    manager = cache.make_manager("vllm_v1", num_blocks=pool_blocks, block_size=16)
    prompts = manager_overhead._prompts(np.random.default_rng(0), pool_blocks)
    hits, evicted = [], manager.stats.evicted_blocks
    for number in range(40):
        seq = cache.Sequence(number, next(prompts))
        hits.append(manager.allocate(seq))
        manager.free(seq)
    assert hits[20:] == [2048] * 20
    assert manager.stats.evicted_blocks - evicted > 20 * 128


@pytest.mark.parametrize(
    ("package", "baseline", "message"),
    [
        ("vllm", lambda: VLLMBlockPool(64, 16), "vLLM 0.11 is not installed"),
        ("sglang", lambda: SGLangRadixCache(16), "SGLang 0.5.23 is not installed"),
    ],
)
def test_without_its_package_a_baseline_is_absent(monkeypatch, package, baseline, message):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unavailable, match=message):
        baseline()


class Baseline(trees._Ours):
    """Stands in for SGLang's tree."""

    name = "SGLang"
    version = "0.0"

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size, 1_000_000)


class Forgetful(Baseline):
    def insert(self, prompt) -> None:
        super().insert((prompt[0], prompt[1][:-1]))


def test_trees_rows_and_figure(monkeypatch, tmp_path):
    monkeypatch.setattr(trees, "SGLangRadixCache", Baseline)
    rows = pd.DataFrame(trees.run_cell(trees.Trees(page_size=1024, prompts=23)))
    assert set(zip(rows["implementation"], rows["phase"], strict=True)) == {
        (name, phase) for name in ("radix", "SGLang") for phase in trees.OPERATIONS
    }
    assert (rows["us_per_prompt_p10"] > 0).all()
    assert (rows["us_per_prompt_p10"] <= rows["us_per_prompt"]).all()
    assert (rows["us_per_prompt"] <= rows["us_per_prompt_p90"]).all()
    trees.plot(rows, tmp_path)
    table = pd.read_csv(tmp_path / "radix_tree.csv", index_col=["page_size", "operation"])
    assert list(table.columns) == ["SGLang_us_per_prompt", "radix_us_per_prompt"]
    assert list(table.loc[1024].index) == list(trees.OPERATIONS.values())


def test_a_tree_that_does_less_work_is_no_comparison(monkeypatch):
    monkeypatch.setattr(trees, "SGLangRadixCache", Forgetful)
    with pytest.raises(RuntimeError, match=r"SGLang: .* tokens, 4080 of a prompt found"):
        trees.run_cell(trees.Trees(page_size=16, prompts=3))
