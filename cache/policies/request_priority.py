"""Priorities that requests bring."""

from __future__ import annotations

from cache.policies.leaves import LeafPolicy, Node


class RequestPriority(LeafPolicy):
    """SGLang's ``priority``: the least goes first, of equal ones the least recent.

    A block has the highest priority of all requests that used it since it came in.  A request's
    priority is ``Sequence.eviction_priority``, in the engine ``SamplingParams.eviction_priority``.
    The requests of a trace have none, so there it is LRU.
    """

    name = "priority"

    def _reset(self) -> None:
        self._uses = 0

    def _access(self, nodes: list[Node]) -> None:
        for node in nodes:
            self._uses += 1
            priority = self._request.priority
            node.memo = max(priority, node.memo[0]) if node.memo else priority, self._uses
