"""Serving at the paper's scale, and the published times that its clock is compared with."""

from __future__ import annotations

import numpy as np
import pytest

from experiments import paper_serving, published_serving
from experiments.paper_serving import PaperServing
from experiments.published_serving import PublishedServing


@pytest.mark.parametrize(("mean", "sigma"), [(161.31, 1.25), (337.99, 0.95), (58.45, 1.0)])
def test_lengths_have_the_papers_mean_although_they_are_clipped(mean, sigma):
    lengths = paper_serving.draw_lengths(np.random.default_rng(5), 100_000, mean, sigma)
    assert np.mean(lengths) == pytest.approx(mean, rel=1e-3)
    assert min(lengths) >= 1
    assert max(lengths) == 1024


def test_a_cell_raises_the_rate_and_then_halves_the_interval(monkeypatch):
    """A manager that sustains exactly 1 request per second."""
    monkeypatch.setattr(
        paper_serving,
        "_row",
        lambda cell, rate: {"request_rate": rate, "normalized_latency_s": 0.25 * rate},
    )
    cell = PaperServing(lengths="sharegpt", host_ms=0, draw=0, system="paged", bisections=4)
    rows = paper_serving.run_cell(cell)
    assert [row["request_rate"] for row in rows[:3]] == [0.5, 0.75, 1.125]
    assert len(rows) == 7
    assert [row["sustained_rate"] for row in rows] == pytest.approx([1] * 7, rel=0.02)


def test_paging_sustains_more_than_reserving_the_maximum_by_the_papers_reason(monkeypatch):
    """More requests are batched in the same memory."""
    cell = {"lengths": "sharegpt", "host_ms": 0, "draw": 0, "traffic": 0.2}
    reserved, paged = (
        paper_serving._row(PaperServing(**cell, system=system), 40.0)
        for system in ("contiguous_max", "paged")
    )
    assert reserved["cache_slots"] == paged["cache_slots"] == 14640
    assert reserved["mean_batched_requests"] <= 7 < paged["mean_batched_requests"]
    assert reserved["normalized_latency_s"] > 1.5 * paged["normalized_latency_s"]


@pytest.mark.parametrize(
    ("case", "least", "most"),
    [("lambda_a100_10", -0.03, 0.03), ("lambda_h100_10", -0.13, 0), ("bench_70b", -0.06, 0)],
)
def test_the_clock_comes_near_published_times_without_being_fitted(case, least, most):
    rows = published_serving.run_cell(PublishedServing(case=case))
    errors = [row["modelled"] / row["published"] - 1 for row in rows]
    assert least < np.mean(errors) < most
    assert [row["error"] for row in rows] == errors


def test_a_launch_is_compared_at_the_sequences_that_still_decode():
    rows = published_serving.run_cell(PublishedServing(case="lambda_a100_10"))
    outputs = [120, 507, 233, 194, 101, 741, 9, 3, 6, 31]
    assert [row["batch"] for row in rows] == [
        sum(o > 10 * k + 1 for o in outputs) for k in range(74)
    ]
