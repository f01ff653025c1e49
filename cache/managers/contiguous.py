"""One contiguous reservation per sequence, as in systems before paging."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from cache.blocks.buddy import BuddyAllocator
from cache.blocks.memory_usage import MemoryUsage
from cache.blocks.sequence import Sequence
from cache.checks import at_least, callable_or_none, require
from cache.managers.base import (
    MIDDLE,
    AllocStatus,
    CacheManager,
    CacheOptions,
    Copies,
    Hit,
    Table,
)

Reservation = Literal["max", "pow2", "oracle"]


@dataclass(slots=True, eq=False)
class _Run(Table):
    """The reservation of one sequence: a run of blocks."""

    start: int = 0  # its first block
    num_reserved: int = 0  # reserved slots
    max_tokens: int = 0  # expected final length


class Contiguous(CacheManager):
    """One reservation per sequence, placed by a buddy allocator.

    The values of ``reservation`` are the three baselines of the PagedAttention paper (Kwon et al.,
    SOSP 2023, section 6.1).  They represent Orca and FasterTransformer:

    * ``reservation="max"``: ``max_model_len`` slots for every sequence.
    * ``"pow2"``: the prompt and the output rounded up to a power of two (25 output tokens reserve
      32 slots).
    * ``"oracle"``: exactly the final length, which a real system does not know.

    As in the paper, a buddy allocator places the reservations, so each run has a power of two of
    blocks.  External fragmentation counts the blocks of a run beyond the reservation, and the free
    blocks if no free run is long enough.  A block table is a range of adjacent blocks, so paged
    kernels can read it.  ``block_size=1`` reserves single slots.

    Args:
        max_model_len: maximum length of a sequence, in tokens; by default the longest run's slots.
        final_length: function that returns the final number of tokens of a sequence.  ``"oracle"``
            needs it.  With it, ``"pow2"`` reserves once, as in the paper.  Without it, ``"pow2"``
            rounds up the tokens generated so far; a reservation that has become too small moves,
            and ``append`` returns the copies.  ``"max"`` uses it only for ``memory_usage``.

    A sequence longer than ``max_model_len`` or its ``final_length`` raises ValueError, but
    ``can_allocate`` returns NEVER.  The design shares neither prefixes nor forks.
    """

    name = "contiguous"
    prefix_caching = False
    reserves = True
    _table_class = _Run

    def __init__(
        self,
        options: CacheOptions,
        *,
        reservation: Reservation = "max",
        max_model_len: int | None = None,
        final_length: Callable[[Sequence], int] | None = None,
    ) -> None:
        super().__init__(options)
        callable_or_none("final_length", final_length)
        if reservation not in get_args(Reservation):
            choices = ", ".join(get_args(Reservation))
            raise ValueError(f"reservation={reservation!r} is unknown; choose from {choices}")
        if reservation == "oracle" and final_length is None:
            raise ValueError(
                "final_length=None: reservation='oracle' needs a function from a sequence to the "
                "number of tokens that it will have in the end"
            )
        self._buddy = BuddyAllocator(self.num_blocks)
        longest = self._buddy.longest_run * self.block_size
        self.reservation = reservation
        self.max_model_len = at_least(
            1, "max_model_len", longest if max_model_len is None else max_model_len, 1 << 62
        )
        if self.max_model_len > longest:
            raise ValueError(
                f"max_model_len={max_model_len}: such a sequence never fits, the longest run of "
                f"num_blocks={self.num_blocks} blocks has {longest} slots"
            )
        self._final_length = final_length

    def can_allocate(self, seq: Sequence, hit: Hit | None = None) -> AllocStatus:
        self._check_usable()
        if seq.num_tokens > self.max_model_len:
            return AllocStatus.NEVER
        needed = self._run_length(self._reservation(seq)[0])
        return AllocStatus.OK if needed <= self._buddy.longest_run else AllocStatus.LATER

    def can_append(self, seq: Sequence) -> bool:
        run = self._table_of(seq)
        if seq.num_tokens <= run.max_tokens:
            return True
        needed = self._run_length(self._reservation(seq)[0])
        return needed <= max(self._run_length(run.num_reserved), self._buddy.longest_run)

    def memory_usage(self, waiting: Sequence | None = None) -> MemoryUsage:
        """Count the slots of the cache by use.

        Without ``final_length`` all unwritten slots of a reservation count as reserved.  The free
        slots count as external fragmentation if the reservation of ``waiting`` (by default of
        ``max_model_len`` tokens) would fit into all of them, but not into one run.
        """
        length = self.max_model_len if waiting is None else self._reservation(waiting)[0]
        free = self._buddy.num_free
        fragmented = self._buddy.longest_run < self._run_length(length) <= free
        runs = self._tables.values()
        reserved = sum(run.num_reserved for run in runs)
        expected = sum(run.max_tokens for run in runs)
        used = sum(run.seq.num_computed_tokens for run in runs)
        beyond = (self.num_blocks - free) * self.block_size - reserved
        return MemoryUsage(
            used=used,
            reserved=expected - used,
            internal=reserved - expected,
            external=beyond + (free * self.block_size if fragmented else 0),
            free=0 if fragmented else free * self.block_size,
        )

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks outside all runs.  An allocation needs adjacent free blocks."""
        return self._buddy.num_free

    def check_invariants(self) -> None:
        super().check_invariants()
        self._buddy.check_invariants()
        tables = self._tables
        runs = {run.start: self._run_length(run.num_reserved) for run in tables.values()}
        require(
            runs == self._buddy.runs and len(runs) == len(tables),
            f"reservations {runs}, runs in use {self._buddy.runs}",
        )
        for seq_id, run in tables.items():
            stored = run.seq.num_computed_tokens
            require(
                0 < stored <= run.max_tokens <= run.num_reserved,
                f"{seq_id!r}: {stored} tokens, {run.max_tokens} in the end, "
                f"{run.num_reserved} reserved slots",
            )

    def _extend(self, run: _Run, start: int, end: int) -> Copies:
        copies = self._reserve(run) if end > run.max_tokens else []
        first = run.start + len(run.blocks)
        run.blocks += range(first, run.start - (-end // self.block_size))
        return copies

    def _release(self, run: _Run) -> None:
        self._buddy.free(run.start)

    def _reserve(self, run: _Run) -> Copies:
        """Give ``run`` the reservation that its sequence needs.  Returns copies if it moves."""
        reserved, expected = self._reservation(run.seq)
        before = self._run_length(run.num_reserved) if run.num_reserved else 0
        num_blocks = self._run_length(reserved)
        if num_blocks <= max(before, self._buddy.longest_run):
            self.interruption = MIDDLE
        copies: Copies = []
        if num_blocks > before:
            start = self._buddy.allocate(num_blocks)
            self._counts["allocated_blocks"] += num_blocks
            if before:
                self._buddy.free(run.start)
                copies = list(zip(run.blocks, range(start, self.num_blocks), strict=False))
                self._counts["copied_blocks"] += len(copies)
            run.start, run.blocks = start, []
        run.num_reserved, run.max_tokens = reserved, expected
        return copies

    def _reservation(self, seq: Sequence) -> tuple[int, int]:
        """Return (slots to reserve for ``seq``, slots that it is expected to use in the end).

        Raises ValueError for a sequence that is too long.
        """
        num_tokens, longest = seq.num_tokens, self.max_model_len
        final = longest if self._final_length is None else self._final_length(seq)
        if not num_tokens <= final <= longest:
            raise ValueError(
                f"sequence {seq.seq_id!r}: {num_tokens} tokens, final length {final}, "
                f"max_model_len={longest}; needs num_tokens <= final length <= max_model_len"
            )
        if self.reservation == "max":
            return longest, final
        if self.reservation == "oracle":
            return final, final
        known = num_tokens if self._final_length is None else final
        outputs = 1 << max(0, known - seq.num_prompt_tokens - 1).bit_length()
        reserved = min(seq.num_prompt_tokens + outputs, longest)
        return reserved, min(final, reserved)

    def _run_length(self, num_slots: int) -> int:
        """Number of blocks of the run for a reservation of ``num_slots`` slots."""
        return self._buddy.run_length(-(-num_slots // self.block_size))
