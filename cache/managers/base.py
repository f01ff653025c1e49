"""The interface of all cache managers.

A manager owns the block ids of one cache and decides which sequence's tokens live in which block.
It moves no data: it tells the caller what to copy, and the caller's kernels write K and V at
``slot = block_table[position // block_size] * block_size + position % block_size``.

How an engine uses it:

    if manager.can_allocate(seq) is AllocStatus.OK:
        num_cached = manager.allocate(seq)      # K/V of these leading tokens are there already
        ...                                     # compute and store those of the other tokens
    seq.append_token(token_id)
    copies = manager.append(seq)                # (src, dst) blocks, to be copied before the step
    ...                                         # compute and store those of the new token
    manager.free(seq)                           # done, or preempted: allocate(seq) resumes it

A token that goes to a slot which its sequence has already needs no call.  After an ``allocate`` or
an ``append``, and until the sequence is forked or swapped, the caller may raise
``seq.num_computed_tokens`` itself, up to ``num_slots(seq)``, for tokens that it stores.  The next
call about the sequence takes note: a block that they have filled can be found from then on.  An
engine saves most of its calls that way.

A call that raises has changed nothing.  ``copies`` hold until the next call that changes the
manager: run them, in order, before K or V are written; those of a sequence that is freed first
are void.
"""

from __future__ import annotations

import abc
import enum
import operator
from dataclasses import dataclass

from cache.memory_usage import MemoryUsage
from cache.policies import EvictionPolicy, make_policy
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


class CacheManager(abc.ABC):
    """Maps the tokens of sequences to the blocks ``0 .. num_blocks - 1`` of ``block_size`` tokens.

    Sequences are told apart by ``seq_id``.  Calls about a sequence that holds no blocks, or
    ``allocate`` of one that does, raise ValueError.
    """

    name: str = ""
    """Registry name, as in ``make_manager(name)``."""

    prefix_caching: bool = True
    """Whether the design shares equal prefixes: takes a policy, a hash algorithm and
    ``enable_prefix_caching``."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = _check_positive("num_blocks", num_blocks)
        self.block_size = _check_positive("block_size", block_size)

    @abc.abstractmethod
    def can_allocate(self, seq: Sequence) -> AllocStatus:
        """Whether ``allocate(seq)`` would succeed.  Changes nothing; true until the next change."""

    @abc.abstractmethod
    def allocate(self, seq: Sequence) -> int:
        """Give ``seq`` the blocks for all its tokens; returns how many leading tokens are cached.

        The K/V of the others, at least one, are to be computed by the caller in this step.
        Raises OutOfBlocks.  Sets ``seq.num_cached_tokens`` and ``seq.num_computed_tokens``.
        """

    def take_copies(self) -> Copies:
        """Copies that ``allocate`` calls since the last call of this ask for, to be run as others.

        Only designs that reuse part of a block have any.
        """
        return []

    @abc.abstractmethod
    def append(self, seq: Sequence) -> Copies:
        """Make room for the tokens appended to ``seq`` since the last call, at least one.

        Returns the (src, dst) blocks to copy before these tokens' K/V are written.  Raises
        OutOfBlocks.  Sets ``seq.num_computed_tokens``.
        """

    @abc.abstractmethod
    def can_append(self, seq: Sequence) -> bool:
        """Whether ``append(seq)`` would find enough free blocks.  Changes nothing."""

    def num_slots(self, seq: Sequence) -> int:
        """Tokens of ``seq`` that can be stored before its next call.

        Valid after ``allocate``, ``append`` and ``allocate_slots``, until ``seq`` is forked or
        swapped.
        """
        return -(-seq.num_computed_tokens // self.block_size) * self.block_size

    @abc.abstractmethod
    def free(self, seq: Sequence) -> None:
        """Take back the blocks of ``seq``: it is finished, or preempted.

        Sets ``seq.num_cached_tokens`` and ``seq.num_computed_tokens`` to 0.
        """

    @abc.abstractmethod
    def block_table(self, seq: Sequence) -> list[int]:
        """Block ids of ``seq`` in the order of its tokens.  A copy: it does not grow later."""

    @property
    @abc.abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that an allocation could take now."""

    @property
    @abc.abstractmethod
    def stats(self) -> CacheStats:
        """A snapshot of the counters."""

    @abc.abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError, saying what is wrong, unless all state is consistent.

        For tests and debugging: costs as much as looking at every block.
        """

    def memory_usage(self) -> MemoryUsage:
        """What the slots of the cache are used for now.  Costs as much as looking at every table.

        Cached content that nobody uses counts as free.
        """
        raise UnsupportedByDesign(self.name, "memory_usage")

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` share the blocks of all tokens that ``parent`` has stored.

        The tokens of ``child`` begin with these.  Takes no block.  Later the first ``append`` of
        either to a shared, partly filled block copies it.  Sets ``child.num_cached_tokens`` and
        ``child.num_computed_tokens``.
        """
        raise UnsupportedByDesign(self.name, "fork")

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

    def get_computed_blocks(self, seq: Sequence) -> tuple[list[int], int]:
        """Cached blocks of the prefix of ``seq`` and how many tokens they hold.  Changes nothing.

        Valid until the next call that changes the manager.
        """
        raise UnsupportedByDesign(self.name, "get_computed_blocks")

    def allocate_slots(
        self,
        seq: Sequence,
        num_new_tokens: int,
        computed_blocks: list[int] | tuple[int, ...] = (),
        *,
        num_lookahead_tokens: int = 0,
    ) -> Copies:
        """Make room for the next ``num_new_tokens`` tokens of ``seq`` (chunked prefill).

        ``computed_blocks``, from ``get_computed_blocks``, go in front of the first chunk.
        ``num_lookahead_tokens`` further slots are for draft tokens.  Returns and raises what
        ``append`` does.
        """
        raise UnsupportedByDesign(self.name, "allocate_slots")

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, as after a change of weights.  False if blocks are in use."""
        raise UnsupportedByDesign(self.name, "reset_prefix_cache")


def as_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """The policy object named by ``policy``, or ``policy`` itself."""
    if isinstance(policy, EvictionPolicy):
        return policy
    if not isinstance(policy, str):
        raise ValueError(f"policy={policy!r}: needs a name or an EvictionPolicy object")
    return make_policy(policy)


def _check_positive(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: needs an int of at least 1")
    return number
