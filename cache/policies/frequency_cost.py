"""Frequency- and cost-aware eviction."""

import math

from cache.policies.priority import BlockHistory, PriorityPolicy


class FrequencyCost(PriorityPolicy):
    """Evicts the block with the fewest hits per second since its first hit (vLLM, request 27539).

    The value is frozen when the block is released; a block without a hit has none.  The proposal
    multiplies it with the cost of a block, which is the same for all blocks, and counts less than a
    second as one.  Where time is unknown a request takes a second.
    """

    name = "frequency_cost"
    memory_size = 1  # the time of the first hit

    @staticmethod
    def priority(block: BlockHistory) -> float:
        seconds = block.request.time_ms / 1000
        now = block.accessed if math.isnan(seconds) else seconds
        if block.accesses == 2:
            block.memory[0] = now
        return (block.accesses - 1) / max(1.0, now - block.memory[0])
