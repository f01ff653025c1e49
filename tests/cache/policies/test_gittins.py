"""The Gittins policy, and what owners of blocks report of requests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache.policies import Request, gittins, make_policy
from cache.policies.gittins import Gittins, Use, estimate_hazards, gittins_indices, passed_bins
from cache.traces.trace import Trace
from tests.cache.prefix_traces import trace_of


class Checked(Gittins):
    def _take(self, before=math.inf):
        node = super()._take(before)
        for class_, head in self._heads.items():
            number, first = self._leaves_of[class_].first()
            assert head == (self._worth(first.memo), number, first)
        return node


def test_the_heads_of_classes_are_their_first_leaves_at_their_worth():
    chat = cache.make_workload("multi_turn_chat", seed=3, num_requests=150)
    requests = [request._replace(timestamp_ms=i // 3 - 9) for i, request in enumerate(chat)]
    for trace in (chat, Trace.from_requests(requests, name="ties", block_size=16)):
        capacity = trace.num_unique_blocks // 10
        policy = Checked(ghost_ratio=2)
        cache.simulate(trace, policy=policy, capacity_blocks=capacity)
        assert capacity < len(policy._ghosts) <= 2 * capacity


@given(st.data())
def test_the_index_is_the_most_hits_for_the_space_that_they_take(data):
    """From its definition, with the share still out drawn straight between the ends of a bin."""
    hazards = np.array(data.draw(st.lists(st.floats(0, 1), min_size=32, max_size=32)))
    (index,) = gittins_indices(hazards[None])
    ends = [0.0, *(2.0**bin_ for bin_ in range(32))]
    for age in range(32):
        best, space, out = 0.0, 0.0, 1.0
        for bin_ in range(age, 32):
            still_out = out * (1 - hazards[bin_])
            space += (ends[bin_ + 1] - ends[bin_]) * (out + still_out) / 2
            best, out = max(best, (1 - still_out) / space), still_out
        assert index[age] == pytest.approx(best, rel=1e-9, abs=1e-15)


def test_hazards_are_what_returned_of_what_reached_an_age_or_those_of_the_group():
    """Ages are 12 ms and 100 ms: half through bin 4, a bit more than half through bin 7."""
    places = (1, 2, 1), (1, 2, 0), (1, 4, 0), (1, 3, 0), (2, 2, 1), (5, 2, 1)  # uses, output, idle
    used_once, same_output, other_output, same_uses, other, often_used = (
        np.ravel_multi_index(place, (14, 6, 3)) for place in places
    )
    many = 1e9  # blocks, against which shrinkage is nothing
    returned, out = np.zeros((252, 32)), np.zeros((2, 252))
    returned[used_once, [3, 7]] = 3 * many, many
    out[:, used_once] = 2 * many, 4 * many
    out[0, other_output] = 10 * many
    hazards = estimate_hazards(returned, out.T @ passed_bins(np.array([[12.0], [100.0]])))
    expected = np.zeros(32)
    expected[[3, 7]] = 3 / (4 + 2 + 4), 1 / (1 + 4 * (100 - 64) / 64)
    for class_ in (used_once, same_output):
        assert hazards[class_] == pytest.approx(expected)
    expected[3] = 3 / (4 + 2 + 4 + 10)
    for class_ in (same_uses, other):
        assert hazards[class_] == pytest.approx(expected)
    assert hazards[often_used] == pytest.approx(np.where(expected > 0, 0.9, 0.0))


def test_the_worth_changes_evenly_between_the_ends_of_a_bin():
    policy = make_policy("gittins")
    policy.start(1)
    policy._index, policy._now = [[0.0, 0.0, 0.0, 0.0, 5.0, 1.0]], 11.0  # bin 4 begins at 8 ms
    assert policy._worth(Use(0, 0.0, 0, 1, 1.0, 0)) == 5.0 - 3 / 8 * 4.0


@pytest.mark.parametrize("idle_ms", [1000, 100_000])
def test_prompts_that_were_idle_are_of_other_classes_and_n_blocks_weigh_as_the_root_of_n(idle_ms):
    policy = make_policy("gittins")
    policy.start(9)
    for at, keys in ((0, [1, 2]), (idle_ms, [1, 2, 3])):
        policy.tell(Request(at, 48, 4, len(keys)))
        blocks = [key for key in keys if key not in policy._nodes or policy.pin(key)]
        for key in blocks:
            policy.insert(key, key, key - 1 or None, key - 1)
        policy.release_many(keys[::-1])
    idle = [policy._nodes[key].memo.class_ % 3 for key in (1, 2, 3)]
    assert idle == [1 + (idle_ms > 16384)] * 3
    assert policy._returned.sum() == pytest.approx(2**0.5)
    assert policy._out.sum() == pytest.approx(3**0.5)


def test_two_epochs_become_one_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(gittins, "_NUM_EPOCHS", 4)
    monkeypatch.setattr(gittins, "_LEARN_EVERY", 1)
    policy = make_policy("gittins")
    policy.start(20)
    for block in range(14):
        policy.insert(block, block, None, 0)
        policy.release(block)
    assert policy._out.sum(axis=1).tolist() == [4, 4, 4, 2]
    assert policy._begun_ms.tolist() == [1000, 5000, 9000, 13000]
    policy.pin(5)
    policy.release(5)
    assert policy._out.sum(axis=1).tolist() == [4, 3, 4, 3]


def test_without_times_a_release_takes_a_second():
    policies = [make_policy("gittins") for _ in range(2)]
    for policy, second in zip(policies, (math.nan, 1000.0), strict=True):
        policy.start(3)
        for at in range(1, 80):
            policy.tell(Request(second * at, 16, 1, 1))
            if at > 3:
                policy.pin(at % 3)
            else:
                policy.insert(at % 3, at % 3, None, 0)
            policy.release(at % 3)
    assert np.array_equal(*(policy._returned for policy in policies))
    assert policies[0]._returned.sum() > 0


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
