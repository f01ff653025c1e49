"""Small random traces whose block ids are unique to their prefix, as in real ones; replays."""

import numpy as np
from hypothesis import strategies as st

import cache
from cache.policies import EvictionPolicy
from cache.replay.serial import SimulationResult
from cache.traces.trace import Trace


def trace_of_requests(requests: list[tuple[int, tuple[int, ...], int, int]]) -> Trace:
    """Requests of (time, block contents, tokens beyond the blocks, output tokens)."""
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for time, path, rest, output in requests:
        blocks = [ids.setdefault(path[: n + 1], len(ids)) for n in range(len(path))]
        rows.append((time, 4 * len(path) + rest, output, blocks))
    return Trace.from_requests(rows, name="random", block_size=4)


def trace_of(paths: list[tuple[int, ...]]) -> Trace:
    """One request a millisecond; ``paths`` are prompts as tuples of block contents."""
    return trace_of_requests([(time, path, 0, 1) for time, path in enumerate(paths)])


prefix_traces = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=40
).map(trace_of)


def requests_of(trace: Trace) -> list[tuple]:
    return [(*request[:3], request.block_ids.tolist()) for request in trace]


def hits(trace: Trace, policy: str | EvictionPolicy, capacity: int, **options) -> list[int]:
    """Hits of each request."""
    return cache.simulate(trace, policy=policy, capacity_blocks=capacity, **options).hits.tolist()


def simulate_both(
    trace: Trace, compiled: str | EvictionPolicy, in_python: EvictionPolicy, **options
) -> SimulationResult:
    """The result of a policy that is compiled, equal to that of its form that is not."""
    result, other = (
        cache.simulate(trace, policy=policy, **options) for policy in (compiled, in_python)
    )
    assert (result.compiled, other.compiled) == (True, False)
    np.testing.assert_array_equal(result.hits, other.hits)
    assert result.evictions == other.evictions
    return result


def serve(policy: EvictionPolicy, pool: dict, path: list, capacity: int) -> int:
    """A request of the serial replay: ``pool`` is content to block.  Returns its hits."""
    policy.look_up(path)
    hits = next((at for at, key in enumerate(path) if key not in pool), len(path))
    for key in path:
        if key in pool:
            policy.pin(pool[key])
    for depth, key in enumerate(path):
        if key in pool:
            continue
        policy.miss(key)
        block = len(pool)
        if block == capacity:
            block = policy.evict()
            del pool[next(key for key, held in pool.items() if held == block)]
        pool[key] = block
        policy.insert(block, key, path[depth - 1] if depth else None, depth)
    policy.release_many([pool[key] for key in reversed(path)])
    return hits
