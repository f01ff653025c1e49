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
from experiments.manager_overhead.baselines import VLLM, SGLangRadixCache


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


def test_vllm_finds_what_ours_does():
    """Where vLLM can be imported: the comparison is of equal work."""
    pytest.importorskip("vllm")
    vllm, pool_blocks = VLLM(), 1024
    theirs = [vllm.manager(name, pool_blocks, 16) for name in vllm.hash_algorithms()]
    ours = cache.make_manager("vllm_v1", num_blocks=pool_blocks, block_size=16)
    prompts = manager_overhead._prompts(np.random.default_rng(0), pool_blocks)
    for number in range(40):
        token_ids = next(prompts)
        seq = cache.Sequence(number, token_ids)
        found = ours.allocate(seq)
        ours.free(seq)
        for manager in theirs:
            assert manager.cycle(manager.make(number, token_ids)) == found


class StandInVLLM:
    """Stands in for vLLM where it is absent."""

    def hash_algorithms(self) -> list[str]:
        return ["sha256"]

    def manager(self, hash_algorithm: str, num_blocks: int, block_size: int):
        manager = manager_overhead._Ours("vllm_v1", hash_algorithm, num_blocks)
        manager.name, manager.version = "vLLM", "0.0"
        return manager


def test_vllm_has_rows_beside_ours(monkeypatch, tmp_path):
    monkeypatch.setattr(manager_overhead, "VLLM", StandInVLLM)
    cell = manager_overhead.Managers(pool_blocks=512, requests=2)
    rows = pd.DataFrame(manager_overhead.run_cell(cell))
    theirs = rows[rows["implementation"] == "vLLM"]
    assert set(theirs["hash_algorithm"]) == {"sha256"}
    assert set(theirs["version"]) == {"0.0"}
    assert set(theirs["phase"]) == set(rows.loc[rows["implementation"] == "vllm_v1", "phase"])
    manager_overhead.EXPERIMENT.plot(rows, tmp_path)
    names = set(pd.read_csv(tmp_path / "summary.csv")["name"])
    assert {"vLLM 0.0 (sha256)", "vllm_v1 (sha256)", "paged"} <= names


@pytest.mark.parametrize(
    ("package", "baseline", "message"),
    [
        ("vllm", VLLM, "vLLM 0.11 to 0.33 cannot be imported"),
        ("sglang", lambda: SGLangRadixCache(16), "SGLang 0.5.23 cannot be imported"),
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
    manager_overhead.EXPERIMENT.plot(rows, tmp_path)
    table = pd.read_csv(tmp_path / "radix_tree.csv", index_col=["page_size", "operation"])
    assert list(table.columns) == ["SGLang_us_per_prompt", "radix_us_per_prompt"]
    assert list(table.loc[1024].index) == list(trees.OPERATIONS.values())


def test_a_tree_that_does_less_work_is_no_comparison(monkeypatch):
    monkeypatch.setattr(trees, "SGLangRadixCache", Forgetful)
    with pytest.raises(RuntimeError, match=r"SGLang: .* tokens, 4080 of a prompt found"):
        trees.run_cell(trees.Trees(page_size=16, prompts=3))
