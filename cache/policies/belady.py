"""The offline optimum."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class Belady(PriorityPolicy):
    """Evicts the block whose next use is farthest in the future (Belady, 1966: MIN).

    The policy needs the whole trace in advance, and its hit rate is the upper bound of all
    policies.  If the same request uses two blocks next, the deeper block is evicted first.
    """

    name = "belady"
    needs_future = True

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return -block.next_use
