"""Hints that a session has ended."""

from cache.policies.priority import BlockHistory, PriorityPolicy

_ENDED = 2.0**40
"""Requests by which a block of a session that has ended is aged."""


class SessionEnd(PriorityPolicy):
    """LRU that is told which request is the last of its session (vLLM, RFC 52113).

    The blocks of that request are evicted first, the oldest before the newer ones, until they are
    used again.  Without session end hints it is LRU.  The hints of a trace are always right, so its
    hit rate is an upper bound of the hit rate with the hints of a real client.
    """

    name = "session_end"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.accessed - (_ENDED if block.request.ends_session == 1.0 else 0.0)
