"""Most recently used."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class MRU(PriorityPolicy):
    """Evicts the block accessed last.  Suits cyclic scans and little else: a lower bound."""

    name = "mru"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return -block.accessed
