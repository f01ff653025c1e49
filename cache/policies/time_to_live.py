"""A time to live for requests that call a tool."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cache.policies.priority import BlockHistory, PriorityPolicy, record

if TYPE_CHECKING:
    import numpy as np


class TimeToLive(PriorityPolicy):
    """LRU in which the blocks of a request that calls a tool count as used ``ttl_s`` seconds later.

    After Continuum (arXiv 2511.02230), which keeps the blocks of such requests for a time: a tool
    answers in seconds, a person in minutes.  The block whose time ended first goes first, and the
    time of blocks of other requests ends at once.  Continuum estimates its time from the tools'
    durations and the cost of computing the blocks again; here it is one for all tools.

    Where the calls of tools or the time are not known it is LRU.  Raises ValueError for a negative
    ``ttl_s``.
    """

    name = "ttl"

    def __init__(self, ttl_s: float = 60.0) -> None:
        if not ttl_s >= 0:
            raise ValueError(f"ttl_s must not be negative, got {ttl_s}")
        self.ttl_s = ttl_s

    def own_state(self, capacity: int) -> np.record:
        return record(ttl_ms=1000.0 * self.ttl_s)

    @staticmethod
    def priority(block: BlockHistory, own: np.record) -> float:
        now = block.request.time_ms
        if math.isnan(now):
            return block.accessed
        return now + own.ttl_ms if block.request.calls_tool == 1.0 else now
