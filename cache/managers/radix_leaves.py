"""Which leaf of a radix tree goes next: an eviction policy asked about nodes instead of blocks.

SGLang ranks the leaves that nobody uses by one number a node (its eviction strategies), and looks
at all of them anew for every eviction; here they wait in a heap.  Policies that are no such number
keep a structure of their own and are told of a node as if it were its last block.
"""

from __future__ import annotations

import abc
import heapq
import inspect
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import xxhash

from cache.policies.base import EvictionPolicy
from cache.policies.priority import BlockHistory, PriorityPolicy

if TYPE_CHECKING:
    from cache.managers.radix_tree import RadixNode


class Leaves(abc.ABC):
    """The evictable nodes of a tree: unlocked and without children."""

    @abc.abstractmethod
    def add(self, node: RadixNode) -> None:
        """``node`` has become evictable."""

    @abc.abstractmethod
    def remove(self, node: RadixNode) -> None:
        """``node`` was evictable and is in use again."""

    @abc.abstractmethod
    def pop(self) -> RadixNode:
        """Remove and return the node to give up.  Raises IndexError if there is none."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of evictable nodes."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[RadixNode]:
        """The evictable nodes, in the order in which ``pop`` would return them now."""

    def insert(self, node: RadixNode, is_new: bool) -> None:  # noqa: B027
        """``node`` came into being, in use; with old content if it was split off another."""


class RankedLeaves(Leaves):
    """Leaves in the order of a number: any policy that is a plain function of a node's history.

    The history is that of the node: it goes on counting while the node has children, is shared by
    both parts when it is split, and a node that becomes a leaf because its last child was evicted
    is as old as it was before.  Ties go by the order in which the nodes became evictable.
    """

    def __init__(self, policy: PriorityPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[float, int, RadixNode]] = []
        self._num_tickets = 0
        self._num_leaves = 0
        self._clock = 0.0

    def add(self, node: RadixNode) -> None:
        tail = len(node.blocks) - 1
        history = BlockHistory(
            block=node.blocks[tail],
            accessed=node.accessed,
            inserted=node.inserted,
            accesses=node.accesses,
            next_use=math.nan,
            depth=node.depth + tail,
            clock=self._clock,
        )
        priority = self._policy.rank(history)
        self._num_tickets += 1
        self._num_leaves += 1
        node.ticket = self._num_tickets
        heapq.heappush(self._heap, (priority, node.ticket, node))
        if len(self._heap) > 2 * self._num_leaves + 64:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
            heapq.heapify(self._heap)

    def remove(self, node: RadixNode) -> None:
        node.ticket = 0
        self._num_leaves -= 1

    def pop(self) -> RadixNode:
        while True:
            self._clock, ticket, node = heapq.heappop(self._heap)
            if ticket == node.ticket:
                self.remove(node)
                return node

    def __len__(self) -> int:
        return self._num_leaves

    def __iter__(self) -> Iterator[RadixNode]:
        return (node for _, ticket, node in sorted(self._heap) if ticket == node.ticket)


class PolicyLeaves(Leaves):
    """Leaves kept by a policy with a structure of its own (queues, ghost lists, a generator).

    It is told of a node under the id of its last block, which a split leaves with the lower part.
    An access is counted when a node becomes evictable, however often it was used in between.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._nodes: dict[int, RadixNode] = {}

    def insert(self, node: RadixNode, is_new: bool) -> None:
        key = _content_key(node)
        if is_new:
            self._policy.miss(key)
        depth = node.depth + len(node.blocks) - 1
        self._policy.insert(node.blocks[-1], key, _content_key(node.parent), depth)

    def add(self, node: RadixNode) -> None:
        self._nodes[node.blocks[-1]] = node
        self._policy.release(node.blocks[-1])

    def remove(self, node: RadixNode) -> None:
        del self._nodes[node.blocks[-1]]
        self._policy.pin(node.blocks[-1])

    def pop(self) -> RadixNode:
        return self._nodes.pop(self._policy.evict())

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[RadixNode]:
        return (self._nodes[block] for block in self._policy)


def make_leaves(policy: EvictionPolicy, capacity: int) -> Leaves:
    """Start ``policy`` for at most ``capacity`` nodes and wrap it."""
    policy.start(capacity)
    cls = type(policy)
    if isinstance(policy, PriorityPolicy):
        is_number = isinstance(inspect.getattr_static(cls, "priority"), staticmethod)
        is_plain = all(
            getattr(cls, name) is getattr(PriorityPolicy, name)
            for name in ("insert", "pin", "release", "evict")
        )
        if is_number and (is_plain or policy.compilable):
            return RankedLeaves(policy)
    return PolicyLeaves(policy)


def _content_key(node: RadixNode) -> bytes | None:
    """Digest of the whole prefix that ends with ``node``, however it is split; None for a root."""
    path = []
    while node.parent is not None:
        path += [node.key, node.extra]
        node = node.parent
    return xxhash.xxh3_128_digest(b"".join(reversed(path))) if path else None
