"""FLOP-aware eviction."""

from collections.abc import Sequence

from cache.checks import finite
from cache.policies.leaves import LeafPolicy


class Marconi(LeafPolicy):
    """Evicts the leaf with least recency + ``alpha`` * FLOP efficiency (Pan et al., MLSys 2025).

    Both are normalised to [0, 1] over the cached blocks.  The efficiency, FLOPs saved per byte,
    grows with a block's depth for attention layers, so deep blocks stay longer than under LRU.
    ``alpha`` = 0 is LRU.

    The publication serves models with recurrent layers, admits only some of their states, and fits
    ``alpha`` to the first part of the traffic.  Here every block is admitted and ``alpha`` is
    fixed.  Normalising at each eviction would take a pass over the cache.  So a block is scored
    when it becomes a leaf, relative to the deepest block so far and the last access of the latest
    victim.
    """

    name = "marconi"

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = float(finite("alpha", alpha))

    def _reset(self) -> None:
        self._requests = 0
        self._oldest = 0.0
        self._deepest = 1

    def _access(self, blocks: Sequence[int]) -> None:
        self._requests += 1
        for block in blocks:
            node = self._nodes[block]
            node.value = self._requests
            self._deepest = max(self._deepest, node.depth)

    def _offer(self, block: int) -> None:
        node = self._nodes[block]
        span = self._requests - self._oldest
        efficiency = node.depth / self._deepest
        self._leaves.push(block, node.value + self.alpha * span * efficiency)

    def _take(self) -> int:
        block = self._first_leaf()
        if block >= 0:
            self._oldest = max(self._oldest, self._nodes[block].value)
        return block
