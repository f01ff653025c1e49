"""The queue of runs in lru against a plain ordered dictionary."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.policies.lru import LRU


def started() -> LRU:
    policy = LRU()
    policy.start(1000)
    return policy


class Model:
    """The definition: a hash map over a linked list, one entry a block."""

    def __init__(self):
        self.order: OrderedDict[int, None] = OrderedDict()

    def release_many(self, blocks):
        self.order.update(dict.fromkeys(blocks))

    def pin_many(self, blocks):
        for block in blocks:
            del self.order[block]

    def evict_many(self, count):
        return [self.order.popitem(last=False)[0] for _ in range(count)]


@pytest.mark.parametrize("num_blocks", [5, 40, 400])
@given(seed=st.integers(0, 10**6))
def test_lru_equals_an_ordered_dictionary(num_blocks, seed):
    rng = random.Random(seed)
    policy, model = started(), Model()
    used = list(range(num_blocks))
    for _ in range(100):
        released = list(model.order)
        operation = rng.choice(["release", "evict", "pin head", "pin any", "pin some"])
        if operation == "release" and used:
            rng.random() < 0.2 and rng.shuffle(used)
            start = rng.randrange(len(used))
            blocks = used[start : start + rng.randrange(1, num_blocks)]
            used = [block for block in used if block not in blocks]
            policy.release_many(reversed(blocks))
            model.release_many(reversed(blocks))
        elif operation == "evict":
            count = rng.randrange(min(len(released), 9) + 1)
            victims = policy.evict_many(count)
            assert victims == model.evict_many(count)
            used += victims
        elif operation.startswith("pin") and released:
            start = rng.randrange(len(released))
            blocks = released[start : start + rng.randrange(1, num_blocks)][::-1]
            if operation == "pin any":
                blocks = blocks[:1]
            elif operation == "pin some":
                blocks = [block for block in blocks if rng.random() < 0.5]
            policy.pin_many(blocks)
            model.pin_many(blocks)
            used += blocks
        assert len(policy) == len(model.order)
        assert list(policy) == list(model.order)


def test_hits_and_releases_leave_nothing_behind():
    rng, policy = random.Random(0), started()
    policy.release_many(range(100))
    most_stale = 0
    for _ in range(1000):
        blocks = rng.sample(range(100), 30)  # from anywhere in all runs
        policy.pin_many(blocks)
        policy.release_many(blocks)
        most_stale = max(most_stale, policy._num_stale)
        entries = sum(map(len, policy._runs.values()))
        assert entries == len(policy) + policy._num_stale <= 2 * len(policy) + 64
        assert len(policy._run_with_head) <= len(policy._runs) <= entries
    assert most_stale > 100
    assert sorted(policy) == list(range(100))
    assert policy.evict_many(100)[-30:] == blocks
    assert not policy._runs
    assert not policy._run_with_head
    assert not policy._stale


def test_a_prefix_shared_by_many_prompts_leaves_no_stale_entries():
    policy = started()
    prefix, tails = list(range(10)), [range(100 * i, 100 * i + 10) for i in range(1, 9)]
    for i, tail in enumerate(tails):
        if i:
            policy.pin_many(prefix)
        policy.release_many([*prefix, *tail][::-1])
    assert policy._num_stale == 0
    assert policy.evict_many(len(policy))[-20:] == [*reversed(tails[-1]), *reversed(prefix)]
