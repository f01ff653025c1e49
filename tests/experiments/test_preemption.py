"""The experiment preemption."""

from __future__ import annotations

import pytest
import torch

from experiments import preemption
from experiments.load.engine_models import make_llm
from experiments.preemption import Cost, Preemption, Serving
from models import SamplingParams


def cell_of(part: type, way: str = "swap", **options):
    """The cell of a part that is run on a tiny model."""
    lengths = {"context_tokens": (40,), "prompt_tokens": (4, 12), "output_tokens": (12, 24)}
    load = {"cache_tokens": 64, "requests": 4, "repeats": 2, "serving_repeats": 2, "threads": 1}
    options = Preemption(model="tiny", **{**lengths, **load, "block_size": (4,), **options})
    cells = preemption.EXPERIMENT.checked_cells(options)
    return next(c for c in cells if isinstance(c, part) and getattr(c, "way", way) == way)


@pytest.mark.slow
def test_the_tiny_run_has_every_cost_and_both_ways(tiny_run):
    rows = tiny_run("preemption").rows
    costs, serving = rows[rows["part"] == "cost"], rows[rows["part"] == "serving"]
    assert set(costs["way"]) == {"recompute", "swap", "swap_out", "swap_in"}
    assert list(costs["blocks"]) == [8] * 4 + [2] * 4
    assert (costs["ms_p20"] > 0).all()
    assert list(serving["way"]) == ["recompute", "swap"] * 2
    assert (serving["preemptions"] > 0).any()
    assert (serving["normalized_latency_ms_p20"] > 0).all()
    assert (serving["output_tokens_per_second_p20"] > 0).all()


def test_costs_are_of_the_blocks_that_hold_the_context():
    rows = preemption.run_cell(cell_of(Cost, block_size=(16,), context_tokens=(40, 64)))
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
    [swap] = preemption.run_cell(cell_of(Serving, manager=manager))
    [recompute] = preemption.run_cell(cell_of(Serving, "recompute", manager=manager))
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
    [row] = preemption.run_cell(cell_of(Serving, cache_tokens=4 * 36))
    assert (row["preemptions"], row["swapped_tokens"]) == (0, 0)


def test_the_cache_has_as_many_tokens_whatever_the_block_size():
    [row] = preemption.run_cell(cell_of(Serving, block_size=(7,)))
    assert row["cache_tokens"] == 63
