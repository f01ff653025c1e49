"""Which block holds the content of which hash: the dictionary of a block pool."""

from __future__ import annotations

from collections.abc import Sequence


class HashIndex:
    """Finds blocks by the hash of their content, a block at a time.

    For hashes that may collide, and so do not tell what comes before a block (Nano-vLLM's
    ``hash_to_block_id``), and for look-ups that begin inside a prefix; elsewhere
    :class:`cache.content_index.ContentIndex` is faster and has the same interface.  Of several
    blocks with one hash a lookup finds the *first*, the one that was added before the others that
    remain; the rest are its duplicates.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        """Forget all content."""
        self._hashes: list[bytes | None] = [None] * self._num_blocks
        self._first: dict[bytes, int] = {}
        self._duplicates: dict[bytes, list[int]] = {}  # of the hashes that have any

    def holds(self, block: int) -> bool:
        """Whether ``block`` has content that can be found, or is a duplicate of such a block."""
        return self._hashes[block] is not None

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest run of ``keys``, from their start, found here."""
        blocks = list(map(self._first.get, keys))
        return blocks[: blocks.index(None)] if None in blocks else blocks

    def follow(self, previous: int | None, key: bytes, depth: int) -> int | None:
        """The first block with content ``key``, whatever comes before it."""
        return self._first.get(key)

    def add(
        self, blocks: Sequence[int], keys: Sequence[bytes], previous: int | None, depth: int
    ) -> list[int]:
        """Enter ``blocks``, which have no content yet, under ``keys``; returns the duplicates."""
        duplicates: list[int] = []
        for block, key in zip(blocks, keys, strict=True):
            self._hashes[block] = key
            if self._first.setdefault(key, block) != block:
                self._duplicates.setdefault(key, []).append(block)
                duplicates.append(block)
        return duplicates

    def remove(self, blocks: Sequence[int]) -> int:
        """Forget the content of ``blocks``; returns how many of them had any."""
        removed = 0
        for block in blocks:
            key = self._hashes[block]
            if key is None:
                continue
            removed += 1
            self._hashes[block] = None
            if key not in self._duplicates:
                del self._first[key]
                continue
            duplicates = self._duplicates[key]
            if self._first[key] == block:
                self._first[key] = duplicates.pop(0)
            else:
                duplicates.remove(block)
            if not duplicates:
                del self._duplicates[key]
        return removed

    def contents(self) -> list[bytes | None]:
        """The hash of each block's content, None where it has none.  O(number of blocks)."""
        return self._hashes.copy()

    def check_invariants(self) -> None:
        """Raise AssertionError unless each block is entered under its hash, once."""
        entered: dict[int, bytes] = {}
        for key, first in self._first.items():
            for block in (first, *self._duplicates.get(key, ())):
                if block in entered:
                    raise AssertionError(f"block {block} is in two places")
                entered[block] = key
        if not all(self._duplicates.values()) or not self._duplicates.keys() <= self._first.keys():
            raise AssertionError(f"duplicates of nothing, or none: {self._duplicates}")
        held = {block: key for block, key in enumerate(self._hashes) if key is not None}
        if held != entered or len(self._hashes) != self._num_blocks:
            raise AssertionError(f"blocks hold {held}, the index has {entered}")
