"""The serial replay of a priority policy, compiled by numba.

Same algorithm as ``cache.replay.serial`` running a ``PriorityPolicy`` in Python, block by block
and tie by tie, at some ten to a hundred nanoseconds per block reference.  Blocks are the dense ids
of the trace, so the state of a block is one record in an array.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import numba
import numba.extending
import numpy as np

import cache.policies
from cache.policies.base import Request
from cache.policies.priority import BlockHistory, PriorityPolicy
from cache.policies.queues import num_ghosts
from cache.traces.trace import Trace

_BLOCK = np.dtype(
    [
        ("priority", np.float64),
        ("ticket", np.int64),  # number of the queue entry that counts; settles ties
        ("inserted", np.int32),
        ("accesses", np.int32),
        ("pinned_by", np.int32),  # last request that used the block
        ("depth", np.int32),
        ("accessed", np.int32),  # its last release; 0: none is remembered
        ("before", np.int32),  # accesses before the eviction, if remembered
        ("children", np.int32),
        ("parent", np.int32),
        ("ghost", np.int32),  # its place among the ghosts plus one; 0: no ghost
        ("resident", np.bool_),
        ("queued", np.bool_),  # whether the entry that counts is still in a queue
    ],
    align=True,
)
# The key of a cached replay has the code of its priority, and not its name alone.
numba.cloudpickle.register_pickle_by_value(cache.policies)
_EXACT = 2.0**53
"""Up to here every integer is a float64."""
_ENTRY = np.dtype([("priority", np.float64), ("ticket", np.int64), ("block", np.int64)])


def replay_of(policy: PriorityPolicy, priority: Callable[..., float]) -> Callable | None:
    """``replay(trace, capacity)`` -> ``(hit_blocks, evictions)`` with the policy's ``priority``.

    None, with a warning, if numba cannot compile it; None if its integers are too large at once.
    """
    own = policy.own_state(1)
    compiled = _warmed_up(priority, policy.needs_future, own is not None and own.dtype)
    return compiled and functools.partial(_replay, compiled, policy)


@functools.cache
def _warmed_up(priority, needs_future: bool, own_dtype):
    """The replay of ``priority``, compiled by a tiny replay before any time is measured."""
    replay = compile_replay(priority, bool(own_dtype))
    own = np.ones(1, own_dtype)[0] if own_dtype else None
    arguments = (
        np.zeros(1, np.int32), np.array([0, 1]), 1, 1, needs_future,
        np.ones((1, 6)), 0, own, np.zeros((1, 1)),
    )  # fmt: skip
    tolerated = (ArithmeticError, ValueError) if own_dtype else ()
    return warmed_up(replay, arguments, priority.__qualname__, tolerated)


@numba.njit
def request_of(facts):
    return Request(facts[0], facts[1], facts[2], facts[3], facts[4], facts[5])


def warmed_up(run: Callable, arguments: tuple, name: str, tolerated: tuple) -> Callable | None:
    """``run``, compiled by a call with ``arguments``, which may raise ``tolerated`` errors.

    None if its integers are too large, or, with a warning, if numba cannot compile it.
    """
    try:
        run(*arguments)
    except OverflowError:
        return None
    except tolerated:
        pass
    except Exception as error:  # numba raises errors of many kinds
        reason = str(error).partition("\n")[0]
        warnings.warn(f"{name} runs in Python: numba: {reason}", stacklevel=6)
        return None
    return run


def _replay(compiled, policy: PriorityPolicy, trace: Trace, capacity: int):
    return compiled(
        trace.block_ids,
        trace.offsets,
        trace.num_unique_blocks,
        capacity,
        policy.needs_future,
        trace.request_facts,
        num_ghosts(policy, capacity),
        policy.own_state(capacity),
        np.zeros((trace.num_unique_blocks, policy.memory_size)),
    )


def compile_replay(priority: Callable[..., float], has_own: bool) -> Callable:
    """Compile the replay for one priority function, with a second argument if it ``has_own``.

    Returns ``replay(block_ids, offsets, num_unique, capacity, needs_future, request_facts,
    num_ghosts, own, memory)`` -> ``(hit_blocks, evictions)``, of each request.  Raises
    numba's own error, at the first call, if numba cannot compile ``priority``.  Replays of built-in
    policies are cached on disk beside this file (``NUMBA_CACHE_DIR`` moves them).

    ``priority`` is computed in float64.  Without a state of its own it may be an integer in Python,
    so ``replay`` raises OverflowError beyond 2**53, where float64 rounds integers.
    """
    numba.extending.register_jitable(priority)

    @numba.extending.register_jitable
    def rank(history, own):
        if has_own:
            value = priority(history, own)
        else:
            value = priority(history)
            if _EXACT < abs(value) < np.inf:
                raise OverflowError("a priority is beyond 2**53")
        if value != value:
            raise ValueError("the policy's priority of a block is nan, not a number")
        return value

    def replay(block_ids, offsets, num_unique, capacity, needs_future, *others):
        blocks = np.zeros(num_unique, _BLOCK)
        blocks["pinned_by"] = -1
        queues = np.empty((2, 2 * min(capacity, num_unique) + 64), _ENTRY)
        next_uses = np.empty(0)
        if needs_future:
            next_uses = next_uses_of(block_ids, offsets, num_unique, capacity)
        return run(block_ids, offsets, capacity, next_uses, blocks, queues, *others)

    def run(
        block_ids, offsets, capacity, next_uses, blocks, queues,
        request_facts, num_ghosts, own, memory,
    ):  # fmt: skip
        blocks, rising, heap = borrowed(blocks), borrowed(queues[0]), borrowed(queues[1])
        memory = borrowed(memory)
        num_requests = len(offsets) - 1
        hits = np.zeros(num_requests, np.int64)
        queue_size = len(rising)
        rising_head = 0
        rising_tail = 0
        heap_size = 0
        resident = 0
        evictions = np.zeros(num_requests, np.int64)
        tickets = 0
        clock = 0.0
        ghosts = np.empty(len(block_ids) if num_ghosts else 0, np.int32)
        first_ghost = 0
        last_ghost = 0
        live_ghosts = 0

        for request in range(num_requests):
            start = offsets[request]
            end = min(offsets[request + 1], start + capacity)

            hit = start
            while hit < end and blocks[block_ids[hit]].resident:
                hit += 1
            hits[request] = hit - start
            for at in range(start, end):
                blocks[block_ids[at]].pinned_by = request

            for at in range(hit, end):
                block = blocks[block_ids[at]]
                if block.resident:
                    continue
                if resident < capacity:
                    resident += 1
                else:
                    while True:
                        if rising_head < rising_tail and (
                            heap_size == 0 or _before(rising[rising_head], heap[0])
                        ):
                            ticket = rising[rising_head].ticket
                            victim_priority = rising[rising_head].priority
                            victim_id = rising[rising_head].block
                            rising_head += 1
                        else:
                            ticket = heap[0].ticket
                            victim_priority = heap[0].priority
                            victim_id = heap[0].block
                            heap_size -= 1
                            if heap_size:
                                heap[0] = heap[heap_size]
                                _sift_down(heap, 0, heap_size)
                        victim = blocks[victim_id]
                        if victim.ticket != ticket or not victim.queued:
                            continue
                        victim.queued = False
                        if victim.pinned_by != request:
                            break
                    victim.resident = False
                    evictions[request] += 1
                    clock = victim_priority
                    if victim.depth:
                        blocks[victim.parent].children -= 1
                    if num_ghosts:
                        ghosts[last_ghost] = victim_id
                        last_ghost += 1
                        victim.ghost = last_ghost
                        live_ghosts += 1
                    if live_ghosts > num_ghosts:
                        first_ghost = forget_oldest(blocks, ghosts, first_ghost)
                        live_ghosts -= 1
                block.resident = True
                block.queued = False
                block.priority = np.nan
                block.inserted = 0
                if block.ghost:
                    block.ghost = 0
                    live_ghosts -= 1
                    block.before += block.accesses
                else:
                    block.before = 0
                    block.accessed = 0
                block.accesses = 0
                memory[block_ids[at]] = 0.0
                block.depth = at - start
                if block.depth:
                    block.parent = block_ids[at - 1]
                    blocks[block.parent].children += 1

            time = request + 1
            facts = request_of(request_facts[request])
            for at in range(end - 1, start - 1, -1):
                block_id = block_ids[at]
                block = blocks[block_id]
                block.accesses += 1
                if block.inserted == 0:
                    block.inserted = time
                next_use = next_uses[at] if len(next_uses) else np.nan
                interval = float(time - block.accessed) if block.accessed else np.nan
                block.accessed = time
                priority = rank(
                    BlockHistory(
                        np.float64(block_id),
                        np.float64(time),
                        np.float64(block.inserted),
                        np.float64(block.accesses),
                        next_use,
                        np.float64(block.depth),
                        clock,
                        np.float64(block.children),
                        np.float64(block.before + block.accesses),
                        interval,
                        facts,
                        memory[block_id],
                    ),
                    own,
                )
                if priority == block.priority:
                    if not block.queued:  # it was dropped while in use and takes its place again
                        block.queued = True
                        heap_size = _heap_push(
                            heap, heap_size, priority, block.ticket, block_id, blocks
                        )
                    continue
                tickets += 1
                block.priority = priority
                block.ticket = tickets
                block.queued = True
                while rising_head < rising_tail and priority < rising[rising_tail - 1].priority:
                    rising_tail -= 1
                    last = rising[rising_tail]
                    heap_size = _heap_push(
                        heap, heap_size, last.priority, last.ticket, last.block, blocks
                    )
                if rising_tail == queue_size:
                    rising_tail = _drop_stale(rising, rising_head, rising_tail, blocks)
                    rising_head = 0
                _set(rising, rising_tail, priority, tickets, block_id)
                rising_tail += 1
        return hits, evictions

    # A file for each policy: two processes that add to one at once can mix up what is in it.
    run.__qualname__ += f".{priority.__qualname__}"
    run = numba.njit(nogil=True, cache=is_built_in(priority))(run)
    return replay


def is_built_in(function: Callable) -> bool:
    """Whether its compiled form may be cached on disk.

    A policy from elsewhere may call files whose changes would not be noticed.
    """
    return function.__module__.startswith("cache.policies.")


@numba.extending.intrinsic
def _as_pointer(_typing_context, _address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(numba.types.voidptr))

    return numba.types.voidptr(numba.types.intp), generate


@numba.njit(inline="always")
def borrowed(array):
    """The array without an owner, for compiled functions whose caller keeps it.

    Numba counts the references of an array at each access of a record in it, by atomic
    instructions that take up to two thirds of the time.
    """
    return numba.carray(_as_pointer(array.ctypes.data), array.shape, array.dtype)


@numba.njit
def forget_oldest(blocks, ghosts, first_ghost):
    """Forget the oldest of ``ghosts`` that is one still; returns the place of the next."""
    while True:
        ghost = blocks[ghosts[first_ghost]]
        first_ghost += 1
        if ghost.ghost == first_ghost:
            ghost.ghost = 0
            return first_ghost


@numba.njit(inline="always")
def _set(queue, at, priority, ticket, block):
    queue[at].priority = priority
    queue[at].ticket = ticket
    queue[at].block = block


@numba.njit(inline="always")
def _before(a, b):
    return a.priority < b.priority or (a.priority == b.priority and a.ticket < b.ticket)


@numba.njit
def _heap_push(heap, size, priority, ticket, block, blocks):
    """Add an entry, dropping the stale ones first if there is no room; returns the new size."""
    if size == len(heap):
        size = _drop_stale(heap, 0, size, blocks)
        for root in range(size // 2 - 1, -1, -1):
            _sift_down(heap, root, size)
    _set(heap, size, priority, ticket, block)
    _sift_up(heap, size)
    return size + 1


@numba.njit
def _sift_up(heap, at):
    priority, ticket, block = heap[at].priority, heap[at].ticket, heap[at].block
    while at:
        parent = (at - 1) >> 1
        above = heap[parent]
        if above.priority < priority or (above.priority == priority and above.ticket < ticket):
            break
        heap[at] = above
        at = parent
    _set(heap, at, priority, ticket, block)


@numba.njit
def _sift_down(heap, at, size):
    priority, ticket, block = heap[at].priority, heap[at].ticket, heap[at].block
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _before(heap[child + 1], heap[child]):
            child += 1
        below = heap[child]
        if priority < below.priority or (priority == below.priority and ticket < below.ticket):
            break
        heap[at] = below
        at = child
    _set(heap, at, priority, ticket, block)


@numba.njit
def _drop_stale(queue, head, tail, blocks):
    """Move the entries that still count to the front, in order; returns how many there are."""
    kept = 0
    for at in range(head, tail):
        if blocks[queue[at].block].queued and (blocks[queue[at].block].ticket == queue[at].ticket):
            queue[kept] = queue[at]
            kept += 1
    return kept


@numba.njit(cache=True)
def next_uses_of(block_ids, offsets, num_unique, capacity):
    """For each reference, the next request that uses the block; inf if none does.

    Only the first ``capacity`` blocks of a request take part in the replay, so later ones do not
    count as uses.
    """
    next_uses = np.full(len(block_ids), np.inf)
    upcoming = np.full(num_unique, np.inf)
    for request in range(len(offsets) - 2, -1, -1):
        start = offsets[request]
        for at in range(start, min(offsets[request + 1], start + capacity)):
            block_id = block_ids[at]
            next_uses[at] = upcoming[block_id]
            upcoming[block_id] = request
    return next_uses
