"""Policies that learn the worth of each class of blocks at each age."""

from __future__ import annotations

import abc
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cache.policies.base import UNKNOWN_REQUEST, EvictionPolicy, RequestInfo
from cache.policies.queues import GhostList, num_ghosts

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray"
NUM_BINS = 32
"""Age bin 0 is below 1 ms.  Bin b > 0 begins at 2 ** (b - 1) ms.  The last begins at 12 days."""
BIN_BEGINS = (0.0, *(2.0**bin_ for bin_ in range(NUM_BINS - 1)))
BIN_WIDTHS = (1.0, *BIN_BEGINS[1:])
LEARN_FIRST = 512
"""Number of block releases before the first ``learn``, and the minimum between two calls."""


def bits(number: float) -> int:
    """Number of binary digits of the integer part; 0 for numbers below 1 and for NaN."""
    return math.frexp(number)[1] if number >= 1.0 else 0


def age_bin(age_ms: float) -> int:
    return min(bits(age_ms), NUM_BINS - 1)


def worth_at(worths: Array, age_ms: float) -> float:
    """Interpolate ``worths``: the worth of one class at the beginning of each age bin."""
    bin_ = age_bin(age_ms)
    part = min((age_ms - BIN_BEGINS[bin_]) / BIN_WIDTHS[bin_], 1.0)
    return worths[bin_] + part * (worths[bin_ + 1] - worths[bin_])


@dataclass(slots=True, eq=False)
class _Block:
    """A remembered content and its latest release."""

    key: Hashable
    uses: int = 0
    class_: int = 0
    released_ms: float = 0.0
    number: int = 0  # number of blocks released before this block
    weight: float = 0.0  # its weight in the statistics


class ClassPolicy(EvictionPolicy):
    """Evicts the block whose class is worth least at its age; ties: the oldest block.

    A subclass defines ``num_classes`` and two static methods.  ``classify`` gives a block its class
    when it is released.  ``learn`` computes the worth of each class at each age from the ages at
    which blocks of the class returned.  Blocks released together mostly return together, so each of
    n such blocks has weight 1 / sqrt(n).  An eviction compares the oldest block of each class.

    ``learn`` is called after 512 releases of blocks, then whenever the number of releases has grown
    by 25 %.  Before the first call all worths are 0, so the policy is LRU.  Ages are in
    milliseconds; if times are unknown, each release counts as one second.  ``cache.simulate``
    compiles both methods if numba can.
    """

    num_classes: int

    ghost_ratio: float = 16.0
    """Number of evicted contents that are remembered, as a multiple of the capacity."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        for name in ("classify", "learn"):
            if inspect.isfunction(vars(cls).get(name)):
                raise TypeError(f"policy {cls.name!r}: {name} needs @staticmethod")

    @staticmethod
    @abc.abstractmethod
    def classify(uses: int, is_end: bool, idle_ms: float, request: RequestInfo) -> int:
        """Return the class, counted from 0, of a block that ``request`` releases.

        ``uses``: number of releases of the block, this one included.  ``is_end``: whether the block
        is the deepest of the request.  ``idle_ms``: time since the previous release of the
        request's deepest remembered block; NaN if no block is remembered.
        """

    @staticmethod
    @abc.abstractmethod
    def learn(returned: Array, gone: Array, worths: Array) -> None:
        """Write the worth of a block to ``worths``, ``(num_classes, NUM_BINS + 1)``.

        Column b is the worth at the beginning of age bin b; between two beginnings the worth is
        interpolated.  ``returned``, ``(num_classes, NUM_BINS)``, is the total weight of blocks that
        returned, by age bin at their return.  ``gone``, ``(num_classes,)``, is the total weight of
        blocks that were evicted and did not return.  All are float64; write to ``worths`` only.
        Worths must be finite.  Compiled code does not check indices.
        """

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        import numpy as np

        self._blocks: dict[int, _Block] = {}
        self._released: set[int] = set()
        self._classes: list[OrderedDict[int, _Block]]
        self._classes = [OrderedDict() for _ in range(self.num_classes)]
        self._ghosts = GhostList(num_ghosts(self.name, self.ghost_ratio, capacity))
        self._returned = np.zeros((self.num_classes, NUM_BINS))
        self._gone = np.zeros(self.num_classes)
        self._worths = np.zeros((self.num_classes, NUM_BINS + 1))
        self._num_releases, self._learn_at = 0, LEARN_FIRST
        # Class and release of the last victim; class -1 if anything but evictions happened since.
        self._class, self._number, self._released_ms = -1, 0, 0.0
        self._request = UNKNOWN_REQUEST
        self._now = 0.0

    def tell(self, request: RequestInfo) -> None:
        self._request = request
        if request.time_ms > self._now:
            self._now = request.time_ms
            self._class = -1

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        if block in self._blocks:
            raise ValueError(f"insert: block {block} holds content already")
        if ghost := self._ghosts.take(key):
            self._gone[ghost.class_] -= ghost.weight
        self._blocks[block] = ghost or _Block(key)

    def pin(self, block: int) -> None:
        self._check_released(block)
        self._released.remove(block)
        self._class = -1
        del self._classes[self._blocks[block].class_][block]

    def release(self, block: int) -> None:
        self.release_many((block,))

    def release_many(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        for block in blocks:
            if block not in self._blocks or block in self._released:
                raise ValueError(f"release: block {block} is not in use")
        self._released.update(blocks)
        self._class = -1
        self._access(blocks)

    def _access(self, blocks: Sequence[int]) -> None:
        """Classify released blocks.  The replay compiles this method unchanged."""
        if math.isnan(self._request.time_ms):
            self._now += 1000.0
        if self._num_releases >= self._learn_at:
            self.learn(self._returned, self._gone, self._worths)
            if not math.isfinite(self._worths.sum()):
                self._refuse_worth()
            self._learn_at = self._num_releases + max(self._num_releases // 4, LEARN_FIRST)
        records, returned, request, now = self._blocks, self._returned, self._request, self._now
        idle = math.nan
        for block in blocks:
            if records[block].uses:
                idle = now - records[block].released_ms
                break
        weight = 1.0 / math.sqrt(max(len(blocks), 1))
        is_end = True
        for block in blocks:
            record = records[block]
            if record.uses:
                returned[record.class_, age_bin(now - record.released_ms)] += record.weight
            record.uses += 1
            class_ = int(self.classify(record.uses, is_end, idle, request))
            if not 0 <= class_ < len(self._worths):
                self._refuse_class()
            record.class_, record.released_ms, record.weight = class_, now, weight
            record.number = self._num_releases
            self._num_releases += 1
            self._append(class_, block)
            is_end = False

    def _append(self, class_: int, block: int) -> None:
        self._classes[class_][block] = self._blocks[block]

    def _refuse_class(self) -> None:
        last = self.num_classes - 1
        raise ValueError(f"policy {self.name!r}: classify gave a class beyond 0 to {last}")

    def _refuse_worth(self) -> None:
        raise ValueError(f"policy {self.name!r}: learn gave a worth that is not finite")

    def evict(self) -> int:
        if not self._released:
            raise IndexError("evict: no block is released")
        block = self._choose()
        class_ = self._class
        self.remove(block)
        self._class = class_
        return block

    def _choose(self) -> int:
        """The block to evict.  The replay compiles this method and ``remove`` unchanged."""
        if self._class >= 0:  # a block released right after the last victim is worth as much
            block = self._oldest(self._class)
            if block >= 0:
                record = self._blocks[block]
                if record.number == self._number + 1 and record.released_ms == self._released_ms:
                    self._number += 1
                    return block
        least, least_worth = -1, 0.0
        for class_ in self._candidates():
            block = self._oldest(class_)
            if block >= 0:
                record = self._blocks[block]
                worth = worth_at(self._worths[class_], self._now - record.released_ms)
                if least < 0 or (worth, record.number) < (least_worth, self._number):
                    least, least_worth, self._class = block, worth, class_
                    self._number, self._released_ms = record.number, record.released_ms
        return least

    def _candidates(self) -> Iterable[int]:
        """Classes with released blocks, in order; compiled code tries all classes instead."""
        return [class_ for class_, blocks in enumerate(self._classes) if blocks]

    def _oldest(self, class_: int) -> int:
        """The oldest released block of a class; -1 if no block of the class is released."""
        return next(iter(self._classes[class_]), -1)

    def remove(self, block: int) -> None:
        self._check_released(block)
        if self._oldest(self._blocks[block].class_) == block:
            self._class = -1
        self._give_up(block)

    def _check_released(self, block: int) -> None:
        if block not in self._released:
            raise ValueError(f"block {block} is not a released one")

    def _give_up(self, block: int) -> None:
        self._released.remove(block)
        record = self._blocks.pop(block)
        del self._classes[record.class_][block]
        self._gone[record.class_] += record.weight
        self._ghosts.add(record.key, record)

    def __len__(self) -> int:
        return len(self._released)
