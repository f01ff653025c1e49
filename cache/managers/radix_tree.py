"""A radix tree over token blocks, the data structure of RadixAttention (SGLang, NeurIPS 2024).

An edge of the tree is a run of blocks; a sequence of blocks in the cache is a path from the root.
Two paths part at the block where they differ, so a node is split when a new path leaves it in the
middle.  Nodes in use are locked, and so are all nodes above them.  What is not locked may be
evicted, a leaf at a time, the policy choosing among the leaves.

The tokens themselves are compared, as bytes and a whole run at a time, and block ids are kept in
arrays of 32-bit integers: what is done to a run is a copy or a comparison of memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import chain
from typing import NamedTuple

from cache.blocks.common_prefix import common_prefix_length
from cache.blocks.hashing import encode_extra_keys
from cache.blocks.sequence import Sequence
from cache.checks import require
from cache.managers.radix_leaves import RadixNode, make_leaves
from cache.policies.base import EvictionPolicy, Request

_TOKEN_BYTES = 4


class RadixKey:
    """The tokens of a sequence in blocks, with what else the K/V depend on.

    The adapter, the salt and every multi-modal input become part of the block in which they begin;
    later blocks depend on them by being further down the same path.  No node goes on past the
    beginning of such a block, so sequences that differ in them part there, as SGLang's namespaces
    (``extra_key``) part at the root.

    Attributes:
        data: token ids, 4 bytes each.
        extras: for each block where something begins, an encoding of its extra keys.
    """

    __slots__ = ("_starts", "_width", "data", "extras")

    def __init__(self, seq: Sequence, block_size: int) -> None:
        self._width = _TOKEN_BYTES * block_size
        self.data = seq.token_ids.tobytes()
        self.extras: dict[int, bytes] = {}
        if seq.keyed_length:
            begins = {0, *(mm_input.offset // block_size for mm_input in seq.mm_inputs)}
            for block in sorted(begins):
                if keys := seq.extra_keys(block * block_size, (block + 1) * block_size):
                    self.extras[block] = encode_extra_keys(keys)
        self._starts = list(self.extras)

    def child_key(self, position: int) -> bytes:
        """What the block at ``position`` is found by among the children of the path before it."""
        tokens = self.data[position * self._width : (position + 1) * self._width]
        return self.extras.get(position, b"") + tokens if self.extras else tokens

    def run_end(self, position: int, last: int) -> int:
        """Where a run that begins at ``position`` has to end: ``last``, or where extras begin."""
        following = bisect_right(self._starts, position)
        if following == len(self._starts):
            return last
        return min(last, self._starts[following])


class Match(NamedTuple):
    """A cached prefix.  Valid until the tree changes."""

    blocks: array
    """Its block ids, ``array('i')``; a copy."""
    node: RadixNode
    """The node in which it ends; the root if nothing was found."""
    num_in_node: int
    """How many blocks of that node belong to it."""


class RadixTree:
    """Blocks found by their tokens.  It owns the ids it is given until ``evict`` returns them.

    Attributes:
        root: the empty prefix.
        num_evictable: blocks in nodes that are not locked.
    """

    def __init__(self, block_size: int, policy: EvictionPolicy, capacity: int) -> None:
        self.block_size = block_size
        self.policy = policy
        self._capacity = capacity
        self._width = _TOKEN_BYTES * block_size
        self._start()

    def _start(self) -> None:
        self.root = RadixNode(None, b"", b"", array("i"), 0)
        self.leaves = make_leaves(self.policy, self._capacity)
        self.num_evictable = 0
        self._time = 0

    def tell(self, request: Request) -> None:
        """The calls that follow are about ``request``."""
        self.leaves.tell(request)

    def clear(self) -> array:
        """Forget everything, the policy too; returns all blocks.  No node may be locked."""
        nodes = [self.root]
        for node in nodes:
            nodes += node.children.values()
        self._start()
        return array("i", chain.from_iterable(node.blocks for node in nodes))

    def match_prefix(self, key: RadixKey, limit: int) -> Match:
        """The longest cached prefix of at most ``limit`` blocks.  Changes nothing.

        Blocks of it are safe from eviction only once the match is locked.
        """
        node, position, blocks, num_common = self.root, 0, array("i"), 0
        while position < limit:
            child = node.children.get(key.child_key(position))
            if child is None:
                break
            node = child
            num_common = self._num_common(child, key, position, limit)
            position += num_common
            if num_common < len(child.blocks):
                blocks += child.blocks[:num_common]
                break
            blocks += child.blocks
        return Match(blocks, node, num_common)

    def num_unlocked(self, match: Match) -> int:
        """How many blocks of ``match`` are evictable, and would not be if it were locked."""
        node, count = match.node, match.num_in_node
        total = 0
        while node is not self.root and not node.lock_ref:
            total += count
            node = node.parent
            count = len(node.blocks)
        return total

    def lock(self, match: Match) -> RadixNode:
        """Add a user to every node of ``match``; returns the node that ends with it.

        Splits a node in which the match ends.
        """
        node = match.node
        if match.num_in_node < len(node.blocks):
            node = self._split(node, match.num_in_node)
        self.share(node)
        return node

    def share(self, node: RadixNode) -> None:
        """Add a user to ``node`` and to every node above it."""
        while node is not self.root:
            self._add_user(node)
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        """Remove a user from ``node`` and every node above it: all are accessed now."""
        self._time += 1
        time = self._time
        while node is not self.root:
            node.lock_ref -= 1
            node.accessed = time
            node.accesses += 1
            node.inserted = node.inserted or time
            if not node.lock_ref:
                self.num_evictable += len(node.blocks)
                if not node.children:
                    self.leaves.add(node)
            node = node.parent

    def insert(
        self, key: RadixKey, blocks: array, node: RadixNode | None = None, first: int = 0
    ) -> tuple[RadixNode, int]:
        """Put ``blocks``, those of ``key`` from position ``first`` on, below ``node``.

        ``node``, by default the root, ends at ``first`` and is locked by the caller.  Returns the
        node in which the blocks end and how many of them, the first ones, were there already:
        these have not been taken.  The caller's lock is moved to the node returned.  Splits a node
        in which the blocks part or end.
        """
        node = self.root if node is None else node
        position, last = first, first + len(blocks)
        while position < last:
            child = node.children.get(key.child_key(position))
            if child is None:
                break
            num_common = self._num_common(child, key, position, last)
            if num_common < len(child.blocks):
                child = self._split(child, num_common)
            self._add_user(child)
            node = child
            position += num_common
        num_duplicates = position - first
        while position < last:
            end = key.run_end(position, last)
            node = self._add_child(node, key, blocks[position - first : end - first], position)
            position = end
        return node, num_duplicates

    def holds(self, node: RadixNode, key: RadixKey, position: int) -> bool:
        """Whether the block of ``key`` at ``position``, where ``node`` ends, is cached."""
        return key.child_key(position) in node.children

    def evict(self, count: int) -> array:
        """Remove the leaves that the policy names until ``count`` blocks or more are free.

        Returns all their blocks: leaves go whole, as in SGLang.  At least ``count`` are evictable.
        """
        evicted = array("i")
        while len(evicted) < count:
            node = self.leaves.pop()
            parent = node.parent
            del parent.children[node.extra + node.key[: self._width]]
            evicted += node.blocks
            self.num_evictable -= len(node.blocks)
            if not parent.children and not parent.lock_ref and parent is not self.root:
                self.leaves.add(parent)
        return evicted

    def _num_common(self, child: RadixNode, key: RadixKey, position: int, limit: int) -> int:
        """How many blocks of ``child``, the first of which matches, ``key`` has at ``position``."""
        width, data, tokens = self._width, key.data, child.key
        start, size = position * width, len(child.blocks)
        high = min(size, key.run_end(position, limit) - position)
        tokens = tokens if high == size else tokens[: high * width]
        if data.startswith(tokens, start):
            return high
        return common_prefix_length(tokens, data[start : start + len(tokens)]) // width

    def _add_user(self, node: RadixNode) -> None:
        if not node.lock_ref:
            self.num_evictable -= len(node.blocks)
            if not node.children:
                self.leaves.remove(node)
        node.lock_ref += 1

    def _add_child(
        self, parent: RadixNode, key: RadixKey, blocks: array, position: int
    ) -> RadixNode:
        """A new node with one user; ``parent`` is locked and has no such child."""
        extra = key.extras.get(position, b"")
        start = position * self._width
        tokens = key.data[start : start + len(blocks) * self._width]
        node = RadixNode(parent, extra, tokens, blocks, position)
        node.lock_ref = 1
        parent.children[extra + tokens[: self._width]] = node
        self.leaves.insert(node, is_new=True)
        return node

    def _split(self, node: RadixNode, num_blocks: int) -> RadixNode:
        """Make the first ``num_blocks`` blocks of ``node`` a node of their own, its parent."""
        cut = num_blocks * self._width
        upper = RadixNode(
            node.parent, node.extra, node.key[:cut], node.blocks[:num_blocks], node.depth
        )
        upper.lock_ref = node.lock_ref
        upper.accessed, upper.inserted, upper.accesses = node.accessed, node.inserted, node.accesses
        node.parent.children[node.extra + node.key[: self._width]] = upper
        node.parent = upper
        node.extra = b""
        node.key = node.key[cut:]
        node.blocks = node.blocks[num_blocks:]
        node.depth += num_blocks
        upper.children[node.key[: self._width]] = node
        self.leaves.insert(upper, is_new=False)
        return upper

    def check_invariants(self) -> list[RadixNode]:
        """Raise AssertionError, saying what is wrong, unless the tree is consistent.

        Returns all nodes but the root, parents first.
        """
        nodes, evictable = [self.root], set()
        for node in nodes:
            locks_below = 0
            for name, child in node.children.items():
                where = f"node at depth {child.depth} with blocks {child.blocks}"
                require(child.parent is node, f"{where}: wrong parent")
                require(child.depth == node.depth + len(node.blocks), f"{where}: wrong depth")
                require(
                    name == child.extra + child.key[: self._width]
                    and len(child.key) == len(child.blocks) * self._width > 0,
                    f"{where}: {len(child.key)} bytes of tokens under the name {name!r}",
                )
                locks_below += child.lock_ref
                nodes.append(child)
                if not child.lock_ref and not child.children:
                    evictable.add(child)
            require(
                node is self.root or node.lock_ref >= locks_below,
                f"node with blocks {node.blocks}: {node.lock_ref} users, {locks_below} below",
            )
        leaves = list(self.leaves)
        require(
            len(leaves) == len(set(leaves)) == len(self.leaves) and set(leaves) == evictable,
            f"leaves {[n.blocks for n in leaves]}, should be {[n.blocks for n in evictable]}",
        )
        unlocked = sum(len(node.blocks) for node in nodes if not node.lock_ref)
        require(
            self.num_evictable == unlocked,
            f"num_evictable is {self.num_evictable}, {unlocked} blocks are unlocked",
        )
        return nodes[1:]
