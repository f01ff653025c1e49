"""Gittins indices of classes of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

from cache.policies.base import UNKNOWN_REQUEST, EvictionPolicy, Request
from cache.policies.queues import GhostList

# numba is slow to import, so gittins_compiled is imported where it is used.

if TYPE_CHECKING:
    import numpy as np

    from cache.traces.trace import Trace


class Gittins(EvictionPolicy):
    """Evicts the block that returns least per block and time, by its class and age (PageLab).

    The class of a block: log2 of its uses, log4 of the output length of the request that released
    it, and log4 of the time since the deepest block of the prompt that was known had been used
    before.  The end of a prompt that was used once is in a class of its own.  The policy counts at
    which age blocks of each class return, and how many are still out.  Blocks that are released
    together mostly return together, so each of n counts 1 / sqrt(n).  The worth of a block is the
    Gittins index of its class at its age.  An eviction compares the oldest block of each class.

    A block is remembered, evicted or not, for ``ghost_ratio`` x capacity releases of blocks.
    Before there are statistics it is LRU.  It can fall below LRU: see ``safeguarded``.  Raises
    ValueError for a negative ``ghost_ratio``.
    """

    name = "gittins"

    def __init__(self, ghost_ratio: float = 32.0) -> None:
        if not ghost_ratio >= 0:
            raise ValueError(f"ghost_ratio must not be negative, got {ghost_ratio}")
        self.ghost_ratio = ghost_ratio

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        import numpy as np

        from cache.policies import gittins_compiled

        memory = int(self.ghost_ratio * capacity)
        self._blocks, self._states = gittins_compiled.empty(capacity, memory)
        self._free = list(range(capacity))  # places in ``_blocks``
        self._block_at: list[int] = [-1] * capacity
        self._key_at: list[Hashable] = [None] * capacity
        self._in_use: dict[int, int] = {}  # block to its place
        self._released: dict[int, int] = {}
        self._ghosts = GhostList(memory)
        self._unknown = np.zeros(1, gittins_compiled.BLOCK)
        self._request = UNKNOWN_REQUEST
        self._now = 0.0
        """Time of the latest request, ms; if unknown, each release counts as a second."""

    def tell(self, request: Request) -> None:
        self._request = request
        if request.time_ms > self._now:
            self._now = request.time_ms

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        if block in self._in_use or block in self._released:
            raise ValueError(f"insert: block {block} holds content already")
        place = self._in_use[block] = self._free.pop()
        self._block_at[place], self._key_at[place] = block, key
        history = self._ghosts.take(key)
        self._blocks[place : place + 1] = self._unknown if history is None else history
        self._blocks[place]["older"] = self._blocks[place]["newer"] = place

    def pin(self, block: int) -> None:
        from cache.policies import gittins_compiled

        if block not in self._released:
            raise ValueError(f"pin: block {block} is not a released one")
        place = self._in_use[block] = self._released.pop(block)
        gittins_compiled.unlink(self._blocks, place)

    def release(self, block: int) -> None:
        self.release_many((block,))

    def release_many(self, blocks: Iterable[int]) -> None:
        import numpy as np

        from cache.policies import gittins_compiled

        blocks = list(blocks)
        for block in blocks:
            if block not in self._in_use:
                raise ValueError(f"release: block {block} is not in use")
        for block in blocks:
            self._released[block] = self._in_use.pop(block)
        if math.isnan(self._request.time_ms):
            self._now += 1000.0
        places = np.array([self._released[block] for block in blocks], np.int32)
        output = float(self._request.output_tokens)
        gittins_compiled.release(self._blocks, places, self._states, self._now, output)

    def evict(self) -> int:
        block = self.evict_before(2**62)
        if block is None:
            raise IndexError("evict: no block is released")
        return block

    def evict_before(self, release: int) -> int | None:
        from cache.policies import gittins_compiled

        place = gittins_compiled.evict(self._blocks, self._states, self._now, release)
        return None if place < 0 else self._give_up(self._block_at[place])

    def remove(self, block: int) -> None:
        self.pin(block)
        self._released[block] = self._in_use.pop(block)
        self._give_up(block)

    def _give_up(self, block: int) -> int:
        place = self._released.pop(block)
        self._ghosts.add(self._key_at[place], self._blocks[place : place + 1].copy())
        self._free.append(place)
        return block

    def __len__(self) -> int:
        return len(self._released)

    def replay(self, trace: Trace, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """Hit blocks and evictions of each request of a serial replay, compiled."""
        from cache.policies import gittins_compiled

        return gittins_compiled.replay(
            trace.block_ids,
            trace.offsets,
            capacity,
            trace.timestamps_ms,
            trace.output_lengths,
            *gittins_compiled.empty(trace.num_unique_blocks, int(self.ghost_ratio * capacity)),
        )
