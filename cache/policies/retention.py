"""Retention priorities that expire."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import NamedTuple

from cache.policies.lazy_heap import LazyHeap
from cache.policies.leaves import LeafPolicy, Node

DEFAULT_PRIORITY = 35


class Retained(NamedTuple):
    """How long blocks of every prompt are kept, by their position."""

    first: int
    end: int | None
    """The block after the last; None: to the end of the prompt and its answer."""
    priority: int
    """0 to 100; blocks outside all ranges have 35."""
    duration_ms: float | None = None
    """Time from the last use until the priority falls to 35.  None: it never falls."""


class Retention(LeafPolicy):
    """TensorRT-LLM's retention: the least priority goes first, of equal ones the least recent.

    ``ranges``: ``Retained`` objects or tuples of their fields; the first range that contains a
    block applies.  By default the first block of a prompt, which system prompts share, has priority
    100 for a minute.  TensorRT-LLM takes ranges of tokens with each request; here ranges are in
    blocks and the same for all requests.  A block whose priority expires is queued behind the
    blocks of priority 35, as in TensorRT-LLM.

    Raises ValueError for a range that is empty, a priority outside 0 to 100, a negative duration.
    """

    name = "retention"

    def __init__(self, ranges: Iterable[tuple] = ((0, 1, 100, 60_000.0),)) -> None:
        self.ranges = tuple(Retained(*fields) for fields in ranges)
        for retained in self.ranges:
            first, end, priority, duration = retained
            if first < 0 or (end is not None and end <= first):
                raise ValueError(f"ranges: {retained} has no block")
            if not 0 <= priority <= 100:
                raise ValueError(f"ranges: priority needs 0 to 100, got {retained}")
            if duration is not None and not (isinstance(duration, Real) and duration >= 0):
                raise ValueError(f"ranges: duration_ms must not be negative, got {retained}")

    def _reset(self) -> None:
        self._expiring = LazyHeap()
        self._places = 0

    def _access(self, nodes: list[Node]) -> None:
        for node in nodes:
            retained = self._retained(node.depth)
            self._place(node, retained.priority)
            if retained.duration_ms is not None and retained.priority != DEFAULT_PRIORITY:
                self._expiring.push(node, self._now + retained.duration_ms)

    def pin(self, block: int) -> None:
        super().pin(block)
        if (node := self._nodes[block]) in self._expiring:
            self._expiring.remove(node)

    def _take(self) -> Node | None:
        while self._expiring and self._expiring.first()[0] <= self._now:
            _, node = self._expiring.pop()
            self._place(node, DEFAULT_PRIORITY)
            if node in self._leaves:
                self._withdraw(node)
                self._offer(node)
        node = super()._take()
        if node in self._expiring:
            self._expiring.remove(node)
        return node

    def _retained(self, depth: int) -> Retained:
        for retained in self.ranges:
            if retained.first <= depth < (math.inf if retained.end is None else retained.end):
                return retained
        return Retained(0, None, DEFAULT_PRIORITY)

    def _place(self, node: Node, priority: int) -> None:
        self._places += 1
        node.memo = priority, self._places
