"""Frequency- and cost-aware eviction."""

from __future__ import annotations

import math
from collections.abc import Callable

from cache.policies.priority import BlockHistory, PriorityPolicy


class FrequencyCost(PriorityPolicy):
    """Evicts the block with the fewest hits per second since its first hit (vLLM, request 27539).

    The value is frozen when the block is released; a block without a hit has none.  The proposal
    multiplies it with the cost of a block, which is the same for all blocks, and counts less than a
    second as one.  Where time is unknown a request takes a second.
    """

    name = "frequency_cost"

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        super().start(capacity, next_use)
        self._first_hits: dict[int, float] = {}

    def priority(self, block: BlockHistory) -> float:
        if block.accesses == 1:  # new content
            self._first_hits.pop(block.block, None)
            return 0.0
        seconds = block.request.time_ms / 1000
        now = block.accessed if math.isnan(seconds) else seconds
        first = self._first_hits.setdefault(block.block, now)
        return (block.accesses - 1) / max(1.0, now - first)
