"""The interface of all cache managers, and what they have in common.

A manager owns the block ids of one cache and decides which sequence's tokens live in which block.
It moves no data: it tells the caller what to copy, and the caller's kernels write K and V at
``slot = block_table[position // block_size] * block_size + position % block_size``.

``allocate_slots`` gives a sequence slots for its next tokens, be they a prompt, a chunk of one, or
a token that was decoded:

    if manager.can_allocate(seq) is AllocStatus.OK:
        blocks, num_cached = manager.get_computed_blocks(seq)   # K/V of these tokens are there
        manager.allocate_slots(seq, seq.num_tokens - num_cached, blocks)
        ...                                     # compute and store those of the other tokens
    seq.append_token(token_id)
    copies = manager.allocate_slots(seq, 1)     # (src, dst) blocks, to be copied before the step
    ...                                         # compute and store those of the new token
    manager.free(seq)                           # done, or preempted: the same again resumes it

``allocate(seq)`` and ``append(seq)`` are the same for all tokens of a new sequence and for all
tokens that lack a slot.

New tokens that fit below ``seq.num_slots``, in slots that are the sequence's own, are only counted
by ``allocate_slots``.  The design takes note of them at the next call about the sequence that asks
it for more: a block that they have filled can be found from then on.  ``append`` asks each time.

A call that raises has changed nothing.  ``copies`` hold until the next call that changes the
manager: run them, in order, before K or V are written; those of a sequence that is freed first
are void.
"""

from __future__ import annotations

import abc
import enum
import math
import sys
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cache.checks import at_least, require
from cache.memory_usage import MemoryUsage
from cache.policies.base import Request
from cache.sequence import Sequence

Copies = list[tuple[int, int]]
"""(source block, destination block) pairs."""


class AllocStatus(enum.Enum):
    """Whether a sequence can be given its blocks."""

    OK = enum.auto()
    """Now."""
    LATER = enum.auto()
    """Not before others give up some of theirs."""
    NEVER = enum.auto()
    """Not in this cache."""


class UnsupportedByDesign(NotImplementedError):
    """The design that a manager reproduces does not offer the feature."""

    def __init__(self, manager: str, feature: str) -> None:
        super().__init__(f"the design of manager {manager!r} does not offer {feature}")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a manager has counted since it was made.

    Hits are counted once per allocation, so a sequence that was preempted and resumed counts
    again.  A block query is a full block of the allocated sequence.
    """

    num_allocations: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    queried_blocks: int = 0
    hit_blocks: int = 0
    allocated_blocks: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0

    @property
    def token_hit_rate(self) -> float:
        """Share of the allocated tokens whose K/V were there already; 0 before the first."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def block_hit_rate(self) -> float:
        """Share of the full blocks of allocated sequences that were there already."""
        return self.hit_blocks / self.queried_blocks if self.queried_blocks else 0.0


GIVEN_BACK = -1
"""Stands in a block table for a block that no query will see any more."""

Prefix = tuple[Items[int], int, Any]
"""The cached beginning of a sequence: its blocks, the number of tokens whose K/V are there (those
of the blocks, unless part of a further one is copied), and what else the design knows of it."""


@dataclass(slots=True, eq=False)
class Table:
    """What a sequence holds.

    Attributes:
        seq: the sequence, which itself counts the tokens that are stored.
        blocks: its blocks in the order of its tokens.
        num_noted_tokens: stored tokens that the design knows of; the others are in the last block.
        max_tokens: no more are stored before the design is asked, though the last block has room.
        is_swapped_out: whether the blocks are those of host memory.
    """

    seq: Sequence
    blocks: Items[int] = field(default_factory=list)
    num_noted_tokens: int = 0
    max_tokens: int = sys.maxsize
    is_swapped_out: bool = False


class CacheManager(abc.ABC):
    """Maps the tokens of sequences to the blocks ``0 .. num_blocks - 1`` of ``block_size`` tokens.

    Sequences are told apart by ``seq_id``.  Calls about a sequence that holds no blocks, or
    ``allocate`` of one that does, raise ValueError.  What a design does not offer, by the class
    attributes ``can_...``, raises UnsupportedByDesign.

    A design defines ``_extend``, ``_release`` and ``num_free_blocks``, and with ``can_fork`` also
    ``_share(table, copy)``, with ``can_reset`` ``_forget()``, with ``can_swap`` the calls about it.
    What else it may define stands at the end of the class.
    """

    name: str = ""
    """Registry name, as in ``make_manager(name)``."""

    prefix_caching: bool = True
    """Whether the design shares equal prefixes: takes a policy, a hash algorithm and
    ``enable_prefix_caching``."""

    can_chunk: bool = True
    """Whether a prompt can be given its slots over several calls."""

    can_fork: bool = False
    """Whether sequences can share the blocks of their common beginning by ``fork``."""

    can_swap: bool = False
    """Whether the design has blocks of host memory of its own, and moves sequences there."""

    can_reset: bool = False
    """Whether cached content can be forgotten."""

    clock: Callable[[], float] | None = None
    """Tells policies the time, in seconds; set by an engine.  None: nobody knows it."""

    _listener: Callable[[Request], None] | None = None
    """Of a policy that wants to know of requests."""

    _table_class: ClassVar[type[Table]] = Table

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = False
    ) -> None:
        self.num_blocks = at_least(1, "num_blocks", num_blocks)
        self.block_size = at_least(1, "block_size", block_size)
        self.enable_prefix_caching = enable_prefix_caching
        self._tables: dict[Hashable, Table] = {}
        self._counts = dict.fromkeys(CacheStats.__dataclass_fields__, 0)

    # The interface ------------------------------------------------------------------------------

    def get_computed_blocks(self, seq: Sequence) -> tuple[list[int], int]:
        """Cached blocks of the prefix of ``seq`` and how many tokens they hold.  Changes nothing.

        At least one token is left to compute.  Valid until the next call that changes the manager.
        """
        blocks, num_tokens, _ = self._find(seq)
        return list(blocks), num_tokens

    def can_allocate(self, seq: Sequence) -> AllocStatus:
        """Whether ``allocate(seq)`` would succeed.  Changes nothing; true until the next change."""
        needed = -(-len(seq.token_ids) // self.block_size)
        if needed > self.num_blocks:
            return AllocStatus.NEVER
        free = self.num_free_blocks
        if needed > free:  # unless others use the cached part of the prefix already
            prefix = self._find(seq)
            needed -= len(prefix[0]) - self._num_revived(prefix)
        return AllocStatus.OK if needed <= free else AllocStatus.LATER

    def allocate(self, seq: Sequence) -> int:
        """Give ``seq`` slots for all its tokens; returns how many leading tokens are cached.

        The K/V of the others, at least one, are to be computed by the caller in this step.
        Raises OutOfBlocks.  Sets ``seq.num_cached_tokens``, ``seq.num_computed_tokens`` and
        ``seq.num_slots``.
        """
        if seq.seq_id in self._tables:
            raise ValueError(f"sequence {seq.seq_id!r} holds blocks already; free it first")
        prefix = self._find_for_allocate(seq) if self.enable_prefix_caching else _NOTHING
        self._start(seq, prefix, len(seq.token_ids))
        return prefix[1]

    def take_copies(self) -> Copies:
        """Copies that ``allocate`` calls since the last call of this ask for, to be run as others.

        Only designs that reuse part of a block have any.
        """
        return []

    def append(self, seq: Sequence) -> Copies:
        """Give slots to the tokens of ``seq`` that lack one, at least one.

        Returns and raises what ``allocate_slots`` does.  Blocks that they fill can be found at
        once.
        """
        table = self._table_on_device(seq)
        num_tokens, stored = len(seq.token_ids), table.seq.num_computed_tokens
        if num_tokens <= stored:
            raise ValueError(
                f"append: all {stored} tokens of sequence {seq.seq_id!r} have a slot; "
                "append a token to the sequence first"
            )
        return self._grow(table, seq, num_tokens)

    def can_append(self, seq: Sequence) -> bool:
        """Whether ``append(seq)`` would find enough free blocks.  Changes nothing."""
        table = self._table_on_device(seq)
        return self._num_needed(table, len(seq.token_ids)) <= self.num_free_blocks

    def allocate_slots(
        self, seq: Sequence, num_new_tokens: int, computed_blocks: Items[int] = ()
    ) -> Copies:
        """Give slots to the next ``num_new_tokens`` tokens of ``seq``.

        ``computed_blocks``, from ``get_computed_blocks``, go in front of the first of them.
        Returns the (src, dst) blocks to copy before the K/V of these tokens are written.  Raises
        OutOfBlocks, and ValueError for a number out of range and for blocks that do not hold the
        prefix.  Sets ``seq.num_computed_tokens`` and ``seq.num_slots``.
        """
        start = seq.num_computed_tokens
        end = start + num_new_tokens
        if start < end <= seq.num_slots and end <= len(seq.token_ids) and not computed_blocks:
            seq.num_computed_tokens = end  # a decoded token as a rule, asked for in every step
            return []
        table = self._tables.get(seq.seq_id)
        if table is None:
            start = len(computed_blocks) * self.block_size
        else:
            start = table.seq.num_computed_tokens
        end = start + num_new_tokens
        if not start < end <= len(seq.token_ids):
            raise ValueError(
                f"num_new_tokens={num_new_tokens}: {start} of the {seq.num_tokens} tokens of "
                f"sequence {seq.seq_id!r} have a slot, so needs 1 to {seq.num_tokens - start} new "
                "ones"
            )
        if table is not None:
            if computed_blocks:
                raise ValueError(
                    f"computed_blocks: sequence {seq.seq_id!r} has blocks already, and these can "
                    "only go in front of its first chunk"
                )
            if table.is_swapped_out:
                self._table_on_device(seq)
            return self._grow(table, seq, end)
        if end < len(seq.token_ids) and not self.can_chunk:
            raise UnsupportedByDesign(
                self.name, f"chunks ({num_new_tokens} of {seq.num_tokens - start} tokens)"
            )
        prefix = self._find(seq, len(computed_blocks)) if computed_blocks else _NOTHING
        if list(prefix[0]) != list(computed_blocks):
            raise ValueError(
                f"computed_blocks={list(computed_blocks)}: these do not hold the prefix of "
                f"sequence {seq.seq_id!r} (any more); ask get_computed_blocks again"
            )
        self._start(seq, prefix, end)
        return []

    def count_decoded(self, seqs: Iterable[Sequence], counted: list[Sequence]) -> Sequence | None:
        """``allocate_slots(seq, 1)`` for one sequence after the other that lacks one token only,
        while that takes no more than counting it.

        Appends these to ``counted``; returns the first other one, which is left as it is, or None.
        For an engine with many sequences: a call each would cost several times as much.
        """
        for seq in seqs:
            stored = seq.num_computed_tokens
            if stored < seq.num_slots and len(seq.token_ids) == stored + 1:
                seq.num_computed_tokens = stored + 1
                counted.append(seq)
            else:
                return seq
        return None

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` share the blocks of all tokens that ``parent`` has stored.

        The tokens of ``child`` begin with these.  Takes no block.  Later the first new token of
        either that goes to a shared, partly filled block has it copied.  Sets the counters of
        ``child``.
        """
        self._refuse_unless(self.can_fork, "fork")
        table = self._table_on_device(parent)
        if child.seq_id in self._tables:
            raise ValueError(f"child: sequence {child.seq_id!r} holds blocks already")
        stored = table.seq.num_computed_tokens
        _check_shares_content(parent, child, stored)
        self._catch_up(table)
        copy = self._table_class(child)
        copy.num_noted_tokens = stored
        self._share(table, copy)
        self._tables[child.seq_id] = copy
        child.num_cached_tokens = child.num_computed_tokens = stored
        for seq in (table.seq, child):
            seq.num_slots = stored  # the rest of the last block is nobody's own
            seq.table_version += 1

    def free(self, seq: Sequence) -> None:
        """Take back the blocks of ``seq``: it is finished, or preempted.

        Sets its counters to 0.
        """
        table = self._table_of(seq)
        if table.num_noted_tokens < table.seq.num_computed_tokens:
            self._catch_up(table)
        if self._listener:
            self._tell(table.seq, table.seq.num_tokens - table.seq.num_prompt_tokens)
        self._release(table)
        del self._tables[seq.seq_id]
        if table.seq is not seq:
            _clear(table.seq)
        _clear(seq)

    def block_table(self, seq: Sequence) -> list[int]:
        """Block ids of ``seq`` in the order of its tokens, GIVEN_BACK for those behind a sliding
        window.  A copy: it does not grow later."""
        return list(self._table_of(seq).blocks)

    def swap_out(self, seq: Sequence) -> Copies:
        """Move ``seq`` to host memory; returns (device block, host block) pairs to copy now.

        Raises OutOfBlocks.  Until it is back only ``swap_in``, ``free`` and ``block_table`` (of
        host blocks) take ``seq``.
        """
        raise UnsupportedByDesign(self.name, "swap_out")

    def swap_in(self, seq: Sequence) -> Copies:
        """Move ``seq`` back; returns (host block, device block) pairs to copy now.

        Raises OutOfBlocks.
        """
        raise UnsupportedByDesign(self.name, "swap_in")

    def can_swap_out(self, seq: Sequence) -> bool:
        """Whether ``swap_out(seq)`` would find enough free host blocks.  Changes nothing."""
        raise UnsupportedByDesign(self.name, "can_swap_out")

    def can_swap_in(self, seq: Sequence) -> AllocStatus:
        """Whether ``seq`` can come back now and go on.  Changes nothing."""
        raise UnsupportedByDesign(self.name, "can_swap_in")

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, as after a change of weights.  False if blocks are in use."""
        self._refuse_unless(self.can_reset, "reset_prefix_cache")
        if self._tables:
            return False
        self._forget()
        return True

    @property
    @abc.abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that an allocation could take now."""

    @property
    def stats(self) -> CacheStats:
        """A snapshot of the counters, which are those of the device."""
        return CacheStats(**self._counts)

    def memory_usage(self) -> MemoryUsage:
        """What the slots of the cache are used for now.  Costs as much as looking at every table.

        Cached content that nobody uses counts as free.
        """
        filled: dict[int, int] = {}  # of blocks in use; one that several tables have counts once
        for table in self._tables.values():
            num_tokens = 0 if table.is_swapped_out else table.seq.num_computed_tokens
            for block in table.blocks if num_tokens else ():
                if block != GIVEN_BACK:
                    filled[block] = max(filled.get(block, 0), min(self.block_size, num_tokens))
                num_tokens = max(0, num_tokens - self.block_size)
        used, taken = sum(filled.values()), len(filled) * self.block_size
        free = self.num_blocks * self.block_size - taken
        return MemoryUsage(used=used, reserved=0, internal=taken - used, external=0, free=free)

    def check_invariants(self) -> None:
        """Raise AssertionError, saying what is wrong, unless all state is consistent.

        For tests and debugging: costs as much as looking at every block.
        """
        for seq_id, table in self._tables.items():
            blocks, stored = table.blocks, table.seq.num_computed_tokens
            held = [block for block in blocks if block != GIVEN_BACK]
            require(
                len(set(held)) == len(held) and len(blocks) >= self._num_blocks_for(stored),
                f"{seq_id!r}: table {blocks} for {stored} tokens",
            )
            end = -(-table.num_noted_tokens // self.block_size) * self.block_size
            require(
                0 < table.num_noted_tokens <= stored <= end,
                f"{seq_id!r}: {stored} tokens are stored, {table.num_noted_tokens} of them noted",
            )
            require(
                table.seq.num_slots <= end,
                f"{seq_id!r}: {table.seq.num_slots} slots, the last block ends at {end}",
            )

    # What the designs have in common ------------------------------------------------------------

    def _find(self, seq: Sequence, limit: int | None = None) -> Prefix:
        """The cached prefix of ``seq`` in at most ``limit`` blocks, which leaves a token over."""
        if not self.enable_prefix_caching:
            return _NOTHING
        longest = (len(seq.token_ids) - 1) // self.block_size
        return self._match(seq, longest if limit is None else min(limit, longest))

    def _start(self, seq: Sequence, prefix: Prefix, end: int) -> None:
        """Give ``seq`` a table that begins with ``prefix``."""
        table = self._table_class(seq)
        blocks, num_cached, _ = prefix
        num_hits = len(blocks)  # which become those of the table
        self._begin(table, prefix, end)
        self._extend(table, end)
        self._tables[seq.seq_id] = table
        counts = self._counts
        counts["num_allocations"] += 1
        counts["queried_tokens"] += len(seq.token_ids)
        counts["queried_blocks"] += len(seq.token_ids) // self.block_size
        counts["hit_tokens"] += num_cached
        counts["hit_blocks"] += num_hits
        seq.num_cached_tokens = num_cached
        self._count(table, seq, end)

    def _grow(self, table: Table, seq: Sequence, end: int) -> Copies:
        """Store the tokens of ``seq`` up to ``end`` in ``table``."""
        if table.seq is not seq:  # another object of the same id
            seq.num_cached_tokens = table.seq.num_cached_tokens
            seq.num_computed_tokens = table.seq.num_computed_tokens
            table.seq.num_slots = 0
            table.seq = seq
        copies = self._extend(table, end)
        self._count(table, seq, end)
        return copies

    def _count(self, table: Table, seq: Sequence, end: int) -> None:
        """The design has given ``table`` slots for the tokens up to ``end``."""
        table.num_noted_tokens = seq.num_computed_tokens = end
        end += -end % self.block_size  # the last block is the sequence's own
        seq.num_slots = end if end < table.max_tokens else table.max_tokens
        seq.table_version += 1

    def _catch_up(self, table: Table) -> None:
        """Let the design take note of the tokens that were only counted."""
        stored = table.seq.num_computed_tokens
        if table.num_noted_tokens < stored:
            self._note_stored(table, stored)
            table.num_noted_tokens = stored
            table.seq.table_version += 1

    def _table_of(self, seq: Sequence) -> Any:
        """The table of ``seq``; ValueError if it holds no blocks."""
        table = self._tables.get(seq.seq_id)
        if table is None:
            raise ValueError(f"sequence {seq.seq_id!r} holds no blocks")
        return table

    def _table_on_device(self, seq: Sequence) -> Any:
        table = self._table_of(seq)
        if table.is_swapped_out:
            raise ValueError(f"sequence {seq.seq_id!r} is swapped out")
        return table

    def _refuse_unless(self, offered: bool, feature: str) -> None:
        if not offered:
            raise UnsupportedByDesign(self.name, feature)

    def _num_missing(self, table: Table, num_slots: int) -> int:
        """Blocks that ``table`` lacks to have ``num_slots`` slots."""
        return max(0, self._num_blocks_for(num_slots) - len(table.blocks))

    def _writes_to_shared_block(self, table: Table) -> bool:
        """Whether the next token of ``table`` goes into a block that another table holds too."""
        position, offset = divmod(table.num_noted_tokens, self.block_size)
        return offset > 0 and self._is_shared(table.blocks[position])

    def _tell(self, seq: Sequence, output_tokens: float = math.nan) -> None:
        """The policy learns what request the calls that follow are about."""
        if self._listener:
            time_ms = 1000 * self.clock() if self.clock else math.nan
            prompt = seq.num_prompt_tokens
            self._listener(
                Request(time_ms, prompt, output_tokens, prompt // self.block_size, seq.priority)
            )

    # What a design is made of -------------------------------------------------------------------

    @abc.abstractmethod
    def _extend(self, table: Any, end: int) -> Copies:
        """Give ``table`` the blocks of ``end`` tokens, which are stored.

        The tokens from ``table.num_noted_tokens`` on are new, or were only counted until now.
        Returns the copies to make before they are written.  Raises OutOfBlocks, changing nothing.
        """

    @abc.abstractmethod
    def _release(self, table: Any) -> None:
        """Take back the blocks of ``table``."""

    def _match(self, seq: Sequence, limit: int) -> Prefix:
        """The longest cached prefix of ``seq`` of at most ``limit`` blocks.  Changes nothing."""
        return _NOTHING

    def _find_for_allocate(self, seq: Sequence) -> Prefix:
        """What ``allocate`` begins with: the cached prefix of ``seq``."""
        return self._find(seq)

    def _num_revived(self, prefix: Prefix) -> int:
        """Free blocks that taking ``prefix``, whose blocks others may use, takes."""
        return 0

    def _begin(self, table: Any, prefix: Prefix, end: int) -> None:  # noqa: B027
        """Let the new ``table`` begin with ``prefix``.

        Raises OutOfBlocks, changing nothing, unless it can be extended to ``end`` tokens then.
        """

    def _note_stored(self, table: Any, end: int) -> None:  # noqa: B027
        """The tokens of ``table`` up to ``end``, all in slots it has, are stored."""

    def _num_needed(self, table: Any, end: int) -> int:
        """Free blocks that ``_extend`` takes to store the tokens of ``table`` up to ``end``."""
        return self._num_missing(table, end) + self._writes_to_shared_block(table)

    def _is_shared(self, block: int) -> bool:
        """Whether several tables hold ``block``, into which the next token of one goes."""
        return False

    def _num_blocks_for(self, num_slots: int) -> int:
        """Blocks of a table of ``num_slots`` slots."""
        return -(-num_slots // self.block_size)


_NOTHING: Prefix = (), 0, None


def _clear(seq: Sequence) -> None:
    seq.num_cached_tokens = seq.num_computed_tokens = seq.num_slots = 0
    seq.table_version += 1


def _check_shares_content(parent: Sequence, child: Sequence, num_tokens: int) -> None:
    """Raise ValueError unless the K/V of the first ``num_tokens`` of both must be the same."""
    same_keys = (child.lora_name, child.cache_salt, child.mm_inputs) == (
        parent.lora_name, parent.cache_salt, parent.mm_inputs
    )  # fmt: skip
    if not same_keys or child.token_ids[:num_tokens] != parent.token_ids[:num_tokens]:
        raise ValueError(
            f"child: the first {num_tokens} tokens, the adapter, the multi-modal inputs and the "
            f"salt of sequence {child.seq_id!r} must be those of {parent.seq_id!r}"
        )
