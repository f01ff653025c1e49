"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from cache.policies.priority import BlockHistory, PriorityPolicy


class LRU(PriorityPolicy):
    """Evicts the block whose last access is oldest.

    With blocks released tail first this is the free queue of vLLM v1 (a doubly linked list with
    O(1) removal from the middle) and of Nano-vLLM.  Partial blocks wait in the same queue, as
    they do there.  An OrderedDict, which is a hash map over a linked list, keeps that order at C
    speed; ``priority`` says the same to the compiled replay.
    """

    name = "lru"
    queues_uncached = True
    compilable = True

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.accessed

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, block, key, parent, depth) -> None:
        pass

    def pin(self, block: int) -> None:
        del self._order[block]

    def release(self, block: int) -> None:
        self._order[block] = None

    def evict(self) -> int:
        if not self._order:
            raise IndexError("evict: no block is released")
        return self._order.popitem(last=False)[0]

    def discard(self, block: int) -> None:
        del self._order[block]

    def release_many(self, blocks: Iterable[int]) -> None:
        self._order.update(dict.fromkeys(blocks))

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)
