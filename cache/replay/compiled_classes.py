"""The serial replay of a class policy, compiled by numba.

Same algorithm as ``cache.replay.serial`` running a ``ClassPolicy`` in Python, victim by victim.
Blocks are the dense ids of the trace.  The blocks of a class are in a circular list by their
release; the last records of the array are the ends of these lists.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numba
import numba.extending
import numpy as np

from cache.policies.classes import (
    LEARN_FIRST,
    NUM_BINS,
    ClassPolicy,
    age_bin,
    bits,
    worth_at,
    wrong_class,
    wrong_worth,
)
from cache.policies.queues import num_ghosts
from cache.replay.compiled import borrowed, forget_oldest, is_built_in, request_of, warmed_up
from cache.traces.trace import Trace

_BLOCK = np.dtype(
    [
        ("released_ms", np.float64),
        ("weight", np.float64),
        ("number", np.int64),  # blocks released before it
        ("uses", np.int32),  # releases that are remembered; of a block in the pool
        ("class_", np.int32),
        ("older", np.int32),  # neighbours in the list
        ("newer", np.int32),
        ("ghost", np.int32),  # its place among the ghosts plus one; 0: no ghost
        ("resident", np.bool_),
    ],
    align=True,
)
for _function in (bits, age_bin, worth_at):
    numba.extending.register_jitable(_function)


def replay_of(policy: ClassPolicy) -> Callable | None:
    """``replay(trace, capacity)``; None, with a warning, if numba cannot compile the policy."""
    run = _warmed_up(policy.classify, policy.learn, policy.num_classes, policy.name)
    return run and functools.partial(_replay, run, policy)


@functools.cache
def _warmed_up(classify, learn, num_classes: int, name: str) -> Callable | None:
    arguments = np.zeros(1, np.int32), np.array([0, 1]), 1, np.ones((1, 6)), 0
    run = _compile(classify, learn, num_classes, name)
    blocks = _no_blocks(1, num_classes)
    return warmed_up(run, (*arguments, blocks), name, (ArithmeticError, ValueError))


def _no_blocks(num_blocks: int, num_classes: int) -> np.ndarray:
    """No block is resident or known, and the classes, behind ``num_blocks`` records, are empty."""
    blocks = np.zeros(num_blocks + num_classes, _BLOCK)
    blocks["older"] = blocks["newer"] = np.arange(len(blocks))
    return blocks


def _replay(run, policy: ClassPolicy, trace: Trace, capacity: int):
    return run(
        trace.block_ids,
        trace.offsets,
        capacity,
        trace.request_facts,
        num_ghosts(policy, capacity),
        _no_blocks(trace.num_unique_blocks, policy.num_classes),
    )


def _compile(classify, learn, num_classes: int, name: str) -> Callable:
    numba.extending.register_jitable(classify)
    numba.extending.register_jitable(learn)
    of_class, of_worth = str(wrong_class(name, num_classes)), str(wrong_worth(name))
    # What comes from another file is a variable here, so that the key of a cached replay has it.
    bin_of, worth_of, num_bins, learn_first = age_bin, worth_at, NUM_BINS, LEARN_FIRST

    @numba.extending.register_jitable
    def least(blocks, worths, first_end, now):
        """The end of the list whose oldest block is worth least; of equal ones, released first."""
        least, least_worth, number = first_end, np.inf, 0
        for end in range(first_end, len(blocks)):
            head_id = blocks[end].newer
            if head_id < first_end:
                head = blocks[head_id]
                worth = worth_of(worths[head.class_], now - head.released_ms)
                if worth < least_worth or (worth == least_worth and head.number < number):
                    least, least_worth, number = end, worth, head.number
        return least

    def run(block_ids, offsets, capacity, request_facts, num_ghosts, blocks):
        blocks = borrowed(blocks)
        first_end = len(blocks) - num_classes
        num_requests = len(offsets) - 1
        hits = np.zeros(num_requests, np.int64)
        evictions = np.zeros(num_requests, np.int64)
        returned, gone = np.zeros((num_classes, num_bins)), np.zeros(num_classes)
        worths = np.zeros((num_classes, num_bins + 1))
        num_resident, num_releases, learn_at, now = 0, 0, learn_first, 0.0
        ghosts = np.empty(len(block_ids), np.int32)
        first_ghost, last_ghost, live_ghosts = 0, 0, 0
        for request in range(num_requests):
            start = offsets[request]
            facts = request_of(request_facts[request])
            now = max(now, facts.time_ms)
            ids = block_ids[start : min(offsets[request + 1], start + capacity)]
            while hits[request] < len(ids) and blocks[ids[hits[request]]].resident:
                hits[request] += 1
            for block_id in ids:
                if blocks[block_id].resident:
                    _unlink(blocks, block_id)

            end, number, released_ms = -1, -2, 0.0  # of the last victim
            for block_id in ids:
                block = blocks[block_id]
                if block.resident:
                    continue
                if num_resident < capacity:
                    num_resident += 1
                else:
                    # What was released right after the last victim, in its class, is worth as much.
                    victim = blocks[blocks[end].newer]
                    if victim.number != number + 1 or victim.released_ms != released_ms:
                        end = least(blocks, worths, first_end, now)
                    victim_id = blocks[end].newer
                    victim = blocks[victim_id]
                    number, released_ms = victim.number, victim.released_ms
                    _unlink(blocks, victim_id)
                    victim.resident = False
                    gone[victim.class_] += victim.weight
                    evictions[request] += 1
                    ghosts[last_ghost] = victim_id
                    last_ghost += 1
                    victim.ghost = last_ghost
                    live_ghosts += 1
                    if live_ghosts > num_ghosts:
                        first_ghost = forget_oldest(blocks, ghosts, first_ghost)
                        live_ghosts -= 1
                block.resident = True
                if block.ghost:
                    gone[block.class_] -= block.weight
                    block.ghost = 0
                    live_ghosts -= 1
                else:
                    block.uses = 0

            if num_releases >= learn_at:
                learn(returned, gone, worths)
                if not math.isfinite(worths.sum()):
                    raise ValueError(of_worth)
                learn_at = num_releases + max(num_releases // 4, learn_first)
            idle = np.nan
            for block_id in ids[::-1]:
                if blocks[block_id].uses:
                    idle = now - blocks[block_id].released_ms
                    break
            weight = 1.0 / math.sqrt(max(len(ids), 1))
            is_end = True
            for block_id in ids[::-1]:
                block = blocks[block_id]
                if block.uses:
                    returned[block.class_, bin_of(now - block.released_ms)] += block.weight
                block.uses += 1
                class_ = int(classify(block.uses, is_end, idle, facts))
                is_end = False
                if not 0 <= class_ < num_classes:
                    raise ValueError(of_class)
                block.class_ = class_
                block.released_ms = now
                block.weight = weight
                block.number = num_releases
                num_releases += 1
                block.newer = first_end + class_
                block.older = blocks[block.newer].older
                blocks[block.older].newer = blocks[block.newer].older = block_id
        return hits, evictions

    run.__qualname__ += f".{name}"
    is_cached = is_built_in(classify) and is_built_in(learn)
    return numba.njit(nogil=True, cache=is_cached)(run)


@numba.njit(inline="always")
def _unlink(blocks, block_id):
    blocks[blocks[block_id].older].newer = blocks[block_id].newer
    blocks[blocks[block_id].newer].older = blocks[block_id].older
