"""A tier in host memory, in front of the design of a manager.

``Tiered`` tells the tier which device blocks sequences take, fill and free.  The designs do not
know the tier.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

from cache.blocks.hashing import BlockHasher
from cache.blocks.host_tier import FullBlock, HostTier
from cache.blocks.sequence import Sequence
from cache.checks import at_least, shown
from cache.managers.base import (
    FREED,
    MIDDLE,
    CacheManager,
    CacheOptions,
    Copies,
    Hit,
    Table,
    UnsupportedByDesign,
)
from cache.policies.base import RequestInfo

_Full = tuple[list[FullBlock], int]
"""Full blocks of a sequence, and the number of all its full blocks."""
TIER_OPTIONS = "host_blocks", "host_policy", "store", "store_threshold", "inclusive"


def with_tier(design: type[CacheManager], options: CacheOptions) -> type[CacheManager]:
    """Return the class for ``options``: ``design``, or ``design`` with a tier.

    Raises ValueError for options of a tier without ``host_blocks``.  Raises UnsupportedByDesign for
    a design that shares no prefixes.
    """
    if not at_least(0, "host_blocks", options.host_blocks):
        for name in TIER_OPTIONS:
            if getattr(options, name) != getattr(CacheOptions, name):
                raise ValueError(f"{name}={shown(getattr(options, name))}: needs host_blocks > 0")
        return design
    if not design.prefix_caching:
        raise UnsupportedByDesign(design.name, "host_blocks: it shares no prefixes")
    return _tiered(design)


@functools.cache
def _tiered(design: type[CacheManager]) -> type[CacheManager]:
    """Make the class of ``design`` with a tier."""
    named = {name: getattr(design, name) for name in ("__module__", "__doc__", "can_group")}
    return type(design.__name__, (Tiered, design), named | {"name": design.name, "design": design})


def _empty(design: type[CacheManager]) -> Any:
    """An object for pickle to fill.  Pickle cannot find its class by name."""
    return object.__new__(_tiered(design))


class Tiered(CacheManager):
    """What the tier adds to the methods of a design, which is the next base class.

    The base class calls ``_begin``, ``_extend``, ``_share``, ``_release`` and ``_forget`` inside a
    change.  An error that interrupts the notes for the tier is therefore recorded, too.
    The source system is the ``OffloadingConnector`` of vLLM, see ``HostTier``.
    """

    design: type[CacheManager]
    """The class of the manager without a tier."""
    tier: HostTier

    _with_loads: Callable[[Sequence, Hit, int], Hit]
    """Unless ``_is_full``: extends a hit, up to a number of blocks, by blocks in host memory."""
    _kept: Callable[[Any, int, int], Items[int]]
    """Unless ``_is_full``: positions of the blocks to cache, as in ``PooledManager``."""

    def __init__(self, options: CacheOptions, **design_options: Any) -> None:
        if options.host_policy is options.policy and not isinstance(options.policy, str):
            raise ValueError("host_policy: is the policy of the device; needs an object of its own")
        super().__init__(options, **design_options)
        if not self.enable_prefix_caching:
            raise ValueError(
                f"host_blocks={options.host_blocks}: the tier holds cached prefixes; needs "
                "enable_prefix_caching=True"
            )
        if self.own_hash and self._hasher.digest_size >= 16:
            hasher = self._hasher
        else:  # host blocks are not compared by their tokens
            hasher = BlockHasher("xxh3_128", self.block_size)
        self.tier = HostTier(
            options.host_blocks,
            policy=options.host_policy,
            store=options.store,
            store_threshold=options.store_threshold,
            inclusive=options.inclusive,
            hasher=hasher,
            counts=self._counts,
        )
        policy = self.tier.pool.policy
        self._policies += (policy,)
        self._listeners += (policy.tell,) if "tell" in policy.hooks else ()
        self.queue_readers += ((policy, hasher),) if "on_queued" in policy.hooks else ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (self.design,), self.__getstate__()

    def find(self, seq: Sequence, limit: int | None = None) -> Hit:
        hit, longest = super().find(seq, limit), self._max_hits(seq)
        longest = longest if limit is None else min(longest, limit)
        if not self._is_full:
            return self._with_loads(seq, hit, longest)
        first = len(hit.blocks)
        found = self.tier.lookup(self.tier.hasher.block_hashes(seq)[first:longest])
        loads = [(0, position, host) for position, host in enumerate(found, first)]
        return hit._replace(num_tokens=(first + len(loads)) * self.block_size, loads=loads)

    def take_transfers(self) -> tuple[Copies, Copies]:
        if "tell" in self.tier.pool.policy.hooks:
            self.tier.pool.policy.tell(RequestInfo(self._time_ms(), *[math.nan] * 3))
        with self._change:
            self.interruption = MIDDLE
            self._version += 1
            return self.tier.take_transfers()

    def check_invariants(self) -> None:
        super().check_invariants()
        tables = self._tables.values()
        self.tier.check_invariants(b for table in tables for b in table.host_blocks)

    def _notify_of_admission(self, seq: Sequence) -> None:
        super()._notify_of_admission(seq)
        if "look_up" in self.tier.pool.policy.hooks:
            keys = self._keys(seq, self.tier.hasher, self._max_hits(seq))
            self.tier.pool.policy.look_up(keys)

    def _begin(self, table: Any, hit: Hit, end: int) -> Copies:
        copies = super()._begin(table, hit, end)
        self.interruption = MIDDLE
        tables = self._blocks_by_group(table)
        for group, position, host in hit.loads:  # before a store evicts one of these host blocks
            self.tier.load(host, tables[group][position])
        self._note(table, ([], 0), [], [0] * len(tables), end)
        return copies

    def _extend(self, table: Any, start: int, end: int) -> Copies:
        if table.seq.seq_id not in self._tables:  # _begin tells the tier
            return self.design._extend(self, table, start, end)
        late = self._new_full_blocks(table, start)
        lengths = [len(blocks) for blocks in self._blocks_by_group(table)]
        copies = self.design._extend(self, table, start, end)
        self.interruption = MIDDLE
        self._note(table, late, copies, lengths, end)
        return copies

    def _share(self, table: Table, copy: Table) -> None:
        self._use_late(table)
        copy.num_noted, copy.host_blocks = table.num_noted, table.host_blocks.copy()
        self.tier.pool.share(copy.host_blocks)
        super()._share(table, copy)

    def _release(self, table: Any) -> None:
        self._use_late(table)
        self.tier.pool.free(table.host_blocks)
        self.design._release(self, table)

    def _forget(self) -> None:
        self.tier.reset()
        super()._forget()

    def _note(self, table: Any, late: _Full, copies: Copies, lengths: list[int], end: int) -> None:
        """Tell the tier of ``late`` full blocks, of copies, and of new and newly full blocks.

        ``lengths``: for each group, the length of its table before the new blocks.
        """
        self._use(table, late, is_stored=True)
        for _, block in copies:
            self.tier.taken(block, None)
        new, num_full = self._new_full_blocks(table, end)
        for group, blocks in enumerate(self._blocks_by_group(table)):
            hashes = self.tier.hasher.block_hashes(table.seq, group)
            for position in range(lengths[group], len(blocks)):
                if blocks[position] != FREED:
                    key = hashes[position] if position < num_full else None
                    self.tier.taken(blocks[position], key)
        self._use(table, (new, num_full), is_stored=False)

    def _new_full_blocks(self, table: Any, end: int) -> _Full:
        """The full blocks before ``end`` that the tier does not know, and the number of all."""
        new: list[FullBlock] = []
        for group, blocks in enumerate(self._blocks_by_group(table)):
            hashes = self.tier.hasher.block_hashes(table.seq, group)
            num_full = min(end // self.block_size, len(hashes))
            positions: Items[int] = range(table.num_noted, num_full)
            if not self._is_full:  # a later hit needs only some of them
                part = (table, *table.others)[group]
                positions = self._kept(part, table.num_noted, num_full)
            new += [(blocks[i], hashes, i) for i in positions if blocks[i] != FREED]
        return new, num_full

    def _use_late(self, table: Any) -> None:
        """Use the blocks that had an unknown token in the last call."""
        new = self._new_full_blocks(table, table.seq.num_computed_tokens)
        self._use(table, new, is_stored=True)

    def _use(self, table: Any, new: _Full, *, is_stored: bool) -> None:
        """Tell the tier that the sequence of ``table`` uses its ``new`` full blocks."""
        blocks, num_full = new
        table.host_blocks += self.tier.use(blocks, is_stored)
        table.num_noted = max(table.num_noted, num_full)
