"""Workload-aware eviction: the chance of a return, by category of request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cache.checks import at_least
from cache.policies.lazy_heap import LazyHeap
from cache.policies.leaves import LeafPolicy, Node


@dataclass
class _Category:
    """A category of requests with similar return times."""

    releases: float = 0.0
    returns: float = 0.0
    waited_ms: float = 0.0
    """Sum of the times until these returns."""
    leaves: LazyHeap = field(default_factory=LazyHeap)
    """By their last access."""

    def log_chance(self, age_ms: float, life_ms: float) -> float:
        """Log probability of a return between ages ``age_ms`` and ``age_ms + life_ms``."""
        share = (self.returns + 1) / (self.releases + 2)
        rate = (self.returns + 1) / (self.waited_ms + life_ms)
        return math.log(share) - rate * age_ms + math.log(-math.expm1(-rate * life_ms))


class WorkloadAware(LeafPolicy):
    """The policy of "KVCache Cache in the Wild" (Wang et al., USENIX ATC 2025).

    Return times in a category are modelled as exponential.  They give each block a probability of
    use within the time that blocks stay in the cache.  The block with the smallest goes first, of
    equal ones the deeper.  Within a category that is the least recently used block, so an eviction
    compares one block per category.

    The publication classifies requests by kind and turn.  Here only the turn is known: one more
    than the turn of the deepest block found, up to ``max_turn``.  What it leaves
    open: shares and rates are counted over all releases of a category so far, a life is the
    moving average of the age of victims (weight 0.01), and only leaves are evicted.
    """

    name = "workload_aware"

    def __init__(self, max_turn: int = 8) -> None:
        self.max_turn = at_least(1, "max_turn", max_turn)

    def _reset(self) -> None:
        self._categories = [_Category() for _ in range(self.max_turn)]
        self._life = 0.0

    def _access(self, nodes: list[Node]) -> None:
        turn = 0
        for node in nodes:
            if node.memo:
                turn = min(node.memo[0] + 1, self.max_turn - 1)
                break
        for node in nodes:
            if node.memo:
                former, time = node.memo
                self._categories[former].returns += 1
                self._categories[former].waited_ms += self._now - time
            self._categories[turn].releases += 1
            node.memo = turn, self._now

    def _offer(self, node: Node) -> None:
        turn, time = node.memo
        self._categories[turn].leaves.push(node, time)

    def _withdraw(self, node: Node) -> None:
        self._categories[node.memo[0]].leaves.remove(node)

    def _take(self) -> Node | None:
        life = max(self._life, 1.0)
        least = None
        for category in self._categories:
            if category.leaves:
                time, node = category.leaves.first()
                chance = category.log_chance(self._now - time, life), -node.depth
                if least is None or chance < least[0]:
                    least = chance, category, time
        if least is None:
            return None
        _, category, time = least
        _, node = category.leaves.pop()
        age = self._now - time
        self._life = self._life + 0.01 * (age - self._life) if self._life else age
        return node
