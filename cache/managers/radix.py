"""SGLang's RadixAttention."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable
from itertools import chain

from cache.block_pool import OutOfBlocks
from cache.event_log import EventLog
from cache.hashing import BlockHasher
from cache.managers.base import (
    AllocStatus,
    CacheManager,
    CacheStats,
    Copies,
    UnsupportedByDesign,
    as_policy,
)
from cache.managers.radix_tree import Match, RadixKey, RadixNode, RadixTree
from cache.managers.tables import (
    Table,
    check_grew,
    check_holds_no_blocks,
    check_shares_content,
    table_of,
)
from cache.memory_usage import MemoryUsage, usage_of_tables
from cache.policies.base import EvictionPolicy
from cache.sequence import Sequence


class _Table(Table):
    """The blocks of one sequence: first those of the tree, then its own."""

    __slots__ = ("blocks", "node", "num_in_tree")

    def __init__(self, seq: Sequence, blocks: array, node: RadixNode, num_in_tree: int) -> None:
        super().__init__(seq)
        self.blocks = blocks
        self.node = node  # where the blocks of the tree end; locked
        self.num_in_tree = num_in_tree


class Radix(CacheManager):
    """Prefix caching by a radix tree over blocks (SGLang, NeurIPS 2024; ``RadixCache``).

    * A prompt follows the tree as far as it goes, at most to its last token but one, and locks that
      path.  If too few blocks are free, leaves that nobody has locked are evicted, whole, the
      policy choosing among them; their parents may be the next.
    * The full blocks of a prompt enter the tree when they are allocated (SGLang: when the step that
      computes them is over), so that equal prompts of one step share them.  Blocks filled by
      ``append`` enter when the sequence is freed; those that the tree has by then are given up.
      Tables only grow: a block that two sequences have computed side by side is kept by both until
      one is freed.
    * The tokens are compared, nothing is hashed.  The LoRA adapter, the salt and multi-modal inputs
      are part of the path from the block in which they begin.
    * ``fork`` shares the blocks that are not in the tree by reference counts, and the first append
      to a shared, partly filled block copies it (SGLang runs samples as requests of their own that
      meet in the tree).  Of blocks that two sequences share in this way the last to be freed brings
      them into the tree.

    ``policy`` ranks nodes, not blocks.  One that is a plain function of a block's history (``lru``,
    ``lfu``, ``fifo``, ``mru``, ``gdsf``, a user's ``PriorityPolicy``) sees the history of the node,
    as SGLang's strategies do; any other is told of a node as of its last block, which is in use for
    as long as the node is locked or has children.

    ``event_log`` is told what happens to every block; contents are named by chained hashes, which
    are computed for the log alone.
    """

    name = "radix"

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        policy: str | EvictionPolicy = "lru",
        hash_algorithm: str | None = None,
        enable_prefix_caching: bool = True,
        event_log: EventLog | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size)
        if hash_algorithm is not None:
            raise UnsupportedByDesign(
                self.name, f"a hash_algorithm ({hash_algorithm!r}): it compares tokens"
            )
        self.enable_prefix_caching = enable_prefix_caching
        self.tree = RadixTree(self.block_size, as_policy(policy), self.num_blocks)
        self._num_fresh = self.num_blocks  # never handed out: the highest ids
        self._free = array("i")  # a stack
        self._extra_users: Counter[int] = Counter()  # of blocks that forks share outside the tree
        self._tables: dict[Hashable, _Table] = {}
        self._num_allocations = 0
        self._queried_tokens = 0
        self._queried_blocks = 0
        self._hit_blocks = 0
        self._num_allocated = 0
        self._num_copied = 0
        self._log = event_log
        self._log_hasher = BlockHasher("xxh3_128", self.block_size)
        self._contents: dict[int, bytes] = {}  # of the blocks in the tree, while there is a log

    def get_computed_blocks(self, seq: Sequence) -> tuple[list[int], int]:
        blocks = self._match(seq).blocks.tolist()
        return blocks, len(blocks) * self.block_size

    def can_allocate(self, seq: Sequence) -> AllocStatus:
        needed = self._num_blocks(seq.num_tokens)
        if needed > self.num_blocks:
            return AllocStatus.NEVER
        free = self.num_free_blocks
        if needed > free:  # unless others use the cached part of the prefix already
            match = self._match(seq)
            needed -= len(match.blocks) - self.tree.num_unlocked(match)
        return AllocStatus.OK if needed <= free else AllocStatus.LATER

    def allocate(self, seq: Sequence) -> int:
        check_holds_no_blocks(self._tables, seq)
        match = self._match(seq)
        num_cached = len(match.blocks) * self.block_size
        self._start(seq, match, seq.num_tokens - num_cached, 0)
        return num_cached

    def append(self, seq: Sequence) -> Copies:
        table = table_of(self._tables, seq)
        check_grew(seq, table.num_tokens)
        return self._extend(seq, table, seq.num_tokens, 0)

    def can_append(self, seq: Sequence) -> bool:
        table = table_of(self._tables, seq)
        missing = max(0, self._num_blocks(seq.num_tokens) - len(table.blocks))
        return missing + self._writes_to_shared_block(table) <= self.num_free_blocks

    def allocate_slots(
        self,
        seq: Sequence,
        num_new_tokens: int,
        computed_blocks: list[int] | tuple[int, ...] = (),
        *,
        num_lookahead_tokens: int = 0,
    ) -> Copies:
        table = self._tables.get(seq.seq_id)
        start = len(computed_blocks) * self.block_size if table is None else table.num_tokens
        if not 1 <= num_new_tokens <= seq.num_tokens - start or num_lookahead_tokens < 0:
            raise ValueError(
                f"num_new_tokens={num_new_tokens}, num_lookahead_tokens={num_lookahead_tokens}: "
                f"{start} of the {seq.num_tokens} tokens of sequence {seq.seq_id!r} have a slot, "
                f"so needs 1 to {seq.num_tokens - start} new ones, and none or more to look ahead"
            )
        if table is None:
            match = self._match(seq, len(computed_blocks))
            if match.blocks.tolist() != list(computed_blocks):
                raise ValueError(
                    f"computed_blocks={list(computed_blocks)}: these do not hold the prefix of "
                    f"sequence {seq.seq_id!r} (any more); ask get_computed_blocks again"
                )
            self._start(seq, match, num_new_tokens, num_lookahead_tokens)
            return []
        if computed_blocks:
            raise ValueError(
                f"computed_blocks: sequence {seq.seq_id!r} has blocks already, and these can only "
                "go in front of its first chunk"
            )
        copies = self._extend(seq, table, start + num_new_tokens, num_lookahead_tokens)
        self._publish(seq, table)
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        table = table_of(self._tables, parent)
        check_holds_no_blocks(self._tables, child)
        check_shares_content(parent, child, table.num_tokens)
        blocks = table.blocks[: self._num_blocks(table.num_tokens)]
        self._extra_users.update(blocks[table.num_in_tree :])
        self.tree.share(table.node)
        self._tables[child.seq_id] = _Table(child, blocks, table.node, table.num_in_tree)
        child.num_cached_tokens = child.num_computed_tokens = table.num_tokens

    def free(self, seq: Sequence) -> None:
        table = table_of(self._tables, seq)
        node, rest = table.node, table.num_in_tree
        filled = self._own_full_blocks(table)
        duplicates = added = array("i")
        if filled:
            key = RadixKey(seq, self.block_size)
            node, num_duplicates = self.tree.insert(key, filled, node, rest)
            duplicates, added = filled[:num_duplicates], filled[num_duplicates:]
            self._log_cached(seq, added, rest + num_duplicates)
            rest += len(filled)
        self._give_back(duplicates + table.blocks[rest:])
        self._log_unlocked(table.node, added)
        self.tree.unlock(node)
        del self._tables[seq.seq_id]
        seq.num_cached_tokens = seq.num_computed_tokens = 0

    def block_table(self, seq: Sequence) -> list[int]:
        return table_of(self._tables, seq).blocks.tolist()

    def reset_prefix_cache(self) -> bool:
        if self._tables:
            return False
        self._free += self.tree.clear()
        self._contents.clear()
        return True

    @property
    def num_free_blocks(self) -> int:
        return self._num_fresh + len(self._free) + self.tree.num_evictable

    @property
    def stats(self) -> CacheStats:
        return CacheStats(
            num_allocations=self._num_allocations,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_blocks * self.block_size,
            queried_blocks=self._queried_blocks,
            hit_blocks=self._hit_blocks,
            allocated_blocks=self._num_allocated,
            evicted_blocks=self.tree.num_evicted,
            copied_blocks=self._num_copied,
        )

    def memory_usage(self) -> MemoryUsage:
        tables = self._tables.values()
        return usage_of_tables(
            self.num_blocks, self.block_size, ((t.blocks, t.num_tokens) for t in tables)
        )

    def check_invariants(self) -> None:
        nodes = self.tree.check_invariants()
        users = Counter(
            chain.from_iterable(t.blocks[t.num_in_tree :] for t in self._tables.values())
        )
        extra = {block: count - 1 for block, count in users.items() if count > 1}
        if self._extra_users != extra:
            raise AssertionError(f"extra users {self._extra_users}, should be {extra}")
        fresh = range(self.num_blocks - self._num_fresh, self.num_blocks)
        in_tree = chain.from_iterable(node.blocks for node in nodes)
        everything = sorted([*fresh, *self._free, *in_tree, *users])
        if everything != list(range(self.num_blocks)):
            raise AssertionError(f"not every block is free, in the tree or in use: {everything}")
        paths: Counter = Counter()
        for seq_id, table in self._tables.items():
            path = array("i")
            node = table.node
            while node is not self.tree.root:
                paths[node] += 1
                path = node.blocks + path
                node = node.parent
            if path != table.blocks[: table.num_in_tree] or len(path) != table.num_in_tree:
                raise AssertionError(f"{seq_id!r}: {table.blocks} should begin with {path}")
            if len(table.blocks) * self.block_size < table.num_tokens:
                raise AssertionError(f"{seq_id!r}: {table.blocks} for {table.num_tokens} tokens")
        for node in nodes:
            if node.lock_ref != paths[node]:
                raise AssertionError(f"{node.blocks}: {node.lock_ref} locks, {paths[node]} users")

    def _match(self, seq: Sequence, limit: int | None = None) -> Match:
        """The cached prefix of ``seq``, in at most ``limit`` blocks, that leaves a token over."""
        longest = (seq.num_tokens - 1) // self.block_size if self.enable_prefix_caching else 0
        limit = longest if limit is None else min(limit, longest)
        return self.tree.match_prefix(RadixKey(seq, self.block_size), limit)

    def _start(self, seq: Sequence, match: Match, num_new_tokens: int, lookahead: int) -> None:
        """Give ``seq`` a table that begins with the blocks of ``match``."""
        num_hits = len(match.blocks)
        num_cached = num_hits * self.block_size
        end = num_cached + num_new_tokens
        needed = self._num_blocks(end + lookahead) - num_hits
        self._check_free(needed + self.tree.num_unlocked(match))
        node = self.tree.lock(match)  # before anything is evicted
        if self._log and num_hits:
            self._log.record("hit", match.blocks, map(self._contents.__getitem__, match.blocks))
        table = _Table(seq, match.blocks, node, num_hits)
        seq.num_computed_tokens = num_cached
        self._extend(seq, table, end, lookahead)
        self._publish(seq, table)
        self._tables[seq.seq_id] = table
        seq.num_cached_tokens = num_cached
        self._num_allocations += 1
        self._queried_tokens += seq.num_tokens
        self._queried_blocks += seq.num_tokens // self.block_size
        self._hit_blocks += num_hits

    def _extend(self, seq: Sequence, table: _Table, end: int, lookahead: int) -> Copies:
        """Add slots to ``table`` for tokens up to ``end``."""
        missing = max(0, self._num_blocks(end + lookahead) - len(table.blocks))
        writes_to_shared = self._writes_to_shared_block(table)
        self._check_free(missing + writes_to_shared)
        copies: Copies = []
        if writes_to_shared:
            position = table.num_tokens // self.block_size
            shared = table.blocks[position]
            (table.blocks[position],) = self._take(1)
            self._give_back(array("i", (shared,)))
            self._num_copied += 1
            copies.append((shared, table.blocks[position]))
        table.blocks += self._take(missing)
        table.seq = seq
        seq.num_computed_tokens = end
        return copies

    def _publish(self, seq: Sequence, table: _Table) -> None:
        """Bring the full blocks of a prompt into the tree, unless it has their content already."""
        filled = self._own_full_blocks(table)
        if not filled:
            return
        key = RadixKey(seq, self.block_size)
        if not self.tree.holds(table.node, key, table.num_in_tree):
            table.node, _ = self.tree.insert(key, filled, table.node, table.num_in_tree)
            self._log_cached(seq, filled, table.num_in_tree)
            table.num_in_tree += len(filled)

    def _own_full_blocks(self, table: _Table) -> array:
        """The full blocks after those of the tree, up to the first that a fork shares."""
        if not self.enable_prefix_caching:
            return array("i")
        filled = table.blocks[table.num_in_tree : table.num_tokens // self.block_size]
        if self._extra_users:
            for i, block in enumerate(filled):
                if self._extra_users[block]:
                    return filled[:i]
        return filled

    def _writes_to_shared_block(self, table: _Table) -> bool:
        """Whether the next token of ``table`` goes into a block that another table holds too."""
        position, offset = divmod(table.num_tokens, self.block_size)
        return offset > 0 and self._extra_users[table.blocks[position]] > 0

    def _take(self, count: int) -> array:
        """Remove ``count`` blocks, which there are, from the free ones."""
        first = self.num_blocks - self._num_fresh
        blocks = array("i", range(first, first + min(count, self._num_fresh)))
        self._num_fresh -= len(blocks)
        self._num_allocated += count
        count -= len(blocks)
        if count > len(self._free):
            evicted = self.tree.evict(count - len(self._free))
            if self._log:
                self._log.record("evicted", evicted, map(self._contents.pop, evicted))
            self._free += evicted
        split = len(self._free) - count
        blocks += self._free[split:]
        del self._free[split:]
        if self._log:
            self._log.record("allocated", blocks)
        return blocks

    def _give_back(self, blocks: array) -> None:
        """Remove a user from blocks that are not in the tree."""
        if self._extra_users:
            last_users = array("i")
            for block in blocks:
                users = self._extra_users.pop(block, 0)
                if not users:
                    last_users.append(block)
                elif users > 1:
                    self._extra_users[block] = users - 1
            blocks = last_users
        self._free += blocks
        if self._log:
            self._log.record("freed", blocks)

    def _log_cached(self, seq: Sequence, blocks: array, first: int) -> None:
        """``blocks``, those of ``seq`` from position ``first`` on, have entered the tree."""
        if self._log:
            contents = self._log_hasher.block_hashes(seq)[first : first + len(blocks)]
            self._log.record("cached", blocks, contents)
            self._contents.update(zip(blocks, contents, strict=True))

    def _log_unlocked(self, node: RadixNode, added: array) -> None:
        """A user of ``node``, and of the blocks ``added`` below it, is about to leave."""
        if self._log:
            freed = added[::-1]
            while node is not self.tree.root:
                if node.lock_ref == 1:
                    freed += node.blocks[::-1]
                node = node.parent
            self._log.record("freed", freed)

    def _check_free(self, count: int) -> None:
        if count > self.num_free_blocks:
            raise OutOfBlocks(count, self.num_free_blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
