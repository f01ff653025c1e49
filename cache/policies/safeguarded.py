"""A bound on how far below LRU any policy can fall."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import takewhile

from cache.policies.base import EvictionPolicy, Request, check_victims
from cache.policies.leaves import LeafPolicy, Node


class Safeguarded(LeafPolicy):
    """``policy``, with at most ``budget`` hits per block reference fewer than LRU (PageLab).

    It follows an LRU cache of its size.  The *balance* is its hits less LRU's hits plus
    ``budget`` x references, at most the capacity.  *Missing* are the blocks that LRU holds and the
    pool does not.  ``policy`` may evict while missing < balance.  Otherwise it may only evict what
    LRU does not hold (``evict_before``), or the block released first is evicted.  A block that LRU
    holds and resident blocks continue is not evicted either.  So every block before a
    present block that LRU holds is present too, missing never exceeds balance, and each missing
    block can cost one hit.

    Proven for serial replay, from the first request on: docs/eviction-study.md.  In a manager
    requests overlap, LRU is followed at each release, and nothing is proven.

    ``policy`` is a name (``options`` are its options) or an object that defines ``remove``.  Raises
    ValueError for a negative ``budget`` or a policy that cannot remove blocks.
    """

    name = "safeguarded"

    def __init__(
        self, policy: str | EvictionPolicy = "gittins", budget: float = 0.005, **options
    ) -> None:
        from cache.policies import as_policy

        self.policy, self.budget = as_policy(policy, **options), budget
        self.needs_future = self.policy.needs_future
        if not budget >= 0:
            raise ValueError(f"budget must not be negative, got {budget}")
        if type(self.policy).remove is EvictionPolicy.remove:
            raise ValueError(f"policy {self.policy.name!r} does not define remove(block)")

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        super().start(capacity, next_use)
        self.policy.start(capacity, next_use)

    def _reset(self) -> None:
        self._balance, self._missing = 0.0, 0
        self._lru: OrderedDict[Hashable, int] = OrderedDict()  # key to number of the access
        self._num_accesses = 0
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
        self.policy.pin(block)

    def _access(self, nodes: list[Node]) -> None:
        if not self._is_looked_up:
            self.look_up([node.key for node in reversed(nodes)])
        self._is_looked_up = False
        self.policy.release_many([node.block for node in nodes])
        for node in nodes:
            node.memo = True

    def _offer(self, node: Node) -> None:
        """The wrapped policy keeps the leaves."""

    _withdraw = _offer

    def _take(self) -> Node:
        if self._missing + 1 > self._balance:
            block = self.policy.evict_before(next(iter(self._lru.values()), 0))
        else:
            block = self.policy.evict()
            check_victims(self.policy, (block,), self._released.__contains__)
            node = self._nodes[block]
            if node.children and node.key in self._lru:
                parent = node.parent.key if node.parent else None
                self.policy.insert(block, node.key, parent, node.depth)
                self.policy.release(block)
                block = None
        if block is None:
            block = next(iter(self._released))
            self.policy.remove(block)
        return self._nodes[block]

    def remove(self, block: int) -> None:
        self.policy.remove(block)
        self._evicted(self._nodes[block])

    def _give_up(self, node: Node) -> None:
        super()._give_up(node)
        self._missing += node.key in self._lru and node.key not in self._with_key
