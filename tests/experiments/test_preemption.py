"""The experiment preemption."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from experiments import preemption
from experiments.load.engine_models import make_llm
from experiments.preemption import CostCell, PreemptionOptions, ServingCell
from models import SamplingParams

COMMON = {"seed": 0, "model": "tiny", "attention_backend": None, "threads": 1, "repeats": 2}


def cost_cell(**parameters) -> CostCell:
    return CostCell(**{**COMMON, "block_size": 16, "context_tokens": (40,), **parameters})


def serving_cell(**parameters) -> ServingCell:
    defaults = {
        "block_size": 4,
        "manager": "vllm_v1",
        "way": "swap",
        "cache_tokens": 64,
        "requests": 4,
        "prompt_tokens": (4, 12),
        "output_tokens": (12, 24),
    }
    return ServingCell(**{**COMMON, **defaults, **parameters})


@pytest.mark.slow
def test_the_command_line_to_the_figure(command_line, tmp_path):
    grid = ("--model", "tiny", "--block-size", 4, 16, "--context-tokens", 32, "--threads", 1)
    load = ("--cache-tokens", 64, "--requests", 4, "--prompt-tokens", 4, 12)
    output = command_line(
        "run", "preemption", *grid, *load, "--output-tokens", 12, 24, "--serving-repeats", 1
    ).stdout
    assert "preemption: 6 cells, 6 run" in output
    [folder] = (tmp_path / "results" / "preemption").iterdir()
    rows = pd.read_csv(folder / "rows.csv")
    costs, serving = rows[rows["part"] == "cost"], rows[rows["part"] == "serving"]
    assert set(costs["way"]) == {"recompute", "swap", "swap_out", "swap_in"}
    assert list(costs["blocks"]) == [8] * 4 + [2] * 4
    assert (costs["ms_p20"] > 0).all()
    assert list(serving["way"]) == ["recompute", "swap"] * 2
    assert (serving["preemptions"] > 0).any()
    assert (serving["normalized_latency_ms_p20"] > 0).all()
    assert (serving["output_tokens_per_second_p20"] > 0).all()
    assert (folder / "preemption.png").stat().st_size > 10_000


def test_costs_are_of_the_blocks_that_hold_the_context():
    rows = preemption.run_cell(cost_cell(block_size=16, context_tokens=(40, 64)))
    by_length = {row["context_tokens"]: row for row in rows if row["way"] == "swap"}
    assert {length: row["blocks"] for length, row in by_length.items()} == {40: 3, 64: 4}
    # 2 layers, K and V, 2 heads of 16, fp32: 512 bytes a token
    assert by_length[64]["mebibytes"] == 64 * 512 / 2**20
    for row in rows:
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]


def test_what_is_timed_computes_and_moves_the_sequence():
    llm = make_llm(
        "tiny", block_size=4, num_blocks=8, num_host_blocks=8, preemption="swap",
        enable_prefix_caching=False,
    )  # fmt: skip
    engine, runner = llm.engine, llm.engine.runner
    runner.host_cache.fill_(torch.nan)
    engine.add(list(range(1, 11)), SamplingParams(max_tokens=1))
    spent = preemption.sequence_costs(llm)
    assert set(spent) == {"recompute", "swap_out", "swap_in", "swap"}
    assert spent["swap"] == spent["swap_out"] + spent["swap_in"]
    assert min(spent.values()) > 0
    [seq] = engine.scheduler.running
    blocks = engine.manager.block_table(seq)
    stored = runner.kv_cache[:, :, blocks]
    assert stored.flatten(2, 3)[:, :, :10].abs().min() > 0, "computed"
    assert torch.equal(runner.host_cache[:, :, : len(blocks)], stored), "swapped"
    assert runner.host_cache[:, :, len(blocks) :].isnan().all(), "nothing else"


@pytest.mark.parametrize("manager", ["vllm_v1", "vllm_v0", "paged"])
def test_only_swapping_moves_tokens(manager):
    [swap] = preemption.run_cell(serving_cell(manager=manager))
    [recompute] = preemption.run_cell(serving_cell(manager=manager, way="recompute"))
    assert swap["preemptions"] > 0 < recompute["preemptions"]
    assert swap["swapped_tokens"] > 0 == recompute["swapped_tokens"]
    for row in (swap, recompute):
        assert row["manager"] == manager
        assert row["cache_tokens"] == 64
        assert 4 * (4 + 12) <= row["tokens"] <= 4 * (12 + 24)
        # No request takes longer per token than all of them together take in all.
        seconds = row["output_tokens"] / row["output_tokens_per_second_p50"]
        assert 0 < row["normalized_latency_ms_p50"] < 1e3 * seconds


def test_a_cache_with_room_for_all_preempts_nobody():
    [row] = preemption.run_cell(serving_cell(cache_tokens=4 * 36))
    assert (row["preemptions"], row["swapped_tokens"]) == (0, 0)


def test_the_cache_has_as_many_tokens_whatever_the_block_size():
    options = PreemptionOptions(model="tiny", cache_tokens=300)
    sizes = {c.block_size: c.cache_tokens for c in preemption.cells(options)
             if isinstance(c, ServingCell)}  # fmt: skip
    assert sizes == dict.fromkeys(options.block_size, 300)
    [row] = preemption.run_cell(serving_cell(block_size=7))
    assert row["cache_tokens"] == 63


def test_plots_what_there_is(tmp_path):
    for cell in (cost_cell(), serving_cell(requests=1)):
        files = preemption.plot(pd.DataFrame(preemption.run_cell(cell)), tmp_path)
        assert [file.name for file in files] == ["preemption.pdf", "preemption.png"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache_tokens": 150}, "--cache-tokens 150: does not hold a request of 224 tokens in"),
        ({"block_size": (0,)}, "--block-size must be at least 1"),
        ({"context_tokens": (5, 0)}, "--context-tokens must be at least 1"),
        ({"prompt_tokens": (9, 8)}, "--prompt-tokens 9 8: needs two rising lengths of 1 or more"),
        ({"output_tokens": (0, 8)}, "--output-tokens 0 8: needs two rising"),
        ({"serving_repeats": 0}, "--serving-repeats must be at least 1, got 0"),
        ({"threads": 0}, "--threads must be at least 1, got 0"),
        ({"manager": "vllm_v9"}, "manager='vllm_v9' is unknown"),
        ({"model": "gpt"}, "model='gpt' is unknown"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        list(preemption.cells(PreemptionOptions(**options)))
