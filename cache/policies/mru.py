"""Most recently used."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class MRU(PriorityPolicy):
    """Evicts the block accessed last.  Good for cyclic scans only; serves as a lower bound."""

    name = "mru"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return -block.accessed
