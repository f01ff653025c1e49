"""LRU that knows which blocks are used again."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class ReuseOracle(PriorityPolicy):
    """Evicts the oldest block that is never used again; if there is none it is LRU.

    It shows the gain of a perfect predictor of *whether* a block returns.  It does not know *when*,
    as Belady's optimum does.  It needs the whole trace in advance.
    """

    name = "reuse_oracle"
    needs_future = True

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.accessed - (1e15 if block.next_use == float("inf") else 0.0)
