"""The physical blocks of one device in vLLM's first block manager, and its evictor."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Blocks

from cache.checks import require
from cache.policies.base import EvictionPolicy, check_victims
from cache.policies.lazy_heap import LazyHeap

ContentKey = bytes | int
"""Content of a block: the hash of a full block, or a unique number."""


class LRUEvictor(EvictionPolicy):
    """vLLM's ``LRUEvictor``: oldest ``last_accessed`` first, then the largest number of tokens.

    A block is accessed when a sequence that holds it is scheduled, not when it is freed.  Equally
    old blocks are evicted by falling depth, then in the order of release.  The original scans the
    oldest blocks and assumes that times rise in the order of release.  This evictor is exact for
    any times, and O(log n) amortised.
    """

    name = "lru"

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        self._last_accessed = [-math.inf] * capacity
        self._depths = [0] * capacity
        self._heap: LazyHeap[int] = LazyHeap()

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        self._depths[block] = depth

    def touch(self, blocks: Iterable[int], time: float) -> None:
        """Record that a sequence with ``blocks`` was scheduled at ``time``."""
        last_accessed = self._last_accessed
        for block in blocks:
            if time > last_accessed[block]:  # another sequence may have been scheduled later
                last_accessed[block] = time

    def pin(self, block: int) -> None:
        self._heap.remove(block)

    def release(self, block: int) -> None:
        self._heap.push(block, self._last_accessed[block], -self._depths[block])

    def evict(self) -> int:
        _, block = self._heap.pop()
        self._last_accessed[block] = -math.inf
        return block

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[int]:
        return iter(self._heap)


class BlockAllocator:
    """The blocks of one device, GPU or CPU: their users and their content.

    Every block in use has a content key.  By these keys, a sequence that moves between the devices
    finds content that is already there.  A block without a user keeps the hash of its content, and
    belongs to the evictor, until it is taken again.  Content with a number is dropped at once.

    With ``caching`` (vLLM's ``CachedBlockAllocator``) blocks are taken in the order 0, 1 ..., then
    from the evictor.  Without it (``UncachedBlockAllocator``) all content has numbers, and the
    block that was released last is taken first.

    Attributes:
        ref_counts: number of tables that hold each block; only the allocator writes it.
        keys: content key of each block, None without content; only the allocator writes it.
        computed: 1 for blocks whose content was computed by a finished step.
        counts: ``allocated_blocks``, and ``evicted_blocks``: allocations that overwrote a hash.
    """

    def __init__(self, num_blocks: int, evictor: EvictionPolicy, caching: bool) -> None:
        evictor.start(num_blocks)
        self.num_blocks = num_blocks
        self.evictor = evictor
        self.ref_counts = [0] * num_blocks
        self.keys: list[ContentKey | None] = [None] * num_blocks
        self.computed = bytearray(num_blocks)
        self.counts = {"allocated_blocks": 0, "evicted_blocks": 0}
        self._stack = list(range(num_blocks))
        if caching:
            self._stack.reverse()
        self._index: dict[ContentKey | None, int] = {}
        self._touch = evictor.touch if caching and isinstance(evictor, LRUEvictor) else None
        self._queue_uncached = self._touch is not None

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a user, with the evictor or not."""
        return len(self._stack) + len(self.evictor)

    def block_with(self, key: ContentKey | None) -> int | None:
        """The block with the content ``key``, in use or with the evictor."""
        return self._index.get(key)

    def free_blocks(self) -> list[int]:
        """Blocks without a user, in the order in which they would be taken now."""
        return [*reversed(self._stack), *self.evictor]

    def share(self, block: int) -> None:
        """Add a user to a block, which leaves the evictor if it had none."""
        if not self.ref_counts[block]:
            self.evictor.pin(block)
        self.ref_counts[block] += 1

    def take(self, key: ContentKey, parent: ContentKey | None, depth: int) -> int:
        """Take a block for ``key`` at position ``depth``; at least one must be free."""
        hashed = isinstance(key, bytes)
        if hashed:
            self.evictor.miss(key)
        block = self._stack.pop() if self._stack else self._evict()
        self.counts["allocated_blocks"] += 1
        self.ref_counts[block] = 1
        self.computed[block] = 0
        self.keys[block] = key
        self._index[key] = block
        if hashed:
            self.evictor.insert(block, key, parent, depth)
        return block

    def rename(self, block: int, key: ContentKey, parent: ContentKey | None, depth: int) -> None:
        """Replace the number of ``block``, which is in use, by the content key ``key``."""
        del self._index[self.keys[block]]
        self.keys[block] = key
        self._index[key] = block
        if isinstance(key, bytes):
            self.evictor.miss(key)
            self.evictor.insert(block, key, parent, depth)

    def release(self, blocks: Blocks[int], time: float, first_depth: int = 0) -> None:
        """Remove a user, last scheduled at ``time``, from each of ``blocks``.

        They are in the order of the sequence, from position ``first_depth`` on.
        """
        ref_counts, idle = self.ref_counts, []
        if self._touch is not None:
            self._touch(blocks, time)
        for i in reversed(range(len(blocks))):
            block = blocks[i]
            ref_counts[block] -= 1
            if ref_counts[block]:
                continue
            if isinstance(self.keys[block], bytes):
                idle.append(block)
                continue
            del self._index[self.keys[block]]
            self.keys[block] = None
            if self._queue_uncached:
                self.evictor.insert(block, (None, block), None, first_depth + i)
                idle.append(block)
            else:
                self._stack.append(block)
        if idle:
            self.evictor.release_many(idle)

    def _evict(self) -> int:
        block = self.evictor.evict()
        check_victims(self.evictor, (block,), self._is_released)
        if self.keys[block] is not None:
            del self._index[self.keys[block]]
            self.counts["evicted_blocks"] += 1
        return block

    def _is_released(self, block: int) -> bool:
        """Whether the evictor could have ``block``."""
        if block >= self.num_blocks or self.ref_counts[block]:
            return False
        return self._queue_uncached or self.keys[block] is not None

    def check_invariants(self, users: dict[int, int]) -> None:
        """Raise AssertionError unless all is consistent and ``users`` are the reference counts."""
        free = self.free_blocks()
        require(
            len(free) == len(set(free)) == self.num_free_blocks,
            f"a block is free twice: {sorted(free)}",
        )
        idle, evictable = set(free), set(self.evictor)
        for block, (ref_count, key) in enumerate(zip(self.ref_counts, self.keys, strict=True)):
            require(
                ref_count == users.get(block, 0) and (ref_count == 0) == (block in idle),
                f"block {block} has ref_count {ref_count}, is in {users.get(block, 0)} tables "
                f"and is {'free' if block in idle else 'not free'}",
            )
            if key is None:
                wrong = ref_count > 0 or self.computed[block]
            else:
                wrong = self._index.get(key) != block
                wrong |= ref_count == 0 and not (isinstance(key, bytes) and block in evictable)
                wrong |= isinstance(key, int) and self.computed[block]
            require(
                not wrong,
                f"block {block} with ref_count {ref_count} holds {key!r}, "
                f"{'' if self.computed[block] else 'not '}computed; that key is "
                f"indexed as {self._index.get(key)}",
            )
        require(
            len(self._index) == sum(key is not None for key in self.keys),
            f"the index has {len(self._index)} entries, the blocks fewer",
        )
