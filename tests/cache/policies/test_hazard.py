"""The hazard policy: what it learns, what it forgets, and how far below LRU it can fall."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache.policies import Request, make_policy
from cache.policies import hazard_compiled as rules
from cache.policies.hazard import Hazard
from cache.traces.trace import Trace

sys.path.insert(0, str(Path(__file__).parent))
from tests.cache.prefix_traces import prefix_traces, trace_of


class InPython(Hazard):
    """A subclass, which the replay does not compile."""


def hits(trace: Trace, capacity: int, policy: str = "hazard", **options) -> int:
    return cache.simulate(trace, policy=policy, capacity_blocks=capacity, **options).hit_blocks


@given(trace=prefix_traces, capacity=st.integers(1, 12), ghost_ratio=st.sampled_from([0, 0.5, 4]))
def test_compiled_and_called_by_hand_it_does_the_same(trace, capacity, ghost_ratio):
    compiled, by_hand = (
        cache.simulate(trace, policy=policy(ghost_ratio, shrinkage=1.0), capacity_blocks=capacity)
        for policy in (Hazard, InPython)
    )
    assert compiled.compiled
    assert not by_hand.compiled
    assert compiled.hits.tolist() == by_hand.hits.tolist()
    assert compiled.evictions == by_hand.evictions


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3])
def test_the_same_on_a_long_trace_with_ghosts_forgotten(fraction):
    trace = cache.make_workload("multi_turn_chat", seed=3, num_requests=500)
    capacity = int(trace.num_unique_blocks * fraction)
    compiled, by_hand = (
        cache.simulate(trace, policy=policy(ghost_ratio=2), capacity_blocks=capacity)
        for policy in (Hazard, InPython)
    )
    assert compiled.hits.tolist() == by_hand.hits.tolist()
    assert compiled.evictions == by_hand.evictions > capacity


def two_kinds(num_requests: int = 12_000) -> Trace:
    """Prompts with a long answer return once, after 40 requests; others never."""
    requests, due = [], {}
    for at in range(num_requests):
        name, output = due.pop(at, (at, 10))
        if name == at and at % 4 == 0:
            output = 1000
            due.setdefault(at + 41, (at, 10))
        requests.append((1000 * at, 32, output, [(name, block) for block in range(8)]))
    ids = {
        key: number for number, key in enumerate(dict.fromkeys(k for r in requests for k in r[3]))
    }
    return Trace.from_requests(
        [(*facts, [ids[key] for key in path]) for *facts, path in requests],
        name="two kinds", block_size=4,
    )  # fmt: skip


def test_it_learns_from_the_output_length_what_returns():
    """Forty requests are more than the pool holds, but those of one kind are not."""
    trace = two_kinds()
    capacity = 8 * 16
    assert hits(trace, capacity, "lru") == 0
    possible = hits(trace, trace.num_unique_blocks, "lru")
    assert hits(trace, capacity) > 0.9 * possible


def test_blocks_used_often_are_taken_to_return_before_there_is_history():
    """At ages at which something has returned, and at no others."""
    policy = make_policy("hazard")
    policy.start(20)
    for block in range(20):
        policy.insert(block, block, None, 0)
    for second in range(23):
        if 0 < second < 4:
            policy.pin(0)
        policy.tell(Request(1000.0 * second, 16, 1, 1))
        policy.release(max(0, second - 3))
    rules.update_indices(*policy._state)
    own, contents, runs = policy._state[:3]
    often, once = own["hazard"][runs["class_"][contents["run"][:2]]]
    a_second, an_hour = 10, 22
    assert often[a_second] > 0.7 > 0.3 > once[a_second]
    assert often[an_hour] == pytest.approx(once[an_hour])


def turncoat(num_requests: int = 6000, period: int = 1500) -> Trace:
    """In every second period prompts return soon, else much later: what was learnt is wrong."""
    generator = np.random.default_rng(0)
    requests, due = [], []
    for at in range(num_requests):
        name = next((name for time, name in due if time <= at), None)
        if name is None:
            name = at
            if at // period % 2:
                due.append((at + 30 + generator.integers(20), name))
            elif at % 2:
                due.append((at + period + generator.integers(200), name))
        else:
            due.remove(next(entry for entry in due if entry[1] == name))
        path = range(10 * name, 10 * name + 10)
        requests.append((1000.0 * at, 160, 100, list(path)))
    return Trace.from_requests(requests, name="turncoat", block_size=16)


def test_the_safeguard_holds_where_what_was_learnt_is_wrong():
    trace = turncoat()
    below = []
    for percent in (0.5, 1, 2, 5, 10, 20):
        capacity = int(trace.num_unique_blocks * percent / 100)
        assert most_below_lru(trace, capacity, budget=0.005) <= 0
        below.append(hits(trace, capacity, "lru") - hits(trace, capacity, budget=1e9))
    assert max(below) > 0.005 * trace.num_block_references, "the trace tempts it"


@given(
    trace=prefix_traces, capacity=st.integers(1, 12), budget=st.sampled_from([0, 0.02, 0.1, 0.5])
)
def test_at_no_time_is_it_further_below_lru_than_its_budget(trace, capacity, budget):
    assert most_below_lru(trace, capacity, budget) <= 1e-9


def most_below_lru(trace: Trace, capacity: int, budget: float) -> float:
    """The most hits, after any request, that it lacked to those of LRU less its budget."""
    lru, hazard = (
        cache.simulate(trace, policy=policy, capacity_blocks=capacity, **options).hits.cumsum()
        for policy, options in (("lru", {}), ("hazard", {"budget": budget}))
    )
    return (lru - hazard - budget * trace.offsets[1:]).max()


@pytest.mark.parametrize("name", ["shared_system_prompts", "multi_turn_chat", "agent_loops", "rag"])
def test_it_hits_more_than_lru_where_the_pool_is_scarce(name):
    trace = cache.make_workload(name, seed=20, num_requests=1500)
    capacity = trace.num_unique_blocks // 50
    assert hits(trace, capacity) > hits(trace, capacity, "lru")


def test_blocks_that_others_continue_stay():
    """The run a, b is older than the run c below it, and yet c goes first."""
    policy = make_policy("hazard")
    policy.start(3)
    for block, parent in enumerate([None, "a", "b"]):
        policy.insert(block, "abc"[block], parent, block)
    policy.release_many([1, 0])
    policy.release_many([2])
    assert policy.evict_many(3) == [2, 1, 0]


def test_what_it_remembers_is_bounded():
    policy = make_policy("hazard", ghost_ratio=3)
    policy.start(10)
    for key in range(1000):
        block = policy.evict() if len(policy) == 10 else len(policy)
        policy.insert(block, key, None, 0)
        policy.release(block)
    assert len(policy._numbers) <= (1 + 3) * 10 + 10
    assert sorted(policy) == list(range(10))


def test_content_that_returns_while_it_is_being_forgotten():
    """A ghost comes back into use; before its release so many others leave that it is forgotten."""
    policy = make_policy("hazard", ghost_ratio=0)
    policy.start(2)
    keys = itertools.count()
    policy.insert(0, "ghost", None, 0)
    policy.release(0)
    assert policy.evict() == 0
    policy.insert(0, "ghost", None, 0)
    for _ in range(6):
        policy.insert(1, next(keys), None, 0)
        policy.release(1)
        assert policy.evict() == 1
    policy.release(0)
    assert list(policy) == [0]
    assert policy.evict() == 0


@pytest.mark.parametrize("option", ["ghost_ratio", "shrinkage", "budget"])
def test_options_must_not_be_negative(option):
    with pytest.raises(ValueError, match=f"{option} must not be negative, got -1"):
        make_policy("hazard", **{option: -1})


# What owners tell policies of requests.


class Listener(cache.policies.POLICIES["fifo"]):
    def start(self, capacity, next_use=None):
        super().start(capacity, next_use)
        self.told: list[Request] = []

    def tell(self, request):
        self.told.append(request)


def test_a_replay_tells_of_requests_twice():
    listener = Listener()
    cache.simulate(trace_of([(0, 1), (2,)]), policy=listener, capacity_blocks=2)
    first, at_release, second, _ = listener.told
    assert at_release == (0.0, 8, 1, 2, 0)
    assert np.isnan(first.output_tokens)
    assert first._replace(output_tokens=1) == at_release
    assert second[:2] == (1.0, 4)


@pytest.mark.parametrize("name", ["nano_vllm", "vllm_v0", "vllm_v1", "radix"])
def test_a_manager_tells_of_requests(name):
    listener = Listener()
    manager = cache.make_manager(name, num_blocks=4, block_size=2, policy=listener)
    seq = cache.Sequence(0, [1, 2, 3], eviction_priority=7)
    manager.clock = lambda: 1.5
    manager.allocate(seq)
    seq.append_token(4)
    manager.append(seq)
    manager.free(seq)
    assert listener.told[-1] == (1500.0, 3, 1, 1, 7)
    assert np.isnan(listener.told[0].output_tokens)
    manager.clock = None
    manager.allocate(seq)
    assert np.isnan(listener.told[-1].time_ms)


class ShortestPrompt(cache.PriorityPolicy):
    @staticmethod
    def priority(block):
        return block.request.prompt_tokens


def test_a_radix_tree_ranks_its_nodes_by_their_requests():
    manager = cache.make_manager("radix", num_blocks=9, block_size=1, policy=ShortestPrompt())
    for number, tokens in enumerate([[1, 1, 1], [2, 2], [3, 3, 3, 3]]):
        seq = cache.Sequence(number, tokens)
        manager.allocate(seq)
        manager.free(seq)
    assert [len(node.blocks) for node in manager.tree.leaves] == [2, 3, 4]


def test_where_nobody_tells_the_time_a_request_takes_a_second():
    victims = []
    for second in (math.nan, 1000.0):
        policy, generator = make_policy("hazard"), np.random.default_rng(0)
        policy.start(8)
        held, order = [], []
        for at in range(1, 300):
            key = int(generator.zipf(1.3)) % 40
            if key in held:
                block = held.index(key)
                policy.pin(block)
            else:
                block = len(held) if len(held) < 8 else policy.evict()
                held[block : block + 1] = [key]
                order.append(block)
                policy.insert(block, key, None, 0)
            policy.tell(Request(second * at, 16, 1, 1))
            policy.release(block)
        victims.append(order)
    assert victims[0] == victims[1]
