"""Which block holds the content of which hash: the dictionary of a block pool."""

from __future__ import annotations

from collections.abc import Sequence

from cache.checks import require


class HashIndex:
    """Finds blocks by the hash of their content, a block at a time.

    For hashes that may collide, and so do not tell what comes before a block (Nano-vLLM's
    ``hash_to_block_id``), and for look-ups that begin inside a prefix; elsewhere
    :class:`cache.content_index.ContentIndex`, which documents the interface, is faster.  What comes
    before a block does not matter here.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        self._hashes: list[bytes | None] = [None] * self._num_blocks
        self._first: dict[bytes, int] = {}
        self._duplicates: dict[bytes, list[int]] = {}  # of the hashes that have any

    def holds(self, block: int) -> bool:
        return self._hashes[block] is not None

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        blocks = list(map(self._first.get, keys))
        return blocks[: blocks.index(None)] if None in blocks else blocks

    def follow(self, previous: int | None, key: bytes, depth: int) -> int | None:
        return self._first.get(key)

    def add(
        self, blocks: Sequence[int], keys: Sequence[bytes], previous: int | None, depth: int
    ) -> list[int]:
        duplicates: list[int] = []
        for block, key in zip(blocks, keys, strict=True):
            self._hashes[block] = key
            if self._first.setdefault(key, block) != block:
                self._duplicates.setdefault(key, []).append(block)
                duplicates.append(block)
        return duplicates

    def remove(self, blocks: Sequence[int]) -> int:
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
        return self._hashes.copy()

    def check_invariants(self) -> None:
        entered: dict[int, bytes] = {}
        for key, first in self._first.items():
            for block in (first, *self._duplicates.get(key, ())):
                require(block not in entered, f"block {block} is in two places")
                entered[block] = key
        require(
            all(self._duplicates.values()) and self._duplicates.keys() <= self._first.keys(),
            f"duplicates of nothing, or none: {self._duplicates}",
        )
        held = {block: key for block, key in enumerate(self._hashes) if key is not None}
        require(
            held == entered and len(self._hashes) == self._num_blocks,
            f"blocks hold {held}, the index has {entered}",
        )
