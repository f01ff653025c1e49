"""Policies that evict only leaves, like radix trees: blocks without resident children."""

import abc
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from cache.policies.base import UNKNOWN_REQUEST, EvictionPolicy, RequestInfo
from cache.policies.lazy_heap import LazyHeap


@dataclass(slots=True, eq=False)
class Node:
    """A resident block in the tree of prompts."""

    key: Hashable
    parent: int
    """The previous block of the prompt, if it is resident; otherwise -1."""
    depth: int
    children: dict[int, None] = field(default_factory=dict)
    """Resident blocks that continue it."""
    released: bool = False
    value: float = -1.0
    """A number for the subclass, not negative; -1 until it is set."""
    time: float = 0.0
    """A second number for the subclass."""
    owner: float = math.nan
    """A third number for the subclass: ``RequestInfo.session``."""


class LeafPolicy(EvictionPolicy):
    """Evicts leaves (released blocks without resident children) in the order of ``_leaves``.

    A subclass may choose another order of the leaves.  If every released block has a child (because
    the owner released a prompt head first), the block released first is evicted.

    The replay compiles the methods of built-in subclasses, except methods that
    ``cache.replay.compiled_leaves`` replaces.  They may use only numbers, lists of numbers, nodes,
    and the containers of ``cache.replay.containers``.
    """

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        super().start(capacity)
        self._request = UNKNOWN_REQUEST
        self._now = 0.0
        """Time of the latest request in ms; if unknown, each release counts as one second."""
        self._nodes: dict[int, Node] = {}
        self._with_key: dict[Hashable, int] = {}
        self._released: dict[int, None] = {}
        self._leaves: LazyHeap[int] = LazyHeap()
        self._reset()

    def tell(self, request: RequestInfo) -> None:
        self._request = request
        if request.time_ms > self._now:
            self._now = request.time_ms

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        if block in self._nodes:
            raise ValueError(f"insert: block {block} holds content already")
        above = self._with_key.get(parent, -1)
        self._nodes[block] = Node(key, above, depth)
        self._with_key[key] = block
        if above >= 0:
            node = self._nodes[above]
            if node.released and not node.children:
                self._withdraw(above)
            node.children[block] = None
        self._inserted(block)

    def pin(self, block: int) -> None:
        if block not in self._released:
            raise ValueError(f"pin: block {block} is not a released one")
        del self._released[block]
        self._pin(block)

    def _pin(self, block: int) -> None:
        node = self._nodes[block]
        node.released = False
        if not node.children:
            self._withdraw(block)
        self._pinned(block)

    def release(self, block: int) -> None:
        self.release_many((block,))

    def release_many(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        for block in blocks:
            if block not in self._nodes or block in self._released:
                raise ValueError(f"release: block {block} is not in use")
        self._release(blocks)
        self._released.update(dict.fromkeys(blocks))

    def _release(self, blocks: Sequence[int]) -> None:
        if math.isnan(self._request.time_ms):
            self._now += 1000.0
        self._access(blocks)
        for block in blocks:
            node = self._nodes[block]
            node.released = True
            if not node.children:
                self._offer(block)

    def evict(self) -> int:
        if not self._released:
            raise IndexError("evict: no block is released")
        block = self._take()
        if block < 0:
            block = next(iter(self._released))
        self._give_up(block)
        return block

    def remove(self, block: int) -> None:
        if not self._nodes[block].children:
            self._withdraw(block)
        self._give_up(block)

    def _give_up(self, block: int) -> None:
        self._gone(block)
        node = self._nodes.pop(block)
        del self._released[block]
        if self._with_key.get(node.key) == block:
            del self._with_key[node.key]
        for child in node.children:
            self._nodes[child].parent = -1
        if node.parent >= 0:
            above = self._nodes[node.parent]
            del above.children[block]
            if above.released and not above.children:
                self._offer(node.parent)

    def __len__(self) -> int:
        return len(self._released)

    @abc.abstractmethod
    def _reset(self) -> None:
        """Make the state of the subclass for an empty pool."""

    @abc.abstractmethod
    def _access(self, blocks: Sequence[int]) -> None:
        """Record the use of a request's blocks, deepest first.  They are not leaves yet."""

    @abc.abstractmethod
    def _offer(self, block: int) -> None:
        """Add ``block``, which became a released leaf."""

    def _withdraw(self, block: int) -> None:
        """Remove ``block``, which is no longer a released leaf."""
        self._leaves.remove(block)

    def _take(self) -> int:
        """Remove and return the leaf to evict; -1 if there is no leaf."""
        return self._first_leaf()

    def _first_leaf(self) -> int:
        """Remove and return the first of ``_leaves``; -1 if it is empty."""
        return self._leaves.pop()[1] if self._leaves else -1

    def _holds(self, block: int) -> bool:
        """Whether ``block`` holds content."""
        return block in self._nodes

    def _inserted(self, block: int) -> None:
        """Called after ``block`` was inserted."""

    def _pinned(self, block: int) -> None:
        """Called after ``block`` was pinned."""

    def _gone(self, block: int) -> None:
        """Called before the node of ``block`` is deleted."""
