"""The experiment preemption."""

import pandas as pd
import pytest

from experiments import preemption
from experiments.preemption import Cost, Preemption


def rows_of(part: type, **options):
    sizes = {"block_size": (1, 16, 64), "draw": (0,), "request_rate": 6.0, "traffic": 0.3}
    sizes["transfer_us"] = (3.0,)
    cells = preemption.EXPERIMENT.checked_cells(Preemption(**{**sizes, **options}))
    rows = [row for cell in cells if isinstance(cell, part) for row in preemption.run_cell(cell)]
    return pd.DataFrame(rows).set_index(["way", "block_size"], drop=False)


def test_swapping_costs_its_bytes_and_its_transfers_and_recomputing_no_more_with_small_blocks():
    rows = rows_of(Cost, context_tokens=(256,), transfer_us=(5.0,))
    token_bytes = 4 * 40 * 40 * 128  # K and V of 40 layers of 40 heads of 128, bf16
    for block_size in (1, 16, 64):
        transfers = 2 * 2 * 40 * 256 / block_size
        by_hand = 1e3 * (2 * 256 * token_bytes / 32e9 + transfers * 5e-6)
        assert rows["ms"]["swap", block_size] == pytest.approx(by_hand)
    assert rows["ms"]["recompute", 1] == rows["ms"]["recompute", 64]


def test_both_modes_serve_the_same_requests_and_only_one_swaps():
    rows = rows_of(preemption.Served)
    for block_size in (1, 16, 64):
        recompute, swap = (rows.loc[(way, block_size)] for way in ("recompute", "swap"))
        assert recompute["mean_output_tokens"] == swap["mean_output_tokens"]
        assert min(recompute["preemptions"], swap["preemptions"]) > 0
        assert recompute["recomputed_tokens"] > 0 == recompute["swapped_tokens"]
        assert swap["swapped_tokens"] > 0
        ratio = swap["normalized_latency_s"] / recompute["normalized_latency_s"]
        assert (recompute["latency_over_recompute"], swap["latency_over_recompute"]) == (1, ratio)
    assert rows["latency_over_recompute"]["swap", 1] > 1.1
    assert 0.9 < rows["latency_over_recompute"]["swap", 64] < 1.1


def test_the_assumed_transfer_decides_from_which_block_size_on_swapping_is_no_slower():
    """256 tokens take 13.1 ms for their bytes and 40,960 / block_size transfers; computing 41.9."""
    sizes = {"block_size": (1, 2, 8, 16), "context_tokens": (256,)}
    rows = rows_of(Cost, **sizes, transfer_us=(1.0, 10.0, 100.0)).reset_index(drop=True)
    rows = rows.assign(draw=float("nan"), normalized_latency_s=float("nan"))
    firsts = preemption.summary(rows).set_index(["at_most", "transfer_us"])
    assert firsts["block_size"].loc[1].to_dict() == {1: 2, 10: 16, 100: float("inf")}
    assert (firsts["least"] == firsts["most"]).all()
