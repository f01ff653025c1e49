"""Workload-aware eviction by the probability of reuse in each category of requests."""

import math
from collections.abc import Sequence

from cache.checks import at_least
from cache.policies.lazy_heap import LazyHeap
from cache.policies.leaves import LeafPolicy


class WorkloadAware(LeafPolicy):
    """The policy of "KVCache Cache in the Wild" (Wang et al., USENIX ATC 2025).

    Return times in a category are modelled as exponential.  This gives each block a probability of
    reuse within the time that blocks stay in the cache.  The block with the smallest probability is
    evicted; ties: the deeper block.  Within a category this is the least recently used block, so an
    eviction compares one block per category.

    The publication classifies requests by kind and turn.  Here only the turn is known: one more
    than the turn of the deepest block that hit, up to ``max_turn``.  PageLab adds three choices.
    Shares and rates are counted over all releases of a category so far.  The time that blocks stay
    is a moving average of the age of victims (weight 0.01).  Only leaves are evicted.
    """

    name = "workload_aware"

    def __init__(self, max_turn: int = 8) -> None:
        self.max_turn = at_least(1, "max_turn", max_turn, maximum=256)

    def _reset(self) -> None:
        # For each category: releases, returns, total time until return, leaves by last access.
        self._releases, self._returns = [0.0] * self.max_turn, [0.0] * self.max_turn
        self._waited_ms = [0.0] * self.max_turn
        self._leaves_of: list[LazyHeap[int]] = [LazyHeap() for _ in range(self.max_turn)]
        self._life = 0.0

    def _access(self, blocks: Sequence[int]) -> None:
        turn = 0
        for block in blocks:
            if self._nodes[block].value >= 0:
                turn = min(int(self._nodes[block].value) + 1, self.max_turn - 1)
                break
        for block in blocks:
            node = self._nodes[block]
            if node.value >= 0:
                self._returns[int(node.value)] += 1
                self._waited_ms[int(node.value)] += self._now - node.time
            self._releases[turn] += 1
            node.value, node.time = turn, self._now

    def _offer(self, block: int) -> None:
        self._enter(int(self._nodes[block].value), block, self._nodes[block].time)

    def _withdraw(self, block: int) -> None:
        self._leave(int(self._nodes[block].value), block)

    def _enter(self, turn: int, block: int, time: float) -> None:
        self._leaves_of[turn].push(block, time)

    def _leave(self, turn: int, block: int) -> None:
        self._leaves_of[turn].remove(block)

    def _first_of(self, turn: int) -> int:
        """The first leaf of a category; -1 if it has no leaf."""
        return self._leaves_of[turn].first()[1] if self._leaves_of[turn] else -1

    def _log_chance(self, turn: int, age_ms: float, life_ms: float) -> float:
        """Log probability of a return between ages ``age_ms`` and ``age_ms + life_ms``."""
        share = (self._returns[turn] + 1) / (self._releases[turn] + 2)
        rate = (self._returns[turn] + 1) / (self._waited_ms[turn] + life_ms)
        return math.log(share) - rate * age_ms + math.log(-math.expm1(-rate * life_ms))

    def _take(self) -> int:
        life, least, least_chance = max(self._life, 1.0), -1, 0.0
        for turn in range(self.max_turn):
            block = self._first_of(turn)
            if block >= 0:
                node = self._nodes[block]
                chance = self._log_chance(turn, self._now - node.time, life)
                if least < 0 or (chance, -node.depth) < (least_chance, -self._nodes[least].depth):
                    least, least_chance = block, chance
        if least >= 0:
            self._withdraw(least)
            age = self._now - self._nodes[least].time
            self._life = self._life + 0.01 * (age - self._life) if self._life else age
        return least
