"""Class policies: statistics and victims, in Python and compiled."""

import math
from collections import defaultdict
from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache.policies import ClassPolicy, PriorityPolicy, RequestInfo, make_policy
from cache.policies.gittins import Gittins
from cache.traces.trace import Trace
from tests.cache.prefix_traces import hits, prefix_traces, serve, simulate_both, trace_of

BINS = 32
ENDS = np.array([0.0, *(2.0**bin_ for bin_ in range(BINS))])
"""Ends of the age bins, ms."""
BY_NUMBER = attrgetter("number")


class Rare(ClassPolicy):
    """Holds that classes are worth more the rarer they return, so many are worth the same."""

    num_classes = 12
    ghost_ratio = 2.0

    @staticmethod
    def classify(uses, is_end, idle_ms, request):
        return 4 * min(uses - 1, 2) + 2 * is_end + (request.prompt_tokens > 100.0)

    @staticmethod
    def learn(returned, gone, worths):
        for class_ in range(len(gone)):
            worths[class_] = gone[class_] // (1.0 + returned[class_].sum())
            worths[class_, 9:] = worths[class_, 9:] // 3.0  # falls in the bin before


def checked(policy_class: type[ClassPolicy]) -> ClassPolicy:
    """The policy run by the methods that managers call, each victim checked from its definition:
    the block of least worth among the oldest of the classes, of equal ones the oldest."""

    class Checked(policy_class):
        num_learned = 0

        def evict(self):
            records = self._blocks.copy()
            released = sorted(map(records.get, self._released), key=BY_NUMBER, reverse=True)
            oldest = {record.class_: record for record in released}
            worths = {
                it.number: np.interp(self._now - it.released_ms, ENDS, self._worths[class_])
                for class_, it in oldest.items()
            }
            victim = super().evict()
            worth, number = min((worth, number) for number, worth in worths.items())
            found = records[victim].number
            assert math.isclose(worths[found], worth, rel_tol=1e-12)
            assert found == number or worths[found] != worth
            self.num_learned += self._worths.any()
            return victim

    return Checked()


@pytest.mark.parametrize("policy", [Gittins, Rare])
def test_compiled_it_evicts_what_it_does_in_a_manager_the_least_worth(policy):
    trace = cache.make_workload("rag", seed=3, num_requests=100)
    capacity = trace.num_unique_blocks // 20
    slow = checked(policy)
    simulate_both(trace, policy(), slow, capacity_blocks=capacity)
    assert slow.num_learned > 100


@st.composite
def long_traces(draw):
    """Prompts of a few blocks with a common beginning or none, some empty, at equal or
    unknown times."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    now, requests = 0.0, []
    for _ in range(300):
        now += generator.choice([0.0, 1.0, 300.0, 10_000.0])
        prompt = generator.integers(0, 12) * 20 + np.arange(generator.integers(0, 7))
        prompt[3:] += 1000 * generator.integers(0, 3)
        lengths = 16 * len(prompt), int(generator.integers(0, 200))
        requests.append((now, *lengths, prompt.tolist()))
    trace = Trace.from_requests(requests, name="long", block_size=16)
    known = draw(st.sampled_from([1.0, math.nan]))
    return replace(trace, timestamps_ms=known * trace.timestamps_ms)


class Slow(Rare):
    """Runs in Python."""

    compilable = False


@given(trace=long_traces(), capacity=st.integers(1, 30), ratio=st.sampled_from([0, 0.4, 2, 16]))
def test_compiled_and_in_python_it_hits_the_same(trace, capacity, ratio):
    compiled, slow = Rare(), Slow()
    compiled.ghost_ratio = slow.ghost_ratio = ratio
    simulate_both(trace, compiled, slow, capacity_blocks=capacity)


class Parity(Slow):
    """Two classes along a prompt in turns, in Python: it is the same compiled, as tested above."""

    @staticmethod
    def classify(uses, is_end, idle_ms, request):
        return uses % 2


@given(trace=prefix_traces, capacity=st.integers(1, 12))
def test_before_there_are_statistics_it_is_lru(trace, capacity):
    assert hits(trace, Parity(), capacity) == hits(trace, "lru", capacity)


def test_statistics_are_what_returned_at_which_age_and_what_was_evicted():
    trace = cache.make_workload("multi_turn_chat", seed=3, num_requests=200)
    policy = checked(Rare)
    policy.ghost_ratio = 1000.0
    result = cache.simulate(trace, policy=policy, capacity_blocks=300)
    assert result.evictions > 1000
    returned, out = np.zeros((12, BINS)), {}
    uses = defaultdict(int)
    for request in range(len(trace)):
        facts, blocks = trace[request], trace[request].block_ids
        for block in blocks:
            if block in out:
                class_, since, weight = out.pop(block)
                age = np.searchsorted(ENDS, facts.timestamp_ms - since, side="right") - 1
                returned[class_, age] += weight
        for block in blocks:
            uses[block] += 1
            is_end = block == blocks[-1]
            class_ = 4 * min(uses[block] - 1, 2) + 2 * is_end + (facts.input_length > 100)
            out[block] = class_, facts.timestamp_ms, len(blocks) ** -0.5
    gone = np.zeros(12)
    for block, (class_, _, weight) in out.items():
        gone[class_] += weight * (block not in policy._blocks)
    assert policy._returned == pytest.approx(returned)
    assert policy._gone == pytest.approx(gone)
    assert np.count_nonzero(returned) > 10
    assert np.count_nonzero(gone) > 3


def test_what_is_forgotten_stays_gone_and_begins_anew():
    policy = Rare()
    policy.start(1)
    for at, key in enumerate(["a", "b", "a", "c", "d", "a"]):
        policy.tell(RequestInfo(float(at), 10.0, 1.0, 1.0))
        policy.insert(0, key, None, 0)
        policy.release(0)
        policy.evict()
    # "a" returned once, from the ghosts; the second time it had been forgotten.
    assert policy._returned[2].sum() == policy._returned.sum() == 1
    assert policy._gone[[2, 6]].tolist() == [4, 1]


def test_without_times_a_release_takes_a_second():
    policies = [make_policy("gittins") for _ in range(2)]
    for policy, second in zip(policies, (math.nan, 1000.0), strict=True):
        pool: dict[int, int] = {}
        policy.start(3)
        for at in range(1, 80):
            policy.tell(RequestInfo(second * at, 16, 1, 1))
            serve(policy, pool, [at % 3], 3)
    assert np.array_equal(*(policy._returned for policy in policies))
    assert policies[0]._returned.sum() == 76


def too_high(uses, is_end, idle_ms, request):
    return 12 * (uses == 2)


def negative_within(uses, is_end, idle_ms, request):
    return is_end - 1


def endless(returned, gone, worths):
    worths[0, 0] = math.inf


TOO_HIGH = {"classify": staticmethod(too_high)}
BOTH = {"classify": staticmethod(negative_within), "learn": staticmethod(endless)}  # compiled once


@pytest.mark.parametrize(
    ("fields", "path", "message", "is_compiled"),
    [
        (TOO_HIGH, (0,), "classify gave a class beyond 0 to 11", False),
        (BOTH, (0, 1), "classify gave a class beyond 0 to 11", False),
        (BOTH, (0, 1), "classify gave a class beyond 0 to 11", True),
        (BOTH, (0,), "learn gave a worth that is not finite", False),
        (BOTH, (0,), "learn gave a worth that is not finite", True),
        ({"ghost_ratio": -1.0}, (0,), "ghost_ratio .* got -1.0", False),
        ({"ghost_ratio": math.inf}, (0,), "ghost_ratio .* got inf", True),
    ],
)
def test_faults_of_a_policy_are_named(fields, path, message, is_compiled):
    policy = type("Faulty", (Rare,), fields)()
    if not is_compiled:
        policy.compilable = False
    with pytest.raises(ValueError, match=f"policy 'Faulty': {message}"):
        cache.simulate(trace_of([path] * 600), policy=policy, capacity_blocks=2)


@pytest.mark.parametrize("method", ["look_up", "miss", "remove", "evict"])
def test_a_method_that_is_overridden_is_called(method):
    called = []

    def own(self, *arguments):
        called.append(method)
        return getattr(Rare, method)(self, *arguments)

    policy = type("Own", (Rare,), {method: own})()
    assert not cache.simulate(trace_of([(0,), (1,)]), policy=policy, capacity_blocks=1).compiled
    assert called


@pytest.mark.parametrize(
    ("base", "name", "message"),
    [
        (Rare, "classify", "classify needs @staticmethod"),
        (Rare, "learn", "learn needs @staticmethod"),
        (PriorityPolicy, "priority", r"priority\(block\) needs @staticmethod, or self"),
    ],
)
def test_a_forgotten_staticmethod_is_said(base, name, message):
    with pytest.raises(TypeError, match=f"policy 'Mine': {message}"):
        type("Mine", (base,), {name: lambda block: 0})
