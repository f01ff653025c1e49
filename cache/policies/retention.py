"""Retention priorities that expire."""

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import NamedTuple

from cache.policies.lazy_heap import LazyHeap
from cache.policies.leaves import LeafPolicy

DEFAULT_PRIORITY = 35


class Retained(NamedTuple):
    """A range of block positions in every prompt, and how long its blocks are kept."""

    first: int
    end: int | None
    """Position after the last block; None: the range ends with the answer."""
    priority: int
    """0 to 100; blocks outside all ranges have priority 35."""
    duration_ms: float | None = None
    """Time from the last use until the priority falls to 35.  None: it never falls."""


class Retention(LeafPolicy):
    """Evicts the block with the least priority; ties: the least recently used (TensorRT-LLM).

    ``ranges``: ``Retained`` objects or tuples of their fields; the first range that contains a
    block applies.  By default the first block of a prompt, often shared, has priority 100 for a
    minute.  In TensorRT-LLM each request has its own ranges, in tokens; here ranges are in blocks
    and the same for all requests.  A block whose priority expires is queued behind the blocks of
    priority 35, as in TensorRT-LLM.

    Raises ValueError for an empty range, a priority outside 0 to 100 and a negative duration.
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
        rows = [*self.ranges, Retained(0, None, DEFAULT_PRIORITY)]
        self._table = [
            [first, math.inf if end is None else end, priority, -1 if ms is None else ms]
            for first, end, priority, ms in rows
        ]
        self._expiring: LazyHeap[int] = LazyHeap()
        self._places = 0

    def _access(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            priority, duration = self._retained(self._nodes[block].depth)
            self._place(block, priority)
            if duration >= 0 and priority != DEFAULT_PRIORITY:
                self._expiring.push(block, self._now + duration)

    def _offer(self, block: int) -> None:
        node = self._nodes[block]
        self._leaves.push(block, node.value, node.time)

    def _pinned(self, block: int) -> None:
        self._expiring.discard(block)

    def _gone(self, block: int) -> None:
        self._expiring.discard(block)

    def _take(self) -> int:
        while math.inf > self._expiring.least() <= self._now:
            block = self._expiring.pop()[1]
            self._place(block, DEFAULT_PRIORITY)
            if self._nodes[block].released and not self._nodes[block].children:
                self._withdraw(block)
                self._offer(block)
        return self._first_leaf()

    def _retained(self, depth: int) -> tuple[float, float]:
        """The priority of a block and its duration in ms; -1: without end."""
        at = 0
        while not self._table[at][0] <= depth < self._table[at][1]:
            at += 1
        return self._table[at][2], self._table[at][3]

    def _place(self, block: int, priority: float) -> None:
        self._places += 1
        self._nodes[block].value = priority
        self._nodes[block].time = self._places
