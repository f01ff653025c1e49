"""Random eviction."""

import random
from collections.abc import Callable

from cache.policies.base import EvictionPolicy


class Bag:
    """A set of blocks to sample uniformly.  Every operation is O(1)."""

    def __init__(self) -> None:
        self._items: list[int] = []
        self._position: dict[int, int] = {}

    def add(self, item: int) -> None:
        self._position[item] = len(self._items)
        self._items.append(item)

    def remove(self, item: int) -> None:
        """Raises KeyError if ``item`` is not in the bag."""
        position, last = self._position[item], self._items.pop()
        if last != item:  # the last item fills the gap
            self._items[position] = last
            self._position[last] = position
        del self._position[item]

    def draw(self, generator: random.Random) -> int:
        """Remove and return an item, sampled uniformly."""
        item = self._items[int(generator.random() * len(self._items))]
        self.remove(item)
        return item

    def __contains__(self, item: int) -> bool:
        return item in self._position

    def __len__(self) -> int:
        return len(self._items)


class Random(EvictionPolicy):
    """Evicts a released block, sampled uniformly by a generator seeded with ``seed``.

    A policy that uses any information should beat this baseline.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        self._generator = random.Random(self.seed)
        self._released = Bag()

    def pin(self, block: int) -> None:
        self._released.remove(block)

    def release(self, block: int) -> None:
        if block in self._released:
            raise ValueError(f"release: block {block} is released already")
        self._released.add(block)

    def evict(self) -> int:
        if not self._released:
            raise IndexError("evict: no block is released")
        return self._released.draw(self._generator)

    def remove(self, block: int) -> None:
        self._released.remove(block)

    def __len__(self) -> int:
        return len(self._released)
