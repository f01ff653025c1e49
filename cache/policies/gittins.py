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
        from cache.policies import gittins_compiled

        memory = int(self.ghost_ratio * capacity)
        self._blocks, self._states = gittins_compiled.empty(capacity, memory)
        self._keys: dict[int, Hashable] = {}
        self._released: set[int] = set()
        self._ghosts = GhostList(memory)
        self._request = UNKNOWN_REQUEST
        self._now = 0.0
        """Time of the latest request, ms; if unknown, each release counts as a second."""

    def tell(self, request: Request) -> None:
        self._request = request
        if request.time_ms > self._now:
            self._now = request.time_ms

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        from cache.policies import gittins_compiled

        if block in self._keys:
            raise ValueError(f"insert: block {block} holds content already")
        self._keys[block] = key
        self._blocks = gittins_compiled.with_room(self._blocks, block)
        gittins_compiled.insert(self._blocks, block, self._ghosts.take(key))

    def pin(self, block: int) -> None:
        from cache.policies import gittins_compiled

        if block not in self._released:
            raise ValueError(f"pin: block {block} is not a released one")
        self._released.remove(block)
        gittins_compiled.pin(self._blocks, block, self._states)

    def release(self, block: int) -> None:
        self.release_many((block,))

    def release_many(self, blocks: Iterable[int]) -> None:
        import numpy as np

        from cache.policies import gittins_compiled

        blocks = list(blocks)
        for block in blocks:
            if block not in self._keys or block in self._released:
                raise ValueError(f"release: block {block} is not in use")
        self._released.update(blocks)
        if math.isnan(self._request.time_ms):
            self._now += 1000.0
        output = float(self._request.output_tokens)
        released = np.array(blocks, np.int32)
        gittins_compiled.release(self._blocks, released, self._states, self._now, output)

    def evict(self) -> int:
        from cache.policies import gittins_compiled

        if not self._released:
            raise IndexError("evict: no block is released")
        block = int(gittins_compiled.evict(self._blocks, self._states, self._now))
        self._released.remove(block)
        self._give_up(block)
        return block

    def remove(self, block: int) -> None:
        self.pin(block)
        self._give_up(block)

    def _give_up(self, block: int) -> None:
        self._ghosts.add(self._keys.pop(block), self._blocks[block : block + 1].copy())

    def __len__(self) -> int:
        return len(self._released)

    def compiled_replay(self) -> Callable[[Trace, int], tuple[np.ndarray, np.ndarray]] | None:
        if type(self) is not Gittins:  # a subclass may change a method
            return None
        from cache.traces.trace import Trace

        one = Trace.from_requests([(0, 1, 1, [0])], name="one", block_size=1)
        self._replay(one, 1)  # compiles it before any time is measured
        return self._replay

    def _replay(self, trace: Trace, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        from cache.policies import gittins_compiled

        return gittins_compiled.replay(
            trace.block_ids,
            trace.offsets,
            capacity,
            trace.timestamps_ms,
            trace.output_lengths,
            *gittins_compiled.empty(trace.num_unique_blocks, int(self.ghost_ratio * capacity)),
        )
