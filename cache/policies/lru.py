"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from cache.common_prefix import common_prefix_length
from cache.policies.base import EvictionPolicy
from cache.policies.priority import BlockHistory, PriorityPolicy


class LRU(PriorityPolicy):
    """Evicts the block whose last access is oldest.

    With blocks released tail first this is the free queue of vLLM v1 (a doubly linked list with
    O(1) removal from the middle) and of Nano-vLLM, and leaf-aware: a block is used whenever one
    that continues it is, so it never goes first.  ``priority`` says the same to the compiled
    replay.

    The queue is made of runs: blocks that were released together, which is a prompt or its
    suffix.  Evictions shorten the oldest run from the tail of its prompt, and a hit takes a prefix
    off the head of a run, so both slice a list in C loops.  Pinning a block out of the middle of a
    run leaves a stale entry there, which an eviction drops when it meets it, or a pin drops with
    all others when they are the greater part: O(1) amortised as well.

    It trusts its owner to pin only what is released, and the other way round.
    """

    name = "lru"
    compilable = True

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.accessed

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        self._runs: OrderedDict[int, list[int]] = OrderedDict()  # by age; head of the prompt first
        self._run_with_head: dict[int, int] = {}
        self._num_runs = 0  # ever made
        self._stale: dict[int, int] = {}  # per block how many of its entries, the oldest, are stale
        self._num_stale = 0
        self._num_released = 0

    insert = EvictionPolicy.insert  # remembers nothing of the content
    tell = EvictionPolicy.tell

    def pin(self, block: int) -> None:
        self.pin_many((block,))

    def release(self, block: int) -> None:
        self.release_many((block,))

    def evict(self) -> int:
        return self.evict_many(1)[0]

    def pin_many(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        self._num_released -= len(blocks)
        start = 0
        while start < len(blocks):
            number = self._run_with_head.pop(blocks[start], None)
            if number is None:
                self._stale[blocks[start]] = self._stale.get(blocks[start], 0) + 1
                self._num_stale += 1
                start += 1
                continue
            run = self._runs[number]
            length = common_prefix_length(run, blocks[start:])
            del run[:length]
            start += length
            self._keep(number, run)
        if self._num_stale > self._num_released + 64:
            self._drop_stale_entries()

    def release_many(self, blocks: Iterable[int]) -> None:
        run = list(blocks)
        self._num_released += len(run)
        run.reverse()
        self._num_runs += 1
        self._keep(self._num_runs, run)

    def evict_many(self, count: int) -> list[int]:
        if count > self._num_released:
            raise IndexError(f"evict: count={count}, but {self._num_released} blocks are released")
        self._num_released -= count
        victims: list[int] = []
        while len(victims) < count:
            number, run = next(iter(self._runs.items()))
            wanted = count - len(victims)
            oldest = run[-wanted:][::-1]
            if len(run) > wanted:
                del run[-wanted:]
            else:
                del self._runs[number]
                if self._run_with_head.get(run[0]) == number:
                    del self._run_with_head[run[0]]
            victims += self._without_stale(oldest) if self._stale else oldest
        return victims

    def __len__(self) -> int:
        return self._num_released

    def __iter__(self) -> Iterator[int]:
        stale = self._stale.copy()
        for run in self._runs.values():
            for block in reversed(run):
                if stale.get(block):
                    stale[block] -= 1
                else:
                    yield block

    def _keep(self, number: int, run: list[int]) -> None:
        """Enter what is left of a run, or a new one."""
        if run:
            self._runs[number] = run
            self._run_with_head[run[0]] = number
        else:
            self._runs.pop(number, None)

    def _without_stale(self, entries: list[int]) -> list[int]:
        """The live ones of ``entries``, which are met in this order and dropped."""
        live = []
        for block in entries:
            count = self._stale.pop(block, 0)
            if not count:
                live.append(block)
                continue
            self._num_stale -= 1
            if count > 1:
                self._stale[block] = count - 1
        return live

    def _drop_stale_entries(self) -> None:
        runs = self._runs
        self._runs, self._run_with_head = OrderedDict(), {}
        for number, run in runs.items():
            self._keep(number, self._without_stale(run[::-1])[::-1])
