"""Policies that evict leaves only, as radix trees do: never a block with resident children."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cache.policies.base import UNKNOWN_REQUEST, EvictionPolicy, Request
from cache.policies.lazy_heap import LazyHeap


@dataclass(slots=True, eq=False)
class Node:
    """A resident block in the tree of prompts."""

    block: int
    key: Hashable
    parent: Node | None
    depth: int
    children: dict[Node, None] = field(default_factory=dict)
    """Resident blocks that continue it."""
    released: bool = False
    memo: Any = None
    """Data of a subclass; by default the tuple of numbers that ranks the node."""

    def __reduce__(self) -> tuple:
        """Without its neighbours, which ``LeafPolicy`` adds: a prompt may have thousands."""
        return Node, (self.block, self.key, None, self.depth, {}, self.released, self.memo)


class LeafPolicy(EvictionPolicy):
    """Evicts released blocks without resident children, the smallest ``memo`` first.

    A subclass may keep the leaves in another order.  If every released block has a child (the
    owner released a prompt from its head), the block released first is evicted.
    """

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        self._capacity = capacity
        self._request = UNKNOWN_REQUEST
        self._now = 0.0
        """Time of the latest request, ms; if unknown, each release counts as a second."""
        self._nodes: dict[int, Node] = {}
        self._with_key: dict[Hashable, Node] = {}
        self._released: dict[int, None] = {}
        self._leaves = LazyHeap()
        self._reset()

    def tell(self, request: Request) -> None:
        self._request = request
        if request.time_ms > self._now:
            self._now = request.time_ms

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        if block in self._nodes:
            raise ValueError(f"insert: block {block} holds content already")
        node = Node(block, key, self._with_key.get(parent), depth)
        self._nodes[block] = self._with_key[key] = node
        if node.parent:
            if node.parent.released and not node.parent.children:
                self._withdraw(node.parent)
            node.parent.children[node] = None

    def pin(self, block: int) -> None:
        if block not in self._released:
            raise ValueError(f"pin: block {block} is not a released one")
        del self._released[block]
        node = self._nodes[block]
        node.released = False
        if not node.children:
            self._withdraw(node)

    def release(self, block: int) -> None:
        self.release_many((block,))

    def release_many(self, blocks: Iterable[int]) -> None:
        nodes = []
        for block in blocks:
            if block not in self._nodes or block in self._released:
                raise ValueError(f"release: block {block} is not in use")
            nodes.append(self._nodes[block])
        if math.isnan(self._request.time_ms):
            self._now += 1000.0
        self._access(nodes)
        for node in nodes:
            node.released = True
            self._released[node.block] = None
            if not node.children:
                self._offer(node)

    def evict(self) -> int:
        if not self._released:
            raise IndexError("evict: no block is released")
        node = self._take() or self._nodes[next(iter(self._released))]
        self._give_up(node)
        return node.block

    def remove(self, block: int) -> None:
        node = self._nodes[block]
        if not node.children:
            self._withdraw(node)
        self._give_up(node)

    def _give_up(self, node: Node) -> None:
        node.released = False
        del self._released[node.block]
        del self._nodes[node.block]
        if self._with_key.get(node.key) is node:
            del self._with_key[node.key]
        if node.parent:
            del node.parent.children[node]
            if node.parent.released and not node.parent.children:
                self._offer(node.parent)

    def __getstate__(self) -> tuple[dict[str, Any], dict[int, list[int]]]:
        """What ``copy`` and ``pickle`` take: the attributes, and the children of each block."""
        nodes = vars(self).get("_nodes", {})
        children = {block: [c.block for c in node.children] for block, node in nodes.items()}
        return vars(self), children

    def __setstate__(self, state: tuple[dict[str, Any], dict[int, list[int]]]) -> None:
        attributes, children = state
        vars(self).update(attributes)
        for block, blocks in children.items():
            node = self._nodes[block]
            node.children = {self._nodes[child]: None for child in blocks}
            for child in node.children:
                child.parent = node

    def __len__(self) -> int:
        return len(self._released)

    @abc.abstractmethod
    def _reset(self) -> None:
        """Begin without any block."""

    @abc.abstractmethod
    def _access(self, nodes: list[Node]) -> None:
        """The blocks of a request were used just now; the deepest first.  They are not leaves."""

    def _offer(self, node: Node) -> None:
        """A block has become a released leaf."""
        self._leaves.push(node, *node.memo)

    def _withdraw(self, node: Node) -> None:
        """A block is no longer a released leaf."""
        self._leaves.remove(node)

    def _take(self) -> Node | None:
        """Remove and return the leaf to give up; None without any."""
        return self._leaves.pop()[1] if self._leaves else None
