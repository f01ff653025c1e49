"""Memory usage of a KV cache, in slots.  A slot holds one token's K and V in every layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Number of slots by use, as in figures 2 and 3 of the PagedAttention paper.

    The five numbers add up to ``num_slots``.  Paper: Kwon et al., "Efficient Memory Management for
    Large Language Model Serving with PagedAttention", SOSP 2023, section 3.1.
    """

    used: int
    """Slots that hold K/V of a token."""
    reserved: int
    """Empty slots reserved for tokens that the sequence will generate."""
    internal: int
    """Internal fragmentation: slots that a sequence holds and never writes."""
    external: int
    """External fragmentation: slots lost between reservations."""
    free: int
    """Slots that can be given to a sequence."""

    @property
    def num_slots(self) -> int:
        """All slots of the cache."""
        return self.used + self.reserved + self.internal + self.external + self.free
