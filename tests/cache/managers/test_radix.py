"""radix: the tree, the manager over it, and the faults that real systems had."""

from __future__ import annotations

import time
from array import array

import pytest

from cache import (
    AllocStatus,
    OutOfBlocks,
    PriorityPolicy,
    Sequence,
    UnsupportedByDesign,
    make_manager,
    make_policy,
)
from cache.managers import Radix
from cache.managers.radix_leaves import PolicyLeaves, RankedLeaves
from cache.managers.radix_tree import RadixKey, RadixTree
from cache.policies.lru import LRU


def manager_of(num_blocks: int = 10, block_size: int = 4, **options) -> Radix:
    return make_manager("radix", num_blocks=num_blocks, block_size=block_size, **options)


def grow(manager: Radix, seq: Sequence, *token_ids: int) -> list[tuple[int, int]]:
    """Decode ``token_ids``; returns all copies."""
    copies = []
    for token_id in token_ids:
        seq.append_token(token_id)
        copies += manager.append(seq)
        manager.check_invariants()
    return copies


def started(manager: Radix, seq_id, token_ids, **keys) -> Sequence:
    seq = Sequence(seq_id, token_ids, **keys)
    manager.allocate(seq)
    manager.check_invariants()
    return seq


def used(manager: Radix, seq_id, token_ids, **keys) -> None:
    """A sequence that came, was computed and went."""
    manager.free(started(manager, seq_id, token_ids, **keys))
    manager.check_invariants()


def shape(tree: RadixTree) -> list[tuple[int, list[int], int]]:
    """(depth, blocks, users) of all nodes."""
    return sorted((n.depth, n.blocks.tolist(), n.lock_ref) for n in tree.check_invariants())


def state_of(manager: Radix, *seqs: Sequence):
    leaves = [node.blocks.tolist() for node in manager.tree.leaves]
    free = manager._free[:], manager._num_fresh, dict(manager._extra_users)
    counts = [(seq.num_cached_tokens, seq.num_computed_tokens) for seq in seqs]
    tables = [manager.block_table(seq) for seq in seqs]
    return shape(manager.tree), leaves, free, counts, tables, manager.stats


def cached(manager: Radix, token_ids, **keys) -> int:
    return manager.get_computed_blocks(Sequence("probe", [*token_ids, 0], **keys))[1]


# The tree ---------------------------------------------------------------------------------------


def tree_of(*prompts, policy="lru", block_size=2) -> RadixTree:
    """A tree of ``prompts``; block ids count up through them."""
    tree = RadixTree(block_size, make_policy(policy), 100)
    first = 0
    for i, prompt in enumerate(prompts):
        count = len(prompt) // block_size
        key = RadixKey(Sequence(i, prompt), block_size)
        node, _ = tree.insert(key, array("i", range(first, first + count)))
        tree.unlock(node)
        tree.check_invariants()
        first += count
    return tree


def match(tree: RadixTree, prompt, limit: int = 99, **keys):
    key = RadixKey(Sequence("probe", prompt, **keys), tree.block_size)
    return tree.match_prefix(key, min(limit, len(prompt) // tree.block_size))


def test_paths_part_at_the_block_where_they_differ():
    tree = tree_of([1, 1, 2, 2, 3, 3, 4, 4], [1, 1, 2, 2, 3, 9, 4, 4], [7, 7])
    assert shape(tree) == [(0, [0, 1], 0), (0, [8], 0), (2, [2, 3], 0), (2, [6, 7], 0)]
    assert match(tree, [1, 1, 2, 2, 3, 9, 4, 4]).blocks.tolist() == [0, 1, 6, 7]
    assert match(tree, [1, 1, 2, 9]).blocks.tolist() == [0]
    assert match(tree, [9, 9]).blocks.tolist() == []
    assert match(tree, [9, 9]).node is tree.root


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 9, 16, 31])
def test_a_match_ends_at_every_block_of_a_run(length):
    prompt = list(range(2 * length))
    tree = tree_of(prompt)
    for end in range(length + 1):
        other = prompt[: 2 * end] + [99] * (2 * (length - end))
        found = match(tree, other)
        assert found.blocks.tolist() == list(range(end))
        assert match(tree, prompt, limit=end).blocks.tolist() == list(range(end))
        assert found.num_in_node == (end if end else 0)


def test_a_match_changes_nothing_and_a_lock_splits():
    tree = tree_of([1, 1, 2, 2, 3, 3])
    found = match(tree, [1, 1, 2, 2])
    assert shape(tree) == [(0, [0, 1, 2], 0)]
    node = tree.lock(found)
    assert shape(tree) == [(0, [0, 1], 1), (2, [2], 0)]
    assert tree.num_evictable == 1
    with pytest.raises(ValueError, match="count=2: 1 blocks are evictable"):
        tree.evict(2)
    assert tree.evict(1).tolist() == [2]
    tree.unlock(node)
    assert tree.evict(1).tolist() == [0, 1]  # a leaf goes whole
    tree.check_invariants()


def test_a_lock_splits_a_node_that_is_locked_already():
    tree = tree_of([1, 1, 2, 2, 3, 3])
    long = tree.lock(match(tree, [1, 1, 2, 2, 3, 3]))
    short = tree.lock(match(tree, [1, 1]))
    assert shape(tree) == [(0, [0], 2), (1, [1, 2], 1)]
    tree.unlock(long)
    assert tree.num_evictable == 2
    tree.unlock(short)
    assert tree.num_evictable == 3
    tree.check_invariants()


def test_a_node_behind_an_adapter_is_split_and_evicted_as_any_other():
    tree = RadixTree(2, make_policy("lru"), 9)
    key = RadixKey(Sequence(0, [1, 1, 2, 2], lora_name="x"), 2)
    tree.unlock(tree.insert(key, array("i", [0, 1]))[0])
    tree.unlock(tree.lock(match(tree, [1, 1], lora_name="x")))
    assert shape(tree) == [(0, [0], 0), (1, [1], 0)]
    assert match(tree, [1, 1, 2, 2], lora_name="x").blocks.tolist() == [0, 1]
    assert match(tree, [1, 1, 2, 2]).blocks.tolist() == []
    assert evicted_in_order(tree) == [[1], [0]]


def test_an_insert_takes_only_what_is_missing():
    tree = tree_of([1, 1, 2, 2])
    key = RadixKey(Sequence(0, [1, 1, 2, 2, 3, 3]), 2)
    node, num_duplicates = tree.insert(key, array("i", [10, 11, 12]))
    assert num_duplicates == 2
    assert shape(tree) == [(0, [0, 1], 1), (2, [12], 1)]
    tree.unlock(node)
    node, num_duplicates = tree.insert(RadixKey(Sequence(0, [1, 1]), 2), array("i", [13]))
    assert num_duplicates == 1
    assert shape(tree) == [(0, [0], 1), (1, [1], 0), (2, [12], 0)]


def test_locks_are_counted_up_to_the_root():
    tree = tree_of([1, 1, 2, 2], [1, 1, 3, 3])
    locks = [tree.lock(match(tree, prompt)) for prompt in ([1, 1, 2, 2], [1, 1, 3, 3], [1, 1])]
    assert shape(tree) == [(0, [0], 3), (1, [1], 1), (1, [3], 1)]
    tree.share(locks[0])
    assert shape(tree) == [(0, [0], 4), (1, [1], 2), (1, [3], 1)]
    for node in (*locks, locks[0]):
        assert tree.num_evictable < 3
        tree.unlock(node)
        tree.check_invariants()
    assert tree.num_evictable == 3


def evicted_in_order(tree: RadixTree) -> list[list[int]]:
    order = []
    while tree.num_evictable:
        order.append(tree.evict(1).tolist())
        tree.check_invariants()
    return order


def test_leaves_go_by_age_and_a_parent_as_old_as_it_was():
    tree = tree_of([1, 1, 2, 2], [1, 1, 3, 3], [5, 5], [6, 6])
    tree.unlock(tree.lock(match(tree, [5, 5])))
    assert [node.blocks.tolist() for node in tree.leaves] == [[1], [3], [5], [4]]
    # The parent [0] was accessed with its second child: before 5 and 6.
    assert evicted_in_order(tree) == [[1], [3], [0], [5], [4]]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [[2], [1], [0]]),
        ("mru", [[0], [1], [2]]),
        ("fifo", [[0], [1], [2]]),
        ("lfu", [[1], [2], [0]]),
    ],
)
def test_the_policy_chooses_among_the_leaves(policy, order):
    tree = tree_of([0, 0], [1, 1], [2, 2], policy=policy)
    for i in (0, 2, 0, 2, 1, 0):  # used 4, 2 and 3 times with the insert
        tree.unlock(tree.lock(match(tree, [i, i])))
    assert isinstance(tree.leaves, RankedLeaves)
    assert evicted_in_order(tree) == order


def test_gdsf_ages_the_leaves_with_its_clock():
    tree = tree_of([0, 0], [1, 1], policy="gdsf")
    tree.unlock(tree.lock(match(tree, [0, 0])))  # used twice: 2
    assert tree.evict(1).tolist() == [1]  # used once: the clock is 1 from now on
    tree.unlock(tree.insert(RadixKey(Sequence(2, [2, 2]), 2), array("i", [2]))[0])  # 1 + 1
    assert evicted_in_order(tree) == [[0], [2]]


@pytest.mark.parametrize("policy", ["arc", "s3fifo", "lru_k", "random", "sieve", "two_q"])
def test_a_policy_with_queues_of_its_own_chooses_among_the_leaves(policy):
    prompts = [[0, 0, *[i] * 6] for i in range(1, 5)]
    tree = tree_of(*prompts, policy=policy)
    assert isinstance(tree.leaves, PolicyLeaves)
    expected = [node.blocks.tolist() for node in tree.leaves]
    assert sorted(expected) == [[1, 2, 3], [5, 6, 7], [9, 10, 11], [13, 14, 15]]
    order = evicted_in_order(tree)
    assert order == [*expected, [0]]


class Deepest(PriorityPolicy):
    name = "deepest"

    @staticmethod
    def priority(block):
        return -block.depth


class Stateful(LRU):
    """An LRU that overrides what a number cannot say."""

    name = "stateful"
    compilable = False


class NotANumber(PriorityPolicy):
    name = "nan"

    @staticmethod
    def priority(block):
        return float("nan")


def test_a_users_policy_ranks_the_leaves_too():
    tree = RadixTree(2, Deepest(), 100)
    for i, length in enumerate([4, 8, 2]):
        key = RadixKey(Sequence(i, [i] * length), 2)
        tree.unlock(tree.insert(key, array("i", range(10 * i, 10 * i + length // 2)))[0])
    assert evicted_in_order(tree) == [[10, 11, 12, 13], [0, 1], [20]]
    assert isinstance(RadixTree(2, Stateful(), 9).leaves, PolicyLeaves)
    tree = RadixTree(2, NotANumber(), 100)
    node, _ = tree.insert(RadixKey(Sequence(0, [1, 1]), 2), array("i", [7]))
    with pytest.raises(ValueError, match="'nan': the priority of block 7 is nan"):
        tree.unlock(node)


def test_ghosts_are_recognised_however_a_prompt_was_split():
    """ARC sends content that comes back soon after its eviction to its second list."""
    tree = RadixTree(2, make_policy("arc"), 4)
    prompt = Sequence(0, [1, 1, 2, 2])
    tree.unlock(tree.insert(RadixKey(prompt, 2), array("i", [0, 1]))[0])
    tree.unlock(tree.insert(RadixKey(Sequence(1, [9, 9]), 2), array("i", [2]))[0])
    tree.unlock(tree.lock(match(tree, [9, 9])))
    assert tree.evict(2).tolist() == [0, 1]
    policy = tree.policy
    assert len(policy._b1) == 1
    node, _ = tree.insert(RadixKey(prompt, 2), array("i", [0]))  # its first block only
    assert len(policy._b1) == 1
    tree.unlock(tree.insert(RadixKey(prompt, 2), array("i", [3]), node, 1)[0])
    assert len(policy._b1) == 0
    assert 3 in policy._t2


@pytest.mark.parametrize("count", [-1, -100, 4])
def test_a_bad_number_of_blocks_to_evict_changes_nothing(count):
    tree = tree_of([1, 1, 2, 2, 3, 3])
    with pytest.raises(ValueError, match=f"count={count}: 3 blocks are evictable"):
        tree.evict(count)
    assert shape(tree) == [(0, [0, 1, 2], 0)]
    assert tree.evict(0).tolist() == []


@pytest.mark.parametrize("damage", ["evictable", "lock", "blocks", "parent", "leaf", "depth"])
def test_check_invariants_sees_a_damaged_tree(damage):
    tree = tree_of([1, 1, 2, 2], [1, 1, 3, 3])
    (parent,) = tree.root.children.values()
    child = next(iter(parent.children.values()))
    if damage == "evictable":
        tree.num_evictable += 1
    elif damage == "lock":
        child.lock_ref += 1
    elif damage == "blocks":
        child.blocks = child.blocks[:0]
    elif damage == "parent":
        child.parent = tree.root
    elif damage == "leaf":
        tree.leaves.remove(child)
    else:
        child.depth += 1
    with pytest.raises(AssertionError):
        tree.check_invariants()


# Extra keys -------------------------------------------------------------------------------------


def test_a_lora_name_that_equals_a_salt_shares_nothing():
    manager = manager_of()
    for i, keys in enumerate([{"lora_name": "a"}, {"cache_salt": "a"}, {}]):
        used(manager, i, range(9), **keys)
    assert [manager.stats.hit_tokens, len(shape(manager.tree))] == [0, 3]
    assert manager.get_computed_blocks(Sequence(9, range(9), cache_salt="a")) == ([3, 4], 8)
    assert manager.get_computed_blocks(Sequence(9, range(9))) == ([6, 7], 8)


def test_worked_example_of_an_image():
    text = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551]
    prompt = [*text, *[10] * 41, 4]
    manager = manager_of(20, 16)
    cat, dog, cat_again = (
        Sequence(i, prompt, mm_inputs=[(image, 8, 41)])
        for i, image in enumerate(["cat", "dog", "cat"])
    )
    assert manager.allocate(cat) == 0
    assert manager.block_table(cat) == [0, 1, 2, 3]
    assert shape(manager.tree) == [(0, [0, 1, 2], 1)]
    assert manager.allocate(dog) == 0
    assert manager.allocate(cat_again) == 48
    assert manager.allocate(Sequence(3, prompt)) == 0
    manager.check_invariants()


def test_prompts_part_where_their_images_begin():
    manager = manager_of(40, 2)
    tokens = [5] * 20
    one = {"mm_inputs": [("cat", 7, 3), ("dog", 13, 4)]}
    used(manager, 0, tokens, **one)
    assert [(depth, len(blocks)) for depth, blocks, _ in shape(manager.tree)] == [
        (0, 3), (3, 3), (6, 4),
    ]  # fmt: skip
    assert cached(manager, tokens, **one) == 20
    assert cached(manager, tokens) == 6
    assert cached(manager, tokens, mm_inputs=[("cat", 7, 3)]) == 12
    assert cached(manager, tokens, mm_inputs=[("cat", 7, 3), ("cow", 13, 4)]) == 12
    assert cached(manager, tokens, mm_inputs=[("cat", 7, 3), ("dog", 12, 4)]) == 12
    assert cached(manager, tokens, mm_inputs=[("cat", 7, 4), ("dog", 13, 4)]) == 6
    assert cached(manager, tokens, mm_inputs=[("cat", 9, 3), ("dog", 13, 4)]) == 6
    used(manager, 1, tokens)
    assert cached(manager, tokens) == 20
    assert cached(manager, tokens, **one) == 20


# The manager ------------------------------------------------------------------------------------


def test_a_prompt_shares_the_tree_and_its_answer_enters_when_it_is_freed():
    manager = manager_of()
    a = started(manager, "a", range(6))
    assert manager.block_table(a) == [0, 1]
    assert shape(manager.tree) == [(0, [0], 1)]
    assert grow(manager, a, 6, 7, 8) == []
    assert manager.block_table(a) == [0, 1, 2]
    b = Sequence("b", range(9))
    assert manager.allocate(b) == 4
    assert manager.block_table(b) == [0, 3, 4]
    manager.free(a)  # its second block is in the tree by now, with the one of b
    assert shape(manager.tree) == [(0, [0], 1), (1, [3], 1)]
    assert manager.num_free_blocks == 7
    manager.free(b)
    assert cached(manager, range(8)) == 8
    assert manager.num_free_blocks == 10


def test_prompts_of_the_same_step_share_their_blocks():
    manager = manager_of()
    twins = [started(manager, i, range(9)) for i in range(3)]
    assert [seq.num_cached_tokens for seq in twins] == [0, 8, 8]
    assert [manager.block_table(seq) for seq in twins] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]


def test_chunked_prefill_caches_what_is_scheduled_and_no_more():
    manager = manager_of()
    seq = Sequence(0, range(14))
    sizes = []
    for count in (3, 3, 7, 1):
        assert manager.allocate_slots(seq, count) == []
        manager.check_invariants()
        sizes.append((manager.block_table(seq), cached(manager, range(14))))
    assert sizes == [([0], 0), ([0, 1], 4), ([0, 1, 2, 3], 12), ([0, 1, 2, 3], 12)]
    assert seq.num_computed_tokens == 14


def test_chunks_that_another_sequence_has_computed_meanwhile_are_kept_twice():
    manager = manager_of()
    a, b = Sequence("a", range(12)), Sequence("b", range(12))
    for seq in (a, b):
        manager.allocate_slots(seq, 4)
    for seq in (a, b, a, b):
        manager.allocate_slots(seq, 4)
        manager.check_invariants()
    assert manager.block_table(a) == [0, 2, 4]
    assert manager.block_table(b) == [1, 3, 5]
    manager.free(b)
    manager.check_invariants()
    assert manager.num_free_blocks == 7
    manager.free(a)
    assert cached(manager, range(12)) == 12


def test_a_first_chunk_behind_a_cached_prefix():
    manager = manager_of()
    used(manager, 0, range(9))
    seq = Sequence(1, [*range(8), *range(50, 60)])
    blocks, num_cached = manager.get_computed_blocks(seq)
    assert (blocks, num_cached) == ([0, 1], 8)
    for stale in ([1, 0], [0, 9], [0, 1, 2], [1]):
        with pytest.raises(ValueError, match="computed_blocks"):
            manager.allocate_slots(seq, 3, stale)
    manager.allocate_slots(seq, 3, [0])
    assert manager.block_table(seq)[0] == 0
    assert (seq.num_cached_tokens, seq.num_computed_tokens) == (4, 7)
    with pytest.raises(ValueError, match="in front of its first chunk"):
        manager.allocate_slots(seq, 3, blocks)
    manager.check_invariants()


def test_lookahead_slots_stay_with_their_sequence():
    manager = manager_of()
    seq = Sequence(0, range(6))
    manager.allocate_slots(seq, 6, num_lookahead_tokens=4)
    assert manager.block_table(seq) == [0, 1, 2]
    child = seq.fork(1)
    manager.fork(seq, child)
    manager.check_invariants()
    assert manager.block_table(child) == [0, 1]
    manager.free(child)
    assert grow(manager, seq, 6, 7, 8) == []
    assert manager.block_table(seq) == [0, 1, 2]
    manager.free(seq)
    assert manager.num_free_blocks == 10


def test_worked_example_of_parallel_sampling():
    manager = manager_of()
    one = started(manager, "one", range(6))
    other = one.fork("other")
    manager.fork(one, other)
    manager.check_invariants()
    assert manager.block_table(other) == manager.block_table(one) == [0, 1]
    assert shape(manager.tree) == [(0, [0], 2)]
    assert grow(manager, other, 77) == [(1, 2)]
    assert grow(manager, one, 78) == []
    assert manager.block_table(one) == [0, 1]
    assert manager.stats.copied_blocks == 1


def test_parallel_sampling_of_a_prompt_that_fills_its_blocks_copies_nothing():
    manager = manager_of()
    one = started(manager, "one", range(8))
    other = one.fork("other")
    manager.fork(one, other)
    assert grow(manager, one, 8) == grow(manager, other, 9) == []
    assert manager.block_table(one)[:2] == manager.block_table(other)[:2] == [0, 1]


def test_the_last_holder_of_a_shared_block_writes_in_place_and_brings_it_into_the_tree():
    manager = manager_of()
    seqs = [started(manager, 0, range(6))]
    grow(manager, seqs[0], 6, 7, 8)  # blocks 1, full, and 2 are not in the tree
    for i in (1, 2):
        seqs.append(seqs[0].fork(i))
        manager.fork(seqs[0], seqs[i])
    copies = [grow(manager, seq, 10 + seq.seq_id) for seq in seqs]
    assert copies == [[(2, 3)], [(2, 4)], []]
    for seq, num_cached in zip(seqs, (4, 4, 8), strict=True):
        manager.free(seq)
        manager.check_invariants()
        assert cached(manager, range(8)) == num_cached
    assert manager.num_free_blocks == 10


def test_reset_needs_all_sequences_gone():
    manager = manager_of()
    seq = started(manager, 0, range(9))
    before = state_of(manager, seq)
    assert not manager.reset_prefix_cache()
    assert state_of(manager, seq) == before
    manager.free(seq)
    assert manager.reset_prefix_cache()
    manager.check_invariants()
    assert manager.num_free_blocks == 10
    assert manager.allocate(seq) == 0
    assert manager.stats.evicted_blocks == 0


def test_without_prefix_caching_nothing_is_found():
    manager = manager_of(enable_prefix_caching=False)
    for i in range(2):
        assert manager.allocate(Sequence(i, range(9))) == 0
    assert cached(manager, range(9)) == 0
    manager.free(Sequence(0, range(9)))
    manager.check_invariants()
    assert shape(manager.tree) == []


def test_what_the_design_does_not_offer_names_it():
    manager = manager_of()
    with pytest.raises(UnsupportedByDesign, match="'radix' does not offer swap_out"):
        manager.swap_out(started(manager, 0, range(3)))
    with pytest.raises(UnsupportedByDesign, match=r"a hash_algorithm \('sha256'\)"):
        manager_of(hash_algorithm="sha256")
    with pytest.raises(ValueError, match="'belady' needs the future"):
        manager_of(policy="belady")


def test_stats_count_the_allocations():
    manager = manager_of(4)
    used(manager, 0, range(9))
    used(manager, 1, range(9))
    used(manager, 2, range(50, 63))
    stats = manager.stats
    assert (stats.num_allocations, stats.queried_tokens, stats.hit_tokens) == (3, 31, 8)
    assert (stats.queried_blocks, stats.hit_blocks) == (2 + 2 + 3, 2)
    assert (stats.allocated_blocks, stats.evicted_blocks, stats.copied_blocks) == (8, 2, 0)


@pytest.mark.parametrize("damage", ["free", "fresh", "extra", "table", "lock"])
def test_check_invariants_sees_damage(damage):
    manager = manager_of()
    seq = started(manager, 0, range(9))
    table = manager._tables[0]
    if damage == "free":
        manager._free.append(0)
    elif damage == "fresh":
        manager._num_fresh -= 1
    elif damage == "extra":
        manager._extra_users[2] = 1
    elif damage == "table":
        table.blocks = table.blocks[::-1]
    else:
        manager.tree.share(table.node)
    with pytest.raises(AssertionError):
        manager.check_invariants()
    assert seq.num_computed_tokens == 9


# Faults seen in real systems --------------------------------------------------------------------


def test_no_stale_content_on_a_reused_block():
    manager = manager_of(2)
    used(manager, 0, range(8))
    partial = started(manager, 1, [7, 7, 7, 7, 7])
    assert cached(manager, range(8)) == 0
    manager.free(partial)
    assert cached(manager, range(8)) == 0
    assert cached(manager, [7] * 4) == 4


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "arc", "s3fifo"])
def test_hits_are_untouched_when_the_allocation_fails(policy):
    manager = manager_of(5, policy=policy)
    used(manager, 0, range(8))
    holder = started(manager, 1, [50] * 8)
    before = state_of(manager, holder)
    wanting = Sequence(2, [*range(8), *range(60, 72)])
    assert manager.can_allocate(wanting) is AllocStatus.LATER
    with pytest.raises(OutOfBlocks):
        manager.allocate(wanting)
    assert state_of(manager, holder) == before
    assert (wanting.num_cached_tokens, wanting.num_computed_tokens) == (0, 0)
    manager.free(holder)
    assert manager.allocate(wanting) == 8


def test_a_hit_in_an_unlocked_node_is_not_counted_as_free_capacity_too():
    manager = manager_of(4)
    used(manager, 0, range(8))
    started(manager, 1, [50])
    wanting = Sequence(2, [*range(8), *range(60, 68)])  # 2 hits, 2 new; but 3 blocks are free
    assert manager.num_free_blocks == 3
    assert manager.can_allocate(wanting) is AllocStatus.LATER
    with pytest.raises(OutOfBlocks, match="4 blocks are needed, 3 are free"):
        manager.allocate(wanting)
    shorter = Sequence(3, [*range(8), 60])
    assert manager.can_allocate(shorter) is AllocStatus.OK
    assert manager.allocate(shorter) == 8


def test_hits_that_others_hold_need_no_free_block():
    manager = manager_of(4)
    started(manager, 0, range(12))
    wanting = Sequence(1, [*range(12), 60])
    assert manager.can_allocate(wanting) is AllocStatus.OK
    assert manager.allocate(wanting) == 12
    assert manager.num_free_blocks == 0
    assert manager.can_allocate(Sequence(2, range(12))) is AllocStatus.LATER
    assert manager.can_allocate(Sequence(2, range(17))) is AllocStatus.NEVER


def evicted_after_hits(policy: str) -> set[str]:
    """A is computed and hit twice, then B is computed, then one of both has to go."""
    manager = manager_of(3, 2, policy=policy)
    a, b, c = ([i, i, 0] for i in range(3))
    for i, prompt in enumerate([a, a, a, b, c]):
        seq = Sequence(i, prompt)
        assert manager.allocate(seq) == (2 if i in (1, 2) else 0)
        manager.free(seq)
    return {name for name, prompt in (("a", a), ("b", b)) if not cached(manager, prompt[:2])}


def test_hit_counters_are_incremented():
    assert evicted_after_hits("lfu") == {"b"}  # a was used three times, though longer ago


def test_metadata_of_a_hit_is_kept_when_it_is_revived():
    assert evicted_after_hits("fifo") == {"a"}  # a came in first, though it was used since


def test_both_parts_of_a_split_node_keep_its_history():
    tree = tree_of([1, 1, 2, 2], [8, 8], [9, 9], policy="fifo")
    tree.unlock(tree.lock(match(tree, [1, 1])))  # both parts came in first
    assert evicted_in_order(tree) == [[1], [0], [2], [3]]
    tree = tree_of([1, 1, 2, 2], [8, 8], [8, 8], policy="lfu")
    for _ in range(3):
        tree.unlock(tree.lock(match(tree, [1, 1, 2, 2])))
    tree.unlock(tree.lock(match(tree, [1, 1])))
    assert evicted_in_order(tree) == [[2], [1], [0]]  # used 2, 4 and 5 times


def test_a_block_is_not_free_twice():
    manager = manager_of()
    seq = started(manager, 0, range(9))
    manager.free(seq)
    before = state_of(manager)
    with pytest.raises(ValueError, match="sequence 0 holds no blocks"):
        manager.free(seq)
    assert state_of(manager) == before


def test_evictable_blocks_are_counted_once():
    manager = manager_of(4)
    free = [manager.num_free_blocks]
    seqs = [Sequence(i, [*range(4), 10 + i]) for i in range(3)]
    for seq in seqs:
        manager.allocate(seq)
        free.append(manager.num_free_blocks)
    for seq in seqs:
        manager.free(seq)
        free.append(manager.num_free_blocks)
    assert free == [4, 2, 1, 0, 1, 2, 4]
    assert manager.tree.num_evictable == 1


def test_tokens_are_compared_beyond_the_first_block():
    manager = manager_of(20, 4)
    used(manager, 0, range(16))
    for position in range(16):
        tokens = list(range(16))
        tokens[position] = 99
        assert cached(manager, tokens) == position // 4 * 4


def test_neither_locks_nor_evictions_scan_the_leaves():
    """With a scan a lock or an eviction would look at 20,000 leaves: 8e8 visits, minutes."""
    tree = RadixTree(1, make_policy("lru"), 20_000)
    for i in range(20_000):
        tree.unlock(tree.insert(RadixKey(Sequence(i, [i]), 1), array("i", [i]))[0])
    began = time.perf_counter()
    for i in range(20_000):
        tree.unlock(tree.lock(match(tree, [(i * 7919) % 20_000])))
    for i in range(20_000):
        assert tree.evict(1).tolist() == [(i * 7919) % 20_000]
    assert time.perf_counter() - began < 5


def test_a_policy_is_told_the_history_of_a_node():
    """Counted in unlocks, from the first; both parts of a split node keep it."""
    seen = []

    class Told(PriorityPolicy):
        name = "told"

        @staticmethod
        def priority(block):
            seen.append(block)
            return block.accessed

    tree = RadixTree(2, Told(), 10)
    node, _ = tree.insert(RadixKey(Sequence(0, [1, 1, 2, 2, 3, 3]), 2), array("i", [7, 8, 9]))
    tree.unlock(node)
    assert [(b.block, b.accesses, b.inserted, b.accessed, b.depth) for b in seen] == [
        (9, 1, 1, 1, 2)
    ]
    other, _ = tree.insert(RadixKey(Sequence(1, [1, 1, 4, 4]), 2), array("i", [6, 5]))
    tree.unlock(other)
    tree.unlock(tree.lock(tree.match_prefix(RadixKey(Sequence(2, [1, 1, 2, 2, 3, 3]), 2), 3)))
    assert [(b.block, b.accesses, b.inserted, b.accessed) for b in seen[1:]] == [
        (5, 1, 2, 2), (9, 2, 1, 3),
    ]  # fmt: skip


def test_stale_entries_of_the_heap_are_dropped():
    tree = tree_of([1, 1], [2, 2])
    for _ in range(1000):
        tree.unlock(tree.lock(match(tree, [1, 1])))
    assert len(tree.leaves._heap) <= 2 * 2 + 64
    assert evicted_in_order(tree) == [[1], [0]]


def test_preempting_and_resuming_makes_progress():
    manager = manager_of(6, 2)
    waiting = [Sequence(i, [i, i, 9]) for i in range(4)]
    running, finished = [], []
    for _ in range(200):
        while waiting and manager.can_allocate(waiting[0]) is AllocStatus.OK:
            manager.allocate(waiting[0])
            running.append(waiting.pop(0))
        for seq in list(running):
            if seq not in running:
                continue
            seq.append_token(seq.seq_id)
            while not manager.can_append(seq):
                victim = running.pop()
                manager.free(victim)
                waiting.insert(0, victim)
                if victim is seq:
                    break
            else:
                manager.append(seq)
                if seq.num_tokens >= 9:
                    manager.free(seq)
                    running.remove(seq)
                    finished.append(seq.seq_id)
            manager.check_invariants()
    assert sorted(finished) == [0, 1, 2, 3]
    assert manager.num_free_blocks == 6


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_whole_cached_prompt_leaves_a_token_to_compute(block_size):
    manager = manager_of(20, block_size)
    used(manager, 0, range(8))
    seq = Sequence(1, range(8))
    assert manager.allocate(seq) == 8 - block_size
    manager.check_invariants()
    assert grow(manager, seq, 8) == []
    manager.free(seq)
    manager.check_invariants()
    assert manager.num_free_blocks == 20


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_block_boundaries(block_size, length):
    manager = manager_of(40, block_size)
    seq = started(manager, 0, range(length))
    for token in range(length, length + 6):
        assert len(manager.block_table(seq)) == -(-seq.num_tokens // block_size)
        assert grow(manager, seq, token) == []
    manager.free(seq)
    at_once = Sequence(1, seq.token_ids)
    assert manager.allocate(at_once) == (length + 5) // block_size * block_size


@pytest.mark.parametrize("num_new_tokens", [-1, -100, 0, 7])
def test_a_bad_number_of_tokens_changes_nothing(num_new_tokens):
    manager = manager_of()
    seq, new = Sequence(0, range(14)), Sequence(1, range(6))
    manager.allocate_slots(seq, 8)
    before = state_of(manager, seq)
    for target in (seq, new):
        with pytest.raises(ValueError, match=f"num_new_tokens={num_new_tokens}"):
            manager.allocate_slots(target, num_new_tokens)
        with pytest.raises(ValueError, match="num_lookahead_tokens=-1"):
            manager.allocate_slots(target, 1, num_lookahead_tokens=-1)
    assert state_of(manager, seq) == before


def test_append_that_finds_no_block_for_the_copy_changes_nothing():
    manager = manager_of(2)
    one = started(manager, 0, range(6))
    other = one.fork(1)
    manager.fork(one, other)
    other.append_token(9)
    before = state_of(manager, one, other)
    assert not manager.can_append(other)
    with pytest.raises(OutOfBlocks, match="1 blocks are needed, 0 are free"):
        manager.append(other)
    assert state_of(manager, one, other) == before
    manager.free(one)
    assert manager.append(other) == []
