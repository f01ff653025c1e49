"""The Gittins policy: its classes and its indices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.policies import RequestInfo, make_policy
from cache.policies.gittins import Gittins
from tests.cache.prefix_traces import serve

CLASSES, BINS, GROUP = 160, 32, 20
ENDS = np.array([0.0, *(2.0**bin_ for bin_ in range(BINS))])
"""Ends of the age bins, ms."""


def indices(returned: np.ndarray, gone: np.ndarray) -> np.ndarray:
    worths = np.zeros((CLASSES, BINS + 1))
    Gittins.learn(returned, gone, worths)
    assert not worths[:, BINS].any()
    return worths[:, :BINS]


@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 30.0, 1e4]))
def test_the_index_is_the_most_hits_for_the_space_that_they_take(seed, weight):
    """From the definitions, with the share still out drawn straight between the ends of a bin."""
    generator = np.random.default_rng(seed)
    returned = weight * generator.beta(0.1, 1.0, (CLASSES, BINS)).round(1)
    gone = weight * generator.beta(0.3, 0.1, CLASSES).round(1)
    reached = gone[:, None] + returned[:, ::-1].cumsum(1)[:, ::-1]
    by_group = (8, GROUP, BINS)
    some, trials = returned.reshape(by_group).sum(1), reached.reshape(by_group).sum(1)
    of_group = np.repeat(some / (trials + 10), GROUP, axis=0)
    hazards = (returned + 10 * of_group) / (reached + 10)

    expected = np.zeros((CLASSES, BINS))
    for age in range(BINS):
        space, out = 0.0, np.ones(CLASSES)
        for bin_ in range(age, BINS):
            still_out = out * (1 - hazards[:, bin_])
            space = space + (ENDS[bin_ + 1] - ENDS[bin_]) * (out + still_out) / 2
            expected[:, age] = np.maximum(expected[:, age], (1 - still_out) / space)
            out = still_out
    by_uses = expected.reshape(by_group)
    np.maximum.accumulate(by_uses[1:], axis=0, out=by_uses[1:])  # the first are new ends of prompts
    assert indices(returned, gone) == pytest.approx(expected, rel=1e-9)


def test_an_index_and_those_of_classes_without_evidence():
    """Half of a class returns from 4 to 8 ms after its release, linearly, the rest never."""
    many = 1e12  # blocks, against which shrinkage is nothing
    returned, gone = np.zeros((CLASSES, BINS)), np.zeros(CLASSES)
    used_twice, same_uses, more_uses, fewer_uses = 2 * GROUP, 2 * GROUP + 3, 5 * GROUP, GROUP
    returned[used_twice, 3] = gone[used_twice] = many
    index = indices(returned, gone)
    expected = [0.5 / 7, 0.5 / 6, 0.5 / 5, 0.5 / 3, 0.0]
    for class_ in (used_twice, same_uses, more_uses):
        assert index[class_, :5] == pytest.approx(expected, abs=1e-9)
    assert not index[fewer_uses].any()
    gone[more_uses] = many  # never seen again, but worth what fewer uses are
    assert indices(returned, gone)[more_uses, :5] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("idle_ms", "idle"), [(1000, 1), (20_000, 2), (100_000, 3)])
def test_classes_are_uses_output_length_and_idle_time(idle_ms, idle):
    policy, pool = make_policy("gittins"), {}
    policy.start(9)
    for at, keys, output in ((0, [1, 2, 3], 4), (idle_ms, [1, 2, 4], 100)):
        policy.tell(RequestInfo(at, 48, output, len(keys)))
        serve(policy, pool, keys, 9)
        classes = {key: policy._blocks[block].class_ for key, block in pool.items()}
        found = {key: np.unravel_index(class_, (8, 5, 4)) for key, class_ in classes.items()}
        if not at:
            assert found == {1: (1, 0, 0), 2: (1, 0, 0), 3: (0, 0, 0)}
    assert found == {1: (2, 2, idle), 2: (2, 2, idle), 3: (0, 0, 0), 4: (0, 2, idle)}


@pytest.mark.parametrize(
    ("uses", "output", "expected"),
    [(1, 15.0, (1, 0)), (2, 16.0, (2, 1)), (3, 63.0, (2, 1)), (4, 64.0, (3, 2)),
     (63, 1023.0, (6, 3)), (64, 1024.0, (7, 4)), (10**6, 1e9, (7, 4)), (1, float("nan"), (1, 0))],
)  # fmt: skip
def test_classes_of_uses_and_output_length(uses, output, expected):
    class_ = Gittins.classify(uses, False, float("nan"), RequestInfo(0.0, 1.0, output, 1.0))
    assert np.unravel_index(class_, (8, 5, 4)) == (*expected, 0)
