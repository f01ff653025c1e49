"""vllm_v1: worked examples to the digit, and faults of real systems.

Nano-vLLM's queue equals the older queue of vllm_v1.
"""

import functools
import random

import manager_helpers
import pytest
from manager_helpers import cached, grow, lines_run, started

from cache import AllocStatus, Group, Sequence, layer_groups, make_manager, make_workload, simulate
from cache.managers.base import NOTHING
from cache.managers.pooled import PooledManager
from cache.policies.lru import LRU

manager_of = functools.partial(manager_helpers.manager_of, "vllm_v1")


def free_queue(manager: PooledManager) -> list[int]:
    return list(manager.pool.free_blocks())


def cached_blocks(manager: PooledManager) -> list[int]:
    return [block for block, key in enumerate(manager.pool.block_hashes) if key is not None]


def after_two_requests(manager: PooledManager, queue_uncached: bool) -> None:
    """The first part of the worked example: requests 0 and 1 have come and gone."""
    first = Sequence(0, range(14))
    assert manager.allocate(first) == 0
    assert manager.block_table(first) == [0, 1, 2, 3]
    assert cached_blocks(manager) == [0, 1, 2]

    assert grow(manager, first, 14, 15) == []
    assert manager.block_table(first) == [0, 1, 2, 3]
    assert cached_blocks(manager) == [0, 1, 2, 3]
    assert grow(manager, first, 16) == []
    assert manager.block_table(first) == [0, 1, 2, 3, 4]

    second = Sequence(1, [*range(11), 91, 92, 93])
    assert manager.allocate(second) == 8
    assert manager.block_table(second) == [0, 1, 5, 6]
    assert manager.pool.ref_counts[:7] == [2, 2, 1, 1, 1, 1, 1]

    manager.free(first)
    assert free_queue(manager) == ([7, 8, 9, 4, 3, 2] if queue_uncached else [4, 7, 8, 9, 3, 2])
    manager.free(second)
    old, today = [7, 8, 9, 4, 3, 2, 6, 5, 1, 0], [6, 4, 7, 8, 9, 3, 2, 5, 1, 0]
    assert free_queue(manager) == (old if queue_uncached else today)
    manager.check_invariants()


@pytest.mark.parametrize(
    ("name", "options", "table", "num_evicted"),
    [
        ("vllm_v1", {"queue_uncached": True}, [0, 1, 2, 7, 8, 9, 4, 3], 1),
        ("vllm_v1", {}, [0, 1, 2, 6, 4, 7, 8, 9], 0),
        ("nano_vllm", {}, [0, 1, 2, 7, 8, 9, 4, 3], 1),
    ],
    ids=["older order", "today's order", "nano_vllm"],
)
def test_worked_example(name, options, table, num_evicted):
    manager = manager_helpers.manager_of(name, **options)
    queue_uncached = bool(num_evicted)
    after_two_requests(manager, queue_uncached)
    hash_of_3 = manager.pool.block_hashes[3]
    third = Sequence(2, [*range(12), *range(50, 67)])
    blocks, num_cached = manager.get_computed_blocks(third)
    assert (blocks, num_cached) == ([0, 1, 2], 12)
    assert manager.allocate(third) == 12
    assert manager.block_table(third) == table
    assert free_queue(manager) == ([6, 5] if queue_uncached else [3, 5])
    assert (hash_of_3 in manager.pool.block_hashes) == (not num_evicted)
    assert manager.get_computed_blocks(Sequence(3, range(17)))[1] == 16 - 4 * num_evicted
    manager.check_invariants()
    stats = manager.stats
    assert (stats.num_allocations, stats.queried_tokens, stats.hit_tokens) == (3, 57, 20)
    assert (stats.queried_blocks, stats.hit_blocks) == (3 + 3 + 7, 5)
    assert (stats.allocated_blocks, stats.evicted_blocks, stats.copied_blocks) == (
        12, num_evicted, 0,
    )  # fmt: skip
    assert stats.token_hit_rate == 20 / 57
    assert stats.block_hit_rate == 5 / 13


def test_worked_example_with_33_tokens_and_16_in_common():
    manager = manager_of(queue_uncached=True)
    after_two_requests(manager, queue_uncached=True)
    third = started(manager, 2, [*range(16), *range(50, 67)])
    assert third.num_cached_tokens == 16
    assert manager.block_table(third) == [0, 1, 2, 3, 7, 8, 9, 4, 6]
    assert free_queue(manager) == [5]


@pytest.mark.parametrize("first_freed", ["a", "b"])
def test_worked_example_of_duplicates(first_freed):
    manager = manager_of(4)
    a, b = Sequence("a", range(6)), Sequence("b", range(6))
    manager.allocate(a)
    grow(manager, a, 6, 7, 8)
    assert manager.block_table(a) == [0, 1, 2]
    assert cached_blocks(manager) == [0, 1]
    assert manager.allocate(b) == 4
    assert manager.block_table(b) == [0, 3]
    grow(manager, b, 6, 7)
    assert manager.block_table(b) == [0, 3]
    keys = manager.pool.block_hashes
    assert keys[1] == keys[3] is not None
    manager.check_invariants()

    manager.free(a if first_freed == "a" else b)
    for i in range(manager.num_free_blocks):  # evict what was freed
        manager.allocate(Sequence(i, [99]))
        manager.check_invariants()
    expected = {"a": 3, "b": 1}[first_freed]
    assert manager.get_computed_blocks(Sequence("probe", range(9))) == ([0, expected], 8)


def names_of(events, hashes: dict[bytes, int]) -> list[tuple]:
    """Events with the blocks' contents numbered as they appear, and their parents."""
    return [
        (
            type(event).__name__,
            [hashes.setdefault(key, len(hashes)) for key in getattr(event, "block_hashes", ())],
            len(getattr(event, "token_ids", ())),
            hashes.get(getattr(event, "parent_block_hash", None)),
        )
        for event in events
    ]


def test_lookahead_tokens_and_events_as_in_vllm_0_33():
    """The tables and events of its KVCacheManager for the same calls."""
    manager, hashes = manager_of(8, 4, enable_kv_cache_events=True), {}
    seq = Sequence("a", range(6))
    manager.allocate_slots(seq, 6, num_lookahead_tokens=5)
    seq.append_token(6)
    manager.allocate_slots(seq, 1, num_lookahead_tokens=3)
    assert manager.block_table(seq) == [0, 1, 2]
    assert names_of(manager.take_events(), hashes) == [("BlockStored", [0], 4, None)]
    for token in (7, 8, 9):  # two accepted drafts, and the token after them
        seq.append_token(token)
    manager.allocate_slots(seq, 3, num_lookahead_tokens=4)
    assert manager.block_table(seq) == [0, 1, 2, 3]
    assert names_of(manager.take_events(), hashes) == [("BlockStored", [1], 4, 0)]
    other = started(manager, "b", [*range(8), *[50] * 13])
    assert manager.block_table(other) == [0, 1, 4, 5, 6, 7]
    assert names_of(manager.take_events(), hashes) == [("BlockStored", [2, 3, 4], 12, 1)]
    manager.free(seq)
    manager.free(other)
    assert manager.take_events() == []
    seq = started(manager, "c", [60] * 29)
    assert manager.block_table(seq) == [7, 3, 2, 6, 5, 4, 1, 0]
    stored = ("BlockStored", [5, 6, 7, 8, 9, 10, 11], 28, None)
    removed = [("BlockRemoved", [number], 0, None) for number in (4, 3, 2, 1, 0)]
    assert names_of(manager.take_events(), hashes) == [*removed, stored]
    manager.free(seq)
    assert manager.reset_prefix_cache()
    assert names_of(manager.take_events(), hashes) == [("AllBlocksCleared", [], 0, None)]
    with pytest.raises(ValueError, match="enable_kv_cache_events=False: the manager records no"):
        manager_of(8).take_events()


def test_making_many_blocks_takes_no_loop():
    assert lines_run(lambda: manager_of(1_000_000, 16)) == lines_run(lambda: manager_of(1_000, 16))


class InPython(LRU):
    """LRU that the replay does not compile, which would take seconds."""

    def evict(self):
        return super().evict()


@pytest.mark.parametrize("capacity", [7, 40, 300])
def test_a_serial_replay_through_the_manager_equals_simulate(capacity):
    trace = make_workload("multi_turn_chat", num_requests=150, seed=3)
    expected = simulate(trace, policy=InPython(), capacity_blocks=capacity)
    assert not expected.compiled
    manager = manager_of(capacity + 1, 2)
    for i, request in enumerate(trace):
        tokens = [token for block in request.block_ids[:capacity] for token in (block, block)]
        seq = Sequence(i, [*tokens, 0])  # one token more: the one that is always computed
        manager.allocate(seq)
        manager.free(seq)
    stats = manager.stats
    assert (stats.hit_blocks, stats.evicted_blocks) == (expected.hit_blocks, expected.evictions)
    assert 0 < stats.hit_blocks < expected.block_references


@pytest.mark.parametrize(
    ("name", "options", "ahead"),
    [
        ("nano_vllm", {}, 0),
        *(("vllm_v1", {"sliding_window": window}, 0) for window in (None, 1, 4)),
        ("vllm_v1", {}, 3),
    ],
)
def test_a_block_whose_last_token_is_unknown_is_found_from_the_next_call_on(name, options, ahead):
    manager = manager_helpers.manager_of(name, 10, 4, **options)
    seq = started(manager, 0, range(3))
    for token in range(3, 9):
        seq.append_token(99)
        seq.num_unknown_tokens = 1
        manager.allocate_slots(seq, 1, num_lookahead_tokens=ahead * (token % 4 == 3))
        manager.check_invariants()
        seq.token_ids.pop()
        seq.num_unknown_tokens = 0
        seq.append_token(token)
        manager.check_invariants()
        assert cached(manager, range(token + 1)) == token // 4 * 4
    manager.free(seq)
    assert cached(manager, range(9)) == 8


def test_groups_of_layers_share_the_pool():
    """A window of 9 tokens needs two blocks of 4 tokens, a state one."""
    groups = [Group(), Group("window", 9), Group("state")]
    manager = make_manager("vllm_v1", num_blocks=40, block_size=4, groups=groups, retention=0)
    first = Sequence("first", range(30))
    assert manager.chunk_end(first, 0, 30) == 28, "the state at the end of the last full block"
    manager.admit(first, NOTHING, 16)
    assert manager.block_tables(first) == [[0, 1, 2, 3], [4, 5, 6, 7], [-1, -1, -1, 8]]
    manager.append(first, 28)  # gives back 4 and 5, which are not at the end of the prompt
    full, window, state = manager.block_tables(first)
    assert (window[:2], state[:3]) == ([-1, -1], [-1] * 3)
    assert (full[4:], window[4:], state[6]) == ([5, 4, 9], [10, 11, 12], 13)
    manager.append(first)
    assert [held.count(-1) for held in manager.block_tables(first)] == [0, 5, 6]
    manager.free(first)
    second = Sequence("second", [*range(20), 98, 99])
    hit = manager.find(second)
    assert (hit.num_tokens, hit.match[1]) == (0, 5), "only the full group has blocks 0 to 4"
    assert manager.chunk_end(second, 0, 22, hit) == 20
    manager.admit(second, hit, 20)
    manager.append(second)
    hit = manager.find(Sequence("third", [*range(20), 97]))
    assert (hit.num_tokens, len(hit.blocks), hit.match[1]) == (20, 5, 0)
    for token in range(4):
        second.append_token(token)
    with pytest.raises(ValueError, match=r"end=26: with a state group .* 22 needs an end .* 24"):
        manager.append(second)
    manager.check_invariants()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": [Group("window", 3)]}, "groups=.*: needs a group of kind 'full'"),
        ({"groups": [1]}, r"groups=\[1\]: needs a list of Group"),
        ({"groups": [Group()], "sliding_window": 3}, "sliding_window=3: give it or groups"),
        ({"groups": [Group(), Group("state")], "retention": 6}, "retention=6: .* block_size=4"),
        ({"groups": [Group(), Group("state")], "retention": -4}, "retention=-4"),
        ({"retention": 4}, "retention=4: no group has the kind 'window' or 'state'"),
    ],
)
def test_groups_and_retention_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        make_manager("vllm_v1", num_blocks=9, block_size=4, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Group("windows"), "kind='windows': needs one of full, window, state"),
        (lambda: Group("window", 0), "window=0: needs an int of at least 1"),
        (lambda: Group("window"), "window=None: a group of kind 'window' needs"),
        (lambda: Group("full", 3), "window=3: a group of kind 'full' needs None"),
        (lambda: Group(layers=-1), "layers=-1: needs a number, or a tuple of indices"),
        (lambda: layer_groups([]), "windows is empty"),
        (lambda: layer_groups([None, 4.5]), r"windows\[1\]=4.5: needs an int"),
    ],
)
def test_a_group_names_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None if i % 6 == 5 else 1024 for i in range(62)], [10, 9, 9, 9, 9, 8, 8]),
        ([128, None] * 12 + [None], [13, 12]),  # fewer than 1.5 times as many
        (["state", "state", "state", None] * 12, [12] * 4),
    ],
)
def test_layers_are_divided_as_in_vllm(windows, sizes):
    groups = layer_groups(windows)
    assert [group.num_layers for group in groups] == sizes
    assert groups[0].kind == "full"
    assert sorted(i for group in groups for i in group.layers) == [*range(len(windows))]
    assert all({windows[i] for i in group.layers} == {windows[group.layers[0]]} for group in groups)


@pytest.mark.parametrize("seed", range(100))
def test_a_prompt_that_is_admitted_gets_all_its_chunks(seed):
    """While other sequences neither take nor return blocks."""
    pick = random.Random(seed)
    size, chunk = pick.choice([1, 2, 4]), pick.choice([None, *range(4, 9)])
    others = [Group("window", pick.randrange(2, 13)), Group("state"), Group("window", 5)]
    groups = [Group(), *others[: pick.randrange(1, 4)]]
    manager = make_manager(
        "vllm_v1", num_blocks=pick.randrange(4, 40), block_size=size, groups=groups
    )
    manager.max_in_flight_tokens = chunk
    for seq_id in range(6):
        seq = Sequence(seq_id, [*range(pick.randrange(1, 20)), *pick.choices(range(9), k=seq_id)])
        hit = manager.find(seq)
        if manager.can_allocate(seq, hit) is AllocStatus.OK:
            end = hit.num_tokens
            while end < seq.num_tokens:
                limit = min(seq.num_tokens, end + (chunk or 99))
                end = manager.chunk_end(seq, end, limit, hit)
                if seq.num_computed_tokens:
                    manager.append(seq, end)
                else:
                    manager.admit(seq, hit, end)
            if pick.random() < 0.6:
                manager.free(seq)
    manager.check_invariants()


def test_a_prefix_is_one_that_all_groups_can_resume():
    """A second pass over the groups finds a shorter prefix than the first; vLLM 0.33 agrees."""
    groups = [Group(), Group("window", 9), Group("window", 3)]
    manager = make_manager("vllm_v1", num_blocks=30, block_size=1, groups=groups, retention=4)
    seq = Sequence(0, [1, 2, 2, 2, 1, 1, 2, 1, 0, 0])
    manager.admit(seq, NOTHING, 2)
    manager.append(seq)
    for _ in range(2):
        seq.append_token(1)
        manager.append(seq)
    hit = manager.find(Sequence(1, [1, 2, 2, 2, 1, 1, 2, 1, 0, 0, 2]))
    assert (hit.num_tokens, hit.match[1]) == (0, 10)


def test_the_two_calls_of_vllm_keep_the_junction():
    groups = [Group(), Group("window", 6)]
    manager = make_manager("vllm_v1", num_blocks=16, block_size=4, groups=groups, retention=0)
    hits = []
    for tokens in ([*range(17)], [*range(8), *range(50, 59)], [*range(8), 91, 92, 93]):
        seq = Sequence("seq", tokens)
        blocks, num_tokens = manager.get_computed_blocks(seq)
        manager.allocate_slots(seq, len(tokens) - num_tokens, blocks)
        manager.free(seq)
        hits.append(num_tokens)
    assert hits == [0, 0, 8]


@pytest.mark.parametrize("groups", [[Group()], [Group(), Group("window", 8)]])
def test_a_policy_knows_the_keys_of_waiting_prompts_in_each_group(groups):
    options = {"num_blocks": 8 * len(groups), "block_size": 4, "policy": "queue_informed"}
    manager = make_manager("vllm_v1", groups=groups, **options)
    texts = [[*range(first, first + 13)] for first in (0, 50)]
    for text in texts:
        manager.free(started(manager, 0, text))
    manager.on_queued((0,), Sequence("waiting", texts[0]))
    started(manager, 1, range(100, 116))  # evicts
    waiting, other = (cached(manager, text) for text in texts)
    assert waiting == 12 > other
