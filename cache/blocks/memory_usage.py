"""What the memory of a KV cache is used for, in slots (one token's K and V in every layer)."""

from __future__ import annotations

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
