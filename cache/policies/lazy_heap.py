"""A priority queue that supports removal from the middle: a heap with lazy deletion."""

import heapq
import math
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class LazyHeap(Generic[Item]):
    """Hashable items, smallest priority first; ties: first pushed first.

    A priority is a sequence of numbers, compared in order.  Removed items leave stale entries,
    which are dropped at the top or when most entries are stale: O(log n) amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple] = []  # (*priority, ticket, item)
        self._tickets: dict[Item, int] = {}  # of the valid entry of each item
        self._num_tickets = 0

    def push(self, item: Item, *priority: float) -> None:
        """Add ``item``.  Raises ValueError if it is in the heap already."""
        if item in self._tickets:
            raise ValueError(f"push: {item!r} is here already")
        ticket = self._num_tickets = self._num_tickets + 1
        self._tickets[item] = ticket
        heapq.heappush(self._heap, priority + (ticket, item))  # noqa: RUF005
        if len(self._heap) > 2 * len(self._tickets) + 64:
            self._heap = self._counting()
            heapq.heapify(self._heap)

    def remove(self, item: Item) -> None:
        """Remove ``item``.  Raises KeyError if it is not in the heap."""
        del self._tickets[item]

    def discard(self, item: Item) -> None:
        """Remove ``item`` if it is in the heap."""
        self._tickets.pop(item, None)

    def pop(self) -> tuple[float, Item]:
        """Remove the first item.  Returns the first number of its priority, and the item.

        Raises IndexError if the heap is empty.
        """
        first = self.first()
        heapq.heappop(self._heap)
        del self._tickets[first[1]]
        return first

    def first(self) -> tuple[float, Item]:
        """The result of ``pop``, without removal."""
        while True:
            entry = self._heap[0]
            if self._tickets.get(entry[-1]) == entry[-2]:
                return entry[0], entry[-1]
            heapq.heappop(self._heap)

    def least(self) -> float:
        """The first number of the first item's priority; infinity if the heap is empty."""
        return self.first()[0] if self._tickets else math.inf

    def __contains__(self, item: Item) -> bool:
        return item in self._tickets

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Item]:
        """The items in the order in which ``pop`` would return them now."""
        return (entry[-1] for entry in sorted(self._counting()))

    def _counting(self) -> list[tuple]:
        """The entries that are not stale."""
        tickets = self._tickets
        return [entry for entry in self._heap if tickets.get(entry[-1]) == entry[-2]]
