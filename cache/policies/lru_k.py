"""LRU-K."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from cache.checks import at_least
from cache.policies.priority import BlockHistory, PriorityPolicy


class LRUK(PriorityPolicy):
    """LRU-K (O'Neil, O'Neil and Weikum, SIGMOD 1993): evicts the oldest ``k``-th last access.

    Blocks with fewer than ``k`` accesses since their content came in go first, in the order in
    which they came in.  Nothing is remembered of evicted content (no retained information
    period).
    """

    name = "lru_k"

    def __init__(self, k: int = 2) -> None:
        self.k = at_least(1, "k", k)

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        super().start(capacity, next_use)
        self._last_accesses: dict[int, deque[int]] = {}

    def priority(self, block: BlockHistory) -> float:
        if block.accesses == 1:  # new content
            self._last_accesses[block.block] = deque(maxlen=self.k)
        accesses = self._last_accesses[block.block]
        accesses.append(block.accessed)
        return accesses[0] if len(accesses) == self.k else -math.inf
