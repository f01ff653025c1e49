"""Frequency- and cost-aware eviction."""

import math

from cache.policies.priority import BlockHistory, PriorityPolicy


class FrequencyCost(PriorityPolicy):
    """Evicts the block with the fewest hits per second since its first hit (vLLM, request 27539).

    The value is computed at each release; without hits it is 0.  The proposal multiplies it by the
    cost of a block, which is the same for all blocks here.  Times below a second count as one
    second.  If times are unknown, each request counts as one second.
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
