"""The physical blocks of a cache: users, content and order of eviction."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain

from cache.blocks.events import AllBlocksCleared, BlockRemoved, Event
from cache.checks import require
from cache.policies.base import EvictionPolicy, check_victims


class OutOfBlocks(RuntimeError):
    """A call needs more blocks than are free.

    Attributes:
        needed: number of free blocks that the call would have taken.
        free: number of free blocks.
        longest_run: blocks of the longest free run.  None if the design needs no adjacent blocks.
    """

    def __init__(self, needed: int, free: int, longest_run: int | None = None) -> None:
        super().__init__(needed, free, longest_run)
        self.needed, self.free, self.longest_run = needed, free, longest_run

    def __str__(self) -> str:
        if self.longest_run is None:
            return f"{self.needed} blocks are needed, {self.free} are free"
        return (
            f"a run of {self.needed} blocks is needed, {self.free} are free, "
            f"at most {self.longest_run} of them in a run"
        )


def check_free(needed: int, free: int) -> None:
    """Raise OutOfBlocks if more blocks are ``needed`` than are ``free``."""
    if needed > free:
        raise OutOfBlocks(needed, free)


class BlockPool:
    """``num_blocks`` blocks with reference counts, an index by content hash, and a policy.

    A block is always in one of three states:

        free           no user, and no content that can be found; the last freed is taken first,
                       and blocks that were never used come last, in the order 0, 1, 2 ...
        cached-free    no user, but the content is indexed: a lookup can find the block again
        referenced     in ``ref_counts[block]`` tables; the content may be indexed

    The eviction policy owns the cached-free blocks and evicts only when no block is free.  A block
    loses its content only when it is taken again.  With ``lru`` the order equals vLLM v1's free
    queue, where blocks without a hash are put at the front.

    Several blocks hold the same content if sequences computed them at the same time.  All these
    blocks are indexed, and a lookup finds the oldest.

    Only the pool writes the first three attributes.

    Attributes:
        num_free_blocks: number of blocks without a user (free and cached-free).
        ref_counts: for each block, the number of tables that hold it.
        block_hashes: for each block, the hash of its content.  None if it cannot be found.
        policy: the eviction policy, which the pool starts and owns.
        queue_uncached: True puts free and cached-free blocks into one queue, as in older vLLM v1.
            A manager sets it before it takes a block.
        events: events of removed content.  None if the manager does not report events.
        counts: ``allocated_blocks``, and ``evicted_blocks``: allocations that overwrote content.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy, counts: dict[str, int]) -> None:
        policy.start(num_blocks)
        self.num_blocks = self.num_free_blocks = num_blocks
        self.policy = policy
        self.ref_counts: list[int] = [0] * num_blocks
        self.counts = counts
        self.queue_uncached = False
        self.events: list[Event] | None = None
        self._free = list(range(num_blocks))[::-1]  # a stack
        self.block_hashes: list[bytes | None] = [None] * num_blocks
        self._holders: dict[bytes, int] = {}  # hash -> oldest block with this content
        self._duplicates: dict[bytes, list[int]] = {}  # hash -> younger blocks, oldest first
        self._reports_misses = "miss" in policy.hooks
        self._reports_content = "insert" in policy.hooks

    def free_blocks(self) -> Iterator[int]:
        """The blocks without a user, in the order in which the pool would take them now."""
        return chain(reversed(self._free), self.policy)

    def __contains__(self, key: bytes) -> bool:
        """Whether ``lookup`` would find a block for ``key``."""
        return key in self._holders

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of ``hashes``.  Valid until blocks are taken next."""
        hits = []
        for key in hashes:
            block = self._holders.get(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def find(self, key: bytes) -> int | None:
        """The block that ``lookup`` finds for ``key``; None if there is none."""
        return self._holders.get(key)

    def num_revived(self, hits: Sequence[int]) -> int:
        """Number of blocks in ``hits`` that have no user and so count as free."""
        return list(map(self.ref_counts.__getitem__, hits)).count(0)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks.  They get one user each and lose their former content.

        If it raises OutOfBlocks, nothing has changed.
        """
        check_free(count, self.num_free_blocks)
        return self._take(count)

    def insert(self, key: bytes, parent: bytes | None, depth: int) -> int:
        """Take a block for the content ``key``, which no block has.  Raises OutOfBlocks.

        ``parent``: the content before it, or None.  ``depth``: its position in the prompt.
        """
        if self._reports_misses:
            self.policy.miss(key)
        (block,) = self.allocate(1)
        self._holders[key] = block
        self.block_hashes[block] = key
        if self._reports_content:
            self.policy.insert(block, key, parent, depth)
        return block

    def discard(self, block: int) -> None:
        """Drop the content of the cached-free ``block``.  The policy must define ``remove``."""
        self.policy.remove(block)
        self._forget([block])
        self._free.append(block)

    def extend(
        self, blocks: list[int], length: int, hashes: Sequence[bytes], positions: Sequence[int]
    ) -> None:
        """Extend the table ``blocks`` of a sequence to ``length``, and index its full blocks.

        If the table is longer already, no block is taken.  The blocks at the rising ``positions``
        are indexed by their ``hashes``.  Enough blocks must be free.
        """
        count = length - len(blocks)
        if self._reports_misses:
            for depth in positions:  # one by one: the new block may affect eviction
                if hashes[depth] not in self._holders:
                    self.policy.miss(hashes[depth])
                if depth >= len(blocks):
                    blocks += self._take(depth + 1 - len(blocks))
                self._publish(blocks, hashes, (depth,))
            count = length - len(blocks)
        if count > 0:
            blocks += self._take(count)
        if positions and not self._reports_misses:
            self._publish(blocks, hashes, positions)

    def share(self, blocks: Sequence[int]) -> None:
        """Add a user to each of ``blocks``.  They are in use, or ``lookup`` has found them.

        The blocks are no longer free, so the request that hit them cannot evict them.
        """
        ref_counts = self.ref_counts
        revived = [block for block in blocks if not ref_counts[block]]
        if revived:
            self.num_free_blocks -= len(revived)
            self.policy.pin_many(revived)
        for block in blocks:
            ref_counts[block] += 1

    def _take(self, count: int) -> list[int]:
        """Take ``count`` blocks, with one user each; at least ``count`` must be free."""
        self.counts["allocated_blocks"] += count
        self.num_free_blocks -= count
        blocks = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(blocks) :]
        missing = count - len(blocks)
        if missing:
            evicted = self.policy.evict_many(missing)
            check_victims(self.policy, evicted, self._is_released, missing)
            self._forget(evicted)
            blocks += evicted
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def _forget(self, evicted: list[int]) -> None:
        """Drop the content of the blocks ``evicted``, which the policy has just returned."""
        hashes, holders, duplicates = self.block_hashes, self._holders, self._duplicates
        self.counts["evicted_blocks"] += len(evicted)
        for block in evicted:
            key, hashes[block] = hashes[block], None
            if key is None:  # it had no content
                self.counts["evicted_blocks"] -= 1
                continue
            if self.events is not None:
                self.events.append(BlockRemoved([key]))
            if key not in duplicates:
                del holders[key]
                continue
            younger = duplicates[key]
            if holders[key] == block:
                holders[key] = younger.pop(0)
            else:
                younger.remove(block)
            if not younger:
                del duplicates[key]

    def _is_released(self, block: int) -> bool:
        """Whether the policy may own ``block``."""
        if block >= self.num_blocks or self.ref_counts[block]:
            return False
        return self.queue_uncached or self.block_hashes[block] is not None

    def _publish(
        self, table: Sequence[int], hashes: Sequence[bytes], positions: Sequence[int]
    ) -> None:
        """Index the blocks of ``table`` at ``positions`` by their ``hashes``.

        For the policy the key of a block is its hash.  The key of a duplicate is (hash, block), so
        that keys are unique.
        """
        holders, content, reports = self._holders, self.block_hashes, self._reports_content
        for depth in positions:
            block, key = table[depth], hashes[depth]
            content[block] = key
            name: Hashable = key
            if holders.setdefault(key, block) != block:
                self._duplicates.setdefault(key, []).append(block)
                name = (key, block)
            if reports:
                self.policy.insert(block, name, hashes[depth - 1] if depth else None, depth)

    def free(self, blocks: Sequence[int]) -> None:
        """Remove a user from each of ``blocks``, which are in the order of their sequence.

        Blocks that have no user left become free or cached-free, the last of the sequence first.
        In ``blocks`` all cached blocks must come before the uncached blocks.
        """
        ref_counts, hashes = self.ref_counts, self.block_hashes
        released = []
        for block in reversed(blocks):
            ref_counts[block] -= 1
            if not ref_counts[block]:
                released.append(block)
        self.num_free_blocks += len(released)
        num_uncached = 0
        while num_uncached < len(released) and hashes[released[num_uncached]] is None:
            num_uncached += 1
        if num_uncached and not self.queue_uncached:
            self._free += reversed(released[:num_uncached])
            del released[:num_uncached]
        else:
            for block in released[:num_uncached]:
                self.policy.insert(block, (None, block), None, 0)
        self.policy.release_many(released)

    def reset_prefix_cache(self) -> None:
        """Drop the content of every block; no block may be in use.

        The order in which blocks would be taken stays the same.  The policy restarts empty.
        """
        self._free = list(self.free_blocks())[::-1]
        self.policy.start(self.num_blocks)
        self._holders.clear()
        self._duplicates.clear()
        self.block_hashes[:] = [None] * self.num_blocks  # in place: a manager may hold this list
        if self.events is not None:
            self.events.append(AllBlocksCleared())

    def check_invariants(self) -> None:
        """Raise AssertionError, with the block, unless the state is consistent.  O(num_blocks)."""
        held: dict[bytes, list[int]] = {}
        for block, key in enumerate(self.block_hashes):
            if key is not None:
                held.setdefault(key, []).append(block)
        younger = self._duplicates
        found = {key: sorted([b, *younger.get(key, ())]) for key, b in self._holders.items()}
        require(held == found, f"blocks hold {held}, found are {found}")
        require(all(younger.values()) and younger.keys() <= found.keys(), f"duplicates: {younger}")
        policy = self.policy
        queued = list(policy)
        require(len(queued) == len(policy), f"policy has {len(queued)}, says {len(policy)} blocks")
        idle = [*self._free, *queued]
        require(len(idle) == self.num_free_blocks, f"{len(idle)} free, not {self.num_free_blocks}")
        require(len(idle) == len(set(idle)), f"a block is free twice: {sorted(idle)}")
        is_free, with_policy = set(idle), set(queued)
        for block, users in enumerate(self.ref_counts):
            is_cached, is_idle = self.block_hashes[block] is not None, block in is_free
            require(users >= 0, f"block {block} has ref_count {users}")
            require((users == 0) == is_idle, f"block {block}: ref_count {users}, free: {is_idle}")
            if is_idle and not self.queue_uncached:
                require(
                    is_cached == (block in with_policy),
                    f"free block {block}: cached {is_cached}, the policy has {sorted(with_policy)}",
                )
            if is_idle and block not in with_policy:
                require(not is_cached, f"block {block} has content but cannot be evicted")
