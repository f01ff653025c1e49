"""The experiment tier."""

import pytest

import cache
from experiments import tier
from experiments.load.workloads import REAL_TRACES
from experiments.tier import Tier


def rows_of(inputs, **options):
    """Rows by rule and size of the tier.  One request after the other: the load is low."""
    given = {"policy": ("lru",), "pool_gib": (0.5,), "load": (0.01,), "slices": 1}
    given |= {"host_gib": (0.125, 16.0), "link_gb_s": (52.0,), "transfers": ("serial",)}
    cells = tier.EXPERIMENT.checked_cells(Tier(trace=(inputs["chat"],), **given | options))
    rows = [tier.run_cell(cell)[0] for cell in cells]
    assert all(row["passed"] for row in rows)
    return {(row["store"], row["host_gib"]): row for row in rows}


def test_a_tier_finds_what_the_pool_evicted(inputs):
    by_rule, most = rows_of(inputs), cache.load_trace(inputs["chat"]).infinite_cache_hit_rate
    alone = by_rule["through", 0]
    assert 0 == alone["host_block_hit_rate"] < alone["block_hit_rate"] < most
    for rule in ("through", "selective", "back", "exclusive"):
        small, large = by_rule[rule, 0.125], by_rule[rule, 16.0]
        assert small["host_block_hit_rate"] < large["host_block_hit_rate"]
        assert large["ttft_mean_s"] < small["ttft_mean_s"]
        found = large["block_hit_rate"] + large["host_block_hit_rate"]
        if rule == "selective":  # a block that is used once is lost
            assert found < most
            continue
        assert found == pytest.approx(most), "nothing is lost"
    stored = {rule: by_rule[rule, 16.0]["stored_gib"] for rule, _ in by_rule}
    assert stored["back"] <= min(stored["through"], stored["exclusive"])


def test_a_slow_link_costs_time_and_overlap_saves_it(inputs):
    slow_link = {"link_gb_s": (0.5,)}
    serial, slow, overlapped = (
        rows_of(inputs, store=("through",), **options)["through", 16.0]
        for options in ({}, slow_link, slow_link | {"transfers": ("overlapped",)})
    )
    assert serial["ttft_mean_s"] < overlapped["ttft_mean_s"] < slow["ttft_mean_s"]
    assert min(serial["loaded_gib"], slow["loaded_gib"]) > 0


def test_the_bandwidth_at_which_loading_takes_as_long_as_computing():
    [*table] = tier._break_even(None).itertuples()
    for row in table:
        assert row.kv_gb / row.break_even_gb_s == pytest.approx(row.compute_s)
    assert [row.prompt_tokens for row in table] == sorted(row.prompt_tokens for row in table)
    assert table[0].kv_gb == 1024 * 131_072 / 1e9


def test_a_tier_that_holds_everything_is_run_once():
    cells = [*tier.EXPERIMENT.checked_cells(Tier(trace=REAL_TRACES[2:]))]
    assert len(cells) == 5 * (1 + 4 + 6 + 4)
    assert {cell.host_gib for cell in cells} == {0, 128}
    assert {str(cell.policy) for cell in cells} == {"lru"}
