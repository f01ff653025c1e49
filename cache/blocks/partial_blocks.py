"""Finds a cached block that begins like the block that a prompt needs next."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

from cache.blocks.common_prefix import common_prefix_length

_TOKEN_BYTES = 4


class PartialBlockIndex:
    """Full blocks by the hash of the block before them, in the order of their tokens.

    Of all blocks in that order the ones next to a given run of tokens share the longest beginning
    with it, so a lookup is a bisection.  Tokens are the bytes of ``array('I')``.
    """

    def __init__(self) -> None:
        self._following: defaultdict[bytes | None, list[tuple[bytes, int]]] = defaultdict(list)
        self._entries: dict[int, tuple[bytes | None, bytes]] = {}

    def add(self, block: int, parent: bytes | None, tokens: bytes) -> None:
        """Enter ``block``, which holds ``tokens`` after the prefix ``parent`` (None: at its start).

        A block that is here already is left as it is.
        """
        if block not in self._entries:
            self._entries[block] = (parent, tokens)
            insort(self._following[parent], (tokens, block))

    def discard(self, blocks: list[int]) -> None:
        """Forget those of ``blocks`` that are here."""
        for block in blocks:
            if (entry := self._entries.pop(block, None)) is None:
                continue
            parent, tokens = entry
            siblings = self._following[parent]
            del siblings[bisect_left(siblings, (tokens, block))]
            if not siblings:
                del self._following[parent]

    def clear(self) -> None:
        """Forget all blocks."""
        self._following.clear()
        self._entries.clear()

    def find(self, parent: bytes | None, tokens: bytes) -> tuple[int, int] | None:
        """The block after ``parent`` that shares most tokens with the beginning of ``tokens``.

        Returns it with the number of tokens shared, None if no block shares any.
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
        """(block, parent, tokens) of every block here."""
        return ((block, parent, tokens) for block, (parent, tokens) in self._entries.items())
