"""``ClassPolicy`` in compiled code.

The blocks of a class are in a circular list by their release; the last records of the array are the
ends of these lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numba
import numba.extending
import numpy as np

from cache.policies.classes import ClassPolicy, age_bin, bits, worth_at
from cache.replay.compiled import ghosts_of, remember
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
    policy.start(capacity)
    blocks = np.zeros(trace.num_unique_blocks + policy.num_classes, _BLOCK)
    blocks["older"] = blocks["newer"] = np.arange(len(blocks))
    state = {name: getattr(policy, name) for name in _SHARED} | {
        "_blocks": blocks,
        "first_end": trace.num_unique_blocks,
        "least": -1,  # the end of the class of the last victim, while nothing else changed
        "number": 0,  # of the last victim
        "released_ms": 0.0,
    }
    state |= ghosts_of(policy, trace, capacity)
    methods = _methods(policy.classify, policy.learn, policy.num_classes, policy.name)
    return Operations(policy.name, methods, state)


_SHARED = "_returned", "_gone", "_worths", "_num_releases", "_learn_at", "_request", "_now"


@functools.cache
def _methods(classify, learn, num_classes: int, name: str) -> dict[str, Callable]:
    numba.extending.register_jitable(classify)
    numba.extending.register_jitable(learn)
    of_class = f"policy {name!r}: classify gave a class beyond 0 to {num_classes - 1}"
    of_worth = f"policy {name!r}: learn gave a worth that is not finite"

    def _refuse_class(self):
        raise ValueError(of_class)

    def _refuse_worth(self):
        raise ValueError(of_worth)

    own = {
        "classify": lambda self, uses, is_end, idle, request: classify(uses, is_end, idle, request),
        "learn": lambda self, returned, gone, worths: learn(returned, gone, worths),
        "_access": ClassPolicy._access,
    }
    functions = (_refuse_class, _refuse_worth, tell, insert, pin, release_many)
    functions += (evict, remove, _append, _least, _give_up, remember)
    return own | {function.__name__: function for function in functions}


def tell(self, request):
    self._request = request
    if request.time_ms > self._now:
        self._now = request.time_ms
        self.least = -1


def insert(self, block_id, key, parent, depth):
    block = self._blocks[block_id]
    if block.ghost:
        self._gone[block.class_] -= block.weight
        block.ghost = 0
        self.live_ghosts -= 1
    else:
        block.uses = 0


def pin(self, block_id):
    self.least = -1
    _unlink(self._blocks, block_id)


def release_many(self, ids):
    self.least = -1
    self._access(ids)


def _append(self, class_, block_id):
    blocks = self._blocks
    end = self.first_end + class_
    blocks[block_id].newer, blocks[block_id].older = end, blocks[end].older
    blocks[blocks[end].older].newer = blocks[end].older = block_id


def evict(self):
    # What was released right after the last victim, in its class, is worth as much.
    victim = self._blocks[self._blocks[self.least].newer]
    if self.least < 0 or victim.number != self.number + 1 or victim.released_ms != self.released_ms:
        self.least = self._least()
    victim_id = self._blocks[self.least].newer
    self.number = self._blocks[victim_id].number
    self.released_ms = self._blocks[victim_id].released_ms
    self._give_up(victim_id)
    return victim_id


def remove(self, block_id):
    if self._blocks[block_id].older >= self.first_end:
        self.least = -1
    self._give_up(block_id)


def _give_up(self, block_id):
    block = self._blocks[block_id]
    _unlink(self._blocks, block_id)
    self._gone[block.class_] += block.weight
    self.remember(block_id)


def _least(self):
    """The end of the list whose oldest block is worth least; of equal ones, released first."""
    blocks, now = self._blocks, self._now
    least, least_worth, number = -1, np.inf, 0
    for end in range(self.first_end, len(blocks)):
        head_id = blocks[end].newer
        if head_id < self.first_end:
            head = blocks[head_id]
            worth = worth_at(self._worths[head.class_], now - head.released_ms)
            if least < 0 or worth < least_worth or (worth == least_worth and head.number < number):
                least, least_worth, number = end, worth, head.number
    return least


@numba.njit(inline="always")
def _unlink(blocks, block_id):
    blocks[blocks[block_id].older].newer = blocks[block_id].newer
    blocks[blocks[block_id].newer].older = blocks[block_id].older
