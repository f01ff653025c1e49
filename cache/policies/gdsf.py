"""Greedy-dual size frequency."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class GDSF(PriorityPolicy):
    """GDSF (Cherkasova, HP Labs 1998), with blocks of equal size and cost.

    Value = accesses + the value of the last victim: frequency that ages as the cache turns over,
    which for equal sizes is LFU with dynamic aging (LFU-DA, Arlitt et al. 2000).  A newcomer starts
    from the value of the victim that made room for it, as the paper has it; libCacheSim 0.3.5
    starts it from the victim before, so its hit counts differ slightly.
    """

    name = "gdsf"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.clock + block.accesses
