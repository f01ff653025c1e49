"""Tail-optimised LRU."""

from cache.checks import finite
from cache.policies.priority import BlockHistory, OwnState, PriorityPolicy, record

_FIRST = 2.0**40
"""Subtracted from the last access of a spare block, in requests."""


class TailOptimizedLRU(PriorityPolicy):
    """T-LRU (Zhang, Li, Moallemi and Peng, NeurIPS 2025): spare blocks first, then LRU.

    A conversation has L blocks; its next prompt is expected to be ``next_blocks`` longer and is
    answered in time if at most ``threshold_blocks`` of its blocks must be computed.  So blocks from
    depth L + next_blocks - threshold_blocks are spare: hits there would not shorten the longest
    waits.  Spare blocks are evicted first, by LRU.

    L includes the answer.  The publication has no prefixes shared by conversations; here the last
    request that used a block sets L.  Without facts about requests the policy is LRU.
    """

    name = "tlru"

    def __init__(self, threshold_blocks: float = 8.0, next_blocks: float = 1.0) -> None:
        self.threshold_blocks = float(finite("threshold_blocks", threshold_blocks))
        self.next_blocks = float(finite("next_blocks", next_blocks))

    def own_state(self, capacity: int) -> OwnState:
        return record(spare=self.threshold_blocks - self.next_blocks)

    @staticmethod
    def priority(block: BlockHistory, own: OwnState) -> float:
        request = block.request
        length = request.prompt_blocks
        if request.output_tokens > 0:
            length *= 1.0 + request.output_tokens / request.prompt_tokens
        return block.accessed - (_FIRST if block.depth >= length - own.spare else 0.0)
