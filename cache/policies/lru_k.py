"""LRU-K."""

import math

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
        self.k = self.memory_size = at_least(1, "k", k, maximum=256)

    @staticmethod
    def priority(block: BlockHistory) -> float:
        k = len(block.memory)
        block.memory[int(block.accesses - 1) % k] = block.accessed
        return block.memory[int(block.accesses) % k] if block.accesses >= k else -math.inf
