"""``ClassPolicy`` in compiled code.

The blocks of a class are in a circular list by their release; the last records of the array are the
ends of these lists.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numba
import numba.extending
import numpy as np

from cache.policies.base import UNKNOWN_REQUEST
from cache.policies.classes import (
    LEARN_FIRST,
    NUM_BINS,
    ClassPolicy,
    age_bin,
    bits,
    worth_at,
    wrong_class,
    wrong_worth,
)
from cache.policies.queues import num_ghosts
from cache.replay.compiled import forget_oldest
from cache.replay.operations import Operations
from cache.traces.trace import Trace

_BLOCK = np.dtype(
    [
        ("released_ms", np.float64),
        ("weight", np.float64),
        ("number", np.int64),  # blocks released before it
        ("uses", np.int32),  # releases that are remembered; of a block in the pool
        ("class_", np.int32),
        ("older", np.int32),  # neighbours in the list
        ("newer", np.int32),
        ("ghost", np.int32),  # its place among the ghosts plus one; 0: no ghost
    ],
    align=True,
)
for _function in (bits, age_bin, worth_at):
    numba.extending.register_jitable(_function)


def operations_of(policy: ClassPolicy, trace: Trace, capacity: int) -> Operations:
    num_classes = policy.num_classes
    blocks = np.zeros(trace.num_unique_blocks + num_classes, _BLOCK)
    blocks["older"] = blocks["newer"] = np.arange(len(blocks))
    state = {
        "blocks": blocks,
        "first_end": trace.num_unique_blocks,
        "returned": np.zeros((num_classes, NUM_BINS)),
        "gone": np.zeros(num_classes),
        "worths": np.zeros((num_classes, NUM_BINS + 1)),
        "num_releases": 0,
        "learn_at": LEARN_FIRST,
        "now": 0.0,
        "request": UNKNOWN_REQUEST,
        "ghosts": np.empty(trace.num_block_references, np.int32),
        "first_ghost": 0,
        "last_ghost": 0,
        "live_ghosts": 0,
        "num_ghosts": num_ghosts(policy, capacity),
        "least": -1,  # the end of the class of the last victim, while nothing else changed
        "number": 0,  # of the last victim
        "released_ms": 0.0,
    }
    methods = _methods(policy.classify, policy.learn, num_classes, policy.name)
    return Operations(policy.name, methods, state)


@functools.cache
def _methods(classify, learn, num_classes: int, name: str) -> dict[str, Callable]:
    numba.extending.register_jitable(classify)
    numba.extending.register_jitable(learn)
    of_class, of_worth = str(wrong_class(name, num_classes)), str(wrong_worth(name))

    def release_many(self, ids):
        blocks, now, request = self.blocks, self.now, self.request
        self.least = -1
        if self.num_releases >= self.learn_at:
            learn(self.returned, self.gone, self.worths)
            if not math.isfinite(self.worths.sum()):
                raise ValueError(of_worth)
            self.learn_at = self.num_releases + max(self.num_releases // 4, LEARN_FIRST)
        idle = np.nan
        for block_id in ids:
            if blocks[block_id].uses:
                idle = now - blocks[block_id].released_ms
                break
        weight = 1.0 / math.sqrt(max(len(ids), 1))
        is_end = True
        for block_id in ids:
            block = blocks[block_id]
            if block.uses:
                self.returned[block.class_, age_bin(now - block.released_ms)] += block.weight
            block.uses += 1
            class_ = int(classify(block.uses, is_end, idle, request))
            is_end = False
            if not 0 <= class_ < num_classes:
                raise ValueError(of_class)
            block.class_ = class_
            block.released_ms = now
            block.weight = weight
            block.number = self.num_releases
            self.num_releases += 1
            block.newer = self.first_end + class_
            block.older = blocks[block.newer].older
            blocks[block.older].newer = blocks[block.newer].older = block_id

    # The key of a cached replay has ``classify`` and ``learn`` by their being methods.
    own = {"classify": classify, "learn": learn, "release_many": release_many}
    return own | {f.__name__: f for f in (tell, insert, pin, evict, remove, _least, _give_up)}


def tell(self, request):
    self.request = request
    if request.time_ms > self.now:
        self.now = request.time_ms
        self.least = -1


def insert(self, block_id, key, parent, depth):
    block = self.blocks[block_id]
    if block.ghost:
        self.gone[block.class_] -= block.weight
        block.ghost = 0
        self.live_ghosts -= 1
    else:
        block.uses = 0


def pin(self, block_id):
    self.least = -1
    _unlink(self.blocks, block_id)


def evict(self):
    # What was released right after the last victim, in its class, is worth as much.
    victim = self.blocks[self.blocks[self.least].newer]
    if self.least < 0 or victim.number != self.number + 1 or victim.released_ms != self.released_ms:
        self.least = self._least()
    victim_id = self.blocks[self.least].newer
    self.number = self.blocks[victim_id].number
    self.released_ms = self.blocks[victim_id].released_ms
    self._give_up(victim_id)
    return victim_id


def remove(self, block_id):
    if self.blocks[block_id].older >= self.first_end:
        self.least = -1
    self._give_up(block_id)


def _give_up(self, block_id):
    block = self.blocks[block_id]
    _unlink(self.blocks, block_id)
    self.gone[block.class_] += block.weight
    self.ghosts[self.last_ghost] = block_id
    self.last_ghost += 1
    block.ghost = self.last_ghost
    self.live_ghosts += 1
    if self.live_ghosts > self.num_ghosts:
        self.first_ghost = forget_oldest(self.blocks, self.ghosts, self.first_ghost)
        self.live_ghosts -= 1


def _least(self):
    """The end of the list whose oldest block is worth least; of equal ones, released first."""
    blocks, now = self.blocks, self.now
    least, least_worth, number = -1, np.inf, 0
    for end in range(self.first_end, len(blocks)):
        head_id = blocks[end].newer
        if head_id < self.first_end:
            head = blocks[head_id]
            worth = worth_at(self.worths[head.class_], now - head.released_ms)
            if least < 0 or worth < least_worth or (worth == least_worth and head.number < number):
                least, least_worth, number = end, worth, head.number
    return least


@numba.njit(inline="always")
def _unlink(blocks, block_id):
    blocks[blocks[block_id].older].newer = blocks[block_id].newer
    blocks[blocks[block_id].newer].older = blocks[block_id].older
