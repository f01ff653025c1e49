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
    holds and the pool does not.  ``policy`` may evict while missing + 1 <= balance.  Otherwise it
    may only evict what LRU does not hold (``evict_before``), or the block released first is
    evicted.  A block that ``policy`` gives up while resident blocks continue it is set aside and
    goes after these.  So every block before a present block is present too, missing never exceeds
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
        self._lru: OrderedDict[Hashable, int] = OrderedDict()  # key to number of the access
        self._num_accesses = 0
        self._spared: set[int] = set()  # given up, but other blocks continue them
        self._spared_leaves: dict[int, None] = {}  # until now
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
            self._lru[key] = self._num_accesses
            self._lru.move_to_end(key)
            self._num_accesses += 1
        while len(self._lru) > self._capacity:
            self._missing -= self._lru.popitem(last=False)[0] not in self._with_key
        self._is_looked_up = True

    def _was_released(self, key: Hashable) -> bool:
        return key in self._with_key and self._with_key[key].memo

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        super().insert(block, key, parent, depth)
        self.policy.insert(block, key, parent, depth)
        self._missing -= not self._is_looked_up and key in self._lru

    def pin(self, block: int) -> None:
        super().pin(block)
        if block not in self._spared:
            self.policy.pin(block)
        else:
            self._spared.remove(block)
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
        if node.block in self._spared:
            self._spared_leaves[node.block] = None

    def _withdraw(self, node: Node) -> None:
        self._spared_leaves.pop(node.block, None)

    def _take(self) -> Node:
        block = self._chosen(may_lose=self._missing + 1 <= self._balance)
        if block is None:
            block = next(iter(self._released))
            self._take_out(block)
        return self._nodes[block]

    def _chosen(self, may_lose: bool) -> int | None:
        """The leaf that ``policy`` gives up; None: LRU holds all that it would."""
        for block in self._spared_leaves:
            if may_lose or self._nodes[block].key not in self._lru:
                self._take_out(block)
                return block
        oldest = next(iter(self._lru.values()), 0)
        while len(self.policy):
            block = self.policy.evict() if may_lose else self.policy.evict_before(oldest)
            if block is None and not may_lose:
                break
            check_victims(self.policy, (block,), self._is_with_policy)
            if not self._nodes[block].children:
                return block
            self._spared.add(block)
        return None

    def _is_with_policy(self, block: int) -> bool:
        return block in self._released and block not in self._spared

    def remove(self, block: int) -> None:
        self._take_out(block)
        self._evicted(self._nodes[block])

    def _take_out(self, block: int) -> None:
        if block in self._spared:
            self._spared.remove(block)
            self._spared_leaves.pop(block, None)
        else:
            self.policy.remove(block)

    def _give_up(self, node: Node) -> None:
        super()._give_up(node)
        self._missing += node.key in self._lru and node.key not in self._with_key
