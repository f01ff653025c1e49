"""Our own: what returns least per block and time goes, within what LRU's hits allow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from cache.checks import at_least
from cache.policies.base import UNKNOWN_REQUEST, EvictionPolicy, Request

if TYPE_CHECKING:
    import numpy as np

    from cache.policies.base import Replay
    from cache.traces.trace import Trace


class Hazard(EvictionPolicy):
    """Gittins indices of learnt classes of blocks, with LRU as a safeguard (PageLab).

    A request leaves *runs*: neighbouring blocks of its path that are alike.  A run has a class, of
    the accesses of its blocks; whether it ends the path; the request's output length; the interval
    since the previous use; how many turns of a session the path has seen; and how many of its
    blocks are new, all but the second on a logarithmic scale.  For each class and age, in bins of
    doubling width, the policy counts blocks that were still out and blocks that returned, evicted
    ones included.  A class without much history takes the hazard of the class that lacks the last
    feature (``shrinkage``: the weight of that, in runs of one block; n blocks of a run weigh
    sqrt(n)), and that of blocks used four times or more at least 0.9, at ages at which anything has
    returned.  With S the chance to be still out, the worth of keeping a block is its Gittins index

        index(class, age) = max over T > age of (S(age) - S(T)) / integral of S from age to T,

    returns per block and time if it is kept until T at the longest.  The last block of the run with
    the smallest index goes first, a block that others continue never before them.

    The safeguard: it never has more than ``budget`` x references hits less than an LRU cache of its
    size.  It follows that cache, and so knows its own balance: budget x references, and its hits,
    less those of LRU.  At most so many blocks may be *missing*, which LRU would hold; otherwise it
    evicts only what LRU holds no longer, of that the least worth.  Then every block that is missing
    can be asked for, and the balance pays for each.  It counts up to a block per block of the
    cache, as no more can be missing, so that a lead of former days is not lost unnoticed.  All this
    holds where requests come one after the other, as in ``cache.simulate``.

    It remembers ``ghost_ratio`` times its capacity of evicted contents: by default 2 KB a block of
    the cache, and about as much again for the keys in a manager.  Time is ``Request.time_ms``, or a
    second per request where nobody tells it.  In ``cache.simulate`` all of it is compiled;
    elsewhere each call is.

    Raises ValueError for an option that is negative.
    """

    name = "hazard"

    def __init__(
        self, ghost_ratio: float = 16.0, shrinkage: float = 50.0, budget: float = 0.005
    ) -> None:
        options = {"ghost_ratio": ghost_ratio, "shrinkage": shrinkage, "budget": budget}
        for option, value in options.items():
            if not value >= 0:
                raise ValueError(f"{option} must not be negative, got {value}")
        self._options = options

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        at_least(1, "capacity", capacity)
        most = int(capacity * (1 + self._options["ghost_ratio"])) + capacity
        self._state = _rules().make_state(capacity, most, **self._options)
        self._request = UNKNOWN_REQUEST
        # Contents have numbers, which are given to others when they are forgotten.
        self._numbers: dict[Hashable, int] = {}
        self._keys: list[Hashable] = []
        self._free_numbers: list[int] = []
        self._number_of: dict[int, int] = {}  # of what a block holds
        self._block_with: dict[int, int] = {}
        self._parents: dict[int, int] = {}  # of what is in a block
        self._released: set[int] = set()

    def tell(self, request: Request) -> None:
        self._request = request
        if request.time_ms > self._state.own["now"]:
            self._state.own["now"] = request.time_ms

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        if block in self._number_of:
            raise ValueError(f"insert: block {block} holds content already")
        number = self._numbers.get(key)
        if number is None:
            if not self._free_numbers:
                self._free_numbers.append(len(self._keys))
                self._keys.append(None)
            number = self._free_numbers.pop()
            self._numbers[key], self._keys[number] = number, key
        self._number_of[block], self._block_with[number] = number, block
        self._parents[number] = -1 if parent is None else self._numbers.get(parent, -1)

    def pin(self, block: int) -> None:
        self.pin_many((block,))

    def pin_many(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        for block in blocks:
            if block not in self._released:
                raise ValueError(f"pin: block {block} is not a released one")
        _rules().pin(*self._state, self._path(blocks))
        self._released.difference_update(blocks)

    def release(self, block: int) -> None:
        self.release_many((block,))

    def release_many(self, blocks: Iterable[int]) -> None:
        import numpy as np

        blocks = list(blocks)
        for block in blocks:
            if block not in self._number_of or block in self._released:
                raise ValueError(f"release: block {block} is not in use")
        path = self._path(reversed(blocks))
        parents = np.array([self._parents[number] for number in path.tolist()], np.int64)
        time, output = float(self._request.time_ms), float(self._request.output_tokens)
        _rules().release(*self._state, path, parents, time, output)
        self._released.update(blocks)
        self._recycle()

    def evict(self) -> int:
        if not self._released:
            raise IndexError("evict: no block is released")
        return self.evict_many(1)[0]

    def evict_many(self, count: int) -> list[int]:
        if count > len(self._released):
            raise IndexError(
                f"evict_many: count={count}, but {len(self._released)} blocks are released"
            )
        numbers = _rules().evict(*self._state, count).tolist()
        victims = [self._block_with.pop(number) for number in numbers]
        for block, number in zip(victims, numbers, strict=True):
            del self._number_of[block], self._parents[number]
        self._released.difference_update(victims)
        self._recycle()
        return victims

    def __len__(self) -> int:
        return len(self._released)

    def compiled_replay(self) -> Replay | None:
        if type(self) is not Hazard:
            return None
        _warm_up()
        return self._replay

    def _replay(self, trace: Trace, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        num_contents = max(trace.num_unique_blocks, 1)
        state = _rules().make_state(capacity, num_contents, **self._options)
        return _rules().replay(
            *state, trace.block_ids, trace.offsets, trace.timestamps_ms, trace.output_lengths
        )

    def _path(self, blocks: Iterable[int]) -> np.ndarray:
        import numpy as np

        return np.array([self._number_of[block] for block in blocks], np.int64)

    def _recycle(self) -> None:
        """Free the numbers of forgotten contents, unless they have come back by now."""
        own, contents = self._state.own, self._state.contents
        for number in contents["forgotten"][: own["num_forgotten"]].tolist():
            if number not in self._block_with:
                del self._numbers[self._keys[number]]
                self._free_numbers.append(number)
        own["num_forgotten"] = 0


def _rules() -> ModuleType:
    """Imported when they are used, as numba is slow to import."""
    from cache.policies import hazard_compiled

    return hazard_compiled


@functools.cache
def _warm_up() -> None:
    """Compile the replay by a tiny one, so that no measured time includes that."""
    from cache.traces.trace import Trace

    Hazard()._replay(Trace.from_requests([(0, 1, 1, [0])], name="tiny"), 1)
