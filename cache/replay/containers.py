"""Containers for compiled policies: lists, ghosts, bags and heaps of blocks."""

import operator
import random
from collections.abc import Callable

import numba
import numba.extending
import numpy as np
from numba import types

from cache.policies.classes import ClassPolicy
from cache.policies.priority import PriorityPolicy
from cache.policies.queues import num_ghosts
from cache.replay.operations import Array, Compiled, Operations, _Self
from cache.traces.trace import Trace

LINKS = np.dtype([("older", np.int64), ("newer", np.int64)])
"""Neighbours of a record in a circular list.  One record of each list is its end."""
_ENTRY = np.dtype([("priority", np.float64), ("ticket", np.float64), ("item", np.int64)])


def empty_lists(count: int, dtype: np.dtype) -> Array:
    """Make records with ``LINKS``; each record is the end of an empty list."""
    records = np.zeros(count, dtype)
    records["older"] = records["newer"] = np.arange(count)
    return records


@numba.njit(inline="always")
def link(records: Array, at: int, end: int) -> None:
    """Make ``at`` the newest record of the list with ``end``."""
    newest = records[end].older
    records[at].older, records[at].newer = newest, end
    records[newest].newer = records[end].older = at


@numba.njit(inline="always")
def unlink(records: Array, at: int) -> None:
    older, newer = records[at].older, records[at].newer
    records[older].newer, records[newer].older = newer, older


@numba.extending.overload(operator.contains, strict=False)  # a lambda has no annotations
def _(container: types.Type, item: types.Type) -> Callable[..., bool] | None:
    return (lambda container, item: container.has(item)) if isinstance(container, _Self) else None


@numba.extending.overload(len, strict=False)
def _(container: types.Type) -> Callable[..., int] | None:
    return (lambda container: container.size) if isinstance(container, _Self) else None


def ordered(num_items: int) -> Operations:
    """An ``OrderedDict`` whose values do not matter."""
    links = empty_lists(num_items + 1, LINKS)
    links["newer"][:-1] = -1  # in no list
    return Operations("order", _ORDER, {"links": links, "end": num_items, "size": 0})


def ghosts(policy: PriorityPolicy | ClassPolicy, trace: Trace, capacity: int) -> Operations:
    """A ``GhostList`` without values, because the record of a block remains after its eviction."""
    operations = ordered(trace.num_unique_blocks)
    operations.state["capacity"] = num_ghosts(policy.name, policy.ghost_ratio, capacity)
    return Operations("ghosts", _ORDER | {"add": _add_ghost, "take": _take_ghost}, operations.state)


def _append(self: Compiled, key: int) -> None:
    if not self.has(key):
        link(self.links, key, self.end)
        self.size += 1


def _take_out(self: Compiled, key: int, _default: None) -> None:
    if self.has(key):
        unlink(self.links, key)
        self.links[key].newer = -1
        self.size -= 1


def _take_oldest(self: Compiled, _last: bool) -> tuple[int, None]:
    key = self.links[self.end].newer
    self.pop(key, None)
    return key, None


def _move_to_end(self: Compiled, key: int) -> None:
    unlink(self.links, key)
    link(self.links, key, self.end)


def _add_ghost(self: Compiled, key: int) -> None:
    if self.capacity:
        self.setdefault(key)
        if self.size > self.capacity:
            self.popitem(False)


def _take_ghost(self: Compiled, key: int) -> bool:
    is_here = self.capacity > 0 and self.has(key)
    if is_here:
        self.pop(key, None)
    return is_here


_ORDER = {"setdefault": _append, "pop": _take_out, "popitem": _take_oldest}
_ORDER |= {"move_to_end": _move_to_end, "has": lambda self, key: self.links[key].newer >= 0}


def bag(trace: Trace, generator: random.Random) -> Operations:
    """A ``Bag`` of blocks that samples the same blocks with ``generator`` as in Python."""
    _, state, _ = generator.getstate()
    twin = np.random.RandomState()
    twin.set_state(("MT19937", np.array(state[:-1], np.uint32), state[-1], 0, 0.0))
    return Operations(
        "bag",
        {"add": _add, "remove": _remove, "draw": _draw},
        {
            "items": np.zeros(trace.num_unique_blocks, np.int64),
            "position": np.zeros(trace.num_unique_blocks, np.int64),
            "size": 0,
            "draws": twin.random_sample(trace.num_block_references),  # a draw for each eviction
            "num_draws": 0,
        },
    )


def _add(self: Compiled, item: int) -> None:
    self.position[item] = self.size
    self.items[self.size] = item
    self.size += 1


def _remove(self: Compiled, item: int) -> None:
    self.size -= 1
    last = self.items[self.size]  # moves to the place of ``item``
    self.items[self.position[item]] = last
    self.position[last] = self.position[item]


def _draw(self: Compiled) -> int:
    item = self.items[int(self.draws[self.num_draws] * self.size)]
    self.num_draws += 1
    self.remove(item)
    return item


def heaps(num_items: int, capacity: int, count: int = 1) -> Operations:
    """Make ``count`` heaps like ``LazyHeap``.  At most ``capacity`` items, each in one heap.

    Entries pushed with rising priorities are kept in a queue, all other entries in a heap.  The
    second number of a priority must rise from push to push, unless an item is pushed with its
    previous second number: then its old entry becomes valid again.
    """
    shape = count, 2 * min(capacity, num_items) + 64
    state = {
        "rising": np.empty(shape, _ENTRY),
        "heads": np.zeros(count, np.int64),
        "tails": np.zeros(count, np.int64),
        "heaps": np.empty(shape, _ENTRY),
        "sizes": np.zeros(count, np.int64),
        # Ticket of each item's entry; negative: the item was removed; 0: the item has no entry.
        "tickets": np.zeros(num_items),
        "last_ticket": 0.0,
    }
    return Operations("heaps", _HEAPS, state)


def _push_to(self: Compiled, item: int, priority: float, ticket: float, heap: int) -> None:
    has_entry = self.tickets[item] == -ticket < 0.0
    ticket = ticket or self.last_ticket + 1.0
    self.tickets[item] = ticket
    if has_entry:
        return
    if ticket < self.last_ticket:  # the old entry was dropped
        return self.sink(priority, ticket, item, heap)
    self.last_ticket = ticket
    rising = self.rising[heap]
    while self.heads[heap] < self.tails[heap]:
        last = rising[self.tails[heap] - 1]
        if last.priority <= priority:
            break
        self.tails[heap] -= 1
        self.sink(last.priority, last.ticket, last.item, heap)
    if self.tails[heap] == len(rising):
        self.tails[heap] = self.compact(rising, self.heads[heap], len(rising))
        self.heads[heap] = 0
    _set(rising, self.tails[heap], priority, ticket, item)
    self.tails[heap] += 1


def _sink(self: Compiled, priority: float, ticket: float, item: int, heap: int) -> None:
    entries = self.heaps[heap]
    if self.sizes[heap] == len(entries):
        self.sizes[heap] = self.compact(entries, 0, len(entries))
        for root in range(self.sizes[heap] // 2 - 1, -1, -1):
            _sift_down(entries, root, self.sizes[heap])
    at = self.sizes[heap]
    self.sizes[heap] += 1
    while at:
        above = entries[(at - 1) >> 1]
        if above.priority < priority or (above.priority == priority and above.ticket < ticket):
            break
        entries[at] = above
        at = (at - 1) >> 1
    _set(entries, at, priority, ticket, item)


def _compact(self: Compiled, entries: Array, head: int, tail: int) -> int:
    """Move the valid entries to the front, in order.  Returns their number."""
    kept = 0
    for at in range(head, tail):
        if self.counts(entries[at].item, entries[at].ticket):
            entries[kept] = entries[at]
            kept += 1
    return kept


def _counts(self: Compiled, item: int, ticket: float) -> bool:
    """Whether an entry is valid.  Marks the item of an invalid entry as without an entry."""
    if self.tickets[item] == -ticket:
        self.tickets[item] = 0.0
    return self.tickets[item] == ticket


def _first(self: Compiled, heap: int) -> tuple[float, int]:
    rising, entries = self.rising[heap], self.heaps[heap]
    while True:
        head, size = self.heads[heap], self.sizes[heap]
        if head < self.tails[heap] and (size == 0 or _before(rising[head], entries[0])):
            if self.counts(rising[head].item, rising[head].ticket):
                return rising[head].priority, rising[head].item
            self.heads[heap] += 1
        elif size:
            priority, item = entries[0].priority, entries[0].item
            if self.counts(item, entries[0].ticket):
                return priority, item
            entries[0] = entries[size - 1]
            self.sizes[heap] -= 1
            _sift_down(entries, 0, size - 1)
        else:
            return np.inf, -1


def _pop(self: Compiled) -> tuple[float, int]:
    first = self.first(0)
    self.remove(first[1])
    return first


def _leave(self: Compiled, item: int) -> None:
    self.tickets[item] = -abs(self.tickets[item])


@numba.njit(inline="always")
def _set(entries: Array, at: int, priority: float, ticket: float, item: int) -> None:
    entries[at].priority = priority
    entries[at].ticket = ticket
    entries[at].item = item


@numba.njit(inline="always")
def _before(a: np.record, b: np.record) -> bool:
    return a.priority < b.priority or (a.priority == b.priority and a.ticket < b.ticket)


@numba.njit
def _sift_down(entries: Array, at: int, size: int) -> None:
    priority, ticket, item = entries[at].priority, entries[at].ticket, entries[at].item
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _before(entries[child + 1], entries[child]):
            child += 1
        below = entries[child]
        if priority < below.priority or (priority == below.priority and ticket < below.ticket):
            break
        entries[at] = below
        at = child
    _set(entries, at, priority, ticket, item)


# Methods without default arguments: those with some are compiled twice.
_HEAPS = {"push_to": _push_to, "sink": _sink, "compact": _compact, "counts": _counts}
_HEAPS |= {"first": _first, "pop": _pop, "remove": _leave, "discard": _leave}
_HEAPS |= {
    "push": lambda self, item, priority, ticket=0.0: self.push_to(item, priority, ticket, 0),
    "least": lambda self: self.first(0)[0],
    "has": lambda self, item: self.tickets[item] > 0.0,
}
