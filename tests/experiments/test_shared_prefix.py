"""The experiment shared_prefix."""

from __future__ import annotations

import pandas as pd
import pytest

import cache
from experiments import shared_prefix
from experiments.shared_prefix import FirstTokenCell, SharedPrefixOptions, ThroughputCell, summarise

CACHING = [name for name, manager in cache.MANAGERS.items() if manager.prefix_caching]


def first_token_cell(**parameters) -> FirstTokenCell:
    defaults = {
        "seed": 0,
        "model": "tiny",
        "attention_backend": None,
        "manager": "vllm_v1",
        "block_size": 16,
        "repeats": 1,
        "threads": 1,
        "prompt_tokens": 100,
        "cached_percent": (90, 0, 50),
    }
    return FirstTokenCell(**{**defaults, **parameters})


def throughput_cell(**parameters) -> ThroughputCell:
    defaults = {
        "seed": 0,
        "model": "tiny",
        "attention_backend": None,
        "manager": "vllm_v1",
        "block_size": 16,
        "repeats": 2,
        "threads": 1,
        "prefix_caching": True,
        "prefix_tokens": 70,
        "requests": 3,
        "suffix_tokens": 9,
        "output_tokens": 4,
    }
    return ThroughputCell(**{**defaults, **parameters})


@pytest.mark.slow
def test_the_command_line_to_the_figure(command_line, tmp_path):
    options = ("--model", "tiny", "--manager", "vllm_v1", "radix", "--block-size", 8)
    sizes = ("--prompt-tokens", 64, "--cached-percent", 0, 50, "--prefix-tokens", 0, 32)
    load = ("--requests", 2, "--output-tokens", 3, "--repeats", 2, "--threads", 1)
    output = command_line("run", "shared_prefix", *options, *sizes, *load).stdout
    assert "shared_prefix: 6 cells, 6 run" in output
    [folder] = (tmp_path / "results" / "shared_prefix").iterdir()
    rows = pd.read_csv(folder / "rows.csv")
    first, batches = rows[rows["part"] == "ttft"], rows[rows["part"] == "throughput"]
    assert list(zip(first["manager"], first["cached_tokens"], strict=True)) == [
        ("vllm_v1", 0),
        ("vllm_v1", 32),
        ("radix", 0),
        ("radix", 32),
    ]
    assert (first["ttft_ms_p20"] > 0).all()
    for low, high in (("p20", "p50"), ("p50", "p80")):
        assert (first[f"ttft_ms_{low}"] <= first[f"ttft_ms_{high}"]).all()
    assert list(zip(batches["prefix_caching"], batches["cached_tokens"], strict=True)) == [
        (False, 0),
        (True, 0),
        (False, 0),
        (True, 32),
    ]
    assert (batches["output_tokens_per_second_p20"] > 0).all()
    assert set(rows["threads"]) == {1}
    assert len(pd.read_csv(folder / "summary.csv")) == 4 + 2
    assert (folder / "shared_prefix.png").stat().st_size > 10_000


@pytest.mark.parametrize("manager", CACHING)
def test_what_is_cached_is_the_share_asked_for_in_whole_blocks(manager):
    rows = shared_prefix.run_cell(first_token_cell(manager=manager))
    assert [row["cached_tokens"] for row in rows] == [80, 0, 48]
    assert [row["cached_fraction"] for row in rows] == [0.8, 0, 0.48]


def test_a_whole_prefix_of_blocks_stays_in_the_cache_however_often_it_is_used():
    rows = shared_prefix.run_cell(first_token_cell(repeats=6, cached_percent=(0, 99.9, 0, 30)))
    assert [row["cached_tokens"] for row in rows] == [0, 96, 0, 16]


@pytest.mark.parametrize(("caching", "cached"), [(True, 64), (False, 0)])
def test_every_request_of_a_batch_finds_the_prefix(caching, cached):
    [row] = shared_prefix.run_cell(throughput_cell(prefix_caching=caching))
    assert row["cached_tokens"] == cached
    assert (row["prompt_tokens"], row["output_tokens"], row["requests"]) == (79, 4, 3)


def test_a_manager_that_loses_the_prefix_is_no_result(monkeypatch):
    monkeypatch.setattr(cache.MANAGERS["vllm_v1"], "get_computed_blocks", lambda self, seq: ([], 0))
    with pytest.raises(RuntimeError, match="vllm_v1 found 0 of 80 tokens"):
        shared_prefix.run_cell(first_token_cell())


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


def test_plots_what_there_is(tmp_path):
    """A table without the uncached prompt and without a batch still gives a figure."""
    rows = pd.DataFrame(shared_prefix.run_cell(first_token_cell(cached_percent=(50,))))
    files = shared_prefix.plot(rows, tmp_path)
    names = ["shared_prefix.pdf", "shared_prefix.png", "summary.csv"]
    assert [file.name for file in files] == names
    rows = pd.DataFrame(shared_prefix.run_cell(throughput_cell()))
    assert [file.name for file in shared_prefix.plot(rows, tmp_path)] == names


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"manager": ("paged",)}, "--manager paged: choose from nano_vllm"),
        ({"cached_percent": (100,)}, "--cached-percent must be at least 0 and below 100, got 100"),
        ({"prompt_tokens": (0,)}, "--prompt-tokens must be at least 1, got 0"),
        ({"prefix_tokens": (-1,)}, "--prefix-tokens must be at least 0, got -1"),
        ({"output_tokens": 0}, "--output-tokens must be at least 1, got 0"),
        ({"threads": 0}, "--threads must be at least 1, got 0"),
        ({"model": "gpt"}, "model='gpt' is unknown"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        list(shared_prefix.cells(SharedPrefixOptions(**options)))
