"""FLOP-aware eviction."""

from __future__ import annotations

from cache.checks import finite
from cache.policies.leaves import LeafPolicy, Node


class Marconi(LeafPolicy):
    """Evicts the leaf of least recency + ``alpha`` * FLOP efficiency (Pan et al., MLSys 2025).

    Both are normalised to [0, 1] over the cached blocks: recency from the oldest to the newest
    access, and FLOPs saved per byte.  With attention alone the latter grows with the depth of a
    block in its prompt, so deep blocks stay longer than under LRU.  ``alpha`` = 0 is LRU.

    The publication serves models with recurrent layers, admits only some of their states, and fits
    ``alpha`` to the first part of the traffic.  Here every block is admitted and ``alpha`` is
    fixed.  Normalising at each eviction takes a pass over the cache.  Here a block gets its score
    when it becomes a leaf, relative to the deepest block so far and the last access of the latest
    victim.
    """

    name = "marconi"

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = finite("alpha", alpha)

    def _reset(self) -> None:
        self._requests = self._oldest = 0
        self._deepest = 1

    def _access(self, nodes: list[Node]) -> None:
        self._requests += 1
        for node in nodes:
            node.memo = self._requests
            self._deepest = max(self._deepest, node.depth)

    def _offer(self, node: Node) -> None:
        span = self._requests - self._oldest
        efficiency = node.depth / self._deepest
        self._leaves.push(node, node.memo + self.alpha * span * efficiency)

    def _take(self) -> Node | None:
        if node := super()._take():
            self._oldest = max(self._oldest, node.memo)
        return node
