"""Which block holds which content: the hash index of a block pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.checks import require
from cache.common_prefix import common_prefix_length


@dataclass(slots=True, eq=False)
class _Run:
    """Blocks that hold consecutive contents of one chain."""

    blocks: list[int]
    keys: bytearray  # of their contents, one after the other
    depth: int  # position of the first in its prompt, in blocks


_DUPLICATE = _Run([], bytearray(), 0)
"""The run of all blocks that are duplicates."""


class ContentIndex:
    """Finds the blocks of a prefix by their chained hashes (keys of ``key_size`` bytes).

    Blocks with equal content (computed side by side) are all known; lookups find the *first* of
    them, the one that was added before the others that remain.  The rest are its duplicates.

    In effect this is a dictionary from key to first block.  But a lookup in a big dictionary
    waits for memory at every block, and so does giving up the bytes object of every key.  So blocks
    that were filled together stay together, in runs, with their keys in one string of bytes, and
    only the first key of each run is in a dictionary: a prefix is found by comparing memory, and
    costs the same in a pool of any size.  A run grows at its end, shrinks from its end (prompts are
    evicted tail first), and falls into two where a block is taken out of its middle.

    It needs hashes that do not collide: a key then names the whole prefix, hence also the block
    before and the position in the prompt.
    """

    def __init__(self, num_blocks: int, key_size: int = 16) -> None:
        self._num_blocks = num_blocks
        self._key_size = key_size
        self.clear()

    def clear(self) -> None:
        """Forget all content."""
        self._run_of: list[_Run | None] = [None] * self._num_blocks
        self._runs: dict[bytes, _Run] = {}  # by their first key
        self._duplicates: dict[int, list[int]] = {}  # of first blocks that have any
        self._first_of: dict[int, int] = {}  # the first block, for each duplicate

    def holds(self, block: int) -> bool:
        """Whether ``block`` has content that can be found, or is a duplicate of such a block."""
        return self._run_of[block] is not None

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest run of ``keys``, those of a prefix from its start, found here."""
        blocks: list[int] = []
        packed = b"".join(keys)
        while len(blocks) < len(keys):
            run = self._runs.get(keys[len(blocks)])
            if run is None:
                break
            start = len(blocks) * self._key_size
            if packed.startswith(run.keys, start):
                blocks += run.blocks
            else:
                num_bytes = common_prefix_length(run.keys, packed[start : start + len(run.keys)])
                blocks += run.blocks[: num_bytes // self._key_size]
        return blocks

    def follow(self, previous: int | None, key: bytes, depth: int) -> int | None:
        """The first block with content ``key``, which has position ``depth`` in its prompt.

        ``previous`` holds the content before it; None if ``key`` begins a prefix.
        """
        if previous is not None:
            run = self._run_of[self._first_of.get(previous, previous)]
            at = depth - run.depth
            if run.keys.startswith(key, at * self._key_size):
                return run.blocks[at]
        run = self._runs.get(key)
        return None if run is None else run.blocks[0]

    def add(
        self, blocks: Sequence[int], keys: Sequence[bytes], previous: int | None, depth: int
    ) -> list[int]:
        """Enter ``blocks``, which have no content yet, under ``keys``, consecutive in a chain.

        ``previous`` holds the content before the first of them and is here; None if that begins
        the prefix.  ``depth`` is the position of the first in its prompt.  Returns those that are
        duplicates.
        """
        if self.follow(previous, keys[0], depth) is None and self._runs.keys().isdisjoint(keys):
            self._append(blocks, keys, previous, depth)
            return []
        duplicates: list[int] = []
        for at, (block, key) in enumerate(zip(blocks, keys, strict=True), depth):
            first = self.follow(previous, key, at)
            if first is None:
                self._append((block,), (key,), previous, at)
            else:
                self._run_of[block] = _DUPLICATE
                self._first_of[block] = first
                self._duplicates.setdefault(first, []).append(block)
                duplicates.append(block)
            previous = block
        return duplicates

    def _append(
        self, blocks: Sequence[int], keys: Sequence[bytes], previous: int | None, depth: int
    ) -> None:
        """Enter ``blocks``, of new content, in the run that ``previous`` ends, or a new one."""
        previous = self._first_of.get(previous, previous)
        run = None if previous is None else self._run_of[previous]
        if run is None or run.blocks[-1] != previous:
            run = self._runs[keys[0]] = _Run([], bytearray(), depth)
        run.blocks += blocks
        run.keys += b"".join(keys)
        run_of = self._run_of
        for block in blocks:
            run_of[block] = run

    def remove(self, blocks: Sequence[int]) -> int:
        """Forget the content of ``blocks``; returns how many of them had any."""
        removed = at = 0
        while at < len(blocks):
            block, count = blocks[at], 1
            run = self._run_of[block]
            if run is None:
                at += 1
                continue
            if run is _DUPLICATE:
                self._remove_duplicate(block)
            elif block in self._duplicates:
                self._replace_by_duplicate(run, block)
            elif run.blocks[-1] == block:
                count = self._remove_tail(run, blocks[at : at + len(run.blocks)])
            else:
                self._cut(run, run.blocks.index(block))
            at += count
            removed += count
        return removed

    def _remove_tail(self, run: _Run, blocks: Sequence[int]) -> int:
        """Remove ``blocks[0]``, which ends ``run``, and as many more as do so then, in order.

        Stops before a block that has duplicates.  Returns how many have been removed.
        """
        count = common_prefix_length(run.blocks[: -len(blocks) - 1 : -1], blocks)
        if self._duplicates and not self._duplicates.keys().isdisjoint(blocks[:count]):
            count = next(at for at, block in enumerate(blocks) if block in self._duplicates)
        if count == len(run.blocks):
            del self._runs[bytes(run.keys[: self._key_size])]
        del run.blocks[-count:], run.keys[-count * self._key_size :]
        run_of = self._run_of
        for block in blocks[:count]:
            run_of[block] = None
        return count

    def _cut(self, run: _Run, at: int) -> None:
        """Take the block at ``at`` out of ``run``: what comes before it and after it remain."""
        size = self._key_size
        self._run_of[run.blocks[at]] = None
        del self._runs[bytes(run.keys[:size])]
        end = at + 1
        if 2 * at < len(run.blocks):  # the shorter part gets a new run
            other = _Run(run.blocks[:at], run.keys[: at * size], run.depth)
            del run.blocks[:end], run.keys[: end * size]
            run.depth += end
        else:
            other = _Run(run.blocks[end:], run.keys[end * size :], run.depth + end)
            del run.blocks[at:], run.keys[at * size :]
        for part in (run, other):
            if part.blocks:
                self._runs[bytes(part.keys[:size])] = part
        for moved in other.blocks:
            self._run_of[moved] = other

    def _remove_duplicate(self, block: int) -> None:
        self._run_of[block] = None
        first = self._first_of.pop(block)
        self._duplicates[first].remove(block)
        if not self._duplicates[first]:
            del self._duplicates[first]

    def _replace_by_duplicate(self, run: _Run, block: int) -> None:
        """The oldest duplicate of ``block`` takes its place in ``run``."""
        heir, *others = self._duplicates.pop(block)
        run.blocks[run.blocks.index(block)] = heir
        self._run_of[block], self._run_of[heir] = None, run
        del self._first_of[heir]
        if others:
            self._duplicates[heir] = others
            self._first_of.update(dict.fromkeys(others, heir))

    def contents(self) -> list[bytes | None]:
        """The key of each block's content, None where it has none.  O(number of blocks)."""
        size = self._key_size
        contents: list[bytes | None] = [None] * self._num_blocks
        for run in self._runs.values():
            for at, block in enumerate(run.blocks):
                contents[block] = bytes(run.keys[at * size : (at + 1) * size])
        for block, first in self._first_of.items():
            contents[block] = contents[first]
        return contents

    def check_invariants(self) -> None:
        """Raise AssertionError unless each content is found in one way.  O(number of blocks)."""
        size = self._key_size
        keys: set[bytes] = set()
        placed: dict[int, _Run] = {}
        for first_key, run in self._runs.items():
            where = f"run of blocks {run.blocks}"
            require(0 < len(run.blocks) * size == len(run.keys), f"{where}: keys {run.keys}")
            require(run.keys[:size] == first_key, f"{where}: found by {first_key!r}")
            require(run.depth >= 0, f"{where}: depth {run.depth}")
            for at, block in enumerate(run.blocks):
                key = bytes(run.keys[at * size : (at + 1) * size])
                require(block not in placed, f"block {block} is in two places")
                require(key not in keys, f"content {key!r} is in two places")
                placed[block] = run
                keys.add(key)
        for first, duplicates in self._duplicates.items():
            require(bool(duplicates), f"an empty list of duplicates of {first}")
            require(placed.get(first, _DUPLICATE) is not _DUPLICATE, f"{first} is in no run")
            for block in duplicates:
                require(block not in placed, f"duplicate {block} is in two places")
                require(self._first_of.get(block) == first, f"{block} does not know {first}")
                placed[block] = _DUPLICATE
        num_duplicates = sum(map(len, self._duplicates.values()))
        require(len(self._first_of) == num_duplicates, f"firsts of others: {self._first_of}")
        require(len(self._run_of) == self._num_blocks, f"{len(self._run_of)} blocks")
        for block, run in enumerate(self._run_of):
            require(placed.get(block) is run, f"block {block} does not know its run")
