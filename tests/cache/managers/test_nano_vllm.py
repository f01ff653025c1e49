"""nano_vllm: which block goes where, and the faults that the original has or had."""

from __future__ import annotations

import functools

import manager_helpers
import pytest
from manager_helpers import grow

from cache import Sequence
from cache.managers import NanoVLLM

manager_of = functools.partial(manager_helpers.manager_of, "nano_vllm")


def free_ids(manager: NanoVLLM) -> list[int]:
    return list(manager.pool.free_blocks())


def with_colliding_hashes(manager: NanoVLLM, values: int = 1) -> NanoVLLM:
    """All blocks share ``values`` hashes."""
    manager._hasher._digest = lambda data: bytes(7) + bytes([sum(data) % values])
    return manager


def test_blocks_go_where_the_original_puts_them():
    manager = manager_of()
    first, second = Sequence(0, range(14)), Sequence(1, [*range(11), 91, 92, 93])
    assert manager.allocate(first) == 0
    assert manager.block_table(first) == [0, 1, 2, 3]
    grow(manager, first, 14, 15, 16)
    assert manager.block_table(first) == [0, 1, 2, 3, 4]
    assert manager.allocate(second) == 8
    assert manager.block_table(second) == [0, 1, 5, 6]
    manager.free(first)
    assert free_ids(manager) == [7, 8, 9, 4, 3, 2]
    manager.free(second)
    assert free_ids(manager) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    third = Sequence(2, [*range(12), *range(50, 67)])
    assert manager.allocate(third) == 12
    assert manager.block_table(third) == [0, 1, 2, 7, 8, 9, 4, 3]
    assert free_ids(manager) == [6, 5]
    stats = manager.stats
    assert (stats.num_allocations, stats.queried_tokens, stats.hit_tokens) == (3, 57, 20)
    assert (stats.queried_blocks, stats.hit_blocks) == (3 + 3 + 7, 5)
    assert (stats.allocated_blocks, stats.evicted_blocks, stats.copied_blocks) == (12, 1, 0)


def test_hashes_are_xxh64_unless_another_is_named():
    assert manager_of()._hasher.algorithm == "xxh64"
    assert manager_of(hash_algorithm="sha256")._hasher.algorithm == "sha256"
    with pytest.raises(ValueError, match=r"hash_algorithm='md5'.*xxh64"):
        manager_of(hash_algorithm="md5")


def test_a_duplicate_does_not_take_over_the_index():
    manager = manager_of()
    first, second = Sequence(0, range(8)), Sequence(1, range(8))
    manager.allocate(first)
    manager.allocate(second)  # computes its last block again
    assert manager.block_table(second) == [0, 2]
    probe = Sequence(2, range(9))
    assert manager.get_computed_blocks(probe)[0] == [0, 1]
    manager.free(first)
    manager.allocate(Sequence(3, [99] * 32))  # all blocks that are free, 1 among them
    assert manager.num_free_blocks == 0
    assert manager.get_computed_blocks(probe)[0] == [0, 2]
    manager.check_invariants()


def test_the_tokens_of_a_hit_are_compared():
    manager = with_colliding_hashes(manager_of())
    manager.allocate(Sequence(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert manager.get_computed_blocks(Sequence(1, [1, 2, 3, 9, 5, 6, 7, 8, 9])) == ([], 0)
    assert manager.get_computed_blocks(Sequence(1, [1, 2, 3, 4, 9])) == ([0], 4)


def test_a_first_block_is_no_hit_for_a_later_one_of_equal_tokens_and_hash():
    manager = with_colliding_hashes(manager_of(10, 2))
    prompt = Sequence(0, [1, 1, 1, 1, 9])
    manager.allocate(prompt)
    assert manager.pool.lookup(manager._hasher.block_hashes(prompt)) == [0, 0]
    assert manager.get_computed_blocks(Sequence(1, [1, 1, 1, 1, 9])) == ([0], 2)


@pytest.mark.parametrize(
    "keys", [{"lora_name": "a"}, {"cache_salt": "a"}, {"mm_inputs": [("a", 0, 4)]}]
)
def test_the_extra_keys_of_a_hit_are_compared(keys):
    manager = with_colliding_hashes(manager_of())
    manager.allocate(Sequence(0, range(9), **keys))
    for others in [{}, {"lora_name": "a"}, {"cache_salt": "a"}, {"mm_inputs": [("a", 0, 4)]}]:
        hits, _ = manager.get_computed_blocks(Sequence(1, range(9), **others))
        assert hits == ([0] if others == keys else [])


def without_first_block(manager: NanoVLLM, seq: Sequence) -> int:
    """Cache the two full blocks of ``seq``, evict the first; returns the second.

    The pool has 5 blocks and the policy mru, which gives up the last block released first.
    """
    shorter = Sequence("shorter", [*seq.token_ids[:2], 9])
    manager.allocate(seq)
    manager.allocate(shorter)
    assert manager.block_table(seq) == [0, 1, 2]
    assert manager.block_table(shorter) == [0, 3]
    manager.free(seq)
    manager.free(shorter)
    others = [Sequence(("other", i), [7]) for i in range(4)]
    for other in others:
        manager.allocate(other)
    assert [manager.block_table(other) for other in others] == [[3], [2], [4], [0]]
    for other in others:
        manager.free(other)
    assert manager.get_computed_blocks(seq) == ([], 0)
    return 1


def test_a_prefix_of_equal_hash_that_lost_its_block_does_not_lend_its_later_ones():
    manager = with_colliding_hashes(manager_of(5, 2, policy="mru"), 251)
    lender, other = Sequence(0, [1, 2, 5, 6, 9]), Sequence(1, [2, 1, 5, 6, 9])
    lent = without_first_block(manager, lender)
    manager.allocate(other)
    first, second, _ = manager.block_table(other)
    assert manager.pool.lookup(manager._hasher.block_hashes(other)) == [first, lent]
    assert manager.get_computed_blocks(other) == ([first], 2)
    assert manager.get_computed_blocks(lender) == ([], 0)
    assert lent != second
    manager.check_invariants()


def test_a_first_block_that_is_computed_again_finds_the_later_ones():
    manager = manager_of(5, 2, policy="mru")
    prompt = Sequence(0, [1, 2, 5, 6, 9])
    second = without_first_block(manager, prompt)
    manager.allocate(prompt)
    first = manager.block_table(prompt)[0]
    assert manager.get_computed_blocks(Sequence(1, [1, 2, 5, 6, 9])) == ([first, second], 4)
    assert manager._contents[second].parent is manager._contents[first]  # not compared again


def test_chunks_are_findable_one_after_the_other():
    manager = manager_of()
    prompt, probe = Sequence(0, range(14)), Sequence(1, range(14))
    assert manager.allocate_slots(prompt, 5) == []
    assert manager.block_table(prompt) == [0, 1, 2, 3]
    assert prompt.num_computed_tokens == 5
    assert manager.get_computed_blocks(probe) == ([0], 4)
    manager.allocate_slots(prompt, 7)
    assert manager.get_computed_blocks(probe) == ([0, 1, 2], 12)
    manager.allocate_slots(probe, 2, [0, 1, 2])
    assert manager.block_table(probe) == [0, 1, 2, 4]
    assert (probe.num_cached_tokens, probe.num_computed_tokens) == (12, 14)
    manager.check_invariants()


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda m: m.pool.ref_counts.__setitem__(0, 2), "block 0 has ref_count 2 and is in 1"),
        (lambda m: m._contents.__setitem__(1, None), "block 1 is cached, but"),
        (lambda m: setattr(m._tables[0], "num_cached_blocks", 1), "1 are cached"),
    ],
    ids=["ref_count", "content", "cached"],
)
def test_check_invariants_sees(break_it, says):
    manager = manager_of()
    manager.allocate(Sequence(0, range(9)))
    manager.check_invariants()
    break_it(manager)
    with pytest.raises(AssertionError, match=says):
        manager.check_invariants()
