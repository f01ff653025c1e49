"""Both indexes of contents against their definition: a dictionary from hash to blocks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.common_prefix import common_prefix_length
from cache.content_index import ContentIndex
from cache.hash_index import HashIndex

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


@pytest.mark.parametrize("make", [ContentIndex, HashIndex])
@given(seed=st.integers(0, 10**6))
def test_index_equals_a_dictionary(make, seed):
    """Tables of full blocks come and go, share, hold duplicates, lose blocks in any order."""
    rng = random.Random(seed)
    index, model = make(NUM_BLOCKS), Model()
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
            if start and index.contents()[blocks[-1]] != keys[start - 1]:
                continue  # the table has lost its last block
            if new:
                previous = blocks[-1] if blocks else None
                here = keys[start : start + len(new)]
                follower = model.lookup([here[0]])
                assert index.follow(previous, here[0], start) == (follower[0] if follower else None)
                assert index.add(new, here, previous, start) == model.add(new, here)
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
        assert index.contents() == [held.get(block) for block in range(NUM_BLOCKS)]
        assert [index.holds(block) for block in range(NUM_BLOCKS)] == [
            block in held for block in range(NUM_BLOCKS)
        ]
    index.clear()
    index.check_invariants()
    assert index.contents() == [None] * NUM_BLOCKS


def runs(index: ContentIndex) -> list[list[int]]:
    """The runs of an index, by the position of their first block in the prompt."""
    return [run.blocks for run in sorted(index._runs.values(), key=lambda run: run.depth)]


KEYS = [key_of((i,)) for i in range(50)]


def test_a_chain_is_one_entry_of_the_dictionary():
    index = ContentIndex(100)
    assert index.add(range(20), KEYS[:20], None, 0) == []
    assert index.add(range(20, 50), KEYS[20:], 19, 20) == []
    assert list(index._runs) == KEYS[:1]
    branch = key_of((99,))
    index.add([50], [branch], 9, 10)
    assert list(index._runs) == [KEYS[0], branch]
    assert index.lookup([*KEYS[:10], branch]) == [*range(10), 50]
    index.add([51], [key_of((98,))], 50, 11)
    assert runs(index) == [[*range(50)], [50, 51]]


def first_run(index):
    return index._runs[KEYS[0]]


def put(container: str, key, value):
    return lambda index: getattr(index, container).__setitem__(key, value)


DAMAGES = {
    "lost_run": lambda index: index._runs.clear(),
    "name_of_a_run": lambda index: index._runs.update({b"x" * 16: index._runs.pop(KEYS[0])}),
    "run_twice": lambda index: index._runs.update({b"x" * 16: first_run(index)}),
    "content_twice": lambda index: first_run(index).keys.__setitem__(slice(16, 32), KEYS[0]),
    "block_twice": lambda index: first_run(index).blocks.__setitem__(1, 0),
    "depth": lambda index: setattr(first_run(index), "depth", -1),
    "keys": lambda index: first_run(index).keys.pop(),
    "empty_run": lambda index: index._runs.update({b"": type(first_run(index))([], b"", 0)}),
    "lost_block": put("_run_of", 1, None),
    "stale_block": lambda index: put("_run_of", 7, first_run(index))(index),
    "duplicate_in_a_run": lambda index: put("_run_of", 3, first_run(index))(index),
    "duplicate_of_itself": lambda index: index._duplicates[2].append(2),
    "no_duplicates": put("_duplicates", 0, []),
    "duplicates_of_nothing": lambda index: (
        index._duplicates.update({7: index._duplicates.pop(2)}), index._first_of.update({3: 7})
    ),
    "first_of": put("_first_of", 3, 1),
    "lost_first": lambda index: index._first_of.clear(),
    "first_of_no_duplicate": put("_first_of", 7, 0),
    "size": lambda index: index._run_of.append(None),
}  # fmt: skip
DICTIONARY_DAMAGES = {
    "hash": put("_hashes", 7, b"x"),
    "lost_hash": put("_hashes", 1, None),
    "lost_entry": lambda index: index._first.pop(KEYS[0]),
    "second_entry": put("_first", b"x", 0),
    "duplicate_twice": lambda index: index._duplicates[KEYS[2]].append(2),
    "no_duplicates": put("_duplicates", KEYS[0], []),
    "duplicates_of_nothing": put("_duplicates", b"x", [7]),
    "size": lambda index: index._hashes.append(None),
}


@pytest.mark.parametrize(
    ("make", "damage"),
    [
        pytest.param(make, damage, id=f"{make.__name__}-{name}")
        for make, damages in ((ContentIndex, DAMAGES), (HashIndex, DICTIONARY_DAMAGES))
        for name, damage in damages.items()
    ],
)
def test_check_invariants_sees(make, damage):
    index = make(8)
    index.add([0, 1, 2], KEYS[:3], None, 0)
    index.add([3], KEYS[2:3], 1, 2)
    index.check_invariants()
    damage(index)
    with pytest.raises(AssertionError):
        index.check_invariants()


@given(st.lists(st.sampled_from("ab"), max_size=40), st.lists(st.sampled_from("ab"), max_size=40))
def test_common_prefix_length(one, other):
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    assert common_prefix_length(one, other) == expected
    packed = "".join(one).encode(), bytearray("".join(other).encode())
    assert common_prefix_length(*packed) == expected
