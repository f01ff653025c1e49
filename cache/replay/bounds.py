"""An upper bound on policies that know only the return times of classes of blocks.

The classes are those of :mod:`cache.policies.gittins`: uses, output length, idle time.
docs/eviction-study.md derives the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cache.checks import at_least
from cache.policies.gittins import Gittins
from cache.replay.compiled import next_uses_of
from cache.replay.serial import simulate

if TYPE_CHECKING:
    from cache.traces.trace import Trace


def fluid_hits(trace: Trace, capacity_blocks: int) -> float:
    """Upper bound on the expected hits of policies that know the class and age of each block.

    It relaxes the capacity: the cache holds ``capacity_blocks`` blocks on average over time.

    Keeping the blocks of a class up to some age gains hits and takes space (blocks x time).  The
    bound takes the pieces of the classes' concave hulls by hits per space, best first, until the
    space is used up.  A policy that distinguishes blocks within a class may hit more.
    """
    capacity = at_least(1, "capacity_blocks", capacity_blocks)
    classes = np.array(_observe(trace))
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


class _Observer(Gittins):
    """Records the class of each block reference, as its request releases it."""

    def __init__(self) -> None:
        self.classes: list[int] = []

    def release_many(self, blocks: list[int]) -> None:
        super().release_many(blocks)
        self.classes += [self._blocks[block].class_ for block in reversed(blocks)]


def _observe(trace: Trace) -> list[int]:
    """The class of each block reference."""
    observer = _Observer()
    simulate(trace, policy=observer, capacity_blocks=max(trace.num_unique_blocks, 1))
    return observer.classes


def _groups(classes: np.ndarray) -> list[np.ndarray]:
    """The positions of each class in ``classes``."""
    order = np.argsort(classes, kind="stable")
    borders = np.flatnonzero(np.diff(classes[order])) + 1
    return np.split(order, borders)


def _concave_pieces(ages: np.ndarray, returns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Space and hits of each piece of a class's concave hull, the steepest first.

    A block kept up to an age takes space until it returns, at most up to that age.
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
    """Whether the slope after ``second`` is at least the slope before it."""
    return (third[1] - second[1]) * (second[0] - first[0]) >= (second[1] - first[1]) * (
        third[0] - second[0]
    )
