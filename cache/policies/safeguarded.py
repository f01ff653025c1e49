"""A bound on how far below LRU any policy can fall."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import takewhile

from cache.policies.base import EvictionPolicy, Request, check_victims
from cache.policies.leaves import LeafPolicy, Node


class Safeguarded(LeafPolicy):
    """``policy``, with at most ``budget`` hits per block reference fewer than LRU (PageLab).

    It follows an LRU cache of its size.  The *balance* is its hits less LRU's hits plus
    ``budget`` x references; what exceeds the capacity is lost.  *Missing* are the blocks that LRU
    holds and the pool does not.  What ``policy`` gives up, and what continues it, is set aside
    until it may go: no resident block continues it, and either LRU does not hold it or missing + 1
    <= balance.  Of those that may go, what LRU does not hold goes first; without any ``policy`` is
    asked again.  So every block before a present block is present too, missing never exceeds
    balance, and each missing block can cost one hit.

    Proven for serial replay of traces whose ids are unique to their prefix, from the first request
    on: docs/eviction-study.md.  In a manager requests overlap, LRU is followed at each release, and
    nothing is proven.

    ``policy`` is a name (``options`` are its options) or an object that defines ``remove``.  Raises
    ValueError for a negative or infinite ``budget`` or a policy that cannot remove blocks.
    """

    name = "safeguarded"

    def __init__(
        self, policy: str | EvictionPolicy = "gittins", budget: float = 0.005, **options
    ) -> None:
        from cache.policies import as_policy

        self.policy, self.budget = as_policy(policy, **options), budget
        self.needs_future = self.policy.needs_future
        if not 0 <= budget < math.inf:
            raise ValueError(f"budget must be finite and not negative, got {budget}")
        if type(self.policy).remove is EvictionPolicy.remove:
            raise ValueError(f"policy {self.policy.name!r} does not define remove(block)")

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        super().start(capacity, next_use)
        self.policy.start(capacity, next_use)

    def _reset(self) -> None:
        self._balance, self._missing = 0.0, 0
        self._lru: OrderedDict[Hashable, None] = OrderedDict()
        self._aside: set[int] = set()  # its leaves are in one of the next two
        self._leaves_lru_lacks: dict[int, None] = {}
        self._leaves_lru_holds: dict[int, None] = {}
        self._is_looked_up = False

    def tell(self, request: Request) -> None:
        super().tell(request)
        self.policy.tell(request)

    def miss(self, key: Hashable) -> None:
        self.policy.miss(key)

    def look_up(self, keys: Sequence[Hashable]) -> None:
        self.policy.look_up(keys)
        hits = takewhile(self._was_released, keys)
        hits_of_lru = takewhile(self._lru.__contains__, keys)
        self._balance += len([*hits]) - len([*hits_of_lru]) + self.budget * len(keys)
        self._balance = min(self._balance, self._capacity)
        for key in reversed(keys):
            self._missing -= key in self._lru and key not in self._with_key
            self._lru[key] = None
            self._lru.move_to_end(key)
        while len(self._lru) > self._capacity:
            node = self._with_key.get(self._lru.popitem(last=False)[0])
            if node is None:
                self._missing -= 1
            elif node.block in self._leaves_lru_holds:
                self._withdraw(node)
                self._offer(node)
        self._is_looked_up = True

    def _was_released(self, key: Hashable) -> bool:
        # ``memo`` is None before the first release: a running request has inserted it.
        return key in self._with_key and self._with_key[key].memo

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        super().insert(block, key, parent, depth)
        self.policy.insert(block, key, parent, depth)
        self._missing -= not self._is_looked_up and key in self._lru

    def pin(self, block: int) -> None:
        super().pin(block)
        if block not in self._aside:
            self.policy.pin(block)
        else:
            self._aside.remove(block)
            node = self._nodes[block]
            self.policy.miss(node.key)
            parent = node.parent.key if node.parent else None
            self.policy.insert(block, node.key, parent, node.depth)

    def _access(self, nodes: list[Node]) -> None:
        if not self._is_looked_up:
            self.look_up([node.key for node in reversed(nodes)])
        self._is_looked_up = False
        self.policy.release_many([node.block for node in nodes])
        for node in nodes:
            node.memo = True

    def _offer(self, node: Node) -> None:
        if node.block in self._aside:
            leaves = self._leaves_lru_holds if node.key in self._lru else self._leaves_lru_lacks
            leaves[node.block] = None

    def _withdraw(self, node: Node) -> None:
        self._leaves_lru_lacks.pop(node.block, None)
        self._leaves_lru_holds.pop(node.block, None)

    def _take(self) -> Node:
        may_lose = self._missing + 1 <= self._balance
        while not (leaves := self._leaves_that_may_go(may_lose)) and len(self.policy):
            block = self.policy.evict()
            check_victims(self.policy, (block,), self._is_with_policy)
            self._set_aside(self._nodes[block])
        # Where requests overlap there may be no such leaf.
        return self._nodes[next(iter(leaves or self._released))]

    def _set_aside(self, node: Node) -> None:
        """``policy`` has given up ``node``: it goes, and before it whatever continues it."""
        nodes = [node]
        for node in nodes:  # which grow
            self._aside.add(node.block)
            if not node.children:
                self._offer(node)
            for child in node.children:
                if child.released and child.block not in self._aside:
                    self.policy.remove(child.block)
                    nodes.append(child)

    def _leaves_that_may_go(self, may_lose: bool) -> dict[int, None]:
        return self._leaves_lru_lacks or (self._leaves_lru_holds if may_lose else {})

    def remove(self, block: int) -> None:
        if block not in self._aside:
            self.policy.remove(block)
        super().remove(block)

    def _give_up(self, node: Node) -> None:
        self._aside.discard(node.block)
        self._withdraw(node)
        self._missing += node.key in self._lru
        super()._give_up(node)

    def _is_with_policy(self, block: int) -> bool:
        return block in self._released and block not in self._aside
