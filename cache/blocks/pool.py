"""The physical blocks of a cache: who uses them, what they hold, which go next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from cache.blocks.event_log import EventLog
from cache.checks import require
from cache.policies.base import EvictionPolicy, check_victims


class OutOfBlocks(RuntimeError):
    """A call needs more blocks than are free.  It has changed nothing.

    Attributes:
        needed: blocks that the call would have taken from the free ones.
        free: blocks that are free.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} blocks are needed, {free} are free")
        self.needed = needed
        self.free = free


def check_free(needed: int, free: int) -> None:
    """Raise OutOfBlocks if more blocks are ``needed`` than are ``free``."""
    if needed > free:
        raise OutOfBlocks(needed, free)


class BlockPool:
    """``num_blocks`` blocks with reference counts, an index by content hash, and a policy.

    A block is always in one of four states:

        free           no user, and its content cannot be found; the last freed is given out first
        fresh          never handed out; given out in the order 0, 1, 2 ... after the free ones
        cached-free    no user, but its content is indexed: a lookup can revive it
        referenced     in use by ``ref_counts[block]`` tables, indexed or not

    Cached-free blocks belong to the eviction policy, which is asked when there are no others, and
    lose their content only when they are handed out again.  With ``lru`` this is the free queue of
    today's vLLM v1, which puts blocks without a hash to its front.  With ``queue_uncached`` free
    blocks wait with the cached-free ones, as in a single queue: that of older vLLM v1.

    Several blocks may hold the same content (they were computed side by side).  All of them are
    indexed and a lookup finds the one that was cached first among those that remain.

    State is kept in plain lists with an entry a block, not in an object a block, so that pools of
    a million blocks are made in milliseconds and most work is done by C loops.

    Attributes:
        num_free_blocks: blocks without a user: fresh, free and cached-free; likewise read-only.
        ref_counts: number of tables that hold each block; read-only to others.
        block_hashes: hash of what each block holds, None if that cannot be found; likewise.
        policy: the eviction policy, started anew by the pool and owned by it.
        counts: of ``allocated_blocks``, handed out so far, and ``evicted_blocks``, those of them
            that were cached-free before.
        on_forget: called with blocks whose content is given up, if set.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: EvictionPolicy,
        *,
        queue_uncached: bool = False,
        event_log: EventLog | None = None,
    ) -> None:
        policy.start(num_blocks)
        self.num_blocks = self.num_free_blocks = num_blocks
        self.policy = policy
        self.ref_counts: list[int] = [0] * num_blocks
        self.counts = {"allocated_blocks": 0, "evicted_blocks": 0}
        self._num_fresh = num_blocks
        self._free: list[int] = []  # a stack: free blocks that the policy does not have
        self._queue_uncached = queue_uncached
        self.block_hashes: list[bytes | None] = [None] * num_blocks
        self._holders: dict[bytes, list[int]] = {}  # blocks with that content, by age
        self._log = event_log
        self.on_forget: Callable[[list[int]], None] | None = None
        self._tells_misses = type(policy).miss is not EvictionPolicy.miss

    def free_blocks(self) -> Iterator[int]:
        """Blocks without a user, in the order in which they would be handed out now."""
        fresh = range(self.num_blocks - self._num_fresh, self.num_blocks)
        return chain(reversed(self._free), fresh, self.policy)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest run of ``hashes``, those of a prefix, that is cached.

        Changes nothing.  Valid until blocks are allocated next.
        """
        hits = []
        for key in hashes:
            holders = self._holders.get(key)
            if holders is None:
                break
            hits.append(holders[0])
        return hits

    def num_revived(self, hits: Sequence[int]) -> int:
        """How many of ``hits`` have no user: taking them lowers the number of free blocks."""
        ref_counts = self.ref_counts
        return sum([not ref_counts[block] for block in hits])

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one user each, whose former content is forgotten.

        Raises OutOfBlocks, changing nothing.
        """
        check_free(count, self.num_free_blocks)
        return self._take(count)

    def extend(
        self, blocks: list[int], count: int, hashes: Sequence[bytes], first: int, last: int
    ) -> None:
        """Hand out ``count`` blocks, none if that is negative, to the end of ``blocks``, those of a
        sequence, and make the content of ``blocks[first:last]`` findable under their ``hashes``.

        These are in use and full.  A hash that is cached already stays with the block that has it,
        and the new block becomes its duplicate.  Raises OutOfBlocks, changing nothing.
        """
        end = len(blocks) + max(0, count)
        if count > 0:
            check_free(count, self.num_free_blocks)
        if self._tells_misses:  # one by one: the victim may depend on the newcomer
            for position in range(first, last):
                if hashes[position] not in self._holders:
                    self.policy.miss(hashes[position])
                if position == len(blocks):
                    blocks += self._take(1)
                self._publish(blocks, hashes, position, position + 1)
            first = last
        if len(blocks) < end:
            blocks += self._take(end - len(blocks))
        if first < last:
            self._publish(blocks, hashes, first, last)

    def revive(self, hits: Sequence[int], count: int = 0) -> None:
        """Add a user to each of ``hits``, which were looked up, also to those that have none.

        They leave the free blocks, so that none of them is evicted for the request that hit it.
        Raises OutOfBlocks, changing nothing, unless ``count`` blocks are free beside them.
        """
        ref_counts = self.ref_counts
        revived = [block for block in hits if not ref_counts[block]]
        check_free(count + len(revived), self.num_free_blocks)
        self.num_free_blocks -= len(revived)
        if revived:
            self.policy.pin_many(revived)
        if len(revived) < len(hits):
            self.share([block for block in hits if ref_counts[block]])
        for block in revived:
            ref_counts[block] = 1
        if self._log:
            self._log.record("hit", hits, map(self.block_hashes.__getitem__, hits))

    def share(self, blocks: Sequence[int]) -> None:
        """Add a user to each of ``blocks``, all of which are in use."""
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] += 1

    def _take(self, count: int) -> list[int]:
        """Remove ``count`` blocks, which there are, from the free ones; each gets one user."""
        ref_counts = self.ref_counts
        self.counts["allocated_blocks"] += count
        self.num_free_blocks -= count
        blocks = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(blocks) :]
        if len(blocks) < count and self._num_fresh:
            first = self.num_blocks - self._num_fresh
            blocks += range(first, first + min(count - len(blocks), self._num_fresh))
            self._num_fresh = self.num_blocks - blocks[-1] - 1
        if len(blocks) < count:
            evicted = self.policy.evict_many(count - len(blocks))
            self._forget(evicted)
            blocks += evicted
        for block in blocks:
            ref_counts[block] = 1
        if self._log:
            self._log.record("allocated", blocks)
        return blocks

    def _forget(self, evicted: list[int]) -> None:
        """Drop the content of ``evicted``, which the policy has just given up."""
        check_victims(self.policy, evicted, self._is_released)
        hashes = self.block_hashes
        cached = [block for block in evicted if hashes[block] is not None]
        if self._log:
            self._log.record("evicted", cached, map(hashes.__getitem__, cached))
        if self.on_forget:
            self.on_forget(evicted)
        self.counts["evicted_blocks"] += len(cached)
        for block in cached:
            holders = self._holders[hashes[block]]
            holders.remove(block)
            if not holders:
                del self._holders[hashes[block]]
            hashes[block] = None

    def _is_released(self, block: int) -> bool:
        """Whether the policy has, or just had, ``block``."""
        if block >= self.num_blocks - self._num_fresh or self.ref_counts[block]:
            return False
        return self._queue_uncached or self.block_hashes[block] is not None

    def _publish(
        self, blocks: Sequence[int], hashes: Sequence[bytes], first: int, last: int
    ) -> None:
        """Make the content of ``blocks[first:last]`` findable; the policy knows of its absence.

        It is told of a block under its hash, or, for a duplicate, under a key of its own: no two
        blocks that a policy knows ever have the same key.
        """
        parent = hashes[first - 1] if first else None
        for depth in range(first, last):
            block, key = blocks[depth], hashes[depth]
            self.block_hashes[block] = key
            holders = self._holders.setdefault(key, [])
            holders.append(block)
            name = key if len(holders) == 1 else (key, block)
            self.policy.insert(block, name, parent, depth)
            parent = key
        if self._log:
            self._log.record("cached", blocks[first:last], hashes[first:last])

    def free(self, blocks: Sequence[int]) -> None:
        """Remove a user from each of ``blocks``, given from the first of the sequence to the last.

        Those without a user left become free or cached-free, the last of the sequence first.
        Blocks that are cached come before those that are not.
        """
        ref_counts, hashes = self.ref_counts, self.block_hashes
        released = []
        for block in reversed(blocks):
            if ref_counts[block] > 1:
                ref_counts[block] -= 1
            else:
                ref_counts[block] = 0
                released.append(block)
        self.num_free_blocks += len(released)
        if self._log:
            self._log.record("freed", released)
        num_uncached = 0
        while num_uncached < len(released) and hashes[released[num_uncached]] is None:
            num_uncached += 1
        if num_uncached and not self._queue_uncached:
            self._free += reversed(released[:num_uncached])
            del released[:num_uncached]
        else:
            for block in released[:num_uncached]:
                self.policy.insert(block, (None, block), None, 0)
        self.policy.release_many(released)

    def reset_prefix_cache(self) -> None:
        """Forget the content of every block, none of which is in use."""
        if not self._queue_uncached:
            self._free += reversed(list(self.policy))
            self.policy.start(self.num_blocks)
        self._holders.clear()
        self.block_hashes[:] = [None] * self.num_blocks  # which others may hold

    def check_invariants(self) -> None:
        """Raise AssertionError, saying which block is wrong, unless the state is consistent.

        Every block is in one state only, the policy holds what it should and nothing twice,
        the index and the blocks agree.  O(num_blocks).
        """
        held: dict[bytes, list[int]] = {}
        for block, key in enumerate(self.block_hashes):
            if key is not None:
                held.setdefault(key, []).append(block)
        found = {key: sorted(holders) for key, holders in self._holders.items()}
        require(held == found, f"blocks hold {held}, found are {found}")
        num_blocks, policy = self.num_blocks, self.policy
        first_fresh = num_blocks - self._num_fresh
        queued = list(policy)
        require(0 <= self._num_fresh <= num_blocks, f"{self._num_fresh} fresh blocks")
        require(len(queued) == len(policy), f"policy has {len(queued)}, says {len(policy)} blocks")
        idle = [*range(first_fresh, num_blocks), *self._free, *queued]
        require(len(idle) == self.num_free_blocks, f"{len(idle)} free, not {self.num_free_blocks}")
        require(len(idle) == len(set(idle)), f"a block is free twice: {sorted(idle)}")
        idle, queued = set(idle), set(queued)
        for block, users in enumerate(self.ref_counts):
            is_cached, is_idle = self.block_hashes[block] is not None, block in idle
            require(users >= 0, f"block {block} has ref_count {users}")
            require((users == 0) == is_idle, f"block {block}: ref_count {users}, free: {is_idle}")
            if is_idle and not self._queue_uncached:
                require(
                    is_cached == (block in queued),
                    f"free block {block}: cached {is_cached}, with the policy {block in queued}",
                )
            if is_idle and block not in queued:
                require(not is_cached, f"block {block} has content that nobody can evict")
