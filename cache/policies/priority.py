"""Policies that are one number per block: the block with the smallest number goes first."""

from __future__ import annotations

import abc
import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

from cache.policies.base import EvictionPolicy


class BlockHistory(NamedTuple):
    """What a priority may depend on, taken when the block is released.

    Time counts requests (1, 2, ...): blocks released together share it.
    """

    block: int
    """Id of the block."""
    accessed: int
    """Time of this release."""
    inserted: int
    """Time of the first release since the content came in."""
    accesses: int
    """Number of releases since the content came in, this one included (1, 2, ...)."""
    next_use: float
    """When the content is used next; ``inf`` for never, NaN if the future is not known."""
    depth: int
    """Position of the block in its prompt, in blocks from 0."""
    clock: float
    """Priority of the last victim, 0 before the first (the inflation value of GreedyDual)."""


class _Record:
    """State of one resident block."""

    __slots__ = ("accesses", "depth", "inserted", "pinned", "priority", "queued", "ticket")

    def __init__(self, depth: int) -> None:
        self.inserted = 0
        self.accesses = 0
        self.depth = depth
        self.priority = math.nan
        self.ticket = 0  # number of the queue entry that counts; settles ties
        self.queued = False  # whether that entry is still in the queue
        self.pinned = True


class PriorityPolicy(EvictionPolicy):
    """Evicts the released block with the smallest ``priority``; ties: first queued goes first.

    A subclass defines ``priority``, a static method from :class:`BlockHistory` to a number, which
    is asked once per release.  A block whose priority did not change keeps its place in the queue.
    Written in arithmetic that numba understands it runs compiled in ``cache.simulate``;
    anything else runs as the Python it is.

    The queue is a FIFO of rising entries, from whose end a smaller newcomer drives the larger ones
    into a heap, with lazy deletion.  Entries that come in order (all of LRU's and FIFO's, those
    used once under LFU, those never used again under Belady) cost O(1), the others O(log n).
    """

    compilable: bool = False
    """Set by a subclass that overrides methods whose result ``priority`` still describes."""

    @staticmethod
    @abc.abstractmethod
    def priority(block: BlockHistory) -> float:
        """The value of keeping the block; the smallest is evicted first."""

    def rank(self, block: BlockHistory) -> float:
        """``priority(block)``; ValueError if that is not a number."""
        priority = self.priority(block)
        try:
            is_number = not math.isnan(priority)
        except TypeError:
            is_number = False
        if not is_number:
            raise ValueError(
                f"policy {self.name!r}: the priority of block {block.block} is {priority!r}, "
                "not a number"
            )
        return priority

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        self._next_use = self._require_future(next_use) if self.needs_future else next_use
        self._records: dict[int, _Record] = {}
        self._rising: deque[tuple[float, int, int]] = deque()  # (priority, ticket, block)
        self._heap: list[tuple[float, int, int]] = []
        self._tickets = 0
        self._time = 0
        self._clock = 0.0
        self._num_released = 0

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        if block in self._records:
            raise ValueError(f"insert: block {block} holds content already")
        self._records[block] = _Record(depth)

    def pin(self, block: int) -> None:
        record = self._records[block]
        if record.pinned:
            raise ValueError(f"pin: block {block} is in use already")
        record.pinned = True
        self._num_released -= 1

    def release(self, block: int) -> None:
        self._time += 1
        self._release(block)

    def release_many(self, blocks: Iterable[int]) -> None:
        self._time += 1
        for block in blocks:
            self._release(block)

    def evict(self) -> int:
        if not self._num_released:
            raise IndexError("evict: no block is released")
        while True:
            priority, ticket, block = self._pop_entry()
            record = self._records.get(block)
            if record is None or record.ticket != ticket:
                continue
            record.queued = False
            if record.pinned:
                continue  # queued again when it is released
            del self._records[block]
            self._num_released -= 1
            self._clock = priority
            return block

    def discard(self, block: int) -> None:
        if self._records[block].pinned:
            raise ValueError(f"discard: block {block} is in use")
        del self._records[block]
        self._num_released -= 1

    def __len__(self) -> int:
        return self._num_released

    def __iter__(self) -> Iterator[int]:
        released = [
            (record.priority, record.ticket, block)
            for block, record in self._records.items()
            if not record.pinned
        ]
        return (block for _, _, block in sorted(released))

    def _release(self, block: int) -> None:
        record = self._records[block]
        if not record.pinned:
            raise ValueError(f"release: block {block} is released already")
        inserted = record.inserted or self._time
        priority = self.rank(
            BlockHistory(
                block,
                self._time,
                inserted,
                record.accesses + 1,
                math.nan if self._next_use is None else self._next_use(block),
                record.depth,
                self._clock,
            )
        )
        record.inserted = inserted
        record.accesses += 1
        record.pinned = False
        self._num_released += 1
        if priority != record.priority:
            self._tickets += 1
            record.priority = priority
            record.ticket = self._tickets
            while self._rising and priority < self._rising[-1][0]:
                heapq.heappush(self._heap, self._rising.pop())
            self._rising.append((priority, record.ticket, block))
        elif not record.queued:  # it was dropped while in use and takes its place again
            heapq.heappush(self._heap, (priority, record.ticket, block))
        record.queued = True
        if len(self._rising) + len(self._heap) > 2 * len(self._records) + 64:
            self._drop_stale_entries()

    def _pop_entry(self) -> tuple[float, int, int]:
        if not self._heap or (self._rising and self._rising[0] < self._heap[0]):
            return self._rising.popleft()
        return heapq.heappop(self._heap)

    def _drop_stale_entries(self) -> None:
        self._rising = deque(
            sorted(
                (record.priority, record.ticket, block)
                for block, record in self._records.items()
                if record.queued
            )
        )
        self._heap = []
