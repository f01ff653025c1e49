"""A bound on how far below LRU any policy can fall."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from cache.policies.base import EvictionPolicy, Request, check_victims

if TYPE_CHECKING:
    from cache.policies.base import Replay


class Safeguarded(EvictionPolicy):
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
        self.policy.start(capacity, next_use)
        self._capacity = capacity
        self._balance, self._missing = 0.0, 0
        self._lru: OrderedDict[Hashable, int] = OrderedDict()  # key to number of the access
        self._num_accesses = 0
        self._is_looked_up = False
        self._contents: dict[int, tuple] = {}  # of blocks: key, key of the parent, depth
        self._blocks: dict[Hashable, int] = {}  # with that content
        self._children: Counter[Hashable] = Counter()  # resident ones
        self._new: set[Hashable] = set()  # inserted since the latest release
        self._released: dict[int, None] = {}  # in the order of release

    def tell(self, request: Request) -> None:
        self.policy.tell(request)

    def miss(self, key: Hashable) -> None:
        self.policy.miss(key)

    def look_up(self, keys: Sequence[Hashable]) -> None:
        self.policy.look_up(keys)
        hits = takewhile(lambda key: key in self._blocks and key not in self._new, keys)
        hits_of_lru = takewhile(self._lru.__contains__, keys)
        self._balance += len([*hits]) - len([*hits_of_lru]) + self.budget * len(keys)
        self._balance = min(self._balance, self._capacity)
        for key in reversed(keys):
            self._missing -= key in self._lru and key not in self._blocks
            self._lru[key] = self._num_accesses
            self._lru.move_to_end(key)
            self._num_accesses += 1
        while len(self._lru) > self._capacity:
            self._missing -= self._lru.popitem(last=False)[0] not in self._blocks
        self._is_looked_up = True

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        self.policy.insert(block, key, parent, depth)
        self._contents[block], self._blocks[key] = (key, parent, depth), block
        self._children[parent] += 1
        self._new.add(key)
        self._missing -= not self._is_looked_up and key in self._lru

    def pin(self, block: int) -> None:
        self.policy.pin(block)
        del self._released[block]

    def release(self, block: int) -> None:
        self.release_many((block,))

    def release_many(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        if not self._is_looked_up:
            self.look_up([self._contents[block][0] for block in reversed(blocks)])
        self.policy.release_many(blocks)
        self._released.update(dict.fromkeys(blocks))
        self._is_looked_up = False
        self._new.clear()

    def evict(self) -> int:
        if not self._released:
            raise IndexError("evict: no block is released")
        if self._missing + 1 > self._balance:
            block = self.policy.evict_before(next(iter(self._lru.values()), 0))
        else:
            block = self.policy.evict()
            check_victims(self.policy, (block,), self._released.__contains__)
            key = self._contents[block][0]
            if key in self._lru and self._children[key]:
                self.policy.insert(block, *self._contents[block])
                self.policy.release(block)
                block = None
        if block is None:
            block = next(iter(self._released))
            self.policy.remove(block)
        self._forget(block)
        return block

    def remove(self, block: int) -> None:
        self.policy.remove(block)
        self._forget(block)

    def __len__(self) -> int:
        return len(self._released)

    def compiled_replay(self) -> Replay | None:
        from cache.policies.gittins import Gittins

        if type(self) is Safeguarded and isinstance(self.policy, Gittins):
            return self.policy.compiled_replay(self.budget)
        return None

    def _forget(self, block: int) -> None:
        del self._released[block]
        key, parent, _ = self._contents.pop(block)
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
        if self._blocks.get(key) == block:
            del self._blocks[key]
            self._missing += key in self._lru
