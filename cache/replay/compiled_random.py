"""``Random`` and its ``Bag`` in compiled code."""

from __future__ import annotations

import random

import numpy as np

from cache.policies.random import Random
from cache.replay.operations import Operations
from cache.traces.trace import Trace


def operations_of(policy: Random, trace: Trace, capacity: int) -> Operations:
    methods = {"pin": remove, "remove": remove, "evict": evict, "release_many": release_many}
    methods["insert"] = insert
    return Operations("random", methods, {"bag": bag(trace, random.Random(policy.seed))})


def bag(trace: Trace, generator: random.Random) -> Operations:
    """A ``Bag`` of blocks, whose ``draw()`` gives what it does with ``generator``."""
    _, state, _ = generator.getstate()
    twin = np.random.RandomState()
    twin.set_state(("MT19937", state[:-1], state[-1]))
    state = {
        "items": np.zeros(trace.num_unique_blocks, np.int64),
        "position": np.zeros(trace.num_unique_blocks, np.int64),
        "size": 0,
        "draws": twin.random_sample(trace.num_block_references),  # one for each eviction
        "num_draws": 0,
    }
    return Operations("bag", {"add": _add, "remove": _take, "draw": _draw}, state)


def _add(self, item):
    self.position[item] = self.size
    self.items[self.size] = item
    self.size += 1


def _take(self, item):
    self.size -= 1
    last = self.items[self.size]  # fills the gap
    self.items[self.position[item]] = last
    self.position[last] = self.position[item]


def _draw(self):
    item = self.items[int(self.draws[self.num_draws] * self.size)]
    self.num_draws += 1
    self.remove(item)
    return item


def insert(self, block, key, parent, depth):
    pass


def remove(self, block):
    self.bag.remove(block)


def release_many(self, blocks):
    for block in blocks:
        self.bag.add(block)


def evict(self):
    return self.bag.draw()
