import pandas as pd

import cache
from experiments import hybrid


def test_hit_rates_are_those_of_the_replay_in_pools_of_equal_bytes(tiny_run, inputs):
    rows = tiny_run("hybrid").rows.query("part == 'replay'").set_index(["layout", "policy"])
    trace = cache.load_trace(inputs["chat"])
    how = {"policy": "arc", "groups": cache.layer_groups([None] * 18 + [128] * 18), "retention": 0}
    for row in rows.loc[("r0", "arc")].itertuples():
        assert row.capacity_pages == 2 * int(trace.num_unique_blocks * row.capacity_percent / 100)
        result = cache.simulate(trace, capacity_blocks=int(row.capacity_pages), **how)
        assert row.block_hit_rate == result.block_hit_rate
        assert row.fifth_5 == result.hits[48:].sum() / trace[48:].num_block_references


def test_the_interval_is_chosen_on_two_fifths_and_judged_on_three():
    fifths = {"full": (1, 1, 1, 1, 1), "dense": (3, 3, 2, 2, 2), "r0": (2, 2, 3, 4, 5)}
    rows = pd.DataFrame(fifths, hybrid._FIFTHS).T.div(100).rename_axis("layout").reset_index()
    rows = rows.assign(trace="t", model=["any", "m", "m"], policy="lru", capacity_percent=1)
    row = hybrid._retention(rows.assign(block_hit_rate=0)).iloc[0]
    assert (row["layout"], round(row["mean_over_full"])) == ("dense", 1)
    assert [round(row[f"{how}_over_r0"]) for how in ("mean", "min", "max")] == [-2, -3, -1]


def test_memory_of_one_table_and_of_groups():
    rows = pd.DataFrame(hybrid.run_cell(hybrid.Options())).set_index(["model", "context_tokens"])
    published = rows.dropna(subset="published_wasted_fraction")
    assert (published["wasted_fraction"] == published["published_wasted_fraction"]).all()
    row = rows.loc[("gemma-3-270m", 1600)]
    assert row["one_table_bytes"] == row["groups_chunk_bytes"] == 2 * 512 * 18 * 1600
    assert row["groups_bytes"] == 2 * 512 * (3 * 1600 + 15 * 512)
