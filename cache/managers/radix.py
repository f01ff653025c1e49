"""SGLang's RadixAttention."""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from cache.blocks.pool import check_free
from cache.blocks.sequence import Sequence
from cache.checks import require
from cache.managers.base import MIDDLE, CacheManager, CacheOptions, Copies, Hit, Table
from cache.managers.radix_tree import Match, RadixKey, RadixNode, RadixTree
from cache.policies import as_policy


@dataclass(slots=True, eq=False)
class _Table(Table):
    """The blocks of one sequence: blocks of the tree, then its own."""

    blocks: array = field(default_factory=partial(array, "i"))
    node: RadixNode = field(init=False)  # where the blocks of the tree end; locked
    num_in_tree: int = 0
    num_prompt_tokens: int = 0  # tokens when it was admitted


class Radix(CacheManager):
    """Prefix caching by a radix tree over blocks (``RadixCache`` of SGLang, NeurIPS 2024).

    * The longest path of the tree that matches a prompt, up to its last token but one, is locked.
      If too few blocks are free, the policy chooses unlocked leaves, which are evicted whole; their
      parents may follow.
    * The full blocks of a prompt enter the tree when they are allocated, so that equal prompts of
      one step share them.  Blocks filled by decoding enter when the sequence is freed; duplicates
      of blocks in the tree are freed.  Tables only grow: two sequences that compute the same block
      side by side both keep it until one is freed.
    * Tokens are compared, nothing is hashed.  The LoRA adapter, the salt and multi-modal inputs are
      part of the path from the block in which they begin.
    * ``fork`` shares the blocks outside the tree by reference counts.  The first append to a
      shared, partly filled block copies it.  These blocks enter the tree when the last sequence
      that shares them is freed.

    docs/deviations.md lists the differences from SGLang.

    ``policy`` ranks nodes, not blocks.  A function of a block's history (``lru``, ``lfu``,
    ``fifo``, ``mru``, ``gdsf``, a user's ``PriorityPolicy``) gets the history of the node, as
    SGLang's strategies do.  Any other policy sees a node as its last block, which is in use while
    the node is locked or has children.
    """

    name = "radix"
    can_fork = True
    can_reset = True
    _table_class = _Table

    def __init__(self, options: CacheOptions) -> None:
        super().__init__(options)
        self.tree = RadixTree(self.block_size, as_policy(options.policy), self.num_blocks)
        self._policies = (self.tree.policy,)
        self._listeners = (self.tree.tell,) if "tell" in self.tree.policy.hooks else ()
        self._free = array("i", range(self.num_blocks))[::-1]  # a stack
        self._extra_users: Counter[int] = Counter()  # blocks outside the tree shared by forks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + self.tree.num_evictable

    def check_invariants(self) -> None:
        super().check_invariants()
        nodes = self.tree.check_invariants()
        tables = self._tables.values()
        users = Counter(chain.from_iterable(t.blocks[t.num_in_tree :] for t in tables))
        extra = {block: count - 1 for block, count in users.items() if count > 1}
        require(self._extra_users == extra, f"extra users {self._extra_users}, should be {extra}")
        in_tree = chain.from_iterable(node.blocks for node in nodes)
        everything = sorted([*self._free, *in_tree, *users])
        require(
            everything == list(range(self.num_blocks)),
            f"not every block is free, in the tree or in use: {everything}",
        )
        paths: Counter = Counter()
        for seq_id, table in self._tables.items():
            path = array("i")
            node = table.node
            while node is not self.tree.root:
                paths[node] += 1
                path = node.blocks + path
                node = node.parent
            require(
                path == table.blocks[: table.num_in_tree] and len(path) == table.num_in_tree,
                f"{seq_id!r}: {table.blocks} should begin with {path}",
            )
        for node in nodes:
            require(
                node.lock_ref == paths[node],
                f"{node.blocks}: {node.lock_ref} locks, {paths[node]} users",
            )

    def _match(self, seq: Sequence, limit: int) -> tuple[array, Match]:
        match = self.tree.match_prefix(RadixKey(seq, self.block_size), limit)
        return match.blocks, match

    def _num_idle(self, hit: Hit) -> int:
        return self.tree.num_unlocked(hit.match) if hit.blocks else 0

    def _begin(self, table: _Table, hit: Hit, end: int) -> Copies:
        check_free(
            self._num_blocks_for(end) - len(hit.blocks) + self._num_idle(hit), self.num_free_blocks
        )
        self._notify_of_admission(table.seq)
        self.interruption = MIDDLE
        table.num_prompt_tokens = len(table.seq.token_ids)
        table.node = self.tree.root
        if hit.blocks:
            table.node = self.tree.lock(hit.match)  # before anything is evicted
            table.blocks, table.num_in_tree = array("i", hit.blocks), len(hit.blocks)
        return self._extend(table, hit.num_tokens, end)

    def _extend(self, table: _Table, start: int, end: int) -> Copies:
        missing = max(0, self._num_blocks_for(end) - len(table.blocks))
        position, offset = divmod(start, self.block_size)
        writes_to_shared = offset > 0 and self._is_shared(table.blocks[position])
        check_free(missing + writes_to_shared, self.num_free_blocks)
        self.interruption = MIDDLE
        copies: Copies = []
        if writes_to_shared:
            shared = table.blocks[position]
            (table.blocks[position],) = self._take(1)
            self._give_back(array("i", (shared,)))
            self._counts["copied_blocks"] += 1
            copies.append((shared, table.blocks[position]))
        if missing:
            table.blocks += self._take(missing)
        if start < table.num_prompt_tokens:
            self._publish(table, end)
        return copies

    def _share(self, table: _Table, copy: _Table) -> None:
        copy.blocks = table.blocks[:]
        copy.node, copy.num_in_tree = table.node, table.num_in_tree
        copy.num_prompt_tokens = table.num_prompt_tokens
        self._extra_users.update(copy.blocks[copy.num_in_tree :])
        self.tree.share(copy.node)

    def _release(self, table: _Table) -> None:
        node, rest = table.node, table.num_in_tree
        filled = self._own_full_blocks(table, table.seq.num_computed_tokens)
        duplicates = array("i")
        if filled:
            key = RadixKey(table.seq, self.block_size)
            node, num_duplicates = self.tree.insert(key, filled, node, rest)
            duplicates = filled[:num_duplicates]
            rest += len(filled)
        self._give_back(duplicates + table.blocks[rest:])
        self.tree.unlock(node)

    def _is_shared(self, block: int) -> bool:
        return self._extra_users[block] > 0

    def _forget(self) -> None:
        self._free += self.tree.clear()

    def _publish(self, table: _Table, end: int) -> None:
        """Insert the full blocks of a prompt, unless the tree has their content already."""
        filled = self._own_full_blocks(table, end)
        if not filled:
            return
        seq, first = table.seq, table.num_in_tree
        key = RadixKey(seq, self.block_size)
        if key.child_key(first) not in table.node.children:
            table.node, _ = self.tree.insert(key, filled, table.node, first)
            table.num_in_tree += len(filled)

    def _own_full_blocks(self, table: _Table, end: int) -> array:
        """Full known blocks before ``end``, outside the tree, up to one that a fork shares."""
        if not self.enable_prefix_caching:
            return array("i")
        end = min(end, len(table.seq.token_ids) - table.seq.num_unknown_tokens)
        filled = table.blocks[table.num_in_tree : end // self.block_size]
        if self._extra_users:
            for i, block in enumerate(filled):
                if self._extra_users[block]:
                    return filled[:i]
        return filled

    def _take(self, count: int) -> array:
        """Take ``count`` blocks; at least ``count`` must be free."""
        self._counts["allocated_blocks"] += count
        if count > len(self._free):
            evicted = self.tree.evict(count - len(self._free))
            self._counts["evicted_blocks"] += len(evicted)
            self._free += evicted
        blocks = self._free[: -count - 1 : -1]
        del self._free[-count:]
        return blocks

    def _give_back(self, blocks: array) -> None:
        """Remove a user from ``blocks``, which are outside the tree."""
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
