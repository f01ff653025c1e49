"""Makes ``Operations`` of the policies; defines those of ``PriorityPolicy``, ``LRU``, ``Random``.

Block numbers are the dense ids of the trace, so the state of a block is a record in an array.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import numba
import numba.extending
import numpy as np

from cache.policies.base import UNKNOWN_REQUEST, EvictionPolicy
from cache.policies.classes import ClassPolicy
from cache.policies.leaves import LeafPolicy
from cache.policies.lru import LRU
from cache.policies.priority import BlockHistory, PriorityPolicy
from cache.policies.queue_informed import QueueInformed
from cache.policies.queues import QueuePolicy
from cache.policies.random import Random
from cache.replay import compiled_classes, compiled_leaves, compiled_queues
from cache.replay.containers import LINKS, bag, empty_lists, ghosts, heaps, link, unlink
from cache.replay.operations import ON_DISK, Array, Compiled, Operations
from cache.traces.trace import Trace

_NUMBERS = "depth", "accessed", "before", "inserted", "accesses", "priority", "queued"
_RECORD = np.dtype([(name, np.float64) for name in _NUMBERS] + [("key", int), ("parent", int)])
_EXACT = 2.0**53
"""float64 represents every integer up to this number exactly."""


def operations_of(policy: EvictionPolicy, trace: Trace, capacity: int) -> Operations | None:
    """Compilable functions and initial state of ``policy``; None if it must run in Python."""
    if not policy.compilable:
        return None
    if isinstance(policy, QueueInformed):  # a replay has no waiting requests
        return operations_of(policy.policy, trace, capacity)
    if isinstance(policy, LRU):
        links = empty_lists(trace.num_unique_blocks + 1, LINKS)  # the last: end of the list
        return Operations(policy.name, _LRU, {"links": links})
    if isinstance(policy, Random):
        return Operations(policy.name, _RANDOM, {"_bag": bag(trace, random.Random(policy.seed))})
    if isinstance(policy, PriorityPolicy):
        return _of_priority(policy, trace, capacity)
    if isinstance(policy, ClassPolicy):
        return compiled_classes.operations_of(policy, trace, capacity)
    if isinstance(policy, LeafPolicy):
        return compiled_leaves.operations_of(policy, trace, capacity, operations_of)
    if isinstance(policy, QueuePolicy):
        return compiled_queues.operations_of(policy, trace, capacity)
    return None


def _append_all(self: Compiled, blocks: Array) -> None:
    for block in blocks:
        link(self.links, block, len(self.links) - 1)


def _take_oldest(self: Compiled) -> int:
    block = self.links[len(self.links) - 1].newer
    unlink(self.links, block)
    return block


def _add_all(self: Compiled, blocks: Array) -> None:
    for block in blocks:
        self._bag.add(block)


_LRU = {"release_many": _append_all, "evict": _take_oldest}
_LRU |= dict.fromkeys(("pin", "remove"), lambda self, block: unlink(self.links, block))
_RANDOM = {"release_many": _add_all, "evict": lambda self: self._bag.draw()}
_RANDOM |= dict.fromkeys(("pin", "remove"), lambda self, block: self._bag.remove(block))


def _of_priority(policy: PriorityPolicy, trace: Trace, capacity: int) -> Operations | None:
    """Compiled code computes ``priority`` in float64.  In Python, it may be an integer if there is
    no ``own_state``.  So ``rank`` raises OverflowError beyond 2**53, where float64 rounds integers.
    """
    if (priority := policy.describing_priority()) is None:
        return None
    num_blocks = trace.num_unique_blocks
    next_uses = np.empty(0)
    if policy.needs_future:
        next_uses = next_uses_of(trace.block_ids, trace.offsets, num_blocks, capacity)
    state = {
        "_records": np.zeros(num_blocks, _RECORD),
        "_children": np.zeros(num_blocks),
        "_memory": np.zeros((num_blocks, policy.memory_size)),
        "_released": heaps(num_blocks, capacity),
        "_ghosts": ghosts(policy, trace, capacity),
        "_request": UNKNOWN_REQUEST,
        **dict.fromkeys(("_time", "_queued", "_clock"), 0.0),
        "offsets": trace.offsets,
        "next_uses": next_uses,
        "reference": 0,  # position in the trace of the block that is released
    }
    own = policy.own_state(capacity)
    if own is not None:
        state["own"] = own
    return Operations(policy.name, _methods(priority, own is not None), state)


@functools.cache
def _methods(priority: Callable[..., float], has_own: bool) -> dict[str, Any]:
    numba.extending.register_jitable(priority)

    def rank(self: Compiled, history: BlockHistory) -> float:
        if has_own:
            value = priority(history, self.own)
        else:
            value = priority(history)
            if _EXACT < abs(value) < np.inf:
                raise OverflowError("a priority is beyond 2**53")
        if value != value:
            raise ValueError("the policy's priority of a block is nan, not a number")
        return value

    shared = {name: vars(PriorityPolicy)[name] for name in ("tell", "remove", "_release")}
    own = (rank, insert, pin, release_many, evict, _next_use_of, _give_up)
    return shared | {function.__name__: function for function in own}


def insert(self: Compiled, block: int, key: int, parent: int, depth: int) -> None:
    record = self._records[block]
    if self._ghosts.take(block):
        record.before += record.accesses
    else:
        record.before = record.accessed = 0.0
    record.inserted = record.accesses = 0.0
    record.priority = np.nan
    record.key, record.parent, record.depth = key, parent, depth
    if self._memory.size:
        self._memory[block] = 0.0
    if parent >= 0:
        self._children[parent] += 1.0


def pin(self: Compiled, block: int) -> None:
    self._released.remove(block)


def release_many(self: Compiled, blocks: Array) -> None:
    self._time += 1.0
    self.reference = self.offsets[int(self._time) - 1] + len(blocks)
    for block in blocks:
        self._release(block)


def _next_use_of(self: Compiled, block: int) -> float:
    self.reference -= 1
    return self.next_uses[self.reference] if len(self.next_uses) else np.nan


def evict(self: Compiled) -> int:
    self._clock, block = self._released.pop()
    self._give_up(block)
    return block


def _give_up(self: Compiled, block: int) -> None:
    parent = self._records[block].parent
    if parent >= 0:
        self._children[parent] -= 1.0
    self._ghosts.add(block)


@numba.njit(cache=ON_DISK)
def next_uses_of(block_ids: Array, offsets: Array, num_unique: int, capacity: int) -> Array:
    """For each block reference: number of the next request that uses the block; inf for never.

    Only the first ``capacity`` blocks of a request take part in the replay.  Later blocks do not
    count as uses.
    """
    next_uses = np.full(len(block_ids), np.inf)
    upcoming = np.full(num_unique, np.inf)
    for request in range(len(offsets) - 2, -1, -1):
        start = offsets[request]
        for at in range(start, min(offsets[request + 1], start + capacity)):
            block_id = block_ids[at]
            next_uses[at] = upcoming[block_id]
            upcoming[block_id] = request
    return next_uses
