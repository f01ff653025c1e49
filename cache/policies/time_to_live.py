"""A time to live for requests that call a tool."""

import math

from cache.policies.priority import BlockHistory, OwnState, PriorityPolicy, record


class TimeToLive(PriorityPolicy):
    """LRU, but blocks of a request that calls a tool count as used ``ttl_s`` seconds later.

    Follows Continuum (arXiv 2511.02230), which keeps the blocks of such requests for a time to live
    (TTL): a tool answers in seconds, a person in minutes.  The block whose TTL ends first is
    evicted first.  Blocks of other requests have a TTL of 0.  Continuum estimates TTLs from
    durations of tools and the cost of recomputing the blocks; here all tools have the same TTL.

    If tool calls or times are unknown, the policy is LRU.  Raises ValueError for a negative
    ``ttl_s``.
    """

    name = "ttl"

    def __init__(self, ttl_s: float = 60.0) -> None:
        if not ttl_s >= 0:
            raise ValueError(f"ttl_s must not be negative, got {ttl_s}")
        self.ttl_s = ttl_s

    def own_state(self, capacity: int) -> OwnState:
        return record(ttl_ms=1000.0 * self.ttl_s)

    @staticmethod
    def priority(block: BlockHistory, own: OwnState) -> float:
        now = block.request.time_ms
        if math.isnan(now):
            return block.accessed
        return now + own.ttl_ms if block.request.calls_tool == 1.0 else now
