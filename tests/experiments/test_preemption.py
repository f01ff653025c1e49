"""The experiment preemption."""

from __future__ import annotations

import pytest
import torch

from experiments import preemption
from experiments.load.engine_models import make_llm
from experiments.preemption import Preemption, Serving
from models import SamplingParams


def cell_of(**options):
    """The cell that serves requests on a tiny model."""
    lengths = {"prompt_tokens": (4, 12), "output_tokens": (12, 24)}
    load = {"cache_tokens": 64, "requests": 4, "repeats": 2, "draws": 3, "threads": 1}
    options = Preemption(model="tiny", **{**lengths, **load, "block_size": (4,), **options})
    cells = preemption.EXPERIMENT.checked_cells(options)
    [cell] = [cell for cell in cells if isinstance(cell, Serving)]
    return cell


@pytest.mark.slow
def test_the_tiny_run_has_every_cost_and_both_ways(tiny_run):
    rows = tiny_run("preemption").rows
    costs, serving = rows[rows["part"] == "cost"], rows[rows["part"] == "serving"]
    assert set(costs["way"]) == {"recompute", "swap", "swap_out", "swap_in"}
    assert list(costs["blocks"]) == [10] * 4 + [3] * 4
    # 2 layers, K and V, 2 heads of 16, fp32: 512 bytes a token
    assert list(costs["mebibytes"]) == [40 * 512 / 2**20] * 4 + [48 * 512 / 2**20] * 4
    assert (costs["ms_p20"] > 0).all()
    assert (costs["ms_p20"] <= costs["ms_p80"]).all()
    assert list(serving["way"]) == ["recompute", "swap"] * 2
    assert (serving["preemptions"] > 0).any()
    assert (serving["normalized_latency_ms_p20"] > 0).all()
    assert (serving["output_tokens_per_second_p20"] > 0).all()


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
    recompute, swap = preemption.run_cell(cell_of(manager=manager))
    assert (recompute["way"], swap["way"]) == ("recompute", "swap")
    assert swap["preemptions"] > 0 < recompute["preemptions"]
    assert swap["swapped_tokens"] > 0 == recompute["swapped_tokens"]
    for row in (swap, recompute):
        assert row["manager"] == manager
        assert row["cache_tokens"] == 64
        assert row["requests"] == 3 * 4
        assert 12 * (4 + 12) <= row["tokens"] <= 12 * (12 + 24)
        # No request takes longer per token than all of a draw take in all.
        seconds = 4 * 24 / row["output_tokens_per_second_p20"]
        assert 0 < row["normalized_latency_ms_p20"] <= row["normalized_latency_ms_p80"]
        assert row["normalized_latency_ms_p20"] < 1e3 * seconds
    assert recompute["latency_over_recompute_p20"] == recompute["latency_over_recompute_p80"] == 1
    assert swap["latency_over_recompute_p20"] < swap["latency_over_recompute_p80"]


def test_draws_are_compared_one_by_one(monkeypatch):
    """Two draws, one three times as slow in both modes: swapping takes half as long in both."""
    served = []

    def serve(llm, prompts, output_lengths):
        way = "swap" if llm.engine.scheduler.free_host_blocks else "recompute"
        served.append((way, prompts))
        latency = (1 if prompts == served[0][1] else 3) * (0.5 if served[-1][0] == "swap" else 1)
        names = ("requests", "tokens", "output_tokens", "preemptions", "swapped_tokens")
        return {"latency": latency, "seconds": 1.0, **dict.fromkeys(names, 1)}

    monkeypatch.setattr(preemption, "_serve", serve)
    recompute, swap = preemption.run_cell(cell_of(draws=2))
    assert len({str(prompts) for _, prompts in served}) == 2
    assert swap["latency_over_recompute_p20"] == swap["latency_over_recompute_p80"] == 0.5
    assert swap["normalized_latency_ms_p50"] == 1e3
    assert recompute["normalized_latency_ms_p50"] == 2e3


@pytest.mark.parametrize(("block_size", "tokens", "slots"), [(4, 4 * 36, 4 * 36), (7, 64, 63)])
def test_the_cache_has_the_given_tokens_and_with_room_for_all_preempts_nothing(
    block_size, tokens, slots
):
    for row in preemption.run_cell(cell_of(cache_tokens=tokens, block_size=(block_size,))):
        assert row["cache_tokens"] == slots
        assert (row["preemptions"] == 0) == (tokens == 4 * 36)
