"""What a policy could reach that knew how classes of blocks return, and only that.

Between the best policy and Belady's optimum lies what nobody can know online.  Both take the whole
trace and the classes of :mod:`cache.policies.hazard`: accesses, place in the prompt, output length,
last interval, turn, newcomers.  docs/eviction-study.md derives them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cache.checks import at_least
from cache.policies import hazard_compiled as rules
from cache.replay.compiled import next_uses_of

if TYPE_CHECKING:
    from cache.traces.trace import Trace


def class_hazard_hits(trace: Trace, capacity_blocks: int) -> int:
    """Hits of a ``hazard`` policy that knows the hazards.

    It ranks by the Gittins indices that follow from the whole trace, from the first request on, and
    has no safeguard.  A heuristic with perfect statistics rather than a bound that is proven.
    """
    known, _ = _observe(trace)
    capacity = at_least(1, "capacity_blocks", capacity_blocks)
    contents = _num_contents(trace)
    state = rules.make_state(capacity, contents, contents, 0.0, np.inf)
    for field in ("index", "subclass", "parent_class", "num_classes"):
        state.own[field] = known.own[field]
    state.own["next_update"] = np.iinfo(np.int64).max
    hits, _ = rules.replay(
        *state, trace.block_ids, trace.offsets, trace.timestamps_ms, trace.output_lengths
    )
    return int(hits.sum())


def fluid_hits(trace: Trace, capacity_blocks: int) -> float:
    """The most hits of a cache that holds ``capacity_blocks`` blocks *on average* over time and
    knows of a block its class, its age, and how blocks of its class return.

    Keeping the blocks of a class until they have an age buys hits for space (blocks x time); the
    steepest pieces of the classes' concave hulls are bought first, until the space is used up.  As
    no cache holds more than its capacity at any time, no policy with that knowledge hits more in
    expectation.  One that can tell blocks of a class apart may.
    """
    capacity = at_least(1, "capacity_blocks", capacity_blocks)
    _, classes = _observe(trace)
    times = trace.timestamps_ms.astype(np.float64)
    lengths = np.diff(trace.offsets)
    released = np.repeat(times, lengths)
    whole = max(int(lengths.max(initial=1)), 1)
    uses = next_uses_of(trace.block_ids, trace.offsets, trace.num_unique_blocks, whole)
    returns = np.isfinite(uses)
    ends = np.full(len(uses), times[-1] if len(times) else 0.0)
    ends[returns] = times[uses[returns].astype(np.int64)]
    ages = ends - released

    pieces = [_concave_pieces(ages[of_class], returns[of_class]) for of_class in _groups(classes)]
    spaces, hits = (np.concatenate(column) for column in zip(*pieces, strict=True))
    steepest_first = np.argsort(-hits / np.maximum(spaces, 1e-300), kind="stable")
    spaces, hits = spaces[steepest_first], hits[steepest_first]
    space = capacity * (times[-1] - times[0])
    before = np.cumsum(spaces) - spaces
    bought = np.clip(space - before, 0.0, spaces)
    shares = np.divide(bought, spaces, out=np.ones_like(spaces), where=spaces > 0)
    return float((shares * hits).sum())


def _observe(trace: Trace) -> tuple[rules.State, np.ndarray]:
    """A hazard policy that has seen the trace and forgot nothing, and the class of each block of
    each request as it was released, int64."""
    num_contents = _num_contents(trace)
    state = rules.make_state(num_contents, num_contents, 0.0, 50.0, np.inf)
    classes = np.empty(len(trace.block_ids), np.int64)
    for request, (start, end) in enumerate(zip(trace.offsets[:-1], trace.offsets[1:], strict=True)):
        path = trace.block_ids[start:end].astype(np.int64)
        parents = np.concatenate(([-1], path[:-1]))[: len(path)]
        rules.release(
            *state, path, parents,
            float(trace.timestamps_ms[request]), float(trace.output_lengths[request]),
        )  # fmt: skip
        rules.pin(*state, path)
        classes[start:end] = state.runs["class_"][state.contents["run"][path]]
    rules.update_indices(*state)
    return state, classes


def _num_contents(trace: Trace) -> int:
    return max(trace.num_unique_blocks, 1)


def _groups(classes: np.ndarray) -> list[np.ndarray]:
    """The places of each class that occurs."""
    order = np.argsort(classes, kind="stable")
    borders = np.flatnonzero(np.diff(classes[order])) + 1
    return np.split(order, borders)


def _concave_pieces(ages: np.ndarray, returns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Space and hits of each piece of a class's concave hull, the steepest first.

    Kept until an age, its blocks take the space of all ages up to that, and those hit that return
    by then.
    """
    order = np.argsort(ages, kind="stable")
    ages, returns = ages[order], returns[order]
    spaces = np.cumsum(ages) + ages * np.arange(len(ages) - 1, -1, -1)
    hits = np.cumsum(returns)
    hull = [(0.0, 0.0)]
    for point in zip(spaces[returns].tolist(), hits[returns].tolist(), strict=True):
        while len(hull) > 1 and _turns_up(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    steps = np.diff(np.array(hull), axis=0).reshape(-1, 2)
    return steps[:, 0], steps[:, 1]


def _turns_up(first: tuple, second: tuple, third: tuple) -> bool:
    """Whether the way from ``second`` to ``third`` is no less steep than that from ``first``."""
    return (third[1] - second[1]) * (second[0] - first[0]) >= (second[1] - first[1]) * (
        third[0] - second[0]
    )
