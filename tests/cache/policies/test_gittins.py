"""The Gittins policy, and what owners of blocks report of requests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache.policies import Request, make_policy
from cache.policies.gittins import Gittins
from cache.traces.trace import Trace
from tests.cache.prefix_traces import prefix_traces, trace_of


class InPython(Gittins):
    """A subclass, which the replay does not compile."""


def hits(trace: Trace, capacity: int, policy: str) -> int:
    return cache.simulate(trace, policy=policy, capacity_blocks=capacity).hit_blocks


def replays(trace: Trace, capacity: int, wrap, ghost_ratio: float):
    return [
        cache.simulate(trace, policy=wrap(policy(ghost_ratio)), capacity_blocks=capacity)
        for policy in (Gittins, InPython)
    ]


WRAPPERS = [
    lambda policy: policy,
    lambda policy: make_policy("safeguarded", policy=policy),
    lambda policy: make_policy("safeguarded", policy=policy, budget=0.1),
]


@given(
    trace=prefix_traces, capacity=st.integers(1, 12), ghost_ratio=st.sampled_from([0, 0.5, 4]),
    wrap=st.sampled_from(WRAPPERS),
)  # fmt: skip
def test_compiled_and_in_python_it_does_the_same(trace, capacity, ghost_ratio, wrap):
    compiled, in_python = replays(trace, capacity, wrap, ghost_ratio)
    assert (compiled.compiled, in_python.compiled) == (True, False)
    assert compiled.hits.tolist() == in_python.hits.tolist()
    assert compiled.evictions == in_python.evictions


def test_requests_at_the_same_time_and_before_time_zero_are_the_same_compiled():
    """Blocks change hands within a millisecond, so a cached worth must not outlive its block."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        paths = [tuple(rng.integers(0, 3, rng.integers(1, 7))) for _ in range(200)]
        trace = trace_of(paths)
        requests = [request._replace(timestamp_ms=i // 3 - 9) for i, request in enumerate(trace)]
        trace = Trace.from_requests(requests, name="ties", block_size=4)
        for wrap in WRAPPERS:
            compiled, in_python = replays(trace, 9, wrap, 1)
            assert compiled.hits.tolist() == in_python.hits.tolist()


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["bare", "safeguarded", "large-budget"])
def test_the_same_on_a_long_trace_with_ghosts_forgotten(wrap):
    trace = cache.make_workload("multi_turn_chat", seed=3, num_requests=300)
    capacity = int(trace.num_unique_blocks * 0.05)
    compiled, in_python = replays(trace, capacity, wrap, 2)
    assert compiled.hits.tolist() == in_python.hits.tolist()
    assert compiled.evictions == in_python.evictions > capacity


def two_kinds(num_requests: int = 4000) -> Trace:
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


def test_it_learns_from_the_output_length_which_blocks_return():
    """The pool holds 16 requests, but the ones that return after 40 are few."""
    trace = two_kinds()
    capacity = 8 * 16
    assert hits(trace, capacity, "lru") == 0
    assert hits(trace, capacity, "gittins") > 0.9 * hits(trace, trace.num_unique_blocks, "lru")


@pytest.mark.parametrize("name", ["shared_system_prompts", "multi_turn_chat", "agent_loops", "rag"])
def test_it_hits_more_than_lru_where_the_pool_is_scarce(name):
    trace = cache.make_workload(name, seed=20, num_requests=1500)
    capacity = trace.num_unique_blocks // 50
    assert hits(trace, capacity, "safeguarded") > hits(trace, capacity, "lru")


def test_a_block_that_others_continue_stays():
    policy = make_policy("gittins")
    policy.start(3)
    for block, parent in enumerate([None, "a", "b"]):
        policy.insert(block, "abc"[block], parent, block)
    policy.release_many([1, 0])
    policy.release_many([2])
    assert list(policy) == [2, 1, 0]
    assert policy.evict_many(3) == [2, 1, 0]


def test_released_from_the_head_the_oldest_block_goes_although_it_is_continued():
    policy = make_policy("gittins")
    policy.start(2)
    policy.insert(0, "a", None, 0)
    policy.insert(1, "b", "a", 1)
    policy.release(0)
    assert policy.evict() == 0
    policy.insert(0, "c", None, 0)  # in the row of the former parent
    policy.release_many([0, 1])
    assert policy.evict_many(2) == [0, 1]


def test_the_number_of_remembered_keys_is_bounded():
    policy = make_policy("gittins", ghost_ratio=3)
    policy.start(10)
    for key in range(100):
        block = policy.evict() if len(policy) == 10 else len(policy)
        policy.insert(block, key, None, 0)
        policy.release(block)
    assert len(policy._ghosts) == 30
    assert sorted(policy) == list(range(10))


def test_without_times_a_release_takes_a_second():
    policies = [make_policy("gittins") for _ in range(2)]
    for policy, second in zip(policies, (math.nan, 1000.0), strict=True):
        policy.start(2)
        for at in range(1, 80):
            policy.tell(Request(second * at, 16, 1, 1))
            if len(policy) == 2:
                policy.evict()
            policy.insert(at, at % 3, None, 0)
            policy.release(at)
    assert np.array_equal(*(policy._state["index"] for policy in policies))
    assert policies[0]._state["returns"].sum() > 0


def test_a_negative_ghost_ratio_is_refused():
    with pytest.raises(ValueError, match="ghost_ratio must not be negative, got -1"):
        make_policy("gittins", ghost_ratio=-1)


class Listener(cache.policies.POLICIES["fifo"]):
    def start(self, capacity, next_use=None):
        super().start(capacity, next_use)
        self.told: list[Request] = []

    def tell(self, request):
        self.told.append(request)


def test_a_replay_reports_each_request_twice():
    listener = Listener()
    cache.simulate(trace_of([(0, 1), (2,)]), policy=listener, capacity_blocks=2)
    first, at_release, second, _ = listener.told
    assert at_release == (0.0, 8, 1, 2, 0)
    assert np.isnan(first.output_tokens)
    assert first._replace(output_tokens=1) == at_release
    assert second[:2] == (1.0, 4)


@pytest.mark.parametrize("name", ["nano_vllm", "vllm_v0", "vllm_v1", "radix"])
def test_a_manager_reports_requests(name):
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
