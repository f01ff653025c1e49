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

NUM_CLASSES = 2 * 7 * 8 * 4
NUM_BINS = 32
"""Age bin b > 0 begins at 2 ** (b - 1) ms, the last after 12 days."""
NUM_EPOCHS = 256
"""Blocks released more epochs ago no longer count as still out."""
EPOCH_REQUESTS = 128


class Statistics(NamedTuple):
    """What the policy has learned: weights of blocks, by class."""

    returned: np.ndarray
    """``(classes, bins)``: by the age at which they returned."""
    out: np.ndarray
    """``(epochs, classes)``: not returned yet, by the epoch (modulo ``NUM_EPOCHS``) of release."""
    epoch_ms: np.ndarray
    """``(epochs,)``: when an epoch began."""
    index: np.ndarray
    """``(classes, bins)``: the Gittins index of an age."""

    @classmethod
    def make(cls) -> Statistics:
        import numpy as np

        shapes = (NUM_CLASSES, NUM_BINS), (NUM_EPOCHS, NUM_CLASSES), NUM_EPOCHS
        return cls(*map(np.zeros, (*shapes, shapes[0])))


class Use(NamedTuple):
    """The latest release of a block."""

    class_: int
    time_ms: float
    number: int
    """Blocks released before it."""
    uses: int
    """Releases so far, remembered ones before an eviction included."""
    epoch: int
    weight: float


class Gittins(LeafPolicy):
    """Evicts the block that returns least per block and time, by its class and age (PageLab).

    The class of a block: log2 of its uses, whether it ended its prompt, log4 of the output length
    of the request that released it, and how long the prompt had been idle, which is the time since
    the deepest block that was known had been used.  The policy counts at which age blocks of each
    class return, evicted ones included while their keys are remembered (``ghost_ratio``
    capacities).  The worth of a block is the Gittins index of its class at its age
    (:func:`cache.replay.compiled_gittins.learn`); an eviction compares the least recent leaf of
    each class.

    Before there are statistics it is LRU.  It can fall below LRU: see ``safeguarded``.
    ``cache.simulate`` runs it compiled.  Raises ValueError for a negative ``ghost_ratio``.
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
        self._learned = Statistics.make()
        self._num_requests = self._num_releases = self._epoch = 0
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
        returned, out, *_ = self._learned
        weight = weight_of(len(nodes))
        known = next((node.memo for node in nodes if node.memo), None)
        idle_ms = self._now - known.time_ms if known else -1.0
        for place, node in enumerate(nodes):
            uses = 1
            if old := node.memo:
                uses += old.uses
                returned[old.class_, age_bin(self._now - old.time_ms)] += old.weight
                if self._epoch - old.epoch < NUM_EPOCHS:
                    out[old.epoch % NUM_EPOCHS, old.class_] -= old.weight
            class_ = class_of(uses, place == 0, self._request.output_tokens, idle_ms)
            out[self._epoch % NUM_EPOCHS, class_] += weight
            number = self._num_releases + place
            node.memo = Use(class_, self._now, number, uses, self._epoch, weight)
        self._num_releases += len(nodes)
        if ends_epoch(self._num_requests):
            from cache.replay.compiled_gittins import learn

            self._epoch = learn(self._learned, self._epoch, self._now)
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
        worth = self._learned.index[class_, age_bin(self._now - node.memo.time_ms)]
        return worth, number, class_

    def evict_before(self, release: int) -> int | None:
        node = self._take(release)
        return None if node is None else self._evicted(node)


def class_of(uses: int, is_last: bool, output_tokens: float, idle_ms: float) -> int:
    """The class of a block; ``idle_ms`` is negative if no block of the prompt was known."""
    idle = 0 if idle_ms < 0.0 else 1 + min(exponent(idle_ms / 8192.0) // 2, 2)
    output = min(exponent(output_tokens) // 2, 7)
    return ((2 * min(exponent(uses), 6) + is_last) * 8 + output) * 4 + idle


def weight_of(num_blocks: int) -> float:
    """The weight in statistics of one of ``num_blocks`` that are released together.

    Such blocks mostly return together, so n of them are less evidence than n prompts.
    """
    return 1.0 / math.sqrt(max(num_blocks, 1))


def ends_epoch(request: int) -> bool:
    """Whether the policy learns after a request: at first more often."""
    return request % EPOCH_REQUESTS == 0 or (
        request < EPOCH_REQUESTS and request & (request - 1) == 0
    )


def exponent(number: float) -> int:
    """floor(log2(number)), at least 0; 0 for NaN."""
    return max(math.frexp(number)[1] - 1, 0)


def age_bin(age_ms: float) -> int:
    return min(max(math.frexp(age_ms)[1], 0), NUM_BINS - 1)
