"""Policies made for prompts: what each gives up, and what all of them never do."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache.policies import EvictionPolicy, RequestInfo, make_policy
from cache.serving import open_loop
from tests.cache.prefix_traces import hits, prefix_traces, serve, trace_of

LEAF_POLICIES = ("random_leaf", "marconi", "workload_aware", "retention", "gittins")


class Pool:
    """Serves prompts, each a string of blocks, to a policy with room for all of them."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        policy.start(100)
        self.blocks: dict[str, int] = {}

    def serve(self, *prompts: str, at_ms: float = math.nan, output_tokens: float = 0) -> Pool:
        """One after the other; a block holds a token."""
        for prompt in prompts:
            length = len(prompt)
            self.policy.tell(RequestInfo(at_ms, length, output_tokens, length))
            path = [prompt[: end + 1] for end in range(length)]
            serve(self.policy, self.blocks, path, 100)
        return self

    def victims(self) -> list[str]:
        """All of it, in the order in which it goes."""
        contents = {block: content for content, block in self.blocks.items()}
        return [contents[block] for block in self.policy]


@pytest.mark.parametrize("name", ["lru", "filo", *LEAF_POLICIES])
@given(trace=prefix_traces, capacity=st.integers(1, 12))
def test_no_block_goes_before_those_that_continue_it(name, trace, capacity):
    children: Counter = Counter()
    parents = {}

    class Watched(cache.POLICIES[name]):
        def insert(self, block, key, parent, depth):
            parents[block] = parent
            children[parent] += 1
            super().insert(block, key, parent, depth)

        def evict(self):
            block = super().evict()
            assert not children[block]
            children[parents[block]] -= 1
            return block

    cache.simulate(trace, policy=Watched(), capacity_blocks=capacity)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tlru", {"threshold_blocks": 0, "next_blocks": 0}),
        ("marconi", {"alpha": 0}),
        ("sglang_slru", {"threshold": 10**6}),
        ("queue_informed", {}),
        ("retention", {"ranges": ()}),
        ("retention", {"ranges": [(0, None, 80)]}),
        ("workload_aware", {"max_turn": 1}),
    ],
)
@given(trace=prefix_traces, capacity=st.integers(1, 12))
def test_without_what_it_knows_each_is_lru(name, options, trace, capacity):
    assert hits(trace, name, capacity, **options) == hits(trace, "lru", capacity)


def test_should_every_block_have_a_child_the_first_released_goes():
    policy = make_policy("marconi")
    policy.start(4)
    policy.insert(0, "a", None, 0)
    policy.insert(1, "ab", "a", 1)
    policy.release(0)
    assert policy.evict() == 0
    policy.release(1)
    assert policy.evict() == 1
    assert len(policy) == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("name", cache.POLICIES)
def test_a_copy_goes_on_as_the_original_and_shares_nothing_with_it(name, copied):
    """At last there is a prompt of more blocks than recursion can follow."""
    draw, options = random.Random(0), {"policy": "gdsf"} if name == "queue_informed" else {}
    policy, capacity = copied(make_policy(name, **options)), 30
    policy.start(capacity, next_use=float)
    pool: dict[str, int] = {}
    prompts = [[f"{a}", f"{a}{b}", f"{a}{b}{c}"] for a in range(5) for b in "xy" for c in range(9)]

    def victims(policy: EvictionPolicy, pool: dict[str, int], order: list[list[str]]) -> list[str]:
        gone = []
        for path in order:
            before = dict(pool)
            serve(policy, pool, path, capacity)
            gone.append([key for key in before if pool.get(key) != before[key]])
        return [*gone, [policy.evict() for _ in range(len(policy))]]

    orders = [[draw.choice(prompts) for _ in range(50)] for _ in range(2)]
    policy.on_queued((0, 0), prompts[0])
    for path in orders[0]:
        serve(policy, pool, path, capacity)
    twin = copied(policy)
    expected = victims(twin, dict(pool), orders[1])
    assert victims(policy, pool, orders[1]) == expected
    policy.start(2000, next_use=float)
    serve(policy, {}, [*range(2000)], 2000)
    twin = copied(policy)
    assert [twin.evict() for _ in range(9)] == [policy.evict() for _ in range(9)]


@pytest.mark.parametrize(
    ("name", "prompts", "expected"),
    [
        ("filo", ["ab", "cd", "abe", "cd"], ["abe", "cd", "c", "ab", "a"]),
        ("sglang_slru", ["ab", "cd", "ab", "ef", "cg"], ["cd", "ef", "e", "cg", "ab", "a", "c"]),
    ],
)
def test_victims_by_hand(name, prompts, expected):
    assert Pool(make_policy(name)).serve(*prompts).victims() == expected


def test_frequency_cost_counts_hits_per_second_since_the_first():
    pool = Pool(make_policy("frequency_cost"))
    for at_ms, prompt in enumerate("aabbbbbcd"):  # a hit once at 1 ms, b four times from 3 ms on
        pool.serve(prompt, at_ms=at_ms)
    assert pool.serve("a", at_ms=10_001).victims() == ["c", "d", "a", "b"]


def test_session_end_gives_up_first_what_it_is_told_has_ended():
    """The second of four prompts is the last of its session, the first goes on in the fourth."""
    trace = trace_of([(0, 1), (2, 3), (4, 5), (0, 1, 6)])
    trace.columns["session"] = np.array([1.0, 2.0, np.nan, 1.0])
    assert hits(trace, "lru", 4) == [0, 0, 0, 0]
    assert hits(trace, "session_end", 4) == [0, 0, 0, 2]


def test_queue_informed_spares_what_waits_and_then_gives_up_what_waits_longest():
    policy = make_policy("queue_informed")
    pool = Pool(policy).serve("ab", "cd", "e")
    policy.on_queued((0, 0), ["c", "cd"])
    policy.on_queued((1, 1), ["a", "x"])
    policy.on_queued((2, 2), ["a", "ab"])
    assert pool.victims() == ["e", "ab", "a", "cd", "c"]
    assert [policy.evict() for _ in range(2)] == [pool.blocks[name] for name in ("e", "ab")]
    policy.on_queued((1, 1), ())  # nobody asks for "x", and "a" moves back in the line
    policy.on_queued((0, 0), ())
    assert len(policy) == 3
    assert [pool.blocks[name] for name in ("cd", "c", "a")] == [*policy]
    pool.policy.pin(pool.blocks["cd"])
    pool.policy.release(pool.blocks["cd"])
    assert [pool.blocks[name] for name in ("c", "cd", "a")] == [*policy]


def test_a_scheduler_tells_the_line_to_the_policy():
    """Two blocks stay of what b and c computed; c is asked for again and waits."""
    found = {}
    for name in ("lru", "queue_informed"):
        manager = cache.make_manager("vllm_v1", num_blocks=4, block_size=4, policy=name)
        engine = open_loop.engine_without_model(
            manager, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=16
        )
        prompts = [[token] * 9 for token in (1, 2, 3, 1)]
        arrivals, lengths = [0.0, 5.0, 5.0, 5.0], [1] * 4
        open_loop.serve(engine, prompts, lengths, arrivals, service=open_loop.ServiceModel())
        found[name] = manager.stats.hit_blocks
    assert found == {"lru": 0, "queue_informed": 1}


def test_tlru_gives_up_first_what_the_next_turn_can_compute_in_time():
    """One of the last 4 blocks of the next prompt is expected to be new: 3 of each may go."""
    pool = Pool(make_policy("tlru", threshold_blocks=4, next_blocks=1)).serve("abcdef", "xy")
    assert pool.victims() == ["abcdef", "abcde", "abcd", "xy", "x", "abc", "ab", "a"]
    answered = Pool(make_policy("tlru", threshold_blocks=4, next_blocks=1))
    answered.serve("abcdef", output_tokens=2)  # it grew by two blocks, which the pool does not have
    answered.serve("u", output_tokens=9)
    assert answered.victims() == ["abcdef", "abcde", "abcd", "abc", "ab", "a", "u"]


def test_random_leaf_draws_evenly_from_the_leaves_that_this_phase_has_not_used():
    prompts = ["ab", "c", "de", "f"]
    first, after_use = Counter(), Counter()
    for seed in range(400):
        first[Pool(make_policy("random_leaf", seed=seed)).serve(*prompts).victims()[0]] += 1
        pool = Pool(make_policy("random_leaf", seed=seed)).serve(*prompts)
        victim = pool.policy.evict()  # begins a phase
        [gone] = [content for content, block in pool.blocks.items() if block == victim]
        del pool.blocks[gone]
        used = next(prompt for prompt in prompts if prompt != gone)
        order = pool.serve(used).victims()
        after_use[order.index(used) == max(map(order.index, set(prompts) & set(order)))] += 1
    assert set(first) == {"ab", "c", "de", "f"}
    assert all(60 < count < 140 for count in first.values())
    assert after_use[True] > 300  # the parents of others may become leaves after it


def test_marconi_keeps_deep_blocks_longer_the_more_alpha_says():
    before, deep, shallow = "0123456789", "abcdefgh", "xy"
    order = {}
    for alpha in (0.0, 2.0):
        pool = Pool(make_policy("marconi", alpha=alpha))
        order[alpha] = pool.serve(*before, deep, "uv", shallow).victims()
    assert order[0.0].index(deep) < order[0.0].index("uv") < order[0.0].index(shallow)
    assert order[2.0].index("uv") < order[2.0].index(shallow) < order[2.0].index(deep)


def test_workload_aware_learns_which_turn_returns_and_when():
    """First turns never return but for the one that has a second; second turns do, in a second."""
    pool = Pool(make_policy("workload_aware"))
    for at in range(0, 100_000, 2000):
        pool.serve(f"{chr(200 + at // 1000)}", at_ms=at)
    for at in range(0, 20):
        pool.serve("a", at_ms=100_000 + 1000 * at)
    pool.policy.evict()  # a first sample of how long blocks stay
    pool.serve("z", at_ms=120_100)
    assert pool.victims().index("z") < pool.victims().index("a")


@pytest.mark.parametrize(
    ("ranges", "now", "expected"),
    [
        (((0, 1, 100),), 9e9, ["ab", "xy", "a", "x"]),
        (((1, None, 0),), 0, ["ab", "xy", "a", "x"]),
        (((0, 1, 100, 500.0),), 499, ["ab", "xy", "a", "x"]),
        # Only leaves go: the heads, though of less priority by then, wait for their tails.
        (((0, 1, 100, 500.0), (1, 2, 90)), 500, ["ab", "a", "xy", "x"]),
    ],
)
def test_retention_gives_up_the_least_priority_until_it_expires(ranges, now, expected):
    pool = Pool(make_policy("retention", ranges=ranges)).serve("ab", "xy", at_ms=0)
    pool.policy.tell(RequestInfo(now, 1, 0, 1))
    assert pool.victims() == expected


def test_retention_forgets_an_expiry_when_the_block_is_used_again():
    pool = Pool(make_policy("retention", ranges=[(0, 1, 100, 500.0)]))
    pool.serve("a", "b", at_ms=0).serve("a", at_ms=400).serve("c", at_ms=600)
    assert pool.victims() == ["b", "a", "c"]  # only b's has expired
