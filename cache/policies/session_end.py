"""Hints that a session has ended."""

from __future__ import annotations

import math
from collections.abc import Iterable

from cache.policies.priority import BlockHistory, PriorityPolicy

_ENDED = 2.0**40
"""Requests by which a block of a session that has ended is aged."""


class SessionEnd(PriorityPolicy):
    """LRU that is told which request is the last of its session (vLLM, RFC 52113).

    The blocks of that request go first, the oldest of them before others.  A session are the
    requests that share their first block, so a system prompt that all share hides its end.  The
    hint comes from the future and is always right: an upper bound on such hints.
    """

    name = "session_end"
    needs_future = True

    def release_many(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        self._has_ended = bool(blocks) and math.isinf(self._next_use(blocks[-1]))
        super().release_many(blocks)

    def priority(self, block: BlockHistory) -> float:
        return block.accessed - (_ENDED if self._has_ended else 0.0)
