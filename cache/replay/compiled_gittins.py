"""The serial replay of ``gittins``, ``safeguarded`` or not, compiled by numba.

Same algorithm as ``cache.replay.serial`` running the policies in Python, block by block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numba.extending
import numpy as np

from cache.policies import gittins
from cache.policies.gittins import NUM_BINS, NUM_CLASSES, NUM_EPOCHS, Statistics
from cache.replay.compiled import ENTRY, borrowed, set_entry, sift_down, sift_up

if TYPE_CHECKING:
    from cache.traces.trace import Trace

_SHRINKAGE = 20.0
"""Weight of the parent of a class in the statistics of the class, in blocks."""
_OFTEN = 2
"""log2 of the uses from which on a block is expected to return until the statistics know."""
_HAZARD_OF_OFTEN = 0.9
_PAIRS = NUM_CLASSES // 4  # nodes above the classes: without idle time,
_KINDS = _PAIRS // 8  # and without output length
_ROOT = NUM_CLASSES + _PAIRS + _KINDS
_BLOCK = np.dtype(
    [
        ("time", np.float64),
        ("weight", np.float64),
        ("uses", np.int32),
        ("number", np.int32),  # of its latest access
        ("class_", np.int32),  # -1: forgotten
        ("epoch", np.int32),
        ("parent", np.int32),
        ("children", np.int32),
        ("next", np.int32),  # neighbours among the leaves of its class
        ("previous", np.int32),
        ("pinned_by", np.int32),
        ("ghost", np.int32),  # its place among the ghosts plus one; 0: no ghost
        ("resident", np.bool_),
        ("queued", np.bool_),
        ("in_lru", np.bool_),
    ],
    align=True,
)
_HEAD = np.dtype([("worth", np.float64), ("until", np.float64), ("number", np.int64)], align=True)
"""The first leaf of a class: its worth up to a time (0: find it again), and its number."""
_NO_LEAF = np.iinfo(np.int64).max


for _shared in (
    gittins.exponent, gittins.age_bin, gittins.class_of, gittins.weight_of, gittins.ends_epoch,
):  # fmt: skip
    numba.extending.register_jitable(_shared)
age_bin, class_of = gittins.age_bin, gittins.class_of
weight_of, ends_epoch = gittins.weight_of, gittins.ends_epoch


@numba.njit(cache=True)
def learn(statistics, epoch, now):
    """Hazards of all classes, the Gittins indices that follow, and the next epoch, returned.

    The classes are the leaves of a tree, without idle time, without output length and all.  The
    hazard of a class in an age bin is returned / reached; with little evidence it is that of the
    parent.  Blocks that are out count as half through the bin of their epoch's age.  With S(a) the
    share still out at age a, the index is the maximum over T > a of
    (S(a) - S(T)) / integral of S from a to T: the hits per block and time if a block of age a is
    kept until T at most (Gittins, 1979).
    """
    num_nodes = _ROOT + 1
    returned = np.zeros((num_nodes, NUM_BINS))
    ended = np.zeros((num_nodes, NUM_BINS))
    for old in range(max(epoch - NUM_EPOCHS + 1, 0), epoch + 1):
        age = age_bin(now - statistics.epoch_ms[old % NUM_EPOCHS])
        for class_ in range(NUM_CLASSES):
            half = statistics.out[old % NUM_EPOCHS, class_] / 2.0
            if half > 0.0:
                ended[class_, age] += half
                ended[class_, max(age - 1, 0)] += half
    returned[:NUM_CLASSES] = statistics.returned
    ended[:NUM_CLASSES] += statistics.returned
    for node in range(_ROOT):
        returned[_parent(node)] += returned[node]
        ended[_parent(node)] += ended[node]

    hazard = np.zeros((num_nodes, NUM_BINS))
    index = np.zeros((num_nodes, NUM_BINS))
    out = np.ones(NUM_BINS + 1)
    hits, space = np.zeros(NUM_BINS), np.zeros(NUM_BINS)
    for node in range(_ROOT, -1, -1):
        often = _ROOT - _KINDS + 2 * _OFTEN <= node < _ROOT
        if node < _ROOT and not often and not ended[node].any():
            hazard[node] = hazard[_parent(node)]
            index[node] = index[_parent(node)]
            continue
        reached = 0.0
        for age in range(NUM_BINS - 1, -1, -1):
            reached += ended[node, age]
            prior, weight = 0.05, 1.0
            if node < _ROOT:
                prior, weight = hazard[_parent(node), age], _SHRINKAGE
                if often and returned[_ROOT, age]:
                    prior = max(prior, _HAZARD_OF_OFTEN)
            hazard[node, age] = (returned[node, age] + weight * prior) / (reached + weight)
        for age in range(NUM_BINS):
            out[age + 1] = out[age] * (1.0 - min(hazard[node, age], 0.999))
        size = 0  # of a stack of intervals of ages, the youngest on top, by falling rate
        for age in range(NUM_BINS - 1, -1, -1):
            hit = out[age] - out[age + 1]
            taken = 2.0 ** max(age - 1, 0) * (out[age] + out[age + 1]) / 2.0
            while size and hit * space[size - 1] < hits[size - 1] * taken:
                size -= 1
                hit += hits[size]
                taken += space[size]
            hits[size], space[size] = hit, taken
            size += 1
            index[node, age] = hit / taken
    statistics.index[:] = index[:NUM_CLASSES]
    epoch += 1
    statistics.epoch_ms[epoch % NUM_EPOCHS] = now
    statistics.out[epoch % NUM_EPOCHS] = 0.0
    return epoch


@numba.njit(inline="always")
def _parent(node):
    if node < NUM_CLASSES:
        return NUM_CLASSES + node // 4
    if node < NUM_CLASSES + _PAIRS:
        return NUM_CLASSES + _PAIRS + (node - NUM_CLASSES) // 8
    return _ROOT


def replay(
    ghost_ratio: float, budget: float, trace: Trace, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Replay ``trace`` through ``gittins``; safeguarded if the budget is finite.

    Returns hit blocks and evictions of each request, and the class of each block reference, -1 for
    blocks beyond the capacity.
    """
    blocks = np.zeros(trace.num_unique_blocks + NUM_CLASSES, _BLOCK)
    longest = int(np.diff(trace.offsets).max(initial=0))
    return _run(
        trace.block_ids, trace.offsets, capacity, trace.timestamps_ms, trace.output_lengths,
        blocks, np.zeros(NUM_CLASSES, _HEAD), np.empty(4 * NUM_CLASSES + 2 * longest, ENTRY),
        Statistics.make(), int(ghost_ratio * capacity), budget,
    )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def _run(
    block_ids, offsets, capacity, times_ms, outputs,
    blocks, heads, heap, learned, num_ghosts, budget,
):  # fmt: skip
    blocks, heads, heap = borrowed(blocks), borrowed(heads), borrowed(heap)
    returned, out = borrowed(learned.returned), borrowed(learned.out)
    index = borrowed(learned.index)
    num_requests = len(offsets) - 1
    hits, evictions = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int64)
    classes = np.full(len(block_ids), -1, np.int16)
    for at in range(len(blocks)):
        blocks[at].class_ = blocks[at].pinned_by = blocks[at].parent = -1
        blocks[at].next = blocks[at].previous = at
    accessed = np.zeros(len(block_ids), np.int32)  # block of each access, by its number
    num_accesses = first = first_in_lru = num_in_lru = 0
    ghosts = np.zeros(len(block_ids), np.int32)
    first_ghost = last_ghost = live_ghosts = 0
    is_known = np.zeros(NUM_CLASSES, np.bool_)
    known = np.zeros(NUM_CLASSES, np.int64)
    num_known = num_entries = 0
    resident = epoch = missing = 0
    balance = now = 0.0
    for request in range(num_requests):
        start = offsets[request]
        end = min(offsets[request + 1], start + capacity)
        now = max(now, float(times_ms[request]))
        hit = start
        while hit < end and blocks[block_ids[hit]].resident:
            hit += 1
        hits[request] = hit - start
        hit_of_lru = start
        while hit_of_lru < end and blocks[block_ids[hit_of_lru]].in_lru:
            hit_of_lru += 1
        balance += hit - hit_of_lru + budget * (end - start)
        if budget < np.inf:
            balance = min(balance, float(capacity))
        idle = -1.0
        for at in range(end - 1, start - 1, -1):
            block_id = block_ids[at]
            block = blocks[block_id]
            block.pinned_by = request
            if block.queued:
                _unlink(blocks, heads, block_id)
            if block.class_ >= 0 and idle < 0.0:
                idle = now - block.time
            if block.in_lru:
                missing -= not block.resident
            else:
                block.in_lru = True
                num_in_lru += 1
            block.number = num_accesses
            accessed[num_accesses] = block_id
            num_accesses += 1
        while num_in_lru > capacity:
            block = blocks[accessed[first_in_lru]]
            if block.number == first_in_lru and block.in_lru:
                block.in_lru = False
                num_in_lru -= 1
                missing -= not block.resident and block.pinned_by != request
            first_in_lru += 1
        if resident + end - hit > capacity:
            if num_entries > 3 * NUM_CLASSES:  # mostly stale ones
                num_entries = 0
                _find_again(heads)
            for at in range(num_known):
                if heads[known[at]].until <= now:
                    num_entries = _rank(heads, heap, num_entries, blocks, known[at], index, now)

        for at in range(hit, end):
            block_id = block_ids[at]
            block = blocks[block_id]
            if block.resident:
                continue
            if resident < capacity:
                resident += 1
            else:
                before = num_accesses
                if missing + 1 > balance:
                    while blocks[accessed[first_in_lru]].number != first_in_lru:
                        first_in_lru += 1
                    before = first_in_lru
                class_ = -1
                if before < num_accesses:
                    for at_known in range(num_known):
                        head = heads[known[at_known]]
                        if head.number < before and (
                            class_ < 0
                            or head.worth < heads[class_].worth
                            or (
                                head.worth == heads[class_].worth
                                and head.number < heads[class_].number
                            )
                        ):
                            class_ = known[at_known]
                while before == num_accesses and num_entries and class_ < 0:
                    head = heads[heap[0].block]
                    if head.number == heap[0].ticket and head.worth == heap[0].priority:
                        class_ = heap[0].block
                    num_entries -= 1
                    heap[0] = heap[num_entries]
                    sift_down(heap, 0, num_entries)
                victim_id = blocks[_list(blocks, class_)].next
                if class_ < 0:  # the block released first
                    while True:
                        victim_id = accessed[first]
                        victim = blocks[victim_id]
                        if (
                            victim.number == first
                            and victim.resident
                            and victim.pinned_by != request
                        ):
                            break
                        first += 1
                victim = blocks[victim_id]
                if victim.queued:
                    _unlink(blocks, heads, victim_id)
                    num_entries = _rank(heads, heap, num_entries, blocks, victim.class_, index, now)
                victim.resident = False
                missing += victim.in_lru
                evictions[request] += 1
                if victim.parent >= 0:
                    parent = blocks[victim.parent]
                    parent.children -= 1
                    if not parent.children and parent.resident and parent.pinned_by != request:
                        _link(blocks, heads, victim.parent)
                        if heads[parent.class_].until == 0.0:
                            num_entries = _rank(
                                heads, heap, num_entries, blocks, parent.class_, index, now
                            )
                ghosts[last_ghost] = victim_id
                last_ghost += 1
                victim.ghost = last_ghost
                live_ghosts += 1
                while live_ghosts > num_ghosts:
                    ghost = blocks[ghosts[first_ghost]]
                    first_ghost += 1
                    if ghost.ghost == first_ghost:
                        ghost.ghost = 0
                        ghost.class_ = -1
                        ghost.uses = 0
                        live_ghosts -= 1
            block.resident = True
            live_ghosts -= block.ghost > 0
            block.ghost = 0
            block.children = 0
            block.parent = block_ids[at - 1] if at > start else -1
            if at > start:
                blocks[block.parent].children += 1

        weight = weight_of(end - start)
        for at in range(end - 1, start - 1, -1):
            block_id = block_ids[at]
            block = blocks[block_id]
            if block.class_ >= 0:
                returned[block.class_, age_bin(now - block.time)] += block.weight
                if epoch - block.epoch < NUM_EPOCHS:
                    out[block.epoch % NUM_EPOCHS, block.class_] -= block.weight
            block.uses += 1
            block.class_ = class_of(block.uses, at == end - 1, float(outputs[request]), idle)
            classes[at] = block.class_
            out[epoch % NUM_EPOCHS, block.class_] += weight
            block.time, block.weight, block.epoch = now, weight, epoch
            if not is_known[block.class_]:
                is_known[block.class_] = True
                known[num_known] = block.class_
                num_known += 1
            if not block.children:
                _link(blocks, heads, block_id)
        if ends_epoch(request):
            epoch = learn(learned, epoch, now)
            num_entries = 0
            _find_again(heads)
    return hits, evictions, classes


@numba.njit(inline="always")
def _list(blocks, class_):
    """Both ends of the leaves of a class."""
    return len(blocks) - NUM_CLASSES + class_


@numba.njit
def _find_again(heads):
    for class_ in range(NUM_CLASSES):
        heads[class_].until = 0.0


@numba.njit
def _rank(heads, heap, num_entries, blocks, class_, index, now):
    """Find the worth of the first leaf of a class; returns the new number of entries."""
    at, head = blocks[_list(blocks, class_)].next, heads[class_]
    if at >= len(blocks) - NUM_CLASSES:
        head.until, head.number = np.inf, _NO_LEAF
        return num_entries
    age = age_bin(now - blocks[at].time)
    head.worth, head.number = index[class_, age], blocks[at].number
    head.until = blocks[at].time + 2.0**age if age < NUM_BINS - 1 else np.inf
    set_entry(heap, num_entries, head.worth, head.number, class_)
    sift_up(heap, num_entries)
    return num_entries + 1


@numba.njit
def _link(blocks, heads, at):
    """Queue a leaf in its class, by its number."""
    end = _list(blocks, blocks[at].class_)
    after = blocks[end].previous
    if after != end and blocks[after].number > blocks[at].number:
        after = end
        while blocks[blocks[after].next].number < blocks[at].number:
            after = blocks[after].next
    before = blocks[after].next
    blocks[after].next = blocks[before].previous = at
    blocks[at].previous, blocks[at].next = after, before
    blocks[at].queued = True
    if after == end:
        heads[blocks[at].class_].until = 0.0


@numba.njit
def _unlink(blocks, heads, at):
    block = blocks[at]
    blocks[block.previous].next = block.next
    blocks[block.next].previous = block.previous
    block.queued = False
    if block.previous == _list(blocks, block.class_):
        heads[block.class_].until = 0.0
