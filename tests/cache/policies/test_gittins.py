"""The Gittins policy, and what owners of blocks report of requests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache.policies import Request, gittins_compiled, make_policy
from cache.policies.gittins import Gittins
from tests.cache.prefix_traces import prefix_traces, trace_of

CLASSES, BINS = 160, 32
ENDS = np.array([0.0, *(2.0**bin_ for bin_ in range(BINS))])
"""Ends of the age bins, ms."""


class Checked(Gittins):
    """Runs in Python, through the methods that managers call, and checks each victim: the block
    of least worth among the oldest of the classes."""

    def evict(self):
        blocks, index = self._blocks[[*self._released]], self._states[0]["index"]
        _, oldest = np.unique(blocks["class_"][order := np.argsort(blocks["number"])], True)
        heads = blocks[order[oldest]]
        worths = np.array(
            [
                np.interp(self._now - head["released_ms"], ENDS, index[head["class_"]])
                for head in heads
            ]
        )
        least = np.isclose(worths, worths.min(), rtol=1e-12, atol=0)
        victim = super().evict()
        number = self._blocks["number"][victim]
        assert number in heads["number"][least]
        assert number == heads["number"][least].min() or worths.min() > 0
        return victim


@pytest.mark.parametrize(("name", "ghost_ratio"), [("multi_turn_chat", 1), ("rag", 16), ("rag", 0)])
def test_compiled_it_evicts_what_it_does_in_a_manager_the_least_worth(name, ghost_ratio):
    trace = cache.make_workload(name, seed=3, num_requests=100)
    capacity = trace.num_unique_blocks // 20
    compiled, checked = (
        cache.simulate(trace, policy=policy, capacity_blocks=capacity)
        for policy in (Gittins(ghost_ratio), Checked(ghost_ratio))
    )
    assert (compiled.compiled, checked.compiled) == (True, False)
    assert compiled.hits.tolist() == checked.hits.tolist()
    assert compiled.evictions == checked.evictions


@given(trace=prefix_traces, capacity=st.integers(1, 12))
def test_before_there_are_statistics_it_is_lru(trace, capacity):
    lru, mine = (
        cache.simulate(trace, policy=policy, capacity_blocks=capacity)
        for policy in ("lru", "gittins")
    )
    assert lru.hits.tolist() == mine.hits.tolist()


def test_blocks_that_are_out_are_counted_in_the_epoch_of_their_release():
    """Also after two epochs have become one, several times."""
    trace = cache.make_workload("multi_turn_chat", seed=3, num_requests=2000)
    blocks, states = gittins_compiled.empty(trace.num_unique_blocks, 2**40)
    gittins_compiled.replay(
        trace.block_ids, trace.offsets, 500, trace.timestamps_ms, trace.output_lengths,
        blocks, states,
    )  # fmt: skip
    state, known = states[0], blocks[:-CLASSES]
    begun = state["begun"][: state["num_epochs"]]
    assert (np.diff(begun) > 0).all()
    assert state["num_releases"] == trace.num_block_references > 16 * 512
    epochs = np.searchsorted(begun, known["number"], side="right") - 1
    expected = np.zeros((16, CLASSES))
    np.add.at(expected, (epochs, known["class_"]), known["weight"])
    assert state["out"] == pytest.approx(expected, abs=1e-6)
    lengths = np.diff(trace.offsets)
    assert state["out"].sum() + state["returned"].sum() == pytest.approx(np.sqrt(lengths).sum())


def test_blocks_reach_the_ages_until_their_return_or_that_of_their_epoch():
    """12 ms is half through bin 4, 100 ms a bit more than half through bin 7."""
    returned, out = np.zeros((CLASSES, BINS)), np.zeros((2, CLASSES))
    returned[5, [3, 7]] = 3, 1
    out[:, 5] = 2, 4
    reached = gittins_compiled.reached_ages(out, np.array([0.0, 88.0]), returned, 100.0)
    expected = np.zeros(BINS)
    expected[:8] = 1 + 2
    expected[7] = 1 + 2 * (100 - 64) / 64
    expected[:4] += 3 + 4
    expected[4] += 4 * (12 - 8) / 8
    assert reached[5] == pytest.approx(expected)
    assert np.delete(reached, 5, axis=0).sum() == 0


def test_hazards_are_what_returned_of_what_reached_an_age_or_those_of_the_group():
    many = 1e9  # blocks, against which shrinkage is nothing
    returned, reached = np.zeros((CLASSES, BINS)), np.zeros((CLASSES, BINS))
    used_once, same_uses, other, often_used = (20 * kind for kind in (1, 1, 2, 5))
    same_uses += 7
    returned[used_once, [3, 7]] = 3 * many, many
    reached[used_once] = 10 * many
    reached[used_once + 1] = 5 * many
    hazards = gittins_compiled.estimate_hazards(returned, reached)
    assert hazards[used_once, [3, 7, 8]] == pytest.approx([0.3, 0.1, 0.0])
    assert hazards[used_once + 1, 3] == pytest.approx(0.0, abs=1e-6)
    for class_ in (same_uses, other):
        assert hazards[class_, [3, 7, 8]] == pytest.approx([0.2, 1 / 15, 0.0])
    assert hazards[often_used, [3, 7, 8]] == pytest.approx([0.9, 0.9, 0.0])


@given(st.integers(0, 2**32 - 1))
def test_the_index_is_the_most_hits_for_the_space_that_they_take(seed):
    """From its definition, with the share still out drawn straight between the ends of a bin."""
    hazards = np.random.default_rng(seed).beta(0.3, 1.0, (CLASSES, BINS)).round(2)
    index = np.zeros((CLASSES, BINS + 1))
    gittins_compiled.gittins_indices(hazards, index)
    group, expected = 20, np.zeros((CLASSES, BINS))
    for age in range(BINS):
        space, out = 0.0, np.ones(CLASSES)
        for bin_ in range(age, BINS):
            still_out = out * (1 - hazards[:, bin_])
            space = space + (ENDS[bin_ + 1] - ENDS[bin_]) * (out + still_out) / 2
            expected[:, age] = np.maximum(expected[:, age], (1 - still_out) / space)
            out = still_out
    by_uses = expected.reshape(-1, group, BINS)
    np.maximum.accumulate(by_uses[1:], axis=0, out=by_uses[1:])  # the first are new ends of prompts
    assert index[:, :BINS] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("idle_ms", "idle"), [(1000, 1), (20_000, 2), (100_000, 3)])
def test_classes_are_uses_output_length_and_idle_time(idle_ms, idle):
    policy = make_policy("gittins")
    policy.start(9)
    for at, keys, output in ((0, [1, 2, 3], 4), (idle_ms, [1, 2, 4], 100)):
        policy.tell(Request(at, 48, output, len(keys)))
        for depth, key in enumerate(keys):
            if key in policy._released:
                policy.pin(key)
            else:
                policy.insert(key, key, keys[depth - 1] if depth else None, depth)
        policy.release_many(keys[::-1])
        classes = {key: policy._blocks["class_"][key] for key in policy._released}
        found = {key: np.unravel_index(class_, (8, 5, 4)) for key, class_ in classes.items()}
        if not at:
            assert found == {1: (1, 0, 0), 2: (1, 0, 0), 3: (0, 0, 0)}
    assert found == {1: (2, 2, idle), 2: (2, 2, idle), 3: (0, 0, 0), 4: (0, 2, idle)}
    returned = policy._states[0]["returned"]
    assert returned.sum() == pytest.approx(2 / 3**0.5)
    assert returned[:, idle_ms.bit_length()].sum() == returned.sum()


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
    returned = [policy._states[0]["returned"] for policy in policies]
    assert np.array_equal(*returned)
    assert returned[0].sum() > 0


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
