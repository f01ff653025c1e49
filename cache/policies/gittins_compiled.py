"""Classes of blocks, their statistics and Gittins indices, compiled by numba for ``gittins``.

A block is a record of an array.  The blocks of a class are in a circular list by their latest
release; the last records of the array are the beginnings of these lists.  Sums are loops where
numba would take seconds to compile an expression of arrays.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from cache.replay.compiled import borrowed

_SHAPE = 8, 5, 4
"""Classes by uses (0: the end of a prompt, used once), by output length and by idle time."""
NUM_CLASSES = math.prod(_SHAPE)
_GROUP = NUM_CLASSES // _SHAPE[0]
"""Classes of blocks with the same uses."""
_NUM_BINS = 32
"""Age bin b > 0 begins at 2 ** (b - 1) ms, the last after 12 days."""
_NUM_EPOCHS = 16
_LEARN_FIRST, _LEARN_LAST = 512, 8192
"""Least and most releases of blocks from one estimate to the next; an eighth of all in between."""
_SHRINKAGE = 10.0
"""Weight of the group of a class in the statistics of the class."""
_OFTEN_USED, _HAZARD_OF_OFTEN_USED = 3, 0.9
"""Blocks with four uses and more are taken to return until the statistics know."""

BLOCK = np.dtype(
    [
        ("released_ms", np.float64),
        ("number", np.int64),  # blocks released before it
        ("weight", np.float64),  # in the statistics
        ("uses", np.int32),  # releases, remembered ones before an eviction included
        ("class_", np.int32),
        ("older", np.int32),  # neighbours in the list; of a block in use, itself
        ("newer", np.int32),
    ]
)
STATE = np.dtype(
    [
        ("num_releases", np.int64),
        ("memory", np.int64),  # releases for which a block is remembered
        ("learn_at", np.int64),  # releases
        ("num_epochs", np.int64),
        ("begun", np.int64, _NUM_EPOCHS),  # of an epoch: releases before it
        ("begun_ms", np.float64, _NUM_EPOCHS),
        ("out", np.float64, (_NUM_EPOCHS, NUM_CLASSES)),  # weights, by epoch of release
        ("returned", np.float64, (NUM_CLASSES, _NUM_BINS)),  # weights, by age
        ("index", np.float64, (NUM_CLASSES, _NUM_BINS + 1)),
        ("ranked_ms", np.float64),  # NaN: to be ranked anew
        ("num_ranked", np.int64),  # classes that had blocks then
        ("heads", np.int32, NUM_CLASSES),  # their oldest blocks
        ("worths", np.float64, NUM_CLASSES),  # of these
    ]
)


def empty(num_blocks: int, memory: int) -> tuple[np.ndarray, np.ndarray]:
    """``(blocks, states)`` of ``num_blocks`` blocks in use and one state, before any release."""
    blocks = np.zeros(num_blocks + NUM_CLASSES, BLOCK)
    blocks["older"] = blocks["newer"] = np.arange(len(blocks))
    blocks["older"][num_blocks:] = blocks["newer"][num_blocks:] = np.arange(-NUM_CLASSES, 0)
    states = np.zeros(1, STATE)  # numba takes a microsecond for an array, and eight for a record
    states["memory"] = memory
    return blocks, states


def with_room(blocks: np.ndarray, block: int) -> np.ndarray:
    """``blocks``, or a longer copy if it has no record for ``block``."""
    num_blocks = len(blocks) - NUM_CLASSES
    if block < num_blocks:
        return blocks
    longer, _ = empty(2 * block + 1, 0)
    longer[:num_blocks], longer[-NUM_CLASSES:] = blocks[:num_blocks], blocks[num_blocks:]
    return longer


def insert(blocks: np.ndarray, block: int, history: np.ndarray | None) -> None:
    """``block`` begins to hold what has this ``history``, a former record of it; it is in use."""
    blocks[block] = np.zeros((), BLOCK) if history is None else history[0]
    blocks[block]["older"] = blocks[block]["newer"] = block


@njit(cache=True)
def pin(blocks, block, states):
    """Take ``block``, which is in use now, out of its list."""
    states[0].ranked_ms = np.nan
    _unlink(blocks, block)


@njit(cache=True)
def _unlink(blocks, block):
    blocks[blocks[block].older].newer = blocks[block].newer
    blocks[blocks[block].newer].older = blocks[block].older
    blocks[block].older = blocks[block].newer = block


@njit(cache=True)
def release(blocks, released, states, now, output_tokens):
    """The blocks ``released``, the deepest first, were used just now; they join their lists."""
    state = states[0]
    if state.num_releases >= state.learn_at:
        _learn(state, now)
    oldest = state.num_releases - state.memory
    idle = 0
    for at in range(len(released)):
        block = blocks[released[at]]
        if block.uses and block.number >= oldest:
            idle = 1 + _log4_class(now - block.released_ms, 12, _SHAPE[2] - 1)  # from 16 s on
            break
    length = _log4_class(output_tokens, 2, _SHAPE[1])  # from 16 tokens on
    weight = 1.0 / math.sqrt(max(len(released), 1))
    state.ranked_ms = np.nan
    for at in range(len(released)):
        block = blocks[released[at]]
        if block.number < oldest:
            block.uses = 0
        if block.uses:
            state.returned[block.class_, _age_bin(now - block.released_ms)] += block.weight
            epoch = state.num_epochs - 1
            while state.begun[epoch] > block.number:
                epoch -= 1
            state.out[epoch, block.class_] -= block.weight
        block.uses += 1
        is_new_end = at == 0 and block.uses == 1
        kind = 0 if is_new_end else min(1 + _log2(block.uses), _SHAPE[0] - 1)
        block.class_ = (kind * _SHAPE[1] + length) * _SHAPE[2] + idle
        block.weight = weight
        block.released_ms = now
        block.number = state.num_releases
        state.num_releases += 1
        state.out[state.num_epochs - 1, block.class_] += weight
        end = block.class_ - NUM_CLASSES
        block.newer = end
        block.older = blocks[end].older
        blocks[block.older].newer = blocks[end].older = released[at]


@njit(cache=True)
def evict(blocks, states, now):
    """Take the block of least worth out of its list and return it.  There must be one."""
    state = states[0]
    if state.ranked_ms != now:
        state.ranked_ms = now
        state.num_ranked = 0
        for end in range(-NUM_CLASSES, 0):
            head = blocks[end].newer
            if head >= 0:
                state.heads[state.num_ranked] = head
                state.worths[state.num_ranked] = _worth(blocks[head], state, now)
                state.num_ranked += 1
    least = 0
    for place in range(1, state.num_ranked):
        worth, least_worth = state.worths[place], state.worths[least]
        if worth < least_worth or (
            worth == least_worth
            and blocks[state.heads[place]].number < blocks[state.heads[least]].number
        ):
            least = place
    victim = state.heads[least]
    state.heads[least] = head = blocks[victim].newer
    _unlink(blocks, victim)
    if head < 0:
        state.num_ranked -= 1
        state.heads[least] = state.heads[state.num_ranked]
        state.worths[least] = state.worths[state.num_ranked]
    elif blocks[head].released_ms != blocks[victim].released_ms:
        state.worths[least] = _worth(blocks[head], state, now)
    return victim


@njit(cache=True)
def _worth(block, state, now):
    """The index of the block's class at its age, interpolated between the ends of an age bin."""
    age = now - block.released_ms
    bin_ = _age_bin(age)
    begin, width = _bin_ms(bin_)
    part = (age - begin) / width if 0 < bin_ < _NUM_BINS - 1 else 0.0
    index = state.index[block.class_]
    return index[bin_] + part * (index[bin_ + 1] - index[bin_])


@njit(cache=True)
def _learn(state, now):
    """Begin an epoch, and find the indices that follow from those before."""
    epoch = state.num_epochs
    reached = reached_ages(state.out[:epoch], state.begun_ms[:epoch], state.returned, now)
    gittins_indices(estimate_hazards(state.returned, reached), state.index)
    if epoch == _NUM_EPOCHS:  # two become one
        epoch //= 2
        for at in range(epoch):
            state.begun[at] = state.begun[2 * at]
            state.begun_ms[at] = state.begun_ms[2 * at]
            for class_ in range(NUM_CLASSES):
                state.out[at, class_] = state.out[2 * at, class_] + state.out[2 * at + 1, class_]
        state.out[epoch:] = 0.0
    state.begun[epoch] = state.num_releases
    state.begun_ms[epoch] = now
    state.num_epochs = epoch + 1
    step = min(max(state.num_releases // 8, _LEARN_FIRST), _LEARN_LAST)
    state.learn_at = state.num_releases + step


@njit(cache=True)
def reached_ages(out, begun_ms, returned, now):
    """Weight ``(classes, bins)`` of the blocks that reached an age bin.

    Blocks that returned, ``(classes, bins)`` by age, reached all bins until then.  Blocks that are
    still out, ``(epochs, classes)`` by epoch of release, reached those until the age of the epoch,
    which began at ``begun_ms``, and a part of the last.
    """
    reached = np.zeros_like(returned)
    for class_ in range(NUM_CLASSES):
        later = 0.0
        for bin_ in range(_NUM_BINS - 1, -1, -1):
            later += returned[class_, bin_]
            reached[class_, bin_] = later
    parts = np.empty(_NUM_BINS)
    for epoch in range(len(out)):
        for bin_ in range(_NUM_BINS):
            begin, width = _bin_ms(bin_)
            parts[bin_] = min(max((now - begun_ms[epoch] - begin) / width, 0.0), 1.0)
        for class_ in range(NUM_CLASSES):
            row, weight = reached[class_], out[epoch, class_]
            for bin_ in range(_NUM_BINS):
                row[bin_] += weight * parts[bin_]
    return reached


@njit(cache=True)
def estimate_hazards(returned, reached):
    """The hazards ``(classes, bins)``: the chance to return in an age bin if not before it.

    A hazard is returned / reached (Kaplan and Meier, 1958), both ``(classes, bins)``.  With little
    evidence it is shrunk to that of the classes with the same uses, and this to that of all.
    """
    hazards = np.empty_like(returned)
    for bin_ in range(_NUM_BINS):
        returns = returned[:, bin_].sum()
        of_all = returns / max(reached[:, bin_].sum(), 1e-300)
        for kind in range(_SHAPE[0]):
            hazard = of_all
            if kind >= _OFTEN_USED and returns > 0.0:
                hazard = max(hazard, _HAZARD_OF_OFTEN_USED)
            begin, end = kind * _GROUP, (kind + 1) * _GROUP
            some, trials = returned[begin:end, bin_].sum(), reached[begin:end, bin_].sum()
            hazard = (some + _SHRINKAGE * hazard) / (trials + _SHRINKAGE)
            for class_ in range(begin, end):
                some, trials = returned[class_, bin_], reached[class_, bin_]
                hazards[class_, bin_] = (some + _SHRINKAGE * hazard) / (trials + _SHRINKAGE)
    return hazards


@njit(cache=True)
def gittins_indices(hazards, index):
    """Write to ``index``, ``(classes, bins + 1)``, what follows from ``hazards``.

    With S(a) the share still out at age a, the Gittins index (1979) is the maximum over T > a of
    (S(a) - S(T)) / integral of S from a to T: the hits per block and time if a block of age a is
    kept until T at most.  It is raised to that of fewer uses, so that a prompt goes from its end.
    """
    hits, space, left = np.empty(_NUM_BINS), np.empty(_NUM_BINS), np.empty(_NUM_BINS)
    until = np.empty(_NUM_BINS, np.int64)  # T, for each age
    for class_ in range(NUM_CLASSES):
        for age in range(_NUM_BINS - 1, -1, -1):
            hits[age] = hazards[class_, age]
            left[age] = 1.0 - hits[age]
            space[age] = _bin_ms(age)[1] * (1.0 + left[age]) / 2.0
            end = age + 1
            while end < _NUM_BINS and hits[end] * space[age] > hits[age] * space[end]:
                hits[age] += left[age] * hits[end]
                space[age] += left[age] * space[end]
                left[age] *= left[end]
                end = until[end]
            until[age] = end
            index[class_, age] = hits[age] / space[age]
            if class_ >= 2 * _GROUP:
                index[class_, age] = max(index[class_, age], index[class_ - _GROUP, age])


@njit(cache=True)
def _bin_ms(bin_):
    """Begin and width of an age bin."""
    begin = float((1 << bin_) >> 1)
    return begin, max(begin, 1.0)


@njit(cache=True)
def _age_bin(age_ms):
    return min(_log2(age_ms) + 1, _NUM_BINS - 1) if age_ms >= 1.0 else 0


@njit(cache=True)
def _log4_class(number, log2_of_first, num_classes):
    return min(max(_log2(number) - log2_of_first, 0) // 2, num_classes - 1)


@njit(cache=True)
def _log2(number):
    """Whole part of log2; 0 below 2 and if unknown."""
    return (np.float64(number).view(np.int64) >> 52) - 1023 if number >= 1.0 else 0


@njit(cache=True, nogil=True)
def replay(block_ids, offsets, capacity, times_ms, outputs, blocks, states):
    """``cache.replay.serial`` with this policy: ``(hit_blocks, evictions)`` of each request."""
    blocks = borrowed(blocks)
    num_requests = len(offsets) - 1
    hits, evictions = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int64)
    resident = np.zeros(len(blocks), np.bool_)
    num_resident = 0
    for request in range(num_requests):
        start = offsets[request]
        ids = block_ids[start : min(offsets[request + 1], start + capacity)]
        while hits[request] < len(ids) and resident[ids[hits[request]]]:
            hits[request] += 1
        for block in ids:
            if resident[block]:
                pin(blocks, block, states)
        for block in ids:
            if resident[block]:
                continue
            if num_resident == capacity:
                resident[evict(blocks, states, times_ms[request])] = False
                evictions[request] += 1
            else:
                num_resident += 1
            resident[block] = True
        release(blocks, ids[::-1], states, times_ms[request], outputs[request])
    return hits, evictions
