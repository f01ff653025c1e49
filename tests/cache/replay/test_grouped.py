"""The replay with groups against its definition written out, and reference figures."""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache.blocks.groups import Group
from cache.policies import POLICIES
from tests.cache.prefix_traces import prefix_traces, simulate_both, trace_of_requests
from tests.cache.replay.test_serial import in_python

FULL, WINDOW, STATE, SIZE = Group(), Group("window", 5), Group("state"), 4


def pytest_generate_tests(metafunc):
    """Policies whose methods are compiled in different ways, each in seconds.  The last two, which
    take longest, are compared without groups in ``test_serial.py``, too."""
    if "policy" in metafunc.fixturenames:
        some = None if metafunc.config.getoption("--all") else 3
        metafunc.parametrize("policy", ["lru", "belady", "arc", "gittins", "random_leaf"][:some])


OTHERS = [FULL, WINDOW, Group("window", 9), Group("window", 1), STATE]
path = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
request = st.tuples(st.integers(0, 9000), path, st.integers(-3, 3), st.integers(1, 9))
cases = given(
    trace=st.lists(request, min_size=1, max_size=25).map(trace_of_requests),
    capacity=st.integers(1, 40) | st.just(2**63 - 1),
    groups=st.lists(st.sampled_from(OTHERS), max_size=3).map(lambda groups: [*groups, FULL]),
    retention=st.sampled_from([None, 0, SIZE, 2 * SIZE, 3 * SIZE]),
    tokens=st.sampled_from([1, 9, 12, 8192]),
)


def replay_by_definition(trace, capacity, groups, retention, tokens):
    """LRU hits per request and evictions, as ``cache/replay/grouped.py`` defines them."""
    chunk, hits, evictions = max(1, tokens // SIZE), [], 0
    queue, held = OrderedDict(), {}  # released pages (group, block); pages by (group, position)
    limits = [
        {"full": 99, "state": 2}.get(g.kind, g.num_blocks_of_hit(SIZE) + chunk) for g in groups
    ]
    rule = {"block_size": SIZE, "retention": retention}

    def leave(num_unseen):
        for i, at in sorted(held, key=lambda place: (place[0], -place[1])):
            if at < num_unseen(groups[i]) and (page := held.pop((i, at))):
                queue[page] = None

    for length, blocks in zip(trace.input_lengths, (r.block_ids for r in trace), strict=True):
        ids = blocks[: length // SIZE].tolist()
        total = len(ids) + (length > SIZE * len(ids))
        while sum(min(total, limit) for limit in limits) > capacity:
            total -= 1
        ids = ids[:total]

        def longest(limit, kinds, ids=ids):
            for i, g in enumerate(groups):
                if g.kind in kinds:
                    cached = [(i, block) in queue for block in ids]
                    limit = g.longest_hit(limit, SIZE, cached.__getitem__)
            return limit

        end = min(max(length - 1, 0) // SIZE, len(ids))
        hit = reach = longest(end, ["full"])
        for _ in range(reach):
            hit = longest(hit, ["window", "state"])
        hits.append(hit)
        boundaries = {end, reach} if hit < reach else {end}
        for i, g in enumerate(groups):
            for at in range(g.num_unseen(hit * SIZE, SIZE), hit):
                held[i, at] = i, ids[at]
                del queue[i, ids[at]]
        while hit < total:
            leave(lambda g, hit=hit: g.num_unseen(hit * SIZE, SIZE))
            stops = {stop for stop in boundaries if stop > hit and STATE in groups}
            last = min({hit + chunk, total} | stops)
            for i, g in enumerate(groups):
                kept = g.kept(hit, min(last, len(ids)), boundaries=boundaries, **rule)
                for at in range(last - 1 if g.kind == "state" else hit, last):
                    held[i, at] = (i, ids[at]) if at in kept else None
                    queue.pop(held[i, at], None)
            while len(held) + len(queue) > capacity:
                queue.popitem(last=False)
                evictions += 1
            hit = last
        leave(lambda g: 99)
    return hits, evictions


@cases
def test_a_policy_is_the_same_compiled_and_lru_is_its_definition(
    policy, trace, capacity, groups, retention, tokens
):
    if POLICIES[policy].needs_future:
        groups = [FULL] * len(groups)
    if retention and groups.count(FULL) == len(groups):
        retention = 0
    compiled = simulate_both(
        trace, policy, in_python(policy), capacity_blocks=capacity, groups=groups,
        retention=retention, max_num_batched_tokens=tokens,
    )  # fmt: skip
    if policy == "lru":
        found = compiled.hits.tolist(), compiled.evictions
        assert found == replay_by_definition(trace, capacity, groups, retention, tokens)
    if capacity > 40:
        full = cache.simulate(trace, policy="lru", capacity_blocks=capacity, groups=[FULL])
        assert compiled.evictions == 0
        assert (compiled.hits <= full.hits).all()
        if retention is None and STATE not in groups:
            assert compiled.hits.tolist() == full.hits.tolist()


@given(trace=prefix_traces, capacity=st.integers(1, 12))
def test_one_full_group_is_the_replay_of_blocks(policy, trace, capacity):
    blocks, pages = (
        cache.simulate(trace, policy=policy, capacity_blocks=capacity, groups=groups)
        for groups in (None, [FULL])
    )
    hits = np.minimum((trace.input_lengths - 1) // SIZE, blocks.hits)
    assert (pages.hits.tolist(), pages.evictions) == (hits.tolist(), blocks.evictions)


def test_an_example_by_hand():
    """A window of 5 tokens needs a page of 4 tokens.  Each request needs all 8 pages."""
    trace = trace_of_requests([(time, (0, 1, last), 1, 1) for time, last in enumerate((2, 5, 6))])
    options = {"policy": "lru", "capacity_blocks": 8, "groups": [FULL, WINDOW]}
    dense = cache.simulate(trace, **options)
    # A hit leaves 4 pages to compute.  Two pages are free.
    assert (dense.hits.tolist(), dense.evictions) == ([0, 2, 2], 4)
    # The first request keeps window block 2.  The second keeps block 1, at the junction, and 5.
    sparse = cache.simulate(trace, **options, retention=0)
    assert (sparse.hits.tolist(), sparse.evictions) == ([0, 0, 2], 3)


@pytest.mark.parametrize(("retention", "rate"), [(None, 0.214), (0, 0.337)])
def test_hit_rates_are_those_of_vllm(retention, rate):
    """The ``KVCacheManager`` of vLLM 0.33, driven with one request at a time, has these rates."""
    traces = Path(__file__).parents[3] / "experiments" / "traces"
    trace = cache.load_trace(traces / "mooncake_conversation_512.jsonl.zst")
    options = {"groups": [FULL] + 5 * [Group("window", 1024)], "retention": retention}
    pages = int(trace.num_unique_blocks * 0.05) * 6
    result = cache.simulate(trace, policy="lru", capacity_blocks=pages, **options)
    assert result.block_hit_rate == pytest.approx(rate, abs=0.0005)
