"""``Random`` and its ``Bag`` in compiled code."""

from __future__ import annotations

import random

import numpy as np

from cache.policies.random import Random
from cache.replay.operations import Operations
from cache.traces.trace import Trace


def operations_of(policy: Random, trace: Trace, capacity: int) -> Operations:
    return Operations("random", _METHODS, {"bag": bag(trace, random.Random(policy.seed))})


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
    return Operations("bag", {"add": _add, "remove": _remove, "draw": _draw}, state)


def _add(self, item):
    self.position[item] = self.size
    self.items[self.size] = item
    self.size += 1


def _remove(self, item):
    self.size -= 1
    last = self.items[self.size]  # fills the gap
    self.items[self.position[item]] = last
    self.position[last] = self.position[item]


def _draw(self):
    item = self.items[int(self.draws[self.num_draws] * self.size)]
    self.num_draws += 1
    self.remove(item)
    return item


def _release_many(self, blocks):
    for block in blocks:
        self.bag.add(block)


_METHODS = {
    "insert": lambda self, block, key, parent, depth: None,
    "release_many": _release_many,
    "pin": lambda self, block: self.bag.remove(block),
    "remove": lambda self, block: self.bag.remove(block),
    "evict": lambda self: self.bag.draw(),
}
