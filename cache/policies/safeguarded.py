"""Bounds how far any policy can fall below LRU."""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from cache.policies.base import EvictionPolicy, RequestInfo, wrong_victim
from cache.policies.leaves import LeafPolicy
from cache.policies.wrapping import WrappingPolicy


class Safeguarded(WrappingPolicy, LeafPolicy):
    """``policy`` with at least LRU's hits minus ``budget`` x block references (PageLab).

    The safeguard simulates the same pool under LRU, including blocks without content.  *Balance* =
    hits - LRU's hits + ``budget`` x references, at most the capacity.  *Missing* = number of blocks
    that LRU holds and the pool does not.  A victim of ``policy`` is set aside with the blocks that
    continue it.  Set-aside leaves that LRU has evicted are evicted first.  Without them, another
    set-aside leaf is evicted if missing + 1 <= balance; otherwise ``policy`` names the next victim.

    The bound is proven after every request, for models with one group of layers, for serial replay
    of traces whose ids are unique to their prefix, and for managers that serve one request at a
    time (docs/eviction-study.md lists all assumptions).  ``radix`` ranks nodes and does not call
    ``look_up``, so its balance stays 0.

    ``policy`` is the name of a policy, made with ``options``, or a policy object.  Raises
    ValueError for a negative or infinite ``budget`` or a policy that does not define ``remove``.
    """

    name = "safeguarded"

    def __init__(
        self, policy: str | EvictionPolicy = "gittins", budget: float = 0.005, **options: object
    ) -> None:
        super().__init__(policy, **options)
        if not 0 <= budget < math.inf:
            raise ValueError(f"budget must be finite and not negative, got {budget}")
        if "remove" not in self.policy.hooks:
            raise ValueError(f"policy {self.policy.name!r} does not define remove(block)")
        self.budget = float(budget)

    def _reset(self) -> None:
        self._balance = 0.0
        self._missing: OrderedDict[Hashable, None] = OrderedDict()
        # Contents of the LRU cache: evictable contents in LRU order, and contents in use.
        self._lru: OrderedDict[Hashable, None] = OrderedDict()
        self._in_use: OrderedDict[Hashable, None] = OrderedDict()
        # Contents that LRU holds (or takes next) and that the pool will insert.
        self._awaited: OrderedDict[Hashable, None] = OrderedDict()
        # Set-aside leaves, the first offered first: those that LRU lacks, and those that it holds.
        self._lacked: OrderedDict[int, None] = OrderedDict()
        self._held: OrderedDict[int, None] = OrderedDict()

    insert = LeafPolicy.insert

    def tell(self, request: RequestInfo) -> None:
        self.policy.tell(request)

    def look_up(self, keys: Sequence[Hashable]) -> None:
        self.policy.look_up(keys)
        while len(self._awaited):
            self._awaited.popitem(False)
        gain = 0
        for key in keys[::-1]:
            is_held = key in self._lru
            gain -= is_held or key in self._in_use
            if self._block_with(key) >= 0:
                gain += 1
            else:
                self._awaited.setdefault(key)
                self._missing.pop(key, None)
            if is_held or key not in self._in_use:
                self._lru.setdefault(key)
                self._lru.move_to_end(key)
        self._balance += gain + self.budget * len(keys)
        self._balance = min(self._balance, float(self._capacity))
        self._shrink(self._capacity)

    def miss(self, key: Hashable) -> None:
        self.policy.miss(key)
        if key in self._lru:
            self._lru.move_to_end(key)
            self._awaited.setdefault(key)

    def _shrink(self, size: int) -> None:
        while len(self._lru) and len(self._lru) + len(self._in_use) > size:
            key, _ = self._lru.popitem(False)
            self._missing.pop(key, None)
            block = self._block_with(key)
            if block >= 0 and block in self._held:
                self._held.pop(block, None)
                self._lacked.setdefault(block)

    def _use(self, key: Hashable) -> None:
        """Mark ``key`` as in use under LRU, because it is in use in the pool."""
        self._in_use.setdefault(key)
        if key in self._lru:
            self._lru.pop(key, None)
            self._missing.pop(key, None)
        else:
            self._shrink(self._capacity)

    def _inserted(self, block: int) -> None:
        node = self._nodes[block]
        self.policy.insert(block, self._key_of(block), self._key_of(node.parent), node.depth)
        key = self._content(block)
        self._use(key)
        self._awaited.pop(key, None)

    def _pinned(self, block: int) -> None:
        node = self._nodes[block]
        if node.value < 0:
            self.policy.pin(block)
        else:
            node.value = -1.0
            self.policy.miss(self._key_of(block))
            self.policy.insert(block, self._key_of(block), self._key_of(node.parent), node.depth)
        self._use(self._content(block))

    def _block_with(self, key: Hashable) -> int:
        """The block that holds ``key``; -1 if no block does."""
        return self._with_key.get(key, -1)

    def _key_of(self, block: int) -> Hashable | None:
        return self._nodes[block].key if block >= 0 else None

    def _content(self, block: int) -> Hashable:
        """The key of the used ``block``.  A copy, (content, block), swaps with a released block."""
        node = self._nodes[block]
        other = self._with_key.get(node.key[0], -1) if type(node.key) is tuple else -1
        if other not in self._released:
            return node.key
        original = self._nodes[other]
        if not original.children:
            self._withdraw(other)
        if original.value < 0:
            self.policy.remove(other)
        for moved, at in ((node, block), (original, other)):
            if moved.parent >= 0:
                del self._nodes[moved.parent].children[at]
        for moved, at in ((node, other), (original, block)):
            self._nodes[at], self._with_key[moved.key] = moved, at
            moved.released, moved.value = at == other, 1.0 if at == other else -1.0
            if moved.parent >= 0:
                self._nodes[moved.parent].children[at] = None
        for child in original.children:
            self._nodes[child].parent = block
        self._offer(other)
        return original.key

    def _access(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            key = self._key_of(block)
            self._in_use.pop(key, None)
            self._lru.setdefault(key)
        self._shrink(self._capacity)
        self.policy.release_many(blocks)

    def _offer(self, block: int) -> None:
        if self._nodes[block].value >= 0:  # set aside
            if self._key_of(block) in self._lru:
                self._held.setdefault(block)
            else:
                self._lacked.setdefault(block)

    def _withdraw(self, block: int) -> None:
        self._held.pop(block, None)
        self._lacked.pop(block, None)

    def _take(self) -> int:
        # LRU needs a block, too, and a block for each block without content or with awaited
        # content.
        self._shrink(self._num_nodes() + len(self._awaited) - 1)
        may_lose = len(self._missing) + 1 <= self._balance
        while not len(self._lacked) and not (may_lose and len(self._held)):
            block = self._next_victim()
            if block < 0:
                break
            self._set_aside(block)
        if len(self._lacked):
            return self._lacked.popitem(False)[0]
        return self._held.popitem(False)[0] if len(self._held) else -1

    def _num_nodes(self) -> int:
        return len(self._nodes)

    def _next_victim(self) -> int:
        """The next victim of ``policy``; -1 if it has none, because blocks in use are copies."""
        if not len(self.policy):
            return -1
        block = self.policy.evict()
        if block not in self._released or self._nodes[block].value >= 0:
            raise wrong_victim(self.policy, block)
        return block

    def _set_aside(self, block: int) -> None:
        """Set aside ``block``, a victim of ``policy``, and the released blocks that continue it."""
        blocks = [block]
        for at in blocks:  # the list grows in the loop
            self._nodes[at].value = 1.0
            if not self._nodes[at].children:
                self._offer(at)
            for child in self._children(at):
                node = self._nodes[child]
                if node.released and node.value < 0:
                    self.policy.remove(child)
                    blocks.append(child)

    def _children(self, block: int) -> Iterable[int]:
        return self._nodes[block].children

    def _gone(self, block: int) -> None:
        if self._nodes[block].value < 0:
            self.policy.remove(block)
        key = self._key_of(block)
        if key in self._lru:
            self._missing.setdefault(key)
