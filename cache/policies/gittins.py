"""Gittins indices of classes of blocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from cache.policies.lazy_heap import LazyHeap
from cache.policies.leaves import LeafPolicy, Node
from cache.policies.queues import GhostList

if TYPE_CHECKING:
    import numpy as np

_SHAPE = 2 * 7, 6, 3
"""Classes by uses and whether the block ended its prompt, by output length, and by idle time."""
_IDLE_MS = 2**14
"""A session that was idle for longer, about 16 s, is in another class."""
_NUM_BINS = 32
"""Age bin b > 0 begins at 2 ** (b - 1) ms, the last after 12 days."""
_LEARN_EVERY, _NUM_EPOCHS = 32, 64
"""Requests from one estimate to the next, and epochs of as many requests or more."""
_SHRINKAGE = 10.0
"""Weight of the group of a class in the statistics of the class."""
_OFTEN_USED, _HAZARD_OF_OFTEN_USED = 2, 0.9
"""log2 of the uses from which on a block is taken to return until the statistics know."""


class Use(NamedTuple):
    """The latest release of a block."""

    class_: int
    time_ms: float
    number: int
    """Blocks released before it."""
    uses: int
    """Releases so far, remembered ones before an eviction included."""
    weight: float
    """Its weight in the statistics."""
    request: int
    """Requests released before it."""


class Gittins(LeafPolicy):
    """Evicts the block that returns least per block and time, by its class and age (PageLab).

    The class of a block: log2 of its uses, whether it ended its prompt, log4 of the output length
    of the request that released it, and the time since the deepest block of the prompt that was
    known had been used before (short, long, none known).  The policy counts at which age blocks of
    each class return, evicted ones included while their keys are remembered (``ghost_ratio``
    capacities), and how many are still out.  Blocks that are released together mostly return
    together, so each of n counts 1 / sqrt(n).  The worth of a block is the Gittins index of its
    class at its age; an eviction compares the least recent leaf of each class.

    Before there are statistics it is LRU.  It can fall below LRU: see ``safeguarded``.  Raises
    ValueError for a negative ``ghost_ratio``.
    """

    name = "gittins"

    def __init__(self, ghost_ratio: float = 16.0) -> None:
        if not ghost_ratio >= 0:
            raise ValueError(f"ghost_ratio must not be negative, got {ghost_ratio}")
        self.ghost_ratio = ghost_ratio

    def _reset(self) -> None:
        import numpy as np

        self._ghosts = GhostList(int(self.ghost_ratio * self._capacity))
        self._returned = np.zeros((math.prod(_SHAPE), _NUM_BINS))  # weights, by age
        self._out = np.zeros((_NUM_EPOCHS, len(self._returned)))  # weights, by epoch of release
        self._begun_ms = np.zeros(_NUM_EPOCHS)  # of the epochs
        self._epoch_requests = _LEARN_EVERY
        self._num_requests = self._num_releases = 0
        self._leaves_of: dict[int, LazyHeap] = defaultdict(LazyHeap)  # a class, by release
        self._heads: dict[int, tuple[float, int, Node]] = {}  # of these: worth, release, node
        self._ranked_at = math.nan

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        super().insert(block, key, parent, depth)
        self._nodes[block].memo = self._ghosts.take(key)

    def _give_up(self, node: Node) -> None:
        super()._give_up(node)
        self._ghosts.add(node.key, node.memo)

    def _access(self, nodes: list[Node]) -> None:
        if self._num_requests % _LEARN_EVERY == 0:
            self._learn()
        out = self._out[self._num_requests // self._epoch_requests]
        known = next((node.memo for node in nodes if node.memo), None)
        idle = 1 + (self._now - known.time_ms >= _IDLE_MS) if known else 0
        log2_of_output = math.frexp(self._request.output_tokens)[1] - 1
        length = min(max(log2_of_output, 0) // 2, _SHAPE[1] - 1)
        weight = 1.0 / math.sqrt(len(nodes) or 1)
        for place, node in enumerate(nodes):
            uses = 1
            if old := node.memo:
                uses += old.uses
                self._returned[old.class_, _age_bin(self._now - old.time_ms)] += old.weight
                self._out[old.request // self._epoch_requests, old.class_] -= old.weight
            kind = 2 * min(uses.bit_length() - 1, _SHAPE[0] // 2 - 1) + (place == 0)
            class_ = (kind * _SHAPE[1] + length) * _SHAPE[2] + idle
            out[class_] += weight
            number = self._num_releases + place
            node.memo = Use(class_, self._now, number, uses, weight, self._num_requests)
        self._num_releases += len(nodes)
        self._num_requests += 1

    def _learn(self) -> None:
        """Begin an epoch if it is time, and find the indices that follow from those before."""
        import numpy as np

        epoch, requests = divmod(self._num_requests, self._epoch_requests)
        if epoch == _NUM_EPOCHS:  # two become one
            epoch //= 2
            self._epoch_requests *= 2
            self._begun_ms[:epoch] = self._begun_ms[::2]
            self._out[:epoch] = self._out[::2] + self._out[1::2]
            self._out[epoch:] = 0.0
        if not requests:
            self._begun_ms[epoch] = self._now
        passed = passed_bins(self._now - self._begun_ms[: epoch + 1, None])
        passed = np.einsum("ec,eb->cb", self._out[: epoch + 1], passed)
        hazards = estimate_hazards(self._returned, passed)
        self._index = gittins_indices(hazards).tolist()
        self._heads.clear()

    def _offer(self, node: Node) -> None:
        self._leaves_of[node.memo.class_].push(node, node.memo.number)
        self._heads.pop(node.memo.class_, None)

    def _withdraw(self, node: Node) -> None:
        class_ = node.memo.class_
        self._leaves_of[class_].remove(node)
        self._heads.pop(class_, None)
        if not self._leaves_of[class_]:
            del self._leaves_of[class_]

    def _take(self, before: float = math.inf) -> Node | None:
        if self._ranked_at != self._now:
            self._ranked_at = self._now
            self._heads.clear()
        for class_, leaves in self._leaves_of.items():
            if class_ not in self._heads:
                number, node = leaves.first()
                self._heads[class_] = self._worth(node.memo), number, node
        heads = [head for head in self._heads.values() if head[1] < before]
        if not heads:
            return None
        _, _, node = min(heads)
        self._withdraw(node)
        return node

    def _worth(self, use: Use) -> float:
        age = self._now - use.time_ms
        bin_ = _age_bin(age)
        part = age / 2.0 ** (bin_ - 1) - 1.0 if 0 < bin_ < _NUM_BINS - 1 else 0.0
        index, next_index = self._index[use.class_][bin_ : bin_ + 2]
        return index + part * (next_index - index)

    def evict_before(self, release: int) -> int | None:
        return (node := self._take(release)) and self._evicted(node)


def passed_bins(ages_ms: np.ndarray) -> np.ndarray:
    """The part of each age bin that blocks of ``ages_ms``, ``(..., 1)``, are through."""
    import numpy as np

    begins = np.concatenate(([0.0], 2.0 ** np.arange(_NUM_BINS - 1)))
    return np.clip((ages_ms - begins) / np.maximum(begins, 1.0), 0.0, 1.0)


def estimate_hazards(returned: np.ndarray, passed: np.ndarray) -> np.ndarray:
    """The hazards ``(classes, bins)``: the chance to return in an age bin if not before it.

    ``returned``, ``(classes, bins)``, are the weights of the blocks that returned, by age, and
    ``passed`` those of blocks that did not yet, for the part of each bin that they are through.  A
    hazard is returned / reached (Kaplan and Meier, 1958).  With little evidence it is shrunk to
    that of all classes, of the classes with the same uses, and of those with the same output length
    too.
    """
    import numpy as np

    reached = passed + np.cumsum(returned[:, ::-1], axis=1)[:, ::-1]
    returned, reached = (array.reshape(*_SHAPE, _NUM_BINS) for array in (returned, reached))
    of_all = returned.sum(axis=(0, 1, 2))
    hazards = of_all / np.maximum(reached.sum(axis=(0, 1, 2)), 1e-300)
    often_used = np.arange(_SHAPE[0])[:, None, None, None] >= 2 * _OFTEN_USED
    at_least = np.where(often_used & (of_all > 0.0), _HAZARD_OF_OFTEN_USED, 0.0)
    hazards = np.maximum(hazards, at_least)
    for axes in ((1, 2), (2,), ()):
        returns, trials = (array.sum(axis=axes, keepdims=True) for array in (returned, reached))
        hazards = (returns + _SHRINKAGE * hazards) / (trials + _SHRINKAGE)
    return hazards.reshape(-1, _NUM_BINS)


def gittins_indices(hazards: np.ndarray) -> np.ndarray:
    """The Gittins indices ``(classes, bins + 1)`` that follow from ``hazards``.

    With S(a) the share still out at age a, the index is the maximum over T > a of
    (S(a) - S(T)) / integral of S from a to T: the hits per block and time if a block of age a is
    kept until T at most (Gittins, 1979).
    """
    import numpy as np

    stays = np.ascontiguousarray(1.0 - hazards.T)  # of all classes at a time
    widths = 2.0 ** np.maximum(np.arange(_NUM_BINS) - 1, 0)[:, None]
    index = np.zeros((_NUM_BINS + 1, len(hazards)))
    for age in range(_NUM_BINS):
        out = np.cumprod(stays[age:], axis=0)
        before = np.concatenate((np.ones_like(out[:1]), out[:-1]))
        spaces = np.cumsum(widths[age:] * (before + out) / 2.0, axis=0)
        index[age] = ((1.0 - out) / spaces).max(axis=0)
    return index.T


def _age_bin(age_ms: float) -> int:
    return min(max(math.frexp(age_ms)[1], 0), _NUM_BINS - 1)
