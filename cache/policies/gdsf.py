"""Greedy-dual size frequency."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class GDSF(PriorityPolicy):
    """GDSF (Cherkasova, HP Labs 1998), with blocks of equal size and cost.

    Value = accesses + value of the last victim, so old accesses count less with each eviction.  For
    equal sizes this is LFU with dynamic aging (LFU-DA, Arlitt et al. 2000).  A new block starts
    from the value of the victim that made room for it, as in the paper.  libCacheSim 0.3.5 starts
    it from the previous victim's value, so its hit counts differ slightly.
    """

    name = "gdsf"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.clock + block.accesses
