"""The state of the hazard policy and its rules, compiled by numba.

Contents are numbers from 0, given by the owner: block ids of a trace in ``cache.simulate``, numbers
of keys in a manager.  What the policy does with them is said in :mod:`cache.policies.hazard`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
import numpy as np

from cache.replay.borrowed import borrowed

NUM_BINS = 32
"""Age bin b > 0 begins at 2 ** (b - 1) ms, the last after 12 days."""
MAX_CLASSES = 512
"""Beyond these a run joins the class that lacks its last features."""
_WIDTHS = np.diff(2.0 ** (np.arange(NUM_BINS + 1) - 1.0))
_LARGEST = 15
"""Of a feature."""
_OFTEN = 2
"""The logarithm of the accesses from which on a class has a prior of its own."""
_HAZARD_OF_OFTEN = 0.9
_NONE = -1
_BEYOND = 1
"""The heap of the runs whose last block an LRU cache would not hold."""

_CONTENT = np.dtype(
    [
        ("run", np.int32),  # of the request that released it last; _NONE: not known
        ("parent", np.int32),  # the block before it, while both are resident
        ("above", np.int32),  # neighbours among the released blocks of its run
        ("below", np.int32),
        ("newer", np.int32),  # neighbours in the order of the last release
        ("older", np.int32),
        ("children", np.int32),  # resident blocks that continue it
        ("accesses", np.int32),
        ("turn", np.int32),
        ("resident", np.bool_),
        ("released", np.bool_),
        ("listed", np.bool_),  # in the order of the last release
        ("in_lru", np.bool_),  # what LRU would hold
        ("forgotten", np.int32),  # the first num_forgotten: contents whose numbers are free again
    ],
    align=True,
)
_RUN = np.dtype(
    [
        ("time", np.float64),  # of its release
        ("weight", np.float64),  # of each of its blocks in the statistics
        ("serial", np.int64),
        ("class_", np.int32),
        ("count", np.int32),  # blocks that nobody has used since, evicted ones included
        ("tail", np.int32),  # deepest released block
        ("tracked_at", np.int32),  # its places in the lists that follow
        ("evictable_at", np.int32),
        # The first num_tracked: runs with a block out, the numbers of others behind them.
        ("tracked", np.int32),
        ("evictable", np.int32),  # the first num_evictable: runs with a released block
    ],
    align=True,
)
_ENTRY = np.dtype([("value", np.float64), ("serial", np.int64), ("run", np.int64)])
_OWN = np.dtype(
    [
        ("capacity", np.int64),
        ("remembered", np.int64),  # most contents in the order of the last release
        ("budget", np.float64),
        ("shrinkage", np.float64),
        ("now", np.float64),
        ("requests", np.int64),
        ("balance", np.float64),  # hits that may be lost to LRU
        ("num_missing", np.int64),  # contents that LRU would hold and that are not here
        ("num_listed", np.int64),
        ("num_in_lru", np.int64),
        ("last_in_lru", np.int64),
        ("num_runs", np.int64),  # ever made
        ("num_tracked", np.int64),
        ("num_evictable", np.int64),
        ("num_classes", np.int64),
        ("num_forgotten", np.int64),
        ("heap_size", np.int64, 2),
        ("next_ranking", np.int64),  # the request at which the heaps are made anew
        ("next_update", np.int64),  # the request at which the indices are
        # (class, value of its next feature) to class: a tree whose root is class 0
        ("subclass", np.int16, (MAX_CLASSES, _LARGEST + 1)),
        ("parent_class", np.int16, MAX_CLASSES),
        # (class, age bin): weight of the blocks that returned at that age, of these and of those
        # that were forgotten; what follows from both
        ("returned", np.float64, (MAX_CLASSES, NUM_BINS)),
        ("ended", np.float64, (MAX_CLASSES, NUM_BINS)),
        ("hazard", np.float64, (MAX_CLASSES, NUM_BINS)),
        ("index", np.float64, (MAX_CLASSES, NUM_BINS)),
    ],
    align=True,
)


class State(NamedTuple):
    """All that a policy knows: the first arguments of every function here."""

    own: np.void
    contents: np.ndarray
    """The last one is both ends of the order of release."""
    runs: np.ndarray
    heap: np.ndarray
    """Two heaps of runs whose last block may go: LRU would hold it, or not (``_BEYOND``)."""


def make_state(
    capacity: int, num_contents: int, ghost_ratio: float, shrinkage: float, budget: float
) -> State:
    """A state for ``capacity`` blocks and contents 0 to ``num_contents - 1``."""
    own = np.zeros(1, _OWN)
    own["capacity"], own["budget"], own["shrinkage"] = capacity, budget, shrinkage
    own["remembered"] = int(capacity * (1 + ghost_ratio))
    own["num_classes"], own["last_in_lru"] = 1, num_contents
    own["subclass"] = _NONE
    contents = np.zeros(num_contents + 1, _CONTENT)
    for field in ("run", "parent", "above", "below"):
        contents[field] = _NONE
    contents["newer"] = contents["older"] = num_contents
    runs = np.zeros(num_contents, _RUN)
    runs["tracked"] = np.arange(num_contents)
    return State(own[0], contents, runs, np.empty((2, 2 * capacity), _ENTRY))


@numba.njit(cache=True)
def pin(own, contents, runs, heap, path):
    """The released contents of ``path`` are in use again."""
    for content in path:
        _take_out(own, contents, runs, heap, content)


@numba.njit(cache=True)
def evict(own, contents, runs, heap, count):
    """The ``count`` contents given up; as many are released."""
    victims = np.empty(count, np.int64)
    for at in range(count):
        victims[at] = _evict_one(own, contents, runs, heap)
    return victims


@numba.njit(inline="always")
def _take_out(own, contents, runs, heap, content):
    block = contents[content]
    run = runs[block.run]
    block.released = False
    if block.above != _NONE:
        contents[block.above].below = block.below
    if block.below != _NONE:
        contents[block.below].above = block.above
    else:
        run.tail = block.above
        if run.tail == _NONE:
            _drop_evictable(own, contents, runs, heap, run)
    block.above = block.below = _NONE


@numba.njit(cache=True)
def release(own, contents, runs, heap, path, parents, time_ms, output_tokens):
    """A request ends: the contents of ``path``, from the head of its prompt on, are released.

    ``parents`` gives the content before each, -1 for none.  ``time_ms`` NaN: a second a request.
    """
    own.requests += 1
    time = 1000.0 * own.requests if math.isnan(time_ms) else time_ms
    own.now = max(own.now, time)
    _compare_with_lru(own, contents, runs, heap, path)

    num_known = 0
    turn = 1
    for content in path:
        if contents[content].run != _NONE:
            num_known += 1
            turn = contents[content].turn + 1
    of_output = _log4(0.0 if math.isnan(output_tokens) else output_tokens)
    of_turn = min(turn, 6)
    of_newcomers = _log4(len(path) - num_known)

    current = interval_of = _NONE
    features = (_NONE, _NONE, _NONE)
    since_last = 0
    for at, content in enumerate(path):
        block = contents[content]
        is_last = at == len(path) - 1
        interval = 0
        block.accesses += 1
        if block.run != _NONE:
            old = runs[block.run]
            if interval_of != block.run:
                interval_of = block.run
                since_last = min(1 + _log4((own.now - old.time) / 1000.0), _LARGEST)
            interval = since_last
            age, _ = _bin(own.now - old.time)
            own.returned[old.class_, age] += old.weight
            _end(own, contents, runs, heap, block.run, age)
            if old.count == 0:
                interval_of = _NONE
        if block.run == _NONE or is_last:
            block.turn = turn
        if not block.resident:
            block.resident = True
            own.num_missing -= block.in_lru
            parent = parents[at]
            if parent != _NONE and contents[parent].resident:
                block.parent = parent
                contents[parent].children += 1
        found = (min(_log2(block.accesses), 5), 1 if is_last else 0, interval)
        if found != features:
            if current != _NONE:
                runs[current].weight = 1.0 / math.sqrt(runs[current].count)
            features = found
            class_ = 0
            for feature in (found[0], found[1], of_output, found[2], of_turn, of_newcomers):
                class_ = _subclass(own, contents, runs, heap, class_, feature)
            current = _new_run(own, contents, runs, heap, class_)
        run = runs[current]
        run.count += 1
        block.run = current
        block.above = run.tail
        if run.tail != _NONE:
            contents[run.tail].below = content
        run.tail = content
        block.released = True
    if current == _NONE:
        return
    runs[current].weight = 1.0 / math.sqrt(runs[current].count)
    for at in range(len(path) - 1, -1, -1):
        _make_newest(own, contents, runs, heap, path[at])
    _forget_oldest(own, contents, runs, heap)
    _offer(own, contents, runs, heap, current)


@numba.njit(cache=True)
def _evict_one(own, contents, runs, heap):
    if own.requests >= own.next_ranking:
        _rank(own, contents, runs, heap)
    chosen = np.int64(_NONE)
    if own.num_missing + 1 > own.balance:
        chosen = _first_beyond_lru(own, contents, runs, heap)
    if chosen == _NONE:
        chosen = _first_of_all(own, contents, runs, heap)
    if chosen == _NONE:
        _rank(own, contents, runs, heap)
        chosen = _first_of_all(own, contents, runs, heap)
    if chosen == _NONE:  # only what was inserted out of order continues them all
        chosen = np.int64(runs[0].evictable)
    victim = runs[chosen].tail
    block = contents[victim]
    _take_out(own, contents, runs, heap, victim)
    block.resident = False
    own.num_missing += block.in_lru
    parent, block.parent = block.parent, _NONE
    if parent != _NONE:
        contents[parent].children -= 1
        above = contents[parent]
        if above.released and above.run != block.run:  # whose entry stays where it is
            _offer(own, contents, runs, heap, above.run)
    if not block.listed:
        _forget(own, contents, runs, heap, victim)
    return victim


@numba.njit(inline="always")
def _first_of_all(own, contents, runs, heap):
    """The run of least worth, _NONE if the heaps have none."""
    inside = _first(own, contents, runs, heap, 0)
    beyond = _first(own, contents, runs, heap, _BEYOND)
    if beyond == _NONE or (inside != _NONE and heap[0, 0].value < heap[_BEYOND, 0].value):
        return inside
    return beyond


@numba.njit(inline="always")
def _first_beyond_lru(own, contents, runs, heap):
    """The run of least worth among those whose last block an LRU cache would not hold, either.

    If there is none, what LRU evicts next is given up there, too.
    """
    chosen = _first(own, contents, runs, heap, _BEYOND)
    for _ in range(own.num_in_lru):
        if chosen != _NONE:
            break
        content = own.last_in_lru
        if contents[content].resident and not contents[content].released:
            _make_newest(own, contents, runs, heap, content)
        else:
            _leave_lru(own, contents, runs, heap)
            own.num_in_lru -= 1
            chosen = _first(own, contents, runs, heap, _BEYOND)
    return chosen


@numba.njit(inline="always")
def _first(own, contents, runs, heap, side):
    """The first run of a heap whose entry is still right."""
    while own.heap_size[side]:
        entry = heap[side, 0]
        run_id = entry.run
        run = runs[run_id]
        is_current = run.serial == entry.serial and _is_leaf(own, contents, runs, heap, run)
        if is_current and contents[run.tail].in_lru == (side != _BEYOND):
            return run_id
        own.heap_size[side] -= 1
        _put(heap[side], 0, own.heap_size[side], heap[side, own.heap_size[side]])
        if is_current and side == _BEYOND:  # its last block is gone, the others are in LRU
            _offer(own, contents, runs, heap, run_id)
    return np.int64(_NONE)


@numba.njit(cache=True)
def _compare_with_lru(own, contents, runs, heap, path):
    """Count the hits of ``path`` here and in an LRU cache."""
    hits = hits_of_lru = 0
    while hits < len(path) and contents[path[hits]].resident:
        hits += 1
    while hits_of_lru < len(path) and contents[path[hits_of_lru]].in_lru:
        hits_of_lru += 1
    if len(path):
        earned = hits - hits_of_lru + own.budget * len(path)
        own.balance = min(own.balance + earned, float(own.capacity))


@numba.njit(cache=True)
def _rank(own, contents, runs, heap):
    """Make the heaps of the runs whose last block may go, of their values.

    The more runs there are the longer they wait for the next time: values change slowly, as ages
    count in logarithms.
    """
    if own.requests >= own.next_update:
        update_indices(own, contents, runs, heap)
        own.next_update = own.requests + max(1, min(2000, own.requests // 3))
    own.heap_size[:] = 0
    for at in range(own.num_evictable):
        run_id = runs[at].evictable
        run = runs[run_id]
        if _is_leaf(own, contents, runs, heap, run):
            side = 0 if contents[run.tail].in_lru else _BEYOND
            entry = heap[side, own.heap_size[side]]
            _set_entry(entry, _value(own, contents, runs, heap, run), run.serial, run_id)
            own.heap_size[side] += 1
    for side in range(2):
        for root in range(own.heap_size[side] // 2 - 1, -1, -1):
            _put(heap[side], root, own.heap_size[side], heap[side, root])
    own.next_ranking = own.requests + 1 + own.num_evictable // 32


@numba.njit(cache=True)
def update_indices(own, contents, runs, heap):
    """Hazards of all classes, parents first, and the Gittins indices that follow from them."""
    num_classes = own.num_classes
    returned, reached = own.returned[:num_classes].copy(), own.ended[:num_classes].copy()
    for at in range(own.num_tracked):  # those still out count as half through their bin
        run = runs[runs[at].tracked]
        age, _ = _bin(own.now - run.time)
        half = 0.5 * run.weight * run.count
        reached[run.class_, age] += half
        reached[run.class_, max(age - 1, 0)] += half
    for class_ in range(num_classes - 1, 0, -1):
        returned[own.parent_class[class_]] += returned[class_]
        reached[own.parent_class[class_]] += reached[class_]
    least = np.zeros(num_classes)  # of the prior
    for class_ in own.subclass[0, _OFTEN:]:
        if class_ != _NONE:
            least[class_] = _HAZARD_OF_OFTEN
    survival, space = np.empty(NUM_BINS + 1), np.empty(NUM_BINS + 1)
    hull = np.empty(NUM_BINS + 1, np.int64)
    for class_ in range(num_classes):
        so_far = 0.0
        for age in range(NUM_BINS - 1, -1, -1):
            so_far += reached[class_, age]
            prior, weight = 0.05, 1.0
            if class_:
                prior, weight = own.hazard[own.parent_class[class_], age], own.shrinkage
                if returned[0, age] > 0.0:
                    prior = max(prior, least[class_])
            hazard = (returned[class_, age] + weight * prior) / (so_far + weight)
            own.hazard[class_, age] = min(hazard, 0.999)
        _gittins(own.hazard[class_], own.index[class_], survival, space, hull)


@numba.njit(cache=True)
def _gittins(hazard, index, survival, space, hull):
    """index(a) = max over T > a of (S(a) - S(T)) / integral of S from a to T.

    That is the steepest way from the point a to one on its right in the plane of the integral and
    -S, whose end is on the upper hull of these points: O(bins) for all ages.
    """
    survival[0], space[0] = 1.0, 0.0
    for age in range(NUM_BINS):
        survival[age + 1] = survival[age] * (1.0 - hazard[age])
        space[age + 1] = space[age] + 0.5 * _WIDTHS[age] * (survival[age] + survival[age + 1])
    hull[0], size = NUM_BINS, 1
    for age in range(NUM_BINS - 1, -1, -1):
        steepest = _slope(survival, space, age, hull[size - 1])
        while size > 1:
            further = _slope(survival, space, age, hull[size - 2])
            if further < steepest:
                break
            steepest = further
            size -= 1
        index[age] = steepest
        hull[size] = age
        size += 1


@numba.njit(inline="always")
def _slope(survival, space, start, end):
    return (survival[start] - survival[end]) / (space[end] - space[start] + 1e-300)


@numba.njit(inline="always")
def _value(own, contents, runs, heap, run):
    """The Gittins index at its age: what is evicted first has the smallest."""
    age, part = _bin(own.now - run.time)
    index = own.index[run.class_]
    return index[age] + part * (index[min(age + 1, NUM_BINS - 1)] - index[age])


@numba.njit(inline="always")
def _bin(age_ms):
    """The bin of an age, and which part of the way through it the age is."""
    if age_ms < 1.0:
        return 0, 0.0
    mantissa, exponent = math.frexp(age_ms)  # mantissa in [0.5, 1)
    if exponent >= NUM_BINS:
        return NUM_BINS - 1, 0.0
    return exponent, 2.0 * mantissa - 1.0


@numba.njit(inline="always")
def _log2(value):
    return math.frexp(value)[1] - 1


@numba.njit(inline="always")
def _log4(value):
    return min((math.frexp(value + 1.0)[1] - 1) // 2, _LARGEST)


@numba.njit(inline="always")
def _subclass(own, contents, runs, heap, class_, feature):
    found = own.subclass[class_, feature]
    if found != _NONE:
        return np.int64(found)
    if own.num_classes == MAX_CLASSES:
        return class_
    new = own.num_classes
    own.num_classes += 1
    own.subclass[class_, feature] = new
    own.parent_class[new] = class_
    own.index[new] = own.index[class_]
    return new


@numba.njit(inline="always")
def _new_run(own, contents, runs, heap, class_):
    run_id = runs[own.num_tracked].tracked
    run = runs[run_id]
    run.tracked_at = own.num_tracked
    own.num_tracked += 1
    own.num_runs += 1
    run.serial, run.time, run.class_ = own.num_runs, own.now, class_
    run.count, run.tail = 0, _NONE
    run.evictable_at = own.num_evictable
    runs[own.num_evictable].evictable = run_id
    own.num_evictable += 1
    return run_id


@numba.njit(inline="always")
def _end(own, contents, runs, heap, run_id, age):
    """One block of a run is no longer out."""
    run = runs[run_id]
    own.ended[run.class_, age] += run.weight
    run.count -= 1
    if run.count == 0:  # the last of the list takes its place
        own.num_tracked -= 1
        last = runs[own.num_tracked].tracked
        runs[run.tracked_at].tracked, runs[own.num_tracked].tracked = last, run_id
        runs[last].tracked_at = run.tracked_at
        run.serial = _NONE


@numba.njit(inline="always")
def _drop_evictable(own, contents, runs, heap, run):
    own.num_evictable -= 1
    last = runs[own.num_evictable].evictable
    runs[run.evictable_at].evictable = last
    runs[last].evictable_at = run.evictable_at


@numba.njit(inline="always")
def _is_leaf(own, contents, runs, heap, run):
    return run.tail != _NONE and contents[run.tail].children == 0


@numba.njit(inline="always")
def _make_newest(own, contents, runs, heap, content):
    """Put ``content`` to the front of the order of release, and into the LRU cache."""
    ends = len(contents) - 1
    block = contents[content]
    if contents[ends].older == content:
        return
    if block.listed:
        if own.last_in_lru == content:
            own.last_in_lru = block.newer
        contents[block.newer].older = block.older
        contents[block.older].newer = block.newer
    else:
        block.listed = True
        own.num_listed += 1
    newest = contents[ends].older
    block.newer, block.older = ends, newest
    contents[newest].newer = content
    contents[ends].older = content
    if not block.in_lru:
        block.in_lru = True
        if own.num_in_lru == 0:
            own.last_in_lru = content
        if own.num_in_lru < own.capacity:
            own.num_in_lru += 1
        else:
            _leave_lru(own, contents, runs, heap)


@numba.njit(inline="always")
def _leave_lru(own, contents, runs, heap):
    """The oldest content of the LRU cache is evicted there."""
    out = contents[own.last_in_lru]
    out.in_lru = False
    own.num_missing -= not out.resident
    own.last_in_lru = out.newer
    if out.released:
        _offer(own, contents, runs, heap, out.run)


@numba.njit(cache=True)
def _forget_oldest(own, contents, runs, heap):
    """Keep the order of release as short as it is to be."""
    ends = len(contents) - 1
    while own.num_listed > own.remembered:
        content = contents[ends].newer
        block = contents[content]
        contents[ends].newer = block.newer
        contents[block.newer].older = ends
        block.listed = False
        own.num_listed -= 1
        if not block.resident:
            _forget(own, contents, runs, heap, content)


@numba.njit(cache=True)
def _forget(own, contents, runs, heap, content):
    block = contents[content]
    age, _ = _bin(own.now - runs[block.run].time)
    _end(own, contents, runs, heap, block.run, age)
    block.run = _NONE
    block.accesses = 0
    contents[own.num_forgotten].forgotten = content
    own.num_forgotten += 1


@numba.njit(inline="always")
def _offer(own, contents, runs, heap, run_id):
    """Enter a run into its heap if its last block may go."""
    run = runs[run_id]
    if not _is_leaf(own, contents, runs, heap, run):
        return
    side = 0 if contents[run.tail].in_lru else _BEYOND
    entries = heap[side]
    if own.heap_size[side] == len(entries):
        _rank(own, contents, runs, heap)
        return
    at = own.heap_size[side]
    own.heap_size[side] += 1
    value = _value(own, contents, runs, heap, run)
    while at and value < entries[(at - 1) >> 1].value:
        entries[at] = entries[(at - 1) >> 1]
        at = (at - 1) >> 1
    _set_entry(entries[at], value, run.serial, run_id)


@numba.njit(inline="always")
def _put(heap, at, size, entry):
    """Sift ``entry`` down from ``at`` in a heap of ``size``."""
    value, serial, run = entry.value, entry.serial, entry.run
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1].value < heap[child].value:
            child += 1
        if value <= heap[child].value:
            break
        heap[at] = heap[child]
        at = child
    _set_entry(heap[at], value, serial, run)


@numba.njit(inline="always")
def _set_entry(entry, value, serial, run):
    entry.value, entry.serial, entry.run = value, serial, run


@numba.njit(nogil=True, cache=True)
def replay(own, contents, runs, heap, block_ids, offsets, timestamps_ms, output_lengths):
    """Serial replay (:mod:`cache.replay.serial`); returns hits and evictions of each request."""
    contents, runs, heap = borrowed(contents), borrowed(runs), borrowed(heap)
    hits = np.zeros(len(offsets) - 1, np.int64)
    evictions = np.zeros(len(offsets) - 1, np.int64)
    resident = 0
    for request in range(len(offsets) - 1):
        start = offsets[request]
        path = block_ids[start : min(offsets[request + 1], start + own.capacity)]
        missing = 0
        own.now = max(own.now, timestamps_ms[request])
        for content in path:
            if not contents[content].resident:
                missing += 1
            elif not missing:
                hits[request] += 1
            if contents[content].released:
                _take_out(own, contents, runs, heap, content)
        evictions[request] = max(resident + missing - own.capacity, 0)
        for _ in range(evictions[request]):
            _evict_one(own, contents, runs, heap)
        resident += missing - evictions[request]
        parents = np.empty(len(path), np.int64)
        parents[1:] = path[:-1]
        parents[:1] = _NONE
        release(
            own,
            contents,
            runs,
            heap,
            path,
            parents,
            timestamps_ms[request],
            float(output_lengths[request]),
        )
        own.num_forgotten = 0  # the numbers are the trace's own
    return hits, evictions
