"""What the memory of a KV cache is used for, in slots (one token's K and V in every layer)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Slots by what becomes of them, as figures 2 and 3 of the PagedAttention paper divide them.

    The five kinds add up to ``num_slots``.  Kwon et al., "Efficient Memory Management for Large
    Language Model Serving with PagedAttention", SOSP 2023, section 3.1.
    """

    used: int
    """Hold the K/V of a token."""
    reserved: int
    """Empty, kept for tokens that the sequence will still generate."""
    internal: int
    """Internal fragmentation: held by a sequence that never writes them."""
    external: int
    """External fragmentation: lost between reservations."""
    free: int
    """Can be given to a sequence."""

    @property
    def num_slots(self) -> int:
        """All slots of the cache."""
        return self.used + self.reserved + self.internal + self.external + self.free

    @property
    def wasted_fraction(self) -> float:
        """Share of the slots that are not free which hold no token; 0 for an empty cache."""
        taken = self.num_slots - self.free
        return 1 - self.used / taken if taken else 0.0


def usage_of_tables(
    num_blocks: int, block_size: int, tables: Iterable[tuple[Sequence[int], int]]
) -> MemoryUsage:
    """Usage of a paged cache by its tables, each (block ids, number of tokens in their slots).

    A block of several tables counts once, a negative id not at all.  Slots of a block without a
    token are internal fragmentation, blocks in no table are free, also those whose content is
    cached.
    """
    filled: dict[int, int] = {}
    for blocks, num_tokens in tables:
        for block in blocks:
            if block >= 0:
                filled[block] = max(filled.get(block, 0), min(block_size, num_tokens))
            num_tokens = max(0, num_tokens - block_size)
    used = sum(filled.values())
    return MemoryUsage(
        used=used,
        reserved=0,
        internal=len(filled) * block_size - used,
        external=0,
        free=(num_blocks - len(filled)) * block_size,
    )
