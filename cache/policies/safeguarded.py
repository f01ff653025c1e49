"""A bound on how far below LRU any policy can fall."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from cache.policies.base import EvictionPolicy, wrong_victim
from cache.policies.leaves import LeafPolicy, Node
from cache.policies.wrapping import WrappingPolicy


class Safeguarded(WrappingPolicy, LeafPolicy):
    """``policy``, with at most ``budget`` hits per block reference fewer than LRU (PageLab).

    It follows the LRU cache that its owner would have, blocks without content included.  The
    *balance* is its hits less LRU's hits plus ``budget`` x references, and at most the capacity.
    *Missing* are the blocks that LRU holds and the pool does not.  A block that ``policy`` gives up
    is set aside with the blocks that continue it.  Of the leaves set aside, one that LRU does not
    hold is evicted.  If there is none, one that LRU holds is evicted if missing + 1 <= balance;
    otherwise ``policy`` is asked again.

    The bound is proven from the first request on, in serial replay of traces whose ids are unique
    to their prefix and in managers one request at a time: docs/eviction-study.md says what else it
    needs.  ``radix`` ranks nodes and does not call ``look_up``: there the balance stays 0.

    ``policy`` is a name (``options`` are its options) or an object that defines ``remove``.  Raises
    ValueError for a negative or infinite ``budget`` or a policy that cannot remove blocks.
    """

    name = "safeguarded"

    def __init__(
        self, policy: str | EvictionPolicy = "gittins", budget: float = 0.005, **options
    ) -> None:
        super().__init__(policy, **options)
        if not 0 <= budget < math.inf:
            raise ValueError(f"budget must be finite and not negative, got {budget}")
        if type(self.policy).remove is EvictionPolicy.remove:
            raise ValueError(f"policy {self.policy.name!r} does not define remove(block)")
        self.budget = budget

    def _reset(self) -> None:
        self._balance = 0.0
        self._missing: set[Hashable] = set()
        self._lru: OrderedDict[Hashable, None] = OrderedDict()  # what LRU holds and may evict,
        self._in_use: set[Hashable] = set()  # and may not: on no call the oldest of many
        self._awaited: set[Hashable] = set()  # LRU holds or gets it; here it is to be inserted

    def look_up(self, keys: Sequence[Hashable]) -> None:
        super().look_up(keys)
        lru, in_use, pool = self._lru, self._in_use, self._with_key
        absent = [key for key in keys if key not in pool]
        held = sum([key in lru or key in in_use for key in keys])
        self._balance += len(keys) - len(absent) - held + self.budget * len(keys)
        self._balance = min(self._balance, self._capacity)
        self._awaited = set(absent)
        self._missing.difference_update(absent)
        for key in reversed(keys):
            if key not in in_use:
                lru[key] = None
                lru.move_to_end(key)
        self._shrink(self._capacity)

    def miss(self, key: Hashable) -> None:
        super().miss(key)
        if key in self._lru:
            self._lru.move_to_end(key)
            self._awaited.add(key)

    def _shrink(self, size: int) -> None:
        while self._lru and len(self._lru) + len(self._in_use) > size:
            key, _ = self._lru.popitem(last=False)
            self._missing.discard(key)
            node = self._with_key.get(key)
            if node in self._leaves:
                self._leaves.remove(node)
                self._offer(node)

    def _use(self, key: Hashable) -> None:
        """LRU uses ``key``, as the pool does, and may not evict it."""
        self._in_use.add(key)
        if key in self._lru:
            del self._lru[key]
            self._missing.discard(key)
        else:
            self._shrink(self._capacity)

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        super().insert(block, key, parent, depth)
        self._use(self._content(block))
        self._awaited.discard(key)

    def pin(self, block: int) -> None:
        super().pin(block)
        node = self._nodes[block]
        if not node.memo:
            self.policy.pin(block)
        else:
            node.memo = None
            self.policy.miss(node.key)
            self.policy.insert(block, node.key, node.parent and node.parent.key, node.depth)
        self._use(self._content(block))

    def _content(self, block: int) -> Hashable:
        """The key of ``block``, in use.  A copy, (content, block), swaps with a released block."""
        node = self._nodes[block]
        other = self._with_key.get(node.key[0]) if type(node.key) is tuple else None
        if not other or not other.released:
            return node.key
        super().pin(other.block)
        if not other.memo:
            self.policy.remove(other.block)
        node.block, other.block = other.block, block
        node.memo, other.memo, node.released = "aside", None, True
        self._nodes |= {node.block: node, block: other}
        self._released[node.block] = None
        self._offer(node)
        return other.key

    def _access(self, nodes: list[Node]) -> None:
        for node in nodes:
            self._in_use.remove(node.key)
            self._lru[node.key] = None
        self._shrink(self._capacity)
        self.policy.release_many([node.block for node in nodes])

    def _offer(self, node: Node) -> None:
        if node.memo:  # set aside; what LRU lacks goes first
            self._leaves.push(node, node.key in self._lru)

    def _withdraw(self, node: Node) -> None:
        if node.memo:
            self._leaves.remove(node)

    def _take(self) -> Node | None:
        # LRU takes a block, too; as many as here are without content or hold what is awaited.
        self._shrink(len(self._nodes) + len(self._awaited) - 1)
        may_lose = len(self._missing) + 1 <= self._balance
        # Where blocks in use are copies of each other, ``policy`` may have no other block.
        while (not self._leaves or self._leaves.first()[0] > may_lose) and len(self.policy):
            block = self.policy.evict()
            if block not in self._released or self._nodes[block].memo:
                raise wrong_victim(self.policy, block)
            node = self._nodes[block]
            if not self._leaves and not node.children and (node.key in self._lru) <= may_lose:
                node.memo = "aside"
                return node
            self._set_aside(node)
        return super()._take()

    def _set_aside(self, node: Node) -> None:
        """``policy`` has given up ``node``: it goes, and before it whatever continues it."""
        nodes = [node]
        for node in nodes:  # which grow
            node.memo = "aside"
            if not node.children:
                self._offer(node)
            for child in node.children:
                if child.released and not child.memo:
                    self.policy.remove(child.block)
                    nodes.append(child)

    def _give_up(self, node: Node) -> None:
        if not node.memo:
            self.policy.remove(node.block)
        if node.key in self._lru:
            self._missing.add(node.key)
        super()._give_up(node)
