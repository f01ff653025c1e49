"""``LeafPolicy`` in compiled code: its nodes and containers, and methods that depend on these.

Blocks are the dense ids of the trace, and their own keys.
"""

from __future__ import annotations

import inspect
import operator
from collections import OrderedDict
from typing import Any

import numba
import numpy as np

from cache.policies.base import EvictionPolicy, RequestInfo
from cache.policies.lazy_heap import LazyHeap
from cache.policies.leaves import LeafPolicy
from cache.policies.random import Bag
from cache.replay.compiled_random import bag
from cache.replay.operations import Operations, _Self
from cache.traces.trace import Trace

_NODE = np.dtype(
    [(name, np.float64) for name in ("value", "time")]
    + [(name, np.int64) for name in ("parent", "depth", "children")]  # children: how many
    + [(name, np.bool_) for name in ("released", "resident")],
    align=True,
)
_LINK = np.dtype([("older", np.int64), ("newer", np.int64)])
"""Neighbours in a circular list, one of whose links is its end."""
_RANK = np.dtype([("priority", np.float64), ("ticket", np.float64)])


def operations_of(policy: LeafPolicy, trace: Trace, capacity: int) -> Operations | None:
    """The methods of a subclass as they are, and its attributes after ``start``."""
    policy.start(capacity, float)  # nobody asks for the future
    num_blocks = trace.num_unique_blocks

    def converted(value: Any) -> Any:
        if isinstance(value, EvictionPolicy):
            return value.operations(trace, capacity)
        if isinstance(value, LazyHeap):
            return _heaps(num_blocks, 1)
        if isinstance(value, OrderedDict):
            links = _no_links(num_blocks + 1)
            links["newer"][:-1] = -1
            return Operations("order", _ORDER, {"links": links, "end": num_blocks, "size": 0})
        if isinstance(value, Bag):
            return bag(trace, policy._generator)
        if isinstance(value, list):
            is_heaps = isinstance(value[0], LazyHeap)
            return _heaps(num_blocks, len(value)) if is_heaps else np.array(value, float)
        return value

    known = EvictionPolicy, LazyHeap, OrderedDict, Bag, list, int, float, RequestInfo
    attributes = {n: v for n, v in vars(policy).items() if isinstance(v, known) and n != "seed"}
    state = {name: converted(value) for name, value in attributes.items()}
    if any(value is None for value in state.values()):
        return None
    state |= {"_nodes": np.zeros(num_blocks, _NODE), "siblings": _no_links(2 * num_blocks)}
    methods: dict[str, Any] = {}
    for base in reversed(type(policy).__mro__):
        if issubclass(base, LeafPolicy):
            methods |= {n: f for n, f in vars(base).items() if inspect.isfunction(f)}
    return Operations(policy.name, methods | _METHODS, state)


def _no_links(count: int) -> np.ndarray:
    """Each is the end of an empty list."""
    links = np.empty(count, _LINK)
    links["older"] = links["newer"] = np.arange(count)
    return links


@numba.njit(inline="always")
def _link(links, at, end):
    """Make ``at`` the newest of a list."""
    links[at].older, links[at].newer = links[end].older, end
    links[links[end].older].newer = links[end].older = at


@numba.njit(inline="always")
def _unlink(links, at):
    links[links[at].older].newer = links[at].newer
    links[links[at].newer].older = links[at].older


def _append(self, key):
    if not self.has(key):
        _link(self.links, key, self.end)
        self.size += 1


def _take_out(self, key, _default):
    if self.has(key):
        _unlink(self.links, key)
        self.links[key].newer = -1
        self.size -= 1


def _take_oldest(self, _last):
    key = self.links[self.end].newer
    self.pop(key, None)
    return key, None


def _move_to_end(self, key):
    _unlink(self.links, key)
    _link(self.links, key, self.end)


_ORDER = {"setdefault": _append, "pop": _take_out, "popitem": _take_oldest}
_ORDER |= {"move_to_end": _move_to_end, "has": lambda self, key: self.links[key].newer >= 0}


def _heaps(num_items: int, num_heaps: int) -> Operations:
    """``LazyHeap`` of blocks, or several, as tournaments: place n has the first of 2n and 2n + 1.

    The last half of the places are the items.
    """
    size = max(num_items, 2)
    ranks = np.full((num_heaps, size), np.inf, _RANK)  # inf: not here
    tree = np.arange(2 * size)
    tree[0] = size
    while tree.min() < size:
        tree = np.where(tree < size, 2 * tree, tree)
    trees = np.tile(tree - size, (num_heaps, 1))
    return Operations("heaps", _HEAPS, {"ranks": ranks, "trees": trees, "tickets": 0.0})


def _set_rank(self, item, priority, ticket, heap):
    ranks, tree = self.ranks[heap], self.trees[heap]
    ranks[item].priority, ranks[item].ticket = priority, ticket
    at = (len(ranks) + item) >> 1
    while at:
        first, second = tree[2 * at], tree[2 * at + 1]
        a, b = ranks[first], ranks[second]
        if b.priority < a.priority or (b.priority == a.priority and b.ticket < a.ticket):
            first = second
        if first == tree[at] and first != item:
            break
        tree[at] = first
        at >>= 1


def _push(self, item, priority, ticket=0.0, heap=0):
    self.tickets += 1.0
    self.set_rank(item, priority, ticket or self.tickets, heap)


def _remove(self, item, heap=0):
    self.set_rank(item, np.inf, 0.0, heap)


def _first(self, heap=0):
    item = self.trees[heap, 1]
    return self.ranks[heap, item].priority, item


def _pop(self):
    first = self.first()
    self.remove(first[1])
    return first


_HEAPS = {"set_rank": _set_rank, "push": _push, "remove": _remove, "discard": _remove}
_HEAPS |= {"first": _first, "pop": _pop, "least": lambda self: self.first()[0]}
_HEAPS["has"] = lambda self, item: self.ranks[0, item].priority < np.inf


@numba.extending.overload(operator.contains)
def _(container, item):
    return (lambda container, item: container.has(item)) if isinstance(container, _Self) else None


@numba.extending.overload(len)
def _(container):
    return (lambda container: container.size) if isinstance(container, _Self) else None


def insert(self, block, key, parent, depth):
    node = self._nodes[block]
    node.parent, node.depth, node.children, node.value = parent, depth, 0, -1.0
    node.released, node.resident = False, True
    if parent >= 0:  # in use
        self._nodes[parent].children += 1
        _link(self.siblings, block, len(self._nodes) + parent)
    self._inserted(block)


def evict(self):
    block = self._take()
    self._give_up(block)
    return block


def _give_up(self, block):
    self._gone(block)
    node = self._nodes[block]
    node.released = node.resident = False
    if node.parent >= 0:
        above = self._nodes[node.parent]
        above.children -= 1
        _unlink(self.siblings, block)
        if above.released and not above.children:
            self._offer(node.parent)


def _children(self, block):
    found, at = [], self.siblings[len(self._nodes) + block].newer
    while at < len(self._nodes):
        found.append(at)
        at = self.siblings[at].newer
    return found


def _first_of_category(self, turn):
    priority, block = self._leaves_of.first(turn)
    return block if priority < np.inf else -1


_METHODS = {"insert": insert, "evict": evict, "_give_up": _give_up, "_children": _children}
_METHODS |= {
    "pin": LeafPolicy._pin,
    "release_many": LeafPolicy._release,
    "_first_leaf": lambda self: self._leaves.pop()[1],
    "_draw": lambda self: self._unmarked.draw(),
    "_block_with": lambda self, key: key if self._nodes[key].resident else -1,
    "_key_of": lambda self, block: block,
    "_content": lambda self, block: block,
    "_num_nodes": lambda self: self._capacity,
    "_next_victim": lambda self: self.policy.evict(),
    "_first_of": _first_of_category,
    "_enter": lambda self, turn, block, time: self._leaves_of.push(block, time, 0.0, turn),
    "_leave": lambda self, turn, block: self._leaves_of.remove(block, turn),
}
