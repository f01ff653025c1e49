"""An index of cached blocks by their first tokens, to reuse part of a block."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

from cache.blocks.common_prefix import common_prefix_length

_TOKEN_BYTES = 4


class PartialBlockIndex:
    """Full blocks by the hash of the block before them, sorted by their tokens.

    The neighbours of a run of tokens in this order share the longest prefix with it, so a lookup is
    a bisection.  Tokens are the bytes of ``array('I')``.
    """

    def __init__(self) -> None:
        self._following: defaultdict[bytes | None, list[tuple[bytes, int]]] = defaultdict(list)
        self._entries: dict[int, tuple[bytes | None, bytes]] = {}

    def add(self, block: int, parent: bytes | None, tokens: bytes) -> None:
        """Add ``block``, which holds ``tokens`` after the prefix ``parent`` (None: none).

        A block that is in the index stays as it is.
        """
        if block not in self._entries:
            self._entries[block] = (parent, tokens)
            insort(self._following[parent], (tokens, block))

    def discard(self, blocks: list[int]) -> None:
        """Remove the ``blocks`` that are in the index."""
        for block in blocks:
            if (entry := self._entries.pop(block, None)) is None:
                continue
            parent, tokens = entry
            siblings = self._following[parent]
            del siblings[bisect_left(siblings, (tokens, block))]
            if not siblings:
                del self._following[parent]

    def clear(self) -> None:
        """Remove all blocks."""
        self._following.clear()
        self._entries.clear()

    def find(self, parent: bytes | None, tokens: bytes) -> tuple[int, int] | None:
        """The block after ``parent`` with the longest common prefix with ``tokens``.

        Returns (block, number of shared tokens), or None if no block shares any.
        """
        siblings = self._following.get(parent)
        if siblings is None:
            return None
        at = bisect_left(siblings, (tokens,))
        best = max(
            ((common_prefix_length(found, tokens) // _TOKEN_BYTES, -index, block)
             for index, (found, block) in enumerate(siblings[max(0, at - 1) : at + 1])),
        )  # fmt: skip
        return (best[2], best[0]) if best[0] else None

    def __iter__(self):
        """(block, parent, tokens) of every block."""
        return ((block, parent, tokens) for block, (parent, tokens) in self._entries.items())
