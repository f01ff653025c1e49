import pytest

from cache.blocks.pool import BlockPool
from cache.policies.base import EvictionPolicy
from cache.policies.lru import LRU

A, B, C, D, E, F = (bytes([i]) * 16 for i in range(6))


class Recorder(LRU):
    """Records the calls of the pool."""

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


def pool_of(num_blocks: int, policy: EvictionPolicy | None = None) -> BlockPool:
    counts = {"allocated_blocks": 0, "evicted_blocks": 0}
    return BlockPool(num_blocks, LRU() if policy is None else policy, counts)


def cached(pool: BlockPool, *hashes: bytes) -> list[int]:
    """Blocks in use with the content ``hashes``."""
    blocks: list[int] = []
    pool.extend(blocks, len(hashes), hashes, range(len(hashes)))
    return blocks


def test_calls_of_a_policy():
    policy = Recorder()
    pool = pool_of(3, policy)
    blocks = cached(pool, A, B)
    assert policy.calls == [
        ("miss", A), ("insert", 0, A, None, 0), ("miss", B), ("insert", 1, B, A, 1),
    ]  # fmt: skip
    policy.calls.clear()
    pool.extend(blocks, 3, [A, B, C], ())
    assert policy.calls == []
    pool.extend(blocks, 3, [A, B, C], (2,))
    assert blocks == [0, 1, 2]
    assert policy.calls == [("miss", C), ("insert", 2, C, B, 2)]
    policy.calls.clear()
    pool.free(blocks)
    assert policy.calls == [("release", 2, 1, 0)]
    policy.calls.clear()
    pool.share([0])
    pool.extend([0], 2, [A, D], (1,))  # A is there; D takes the place of C
    assert policy.calls == [("pin", 0), ("miss", D), ("evict", 2), ("insert", 2, D, A, 1)]


def test_keys_that_a_policy_holds_are_unique():
    policy = Recorder()
    pool = pool_of(4, policy)
    for _ in range(2):
        cached(pool, A, B)
    keys = [call[2] for call in policy.calls if call[0] == "insert"]
    assert keys == [A, B, (A, 2), (B, 3)]
    assert [call[1] for call in policy.calls if call[0] == "miss"] == [A, B]
    assert [call[3:] for call in policy.calls if call[0] == "insert"] == [(None, 0), (A, 1)] * 2


def test_uncached_blocks_are_inserted_before_their_release():
    policy = Recorder()
    pool = pool_of(2, policy)
    pool.queue_uncached = True
    pool.free(pool.allocate(2))
    assert policy.calls == [
        ("insert", 1, (None, 1), None, 0),
        ("insert", 0, (None, 0), None, 0),
        ("release", 1, 0),
    ]


@pytest.mark.parametrize(
    ("victims", "wrong"),
    # Block 0 is in use, 3 on the pool's own stack.
    [([0], "0"), ([3], "3"), ([4], "4"), ([-1], "-1"), ([None], "None"), ([2, 2], "2")],
)
def test_a_policy_that_gives_up_what_it_must_not_is_named(victims, wrong):
    policy = type("Careless", (LRU,), {})()
    pool = pool_of(4, policy)
    pool.free(cached(pool, A, B, C, D)[1:])
    pool.free(pool.allocate(1))
    policy.evict_many = lambda count: victims
    with pytest.raises(RuntimeError, match=rf"'Careless': evict\(\) gave {wrong}, not a released"):
        pool.allocate(3)


@pytest.mark.parametrize(
    ("victims", "given"),
    [
        ([], "0 blocks"), ([2], "1 blocks"), ([3, 2, 1], "3 blocks"), (None, "None, no list"),
        (iter([3, 2]), "<list_iterator.*, no list"),
    ],
)  # fmt: skip
def test_a_policy_that_evicts_too_few_or_too_many_blocks_is_named(victims, given):
    policy = type("Careless", (LRU,), {"evict_many": lambda self, count: victims})()
    pool = pool_of(4, policy)
    pool.free(cached(pool, A, B, C, D))
    with pytest.raises(RuntimeError, match=rf"'Careless': evict_many\(2\) gave {given}"):
        pool.allocate(2)
