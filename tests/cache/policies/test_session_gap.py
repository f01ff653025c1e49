"""session_gap, and what policies hear about sessions."""

import dataclasses
import math
import random

import numpy as np
import pytest

import cache
from cache.policies import RequestInfo, make_policy
from tests.cache.prefix_traces import hits, serve, simulate_both


def random_sessions(seed):
    """A trace of six sessions that grow, are cut, start again, and come at equal times."""
    draw, prompts, requests, now = random.Random(seed), {}, [], 0
    nodes: dict[tuple, int] = {}  # prompts with a common id share the path to it
    for number in range(120):
        now += draw.choice([0, 1, 5, 50, 400])
        session = draw.randrange(6)
        prompt = prompts.get(session, (-1, -2)[: draw.randrange(3)])
        if draw.random() < 0.2:
            prompt = prompt[: draw.randrange(len(prompt) + 1)]
        prompt += tuple(range(9 * number, 9 * number + draw.randrange(1, 5)))
        prompts[session] = prompt
        facts = {"session": session, "expected_pause_ms": draw.choice([0, 3, 30, 300, 3000])}
        facts |= {"stop": draw.choice(["tool_use", "end_turn"])}
        some = {name: value for name, value in facts.items() if draw.random() < 0.7}
        path = [nodes.setdefault(prompt[: i + 1], len(nodes)) for i in range(len(prompt))]
        requests.append((now, 4 * len(prompt), 1, path, some))
    return cache.Trace.from_requests(requests, name="sessions", block_size=4)


def with_columns(trace, **columns):
    return dataclasses.replace(trace, columns=trace.columns | columns)


@pytest.mark.parametrize("predict", [False, True])
def test_compiled_and_python_agree_and_without_sessions_it_is_lru(predict):
    for seed in range(12):
        trace, capacity = random_sessions(seed), (3, 8, 20, 60)[seed % 4]
        if seed % 3:
            trace = with_columns(trace, ends_session=np.full(len(trace), np.nan))
        in_python = make_policy("session_gap", predict=predict)
        in_python.compilable = False
        compiled = make_policy("session_gap", predict=predict)
        simulate_both(trace, compiled, in_python, capacity_blocks=capacity)
        bare = dataclasses.replace(trace, columns={})
        assert hits(bare, in_python, capacity) == hits(bare, "lru", capacity)


@pytest.fixture
def pool():
    """use(session, at_ms, blocks, pause, ends): a request of a session, in a pool of 6 blocks.

    Blocks are numbered in the order of their first use.
    """
    policy, held = make_policy("session_gap"), {}
    policy.start(6)

    def use(session, at_ms, blocks, pause=math.nan, ends=math.nan):
        hint = math.nan, ends, session, pause, math.nan
        policy.tell(RequestInfo(at_ms, 9, math.nan, len(blocks), session=session))
        policy.tell(RequestInfo(at_ms, 9, 1, len(blocks), *hint))
        serve(policy, held, blocks, 6)

    return policy, use


def test_the_session_expected_last_loses_its_tail_first(pool):
    policy, use = pool
    use(1, 0, [0, 1], pause=100)
    use(2, 10, [0, 2], pause=1000)
    use(3, 20, [3, 4], ends=1)
    use(4, 30, [5])
    assert list(policy) == [4, 3, 2, 1, 0, 5]  # 0 is expected with session 1
    policy.correct(RequestInfo(60, *[math.nan] * 4, 0, 1, 5000, 0))
    assert list(policy) == [4, 3, 1, 2, 0, 5]
    policy.correct(RequestInfo(70, *[math.nan] * 4, 1, 2))
    assert list(policy) == [4, 3, 2, 1, 5, 0]  # 2: ended last; 0: 1 and 2 use it


def test_a_late_session_is_expected_after_the_same_time_again(pool):
    policy, use = pool
    use(1, 0, [0], pause=10)
    use(2, 0, [1], pause=500)
    use(3, 240, [2])
    assert list(policy) == [1, 0, 2]  # 0: late by 230; 1: expected in 260
    use(3, 260, [2])
    assert list(policy) == [0, 1, 2]


def test_an_end_reaches_the_rest_of_a_tail_but_no_block_of_two_sessions(pool):
    policy, use = pool
    use(1, 0, [0, 1, 2], pause=100)
    use(2, 1, [0, 3], pause=50)
    use(3, 2, [4], pause=90)
    policy.remove(2)
    policy.correct(RequestInfo(3, *[math.nan] * 4, 1, 1))
    policy.correct(RequestInfo(3, *[math.nan] * 4, 1, 2))
    assert list(policy) == [1, 3, 4, 0]


def test_further_samples_and_groups_of_layers_drop_nothing(pool):
    policy, use = pool
    use(1, 0, [0, 1], pause=10)
    policy.tell(policy._request)
    policy.insert(9, 9, 0, 1)
    policy.release(9)
    use(2, 5, [2], pause=1000)
    assert next(iter(policy)) == 2


def test_blocks_that_the_next_request_of_a_session_drops_go_first(pool):
    policy, use = pool
    use(1, 0, [0, 1, 2], pause=10)
    use(2, 5, [3], pause=1000)
    use(1, 10, [0, 4], pause=10)
    assert list(policy) == [2, 1, 3, 4, 0]
    use(1, 20, [5], pause=10)
    assert list(policy) == [2, 1, 4, 0, 3, 5]


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"expected_pause_ms": [1.0, -2.0]}, r"requests\[1\]: expected_pause_ms=-2.0: needs a fin"),
        ({"pause_spread": [-0.5, 1.0]}, r"requests\[0\]: pause_spread=-0.5: needs a finite"),
        ({"ends_session": [0.0, 0.5]}, r"requests\[1\]: ends_session=0.5: needs 0 or 1"),
        ({"ends_session": [1.0, 1.0]}, r"requests\[0\]: ends_session=1, but session 7.0 goes on"),
        ({"expected_pause_ms": ["soon", ""]}, "column 'expected_pause_ms' has texts"),
    ],
)
def test_wrong_hints_in_a_trace_are_named(columns, error):
    requests = [(at, 4, 1, [0], {"session": 7}) for at in (0, 1)]
    trace = cache.Trace.from_requests(requests, name="t", block_size=4)
    arrays = {
        name: np.array(values, np.dtypes.StringDType() if "" in values else None)
        for name, values in columns.items()
    }
    with pytest.raises(ValueError, match=error):
        cache.simulate(with_columns(trace, **arrays), policy="lru", capacity_blocks=2)


def test_each_sub_agent_is_a_session():
    requests = [(at, 4, 1, [0], {"session": 7, "agent": at % 2}) for at in range(4)]
    trace = cache.Trace.from_requests(requests, name="t", block_size=4)
    assert trace.request_facts[:, 6].tolist() == [0, 1, 0, 1]
    assert trace.request_facts[:, 5].tolist() == [0, 0, 0, 1]
