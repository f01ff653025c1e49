"""An eviction policy that knows the prompts of the waiting requests."""

import bisect
import math
from collections.abc import Callable, Hashable, Iterable, Sequence

from cache.policies.base import wrong_victim
from cache.policies.lazy_heap import LazyHeap
from cache.policies.wrapping import WrappingPolicy


class QueueInformed(WrappingPolicy):
    """``policy``, except that content of waiting requests is evicted last (vLLM, RFC 48485).

    A victim that ``policy`` chooses is spared while a waiting request asks for its content.  If all
    blocks are spared, the block that the queue needs last is evicted; ties: the deepest block.  The
    RFC looks at the first ``max_num_seqs`` requests and falls back to LRU; here all waiting
    requests count.  Without calls of ``on_queued`` victims are those of ``policy``.

    ``policy`` is the name of a policy, made with ``options``, or a policy object.
    """

    name = "queue_informed"

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        super().start(capacity, next_use)
        self._contents: dict[int, tuple[Hashable, Hashable | None, int]] = {}
        self._released: set[int] = set()  # released blocks that ``policy`` manages
        self._queue: dict[tuple[int, ...], Sequence[Hashable]] = {}
        self._wanted: dict[Hashable, list[tuple[int, ...]]] = {}  # key to positions, sorted
        self._spared: LazyHeap[int] = LazyHeap()  # victims of ``policy``, needed last first
        self._spared_block: dict[Hashable, int] = {}

    def on_queued(self, position: tuple[int, ...], keys: Sequence[Hashable]) -> None:
        super().on_queued(position, keys)
        for key in self._queue.pop(position, ()):
            positions = self._wanted[key]
            del positions[bisect.bisect_left(positions, position)]
            if not positions:
                del self._wanted[key]
            self._rank_again(key)
        if keys:
            self._queue[position] = keys
        for key in keys:
            bisect.insort(self._wanted.setdefault(key, []), position)
            self._rank_again(key)

    def _rank_again(self, key: Hashable) -> None:
        if (block := self._spared_block.get(key)) is not None:
            self._spared.remove(block)
            self._spare(block)

    def _spare(self, block: int) -> None:
        key, _, depth = self._contents[block]
        self._spared_block[key] = block
        position = self._wanted[key][0] if key in self._wanted else (math.inf,)
        self._spared.push(block, *(-number for number in position), -depth)

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        super().insert(block, key, parent, depth)
        self._contents[block] = key, parent, depth

    def pin(self, block: int) -> None:
        if block not in self._spared:
            self.policy.pin(block)
            self._released.remove(block)
        else:
            self._take(block)
            self.policy.miss(self._contents[block][0])
            self.policy.insert(block, *self._contents[block])

    def release(self, block: int) -> None:
        self.release_many((block,))

    def release_many(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        self.policy.release_many(blocks)
        self._released.update(blocks)

    def evict(self) -> int:
        while len(self.policy) and not self._has_unwanted():
            block = self.policy.evict()
            if block not in self._released:
                raise wrong_victim(self.policy, block)
            self._released.remove(block)
            if self._contents[block][0] not in self._wanted:
                break
            self._spare(block)
        else:
            if not self._spared:
                raise IndexError("evict: no block is released")
            block = self._spared.first()[1]
            self._take(block)
        del self._contents[block]
        return block

    def _has_unwanted(self) -> bool:
        """Whether some spared block's content is no longer wanted by any waiting request."""
        return bool(self._spared) and self._spared.first()[0] == -math.inf

    def _take(self, block: int) -> None:
        self._spared.remove(block)
        del self._spared_block[self._contents[block][0]]

    def __len__(self) -> int:
        return len(self.policy) + len(self._spared)
