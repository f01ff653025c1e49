"""Small random traces whose block ids are unique to their prefix, as in real ones."""

from __future__ import annotations

from hypothesis import strategies as st

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
