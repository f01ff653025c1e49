"""Hints that a session has ended."""

from cache.policies.priority import BlockHistory, PriorityPolicy

_ENDED = 2.0**40
"""Subtracted from the last access of a block of an ended session, in requests."""


class SessionEnd(PriorityPolicy):
    """LRU that is told which request is the last of its session (vLLM, RFC 52113).

    The blocks of that request are evicted before all others, oldest first, unless they are used
    again.  Without session end hints the policy is LRU.  The hints of a trace are always right, so
    the hit rate is an upper bound of the hit rate with a real client's hints.
    """

    name = "session_end"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.accessed - (_ENDED if block.request.ends_session == 1.0 else 0.0)
