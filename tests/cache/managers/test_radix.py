"""radix: the tree, the manager, and faults of real systems."""

import functools
from array import array

import manager_helpers
import pytest
from manager_helpers import lines_run

from cache import PriorityPolicy, Sequence, make_policy
from cache.managers.radix_leaves import PolicyLeaves, RankedLeaves
from cache.managers.radix_tree import RadixKey, RadixTree
from cache.policies.lru import LRU

manager_of = functools.partial(manager_helpers.manager_of, "radix")


def compute(tree: RadixTree, prompt, *blocks: int) -> None:
    """Insert and unlock ``prompt``, stored in ``blocks``."""
    key = RadixKey(Sequence("computed", prompt), tree.block_size)
    tree.unlock(tree.insert(key, array("i", blocks))[0])
    tree.check_invariants()


def tree_of(*prompts, policy="lru") -> RadixTree:
    """A tree of ``prompts`` in blocks of two; block ids count up through them."""
    tree, first = RadixTree(2, make_policy(policy), 100), 0
    for prompt in prompts:
        compute(tree, prompt, *range(first, first + len(prompt) // 2))
        first += len(prompt) // 2
    return tree


def hit(tree: RadixTree, prompt) -> None:
    key = RadixKey(Sequence("hit", prompt), tree.block_size)
    tree.unlock(tree.lock(tree.match_prefix(key, len(prompt) // tree.block_size)))


def evicted_in_order(tree: RadixTree) -> list[list[int]]:
    order = []
    while tree.num_evictable:
        order.append(tree.evict(1).tolist())
        tree.check_invariants()
    return order


def test_leaves_are_evicted_by_age_and_parents_keep_theirs():
    tree = tree_of([1, 1, 2, 2], [1, 1, 3, 3], [5, 5], [6, 6])
    hit(tree, [5, 5])
    assert [node.blocks.tolist() for node in tree.leaves] == [[1], [3], [5], [4]]
    # The parent [0] was accessed with its second child: before 5 and 6.
    assert evicted_in_order(tree) == [[1], [3], [0], [5], [4]]


@pytest.mark.parametrize(
    ("policy", "order"), [("lru", "210"), ("mru", "012"), ("fifo", "012"), ("lfu", "120")]
)
def test_the_policy_chooses_among_the_leaves(policy, order):
    tree = tree_of([0, 0], [1, 1], [2, 2], policy=policy)
    for i in (0, 2, 0, 2, 1, 0):  # used 4, 2 and 3 times with the insert
        hit(tree, [i, i])
    assert isinstance(tree.leaves, RankedLeaves)
    assert evicted_in_order(tree) == [[int(block)] for block in order]


def test_gdsf_ages_the_leaves_with_its_clock():
    tree = tree_of([0, 0], [1, 1], policy="gdsf")
    hit(tree, [0, 0])  # used twice: 2
    assert tree.evict(1).tolist() == [1]  # used once: the clock is 1 from now on
    compute(tree, [2, 2], 2)  # 1 + 1
    assert evicted_in_order(tree) == [[0], [2]]


@pytest.mark.parametrize("policy", ["arc", "s3fifo", "lru_k", "random", "sieve", "two_q"])
def test_a_policy_with_queues_of_its_own_chooses_among_the_leaves(policy):
    prompts = [[0, 0, *[i] * 6] for i in range(1, 5)]
    tree = tree_of(*prompts, policy=policy)
    assert isinstance(tree.leaves, PolicyLeaves)
    expected = [node.blocks.tolist() for node in tree.leaves]
    assert sorted(expected) == [[1, 2, 3], [5, 6, 7], [9, 10, 11], [13, 14, 15]]
    assert evicted_in_order(tree) == [*expected, [0]]


class Deepest(PriorityPolicy):
    name = "deepest"

    @staticmethod
    def priority(block):
        return -block.depth


class Stateful(LRU):
    """An LRU that is no plain function of a block's history."""

    name = "stateful"
    compilable = False


def test_a_users_policy_ranks_the_leaves_too():
    tree = RadixTree(2, Deepest(), 100)
    for i, length in enumerate([4, 8, 2]):
        compute(tree, [i] * length, *range(10 * i, 10 * i + length // 2))
    assert evicted_in_order(tree) == [[10, 11, 12, 13], [0, 1], [20]]
    assert isinstance(RadixTree(2, Stateful(), 9).leaves, PolicyLeaves)


def test_a_policy_with_queues_sees_a_node_as_its_last_block():
    inserted, missed = [], []

    class Recorder(Stateful):
        def miss(self, key):
            missed.append(key)

        def insert(self, block, key, parent, depth):
            inserted.append((block, key, parent, depth))

    tree = RadixTree(2, Recorder(), 9)
    node, _ = tree.insert(RadixKey(Sequence(0, [1, 1, 2, 2]), 2), array("i", [7, 8]))
    tree.insert(RadixKey(Sequence(1, [1, 1, 2, 2, 3, 3]), 2), array("i", [9]), node, 2)
    compute(tree, [1, 1, 5, 5], 7, 3)
    assert [(block, depth) for block, _, _, depth in inserted] == [(8, 1), (9, 2), (7, 0), (3, 1)]
    keys = [key for _, key, _, _ in inserted]
    assert [parent for _, _, parent, _ in inserted] == [None, keys[0], None, keys[2]]
    assert missed == [keys[0], keys[1], keys[3]], "the upper part of a split node was there"


def test_ghosts_are_recognised_however_a_prompt_was_split():
    """ARC puts content that returns soon after its eviction into its second list."""
    tree = RadixTree(2, make_policy("arc"), 4)
    prompt = RadixKey(Sequence(0, [1, 1, 2, 2]), 2)
    compute(tree, [1, 1, 2, 2], 0, 1)
    compute(tree, [9, 9], 2)
    hit(tree, [9, 9])
    assert tree.evict(2).tolist() == [0, 1]
    policy = tree.policy
    assert len(policy._b1) == 1
    node, _ = tree.insert(prompt, array("i", [0]))  # its first block only
    assert len(policy._b1) == 1
    tree.unlock(tree.insert(prompt, array("i", [3]), node, 1)[0])
    assert len(policy._b1) == 0
    assert 3 in policy._t2


def test_neither_locks_nor_evictions_scan_the_leaves():

    def lines_per_leaf(num_leaves: int) -> float:
        tree = RadixTree(1, make_policy("lru"), num_leaves)
        for i in range(num_leaves):
            tree.unlock(tree.insert(RadixKey(Sequence(i, [i]), 1), array("i", [i]))[0])
        order = [i * 7919 % num_leaves for i in range(num_leaves)]

        def hit_and_evict() -> None:
            for leaf in order:
                hit(tree, [leaf])
            assert [tree.evict(1).tolist() for _ in order] == [[leaf] for leaf in order]

        return lines_run(hit_and_evict) / num_leaves

    assert lines_per_leaf(1_000) < 1.2 * lines_per_leaf(50)


def test_a_policy_gets_the_history_of_a_node():
    """Counted in unlocks, from the first; both parts of a split node keep it."""
    seen = []

    class Recorder(PriorityPolicy):
        name = "recorder"

        @staticmethod
        def priority(block):
            seen.append(block)
            return block.accessed

    tree = RadixTree(2, Recorder(), 10)
    compute(tree, [1, 1, 2, 2, 3, 3], 7, 8, 9)
    compute(tree, [1, 1, 4, 4], 6, 5)
    hit(tree, [1, 1, 2, 2, 3, 3])
    found = [(b.block, b.accesses, b.inserted, b.accessed, b.depth) for b in seen]
    assert found == [(9, 1, 1, 1, 2), (5, 1, 2, 2, 1), (9, 2, 1, 3, 2)]


def test_lfu_gives_up_the_node_accessed_longest_ago_among_equals():
    """SGLang ranks by (hit count, last access), whatever became evictable first."""
    tree = RadixTree(2, make_policy("lfu"), 10)
    compute(tree, [1, 1, 2, 2], 0, 1)
    compute(tree, [1, 1, 3, 3], 4, 2)  # [1, 1] is used twice and has two children
    compute(tree, [5, 5], 3)
    hit(tree, [5, 5])
    assert [list(tree.evict(1)) for _ in range(4)] == [[1], [2], [0], [3]]
