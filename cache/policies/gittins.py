"""Gittins indices of classes of blocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

from cache.policies.lazy_heap import LazyHeap
from cache.policies.leaves import LeafPolicy, Node
from cache.policies.queues import GhostList

if TYPE_CHECKING:
    import numpy as np

_USES, _LENGTHS = 7, 8
_NUM_CLASSES = 2 * _USES * _LENGTHS
_NUM_BINS = 32
"""Age bin b > 0 begins at 2 ** (b - 1) ms, the last after 12 days."""
_SHRINKAGE = 10.0
"""Weight of all classes together in the statistics of one, in blocks."""


class Use(NamedTuple):
    """The latest release of a block."""

    class_: int
    time_ms: float
    number: int
    """Blocks released before it."""
    uses: int
    """Releases so far, remembered ones before an eviction included."""


class Gittins(LeafPolicy):
    """Evicts the block that returns least per block and time, by its class and age (PageLab).

    The class of a block: log2 of its uses, whether it ended its prompt, and log4 of the output
    length of the request that released it.  The policy counts at which age blocks of each class
    return, evicted ones included while their keys are remembered (``ghost_ratio`` capacities).
    The worth of a block is the Gittins index of its class at its age; an eviction compares the
    least recent leaf of each class.

    Before there are statistics it is LRU.  It can fall below LRU: see ``safeguarded``.  Raises
    ValueError for a negative ``ghost_ratio``.
    """

    name = "gittins"

    def __init__(self, ghost_ratio: float = 16.0) -> None:
        if not ghost_ratio >= 0:
            raise ValueError(f"ghost_ratio must not be negative, got {ghost_ratio}")
        self.ghost_ratio = ghost_ratio

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        super().start(capacity, next_use)
        self._ghosts = GhostList(int(self.ghost_ratio * capacity))

    def _reset(self) -> None:
        import numpy as np

        self._returns = np.zeros((_NUM_CLASSES, _NUM_BINS))  # by age
        self._releases = np.zeros(_NUM_CLASSES)
        self._num_requests = self._num_releases = 0
        self._leaves_of: dict[int, LazyHeap] = defaultdict(LazyHeap)  # a class, by release
        self._heads: dict[int, tuple[float, float, int]] = {}  # of these: worth, release, class
        self._changed: set[int] = set()  # classes whose head may be another one
        self._ranked_at = math.nan

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        super().insert(block, key, parent, depth)
        self._nodes[block].memo = self._ghosts.take(key)

    def _give_up(self, node: Node) -> None:
        super()._give_up(node)
        self._ghosts.add(node.key, node.memo)

    def _access(self, nodes: list[Node]) -> None:
        length = min(_exponent(self._request.output_tokens) // 2, _LENGTHS - 1)
        for place, node in enumerate(nodes):
            uses = 1
            if node.memo:
                uses += node.memo.uses
                self._returns[node.memo.class_, _age_bin(self._now - node.memo.time_ms)] += 1
            level = min(_exponent(uses), _USES - 1)
            class_ = (2 * level + (place == 0)) * _LENGTHS + length
            self._releases[class_] += 1
            node.memo = Use(class_, self._now, self._num_releases + place, uses)
        self._num_releases += len(nodes)
        if self._num_requests % 64 == 0:
            self._index = gittins_indices(self._returns, self._releases).tolist()
            self._ranked_at = math.nan
        self._num_requests += 1

    def _offer(self, node: Node) -> None:
        self._leaves_of[node.memo.class_].push(node, node.memo.number)
        self._changed.add(node.memo.class_)

    def _withdraw(self, node: Node) -> None:
        self._leaves_of[node.memo.class_].remove(node)
        self._changed.add(node.memo.class_)

    def _take(self, before: float = math.inf) -> Node | None:
        if self._ranked_at != self._now:
            self._ranked_at = self._now
            self._changed.update(self._leaves_of)
        for class_ in self._changed:
            self._heads[class_] = self._head(class_)
        self._changed.clear()
        heads = [head for head in self._heads.values() if head[1] < before]
        if not heads:
            return None
        _, _, class_ = min(heads)
        self._changed.add(class_)
        return self._leaves_of[class_].pop()[1]

    def _head(self, class_: int) -> tuple[float, float, int]:
        if not self._leaves_of[class_]:
            return math.inf, math.inf, class_
        number, node = self._leaves_of[class_].first()
        age = self._now - node.memo.time_ms
        bin_ = _age_bin(age)
        part = age / 2.0 ** (bin_ - 1) - 1.0 if 0 < bin_ < _NUM_BINS - 1 else 0.0
        index, next_index = self._index[class_][bin_ : bin_ + 2]
        return index + part * (next_index - index), number, class_

    def evict_before(self, release: int) -> int | None:
        node = self._take(release)
        return None if node is None else self._evicted(node)


def gittins_indices(returns: np.ndarray, releases: np.ndarray) -> np.ndarray:
    """The Gittins indices ``(classes, bins + 1)`` that follow from returns by age, and releases.

    With S(a) the share still out at age a, the index is the maximum over T > a of
    (S(a) - S(T)) / integral of S from a to T: the hits per block and time if a block of age a is
    kept until T at most (Gittins, 1979).
    """
    import numpy as np

    of_all = returns.sum(axis=0) / max(releases.sum(), 1.0)
    returned = np.cumsum(returns + _SHRINKAGE * of_all, axis=1) / (releases + _SHRINKAGE)[:, None]
    out = np.pad(1.0 - returned, ((0, 0), (1, 0)), constant_values=1.0)
    widths = 2.0 ** np.maximum(np.arange(_NUM_BINS) - 1, 0)
    space = np.cumsum(widths * (out[:, :-1] + out[:, 1:]) / 2.0, axis=1)
    space = np.pad(space, ((0, 0), (1, 0)))
    index = np.zeros(out.shape)
    for age in range(_NUM_BINS):
        hits = out[:, [age]] - out[:, age + 1 :]
        spaces = space[:, age + 1 :] - space[:, [age]]
        index[:, age] = (hits / np.maximum(spaces, 1e-300)).max(axis=1)
    return index


def _exponent(number: float) -> int:
    """floor(log2(number)), at least 0; 0 for NaN."""
    return max(math.frexp(number)[1] - 1, 0)


def _age_bin(age_ms: float) -> int:
    return min(max(math.frexp(age_ms)[1], 0), _NUM_BINS - 1)
