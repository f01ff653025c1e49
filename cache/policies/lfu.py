"""Least frequently used."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class LFU(PriorityPolicy):
    """Evicts the block with the fewest accesses since its content came in; ties: oldest access.

    Counts start at one and end with the eviction (in-cache LFU, without aging).
    """

    name = "lfu"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.accesses
