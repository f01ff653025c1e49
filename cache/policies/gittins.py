"""Gittins indices of classes of blocks."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from cache.checks import at_least
from cache.policies.base import UNKNOWN_REQUEST, EvictionPolicy, Request

if TYPE_CHECKING:
    import numpy as np

    from cache.policies.base import Replay
    from cache.traces.trace import Trace


_REMEMBERED = ("uses", "class_", "time")
"""Fields of an evicted block that are kept under its key."""


class Gittins(EvictionPolicy):
    """Evicts the block that returns least per block and time, by its class and age (PageLab).

    The class of a block: log2 of its uses, whether it ended its prompt, and log4 of the output
    length of the request that released it.  The policy counts at which age blocks of each class
    return, evicted ones included while their keys are remembered (``ghost_ratio`` capacities).
    With S(a) the share still out at age a, the worth of a block is its Gittins index
    max over T > age of (S(age) - S(T)) / integral of S from age to T: the hits per block and
    time if it is kept until T at most (Gittins, 1979).  Each class is a queue in LRU order, and an
    eviction compares the heads.  A block that resident blocks continue is not evicted.

    Before there are statistics it is LRU.  It can fall below LRU: see ``safeguarded``.  Time is
    ``Request.time_ms``, or a second per release if that is unknown.  Compiled in
    ``cache.simulate``.  Raises ValueError for a negative ``ghost_ratio``.
    """

    name = "gittins"

    def __init__(self, ghost_ratio: float = 16.0) -> None:
        if not ghost_ratio >= 0:
            raise ValueError(f"ghost_ratio must not be negative, got {ghost_ratio}")
        self.ghost_ratio = ghost_ratio

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        self._state, self._rows = _rules().make_state(at_least(1, "capacity", capacity))
        self._num_ghosts = int(self.ghost_ratio * capacity)
        self._ghosts: OrderedDict[Hashable, list] = OrderedDict()
        self._free_rows = list(range(capacity))
        self._row_of: dict[int, int] = {}  # of a block
        self._contents: dict[int, tuple[int, Hashable]] = {}  # of a row: its block and key
        self._row_with: dict[Hashable, int] = {}
        self._released: dict[int, None] = {}  # in the order of release
        self._num_releases = 0
        self._request = UNKNOWN_REQUEST
        self._now = -math.inf

    def tell(self, request: Request) -> None:
        self._request = request
        if request.time_ms > self._now:
            self._now = self._state["now"] = request.time_ms

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        if block in self._row_of:
            raise ValueError(f"insert: block {block} holds content already")
        row = self._row_of[block] = self._row_with[key] = self._free_rows.pop()
        self._contents[row] = block, key
        self._rows[row]["uses"] = 0
        if (ghost := self._ghosts.pop(key, None)) is not None:
            for field, value in zip(_REMEMBERED, ghost, strict=True):
                self._rows[row][field] = value
        _rules().insert(self._rows, row, self._row_with.get(parent, -1))

    def pin(self, block: int) -> None:
        if block not in self._released:
            raise ValueError(f"pin: block {block} is not a released one")
        del self._released[block]
        _rules().pin(self._rows, self._row_of[block])

    def release(self, block: int) -> None:
        self.release_many((block,))

    def release_many(self, blocks: Iterable[int]) -> None:
        import numpy as np

        path = []
        for block in blocks:
            if block not in self._row_of or block in self._released:
                raise ValueError(f"release: block {block} is not in use")
            self._released[block] = None
            path.append(self._row_of[block])
        if math.isnan(self._request.time_ms):
            self._now = max(self._now, 0.0) + 1000.0
        output_tokens = float(self._request.output_tokens)
        _rules().release(
            self._state,
            self._rows,
            np.array(path, np.int64),
            self._num_releases,
            self._now,
            output_tokens,
        )
        self._num_releases += len(path)

    def evict(self) -> int:
        if not self._released:
            raise IndexError("evict: no block is released")
        block = self.evict_before(self._num_releases)
        if block is None:  # every block has children: the owner released heads first
            block = next(iter(self._released))
            self.remove(block)
        return block

    def evict_before(self, release: int) -> int | None:
        row = _rules().choose(self._state, self._rows, release)
        if row < 0:
            return None
        block, _ = self._contents[row]
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        del self._released[block]
        row = self._row_of.pop(block)
        _, key = self._contents.pop(row)
        _rules().evict(self._rows, row)
        self._free_rows.append(row)
        if self._row_with.get(key) == row:
            del self._row_with[key]
        self._ghosts[key] = [self._rows[row][field] for field in _REMEMBERED]
        if len(self._ghosts) > self._num_ghosts:
            self._ghosts.popitem(last=False)

    def __len__(self) -> int:
        return len(self._released)

    def compiled_replay(self, budget: float = math.inf) -> Replay | None:
        """The replay within the safeguard of ``budget``; none if a subclass changes methods."""
        if type(self) is not Gittins:
            return None
        return functools.partial(self._replay, budget)

    def _replay(self, budget: float, trace: Trace, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        from cache.replay.gittins import replay

        state, rows = _rules().make_state(max(trace.num_unique_blocks, 1))
        return replay(
            state, rows, capacity, int(self.ghost_ratio * capacity), float(budget),
            trace.block_ids, trace.offsets, trace.timestamps_ms, trace.output_lengths,
        )  # fmt: skip


def _rules() -> ModuleType:
    """Imported at the first use, since numba is slow to import."""
    from cache.policies import gittins_compiled

    return gittins_compiled
