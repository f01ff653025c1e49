"""The nodes of a radix tree, and the order in which a policy evicts its leaves.

SGLang ranks unlocked leaves by one number per node (its eviction strategies) and makes a heap of
them at each eviction.  Here the heap is kept.  Policies with a structure of their own see a node as
its last block.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from cache.blocks.hashing import xxh3_128_digest
from cache.policies.base import UNKNOWN_REQUEST, EvictionPolicy, RequestInfo, check_victims
from cache.policies.lazy_heap import LazyHeap
from cache.policies.priority import BlockHistory, PriorityPolicy


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of blocks.

    Attributes:
        extra: encoding of the extra keys that begin in its first block.
        key: the tokens of its blocks, 4 bytes each.
        blocks: block ids, ``array('i')``; empty for the root only.
        depth: position of its first block in the prompt, in blocks.
        lock_ref: users of this node and of all nodes below; evictable if 0.
        accessed, inserted: times of the last and the first unlock.
        accesses: number of unlocks.
    """

    parent: RadixNode | None
    extra: bytes
    key: bytes
    blocks: array
    depth: int
    children: dict[bytes, RadixNode] = field(default_factory=dict)
    lock_ref: int = 0
    accessed: int = 0
    inserted: int = 0
    accesses: int = 0

    def __getstate__(self) -> tuple[None, dict]:
        """Without links, which the tree restores: a copy would recurse from node to node."""
        names = set(self.__slots__) - {"parent", "children"}
        return None, {name: getattr(self, name) for name in names}


class RankedLeaves:
    """Leaves ranked by a policy that is a plain function of a node's history.

    Leaves are the evictable nodes of a tree: unlocked and without children.  A node's history
    continues while it has children, and both parts of a split node keep it.  A node that becomes a
    leaf because its last child was evicted keeps its age.  Ties go to the node that was accessed
    longest ago, as in SGLang's ``lfu``, then to the first that became evictable.
    """

    def __init__(self, policy: PriorityPolicy) -> None:
        self._policy = policy
        self._heap: LazyHeap[RadixNode] = LazyHeap()
        self._clock = 0.0
        self._request = UNKNOWN_REQUEST

    def tell(self, request: RequestInfo) -> None:
        self._request = request

    def insert(self, node: RadixNode, is_new: bool) -> None:
        """Add ``node``, which is in use.  ``is_new`` is False if it was split off another node."""

    def add(self, node: RadixNode) -> None:
        """``node`` has become evictable."""
        tail = len(node.blocks) - 1
        history = BlockHistory(
            block=node.blocks[tail],
            accessed=node.accessed,
            inserted=node.inserted,
            accesses=node.accesses,
            next_use=math.nan,
            depth=node.depth + tail,
            clock=self._clock,
            request=self._request,
        )
        self._heap.push(node, self._policy.rank(history), node.accessed)

    def remove(self, node: RadixNode) -> None:
        """``node`` was evictable and is in use again."""
        self._heap.remove(node)

    def pop(self) -> RadixNode:
        """Remove and return the node to give up."""
        self._clock, node = self._heap.pop()
        return node

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._heap)


class PolicyLeaves:
    """Leaves of a policy with a structure of its own (queues, ghost lists, a generator).

    The id of a node is its last block, which stays with the lower part of a split.  All uses until
    a node becomes evictable again count as one access.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._nodes: dict[int, RadixNode] = {}
        self.tell = policy.tell

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
        victim = self._policy.evict()
        check_victims(self._policy, (victim,), self._nodes.__contains__)
        return self._nodes.pop(victim)

    def __iter__(self) -> Iterator[RadixNode]:
        return (self._nodes[block] for block in self._policy)


def make_leaves(policy: EvictionPolicy, capacity: int) -> RankedLeaves | PolicyLeaves:
    """Start ``policy`` for at most ``capacity`` nodes and wrap it."""
    policy.start(capacity)
    if not isinstance(policy, PriorityPolicy) or policy.memory_size:  # a node has no memory
        return PolicyLeaves(policy)
    return RankedLeaves(policy) if policy.describing_priority() else PolicyLeaves(policy)


def _content_key(node: RadixNode | None) -> bytes | None:
    """Digest of the prefix that ends with ``node``, independent of splits.  A root has none."""
    path: list[bytes] = []
    while node is not None and node.parent is not None:
        path += [node.key, node.extra]
        node = node.parent
    return xxh3_128_digest(b"".join(reversed(path))) if path else None
