"""SGLang's segmented LRU."""

from cache.checks import at_least
from cache.policies.priority import BlockHistory, OwnState, PriorityPolicy, record

_PROTECTED = 2.0**40
"""Added to the last access of a block that was used at least ``threshold`` times, in requests."""


class SGLangSLRU(PriorityPolicy):
    """Evicts by LRU: first the blocks used fewer than ``threshold`` times, then all others.

    This is the policy that SGLang's radix cache calls ``slru`` (pull request 18843).  Its segments
    have no size limit, so a block that was used ``threshold`` times stays until no block with fewer
    uses is left.  PageLab's ``slru`` is the policy of Karedla et al., with segments of equal size.
    """

    name = "sglang_slru"

    def __init__(self, threshold: int = 2) -> None:
        self.threshold = at_least(1, "threshold", threshold)

    def own_state(self, capacity: int) -> OwnState:
        return record(threshold=self.threshold)

    @staticmethod
    def priority(block: BlockHistory, own: OwnState) -> float:
        return block.accessed + (_PROTECTED if block.accesses >= own.threshold else 0.0)
