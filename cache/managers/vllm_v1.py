"""vLLM's present KV cache manager (v1)."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

from cache.blocks.events import Event
from cache.blocks.groups import Group, check_groups, check_retention
from cache.blocks.pool import check_free
from cache.blocks.sequence import Sequence
from cache.checks import at_least, true_or_false
from cache.managers.base import FREED, MIDDLE, NOTHING, CacheOptions, Copies, Hit
from cache.managers.pooled import PooledManager, PooledTable


class VLLMv1(PooledManager):
    """Automatic prefix caching by block hashes, as in ``KVCacheManager`` of vLLM v1 (0.33).

    * A dictionary of chained hashes finds the cached prefix block by block.  At least one token is
      left to compute for its logits; if that token is in the last cached block, the whole block is
      computed again.
    * Hits leave the free queue before anything is taken from it.  A cached block loses its content
      only when it is taken again.  Blocks return in reverse order, so the tail of a prompt is
      evicted before its head.  Blocks without a hash return to the front of the queue, with any
      policy.  With ``queue_uncached`` they queue with the cached blocks, as in older vLLM v1.
    * A full block can be found when the step that computes it is scheduled, because every layer
      stores K/V of the whole batch before any sequence of the batch reads them.
    * Tables only grow.  Two sequences that compute the same block side by side keep both copies.
    * ``groups``: groups of layers, in the order of ``block_tables``.  One has the kind "full".
      All groups take their blocks from one pool, and equal content of two groups is cached apart.
      A prefix is cached if each group can resume it: a full group needs all its blocks, a window
      group the blocks in the window of the first new token, a state group the state before it.
    * A sequence that grows first gives back the blocks of window and state groups that the queries
      of its new tokens do not read, then takes new ones.  FREED replaces them in its table.  Like
      vLLM it gives them back even if the call then raises OutOfBlocks.  A call that raises changes
      nothing else.
    * A state group takes one block per call, for the state after the call's last token.  So a call
      that begins inside a block must not pass the end of the block; ``chunk_end`` says where calls
      should end.
    * ``retention`` in tokens: window and state groups cache only the blocks that a hit up to the
      prompt's last block needs, or up to the end of a prefix that the full groups have and these
      groups lack; above 0 also up to each multiple of ``retention``.  None: they cache all blocks.
      It is vLLM's ``prefix_cache_retention_interval``.
    * ``sliding_window`` is short for one group with this window, in tokens, the query included.
    * ``fork`` shares all stored blocks.  The first append to a shared, partly filled block copies
      it (copy-on-write of the PagedAttention paper).
    * ``enable_kv_cache_events``: ``take_events`` returns the blocks that were cached and lost.

    docs/deviations.md lists the differences from vLLM.
    """

    name = "vllm_v1"
    own_hash = "xxh3_128"
    can_fork = True
    can_look_ahead = True
    can_reset = True

    def __init__(
        self,
        options: CacheOptions,
        *,
        groups: Iterable[Group] | None = None,
        retention: int | None = None,
        queue_uncached: bool = False,
        sliding_window: int | None = None,
        enable_kv_cache_events: bool = False,
    ) -> None:
        super().__init__(options)
        self.pool.queue_uncached = true_or_false("queue_uncached", queue_uncached)
        if true_or_false("enable_kv_cache_events", enable_kv_cache_events):
            self.pool.events = []
        if sliding_window is not None:
            if groups is not None:
                raise ValueError(f"sliding_window={sliding_window}: give it or groups, not both")
            sliding_window = at_least(1, "sliding_window", sliding_window)
            self.groups = (Group("window", sliding_window),)
        elif groups is not None:
            self.groups = check_groups(groups)
        self.sliding_window = sliding_window
        self.retention = check_retention(retention, self.groups, self.block_size)
        kinds = [(group.kind, group.window) for group in self.groups]
        self._is_full = kinds == [("full", None)]
        self.has_states = ("state", None) in kinds
        # Groups of a kind are found together, full groups first.
        self._alike = [
            (Group(*kind), [number for number, other in enumerate(kinds) if other == kind])
            for kind in sorted(set(kinds), key=lambda kind: (kind[0] != "full", kinds.index(kind)))
        ]

    def take_events(self) -> list[Event]:
        """The events since the last call, in their order; they are kept until then.

        Raises ValueError without ``enable_kv_cache_events``.
        """
        self._check_usable()
        if self.pool.events is None:
            raise ValueError("enable_kv_cache_events=False: the manager records no events")
        events, self.pool.events = self.pool.events, []
        return events

    def chunk_end(self, seq: Sequence, start: int, end: int, hit: Hit = NOTHING) -> int:
        """Where a chunk of ``seq`` from ``start`` to at most ``end`` has to end.

        With a state group a chunk of a prompt ends at a block.  It does not pass the prompt's last
        full block, nor the end of a prefix that the full groups had cached and the state groups had
        not.  This is the rule of vLLM's scheduler.
        """
        size, num_tokens = self.block_size, len(seq.token_ids)
        prompt_end = max(seq.num_prompt_tokens, num_tokens - 1)
        if not self.has_states or start >= prompt_end:
            return end
        aligned = end // size * size
        is_wide = self.max_in_flight_tokens is not None and size > self.max_in_flight_tokens
        if end < prompt_end and (aligned > start or not is_wide):
            end = aligned
        table = self._tables.get(seq.seq_id)
        junction = table.junction if table else _further(hit)[1]
        stops = [(num_tokens - 1) // size * size, junction * size]
        if start % size:
            stops.append((start // size + 1) * size)
        return max(start, min([stop for stop in stops if start < stop < end], default=end))

    def _match(self, seq: Sequence, limit: int) -> tuple[list[int], Any]:
        hashes = self._hasher.block_hashes(seq)[:limit]
        if self._is_full:
            return self.pool.lookup(hashes), None
        length, longest = self._longest_hit(seq, len(hashes), self.pool.__contains__)
        tables = self._tables_of(seq, length)
        junction = longest if longest > length and len(self.groups) > 1 else 0
        return tables[0], (tables[1:], junction)

    def _keys_by_group(self, seq: Sequence) -> list[list[bytes]]:
        return [self._hasher.block_hashes(seq, group) for group in range(len(self.groups))]

    def _longest_hit(
        self, seq: Sequence, length: int, is_cached: Callable[[bytes], bool]
    ) -> tuple[int, int]:
        """Length up to ``length``, in blocks, of the longest prefix that all groups can resume.

        Also returns the length of the longest prefix that some group can resume."""
        keys = self._keys_by_group(seq)
        longest, before = 0, -1
        while length != before:  # a shorter hit of one kind may shorten the hit of another
            before = length
            for group, numbers in self._alike:
                chains = [keys[number] for number in numbers]
                are_cached = partial(_are_cached, is_cached, chains)
                length = group.longest_hit(length, self.block_size, are_cached)
                longest = max(longest, length)
        return length, longest

    def _tables_of(self, seq: Sequence, length: int) -> list[list[int]]:
        """For each group, its leading device blocks of a hit of ``length`` blocks."""
        size, tables = self.block_size, []
        for group, keys in zip(self.groups, self._keys_by_group(seq), strict=True):
            unseen = group.num_unseen(length * size, size)
            tables.append([FREED] * unseen + self.pool.lookup(keys[unseen:length]))
        return tables

    def _with_loads(self, seq: Sequence, hit: Hit, limit: int) -> Hit:
        assert self.tier is not None
        pool, tier, keys = self.pool, self.tier, self._keys_by_group(seq)
        limit = min(limit, len(keys[0]))
        are_found = lambda key: key in pool or tier.find(key) is not None  # noqa: E731
        length, _ = self._longest_hit(seq, limit, are_found)
        tables, loads = self._tables_of(seq, length), []
        for group, (table, of_group) in enumerate(zip(tables, keys, strict=True)):
            first = len(table)
            found = tier.lookup(of_group[first:length])
            if len(found) < length - first:  # a device block behind a block that is not there
                return hit
            loads += [(group, position, host) for position, host in enumerate(found, first)]
        if not loads:
            return hit
        junction = _further(hit)[1]
        match = tables[1:], junction if junction > length else 0
        return hit._replace(
            blocks=tables[0], num_tokens=length * self.block_size, match=match, loads=loads
        )

    def _num_to_admit(self, num_tokens: int, hit: Hit) -> int:
        chunk = self.max_in_flight_tokens if len(self.groups) > 1 else None
        return self._num_taken(num_tokens, hit, chunk, in_one_call=False)

    def _num_taken(
        self, end: int, hit: Hit, chunk: int | None = None, *, in_one_call: bool = True
    ) -> int:
        """Number of free blocks that ``hit`` and the slots before ``end`` take.

        ``chunk``: maximum number of tokens of a call; None: no limit.  Unless ``in_one_call``, a
        state group splits the tokens into calls.
        """
        needed, size = 0, self.block_size
        tables = hit.blocks, *_further(hit)[0]
        for number, group in enumerate(self.groups):
            blocks = tables[number] if number < len(tables) else ()
            idle, new = self.pool.num_revived(self._held(blocks)), -(-end // size) - len(blocks)
            if group.kind == "state" and in_one_call:
                num_loads = sum(number == of_group for of_group, *_ in hit.loads)
                new = min(new, 1 + num_loads)
            elif group.kind == "state" or (chunk is not None and group.kind == "window"):
                # A hit that others use frees nothing when it is given back.
                new = min(new, group.num_blocks_at_once(chunk or 0, size) - idle)
            needed += new + idle
        return needed

    def _share_further(self, table: PooledTable, hit: Hit) -> None:
        others, table.junction = _further(hit)
        table.others = [PooledTable(table.seq, group=g) for g in range(1, len(self.groups))]
        for part, blocks in zip(table.others, others or [()] * len(table.others), strict=True):
            self._share_hit(part, blocks)
            part.junction = table.junction

    def _extend(self, table: PooledTable, start: int, end: int) -> Copies:
        blocks, size = table.blocks, self.block_size
        num_blocks = -(-end // size)
        if table.num_lookahead_tokens:
            num_blocks = -(-(end + table.num_lookahead_tokens) // size)
            table.num_lookahead_tokens = 0
        if not self._is_full:
            return self._extend_groups(table, start, end, num_blocks)
        copies, length = [], len(blocks)
        if start % size and self.pool.ref_counts[blocks[start // size]] > 1:
            copies = [self._copy_block(table, start // size, num_blocks)]
        self._fill(table, num_blocks, end)
        room = len(blocks) * size - 1
        if room > end + size - 2:  # lookahead tokens have blocks
            room = (table.num_cached_blocks + 1) * size - 1
            table.seq.table_version += len(blocks) > length
        table.no_alloc_until = room
        return copies

    def _extend_groups(self, table: PooledTable, start: int, end: int, num_blocks: int) -> Copies:
        limit = -(-start // self.block_size) * self.block_size
        if self.has_states and start < limit < end:
            raise ValueError(
                f"end={end}: with a state group a call from {start} needs an end of at most {limit}"
            )
        self._give_back(table, start)
        parts = table, *table.others
        needed = sum(self._num_new(part, start, end, num_blocks) for part in parts)
        check_free(needed, self.pool.num_free_blocks)
        copies: Copies = []
        for part in parts:
            length = num_blocks
            if self.groups[part.group].kind == "state":
                length = -(-end // self.block_size)
                self.interruption = MIDDLE
                part.blocks += [FREED] * (length - 1 - len(part.blocks))
            table.seq.table_version += length > max(len(part.blocks), -(-end // self.block_size))
            if start % self.block_size and self._is_shared(part.blocks[start // self.block_size]):
                copies.append(self._copy_block(part, start // self.block_size, length))
            self._fill(part, length, end)
        return copies

    def _copy_block(self, part: PooledTable, position: int, num_blocks: int) -> tuple[int, int]:
        """Replace the shared block at ``position``; ``part`` then grows to ``num_blocks``."""
        pool, shared = self.pool, part.blocks[position]
        check_free(1 + max(0, num_blocks - len(part.blocks)), pool.num_free_blocks)
        self.interruption = MIDDLE
        (part.blocks[position],) = pool.allocate(1)
        pool.free([shared])
        self._counts["copied_blocks"] += 1
        return shared, part.blocks[position]

    def _num_new(self, part: PooledTable, start: int, end: int, num_blocks: int) -> int:
        """Number of blocks that ``part`` takes for the tokens from ``start`` to ``end``, if
        attention layers need tables of ``num_blocks``."""
        size, is_state = self.block_size, self.groups[part.group].kind == "state"
        new = max(0, (-(-end // size) if is_state else num_blocks) - len(part.blocks))
        copied = start % size > 0 and self._is_shared(part.blocks[start // size])
        return (min(1, new) if is_state else new) + copied

    def _kept(self, table: PooledTable, first: int, last: int) -> Items[int]:
        prompt_end = (table.seq.num_prompt_tokens - 1) // self.block_size
        group, blocks = self.groups[table.group], table.blocks
        kept = group.kept(
            first, last,
            block_size=self.block_size, retention=self.retention,
            boundaries=(prompt_end, table.junction),
        )  # fmt: skip
        return [i for i in kept if i >= len(blocks) or blocks[i] != FREED]

    def _num_unseen(self, part: PooledTable, start: int) -> int:
        """Leading blocks of ``part`` that neither the query at ``start`` nor a later one sees."""
        unseen = self.groups[part.group].num_unseen(start, self.block_size)
        return min(unseen, len(part.blocks))

    def _give_back(self, table: PooledTable, start: int) -> None:
        """Free the blocks that neither the query at ``start`` nor a later one sees."""
        for part in (table, *table.others):
            first, last = part.num_given_back, self._num_unseen(part, start)
            if last > first:
                if self._listeners:
                    self._notify_policy(table.seq)
                with self._change:
                    self._fill(part, 0, start)  # caches a block with a token unknown until now
                    self.interruption = MIDDLE
                    self.pool.free(self._held(part.blocks[first:last]))
                    part.blocks[first:last] = [FREED] * (last - first)
                    part.num_given_back = last
                    table.seq.table_version += 1

    def _num_needed(self, table: PooledTable, end: int) -> int:
        start, needed = table.seq.num_computed_tokens, 0
        for part in (table, *table.others):
            needed += self._num_new(part, start, end, -(-end // self.block_size))
            unseen = part.blocks[part.num_given_back : self._num_unseen(part, start)]
            needed -= sum(self.pool.ref_counts[block] == 1 for block in self._held(unseen))
        return needed

    def _is_shared(self, block: int) -> bool:
        return self.pool.ref_counts[block] > 1

    def _share(self, table: PooledTable, copy: PooledTable) -> None:
        stored = table.seq.num_computed_tokens
        copy.others = [PooledTable(copy.seq, group=part.group) for part in table.others]
        for part, twin in zip((table, *table.others), (copy, *copy.others), strict=True):
            self._fill(part, 0, stored)
            twin.blocks = part.blocks[: -(-stored // self.block_size)]
            twin.num_cached_blocks = part.num_cached_blocks
            twin.num_given_back, twin.junction = part.num_given_back, part.junction
            self.pool.share(self._held(twin.blocks))
        table.no_alloc_until = 0  # the next append may have to copy the last block

    def _release_groups(self, table: PooledTable) -> None:
        for part in (table, *table.others):
            self._fill(part, 0, table.seq.num_computed_tokens)
            self.pool.free(self._held(part.blocks))

    def _held(self, blocks: Items[int]) -> list[int]:
        """``blocks`` without FREED; those that are not cached come last, as ``pool.free`` needs."""
        hashes = self.pool.block_hashes
        return sorted(
            (block for block in blocks if block != FREED), key=lambda block: hashes[block] is None
        )

    def _forget(self) -> None:
        self.pool.reset_prefix_cache()


def _are_cached(
    is_cached: Callable[[bytes], bool], chains: Items[Items[bytes]], position: int
) -> bool:
    return all(is_cached(chain[position]) for chain in chains)


def _further(hit: Hit) -> tuple[Items[Items[int]], int]:
    """The blocks of ``hit`` in the groups after the first, and its junction: the length, in blocks,
    of a longer prefix that some groups have cached; 0 if no group has."""
    return hit.match or ((), 0)
