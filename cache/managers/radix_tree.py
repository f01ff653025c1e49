"""A radix tree over token blocks, the data structure of RadixAttention (SGLang, NeurIPS 2024).

A node holds a run of blocks; a cached sequence of blocks is a path from the root.  Two paths
separate at the block where they differ, so a node is split when a new path leaves it in the middle.
Nodes in use are locked, with all nodes above them.  Unlocked leaves can be evicted, one at a time,
in the order of the policy.

Tokens are compared as bytes, a whole run at a time, and block ids are in arrays of 32-bit integers,
so operations on a run copy or compare memory.
"""

from array import array
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from cache.blocks.hashing import encode_extra_keys
from cache.blocks.sequence import Sequence
from cache.checks import require
from cache.managers.radix_leaves import RadixNode, make_leaves
from cache.policies.base import EvictionPolicy, RequestInfo

_TOKEN_BYTES = 4


class RadixKey:
    """The tokens of a sequence in blocks, with its extra keys.

    The adapter, the salt and every multi-modal input are part of the block in which they begin;
    later blocks depend on them because they are below it in the tree.  A node never continues into
    such a block, so sequences with different extra keys separate there.

    Attributes:
        data: token ids, 4 bytes each.
        extras: encoded extra keys of each block in which one begins.
    """

    def __init__(self, seq: Sequence, block_size: int) -> None:
        self._width = _TOKEN_BYTES * block_size
        self.data = seq.token_ids.tobytes()
        self.extras: dict[int, bytes] = {}
        if seq.keyed_length:
            begins = {0, *(mm_input.offset // block_size for mm_input in seq.mm_inputs)}
            for block in sorted(begins):
                if keys := seq.extra_keys(block * block_size, (block + 1) * block_size):
                    self.extras[block] = encode_extra_keys(keys)

    def child_key(self, position: int) -> bytes:
        """Key of the block at ``position`` among the children of the path before it."""
        tokens = self.data[position * self._width : (position + 1) * self._width]
        return self.extras.get(position, b"") + tokens if self.extras else tokens

    def run_end(self, position: int, last: int) -> int:
        """End of a run that begins at ``position``: ``last``, or the next block with extras."""
        return min([last, *(start for start in self.extras if start > position)])


class Match(NamedTuple):
    """A cached prefix.  Valid until the tree changes."""

    blocks: array
    """Block ids, ``array('i')``; a copy."""
    node: RadixNode
    """The node in which the prefix ends; the root if nothing was found."""
    num_in_node: int
    """Blocks of that node that belong to the prefix."""


class RadixTree:
    """Finds blocks by their tokens.  It owns inserted blocks until ``evict`` returns them.

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

    def __getstate__(self) -> tuple[dict, list]:
        return self.__dict__, [(node, node.parent, node.children) for node in self._nodes()]

    def __setstate__(self, state: tuple[dict, list]) -> None:
        self.__dict__, links = state
        for node, parent, children in links:
            node.parent, node.children = parent, children

    def _nodes(self) -> list[RadixNode]:
        """All nodes, parents first."""
        nodes = [self.root]
        for node in nodes:
            nodes += node.children.values()
        return nodes

    def tell(self, request: RequestInfo) -> None:
        """Notify the policy that the next calls are for ``request``."""
        self.leaves.tell(request)

    def clear(self) -> array:
        """Remove all nodes and restart the policy; returns all blocks.  No node may be locked."""
        nodes = self._nodes()
        self._start()
        return array("i", chain.from_iterable(node.blocks for node in nodes))

    def match_prefix(self, key: RadixKey, limit: int) -> Match:
        """The longest cached prefix of at most ``limit`` blocks.  Changes nothing.

        Its blocks can be evicted until the match is locked.
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
        """Number of evictable blocks of ``match``."""
        node, count = match.node, match.num_in_node
        total = 0
        while node.parent is not None and not node.lock_ref:
            total += count
            node = node.parent
            count = len(node.blocks)
        return total

    def lock(self, match: Match) -> RadixNode:
        """Add a user to the nodes of ``match``; returns the last, split if the match ends in it."""
        node = match.node
        if match.num_in_node < len(node.blocks):
            node = self._split(node, match.num_in_node)
        self.share(node)
        return node

    def share(self, node: RadixNode) -> None:
        """Add a user to ``node`` and to every node above it."""
        while node.parent is not None:
            self._add_user(node)
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        """Remove a user from ``node`` and every node above it.  Counts as an access of all."""
        self._time += 1
        time = self._time
        while node.parent is not None:
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
        """Insert ``blocks``, which hold ``key`` from position ``first`` on, below ``node``.

        ``node``, by default the root, ends at ``first`` and is locked by the caller.  Returns the
        node in which the blocks end, to which the caller's lock moves, and the number of leading
        blocks that were not inserted because their content is cached.  Splits nodes as needed.
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

    def evict(self, count: int) -> array:
        """Remove leaves chosen by the policy until they have at least ``count`` blocks.

        Returns all their blocks; leaves are evicted whole, as in SGLang.  At least ``count`` blocks
        must be evictable.
        """
        evicted = array("i")
        while len(evicted) < count:
            node = self.leaves.pop()
            parent = node.parent or self.root
            del parent.children[node.extra + node.key[: self._width]]
            evicted += node.blocks
            self.num_evictable -= len(node.blocks)
            if not parent.children and not parent.lock_ref and parent is not self.root:
                self.leaves.add(parent)
        return evicted

    def _num_common(self, child: RadixNode, key: RadixKey, position: int, limit: int) -> int:
        """Length of the common run of ``child`` and ``key`` at ``position``, at least one block."""
        width, data, tokens = self._width, key.data, child.key
        start, size = position * width, len(child.blocks)
        high = min(size, key.run_end(position, limit) - position)
        tokens = tokens if high == size else tokens[: high * width]
        if data.startswith(tokens, start):
            return high
        return _common_prefix_length(tokens, data[start : start + len(tokens)]) // width

    def _add_user(self, node: RadixNode) -> None:
        if not node.lock_ref:
            self.num_evictable -= len(node.blocks)
            if not node.children:
                self.leaves.remove(node)
        node.lock_ref += 1

    def _add_child(
        self, parent: RadixNode, key: RadixKey, blocks: array, position: int
    ) -> RadixNode:
        """Add a node with one user; ``parent`` is locked and has no such child."""
        extra = key.extras.get(position, b"")
        start = position * self._width
        tokens = key.data[start : start + len(blocks) * self._width]
        node = RadixNode(parent, extra, tokens, blocks, position, lock_ref=1)
        parent.children[extra + tokens[: self._width]] = node
        self.leaves.insert(node, is_new=True)
        return node

    def _split(self, node: RadixNode, num_blocks: int) -> RadixNode:
        """Move the first ``num_blocks`` blocks of ``node`` to a new parent, and return it."""
        cut = num_blocks * self._width
        upper = replace(node, key=node.key[:cut], blocks=node.blocks[:num_blocks], children={})
        parent = node.parent or self.root
        parent.children[node.extra + node.key[: self._width]] = upper
        node.parent, node.extra, node.key = upper, b"", node.key[cut:]
        node.blocks = node.blocks[num_blocks:]
        node.depth += num_blocks
        upper.children[node.key[: self._width]] = node
        self.leaves.insert(upper, is_new=False)
        return upper

    def check_invariants(self) -> list[RadixNode]:
        """All nodes but the root, parents first; AssertionError unless the tree is consistent."""
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
            len(leaves) == len(set(leaves)) and set(leaves) == evictable,
            f"leaves {[n.blocks for n in leaves]}, should be {[n.blocks for n in evictable]}",
        )
        unlocked = sum(len(node.blocks) for node in nodes if not node.lock_ref)
        require(
            self.num_evictable == unlocked,
            f"num_evictable is {self.num_evictable}, {unlocked} blocks are unlocked",
        )
        return nodes[1:]


def _common_prefix_length(one: bytes, other: bytes) -> int:
    """Common prefix of two different texts of one length, by bisection: C compares slices."""
    low, high = 0, len(one) - 1  # equal up to ``low``, different in the first ``high + 1``
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
