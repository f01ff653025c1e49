"""The offline optimum."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class Belady(PriorityPolicy):
    """Evicts the block whose next use is farthest in the future (Belady, 1966: MIN).

    It needs the whole trace in advance, and is the upper bound of all policies.  Of two blocks
    that the same future request needs, the deeper block was released first and is evicted first.
    """

    name = "belady"
    needs_future = True

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return -block.next_use
