"""Random eviction."""

from __future__ import annotations

import random
from collections.abc import Callable

from cache.policies.base import EvictionPolicy


class Random(EvictionPolicy):
    """Evicts a released block drawn uniformly, from a generator seeded with ``seed``.

    The baseline that a policy with any knowledge should beat.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        self._generator = random.Random(self.seed)
        self._released: list[int] = []
        self._position: dict[int, int] = {}

    def pin(self, block: int) -> None:
        self._take(self._position[block])

    def release(self, block: int) -> None:
        if block in self._position:
            raise ValueError(f"release: block {block} is released already")
        self._position[block] = len(self._released)
        self._released.append(block)

    def evict(self) -> int:
        if not self._released:
            raise IndexError("evict: no block is released")
        return self._take(int(self._generator.random() * len(self._released)))

    def __len__(self) -> int:
        return len(self._released)

    def _take(self, position: int) -> int:
        """Remove the block at ``position``, filling the gap with the last one."""
        block, last = self._released[position], self._released.pop()
        if last != block:
            self._released[position] = last
            self._position[last] = position
        del self._position[block]
        return block
