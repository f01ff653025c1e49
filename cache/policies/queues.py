"""Policies that keep blocks in queues and remember keys of evicted blocks."""

from __future__ import annotations

import abc
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from cache.policies.base import EvictionPolicy


class Queue(OrderedDict[int, None]):
    """Block ids from the oldest to the newest: a hash map over a linked list, O(1) everywhere."""

    num_released = 0
    """Number of blocks of the queue that may be evicted."""


class QueuePolicy(EvictionPolicy):
    """Keeps every resident block in one of several queues.

    A subclass defines the queue of a new block (``_admit``), the effect of an access to a resident
    block (``_hit``) and the block to give up (``_choose``).  Blocks in use stay in their queues, so
    that queue lengths agree with the papers.  A search for a victim moves blocks in use from the
    head of a queue to its end.

    A subclass that remembers evicted keys creates the list ``_ghosts`` in ``_reset``, adds keys in
    ``_choose`` (with ``_remember``) and reads the value of a returned key with ``_recalled``.

    The replay compiles the methods of built-in subclasses unchanged.  So they may use only numbers,
    queues, ghost lists, dicts keyed by block, and the methods of this class.
    """

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        super().start(capacity)
        self._keys: dict[int, Hashable] = {}
        self._queue_of: dict[int, Queue] = {}  # empty if a subclass keeps its own list
        self._pinned: set[int] = set()
        self._newcomers: set[int] = set()
        self._ghosts = GhostList(0)
        self._returning: dict[Hashable, int] = {}  # values of ghosts to be admitted next
        self._reset()

    def miss(self, key: Hashable) -> None:
        self._recall(self._ghosts, key)

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        if block in self._keys:
            raise ValueError(f"insert: block {block} holds content already")
        self._keys[block] = key
        self._pinned.add(block)
        self._newcomers.add(block)
        self._admit(block)
        self._returning.pop(key, None)

    def pin(self, block: int) -> None:
        if block in self._pinned:
            raise ValueError(f"pin: block {block} is in use already")
        if block not in self._keys:
            raise KeyError(block)
        self._pinned.add(block)
        if (queue := self._queue_of.get(block)) is not None:
            queue.num_released -= 1

    def release(self, block: int) -> None:
        if block not in self._pinned:
            raise ValueError(f"release: block {block} is released already")
        self._pinned.remove(block)
        if (queue := self._queue_of.get(block)) is not None:
            queue.num_released += 1
        if block in self._newcomers:
            self._newcomers.remove(block)
            self._settle(block)
        else:
            self._hit(block)

    def evict(self) -> int:
        if not len(self):
            raise IndexError("evict: no block is released")
        block = self._choose()
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        self._remove(block)
        del self._keys[block]

    def __len__(self) -> int:
        return len(self._keys) - len(self._pinned)

    @abc.abstractmethod
    def _reset(self) -> None:
        """Make empty queues."""

    @abc.abstractmethod
    def _admit(self, block: int) -> None:
        """Put a new block into a queue with ``_move``."""

    @abc.abstractmethod
    def _hit(self, block: int) -> None:
        """A resident block was accessed."""

    @abc.abstractmethod
    def _choose(self) -> int:
        """Return the block to evict, without removing it.  Called if there is a released block."""

    def _settle(self, block: int) -> None:
        """A new block was released for the first time.

        Blocks are inserted head first and released tail first.  The tail must become the oldest.
        """
        self._queue_of[block].move_to_end(block)

    def _remove(self, block: int) -> None:
        """Remove the released ``block`` from its queue."""
        queue = self._queue_of.pop(block)
        queue.num_released -= 1
        del queue[block]

    def _move(self, block: int, queue: Queue) -> None:
        """Make ``block`` the newest of ``queue``, and remove it from its previous queue."""
        is_released = block not in self._pinned
        if (old := self._queue_of.get(block)) is not None:
            del old[block]
            old.num_released -= is_released
        queue[block] = None
        queue.num_released += is_released
        self._queue_of[block] = queue

    def _oldest(self, queue: Queue) -> int:
        """The oldest released block of ``queue``.  Raises IndexError if all blocks are in use."""
        while queue.num_released:
            block = next(iter(queue))
            if block not in self._pinned:
                return block
            queue.move_to_end(block)
        raise IndexError("all blocks of the queue are in use")

    def _first_of(self, queues: Iterable[Queue]) -> int:
        """The oldest released block of the first queue with a released block."""
        for queue in queues:
            if self._num_released(queue):
                return self._oldest(queue)
        raise AssertionError("a released block is in none of the queues")

    def _length(self, queue: Queue | GhostList) -> int:
        return len(queue)

    def _num_released(self, queue: Queue) -> int:
        return queue.num_released

    def _head(self, queue: Queue) -> int:
        """The oldest block of ``queue``, in use or not."""
        return next(iter(queue))

    def _is_in(self, block: int, queue: Queue) -> bool:
        return self._queue_of[block] is queue

    def _in_use(self, block: int) -> bool:
        return block in self._pinned

    def _remember(self, ghosts: GhostList, block: int, value: int = 1) -> None:
        """Add the key of ``block``, the next victim, to ``ghosts``."""
        ghosts.add(self._keys[block], value)

    def _recall(self, ghosts: GhostList, key: Hashable) -> bool:
        """Remove the missed ``key`` from ``ghosts``.  Returns False if it was not there."""
        if (value := ghosts.take(key)) is None:
            return False
        self._returning[key] = value
        return True

    def _recalled(self, block: int) -> int:
        """The value that a ghost list had for the new ``block``; 0 without a ghost."""
        return self._returning.get(self._keys[block], 0)

    def _forget_oldest(self, ghosts: GhostList) -> None:
        ghosts.forget_oldest()


class GhostList:
    """Maps keys of evicted blocks to values, and forgets the oldest key first."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def add(self, key: Hashable, value: Any = 0) -> None:
        """Add ``key`` as the newest key, and forget the oldest keys beyond the capacity."""
        self._values.pop(key, None)
        self._values[key] = value
        while len(self._values) > self.capacity:
            self.forget_oldest()

    def take(self, key: Hashable) -> Any:
        """Forget ``key`` and return its value; None if ``key`` was not remembered."""
        return self._values.pop(key, None)

    def forget_oldest(self) -> None:
        """Forget the oldest key, if there is a key."""
        if self._values:
            self._values.popitem(last=False)

    def __len__(self) -> int:
        return len(self._values)


def num_ghosts(policy: str, ratio: float, capacity: int) -> int:
    """``ratio`` x capacity.  Raises ValueError if ``ratio`` is negative or infinite."""
    if not 0 <= ratio < math.inf:
        reason = f"ghost_ratio must be finite and not negative, got {ratio}"
        raise ValueError(f"policy {policy!r}: {reason}")
    return int(min(ratio * capacity, 2**62))
