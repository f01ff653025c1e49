"""Least recently used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from cache.policies.base import EvictionPolicy
from cache.policies.priority import BlockHistory, PriorityPolicy


class LRU(PriorityPolicy):
    """Evicts the block whose last access is oldest.

    With blocks released tail first this is the free queue of vLLM v1 (a doubly linked list with
    O(1) removal from the middle) and of Nano-vLLM.  Partial blocks wait in the same queue, as
    they do there.

    The queue is a deque of releases from which nothing is removed in the middle.  A pin makes the
    block's entry stale, and the block may queue up behind it again; stale entries are dropped when
    they reach the front, or all together when they are the greater part.  Removal is so O(1)
    amortised, and a whole prompt is released by one C call.  ``priority`` says the same to the
    compiled replay.
    """

    name = "lru"
    queues_uncached = True
    compilable = True

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.accessed

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        self._queue: deque[int] = deque()
        self._stale: dict[int, int] = {}  # number of stale entries, the front ones, per block
        self._num_released = 0

    insert = EvictionPolicy.insert  # remembers nothing of the content

    def pin(self, block: int) -> None:
        self.pin_many((block,))

    def release(self, block: int) -> None:
        self.release_many((block,))

    def evict(self) -> int:
        return self.evict_many(1)[0]

    def discard(self, block: int) -> None:
        self.pin_many((block,))

    def pin_many(self, blocks: Iterable[int]) -> None:
        stale, blocks = self._stale, list(blocks)
        for block in blocks:
            stale[block] = stale.get(block, 0) + 1
        self._num_released -= len(blocks)

    def release_many(self, blocks: Iterable[int]) -> None:
        before = len(self._queue)
        self._queue.extend(blocks)
        self._num_released += len(self._queue) - before
        if len(self._queue) > 2 * self._num_released + 64:
            self._queue = deque(self)
            self._stale.clear()

    def evict_many(self, count: int) -> list[int]:
        if count > self._num_released:
            raise IndexError(f"evict: count={count}, but {self._num_released} blocks are released")
        stale, pop = self._stale, self._queue.popleft
        victims: list[int] = []
        while len(victims) < count:
            block = pop()
            if block not in stale:
                victims.append(block)
            elif stale[block] > 1:
                stale[block] -= 1
            else:
                del stale[block]
        self._num_released -= count
        return victims

    def __len__(self) -> int:
        return self._num_released

    def __iter__(self) -> Iterator[int]:
        stale = self._stale.copy()
        for block in self._queue:
            if stale.get(block):
                stale[block] -= 1
            else:
                yield block
