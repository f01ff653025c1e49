"""The compiled serial replay of the Gittins policy, with or without the safeguard."""

from __future__ import annotations

import numba
import numpy as np

from cache.policies.gittins_compiled import choose, evict, insert, pin, release
from cache.replay.borrowed import borrowed


@numba.njit(nogil=True, cache=True)
def replay(
    state, rows, capacity, num_ghosts, budget, block_ids, offsets, timestamps_ms, output_lengths
):
    """Replay serially, as ``cache.replay.serial`` does; returns hits and evictions per request.

    ``budget``: see :mod:`cache.policies.safeguarded`; infinite disables the safeguard.  An LRU
    cache of the same size holds the blocks whose last access has number ``lru_from`` or higher.
    """
    rows = borrowed(rows)
    hits = np.zeros(len(offsets) - 1, np.int64)
    evictions = np.zeros(len(offsets) - 1, np.int64)
    accessed = np.empty(len(block_ids) + 1, np.int32)  # the block of each access
    num_accesses = num_resident = num_in_lru = num_missing = lru_from = oldest = 0
    balance = 0.0
    ghosts = np.empty(len(block_ids) + 1, np.int32)
    ghost_number = np.full(len(rows), -1, np.int64)
    first_ghost = next_ghost = live_ghosts = 0
    for request in range(len(offsets) - 1):
        path = block_ids[offsets[request] : min(offsets[request + 1], offsets[request] + capacity)]
        state.now = timestamps_ms[request]
        hits_of_lru = 0
        while hits[request] < len(path) and rows[path[hits[request]]].resident:
            hits[request] += 1
        while hits_of_lru < len(path) and rows[path[hits_of_lru]].number >= lru_from:
            hits_of_lru += 1
        balance += hits[request] - hits_of_lru + budget * len(path)
        balance = min(balance, float(capacity))
        first_access = num_accesses
        for block in path[::-1]:
            pin(rows, block)
            if rows[block].number < lru_from:
                num_in_lru += 1
            elif not rows[block].resident:
                num_missing -= 1
            rows[block].number = num_accesses
            accessed[num_accesses] = block
            num_accesses += 1
        while num_in_lru > capacity:
            block = accessed[lru_from]
            if rows[block].number == lru_from:
                num_in_lru -= 1
                num_missing -= not rows[block].resident
            lru_from += 1

        for depth, block in enumerate(path):
            if rows[block].resident:
                continue
            if num_resident < capacity:
                num_resident += 1
            else:
                until = lru_from if num_missing + 1 > balance else num_accesses
                victim = choose(state, rows, until)
                while victim < 0:  # the block released first
                    victim = accessed[oldest]
                    if rows[victim].number != oldest or not rows[victim].released:
                        victim = -1
                        oldest += 1
                evict(rows, victim)
                num_missing += rows[victim].number >= lru_from
                evictions[request] += 1
                ghosts[next_ghost] = victim
                ghost_number[victim] = next_ghost
                next_ghost += 1
                live_ghosts += 1
                while live_ghosts > num_ghosts:
                    if ghost_number[ghosts[first_ghost]] == first_ghost:
                        ghost_number[ghosts[first_ghost]] = -1
                        rows[ghosts[first_ghost]].uses = 0
                        live_ghosts -= 1
                    first_ghost += 1
            if ghost_number[block] >= 0:
                ghost_number[block] = -1
                live_ghosts -= 1
            insert(rows, block, path[depth - 1] if depth else -1)
        time, output_tokens = timestamps_ms[request], float(output_lengths[request])
        release(state, rows, path[::-1], first_access, time, output_tokens)
    return hits, evictions
