"""The systems before paging: every sequence in one contiguous reservation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from cache.blocks.buddy import BuddyAllocator
from cache.blocks.memory_usage import MemoryUsage
from cache.blocks.sequence import Sequence
from cache.checks import at_least, callable_or_none, require
from cache.managers.base import AllocStatus, CacheManager, Copies, Hit, Table

Reservation = Literal["max", "pow2", "oracle"]


@dataclass(slots=True, eq=False)
class _Run(Table):
    """The reservation of one sequence: a run of blocks.

    ``max_tokens`` is what the sequence is expected to have in the end.
    """

    start: int = 0  # its first block
    num_reserved: int = 0  # slots kept for the sequence
    max_tokens: int = 0


class Contiguous(CacheManager):
    """One reservation per sequence, placed by a buddy allocator.

    The three baselines of the PagedAttention paper (Kwon et al., SOSP 2023, section 6.1), which
    stand for Orca and FasterTransformer:

    * ``reservation="max"``: slots up to ``max_model_len``, whatever the sequence needs.
    * ``"pow2"``: the prompt and the next power of two of the output, so at most twice the output
      (25 output tokens reserve 32 slots).
    * ``"oracle"``: exactly the final length, which no real system knows.

    As there a buddy allocator decides where a reservation goes, so it takes a power of two of
    blocks: what lies beyond the reservation is external fragmentation, and so are free blocks of
    which no run is long enough.  Tables are ranges of blocks, so paged kernels can read them;
    ``block_size=1`` reserves by the slot.

    Args:
        max_model_len: the longest sequence, in tokens; None: as long as the longest run.
        final_length: tells how many tokens a sequence will have in the end.  ``"oracle"`` needs
            it.  With it ``"pow2"`` reserves once, as the paper's does; without it the power of
            two is that of the tokens generated so far, and a reservation that is outgrown joins
            its free buddies or, if they are in use, moves: where its first block changes,
            ``append`` returns the copies.  ``"max"`` uses it for ``memory_usage`` only.

    Sequences longer than ``max_model_len`` or their ``final_length`` raise ValueError, except
    that ``can_allocate`` answers NEVER.  Nothing is shared: neither prefixes nor forks.
    """

    name = "contiguous"
    prefix_caching = False
    _table_class = _Run

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        reservation: Reservation = "max",
        max_model_len: int | None = None,
        final_length: Callable[[Sequence], int] | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size)
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
        longest = self._buddy.longest_possible_run * self.block_size
        self.reservation = reservation
        self.max_model_len = at_least(
            1, "max_model_len", longest if max_model_len is None else max_model_len
        )
        if self.max_model_len > longest:
            raise ValueError(
                f"max_model_len={max_model_len}: such a sequence never fits, the longest run of "
                f"num_blocks={num_blocks} blocks has {longest} slots"
            )
        self._final_length = final_length

    def can_allocate(self, seq: Sequence, hit: Hit | None = None) -> AllocStatus:
        if seq.num_tokens > self.max_model_len:
            return AllocStatus.NEVER
        needed = self._run_length(self._reservation(seq)[0])
        return AllocStatus.OK if needed <= self._buddy.longest_run else AllocStatus.LATER

    def can_append(self, seq: Sequence) -> bool:
        run = self._table_of(seq)
        if seq.num_tokens <= run.max_tokens:
            return True
        return self._buddy.can_grow(run.start, self._run_length(self._reservation(seq)[0]))

    def memory_usage(self, waiting: Sequence | None = None) -> MemoryUsage:
        """What the slots are used for.

        Without ``final_length`` nothing tells the slots that a sequence will use from those that
        it will not, and all of them count as reserved.

        Free slots are externally fragmented if there are enough of them for the reservation of
        ``waiting`` (None: of ``max_model_len`` tokens), but not in one run.
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
        """Blocks in no reservation; an allocation needs them in one run."""
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

    def _begin(self, run: _Run, hit: Hit, end: int) -> Copies:
        reserved, run.max_tokens = self._reservation(run.seq)
        num_blocks = self._run_length(reserved)
        run.start = self._buddy.allocate(num_blocks)
        run.num_reserved = reserved
        self._counts["allocated_blocks"] += num_blocks
        return self._extend(run, 0, end)

    def _extend(self, run: _Run, start: int, end: int) -> Copies:
        copies = self._lengthen(run) if end > run.max_tokens else []
        run.blocks = range(run.start, run.start + self._num_blocks_for(end))
        return copies

    def _release(self, run: _Run) -> None:
        self._buddy.free(run.start)

    def _lengthen(self, run: _Run) -> Copies:
        """Lengthen the reservation of ``run``; returns the copies, if it moves."""
        reserved, expected = self._reservation(run.seq)
        before, after = self._run_length(run.num_reserved), self._run_length(reserved)
        start = self._buddy.grow(run.start, after)
        copies: Copies = []
        if start == run.start:
            self._counts["allocated_blocks"] += after - before
        else:
            copies = list(zip(run.blocks, range(start, self.num_blocks), strict=False))
            self._counts["allocated_blocks"] += after
            self._counts["copied_blocks"] += len(copies)
        run.start, run.num_reserved, run.max_tokens = start, reserved, expected
        return copies

    def _reservation(self, seq: Sequence) -> tuple[int, int]:
        """Slots to reserve for ``seq``, and how many of them it is expected to use in the end.

        Raises ValueError for a sequence that is longer than it may be.
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
        """Blocks of the run that a reservation of ``num_slots`` takes."""
        return self._buddy.run_length(self._num_blocks_for(num_slots))
