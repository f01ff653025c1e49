"""LRU that knows which blocks are used again."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class ReuseOracle(PriorityPolicy):
    """Evicts the oldest block that is never used again; without such a block, by LRU.

    It shows the gain of a perfect predictor of *whether* a block returns.  Unlike Belady's optimum,
    the policy does not use *when* a block returns.  It needs the whole trace in advance.
    """

    name = "reuse_oracle"
    needs_future = True

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.accessed - (1e15 if block.next_use == float("inf") else 0.0)
