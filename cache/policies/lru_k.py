"""LRU-K."""

import math

from cache.checks import at_least
from cache.policies.priority import BlockHistory, PriorityPolicy


class LRUK(PriorityPolicy):
    """Evicts the block whose ``k``-th last access is oldest (O'Neil et al., SIGMOD 1993).

    Blocks with fewer than ``k`` accesses since their content was inserted are evicted first, in the
    order of insertion.  Accesses of evicted content are forgotten (no retained information period).
    """

    name = "lru_k"

    def __init__(self, k: int = 2) -> None:
        self.k = self.memory_size = at_least(1, "k", k, maximum=256)

    @staticmethod
    def priority(block: BlockHistory) -> float:
        k = len(block.memory)
        block.memory[int(block.accesses - 1) % k] = block.accessed
        return block.memory[int(block.accesses) % k] if block.accesses >= k else -math.inf
