"""Small random traces whose block ids are unique to their prefix, as in real ones."""

from __future__ import annotations

from hypothesis import strategies as st

from cache.traces.trace import Trace


def trace_of(paths: list[tuple[int, ...]], block_size: int | None = 4) -> Trace:
    """One request a millisecond; ``paths`` are prompts as tuples of block contents."""
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    for time, path in enumerate(paths):
        blocks = [ids.setdefault(path[: n + 1], len(ids)) for n in range(len(path))]
        requests.append((time, 4 * len(path), 1, blocks))
    return Trace.from_requests(requests, name="random", block_size=block_size)


prefix_traces = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=40
).map(trace_of)
