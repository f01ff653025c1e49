"""The experiment manager_overhead."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import cache
from experiments import manager_overhead
from experiments.harness import Unavailable
from experiments.rivals import VLLMBlockPool


def test_the_command_line_from_managers_to_the_figure(command_line, tmp_path):
    options = ("--requests", 4, "--tree-prompts", 12)
    command_line("run", "manager_overhead", "--pool-blocks", 512, 1024, *options)
    folder = tmp_path / "results" / "manager_overhead" / "cpu"
    rows = pd.read_csv(folder / "rows.csv")
    of_trees = rows["phase"].str.startswith("tree_")
    assert set(rows[of_trees]["page_size"]) == {16, 1}
    assert (rows[of_trees]["us_per_prompt"] > 0).all()
    rows = rows[~of_trees]
    ours = rows[rows["implementation"] == "vllm_v1"]
    assert set(ours["phase"]) == {
        "make_pool", "sequence", "cycle", "hash", "lookup", "allocate", "free",
    }  # fmt: skip
    assert set(rows["implementation"]) >= {"vllm_v1", "vllm_v0", "nano_vllm", "radix", "paged"}
    timed = rows[rows["phase"] != "make_pool"]
    assert (timed["us_per_block_p10"] <= timed["us_per_block"]).all()
    assert (timed["us_per_block"] <= timed["us_per_block_p90"]).all()
    summary = pd.read_csv(folder / "summary.csv")
    columns = ["name", "pool_blocks", "cycle_us_per_block", "make_pool_seconds", "mebibytes"]
    assert list(summary.columns) == columns
    assert (
        len(summary) == 2 * rows.groupby(["implementation", "hash_algorithm"], dropna=False).ngroups
    )
    assert not summary.isna().any(axis=None)
    for figure in ("manager_overhead.png", "radix_tree.png"):
        assert (folder / figure).stat().st_size > 10_000


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
    ("options", "message"),
    [
        ({"pool_blocks": (100,)}, "--pool-blocks must be at least 512, got 100"),
        ({"requests": 1}, "--requests must be at least 2, got 1"),
        ({"tree_page_sizes": (16, 0)}, "--tree-page-sizes must divide 1024, got 0"),
        ({"tree_page_sizes": (1000,)}, "--tree-page-sizes must divide 1024, got 1000"),
        ({"tree_prompts": 0}, "--tree-prompts must be at least 1, got 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        list(manager_overhead.cells(manager_overhead.ManagerOverheadOptions(**options)))


def test_without_vllm_its_rows_are_absent(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(Unavailable, match=r"vLLM 0.11 is not installed"):
        VLLMBlockPool(64, 16)
