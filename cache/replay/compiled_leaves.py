"""``LeafPolicy`` in compiled code: its nodes, and the methods that depend on containers.

Block numbers are the dense ids of the trace, and serve as keys, too.
"""

import inspect
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from cache.policies.base import EvictionPolicy, RequestInfo
from cache.policies.lazy_heap import LazyHeap
from cache.policies.leaves import LeafPolicy
from cache.policies.random import Bag
from cache.replay.containers import LINKS, bag, empty_lists, heaps, link, ordered, unlink
from cache.replay.operations import Compiled, Operations
from cache.traces.trace import Trace

_NODE = np.dtype(
    [(name, np.float64) for name in ("value", "time", "owner")]
    + [(name, np.int64) for name in ("parent", "depth", "children")]  # children: number of them
    + [(name, np.bool_) for name in ("released", "resident")],
    align=True,
)


def operations_of(
    policy: LeafPolicy,
    trace: Trace,
    capacity: int,
    operations_of_any: Callable[[EvictionPolicy, Trace, int], Operations | None],
) -> Operations | None:
    """The unchanged methods of a subclass, and its attributes after ``start``."""
    policy.start(capacity, float)  # no method calls ``next_use``
    num_blocks = trace.num_unique_blocks

    def converted(value: Any) -> Any:
        if isinstance(value, EvictionPolicy):
            return operations_of_any(value, trace, capacity)
        if isinstance(value, LazyHeap):
            return heaps(num_blocks, capacity)
        if isinstance(value, OrderedDict):
            return ordered(num_blocks)
        if isinstance(value, Bag):
            return bag(trace, vars(policy)["_generator"])
        if isinstance(value, list | array):
            is_heaps = isinstance(value[0], LazyHeap)
            return heaps(num_blocks, capacity, len(value)) if is_heaps else np.array(value, float)
        return value

    known = EvictionPolicy, LazyHeap, OrderedDict, Bag, list, array, int, float, RequestInfo
    attributes = {n: v for n, v in vars(policy).items() if isinstance(v, known) and n != "seed"}
    state = {name: converted(value) for name, value in attributes.items()}
    if any(value is None for value in state.values()):
        return None
    siblings = empty_lists(2 * num_blocks, LINKS)
    state |= {"_nodes": np.zeros(num_blocks, _NODE), "siblings": siblings}
    methods: dict[str, Any] = {}
    for base in reversed(type(policy).__mro__):
        if issubclass(base, LeafPolicy):
            methods |= {n: f for n, f in vars(base).items() if inspect.isfunction(f)}
    return Operations(policy.name, methods | _METHODS, state)


def insert(self: Compiled, block: int, key: int, parent: int, depth: int) -> None:
    node = self._nodes[block]
    node.parent, node.depth, node.children, node.value = parent, depth, 0, -1.0
    node.owner, node.time = np.nan, 0.0
    node.released, node.resident = False, True
    if parent >= 0:  # the parent is in use
        self._nodes[parent].children += 1
        link(self.siblings, block, len(self._nodes) + parent)
    self._inserted(block)


def evict(self: Compiled) -> int:
    block = self._take()
    self._give_up(block)
    return block


def _give_up(self: Compiled, block: int) -> None:
    self._gone(block)
    node = self._nodes[block]
    node.released = node.resident = False
    if node.parent >= 0:
        above = self._nodes[node.parent]
        above.children -= 1
        unlink(self.siblings, block)
        if above.released and not above.children:
            self._offer(node.parent)


def _children(self: Compiled, block: int) -> list[int]:
    found, at = [], self.siblings[len(self._nodes) + block].newer
    while at < len(self._nodes):
        found.append(at)
        at = self.siblings[at].newer
    return found


_METHODS = {"insert": insert, "evict": evict, "_give_up": _give_up, "_children": _children}
_METHODS |= {
    "pin": LeafPolicy._pin,
    "release_many": LeafPolicy._release,
    "_first_leaf": lambda self: self._leaves.pop()[1],
    "_draw": lambda self: self._unmarked.draw(),
    "_block_with": lambda self, key: key if self._nodes[key].resident else -1,
    "_holds": lambda self, block: self._nodes[block].resident,
    "_key_of": lambda self, block: block,
    "_content": lambda self, block: block,
    "_num_nodes": lambda self: self._capacity,
    "_next_victim": lambda self: self.policy.evict(),
    "_first_of": lambda self, turn: self._leaves_of.first(turn)[1],
    "_enter": lambda self, turn, block, time: self._leaves_of.push_to(block, time, 0.0, turn),
    "_leave": lambda self, turn, block: self._leaves_of.remove(block),
}
