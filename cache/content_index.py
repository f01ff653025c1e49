"""Which block holds which content: the hash index of a block pool."""

from __future__ import annotations

from collections.abc import Sequence


class ContentIndex:
    """Finds the blocks of a prefix by their chained hashes.

    Blocks with equal content (computed side by side) are all known; lookups find the *first* of
    them, the one that was added before the others that remain.  The rest are its duplicates.

    In effect this is a dictionary from hash to first block.  But a lookup in a big dictionary
    waits for memory at every step, so if ``linked`` only the blocks where a chain begins or
    branches are in one: a first block is found either there or through the link from the first
    block before it, never both.  Following links walks through blocks that were filled together,
    and costs the same in a pool of any size.  It needs hashes that do not collide: a hash then
    names the whole prefix, hence also the block before.

    Attributes:
        hashes: the content of each block, None where there is none that can be found; one None
            more at the end, which stands for "no block".  Read-only to others.
    """

    def __init__(self, num_blocks: int, *, linked: bool) -> None:
        self._no_block = num_blocks
        self._linked = linked
        self.clear()

    def clear(self) -> None:
        """Forget all content."""
        size = self._no_block + 1
        self.hashes: list[bytes | None] = [None] * size
        self._next = [self._no_block] * size  # the link from a first block to the one after it
        self._previous = [self._no_block] * size  # the same link backwards
        self._heads: dict[bytes, int] = {}  # first blocks that no link leads to
        self._copies: dict[bytes, list[int]] = {}  # content in several blocks: first, duplicates

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest run of ``hashes``, those of a prefix from its start, found here."""
        known, links, heads = self.hashes, self._next, self._heads
        blocks, block = [], self._no_block
        for key in hashes:
            block = links[block]
            if known[block] != key:
                block = heads.get(key)
                if block is None:
                    break
            blocks.append(block)
        return blocks

    def follow(self, previous: int | None, key: bytes) -> int | None:
        """The first block with content ``key``; ``previous`` holds the content before it."""
        block = self._next[self._first(previous)]
        return block if self.hashes[block] == key else self._heads.get(key)

    def add(self, blocks: Sequence[int], keys: Sequence[bytes], previous: int | None) -> list[int]:
        """Enter ``blocks``, which have no content yet, under ``keys``, consecutive in a chain.

        ``previous`` holds the content before the first of them and is in the index; None if that
        begins the prefix, or the index is not linked.  Returns those that are duplicates.
        """
        known, links, heads, no_block = self.hashes, self._next, self._heads, self._no_block
        duplicates: list[int] = []
        before = self._first(previous)
        for block, key in zip(blocks, keys, strict=True):
            known[block] = key
            after = links[before]
            if after == no_block and key not in heads and before != no_block:
                links[before] = block
                self._previous[block] = before
                before = block
                continue
            first = after if known[after] == key else heads.setdefault(key, block)
            if first != block:
                self._copies.setdefault(key, [first]).append(block)
                duplicates.append(block)
            before = first if self._linked else no_block
        return duplicates

    def remove(self, blocks: Sequence[int]) -> int:
        """Forget the content of ``blocks``; returns how many of them had any."""
        known, links, back, no_block = self.hashes, self._next, self._previous, self._no_block
        copies, removed = self._copies, 0
        for block in blocks:
            key = known[block]
            if key is None:
                continue
            removed += 1
            known[block] = None
            if copies and key in copies:
                self._remove_copy(block, key)
                continue
            before, after = back[block], links[block]
            if before != no_block:
                links[before] = back[block] = no_block
            else:
                del self._heads[key]
            if after != no_block:
                links[block] = back[after] = no_block
                self._heads[known[after]] = after
        return removed

    def _remove_copy(self, block: int, key: bytes) -> None:
        copies = self._copies[key]
        was_first = copies[0] == block
        copies.remove(block)
        if was_first:  # the oldest duplicate takes its place
            heir, no_block = copies[0], self._no_block
            before, after = self._previous[block], self._next[block]
            self._previous[block] = self._next[block] = no_block
            self._previous[heir], self._next[heir] = before, after
            if before != no_block:
                self._next[before] = heir
            else:
                self._heads[key] = heir
            if after != no_block:
                self._previous[after] = heir
        if len(copies) == 1:
            del self._copies[key]

    def _first(self, block: int | None) -> int:
        """The first block with the content of ``block``, from which links go on."""
        if block is None or not self._linked:
            return self._no_block
        copies = self._copies.get(self.hashes[block]) if self._copies else None
        return block if copies is None else copies[0]

    def __len__(self) -> int:
        """Number of blocks with content, duplicates included."""
        return sum(key is not None for key in self.hashes)

    def check_invariants(self) -> None:
        """Raise AssertionError unless each content is found in one way.  O(number of blocks)."""
        no_block = self._no_block
        duplicates: set[int] = set()
        for key, copies in self._copies.items():
            _require(len(set(copies)) == len(copies) > 1, f"copies of {key!r}: {copies}")
            _require(all(self.hashes[c] == key for c in copies), f"{copies} are not all {key!r}")
            duplicates.update(copies[1:])
        first_blocks: dict[bytes, int] = {}
        for block, key in enumerate(self.hashes):
            before, after = self._previous[block], self._next[block]
            if key is None or block in duplicates:
                _require(before == after == no_block, f"block {block} is linked: {before, after}")
                continue
            _require(key not in first_blocks, f"{block} and {first_blocks.get(key)} hold {key!r}")
            first_blocks[key] = block
            is_linked = before != no_block and self._next[before] == block
            is_head = self._heads.get(key) == block
            _require(is_linked != is_head, f"block {block}: linked {is_linked}, head {is_head}")
            _require(is_linked or before == no_block, f"block {block} has no link from {before}")
            _require(
                after == no_block or self._previous[after] == block, f"{block} links to {after}"
            )
        _require(self.hashes[no_block] is None, "the end of the hashes is not None")
        for key, block in self._heads.items():
            _require(first_blocks.get(key) == block, f"head {block} does not hold {key!r}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
