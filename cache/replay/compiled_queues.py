"""``QueuePolicy`` in compiled code: what the methods of its subclasses call.

A queue or a list of ghosts is a circular list by age in one array of records.  There are first a
record for each block, then one for the ghost of each, and at last the end of each list; the number
of its end stands for a queue.
"""

from __future__ import annotations

import inspect

import numpy as np

from cache.policies.queues import GhostList, Queue, QueuePolicy
from cache.replay.operations import Operations
from cache.traces.trace import Trace

_RECORD = np.dtype(
    [
        ("older", np.int64),  # neighbours in the list
        ("newer", np.int64),
        ("list", np.int64),  # its end; 0: in none
        ("length", np.int32),  # of an end
        ("num_released", np.int32),  # of an end
        ("in_use", np.bool_),
        ("is_new", np.bool_),
        ("value", np.int64),  # of a ghost; of a block what its ghost held; of an end the capacity
    ],
    align=True,
)


def operations_of(policy: QueuePolicy, trace: Trace, capacity: int) -> Operations:
    """The methods of a subclass as they are, and its attributes after ``start``."""
    policy.start(capacity)
    num_blocks = trace.num_unique_blocks
    ends: list[int] = []  # their capacities

    def converted(value):
        if isinstance(value, Queue | GhostList):
            ends.append(getattr(value, "capacity", 0))
            return 2 * num_blocks + len(ends) - 1
        if isinstance(value, list):
            return np.array([converted(one) for one in value])
        if isinstance(value, dict):
            array = np.zeros(num_blocks + 1, np.int64)  # -1 is an index, too
            for block, number in value.items():
                array[block] = number
            return array
        return value

    state = {
        name: converted(value)
        for name, value in vars(policy).items()
        if name not in _REPLACED
    }  # fmt: skip
    records = np.zeros(2 * num_blocks + len(ends), _RECORD)
    for end, size in enumerate(ends, 2 * num_blocks):
        records[end]["older"] = records[end]["newer"] = end
        records[end]["value"] = size
    own = {n: f for n, f in vars(type(policy)).items() if inspect.isfunction(f)}
    own = {n: f for n, f in own.items() if n not in ("__init__", "_reset")}
    state |= {"records": records, "num_blocks": num_blocks}
    return Operations(policy.name, _METHODS | own, state)


_REPLACED = {"_keys", "_queue_of", "_pinned", "_newcomers", "_returning"}


def _link(self, at, end):
    """Make ``at`` the newest of a list."""
    records = self.records
    newest = records[end].older
    records[at].older, records[at].newer, records[at].list = newest, end, end
    records[newest].newer = records[end].older = at
    records[end].length += 1


def _unlink(self, at):
    records = self.records
    older, newer = records[at].older, records[at].newer
    records[older].newer, records[newer].older = newer, older
    records[records[at].list].length -= 1
    records[at].list = 0


def insert(self, block, key, parent, depth):
    self.records[block].in_use = self.records[block].is_new = True
    self._admit(block)
    self.records[block].value = 0


def pin(self, block):
    record = self.records[block]
    record.in_use = True
    self.records[record.list].num_released -= 1


def release_many(self, blocks):
    for block in blocks:
        record = self.records[block]
        record.in_use = False
        self.records[record.list].num_released += 1
        if record.is_new:
            record.is_new = False
            self._settle(block)
        else:
            self._hit(block)


def evict(self):
    block = self._choose()
    self._remove(block)
    return block


def remove(self, block):
    self._remove(block)


def _settle(self, block):
    self._move(block, self.records[block].list)


def _remove(self, block):
    self.records[self.records[block].list].num_released -= 1
    self._unlink(block)


def _move(self, block, queue):
    record = self.records[block]
    is_released = not record.in_use
    if record.list:
        self.records[record.list].num_released -= is_released
        self._unlink(block)
    self._link(block, queue)
    self.records[queue].num_released += is_released


def _oldest(self, queue):
    while True:
        block = self.records[queue].newer
        if not self.records[block].in_use:
            return block
        self._move(block, queue)


def _num_released(self, queue):
    return self.records[queue].num_released


def _length(self, queue):
    return self.records[queue].length


def _head(self, queue):
    return self.records[queue].newer


def _is_in(self, block, queue):
    return self.records[block].list == queue


def _in_use(self, block):
    return self.records[block].in_use


def _remember(self, ghosts, block, value=1):
    ghost = self.num_blocks + block
    self._link(ghost, ghosts)
    self.records[ghost].value = value
    if self.records[ghosts].length > self.records[ghosts].value:
        self._forget_oldest(ghosts)


def _recall(self, ghosts, key):
    ghost = self.num_blocks + key
    if self.records[ghost].list != ghosts:
        return False
    self.records[key].value = self.records[ghost].value
    self._unlink(ghost)
    return True


def _recalled(self, block):
    return self.records[block].value


def _forget_oldest(self, ghosts):
    if self.records[ghosts].length:
        self._unlink(self.records[ghosts].newer)


_METHODS = {name: f for name, f in globals().items() if inspect.isfunction(f)}
del _METHODS["operations_of"]
_METHODS |= {"miss": QueuePolicy.miss, "_first_of": QueuePolicy._first_of}
