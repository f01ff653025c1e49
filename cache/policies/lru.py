"""Least recently used."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from cache.policies.base import EvictionPolicy
from cache.policies.priority import BlockHistory, PriorityPolicy


class LRU(PriorityPolicy):
    """Evicts the block whose last access is oldest: the free queue of vLLM v1 and Nano-vLLM."""

    name = "lru"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.accessed

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict()

    tell, insert = EvictionPolicy.tell, EvictionPolicy.insert  # content does not matter

    def pin(self, block: int) -> None:
        del self._queue[block]

    def release(self, block: int) -> None:
        self._queue[block] = None

    def pin_many(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            del self._queue[block]

    def release_many(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._queue[block] = None

    def evict(self) -> int:
        if not self._queue:
            raise IndexError("evict: no block is released")
        return self._queue.popitem(last=False)[0]

    def evict_many(self, count: int) -> list[int]:
        if count > len(self._queue):
            raise IndexError(f"evict_many: count={count}, but {len(self)} blocks are released")
        popitem = self._queue.popitem
        return [popitem(False)[0] for _ in range(count)]

    def remove(self, block: int) -> None:
        del self._queue[block]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[int]:
        return iter(self._queue)
