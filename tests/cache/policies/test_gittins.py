"""The Gittins policy, and what owners of blocks report of requests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache.policies import Request, make_policy
from cache.policies.gittins import Gittins, gittins_indices
from cache.traces.trace import Trace
from tests.cache.prefix_traces import trace_of


def hits(trace: Trace, capacity: int, policy: str) -> int:
    return cache.simulate(trace, policy=policy, capacity_blocks=capacity).hit_blocks


class Ranking(Gittins):
    """Ranks the leaves of all classes anew at each eviction."""

    def _take(self, before=math.inf):
        self._ranked_at = math.nan
        return super()._take(before)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_heads_of_classes_that_did_not_change_keep_their_worth(wrapped):
    chat = cache.make_workload("multi_turn_chat", seed=3, num_requests=150)
    requests = [request._replace(timestamp_ms=i // 3 - 9) for i, request in enumerate(chat)]
    for trace in (chat, Trace.from_requests(requests, name="ties", block_size=16)):
        replays = []
        for policy in (Gittins(2), Ranking(2)):
            if wrapped:
                policy = make_policy("safeguarded", policy=policy)
            capacity = trace.num_unique_blocks // 20
            replays.append(cache.simulate(trace, policy=policy, capacity_blocks=capacity))
        assert replays[0].hits.tolist() == replays[1].hits.tolist()
        assert replays[0].evictions > capacity


@given(st.data())
def test_the_index_is_the_most_hits_for_the_space_that_they_take(data):
    """From its definition, with the share still out drawn straight between the ends of a bin."""
    num_bins, counts = 32, st.integers(0, 9)
    returns = np.array([data.draw(st.lists(counts, min_size=32, max_size=32)) for _ in range(2)])
    releases = returns.sum(axis=1) + data.draw(st.integers(1, 50))
    index = gittins_indices(returns, releases)
    ends = [0.0, *(2.0**bin_ for bin_ in range(num_bins))]
    ends = [end for end in ends if end != 0.5]
    of_all = returns.sum(axis=0) / releases.sum()
    for class_ in range(2):
        still_out = releases[class_] + 10.0  # 10 of a block of all classes
        out = [still_out]
        for bin_ in range(num_bins):
            still_out -= returns[class_, bin_] + 10 * of_all[bin_]
            out.append(still_out)
        for age in range(num_bins):
            best, space = 0.0, 0.0
            for bin_ in range(age, num_bins):
                width = ends[bin_ + 1] - ends[bin_]
                space += width * (out[bin_] + out[bin_ + 1]) / 2
                best = max(best, (out[age] - out[bin_ + 1]) / space)
            assert index[class_, age] == pytest.approx(best, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("name", ["shared_system_prompts", "multi_turn_chat", "agent_loops", "rag"])
def test_it_hits_more_than_lru_where_the_pool_is_scarce(name):
    trace = cache.make_workload(name, seed=20, num_requests=600)
    capacity = trace.num_unique_blocks // 50
    assert hits(trace, capacity, "safeguarded") > hits(trace, capacity, "lru")


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
    assert np.array_equal(*(policy._returns for policy in policies))
    assert policies[0]._returns.sum() > 0


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
    assert at_release[:4] == (0.0, 8, 1, 2)
    assert np.isnan(first.output_tokens)
    assert first._replace(output_tokens=1)[:4] == at_release[:4]
    assert second[:2] == (1.0, 4)


@pytest.mark.parametrize("name", ["nano_vllm", "vllm_v0", "vllm_v1", "radix"])
def test_a_manager_reports_requests(name):
    listener = Listener()
    manager = cache.make_manager(name, num_blocks=4, block_size=2, policy=listener)
    seq = cache.Sequence(0, [1, 2, 3])
    manager.clock = lambda: 1.5
    manager.allocate(seq)
    seq.append_token(4)
    manager.append(seq)
    manager.free(seq)
    assert listener.told[-1][:4] == (1500.0, 3, 1, 1)
    assert np.isnan((listener.told[0].output_tokens, listener.told[-1].calls_tool)).all()
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
