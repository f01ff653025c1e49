"""The interface of all cache managers, and the code that they share.

A manager owns the block ids of one cache and decides which block holds which tokens.  It moves no
data.  It returns the copies to make, and the caller's kernels write K and V to
``slot = block_table[position // block_size] * block_size + position % block_size``.

A scheduler looks up each prefix once, with ``find``:

    hit = manager.find(seq)                     # its blocks hold K/V of a prefix of seq
    if manager.can_allocate(seq, hit) is AllocStatus.OK:
        copies = manager.admit(seq, hit, end)   # slots for the tokens before ``end``
    ...                                         # run copies, compute and store K/V of these tokens
    seq.append_token(token_id)
    copies = manager.append(seq)                # slots for all tokens that have none
    ...
    manager.free(seq)                           # finished or preempted; the same calls resume it

Scripts can use two shorter forms.  ``allocate(seq)`` finds and admits a whole sequence.
``get_computed_blocks`` and ``allocate_slots`` count new tokens, as in vLLM v1.

A full block can be found from the call that gives its last token a slot, if its tokens are known by
then, and otherwise from the next call about the sequence.

A call that raises changes nothing, with two exceptions.  A sliding window of ``vllm_v1`` gives its
blocks back before it raises OutOfBlocks.  And a change cannot be undone if it is interrupted, by a
KeyboardInterrupt or by an error in a method of the policy other than ``tell``, ``look_up`` and
``on_queued``.  Then every further call about a sequence or cached content raises InterruptedChange,
which names the error.  A KeyboardInterrupt at the end of a call may come after its change is
complete.

``copies`` are valid until the next call that changes the manager.  Run them in order, before any K
or V is written.  Copies for a sequence that is freed first need not be run.
"""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Callable, Hashable, MutableSequence
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

from cache.blocks.hashing import HASH_ALGORITHMS, BlockHasher
from cache.blocks.memory_usage import MemoryUsage
from cache.blocks.sequence import Sequence
from cache.checks import as_int, at_least, require, true_or_false
from cache.policies.base import EvictionPolicy, RequestInfo

Copies = list[tuple[int, int]]
"""(source block, destination block) pairs."""


class AllocStatus(enum.Enum):
    """A sequence gets its blocks now, when other sequences have freed blocks, or never."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class UnsupportedByDesign(NotImplementedError):
    """The design that a manager reproduces does not offer the feature."""

    def __str__(self) -> str:
        manager, feature = self.args
        return f"the design of manager {manager!r} does not offer {feature}"


class InterruptedChange(RuntimeError):
    """An error interrupted a change of the manager, which cannot be used any more."""

    def __str__(self) -> str:
        return (
            f"{self.args[0]} interrupted a change of this manager, so it no longer knows which "
            "blocks hold what; make a new one"
        )


class _Change:
    """Context of a change of ``manager``: keeps the error that interrupts it."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager

    def __enter__(self) -> None:
        self._manager._check_usable()

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if error is None:
            self._manager.interruption = ""
        elif self._manager.interruption:
            self._manager.interruption = repr(error)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of a manager since it was made.

    A sequence that is preempted and resumed finds blocks of its own.  So queries and hits of
    resumptions have counters of their own, as in vLLM's ``PrefixCacheStats``, and hit rates count
    first allocations only.  A block query is a full block of the allocated sequence.
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

    @property
    def token_hit_rate(self) -> float:
        """Share of the tokens of first allocations whose K/V were cached; 0 without any."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def block_hit_rate(self) -> float:
        """Share of the full blocks of first allocations that were cached; 0 without any."""
        return self.hit_blocks / self.queried_blocks if self.queried_blocks else 0.0


MIDDLE = "an interrupt"
"""``interruption`` while a change is made."""

FREED = -1
"""Replaces a block id in a table when the block is behind the sliding window of later queries."""


class Hit(NamedTuple):
    """The cached prefix of ``seq`` in ``manager``, valid until that changes its ``version``."""

    blocks: Items[int] = ()
    num_tokens: int = 0
    """Tokens whose K/V are in ``blocks``."""
    match: Any = None
    """Private to the design."""
    version: int = 0
    seq: Sequence | None = None
    manager: CacheManager | None = None


NOTHING = Hit()


@dataclass(slots=True, eq=False)
class Table:
    """The blocks of a sequence in the order of its tokens; ``seq`` counts the stored tokens."""

    seq: Sequence
    blocks: MutableSequence[int] = field(default_factory=list)
    is_swapped_out: bool = False  # the blocks are in host memory
    no_alloc_until: int = 0  # tokens up to this length need no new block and no copy
    num_lookahead_tokens: int = 0  # slots beyond the last token that the next _extend is to give


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The options that all designs share; ``make_manager`` describes them."""

    num_blocks: int
    block_size: int
    policy: str | EvictionPolicy = "lru"
    hash_algorithm: str = "xxh3_128"
    enable_prefix_caching: bool = True


def _not_offered(feature: str) -> Callable[..., Any]:
    """The method ``feature`` of a design without it."""

    def refuse(self: CacheManager, *_arguments: Any) -> Any:
        raise UnsupportedByDesign(self.name, feature)

    return refuse


class CacheManager(abc.ABC):
    """Maps the tokens of sequences to the blocks ``0 .. num_blocks - 1`` of ``block_size`` tokens.

    Sequences are identified by ``seq_id``.  ``allocate`` of a sequence that holds blocks, and any
    other call about one that holds none, raise ValueError.  A call that the design does not offer,
    see the class attributes ``can_...``, raises UnsupportedByDesign.

    A design defines ``_extend``, ``_release`` and ``num_free_blocks``.  With ``prefix_caching`` it
    also defines ``_match``, ``_num_idle`` and ``_begin``, with ``can_fork`` ``_share``, with
    ``can_reset`` ``_forget``, with ``can_swap`` the swap calls.  docs/deviations.md lists where the
    designs differ from the systems that they reproduce.

    Raises ValueError for bad options and for a digest below 128 bits, and UnsupportedByDesign for a
    policy or a hash algorithm that the design does not use.
    """

    name: str = ""
    """Registry name, as in ``make_manager(name)``."""
    prefix_caching: bool = True
    """Whether the design shares equal prefixes, and so takes a policy."""
    own_hash: str = ""
    """The hash algorithm used for the default ``"xxh3_128"``.  Empty if no block is hashed."""
    compares_tokens: bool = False
    """Whether a hit compares tokens, so that a digest may have less than 128 bits."""
    can_chunk: bool = True
    """Whether a prompt can get its slots over several calls."""
    can_fork: bool = False
    """Whether ``fork`` lets two sequences share the blocks of their common prefix."""
    can_swap: bool = False
    """Whether the design has host blocks of its own and moves sequences there."""
    can_look_ahead: bool = False
    """Whether a call can also give slots to draft tokens, ``num_lookahead_tokens``."""
    can_reset: bool = False
    """Whether cached content can be dropped."""

    clock: Callable[[], float] | None = None
    """Returns the time for policies, in seconds; an engine sets it.  None: time is unknown."""

    interruption: str
    """The error that interrupted a change; empty while the state is consistent."""

    _listener: Callable[[RequestInfo], None] | None = None
    """The policy's ``tell``, if the policy overrides it."""

    _table_class: ClassVar[type[Table]] = Table

    _share: Callable[[Any, Any], None]
    """Gives a new table, the second, the stored blocks of the first."""
    _forget: Callable[[], None]
    """Drops all cached content; no block is in use."""

    swap_out, can_swap_out = _not_offered("swap_out"), _not_offered("can_swap_out")
    swap_in, can_swap_in = _not_offered("swap_in"), _not_offered("can_swap_in")

    def __init__(self, options: CacheOptions) -> None:
        self.num_blocks = at_least(1, "num_blocks", options.num_blocks)
        self.block_size = at_least(1, "block_size", options.block_size)
        caching = true_or_false("enable_prefix_caching", options.enable_prefix_caching)
        self.enable_prefix_caching = caching and self.prefix_caching
        if options.policy != "lru" and not self.prefix_caching:
            raise UnsupportedByDesign(self.name, f"a policy ({options.policy!r})")
        is_default = options.hash_algorithm == "xxh3_128"
        if not self.own_hash and not is_default:
            feature = f"a hash_algorithm ({options.hash_algorithm!r}): it hashes no block"
            raise UnsupportedByDesign(self.name, feature)
        if self.own_hash:
            algorithm = self.own_hash if is_default else options.hash_algorithm
            self._hasher = BlockHasher(algorithm, self.block_size)
            if self._hasher.digest_size < 16 and not self.compares_tokens:
                strong = [name for name, f in HASH_ALGORITHMS.items() if len(f(b"")) >= 16]
                raise ValueError(
                    f"hash_algorithm={algorithm!r}: {self.name} does not compare tokens and needs "
                    f"a digest of 128 bits or more; choose from {', '.join(strong)}"
                )
        self._tables: dict[Hashable, Any] = {}  # of _table_class
        self._preempted: set[Hashable] = set()  # ids of sequences that are to resume
        self._counts = dict.fromkeys(CacheStats.__dataclass_fields__, 0)
        self._version = 0  # rises when hits become stale
        self.interruption = ""
        self._change = _Change(self)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_blocks={self.num_blocks}, block_size={self.block_size}, "
            f"num_free_blocks={self.num_free_blocks}, num_sequences={len(self._tables)})"
        )

    def on_queued(self, position: tuple[int, ...], seq: Sequence | None = None) -> None:  # noqa: B027
        """Tell the policy that ``seq`` waits at queue ``position``.  None: it left the queue.

        Only designs with a block pool do so, and only if the policy defines ``on_queued``.
        """

    def find(self, seq: Sequence, limit: int | None = None) -> Hit:
        """The cached prefix of ``seq``, at most ``limit`` blocks.  Changes nothing.

        At least one token is left to compute.
        """
        self._check_usable()
        if not self.enable_prefix_caching:
            return NOTHING
        longest = self._max_hits(seq)
        if limit is not None:
            longest = min(longest, at_least(0, "limit", limit))
        blocks, match = self._match(seq, longest)
        num_tokens = len(blocks) * self.block_size
        return Hit(blocks, num_tokens, match, self._version, seq, self)

    def _max_hits(self, seq: Sequence) -> int:
        """Maximum length of a hit of ``seq``, in blocks."""
        return (len(seq.token_ids) - 1) // self.block_size

    def get_computed_blocks(self, seq: Sequence) -> tuple[list[int], int]:
        """The cached blocks of the prefix of ``seq``, and the number of their tokens."""
        hit = self.find(seq)
        return list(hit.blocks), hit.num_tokens

    def can_allocate(self, seq: Sequence, hit: Hit | None = None) -> AllocStatus:
        """Whether ``allocate(seq)`` would succeed now.  Changes nothing.

        ``hit`` is the result of ``find``.  If it is None or stale the prefix is looked up again.
        """
        self._check_usable()
        needed = -(-len(seq.token_ids) // self.block_size)
        if needed > self.num_blocks:
            return AllocStatus.NEVER
        free = self.num_free_blocks
        if needed > free:  # unless other sequences use the cached part of the prefix already
            wanted = (seq, self._version, self)
            if hit is None or (hit.num_tokens and (hit.seq, hit.version, hit.manager) != wanted):
                hit = self.find(seq)
            needed -= len(hit.blocks) - self._num_idle(hit)
        return AllocStatus.OK if needed <= free else AllocStatus.LATER

    def admit(self, seq: Sequence, hit: Hit, end: int, num_lookahead_tokens: int = 0) -> Copies:
        """Start ``seq`` with the cached prefix ``hit`` and give slots to its tokens before ``end``.

        ``num_lookahead_tokens``: see ``allocate_slots``.  Returns the copies to make before K/V of
        the tokens from ``hit.num_tokens`` on are written.  There is at least one such token.  Sets
        ``seq.num_cached_tokens`` and ``seq.num_computed_tokens``.  Raises OutOfBlocks, and
        ValueError for an ``end`` out of range and for a hit that was found for another sequence, in
        another manager or before the manager changed.
        """
        if seq.seq_id in self._tables:
            raise ValueError(f"sequence {seq.seq_id!r} holds blocks already; free it first")
        if hit.num_tokens and not (hit.seq is seq and hit.manager is self):
            found = f"{hit.seq!r} in {hit.manager!r}"
            raise ValueError(f"hit: it was found for {found}, needs find({seq!r}) in {self!r}")
        if hit.num_tokens and hit.version != self._version:
            raise ValueError("hit: the manager has changed since it was found; call find again")
        if not (isinstance(end, Integral) and hit.num_tokens < end <= len(seq.token_ids)):
            raise _wrong_end(seq, hit.num_tokens, end)
        end, table = int(end), self._table_class(seq)
        if num_lookahead_tokens != 0:
            table.num_lookahead_tokens = _checked_lookahead(self, num_lookahead_tokens)
        counts, kind = self._counts, "resumed_" if seq.seq_id in self._preempted else ""
        with self._change:
            copies = self._begin(table, hit, end)
            self._tables[seq.seq_id] = table
            self._version += 1
            self._preempted.discard(seq.seq_id)
            counts["num_resumptions" if kind else "num_allocations"] += 1
            counts[f"{kind}queried_tokens"] += len(seq.token_ids)
            counts[f"{kind}queried_blocks"] += len(seq.token_ids) // self.block_size
            counts[f"{kind}hit_tokens"] += hit.num_tokens
            counts[f"{kind}hit_blocks"] += len(hit.blocks)
            seq.num_cached_tokens, seq.num_computed_tokens = hit.num_tokens, end
            seq.table_version += 1
        return copies

    def allocate(self, seq: Sequence) -> int:
        """``admit`` all tokens of ``seq``; returns the number of cached ones."""
        hit = self.find(seq)
        self.admit(seq, hit, len(seq.token_ids))
        return hit.num_tokens

    def append(
        self, seq: Sequence, end: int | None = None, num_lookahead_tokens: int = 0
    ) -> Copies:
        """Give slots to the tokens of ``seq`` that have none, or only to those before ``end``.

        There must be at least one.  Returns and raises as ``allocate_slots`` does.
        """
        table = self._tables.get(seq.seq_id)
        if table is None or self.interruption or table.is_swapped_out:
            table = self._table_on_device(seq)  # raises
        start, num_tokens = table.seq.num_computed_tokens, len(seq.token_ids)
        is_decode = end is None and not num_lookahead_tokens
        if is_decode and start < num_tokens <= table.no_alloc_until and table.seq is seq:
            seq.num_computed_tokens = num_tokens
            return []
        end = num_tokens if end is None else as_int("end", end)
        if not start < end <= num_tokens:
            raise _wrong_end(seq, start, end)
        if num_lookahead_tokens != 0:
            table.num_lookahead_tokens = _checked_lookahead(self, num_lookahead_tokens)
        if table.seq is not seq:  # another object with the same id
            seq.num_cached_tokens, seq.num_computed_tokens = table.seq.num_cached_tokens, start
            seq.table_version += 1
            table.seq = seq
        with self._change:
            copies = self._extend(table, start, end)
            self._version += 1
            if copies or -(-end // self.block_size) > -(-start // self.block_size):
                seq.table_version += 1
            seq.num_computed_tokens = end
        return copies

    def can_append(self, seq: Sequence) -> bool:
        """Whether ``append(seq)`` would find enough free blocks.  Changes nothing."""
        table = self._table_on_device(seq)
        return self._num_needed(table, len(seq.token_ids)) <= self.num_free_blocks

    def allocate_slots(
        self,
        seq: Sequence,
        num_new_tokens: int,
        computed_blocks: Items[int] = (),
        num_lookahead_tokens: int = 0,
    ) -> Copies:
        """Give slots to the next ``num_new_tokens`` tokens of ``seq``.

        A new sequence starts with ``computed_blocks``, from ``get_computed_blocks``.

        ``num_lookahead_tokens`` drafts, which are not among the tokens of ``seq``, get the slots
        behind them, as in vLLM v1.  Their blocks cannot be found.  Append the drafts that are
        accepted; the next call counts them.  The slots of rejected drafts are written again.

        Returns the (src, dst) blocks to copy before K/V of the tokens are written.  Sets
        ``seq.num_computed_tokens``.  Raises OutOfBlocks, UnsupportedByDesign for lookahead tokens
        of a design but ``vllm_v1``, and ValueError for a number out of range and for blocks that do
        not hold the prefix.
        """
        count = as_int("num_new_tokens", num_new_tokens)
        table = self._tables.get(seq.seq_id)
        if table is not None:
            if len(computed_blocks):
                raise ValueError(
                    f"computed_blocks: sequence {seq.seq_id!r} has blocks already, and these can "
                    "only go in front of its first chunk"
                )
            return self.append(seq, table.seq.num_computed_tokens + count, num_lookahead_tokens)
        hit = self.find(seq, len(computed_blocks)) if len(computed_blocks) else NOTHING
        if list(hit.blocks) != list(computed_blocks):
            raise ValueError(
                f"computed_blocks={list(computed_blocks)}: these do not hold the prefix of "
                f"sequence {seq.seq_id!r} (any more); call get_computed_blocks again"
            )
        end = hit.num_tokens + count
        if hit.num_tokens < end < len(seq.token_ids) and not self.can_chunk:
            chunk = f"chunks ({count} of {len(seq.token_ids) - hit.num_tokens} tokens)"
            raise UnsupportedByDesign(self.name, chunk)
        return self.admit(seq, hit, end, num_lookahead_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` share the blocks of all tokens that ``parent`` has stored.

        ``child`` must begin with these tokens.  Takes no block.  The first sequence that writes to
        a shared, partly filled block gets a copy of it.  Sets the counters of ``child``.
        """
        if not self.can_fork:
            raise UnsupportedByDesign(self.name, "fork")
        table = self._table_on_device(parent)
        if child.seq_id in self._tables:
            raise ValueError(f"child: sequence {child.seq_id!r} holds blocks already")
        stored = table.seq.num_computed_tokens
        theirs = parent.lora_name, parent.cache_salt, parent.mm_inputs, parent.token_ids[:stored]
        if theirs != (child.lora_name, child.cache_salt, child.mm_inputs, child.token_ids[:stored]):
            raise ValueError(
                f"child: the first {stored} tokens, the adapter, the multi-modal inputs and the "
                f"salt of sequence {child.seq_id!r} must equal the parent's, sequence "
                f"{parent.seq_id!r}"
            )
        copy = self._table_class(child)
        with self._change:
            self.interruption = MIDDLE
            self._share(table, copy)
            self._tables[child.seq_id] = copy
            self._version += 1
            child.num_cached_tokens = child.num_computed_tokens = stored
            child.table_version += 1

    def free(self, seq: Sequence, is_finished: bool = True) -> None:
        """Take back the blocks of ``seq``, which is finished or, if not, preempted.

        Sets its counters to 0.
        """
        table = self._table_of(seq)
        hints = table.seq.hints if is_finished else ()
        known = table.seq.num_tokens - table.seq.num_unknown_tokens
        self._notify_policy(table.seq, known - table.seq.num_prompt_tokens, hints)
        with self._change:
            self.interruption = MIDDLE
            self._release(table)
            del self._tables[seq.seq_id]
            if not is_finished:
                self._preempted.add(seq.seq_id)
            self._version += 1
            for freed in {table.seq, seq}:
                freed.num_cached_tokens = freed.num_computed_tokens = 0
                freed.table_version += 1

    def drop(self, seq: Sequence) -> None:
        """Forget that ``seq``, which was preempted and holds no blocks, is to resume."""
        self._preempted.discard(seq.seq_id)

    def block_table(self, seq: Sequence) -> list[int]:
        """The block ids of ``seq`` in the order of its tokens; a copy.

        FREED replaces blocks behind a sliding window.
        """
        return list(self._table_of(seq).blocks)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached content, as after a change of weights.

        Returns False, and does nothing, while sequences hold blocks.
        """
        if not self.can_reset:
            raise UnsupportedByDesign(self.name, "reset_prefix_cache")
        with self._change:
            if self._tables:
                return False
            self.interruption = MIDDLE
            self._forget()
            self._version += 1
        return True

    @property
    @abc.abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that an allocation could take now."""

    @property
    def stats(self) -> CacheStats:
        """A snapshot of the counters of the device blocks."""
        return CacheStats(**self._counts)

    def memory_usage(self) -> MemoryUsage:
        """Slots of the cache by use.  O(blocks in tables).

        Cached content without a user counts as free.
        """
        filled: dict[int, int] = {}  # block in use -> filled slots; a shared block counts once
        for table in self._tables.values():
            num_tokens = 0 if table.is_swapped_out else table.seq.num_computed_tokens
            for block in table.blocks if num_tokens else ():
                if block != FREED:
                    filled[block] = max(filled.get(block, 0), min(self.block_size, num_tokens))
                num_tokens = max(0, num_tokens - self.block_size)
        used, taken = sum(filled.values()), len(filled) * self.block_size
        free = self.num_blocks * self.block_size - taken
        return MemoryUsage(used=used, reserved=0, internal=taken - used, external=0, free=free)

    def check_invariants(self) -> None:
        """Raise AssertionError, with the reason, unless all state is consistent.

        For tests and debugging: O(num_blocks).
        """
        require(not self.interruption, f"a change was interrupted by {self.interruption}")
        for seq_id, table in self._tables.items():
            blocks, stored = table.blocks, table.seq.num_computed_tokens
            held = [block for block in blocks if block != FREED]
            require(
                len(set(held)) == len(held) and len(blocks) >= self._num_blocks_for(stored),
                f"{seq_id!r}: table {blocks} for {stored} tokens",
            )
            require(stored > 0, f"{seq_id!r}: {stored} tokens are stored")

    def _check_usable(self) -> None:
        if self.interruption:
            raise InterruptedChange(self.interruption)

    def _table_of(self, seq: Sequence) -> Any:
        """The table of ``seq``; ValueError if it holds no blocks."""
        self._check_usable()
        table = self._tables.get(seq.seq_id)
        if table is None:
            raise ValueError(f"sequence {seq.seq_id!r} holds no blocks")
        return table

    def _table_on_device(self, seq: Sequence) -> Any:
        table = self._table_of(seq)
        if table.is_swapped_out:
            raise ValueError(f"sequence {seq.seq_id!r} is swapped out")
        return table

    def _notify_policy(
        self, seq: Sequence, output_tokens: float = math.nan, hints: Items[float] = ()
    ) -> None:
        """Notify the policy which request the next calls are for."""
        if self._listener:
            time_ms = 1000 * self.clock() if self.clock else math.nan
            prompt = seq.num_prompt_tokens
            blocks = prompt // self.block_size
            self._listener(RequestInfo(time_ms, prompt, output_tokens, blocks, *hints))

    @abc.abstractmethod
    def _extend(self, table: Any, start: int, end: int) -> Copies:
        """Give ``table`` the blocks of its tokens before ``end``.  Tokens from ``start`` are new.

        Returns the copies to make before the new tokens are written.  Raises OutOfBlocks, or else
        sets ``interruption`` to MIDDLE before it takes a block.
        """

    @abc.abstractmethod
    def _release(self, table: Any) -> None:
        """Take back the blocks of ``table``."""

    def _begin(self, table: Any, hit: Hit, end: int) -> Copies:
        """Give the new ``table`` the blocks of ``hit``, then extend it to ``end`` tokens."""
        return self._extend(table, 0, end)

    def _match(self, seq: Sequence, limit: int) -> tuple[Items[int], Any]:
        """The longest cached prefix of ``seq`` of at most ``limit`` blocks, and ``Hit.match``."""
        return (), None

    def _num_idle(self, hit: Hit) -> int:
        """Number of blocks of ``hit`` without a user, which count as free."""
        return 0

    def _num_needed(self, table: Any, end: int) -> int:
        """Free blocks that ``_extend`` takes to store the tokens of ``table`` before ``end``."""
        position, offset = divmod(table.seq.num_computed_tokens, self.block_size)
        copied = offset > 0 and self._is_shared(table.blocks[position])
        return max(0, self._num_blocks_for(end) - len(table.blocks)) + copied

    def _is_shared(self, block: int) -> bool:
        """Whether several tables hold ``block``, so that a new token needs a copy of it."""
        return False

    def _num_blocks_for(self, num_slots: int) -> int:
        """Length of a table of ``num_slots`` slots."""
        return -(-num_slots // self.block_size)


def _wrong_end(seq: Sequence, start: int, end: int) -> ValueError:
    return ValueError(
        f"end={end!r}: {start} of the {seq.num_tokens} tokens of sequence {seq.seq_id!r} have a "
        f"slot; needs an int from {start + 1} to {seq.num_tokens}, or append tokens to the "
        "sequence first"
    )


def _checked_lookahead(manager: CacheManager, num_tokens: int) -> int:
    if num_tokens != 0 and not manager.can_look_ahead:
        raise UnsupportedByDesign(manager.name, "num_lookahead_tokens")
    return at_least(0, "num_lookahead_tokens", num_tokens)
