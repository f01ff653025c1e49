"""The interface of all cache managers, and the code that they share.

A manager owns the block ids of one cache and decides which block holds which tokens.  It moves no
data, but it returns the block copies that the caller has to make.  The caller's kernels write K and
V to ``slot = block_table[position // block_size] * block_size + position % block_size``.

A scheduler looks up the prefix of each sequence once, with ``find``:

    hit = manager.find(seq)                     # blocks with K/V of a prefix of seq
    if manager.can_allocate(seq, hit) is AllocStatus.OK:
        copies = manager.admit(seq, hit, end)   # slots for the tokens before ``end``
    ...                                         # copy, then compute and store K/V of these tokens
    seq.append_token(token_id)
    copies = manager.append(seq)                # slots for all tokens that have none
    ...
    manager.free(seq)                           # finished or preempted; find and admit resume it

Scripts can use two shorter forms.  ``allocate(seq)`` finds and admits a whole sequence.
``get_computed_blocks`` and ``allocate_slots`` have the arguments of vLLM v1: numbers of new tokens.

A full block can be found after the call that gives its last token a slot.  If a token of the block
is unknown at that call, the block can be found after the next call about the sequence.

A call that raises changes nothing, with two exceptions.  First, ``vllm_v1`` frees the blocks behind
a window or a state even if the call then raises OutOfBlocks.  Second, a change that
is interrupted cannot be undone.  A KeyboardInterrupt can interrupt it, or an error in a method of
the policy other than ``tell``, ``correct``, ``look_up`` and ``on_queued``.  Every later call about
a sequence, a session or cached content then raises InterruptedChange, which names the error.  A
KeyboardInterrupt at the end of a call may also come after a complete change.

With ``host_blocks`` a manager has a tier in host memory.  A hit then goes on in host memory, and
``take_transfers`` returns the blocks to move.  A scheduler calls it once per step.

``copies`` are valid until the next call that changes the manager.  Run them in order, before any K
or V is written.  If a sequence is freed first, its copies need not be run.
"""

from __future__ import annotations

import abc
import enum
import inspect
import math
from collections.abc import Callable, Hashable, MutableSequence
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

from cache.blocks.groups import Group
from cache.blocks.hashing import HASH_ALGORITHMS, BlockHasher
from cache.blocks.host_tier import HostTier
from cache.blocks.memory_usage import MemoryUsage
from cache.blocks.sequence import Sequence
from cache.blocks.session_hint import SessionHint
from cache.checks import as_int, at_least, require, shown, true_or_false
from cache.managers.stats import CacheStats
from cache.policies.base import EvictionPolicy, RequestInfo

Copies = list[tuple[int, int]]
"""(source block, destination block) pairs."""


class AllocStatus(enum.Enum):
    """Whether a sequence gets its blocks now, after other sequences have freed blocks, or never."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class UnsupportedByDesign(NotImplementedError):
    """The feature is not part of the design that the manager reproduces."""

    def __str__(self) -> str:
        manager, feature = self.args
        return f"the design of manager {manager!r} does not offer {feature}"


class InterruptedChange(RuntimeError):
    """An error interrupted a change of the manager, so the manager cannot be used any more."""

    def __str__(self) -> str:
        return (
            f"{self.args[0]} interrupted a change of this manager, so it no longer knows which "
            "blocks hold what; make a new one"
        )


class _Change:
    """Context manager around a change of ``manager``.  It records an error that interrupts it."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager

    def __enter__(self) -> None:
        if self._manager.interruption:
            raise InterruptedChange(self._manager.interruption)

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if error is None:
            self._manager.interruption = ""
        elif self._manager.interruption:
            self._manager.interruption = repr(error)


MIDDLE = "an interrupt"
"""Value of ``interruption`` while a change is in progress."""

FREED = -1
"""Entry of a block table in place of a block behind the window of all later queries, or of a state
that was not stored or was given back."""


class Hit(NamedTuple):
    """The cached prefix of ``seq`` in ``manager``.  Valid while the manager is unchanged."""

    blocks: Items[int] = ()
    num_tokens: int = 0
    """Number of tokens of the prefix, including ``loads``."""
    match: Any = None
    """Data of the design, which callers do not use."""
    version: int = 0
    seq: Sequence | None = None
    manager: CacheManager | None = None
    num_device_blocks: int = 0
    """Length in blocks of the prefix that needs no ``loads``."""
    loads: Items[tuple[int, int, int]] = ()
    """(group, position in the table, host block) of the blocks to load from host memory."""


NOTHING = Hit()


@dataclass(slots=True, eq=False)
class Table:
    """The blocks of ``seq`` in token order.  ``seq.num_computed_tokens`` tokens are stored."""

    seq: Sequence
    blocks: MutableSequence[int] = field(default_factory=list)
    is_swapped_out: bool = False  # the blocks are in host memory
    no_alloc_until: int = 0  # tokens up to this length need no new block and no copy
    num_lookahead_tokens: int = 0  # slots beyond the last token that the next _extend is to give
    num_noted: int = 0  # leading blocks that the host tier knows of
    host_blocks: list[int] = field(default_factory=list)  # host blocks with the same content


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options of all designs.  ``make_manager`` describes them."""

    num_blocks: int
    block_size: int
    policy: str | EvictionPolicy = "lru"
    hash_algorithm: str = "xxh3_128"
    enable_prefix_caching: bool = True
    host_blocks: int = 0
    host_policy: str | EvictionPolicy = "lru"
    store: str = "through"
    store_threshold: int = 2
    inclusive: bool = True


def _not_offered(feature: str) -> Callable[..., Any]:
    """Make the method ``feature`` for a design that does not offer it."""

    def refuse(self: CacheManager, *_arguments: Any, **_options: Any) -> Any:
        raise UnsupportedByDesign(self.name, feature)

    refuse.__name__ = feature
    return refuse


class CacheManager(abc.ABC):
    """Maps the tokens of sequences to the blocks ``0 .. num_blocks - 1`` of ``block_size`` tokens.

    Sequences are identified by ``seq_id``.  ``allocate`` raises ValueError if the sequence already
    holds blocks; the other calls raise ValueError if it holds none.  Calls that the design does not
    offer raise UnsupportedByDesign: see the class attributes ``can_...``.

    A design defines ``_extend``, ``_release`` and ``num_free_blocks``.  With ``prefix_caching`` it
    also defines ``_match``, ``_num_idle`` and ``_begin``; with ``can_fork``, ``_share``; with
    ``can_reset``, ``_forget``; with ``can_swap``, the swap calls.  docs/deviations.md lists the
    differences between the designs and the systems that they reproduce.

    Raises ValueError for bad options and for a digest below 128 bits.  Raises UnsupportedByDesign
    for a policy or a hash algorithm that the design does not use.
    """

    name: str = ""
    """Name of the design in ``make_manager(name)``.  By default the name of the class."""
    prefix_caching: bool = True
    """Whether the design shares equal prefixes and accepts an eviction policy."""
    own_hash: str = ""
    """Hash algorithm that replaces the default ``"xxh3_128"``.  Empty if no block is hashed."""
    compares_tokens: bool = False
    """Whether a hit compares tokens.  If so, a digest may have fewer than 128 bits."""
    can_chunk: bool = True
    """Whether a prompt can get its slots in several calls."""
    can_fork: bool = False
    """Whether ``fork`` lets two sequences share the blocks of their common prefix."""
    can_swap: bool = False
    """Whether the design owns host blocks (``num_cpu_blocks``) and can move sequences to them."""
    can_look_ahead: bool = False
    """Whether a call can also give slots to draft tokens (``num_lookahead_tokens``)."""
    can_reset: bool = False
    """Whether ``reset_prefix_cache`` can drop the cached content."""
    can_group: bool = False
    """Whether the constructor takes ``groups`` of layers, which have block tables of their own."""
    reserves: bool = False
    """Whether a sequence gets all its slots at once (``max_model_len``, ``final_length``)."""

    groups: tuple[Group, ...] = (Group(),)
    """Groups of layers.  A sequence has a block table for each; most designs have one group."""
    max_in_flight_tokens: int | None = None
    """Maximum number of tokens of a sequence that get slots in one call.  A scheduler that computes
    prompts in chunks sets it, so that ``can_allocate`` counts no block behind a window."""
    has_states: bool = False
    """Whether a group has the kind "state".  If not, ``chunk_end`` changes no end."""

    tier: HostTier | None = None
    """The tier in host memory, if there is one.  ``cache.managers.tiered`` uses it."""

    queue_readers: tuple[tuple[EvictionPolicy, BlockHasher], ...] = ()
    """Policies that define ``on_queued``, with the hashers of their keys.  If there is none,
    ``on_queued`` does nothing."""

    clock: Callable[[], float] | None = None
    """Returns the time in seconds for policies.  An engine sets it.  None: the time is unknown."""

    interruption: str
    """The error that interrupted a change; empty while the state is consistent."""

    _policies: tuple[EvictionPolicy, ...] = ()
    """The policies of the device's and of the tier's blocks."""
    _listeners: tuple[Callable[[RequestInfo], None], ...] = ()
    """The method ``tell`` of each policy that overrides it."""
    _prompt_reader: EvictionPolicy | None = None
    """The policy, if it defines ``look_up`` and reads a prompt before it is told of its request."""

    _table_class: ClassVar[type[Table]] = Table

    _is_full: bool = True
    """Whether a table has a block for each ``block_size`` tokens, and all layers use it."""
    _num_to_admit: Callable[[int, Hit], int]
    """Unless ``_is_full``: number of free blocks that a number of tokens takes, after a hit."""
    _share: Callable[[Any, Any], None]
    """Adds the stored blocks of the first table to the second, new table."""
    _forget: Callable[[], None]
    """Drops all cached content.  No block is in use."""

    swap_out, can_swap_out = _not_offered("swap_out"), _not_offered("can_swap_out")
    swap_in, can_swap_in = _not_offered("swap_in"), _not_offered("can_swap_in")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__
        if "__init__" in vars(cls):
            cls.can_group = "groups" in inspect.signature(cls).parameters

    def __init__(self, options: CacheOptions) -> None:
        self.num_blocks = at_least(1, "num_blocks", options.num_blocks)
        self.block_size = at_least(1, "block_size", options.block_size)
        caching = true_or_false("enable_prefix_caching", options.enable_prefix_caching)
        self.enable_prefix_caching = caching and self.prefix_caching
        if not self.prefix_caching and options.policy != "lru":
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
        self._counts = dict.fromkeys(CacheStats.__dataclass_fields__, 0)
        self._tables: dict[Hashable, Any] = {}  # of _table_class
        self._preempted: set[Hashable] = set()  # ids of sequences that will resume
        self._version = 0  # a change makes earlier hits stale
        self.interruption = ""
        self._change = _Change(self)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_blocks={self.num_blocks}, block_size={self.block_size}, "
            f"num_free_blocks={self.num_free_blocks}, num_sequences={len(self._tables)})"
        )

    def on_queued(self, position: tuple[int, ...], seq: Sequence | None = None) -> None:
        """Tell policies that ``seq`` waits at ``position``.  None: it has left the queue.

        Only the policies of a block pool and of a tier are told.  They are ``queue_readers``.
        """
        for policy, hasher in self.queue_readers:
            policy.on_queued(position, self._keys(seq, hasher) if seq else ())

    def correct(self, hint: SessionHint) -> None:
        """Give a corrected ``hint`` to the policy, if it defines ``correct``.  Moves no block.

        Raises ValueError unless ``hint`` is a SessionHint.
        """
        if not isinstance(hint, SessionHint):
            raise ValueError(f"hint={shown(hint)}: needs a SessionHint")
        self._check_usable()
        for policy in self._policies:
            if "correct" in policy.hooks:
                policy.correct(RequestInfo(self._time_ms(), *[math.nan] * 3, *hint.numbers))

    def find(self, seq: Sequence, limit: int | None = None) -> Hit:
        """Look up the cached prefix of ``seq``, up to ``limit`` blocks.  Changes nothing.

        The prefix always leaves at least one token of ``seq`` to compute.
        """
        if self.interruption:
            raise InterruptedChange(self.interruption)
        if not self.enable_prefix_caching:
            return NOTHING
        longest = self._max_hits(seq)
        if limit is not None:
            longest = min(longest, at_least(0, "limit", limit))
        blocks, match = self._match(seq, longest)
        num_tokens = len(blocks) * self.block_size
        return Hit(blocks, num_tokens, match, self._version, seq, self, len(blocks))

    def _max_hits(self, seq: Sequence) -> int:
        """Maximum length of a hit of ``seq``, in blocks."""
        return (len(seq.token_ids) - 1) // self.block_size

    def get_computed_blocks(self, seq: Sequence) -> tuple[list[int], int]:
        """Return the blocks of the cached prefix of ``seq`` and the prefix's number of tokens.

        Blocks in host memory are left out.
        """
        hit = CacheManager.find(self, seq)  # on the device
        return list(hit.blocks), hit.num_tokens

    def can_allocate(self, seq: Sequence, hit: Hit | None = None) -> AllocStatus:
        """Whether ``allocate(seq)`` would succeed now.  Changes nothing.

        With several groups of layers: whether ``seq`` would get its slots in chunks of up to
        ``max_in_flight_tokens``, if this number is set, that end as ``chunk_end`` says.

        ``hit`` is the result of ``find``.  If it is None or stale, the prefix is looked up again.
        """
        if self.interruption:
            raise InterruptedChange(self.interruption)
        num_tokens = len(seq.token_ids)
        needed = -(-num_tokens // self.block_size)
        if not self._is_full:
            needed = self._num_to_admit(num_tokens, NOTHING)
        if needed > self.num_blocks:
            return AllocStatus.NEVER
        free = self.num_free_blocks
        if needed > free:  # cached blocks in use by others need no free block
            wanted = (seq, self._version, self)
            if hit is None or (hit.num_tokens and (hit.seq, hit.version, hit.manager) != wanted):
                hit = self.find(seq)
            if self._is_full:
                needed -= len(hit.blocks) - self._num_idle(hit)
            else:
                needed = self._num_to_admit(num_tokens, hit)
        return AllocStatus.OK if needed <= free else AllocStatus.LATER

    def admit(self, seq: Sequence, hit: Hit, end: int, num_lookahead_tokens: int = 0) -> Copies:
        """Start ``seq`` with the cached prefix ``hit`` and give slots to its tokens before ``end``.

        ``end`` is above ``hit.num_tokens``.  ``num_lookahead_tokens``: see ``allocate_slots``.
        Blocks of the hit that are in host memory get device blocks; ``take_transfers`` names both.
        Returns the copies to make before K/V of the new tokens are written.  Sets
        ``seq.num_cached_tokens`` and ``seq.num_computed_tokens``.  Raises OutOfBlocks.  Raises
        ValueError if ``end`` is out of range, or if the hit is for another sequence, from another
        manager, or older than the manager's last change.
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
            num_hits = hit.num_device_blocks
            counts[f"{kind}hit_tokens"] += num_hits * self.block_size
            counts[f"{kind}hit_blocks"] += num_hits
            counts[f"{kind}host_hit_blocks"] += hit.num_tokens // self.block_size - num_hits
            seq.num_cached_tokens, seq.num_computed_tokens = hit.num_tokens, end
            seq.table_version += 1
        return copies

    def allocate(self, seq: Sequence) -> int:
        """Find and ``admit`` all of ``seq``.  Returns its number of cached tokens."""
        hit = self.find(seq)
        self.admit(seq, hit, len(seq.token_ids))
        return hit.num_tokens

    def append(
        self, seq: Sequence, end: int | None = None, num_lookahead_tokens: int = 0
    ) -> Copies:
        """Give slots to all tokens of ``seq`` before ``end`` that have no slot.  None: to the end.

        At least one token must lack a slot.  Returns and raises as ``allocate_slots`` does.
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

        A new sequence starts with ``computed_blocks``, the result of ``get_computed_blocks``.

        As in vLLM v1, the next ``num_lookahead_tokens`` slots are for draft tokens, which are not
        in ``seq`` yet.  Blocks of drafts cannot be found.  Append the accepted drafts to ``seq``;
        the next call counts them as new tokens.  Slots of rejected drafts are written again.

        Returns the (src, dst) blocks to copy before K/V of the tokens are written.  Sets
        ``seq.num_computed_tokens``.  Raises OutOfBlocks.  Raises UnsupportedByDesign for lookahead
        tokens unless the design is ``vllm_v1``.  Raises ValueError for a number out of range and
        for blocks that do not hold the prefix.
        """
        count = as_int("num_new_tokens", num_new_tokens)
        table = self._tables.get(seq.seq_id)
        start = table.seq.num_computed_tokens if table else len(computed_blocks) * self.block_size
        if not 1 <= count <= seq.num_tokens - start:
            raise ValueError(
                f"num_new_tokens={count}: {start} of the {seq.num_tokens} tokens of sequence "
                f"{seq.seq_id!r} have a slot, so needs 1 to {seq.num_tokens - start} new ones"
            )
        if table is not None:
            if len(computed_blocks):
                raise ValueError(
                    f"computed_blocks: sequence {seq.seq_id!r} has blocks already, and these can "
                    "only go in front of its first chunk"
                )
            return self.append(seq, start + count, num_lookahead_tokens)
        hit = NOTHING
        if len(computed_blocks) or not self._is_full:
            limit = len(computed_blocks) if self._is_full else None
            hit = CacheManager.find(self, seq, limit)  # on the device
            if len(hit.blocks) > len(computed_blocks):
                hit = CacheManager.find(self, seq, len(computed_blocks))
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

        ``child`` must begin with these tokens.  Takes no block.  When a sequence writes to a
        shared, partly filled block, it gets a copy of the block.  Sets the counters of ``child``.
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
        """Take back the blocks of ``seq`` and set its counters to 0.

        ``is_finished``: True if it is finished, False if it is preempted.
        """
        table = self._table_of(seq)
        known = table.seq.num_tokens - table.seq.num_unknown_tokens
        if self._listeners:
            self._notify_policy(table.seq, known - table.seq.num_prompt_tokens, is_finished)
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

    def take_transfers(self) -> tuple[Copies, Copies]:
        """Return (device block, host block) and (host block, device block) pairs to copy now.

        Empty without ``host_blocks``.  Call it once for each step, after the calls that give slots.
        Copy the first pairs, then the ``copies`` of these calls, then the second pairs, before K/V
        of the step are written.  No pair may be left out.  Do not free a sequence between the call
        that gives it slots and this call.
        """
        return [], []

    def drop(self, seq: Sequence) -> None:
        """Forget the preempted sequence ``seq``, which will not resume."""
        self._preempted.discard(seq.seq_id)

    def block_table(self, seq: Sequence) -> list[int]:
        """Return a copy of the block ids of ``seq``, in the order of its tokens.

        FREED replaces blocks behind a sliding window.  With several groups of layers: the table of
        the first.
        """
        return list(self._table_of(seq).blocks)

    def block_tables(self, seq: Sequence) -> list[list[int]]:
        """Return a copy of the block ids of ``seq`` for each of ``groups``.

        FREED replaces blocks behind a window, and blocks between two states.
        """
        return [list(blocks) for blocks in self._blocks_by_group(self._table_of(seq))]

    def chunk_end(self, seq: Sequence, start: int, end: int, hit: Hit = NOTHING) -> int:
        """Where a chunk of ``seq`` from ``start`` to at most ``end`` has to end.

        Only groups of kind "state" need chunks that end at blocks, see ``vllm_v1``.  The result is
        ``start`` if no token can be computed.  ``hit``: the prefix of a new sequence.
        """
        return end

    def reset_prefix_cache(self) -> bool:
        """Drop all cached content, for example after the weights have changed.

        While sequences hold blocks, it does nothing and returns False.
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
        """Number of blocks that an allocation could take now."""

    @property
    def num_host_blocks(self) -> int:
        """Number of blocks of the tier in host memory; 0 without one."""
        return 0 if self.tier is None else self.tier.pool.num_blocks

    @property
    def stats(self) -> CacheStats:
        """The present values of the counters."""
        return CacheStats(**self._counts)

    def memory_usage(self) -> MemoryUsage:
        """Count the slots of the cache by use.  O(blocks in tables).

        A cached block without a user counts as free.
        """
        filled: dict[int, int] = {}  # block in use -> filled slots; a shared block counts once
        for table in self._tables.values():
            for blocks in () if table.is_swapped_out else self._blocks_by_group(table):
                num_tokens = table.seq.num_computed_tokens
                for block in blocks:
                    if block != FREED:
                        filled[block] = max(filled.get(block, 0), min(self.block_size, num_tokens))
                    num_tokens = max(0, num_tokens - self.block_size)
        used, taken = sum(filled.values()), len(filled) * self.block_size
        free = self.num_blocks * self.block_size - taken
        return MemoryUsage(used=used, reserved=0, internal=taken - used, external=0, free=free)

    def num_used_blocks(self) -> list[int]:
        """Number of device blocks in use by each of ``groups``.  O(blocks in tables)."""
        tables = [table for table in self._tables.values() if not table.is_swapped_out]
        by_table = [self._blocks_by_group(table) for table in tables]
        return [
            len({block for blocks in by_table for block in blocks[group]} - {FREED})
            for group in range(len(self.groups))
        ]

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
        """Return the table of ``seq``.  ValueError if the sequence holds no blocks."""
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
        self, seq: Sequence, output_tokens: float = math.nan, is_finished: bool = False
    ) -> None:
        """Tell the policies which request causes the next calls."""
        prompt = seq.num_prompt_tokens
        blocks = prompt // self.block_size
        hints = seq.hints if is_finished else (math.nan, math.nan, *seq.hints[2:3])
        request = RequestInfo(self._time_ms(), prompt, output_tokens, blocks, *hints)
        for tell in self._listeners:
            tell(request)

    def _notify_of_admission(self, seq: Sequence) -> None:
        """Tell the policies that ``seq`` is admitted.  Blocks are checked, and none is taken."""
        if self._prompt_reader is not None:
            caching, limit = self.enable_prefix_caching, self._max_hits(seq)
            self._prompt_reader.look_up(self._keys(seq, self._hasher, limit) if caching else [])
        if self._listeners:
            self._notify_policy(seq)

    def _time_ms(self) -> float:
        return 1000 * self.clock() if self.clock else math.nan

    def _keys(self, seq: Sequence, hasher: BlockHasher, limit: int | None = None) -> list[bytes]:
        """Keys of the first ``limit`` blocks of ``seq`` in each group."""
        chains = (hasher.block_hashes(seq, group) for group in range(len(self.groups)))
        return [key for chain in chains for key in chain[:limit]]

    @abc.abstractmethod
    def _extend(self, table: Any, start: int, end: int) -> Copies:
        """Give ``table`` blocks for its tokens before ``end``.  The tokens from ``start`` are new.

        Returns the copies to make before the new tokens are written.  Either raises OutOfBlocks or
        sets ``interruption`` to MIDDLE before it takes a block.
        """

    @abc.abstractmethod
    def _release(self, table: Any) -> None:
        """Take back the blocks of ``table``."""

    def _begin(self, table: Any, hit: Hit, end: int) -> Copies:
        """Add the blocks of ``hit`` to the new ``table``, then extend it to ``end`` tokens."""
        return self._extend(table, 0, end)

    def _match(self, seq: Sequence, limit: int) -> tuple[Items[int], Any]:
        """Return the longest cached prefix of ``seq`` up to ``limit`` blocks, and ``Hit.match``."""
        return (), None

    def _num_idle(self, hit: Hit) -> int:
        """Number of blocks of ``hit`` that have no user and so count as free."""
        return 0

    def _blocks_by_group(self, table: Any) -> list[MutableSequence[int]]:
        return [table.blocks]

    def _num_needed(self, table: Any, end: int) -> int:
        """Number of free blocks that ``_extend(table, ..., end)`` takes."""
        position, offset = divmod(table.seq.num_computed_tokens, self.block_size)
        copied = offset > 0 and self._is_shared(table.blocks[position])
        return max(0, self._num_blocks_for(end) - len(table.blocks)) + copied

    def _is_shared(self, block: int) -> bool:
        """Whether several tables hold ``block``.  If so, a new token needs a copy of the block."""
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
