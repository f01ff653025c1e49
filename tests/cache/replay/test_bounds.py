"""The fluid bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache.replay.bounds import _observe, fluid_hits
from cache.replay.compiled import next_uses_of
from cache.traces.trace import Trace
from tests.cache.prefix_traces import prefix_traces


@given(trace=prefix_traces, capacity=st.integers(1, 12))
def test_the_fluid_bound_is_the_dual_of_its_linear_program(trace, capacity):
    """The least over all prices of space of what that costs, and of what each class earns by it."""
    classes = np.array(_observe(trace))
    times = trace.timestamps_ms.astype(float)
    uses = next_uses_of(trace.block_ids, trace.offsets, trace.num_unique_blocks, 99)
    ends = np.array([times[int(use)] if use < np.inf else times[-1] for use in uses])
    ages = ends - np.repeat(times, np.diff(trace.offsets))
    choices = []  # of each class: the space and the hits of keeping its blocks until an age
    for of_class in np.unique(classes):
        mine = classes == of_class
        choices.append([(0.0, 0)])
        for age in np.unique(ages[mine]):
            hits = np.sum(mine & (uses < np.inf) & (ages <= age))
            choices[-1].append((np.minimum(ages[mine], age).sum(), hits))
    prices = {0.0} | {
        (more[1] - less[1]) / (more[0] - less[0])
        for of_class in choices
        for more, less in itertools.permutations(of_class, 2)
        if more[0] > less[0]
    }
    space = capacity * (times[-1] - times[0])
    least = min(
        price * space + sum(max(hits - price * s for s, hits in some) for some in choices)
        for price in prices
    )
    assert fluid_hits(trace, capacity) == pytest.approx(least, abs=1e-6)


@pytest.mark.parametrize("name", ["multi_turn_chat", "rag"])
def test_bounds_lie_above_the_policy_and_rise_with_the_pool(name):
    trace = cache.make_workload(name, seed=5, num_requests=150)
    before = 0.0
    for share in (0.02, 0.2, 1.0):
        capacity = int(trace.num_unique_blocks * share)
        fluid = fluid_hits(trace, capacity)
        learnt, best = (
            cache.simulate(trace, policy=policy, capacity_blocks=capacity).hit_blocks
            for policy in ("gittins", "belady")
        )
        assert fluid >= learnt
        assert fluid >= before
        before = fluid
    assert before == pytest.approx(best)


def test_one_request_has_no_time_in_which_to_keep_anything():
    trace = Trace.from_requests([(5, 8, 1, [0, 1])], name="one", block_size=4)
    assert fluid_hits(trace, 1) == 0.0


def test_a_capacity_below_one_is_refused():
    with pytest.raises(ValueError, match="capacity_blocks"):
        fluid_hits(cache.make_workload("rag", num_requests=3), 0)
