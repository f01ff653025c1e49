"""``QueuePolicy`` in compiled code: the methods that its subclasses call.

A queue or a ghost list is a circular list, ordered by age, in an array of records.  The array has a
record for each block, then a record for the ghost of each block, then the end of each list.  The
index of its end identifies a list.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from cache.policies.queues import GhostList, Queue, QueuePolicy
from cache.replay.containers import LINKS, empty_lists, link, unlink
from cache.replay.operations import Array, Compiled, Operations
from cache.traces.trace import Trace

_OF_ALL = "list", "value"
"""The end of the list (0: in no list), and a value.  The value of a ghost record or of a block is
the ghost's value; the value of an end is the capacity of the list."""
_OF_ENDS = "length", "num_released"
_OF_BLOCKS = "in_use", "is_new"
_FIELDS = [(name, np.int64) for name in (*_OF_ALL, *_OF_ENDS, *_OF_BLOCKS)]
_RECORD = np.dtype([*LINKS.descr, *_FIELDS])


def operations_of(policy: QueuePolicy, trace: Trace, capacity: int) -> Operations:
    """The unchanged methods of a subclass, and its attributes after ``start``."""
    policy.start(capacity)
    num_blocks = trace.num_unique_blocks
    ends: list[int] = []  # capacities of the lists

    def converted(value: Any) -> Any:
        if isinstance(value, Queue | GhostList):
            ends.append(min(getattr(value, "capacity", 0), 2**62))
            return 2 * num_blocks + len(ends) - 1
        if isinstance(value, list):
            return np.array([converted(one) for one in value])
        if isinstance(value, dict):
            array = np.zeros(num_blocks + 1, np.int64)  # -1 is an index, too
            array[list(value)] = list(value.values())
            return array
        return value

    replaced = {"_keys", "_queue_of", "_pinned", "_newcomers", "_returning"}
    state = {name: converted(of) for name, of in vars(policy).items() if name not in replaced}
    records = empty_lists(2 * num_blocks + len(ends), _RECORD)
    records["value"][2 * num_blocks :] = ends
    own: dict[str, Callable] = {}
    for base in reversed(type(policy).__mro__):
        if issubclass(base, QueuePolicy) and base is not QueuePolicy:
            own |= {name: of for name, of in vars(base).items() if inspect.isfunction(of)}
    state |= {"records": records, "num_blocks": num_blocks}
    return Operations(policy.name, _METHODS | own, state)


def insert(self: Compiled, block: int, key: int, parent: int, depth: int) -> None:
    self.records[block].in_use = self.records[block].is_new = 1
    self._admit(block)
    self.records[block].value = 0


def pin(self: Compiled, block: int) -> None:
    record = self.records[block]
    record.in_use = 1
    self.records[record.list].num_released -= 1


def release_many(self: Compiled, blocks: Array) -> None:
    for block in blocks:
        record = self.records[block]
        record.in_use = 0
        self.records[record.list].num_released += 1
        if record.is_new:
            record.is_new = 0
            self._settle(block)
        else:
            self._hit(block)


def evict(self: Compiled) -> int:
    block = self._choose()
    self._remove(block)
    return block


def _remove(self: Compiled, block: int) -> None:
    self.records[self.records[block].list].num_released -= 1
    self._unlink(block)


def _move(self: Compiled, block: int, queue: int) -> None:
    record = self.records[block]
    is_released = 1 - record.in_use
    if record.list:
        self.records[record.list].num_released -= is_released
        self._unlink(block)
    self._link(block, queue)
    self.records[queue].num_released += is_released


def _oldest(self: Compiled, queue: int) -> int:
    while True:
        block = self.records[queue].newer
        if not self.records[block].in_use:
            return block
        self._move(block, queue)


def _remember(self: Compiled, ghosts: int, block: int, value: int = 1) -> None:
    ghost = self.num_blocks + block
    self._link(ghost, ghosts)
    self.records[ghost].value = value
    if self.records[ghosts].length > self.records[ghosts].value:
        self._forget_oldest(ghosts)


def _recall(self: Compiled, ghosts: int, key: int) -> bool:
    ghost = self.num_blocks + key
    if self.records[ghost].list != ghosts:
        return False
    self.records[key].value = self.records[ghost].value
    self._unlink(ghost)
    return True


def _forget_oldest(self: Compiled, ghosts: int) -> None:
    if self.records[ghosts].length:
        self._unlink(self.records[ghosts].newer)


def _link(self: Compiled, at: int, end: int) -> None:
    """Make ``at`` the newest record of the list with ``end``."""
    records = self.records
    link(records, at, end)
    records[at].list = end
    records[end].length += 1


def _unlink(self: Compiled, at: int) -> None:
    records = self.records
    unlink(records, at)
    records[records[at].list].length -= 1
    records[at].list = 0


_ON_BLOCKS = (insert, pin, release_many, evict, _remove, _move, _oldest)
_ON_GHOSTS = (_remember, _recall, _forget_oldest, _link, _unlink)
_METHODS = {function.__name__: function for function in _ON_BLOCKS + _ON_GHOSTS} | {
    "miss": QueuePolicy.miss,
    "remove": lambda self, block: self._remove(block),
    "_settle": lambda self, block: self._move(block, self.records[block].list),
    "_first_of": QueuePolicy._first_of,
    "_length": lambda self, queue: self.records[queue].length,
    "_num_released": lambda self, queue: self.records[queue].num_released,
    "_head": lambda self, queue: self.records[queue].newer,
    "_is_in": lambda self, block, queue: self.records[block].list == queue,
    "_in_use": lambda self, block: self.records[block].in_use,
    "_recalled": lambda self, block: self.records[block].value,
}
