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

What both do first is ``find`` and ``admit``, which a scheduler calls itself, so that a prefix is
looked for once:

    hit = manager.find(seq)
    if manager.can_allocate(seq, hit) is AllocStatus.OK:
        copies = manager.admit(seq, hit, end)   # slots for the tokens up to end

A full block can be found from the call on that gives its last token a slot, if its tokens are known
by then, else from the next call about the sequence on.

A call that raises has changed nothing.  ``copies`` hold until the next call that changes the
manager: run them, in order, before K or V are written; those of a sequence that is freed first
are void.
"""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from cache.blocks.memory_usage import MemoryUsage
from cache.blocks.sequence import Sequence
from cache.checks import at_least, require
from cache.policies.base import Request

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


class Hit(NamedTuple):
    """The cached prefix of a sequence.  Valid until the next call that changes the manager."""

    blocks: Items[int] = ()
    num_tokens: int = 0
    """Whose K/V are there: those of the blocks, and of the part of a further one to be copied."""
    where: Any = None
    """What else the design knows of it."""


@dataclass(slots=True, eq=False)
class Table:
    """What a sequence holds: blocks in the order of its tokens.  ``seq`` counts the stored ones."""

    seq: Sequence
    blocks: Items[int] = field(default_factory=list)
    is_swapped_out: bool = False
    """Whether the blocks are those of host memory."""


class CacheManager(abc.ABC):
    """Maps the tokens of sequences to the blocks ``0 .. num_blocks - 1`` of ``block_size`` tokens.

    Sequences are told apart by ``seq_id``.  Calls about a sequence that holds no blocks, or
    ``allocate`` of one that does, raise ValueError.  What a design does not offer, by the class
    attributes ``can_...``, raises UnsupportedByDesign.

    A design defines ``_extend``, ``_release`` and ``num_free_blocks``, with ``prefix_caching`` also
    ``_match``, ``_num_idle`` and ``_begin``, with ``can_fork`` ``_share(table, copy)``, with
    ``can_reset`` ``_forget()``, with ``can_swap`` the calls about it.
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
        self._copies: Copies = []  # of ``allocate``

    # The interface ------------------------------------------------------------------------------

    def find(self, seq: Sequence, limit: int | None = None) -> Hit:
        """The cached prefix of ``seq``, of at most ``limit`` blocks.  Changes nothing.

        At least one token is left to compute.
        """
        if not self.enable_prefix_caching:
            return NOTHING
        longest = (len(seq.token_ids) - 1) // self.block_size
        return self._match(seq, longest if limit is None else min(limit, longest))

    def find_part(self, seq: Sequence, hit: Hit) -> Hit:
        """``hit``, with the beginning of the block after it if the design can copy that."""
        return hit

    def get_computed_blocks(self, seq: Sequence) -> tuple[list[int], int]:
        """Cached blocks of the prefix of ``seq`` and how many tokens they hold: ``find``."""
        hit = self.find(seq)
        return list(hit.blocks), hit.num_tokens

    def can_allocate(self, seq: Sequence, hit: Hit | None = None) -> AllocStatus:
        """Whether ``allocate(seq)`` would succeed.  Changes nothing; true until the next change.

        ``hit`` is what ``find`` gives; None to look for it.
        """
        needed = -(-len(seq.token_ids) // self.block_size)
        if needed > self.num_blocks:
            return AllocStatus.NEVER
        free = self.num_free_blocks
        if needed > free:  # unless others use the cached part of the prefix already
            hit = self.find(seq) if hit is None else hit
            needed -= len(hit.blocks) - self._num_idle(hit)
        return AllocStatus.OK if needed <= free else AllocStatus.LATER

    def admit(self, seq: Sequence, hit: Hit, end: int) -> Copies:
        """Let ``seq`` begin with ``hit``, and give slots to its further tokens up to ``end``.

        Returns the copies to make before the K/V of these, at least one, are written.  Raises
        OutOfBlocks.  Sets ``seq.num_cached_tokens`` and ``seq.num_computed_tokens``.
        """
        if seq.seq_id in self._tables:
            raise ValueError(f"sequence {seq.seq_id!r} holds blocks already; free it first")
        table = self._table_class(seq)
        copies = self._begin(table, hit, end)
        self._tables[seq.seq_id] = table
        counts = self._counts
        counts["num_allocations"] += 1
        counts["queried_tokens"] += len(seq.token_ids)
        counts["queried_blocks"] += len(seq.token_ids) // self.block_size
        counts["hit_tokens"] += hit.num_tokens
        counts["hit_blocks"] += len(hit.blocks)
        seq.num_cached_tokens, seq.num_computed_tokens = hit.num_tokens, end
        seq.table_version += 1
        return copies

    def allocate(self, seq: Sequence) -> int:
        """``admit`` all tokens of ``seq``; returns how many leading ones are cached.

        The copies, if a part of a block is reused, are those of ``take_copies``.
        """
        hit = self.find_part(seq, self.find(seq))
        self._copies += self.admit(seq, hit, len(seq.token_ids))
        return hit.num_tokens

    def take_copies(self) -> Copies:
        """Copies that ``allocate`` calls since the last call of this ask for, to be run as others.

        Only designs that reuse part of a block have any.
        """
        copies, self._copies = self._copies, []
        return copies

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
        prefix.  Sets ``seq.num_computed_tokens``.
        """
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
        hit = self.find(seq, len(computed_blocks)) if computed_blocks else NOTHING
        if list(hit.blocks) != list(computed_blocks):
            raise ValueError(
                f"computed_blocks={list(computed_blocks)}: these do not hold the prefix of "
                f"sequence {seq.seq_id!r} (any more); ask get_computed_blocks again"
            )
        return self.admit(seq, hit, end)

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
        copy = self._table_class(child)
        self._share(table, copy)
        self._tables[child.seq_id] = copy
        child.num_cached_tokens = child.num_computed_tokens = stored
        child.table_version += 1

    def free(self, seq: Sequence) -> None:
        """Take back the blocks of ``seq``: it is finished, or preempted.

        Sets its counters to 0.
        """
        table = self._table_of(seq)
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
            require(stored > 0, f"{seq_id!r}: {stored} tokens are stored")

    # What the designs have in common ------------------------------------------------------------

    def _grow(self, table: Table, seq: Sequence, end: int) -> Copies:
        """Store the tokens of ``seq`` up to ``end`` in ``table``."""
        start = table.seq.num_computed_tokens
        if table.seq is not seq:  # another object of the same id
            seq.num_cached_tokens, seq.num_computed_tokens = table.seq.num_cached_tokens, start
            seq.table_version += 1
            table.seq = seq
        copies = self._extend(table, start, end)
        seq.num_computed_tokens = end
        if copies or -(-end // self.block_size) > -(-start // self.block_size):
            seq.table_version += 1
        return copies

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
    def _extend(self, table: Any, start: int, end: int) -> Copies:
        """Give ``table`` the blocks of ``end`` tokens, of which those from ``start`` on are new.

        Returns the copies to make before they are written.  Raises OutOfBlocks, changing nothing.
        """

    @abc.abstractmethod
    def _release(self, table: Any) -> None:
        """Take back the blocks of ``table``."""

    def _begin(self, table: Any, hit: Hit, end: int) -> Copies:
        """Give the new ``table`` those of ``hit``, then the others of ``end`` tokens: see above."""
        return self._extend(table, 0, end)

    def _match(self, seq: Sequence, limit: int) -> Hit:
        """The longest cached prefix of ``seq`` of at most ``limit`` blocks.  Changes nothing."""
        return NOTHING

    def _num_idle(self, hit: Hit) -> int:
        """How many blocks of ``hit`` are free: nobody uses them."""
        return 0

    def _num_needed(self, table: Any, end: int) -> int:
        """Free blocks that ``_extend`` takes to store the tokens of ``table`` up to ``end``."""
        position, offset = divmod(table.seq.num_computed_tokens, self.block_size)
        copied = offset > 0 and self._is_shared(table.blocks[position])
        return max(0, self._num_blocks_for(end) - len(table.blocks)) + copied

    def _is_shared(self, block: int) -> bool:
        """Whether several tables hold ``block``, into which the next token of one goes."""
        return False

    def _num_blocks_for(self, num_slots: int) -> int:
        """Blocks of a table of ``num_slots`` slots."""
        return -(-num_slots // self.block_size)


NOTHING = Hit()


def _clear(seq: Sequence) -> None:
    seq.num_cached_tokens = seq.num_computed_tokens = 0
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
