"""The experiment preemption."""

from __future__ import annotations

import pytest
import torch

from experiments import preemption
from experiments.load.engine_models import make_llm
from experiments.preemption import Preemption, Serving
from models import SamplingParams


def cell_of(way: str = "swap", **options):
    """The cell that serves requests on a tiny model."""
    lengths = {"prompt_tokens": (4, 12), "output_tokens": (12, 24)}
    load = {"cache_tokens": 64, "requests": 4, "repeats": 2, "serving_repeats": 2, "threads": 1}
    options = Preemption(model="tiny", **{**lengths, **load, "block_size": (4,), **options})
    cells = preemption.EXPERIMENT.checked_cells(options)
    return next(c for c in cells if isinstance(c, Serving) and c.way == way)


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
    [swap] = preemption.run_cell(cell_of(manager=manager))
    [recompute] = preemption.run_cell(cell_of("recompute", manager=manager))
    assert swap["preemptions"] > 0 < recompute["preemptions"]
    assert swap["swapped_tokens"] > 0 == recompute["swapped_tokens"]
    for row in (swap, recompute):
        assert row["manager"] == manager
        assert row["cache_tokens"] == 64
        assert 4 * (4 + 12) <= row["tokens"] <= 4 * (12 + 24)
        # No request takes longer per token than all of them together take in all.
        seconds = row["output_tokens"] / row["output_tokens_per_second_p50"]
        assert 0 < row["normalized_latency_ms_p50"] < 1e3 * seconds


@pytest.mark.parametrize(("block_size", "tokens", "slots"), [(4, 4 * 36, 4 * 36), (7, 64, 63)])
def test_the_cache_has_the_tokens_asked_for_and_with_room_for_all_preempts_nobody(
    block_size, tokens, slots
):
    [row] = preemption.run_cell(cell_of(cache_tokens=tokens, block_size=(block_size,)))
    assert row["cache_tokens"] == slots
    assert (row["preemptions"] == 0) == (tokens == 4 * 36)
