"""Policies that rank blocks by one number: the block with the smallest number is evicted."""

from __future__ import annotations

import abc
import inspect
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from cache.policies.base import UNKNOWN_REQUEST, EvictionPolicy, RequestInfo
from cache.policies.lazy_heap import LazyHeap
from cache.policies.queues import GhostList, num_ghosts

if TYPE_CHECKING:
    import numpy as np

OwnState: TypeAlias = "np.record"


def record(**fields: float) -> OwnState:
    """Make a record of float64 numbers, ``fields``, for ``own_state``."""
    import numpy as np

    return np.rec.array([tuple(fields.values())], dtype=[(name, np.float64) for name in fields])[0]


class BlockHistory(NamedTuple):
    """The facts about a block from which ``priority`` is computed, at the release of the block.

    Times count requests (1, 2, ...), so blocks released together have the same time.
    """

    block: int
    """Id of the block."""
    accessed: int
    """Time of this release."""
    inserted: int
    """Time of the first release after the content was inserted."""
    accesses: int
    """Number of releases since the content was inserted, this release included (1, 2, ...)."""
    next_use: float
    """Time of the next use of the content; ``inf`` for never, NaN if the future is unknown."""
    depth: int
    """Position of the block in its prompt, in blocks from 0."""
    clock: float
    """Priority of the last victim, 0 before the first eviction (GreedyDual's inflation value)."""
    children: int = 0
    """Number of resident blocks that continue this block."""
    total_accesses: int = 0
    """``accesses``, plus the accesses before an eviction if the ghost is remembered."""
    interval: float = math.nan
    """Time since the previous release of the content, even if evicted since; NaN: no release."""
    request: RequestInfo = UNKNOWN_REQUEST
    """The request that releases the block."""
    memory: MutableSequence[float] = []  # noqa: RUF012
    """``memory_size`` numbers that ``priority`` may change; zeros when content is inserted."""


@dataclass(slots=True, eq=False)
class _Record:
    """State of a resident block."""

    depth: int
    key: Hashable
    parent: Hashable | None
    accessed: int = 0  # like ``before`` from the ghost, until the next release
    before: int = 0
    inserted: int = 0
    accesses: int = 0
    priority: float = math.nan
    queued: int = 0  # when it was queued with this priority; settles ties


class PriorityPolicy(EvictionPolicy):
    """Evicts the released block with the smallest ``priority``; ties: the block queued first.

    A subclass defines ``priority``, a static method that maps a :class:`BlockHistory` to a number.
    The policy calls ``priority`` once per release.  A block whose priority did not change keeps its
    queue position.  ``cache.simulate`` compiles ``priority`` if numba can, or runs it in Python.
    """

    ghost_ratio: float = 0.0
    """Number of evicted contents whose accesses are remembered, as a multiple of the capacity."""

    memory_size: int = 0
    """Length of ``block.memory``: numbers kept for each block in the pool."""

    _own: OwnState | None = None

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        priority = vars(cls).get("priority")
        if inspect.isfunction(priority) and "self" not in inspect.signature(priority).parameters:
            raise TypeError(
                f"policy {cls.name!r}: priority{inspect.signature(priority)} needs @staticmethod, "
                "or self as its first parameter"
            )

    @staticmethod
    @abc.abstractmethod
    def priority(*args: Any, **kwargs: Any) -> float:
        """The value of keeping a block; the block with the smallest value is evicted first.

        The argument is a :class:`BlockHistory`.  If the class defines ``own_state``, a second
        argument is its record.
        """

    def own_state(self, capacity: int) -> OwnState | None:
        """State that ``priority`` may read and change: ``record(...)`` of options or counters.

        Called at each start.  ``cache.simulate`` compiles the record with ``priority``, which then
        sees all numbers as float64.
        """
        return None

    @classmethod
    def describing_priority(cls) -> Callable[[BlockHistory], float] | None:
        """``priority`` if it is static and alone decides the order of evictions, else None."""
        priority = inspect.getattr_static(cls, "priority")
        return priority.__func__ if cls.compilable and isinstance(priority, staticmethod) else None

    def rank(self, block: BlockHistory) -> float:
        """``priority(block)``.  Raises ValueError if the priority is not a number."""
        own = self._own
        priority = self.priority(block) if own is None else self.priority(block, own)
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
        if self.needs_future and next_use is None:
            raise ValueError(
                f"policy {self.name!r} needs the future: use it with cache.simulate, "
                "or start it with next_use=a function from block to time of next use"
            )
        self._next_use = next_use
        self._own = self.own_state(capacity)
        self._request = UNKNOWN_REQUEST
        self._ghosts = GhostList(num_ghosts(self.name, self.ghost_ratio, capacity))
        self._children: Counter[Hashable] = Counter()  # by key of the parent, which may be evicted
        self._memory: dict[int, list[float]] = {}
        self._records: dict[int, _Record] = {}
        self._released: LazyHeap[int] = LazyHeap()
        self._queued = 0
        self._time = 0
        self._clock = 0.0

    def tell(self, request: RequestInfo) -> None:
        self._request = request

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        if block in self._records:
            raise ValueError(f"insert: block {block} holds content already")
        record = self._records[block] = _Record(depth, key, parent)
        self._memory[block] = [0.0] * self.memory_size
        if parent is not None:
            self._children[parent] += 1
        if ghost := self._ghosts.take(key):
            record.accessed, record.before = ghost.accessed, ghost.before + ghost.accesses

    def pin(self, block: int) -> None:
        if block not in self._released:
            raise ValueError(f"pin: block {block} is not a released one")
        self._released.remove(block)

    def release(self, block: int) -> None:
        self.release_many((block,))

    def release_many(self, blocks: Iterable[int]) -> None:
        self._time += 1
        for block in blocks:
            if block in self._released:
                raise ValueError(f"release: block {block} is released already")
            self._release(block)

    def evict(self) -> int:
        if not self._released:
            raise IndexError("evict: no block is released")
        self._clock, block = self._released.pop()
        self._give_up(block)
        return block

    def remove(self, block: int) -> None:
        self._released.remove(block)
        self._give_up(block)

    def _give_up(self, block: int) -> None:
        record = self._records.pop(block)
        del self._memory[block]
        if record.parent is not None:
            self._children[record.parent] -= 1
            if not self._children[record.parent]:
                del self._children[record.parent]
        if self.ghost_ratio:
            self._ghosts.add(record.key, record)

    def __len__(self) -> int:
        return len(self._released)

    def __iter__(self) -> Iterator[int]:
        return iter(self._released)

    def _next_use_of(self, block: int) -> float:
        return math.nan if self._next_use is None else self._next_use(block)

    def _release(self, block: int) -> None:
        """Rank a released block.  The replay compiles this method unchanged."""
        record = self._records[block]
        inserted = record.inserted or self._time
        priority = self.rank(
            BlockHistory(
                block,
                self._time,
                inserted,
                record.accesses + 1,
                self._next_use_of(block),
                record.depth,
                self._clock,
                self._children[record.key],
                record.before + record.accesses + 1,
                self._time - record.accessed if record.accessed else math.nan,
                self._request,
                self._memory[block],
            )
        )
        queued = record.queued if priority == record.priority else self._queued + 1
        self._released.push(block, priority, queued)
        self._queued = max(self._queued, queued)
        record.priority, record.queued = priority, queued
        record.inserted = inserted
        record.accessed = self._time
        record.accesses += 1
