from __future__ import annotations

import pytest

from cache import OutOfBlocks, make_policy
from cache.block_pool import BlockPool
from cache.content_index import ContentIndex
from cache.policies.base import EvictionPolicy
from cache.policies.lru import LRU

A, B, C, D, E, F = (bytes([i]) * 16 for i in range(6))


class Recorder(LRU):
    """Writes down what the pool tells a policy."""

    name = "recorder"

    def start(self, capacity, next_use=None):
        super().start(capacity, next_use)
        self.calls = []

    def miss(self, key):
        self.calls.append(("miss", key))

    def insert(self, block, key, parent, depth):
        self.calls.append(("insert", block, key, parent, depth))

    def pin_many(self, blocks):
        self.calls.append(("pin", *blocks))
        super().pin_many(blocks)

    def release_many(self, blocks):
        blocks = list(blocks)
        self.calls.append(("release", *blocks))
        super().release_many(blocks)

    def evict_many(self, count):
        victims = super().evict_many(count)
        self.calls.append(("evict", *victims))
        return victims


def pool_of(num_blocks: int, policy: EvictionPolicy | None = None, **options) -> BlockPool:
    return BlockPool(num_blocks, LRU() if policy is None else policy, **options)


class Table:
    """A sequence's blocks: ``hits`` that are cached already, then none yet."""

    def __init__(self, hashes, hits=()):
        self.hashes = hashes
        self.blocks = list(hits)
        self.num_cached_blocks = len(self.blocks)


def cached(pool: BlockPool, *hashes: bytes) -> list[int]:
    """Blocks in use with the content ``hashes``."""
    table = Table(hashes)
    pool.extend(table, len(hashes), len(hashes))
    return table.blocks


def test_blocks_never_used_come_first_and_in_order():
    pool = pool_of(5)
    pool.free(cached(pool, A, B))
    assert pool.allocate(2) == [2, 3]
    assert list(pool.free_blocks()) == [4, 1, 0]
    assert pool.allocate(3) == [4, 1, 0]
    assert pool.num_evicted == 2
    assert pool.num_allocated == 7


def test_uncached_blocks_may_wait_in_line_with_the_others():
    pool = pool_of(4, queue_uncached=True)
    pool.free(cached(pool, A))
    pool.free(pool.allocate(3))
    assert list(pool.free_blocks()) == [0, 3, 2, 1]
    pool.check_invariants()


def test_uncached_blocks_go_first_those_freed_last_before_the_others():
    pool = pool_of(6)
    first, second, third = cached(pool, A), pool.allocate(2), pool.allocate(2)
    for blocks in (first, second, third):
        pool.free(blocks)
    assert list(pool.free_blocks()) == [4, 3, 2, 1, 5, 0]
    pool.check_invariants()
    assert pool.allocate(3) == [4, 3, 2]
    assert pool.lookup([A]) == [0]
    assert list(pool.free_blocks()) == [1, 5, 0]
    assert pool.allocate(3) == [1, 5, 0]
    assert pool.lookup([A]) == []
    assert pool.num_evicted == 1


@pytest.mark.parametrize("policy", [LRU, Recorder])
def test_a_failed_allocation_changes_nothing(policy):
    pool = pool_of(4, policy())
    pool.free(cached(pool, A, B))
    cached(pool, C)
    before = pool.ref_counts[:], pool.block_hashes[:], list(pool.free_blocks())
    table = Table([D, E, F, A])
    for call in (lambda: pool.allocate(4), lambda: pool.extend(table, 4, 4)):
        with pytest.raises(OutOfBlocks) as error:
            call()
        assert (error.value.needed, error.value.free) == (4, 3)
        assert before == (pool.ref_counts, pool.block_hashes, list(pool.free_blocks()))
        assert (pool.num_allocated, table.blocks, table.num_cached_blocks) == (3, [], 0)
        pool.check_invariants()


@pytest.mark.parametrize("policy", [LRU, Recorder])
def test_a_table_is_extended_and_cached_as_far_as_it_is_full(policy):
    pool = pool_of(6, policy())
    table = Table([A, B, C, D])
    pool.extend(table, 2, 1)
    assert (table.blocks, table.num_cached_blocks) == ([0, 1], 1)
    pool.extend(table, -3, 1)  # has more than it needs
    pool.extend(table, 0, 2)
    assert (table.blocks, pool.lookup(table.hashes)) == ([0, 1], [0, 1])
    pool.extend(table, 1, 2)
    pool.extend(table, 2, 4)  # one that it has, one that it gets, and one not to be cached
    assert (table.blocks, pool.lookup(table.hashes)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3])
    assert table.num_cached_blocks == 4
    assert pool.num_allocated == 5
    pool.check_invariants()


def test_the_oldest_of_several_blocks_with_one_content_is_found_while_it_lasts():
    pool = pool_of(3)
    copies = [cached(pool, A)[0] for _ in range(3)]
    assert pool.lookup([A]) == copies[:1]
    pool.free(copies[1:2])
    pool.free(copies[:1])
    pool.free(copies[2:])
    pool.check_invariants()
    assert pool.allocate(1) == [1]  # not the first of the duplicates
    assert pool.lookup([A]) == [0]
    pool.check_invariants()
    assert pool.allocate(1) == [0]
    assert pool.lookup([A]) == [2]
    pool.check_invariants()
    assert pool.allocate(1) == [2]
    assert pool.lookup([A]) == []
    pool.check_invariants()


def test_what_a_policy_is_told():
    policy = Recorder()
    pool = pool_of(3, policy)
    blocks = cached(pool, A, B)
    assert policy.calls == [
        ("miss", A),
        ("insert", 0, A, None, 0),
        ("miss", B),
        ("insert", 1, B, A, 1),
    ]
    policy.calls.clear()
    table = Table([A, B, C], blocks)
    pool.extend(table, 1, 2)
    assert policy.calls == []
    pool.cache(table, 3)
    assert policy.calls == [("miss", C), ("insert", 2, C, B, 2)]
    policy.calls.clear()
    pool.free(table.blocks)
    assert policy.calls == [("release", 2, 1, 0)]
    policy.calls.clear()
    pool.revive([0])
    pool.extend(Table([A, D], [0]), 1, 2)  # A is there; D takes the place of C
    assert policy.calls == [("pin", 0), ("miss", D), ("evict", 2), ("insert", 2, D, A, 1)]


def test_a_policy_never_knows_two_blocks_under_one_key():
    policy = Recorder()
    pool = pool_of(4, policy)
    for _ in range(2):
        cached(pool, A, B)
    keys = [call[2] for call in policy.calls if call[0] == "insert"]
    assert keys == [A, B, (A, 2), (B, 3)]
    assert [call[1] for call in policy.calls if call[0] == "miss"] == [A, B]
    assert [call[3:] for call in policy.calls if call[0] == "insert"] == [(None, 0), (A, 1)] * 2


@pytest.mark.parametrize("again_at_once", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_duplicates_of_a_whole_prompt(at_once, again_at_once):
    policy = Recorder()
    pool = BlockPool(6, policy, index=ContentIndex(6))

    def prompt(at_once):
        if at_once:
            return cached(pool, A, B, C)
        table = Table([A, B, C])
        pool.extend(table, 3, 0)
        pool.cache(table, 3)
        return table.blocks

    prompt(at_once)
    again = prompt(again_at_once)
    assert again == [3, 4, 5]
    assert [call for call in policy.calls if call[0] == "miss"] == [
        ("miss", A),
        ("miss", B),
        ("miss", C),
    ]
    assert policy.calls[-3:] == [
        ("insert", 3, (A, 3), None, 0),
        ("insert", 4, (B, 4), A, 1),
        ("insert", 5, (C, 5), B, 2),
    ]
    pool.check_invariants()
    assert pool.lookup([A, B, C]) == [0, 1, 2]


def test_a_policy_that_ignores_misses_is_told_the_parents_too():
    class Deaf(Recorder):
        miss = EvictionPolicy.miss

    policy = Deaf()
    cached(pool_of(3, policy), A, B, C)
    assert policy.calls == [
        ("insert", 0, A, None, 0),
        ("insert", 1, B, A, 1),
        ("insert", 2, C, B, 2),
    ]


def test_a_policy_that_gets_blocks_without_content_is_told_of_them_first():
    policy = Recorder()
    pool = pool_of(2, policy, queue_uncached=True)
    pool.free(pool.allocate(2))
    assert policy.calls == [
        ("insert", 1, (None, 1), None, 0),
        ("insert", 0, (None, 0), None, 0),
        ("release", 1, 0),
    ]


def test_a_policy_without_memory_evicts_in_one_call():
    policy = LRU()
    pool = pool_of(4, policy)
    pool.free(cached(pool, A, B, C, D))
    counts = []
    evict_many = policy.evict_many
    policy.evict_many = lambda count: counts.append(count) or evict_many(count)
    cached(pool, E, F)
    assert counts == [2]


@pytest.mark.parametrize(
    ("victims", "wrong"),
    [
        ([0], "0"),  # in use
        ([3], "3"),  # on the pool's own stack
        ([4], "4"),
        ([-1], "-1"),
        ([None], "None"),
        ([2, 2], "2"),
    ],
)
def test_a_policy_that_gives_up_what_it_must_not_is_named(victims, wrong):
    class Careless(LRU):
        pass

    policy = Careless()
    pool = pool_of(4, policy)
    pool.free(cached(pool, A, B, C, D)[1:])
    pool.free(pool.allocate(1))
    policy.evict_many = lambda count: victims
    with pytest.raises(RuntimeError, match=rf"'Careless': evict\(\) gave {wrong}, not a released"):
        pool.allocate(3)


@pytest.mark.parametrize("policy", ["lru", "fifo", "arc"])
def test_reset_forgets_everything_once_no_block_is_in_use(policy):
    pool = pool_of(4, make_policy(policy))
    blocks = cached(pool, A, B, C)
    again = cached(pool, A)
    pool.free(blocks)
    state = pool.block_hashes[:], list(pool.free_blocks())
    assert not pool.reset_prefix_cache()
    assert state == (pool.block_hashes, list(pool.free_blocks()))
    pool.free(again)
    order = list(pool.free_blocks())
    assert pool.reset_prefix_cache()
    assert pool.lookup([A]) == []
    assert list(pool.free_blocks()) == order
    pool.check_invariants()
    assert cached(pool, A, B, C, D) == order
    assert pool.num_evicted == 0
    pool.check_invariants()


def test_a_negative_count_is_refused():
    pool = pool_of(2)
    with pytest.raises(ValueError, match="count=-1"):
        pool.allocate(-1)
    assert pool.num_free_blocks == 2


DAMAGES = {
    "ref_count": lambda pool: pool.ref_counts.__setitem__(0, 0),
    "negative_ref_count": lambda pool: pool.ref_counts.__setitem__(3, -1),
    "hash_of_a_free_block": lambda pool: pool._index.add([3], [D], None, 0),
    "hash_of_a_fresh_block": lambda pool: pool._index.add([5], [D], None, 0),
    "hash_of_a_released_block": lambda pool: pool._index.remove([1]),
    "index": lambda pool: pool._index._hashes.__setitem__(0, None),
    "free_twice": lambda pool: pool._free.append(pool._free[0]),
    "lost_free_block": lambda pool: pool._free.pop(),
    "released_twice": lambda pool: pool.policy.release(1),
    "count_of_policy": lambda pool: setattr(pool.policy, "_num_released", 2),
    "uncached_in_policy": lambda pool: pool.policy.release(pool._free.pop()),
    "fresh_count": lambda pool: setattr(pool, "_num_fresh", -1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_check_invariants_sees(damage):
    pool = pool_of(6, LRU())
    (first,) = cached(pool, A)  # 0: in use and cached, with the duplicate 2
    released = cached(pool, B)  # 1: cached-free
    cached(pool, A)
    free = pool.allocate(2)  # 3 and 4: free; 5: fresh
    pool.free(released)
    pool.free(free)
    assert first == 0
    pool.check_invariants()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_invariants()


def test_content_that_nobody_can_evict_is_seen():
    pool = pool_of(3, queue_uncached=True)
    pool._index.add([2], [A], None, 0)
    with pytest.raises(AssertionError, match="block 2 has content that nobody can evict"):
        pool.check_invariants()
