"""MQ against the algorithm of its paper, written with lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.policies import make_policy


class Model:
    """MQ for requests of one block each."""

    def __init__(self, capacity: int, num_queues: int, life_time: int, num_ghosts: int):
        self.capacity, self.life_time, self.num_ghosts = capacity, life_time, num_ghosts
        self.queues: list[list[int]] = [[] for _ in range(num_queues)]
        self.accesses: dict[int, int] = {}
        self.expires: dict[int, int] = {}
        self.ghosts: dict[int, int] = {}
        self.time = 0

    def access(self, key: int) -> int | None:
        """Returns the key that is evicted for ``key``, if one is."""
        evicted = None
        queue = next((queue for queue in self.queues if key in queue), None)
        if queue is not None:
            queue.remove(key)
        else:
            self.accesses[key] = self.ghosts.pop(key, 0)
            if sum(map(len, self.queues)) == self.capacity:
                evicted = next(queue for queue in self.queues if queue).pop(0)
                self.ghosts[evicted] = self.accesses[evicted]
                while len(self.ghosts) > self.num_ghosts:
                    del self.ghosts[next(iter(self.ghosts))]
        self.time += 1
        self.accesses[key] += 1
        self.expires[key] = self.time + self.life_time
        level = 0
        while 2 ** (level + 1) <= self.accesses[key] and level + 1 < len(self.queues):
            level += 1
        self.queues[level].append(key)
        for upper in range(1, len(self.queues)):
            if self.queues[upper] and self.expires[self.queues[upper][0]] < self.time:
                sinking = self.queues[upper].pop(0)
                self.expires[sinking] = self.time + self.life_time
                self.queues[upper - 1].append(sinking)
        if queue is None:  # a new block takes its place when it is released
            self.queues[level].remove(key)
            self.queues[level].append(key)
        return evicted


@given(
    keys=st.lists(st.integers(0, 8), min_size=60, max_size=150),
    capacity=st.integers(2, 6),
    num_queues=st.integers(1, 4),
    life_time=st.integers(1, 12),
    ghost_ratio=st.sampled_from([0, 0.5, 1, 2]),
)
@settings(max_examples=60)
def test_evictions_are_those_of_the_paper(keys, capacity, num_queues, life_time, ghost_ratio):
    policy = make_policy("mq", num_queues=num_queues, life_time=life_time, ghost_ratio=ghost_ratio)
    policy.start(capacity)
    model = Model(capacity, num_queues, life_time, int(capacity * ghost_ratio))
    block_of: dict[int, int] = {}
    for key in keys:
        expected = model.access(key)
        if key in block_of:
            policy.pin(block_of[key])
        else:
            policy.miss(key)
            block = len(block_of)
            if block == capacity:
                block = policy.evict()
                [evicted] = [held for held, where in block_of.items() if where == block]
                del block_of[evicted]
                assert evicted == expected
            block_of[key] = block
            policy.insert(block, key, None, 0)
        policy.release(block_of[key])


@pytest.mark.parametrize("option", [{"num_queues": 1}, {"life_time": 1}, {"ghost_ratio": 0}])
def test_the_least_options_are_taken(option):
    make_policy("mq", **option).start(2)
