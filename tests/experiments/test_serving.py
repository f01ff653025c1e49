"""Serving at the paper's scale, and the published times that its clock is compared with."""

import numpy as np
import pandas as pd
import pytest

from experiments import published_serving, serving, shared_prefix, style
from experiments.load.workloads import draw_lengths
from experiments.published_serving import PublishedServing
from experiments.serving import LOADS, Serving


def cell(load, system, **options):
    given = {"host_ms": 0, "draw": 0, "traffic": 0.2, **options}
    return Serving(load=load, system=system, **given)


@pytest.mark.parametrize("like", ["sharegpt", "alpaca"])
def test_lengths_have_the_papers_means_although_they_are_clipped(like):
    prompts, outputs = draw_lengths(np.random.default_rng(5), 100_000, like)
    means = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}[like]
    assert (np.mean(prompts), np.mean(outputs)) == pytest.approx(means, rel=1e-3)
    assert min(prompts + outputs) >= 1
    assert max(outputs) == 1024


def test_prompts_of_conversations_are_cut_and_prefixes_are_shared():
    prompts, outputs = LOADS["chat"].draw(np.random.default_rng(0), 2000)
    assert max(prompts) == 1024 == np.quantile(prompts, 0.5)
    assert np.mean(outputs) == pytest.approx(337.99, rel=1e-2)
    prompts, _ = LOADS["five_shot"].draw(np.random.default_rng(0), 2000)
    assert min(prompts) > 341
    row = serving._row(cell("five_shot", "vllm_v1", traffic=4.0), 2.0)
    assert row["cached_prompt_fraction"] == pytest.approx(336 / np.mean(prompts), rel=0.03)
    assert serving._row(cell("five_shot", "paged"), 2.0)["cached_prompt_fraction"] == 0


def test_a_cell_raises_the_rate_and_then_halves_the_interval(monkeypatch):
    """A manager that sustains exactly 1 request per second."""
    monkeypatch.setattr(
        serving,
        "_row",
        lambda cell, rate: {"request_rate": rate, "normalized_latency_s": 0.25 * rate},
    )
    rows = serving.run_cell(cell("sharegpt", "paged", bisections=4))
    assert [row["request_rate"] for row in rows[:3]] == [0.5, 0.75, 1.125]
    assert len(rows) == 7
    assert [row["sustained_rate"] for row in rows] == pytest.approx([1] * 7, rel=0.02)


def test_paging_sustains_more_than_reserving_the_maximum_by_the_papers_reason():
    """More requests are batched in the same memory."""
    reserved, paged = (
        serving._row(cell("sharegpt", system), 40.0) for system in ("contiguous_max", "paged")
    )
    assert reserved["cache_slots"] == paged["cache_slots"] == 14640
    assert reserved["mean_batched_requests"] <= 7 < paged["mean_batched_requests"]
    assert reserved["normalized_latency_s"] > 1.5 * paged["normalized_latency_s"]


def test_beams_share_more_than_samples_and_reservations_share_nothing():
    def batched(load, system):
        return serving._row(cell(load, system, traffic=0.2), 60.0)["mean_batched_requests"]

    apart = [batched(f"alpaca_6_{kind}", "contiguous_oracle") for kind in ("samples", "beams")]
    samples, beams = (batched(f"alpaca_6_{kind}", "paged") for kind in ("samples", "beams"))
    assert apart[0] == apart[1] < samples < beams


def test_the_grid_compares_what_the_paper_compares():
    cells = [*serving.EXPERIMENT.checked_cells(Serving(draw=(0,)))]
    at = pd.DataFrame(c.columns("load", "host_ms", "system") for c in cells)
    assert set(at[at["load"] == "chat"]["system"]) == set(serving.SYSTEMS) - {"vllm_v1"}
    assert set(at[at["load"] == "alpaca_6_beams"]["system"]) == {"contiguous_oracle", "paged"}
    assert set(at[at["host_ms"] == 0]["load"]) == {"sharegpt"}
    experiment = shared_prefix.EXPERIMENT
    loads = {cell.load for cell in experiment.checked_cells(experiment.options)}
    assert loads == {"one_shot", "five_shot"}


def test_ratios_are_those_of_the_same_draw():
    rates = {"contiguous_oracle": (1.0, 2.0, 4.0), "paged": (3.0, 4.0, 4.0)}
    rows = pd.DataFrame(
        {"load": "chat", "host_ms": 10, "draw": number, "system": system, "request_rate": 1.0}
        | {"sustained_rate": rate, "mean_batched_requests": 1.0, "basis": ""}
        for system, of_system in rates.items()
        for number, rate in enumerate(of_system)
    )
    paged = serving.summary(rows).set_index("system").loc["paged"]
    ratios = paged[["over_oracle_least", "over_oracle", "over_oracle_most"]].tolist()
    assert (paged["sustained_rate"], ratios) == (4, [1, 2, 3])
    assert np.isnan(paged["over_max"])


def test_above_its_last_rate_the_latency_of_a_draw_is_drawn_as_infinite():
    rows = pd.DataFrame({"draw": [0, 0, 0, 1, 1, 2, 2], "request_rate": [1, 2, 4, 1, 4, 1, 2]})
    rows["normalized_latency_s"] = [0.1, 0.2, 0.4, 0.1, 0.4, 0.1, 0.8]
    with style.figures():
        _, (axis,), _ = style.panel_grid(1, height=1)
        serving._draw_latency(axis, rows, color="red")
    assert axis.lines[0].get_ydata() == pytest.approx([0.1, 0.2, 0.4])
    assert axis.collections[0].get_datalim(axis.transData).y1 == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("case", "least", "most"),
    [("lambda_a100_10", -0.03, 0.03), ("lambda_h100_10", -0.13, 0), ("bench_70b", -0.06, 0)],
)
def test_the_clock_comes_near_published_times_without_being_fitted(case, least, most):
    rows = published_serving.run_cell(PublishedServing(case=case))
    errors = [row["modelled"] / row["published"] - 1 for row in rows]
    assert least < np.mean(errors) < most
    assert [row["error"] for row in rows] == errors


def test_the_host_time_chosen_on_half_of_the_cases_is_judged_on_the_others():
    rows = {"engine": "one", "half": ["chosen", "judged"], "case": ["a", "b"], "error": [-0.5, 0.5]}
    rows |= {"growth_per_host_ms": [0.5, 0.25], "unit": ["ms", "tokens per second"]}
    # 0.5 * (1 + 0.5 * 2) and 1.5 / (1 + 0.25 * 2) are exact.
    (row,) = published_serving._hosts(pd.DataFrame(rows)).to_numpy()
    assert row[1:].tolist() == pytest.approx([2, 0.5, 0.5, 0, 0])


def test_a_launch_is_compared_at_the_sequences_that_still_decode():
    rows = published_serving.run_cell(PublishedServing(case="lambda_a100_10"))
    outputs = np.array([120, 507, 233, 194, 101, 741, 9, 3, 6, 31])
    assert [row["batch"] for row in rows] == [(outputs > 10 * k + 1).sum() for k in range(74)]
