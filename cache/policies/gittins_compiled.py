"""The rules of :mod:`cache.policies.gittins`, compiled by numba.

Blocks are rows of an array: the blocks of a pool in a manager, the contents of a trace in
``cache.simulate``.  Behind them each class has a row, both ends of its queue.
"""

from __future__ import annotations

import math

import numba
import numpy as np

_USES, _LENGTHS = 7, 8
NUM_CLASSES = 2 * _USES * _LENGTHS
NUM_BINS = 32
"""Age bin b > 0 begins at 2 ** (b - 1) ms, the last after 12 days."""
_SHRINKAGE = 10.0
"""Weight of all classes together in the statistics of one, in blocks."""

_BLOCK = np.dtype(
    [
        ("time", np.float64),  # of the last release, ms
        ("number", np.int64),  # of the last release, counted in blocks
        ("uses", np.int32),  # releases, including remembered ones before an eviction
        ("class_", np.int32),
        ("parent", np.int32),  # the resident block that it continues; -1: none
        ("children", np.int32),  # resident blocks that continue it
        ("older", np.int32),  # neighbours in the queue of its class
        ("newer", np.int32),
        ("queued", np.bool_),
        ("released", np.bool_),
        ("resident", np.bool_),
    ],
    align=True,
)
_STATE = np.dtype(
    [
        ("begin", np.float64),
        ("now", np.float64),
        ("ranked_at", np.float64),
        ("requests", np.int64),
        ("next_learning", np.int64),  # the request after which the indices are computed again
        ("releases", np.float64, NUM_CLASSES),
        ("returns", np.float64, (NUM_CLASSES, NUM_BINS)),  # by age
        ("index", np.float64, (NUM_CLASSES, NUM_BINS)),
        ("head", np.int64, NUM_CLASSES),  # release number of the first block of each class
        ("worth", np.float64, NUM_CLASSES),  # of these heads, at the time ranked_at
    ],
    align=True,
)


def make_state(num_blocks: int) -> tuple[np.void, np.ndarray]:
    """The state of a policy and its rows: the first arguments of the functions here."""
    state = np.zeros(1, _STATE)[0]
    state["begin"] = state["ranked_at"] = np.nan
    rows = np.zeros(num_blocks + NUM_CLASSES, _BLOCK)
    rows["number"] = -1
    rows["older"] = rows["newer"] = np.arange(len(rows))
    return state, rows


@numba.njit(cache=True)
def insert(rows, block, parent):
    """``block`` is in use with new content; ``parent`` -1: none."""
    rows[block].resident, rows[block].children, rows[block].parent = True, 0, parent
    if parent >= 0:
        rows[parent].children += 1


@numba.njit(cache=True)
def pin(rows, block):
    rows[block].released = False
    _leave_queue(rows, block)


@numba.njit(cache=True)
def release(state, rows, path, number, time, output_tokens):
    """The blocks of ``path``, the deepest first, are released at ``time`` (ms).

    ``number`` counts the blocks released before.
    """
    if math.isnan(state.begin):
        state.begin = time
    state.now = time
    first_queue = len(rows) - NUM_CLASSES
    length = _level(output_tokens, 4.0, _LENGTHS)
    for place in range(len(path)):
        block = rows[path[place]]
        if block.uses:
            state.returns[block.class_, _bin(time - block.time)[0]] += 1.0
        block.uses += 1
        block.time, block.number, block.released = time, number + place, True
        uses = _level(block.uses, 2.0, _USES)
        block.class_ = (uses * 2 + (place == 0)) * _LENGTHS + length
        state.releases[block.class_] += 1.0
        _queue_after(rows, path[place], rows[first_queue + block.class_].older)
    state.requests += 1
    if state.requests >= state.next_learning:
        learn(state)
        state.next_learning = state.requests + 64


@numba.njit(cache=True)
def choose(state, rows, until):
    """The block of least worth among the heads that were released before release ``until``.

    Of equal ones the block released first; -1 if there is none.
    """
    first_queue = len(rows) - NUM_CLASSES
    if state.ranked_at != state.now:
        state.head[:] = -1
        state.ranked_at = state.now
    chosen, least = -1, np.inf
    for class_ in range(NUM_CLASSES):
        head = rows[first_queue + class_].newer
        if rows[head].number == state.head[class_] and state.worth[class_] > least:
            continue
        while head < first_queue and rows[head].children:
            _leave_queue(rows, head)  # until its last child is evicted
            head = rows[first_queue + class_].newer
        if head >= first_queue or rows[head].number >= until:
            continue
        if rows[head].number != state.head[class_]:
            age, part = _bin(state.now - rows[head].time)
            index, next_bin = state.index[class_], min(age + 1, NUM_BINS - 1)
            state.head[class_] = rows[head].number
            state.worth[class_] = index[age] + part * (index[next_bin] - index[age])
        worth = state.worth[class_]
        if worth < least or (worth == least and rows[head].number < rows[chosen].number):
            chosen, least = head, worth
    return chosen


@numba.njit(cache=True)
def evict(rows, block):
    pin(rows, block)
    rows[block].resident = False
    parent = rows[block].parent
    if parent >= 0 and rows[parent].resident and rows[parent].children:
        rows[parent].children -= 1
        if rows[parent].released and not rows[parent].queued and not rows[parent].children:
            _queue_after(rows, parent, len(rows) - NUM_CLASSES + rows[parent].class_)


@numba.njit(cache=True)
def learn(state):
    """The Gittins indices that follow from the releases and returns so far.

    index(age) = max over T > age of (S(age) - S(T)) / integral of S from age to T.
    """
    elapsed = max(state.now - state.begin, 1.0)
    returns_of_all = np.zeros(NUM_BINS)
    for class_ in range(NUM_CLASSES):
        returns_of_all += state.returns[class_]
    weight = _SHRINKAGE / max(state.releases.sum(), 1.0)
    out, space = np.ones(NUM_BINS + 1), np.zeros(NUM_BINS + 1)
    for class_ in range(NUM_CLASSES):
        remaining = state.releases[class_] + _SHRINKAGE
        for age in range(NUM_BINS):
            width = 2.0 ** max(age - 1, 0)
            middle = width * (1.5 if age else 0.5)
            returns = state.returns[class_, age] + weight * returns_of_all[age]
            observed = remaining * max(1.0 - middle / elapsed, 0.0)  # the others are too young
            hazard = min(returns / max(observed, returns, 1e-9), 0.999)
            remaining -= returns
            out[age + 1] = out[age] * (1.0 - hazard)
            space[age + 1] = space[age] + width * (out[age] + out[age + 1]) / 2.0
        for age in range(NUM_BINS):
            best = 0.0
            for until in range(age + 1, NUM_BINS + 1):
                best = max(best, (out[age] - out[until]) / (space[until] - space[age] + 1e-300))
            state.index[class_, age] = best
    state.ranked_at = np.nan


@numba.njit(inline="always")
def _queue_after(rows, block, older):
    newer = rows[older].newer
    rows[block].older, rows[block].newer, rows[block].queued = older, newer, True
    rows[older].newer = rows[newer].older = block


@numba.njit(inline="always")
def _leave_queue(rows, block):
    if rows[block].queued:
        rows[rows[block].older].newer = rows[block].newer
        rows[rows[block].newer].older = rows[block].older
        rows[block].queued = False


@numba.njit(inline="always")
def _bin(age_ms):
    """The bin of an age, and the part of the bin that has passed."""
    if age_ms < 1.0:
        return 0, 0.0
    mantissa, exponent = math.frexp(age_ms)
    if exponent >= NUM_BINS:
        return NUM_BINS - 1, 0.0
    return exponent, 2.0 * mantissa - 1.0


@numba.njit(inline="always")
def _level(number, base, num_levels):
    """floor(log(number)), from 0 to ``num_levels - 1``."""
    level = 0
    while number >= base and level < num_levels - 1:
        number /= base
        level += 1
    return level
