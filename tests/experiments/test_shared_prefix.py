"""The experiment shared_prefix."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

import cache
from experiments import shared_prefix
from experiments.shared_prefix import FirstToken, SharedPrefix, Throughput, summarise

CACHING = [name for name, manager in cache.MANAGERS.items() if manager.prefix_caching]


def cell_of(part: type, manager: str = "vllm_v1", prefix_caching: bool = True, **options):
    """The cell of a part that is run on a tiny model."""
    sizes = {"prompt_tokens": (100,), "cached_percent": (90, 0, 50), "prefix_tokens": (70,)}
    batch = {"requests": 3, "suffix_tokens": 9, "output_tokens": 4, "repeats": 2, "threads": 1}
    grid = shared_prefix.cells(
        SharedPrefix(model="tiny", manager=(manager,), **{**sizes, **batch, **options})
    )
    *_, cell = (cell for cell in grid if isinstance(cell, part))
    return replace(cell, prefix_caching=prefix_caching) if part is Throughput else cell


@pytest.mark.slow
def test_the_tiny_run_finds_what_is_cached(tiny_run):
    run = tiny_run("shared_prefix")
    rows = run.rows
    first, batches = rows[rows["part"] == "ttft"], rows[rows["part"] == "throughput"]
    assert list(zip(first["manager"], first["cached_tokens"], strict=True)) == [
        ("vllm_v1", 0), ("vllm_v1", 32), ("radix", 0), ("radix", 32),
    ]  # fmt: skip
    assert first["ttft_ms_p20"].min() > 0
    for low, high in (("p20", "p50"), ("p50", "p80")):
        assert (first[f"ttft_ms_{low}"] <= first[f"ttft_ms_{high}"]).all()
    assert list(zip(batches["prefix_caching"], batches["cached_tokens"], strict=True)) == [
        (False, 0), (True, 0), (False, 0), (True, 32),
    ]  # fmt: skip
    assert (batches["output_tokens_per_second_p20"] > 0).all()
    assert set(rows["threads"]) == {1}
    assert len(run.summary) == 4 + 2


@pytest.mark.parametrize("manager", CACHING)
def test_what_is_cached_is_the_share_asked_for_in_whole_blocks(manager):
    rows = shared_prefix.run_cell(cell_of(FirstToken, manager))
    assert [row["cached_tokens"] for row in rows] == [80, 0, 48]
    assert [row["cached_fraction"] for row in rows] == [0.8, 0, 0.48]


def test_a_whole_prefix_of_blocks_stays_in_the_cache_however_often_it_is_used():
    rows = shared_prefix.run_cell(cell_of(FirstToken, repeats=6, cached_percent=(0, 99.9, 0, 30)))
    assert [row["cached_tokens"] for row in rows] == [0, 96, 0, 16]


@pytest.mark.parametrize(("caching", "cached"), [(True, 64), (False, 0)])
def test_every_request_of_a_batch_finds_the_prefix(caching, cached):
    [row] = shared_prefix.run_cell(cell_of(Throughput, prefix_caching=caching))
    assert row["cached_tokens"] == cached
    assert (row["prompt_tokens"], row["output_tokens"], row["requests"]) == (79, 4, 3)


def test_a_manager_that_loses_the_prefix_is_no_result(monkeypatch):
    vllm_v1 = cache.MANAGERS["vllm_v1"]
    find = vllm_v1.find

    def forgetful(self, *arguments):
        self.reset_prefix_cache()
        return find(self, *arguments)

    monkeypatch.setattr(vllm_v1, "find", forgetful)
    with pytest.raises(RuntimeError, match="vllm_v1 found 0 of 80 tokens"):
        shared_prefix.run_cell(cell_of(FirstToken))


def test_gains_are_those_of_the_medians():
    ttft = {"part": "ttft", "manager": "radix", "prompt_tokens": 100}
    batch = {"part": "throughput", "manager": "radix", "prefix_tokens": 36, "prompt_tokens": 100}
    rows = pd.DataFrame(
        [
            {**ttft, "cached_tokens": 0, "cached_fraction": 0.0, "ttft_ms_p50": 30.0},
            {**ttft, "cached_tokens": 75, "cached_fraction": 0.75, "ttft_ms_p50": 10.0},
            {**batch, "prefix_caching": False, "output_tokens_per_second_p50": 8.0},
            {**batch, "prefix_caching": True, "output_tokens_per_second_p50": 20.0},
        ]
    )
    summary = summarise(rows)
    assert list(summary["part"]) == ["ttft", "ttft", "throughput"]
    assert list(summary["gain"]) == [1, 3, 2.5]
    assert list(summary["ideal_gain"][:2]) == [1, 4]
