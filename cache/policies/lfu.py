"""Least frequently used."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class LFU(PriorityPolicy):
    """Evicts the block with the fewest accesses since its insertion; ties: the oldest access.

    The count of a block starts at one and is forgotten at the eviction (in-cache LFU, no aging).
    """

    name = "lfu"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.accesses
