"""The content index against its definition: a dictionary from hash to blocks, oldest first."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.content_index import ContentIndex

NUM_BLOCKS = 12


def key_of(prefix: tuple[int, ...]) -> bytes:
    """A perfect hash: equal for equal prefixes only."""
    return bytes(prefix).ljust(16, b"\xff")


class Model:
    def __init__(self):
        self.blocks_of: dict[bytes, list[int]] = {}

    def lookup(self, keys):
        found = []
        for key in keys:
            if key not in self.blocks_of:
                break
            found.append(self.blocks_of[key][0])
        return found

    def add(self, blocks, keys):
        duplicates = []
        for block, key in zip(blocks, keys, strict=True):
            if key in self.blocks_of:
                duplicates.append(block)
            self.blocks_of.setdefault(key, []).append(block)
        return duplicates

    def remove(self, blocks):
        removed = 0
        for key in list(self.blocks_of):
            left = [block for block in self.blocks_of[key] if block not in blocks]
            removed += len(self.blocks_of[key]) - len(left)
            self.blocks_of[key] = left
            if not left:
                del self.blocks_of[key]
        return removed


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "unlinked"])
@given(seed=st.integers(0, 10**6))
def test_index_equals_a_dictionary(linked, seed):
    """Tables of full blocks come and go, share, hold duplicates, lose blocks in any order."""
    rng = random.Random(seed)
    index, model = ContentIndex(NUM_BLOCKS, linked=linked), Model()
    tables: list[tuple[list[int], list[bytes]]] = []
    free = list(range(NUM_BLOCKS))
    for _ in range(60):
        prefix = tuple(rng.choice("ab").encode()[0] for _ in range(rng.randrange(1, 6)))
        keys = [key_of(prefix[: i + 1]) for i in range(len(prefix))]
        assert index.lookup(keys) == model.lookup(keys)
        if rng.random() < 0.6:
            hits = model.lookup(keys)
            hits = hits[: rng.choice([len(hits), 0, 1])]  # computed side by side, or known
            tables.append((hits, keys))
            continue
        if tables and free and rng.random() < 0.6:
            blocks, keys = tables[rng.randrange(len(tables))]
            start = len(blocks)
            new = free[: min(len(keys) - start, rng.randrange(1, 4))]
            if start and index.hashes[blocks[-1]] != keys[start - 1]:
                continue  # the table has lost its last block
            if new:
                previous = blocks[-1] if blocks else None
                here = keys[start : start + len(new)]
                follower = model.lookup([here[0]])
                assert index.follow(previous, here[0]) == (follower[0] if follower else None)
                assert index.add(new, here, previous) == model.add(new, here)
                blocks += new
                free = free[len(new) :]
        else:
            victims = rng.sample(range(NUM_BLOCKS), rng.randrange(1, 4))
            assert index.remove(victims) == model.remove(victims)
            free += [block for block in victims if block not in free]
            for blocks, _ in tables:
                for block in victims:
                    if block in blocks:
                        del blocks[blocks.index(block) :]
        index.check_invariants()
        held = {block: key for key, blocks in model.blocks_of.items() for block in blocks}
        assert [held.get(block) for block in range(NUM_BLOCKS)] == index.hashes[:-1]
        assert len(index) == len(held)


def test_a_chain_is_one_entry_of_the_dictionary():
    index = ContentIndex(100, linked=True)
    keys = [key_of((i,)) for i in range(50)]
    assert index.add(range(50), keys, None) == []
    assert index._heads == {keys[0]: 0}
    branch = key_of((99,))
    index.add([50], [branch], 9)
    assert index._heads == {keys[0]: 0, branch: 50}
    assert index.lookup([*keys[:10], branch]) == [*range(10), 50]
    index.remove([20])
    assert index.lookup(keys) == list(range(20))
    assert set(index._heads) == {keys[0], branch, keys[21]}
    index.add([60], keys[20:21], 19)
    assert index.lookup(keys) == [*range(20), 60, *range(21, 50)]


def test_a_duplicate_inherits_the_links():
    index = ContentIndex(10, linked=True)
    keys = [key_of((i,)) for i in range(3)]
    index.add([0, 1, 2], keys, None)
    assert index.add([3, 4], keys[1:], 0) == [3, 4]
    index.remove([1])
    assert index.lookup(keys) == [0, 3, 2]
    index.remove([2])
    assert index.lookup(keys) == [0, 3, 4]
    assert len(index) == 3
    index.check_invariants()


def break_link(index):
    index._next[0] = index._no_block


def break_link_back(index):
    index._previous[1] = index._no_block


def break_link_to_another(index):
    index._next[0] = 2


def break_head(index):
    index._heads[b"x"] = 0


def break_lost_head(index):
    index._heads.clear()


def break_stale_hash(index):
    index.hashes[7] = b"x"


def break_lost_hash(index):
    index.hashes[1] = None


def break_second_way(index):
    index._heads[index.hashes[1]] = 1


def break_copies(index):
    index._copies[index.hashes[2]].append(1)


def break_single_copy(index):
    index._copies[index.hashes[2]].pop()


def break_lost_copies(index):
    index._copies.clear()


def break_end(index):
    index.hashes[-1] = b"x"


@pytest.mark.parametrize(
    "damage",
    [value for name, value in sorted(globals().items()) if name.startswith("break_")],
    ids=lambda damage: damage.__name__,
)
def test_check_invariants_sees(damage):
    index = ContentIndex(8, linked=True)
    keys = [key_of((i,)) for i in range(3)]
    index.add([0, 1, 2], keys, None)
    index.add([3], keys[2:], 1)
    index.check_invariants()
    damage(index)
    with pytest.raises(AssertionError):
        index.check_invariants()
