"""Counters of a cache manager."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of a manager since it was made.

    A preempted sequence that resumes finds its own blocks.  As in vLLM's ``PrefixCacheStats``,
    resumptions therefore have separate counters, and hit rates count only first allocations.
    ``queried_blocks`` counts the full blocks of the allocated sequences.

    ``hit_blocks`` counts device blocks, ``host_hit_blocks`` the further blocks of hits that are in
    host memory.  ``stored_blocks`` and ``loaded_blocks`` count moves to and from host memory.
    """

    num_allocations: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    queried_blocks: int = 0
    hit_blocks: int = 0
    num_resumptions: int = 0
    resumed_queried_tokens: int = 0
    resumed_hit_tokens: int = 0
    resumed_queried_blocks: int = 0
    resumed_hit_blocks: int = 0
    allocated_blocks: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0
    host_hit_blocks: int = 0
    resumed_host_hit_blocks: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0

    @property
    def token_hit_rate(self) -> float:
        """Cached tokens of first allocations divided by all their tokens; 0 without allocations."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def block_hit_rate(self) -> float:
        """Cached blocks of first allocations divided by all their full blocks; 0 without blocks."""
        return self.hit_blocks / self.queried_blocks if self.queried_blocks else 0.0
