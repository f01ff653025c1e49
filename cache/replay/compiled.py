"""``PriorityPolicy`` in compiled code.

Blocks are the dense ids of the trace, so the state of a block is one record in an array.  Entries
of the queue that come in by rising priority are in an array, the others in a heap.  An entry whose
block has been entered again is stale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numba.extending
import numpy as np

from cache.policies.base import UNKNOWN_REQUEST, EvictionPolicy
from cache.policies.priority import BlockHistory, PriorityPolicy
from cache.policies.queues import num_ghosts
from cache.replay.operations import Operations
from cache.traces.trace import Trace

_BLOCK = np.dtype(
    [
        ("priority", np.float64),
        ("ticket", np.int64),  # number of the queue entry that counts; settles ties
        ("inserted", np.int32),
        ("accesses", np.int32),
        ("depth", np.int32),
        ("accessed", np.int32),  # its last release; 0: none is remembered
        ("before", np.int32),  # accesses before the eviction, if remembered
        ("children", np.int32),
        ("parent", np.int32),
        ("ghost", np.int32),  # its place among the ghosts plus one; 0: no ghost
        ("in_use", np.bool_),
        ("queued", np.bool_),  # whether the entry that counts is still in a queue
    ],
    align=True,
)
_EXACT = 2.0**53
"""Up to here every integer is a float64."""
_ENTRY = np.dtype([("priority", np.float64), ("ticket", np.int64), ("block", np.int64)])


def operations_of(
    policy: PriorityPolicy, priority: Callable[..., float], trace: Trace, capacity: int
) -> Operations:
    """``priority`` is computed in float64.  Without a state of its own it may be an integer in
    Python, so ``release_many`` raises OverflowError beyond 2**53, where float64 rounds integers.
    """
    num_blocks = trace.num_unique_blocks
    next_uses = np.empty(0)
    if policy.needs_future:
        next_uses = next_uses_of(trace.block_ids, trace.offsets, num_blocks, capacity)
    queues = np.empty((2, 2 * min(capacity, num_blocks) + 64), _ENTRY)
    state = {
        "_blocks": np.zeros(num_blocks, _BLOCK),
        "rising": queues[0],
        "rising_head": 0,
        "rising_tail": 0,
        "heap": queues[1],
        "heap_size": 0,
        "tickets": 0,
        "time": 0,
        "clock": 0.0,
        "request": UNKNOWN_REQUEST,
        "offsets": trace.offsets,
        "next_uses": next_uses,
        "memory": np.zeros((num_blocks, policy.memory_size)),
    } | ghosts_of(policy, trace, capacity)
    own = policy.own_state(capacity)
    if own is not None:
        state["own"] = own
    return Operations(policy.name, _methods(priority, own is not None), state)


@functools.cache
def _methods(priority: Callable[..., float], has_own: bool) -> dict[str, Callable]:
    numba.extending.register_jitable(priority)

    def rank(self, history):
        if has_own:
            value = priority(history, self.own)
        else:
            value = priority(history)
            if _EXACT < abs(value) < np.inf:
                raise OverflowError("a priority is beyond 2**53")
        if value != value:
            raise ValueError("the policy's priority of a block is nan, not a number")
        return value

    methods = (insert, pin, release_many, evict, remove, remember, _enter, _push)
    return {"rank": rank, "tell": tell} | {f.__name__: f for f in methods}


def tell(self, request):
    self.request = request


def insert(self, block_id, key, parent, depth):
    block = self._blocks[block_id]
    block.in_use = True
    block.queued = False
    block.priority = np.nan
    block.inserted = 0
    if block.ghost:
        block.ghost = 0
        self.live_ghosts -= 1
        block.before += block.accesses
    else:
        block.before = 0
        block.accessed = 0
    block.accesses = 0
    if self.memory.size:
        self.memory[block_id] = 0.0
    block.depth = depth
    if depth:
        block.parent = parent
        self._blocks[parent].children += 1


def pin(self, block_id):
    self._blocks[block_id].in_use = True


def release_many(self, ids):
    blocks, clock, request = self._blocks, self.clock, self.request
    next_uses, memory = self.next_uses, self.memory
    self.time += 1
    time = self.time
    at = self.offsets[time - 1] + len(ids)
    for block_id in ids:
        at -= 1
        block = blocks[block_id]
        block.in_use = False
        block.accesses += 1
        if block.inserted == 0:
            block.inserted = time
        interval = float(time - block.accessed) if block.accessed else np.nan
        block.accessed = time
        priority = self.rank(
            BlockHistory(
                np.float64(block_id),
                np.float64(time),
                np.float64(block.inserted),
                np.float64(block.accesses),
                next_uses[at] if len(next_uses) else np.nan,
                np.float64(block.depth),
                clock,
                np.float64(block.children),
                np.float64(block.before + block.accesses),
                interval,
                request,
                memory[block_id],
            )
        )
        if priority != block.priority:
            self.tickets += 1
            block.priority = priority
            block.ticket = self.tickets
            self._enter(priority, block_id)
        elif not block.queued:  # it was dropped while in use and takes its place again
            self._push(priority, block.ticket, block_id)
        block.queued = True


def evict(self):
    rising, heap = self.rising, self.heap
    while True:
        if self.rising_head < self.rising_tail and (
            self.heap_size == 0 or _before(rising[self.rising_head], heap[0])
        ):
            first = rising[self.rising_head]
            priority, ticket, block_id = first.priority, first.ticket, first.block
            self.rising_head += 1
        else:
            priority, ticket, block_id = heap[0].priority, heap[0].ticket, heap[0].block
            self.heap_size -= 1
            if self.heap_size:
                heap[0] = heap[self.heap_size]
                _sift_down(heap, 0, self.heap_size)
        block = self._blocks[block_id]
        if block.ticket == ticket and block.queued:
            block.queued = False
            if not block.in_use:
                break
    self.clock = priority
    self.remove(block_id)
    return block_id


def remove(self, block_id):
    block = self._blocks[block_id]
    block.queued = False
    if block.depth:
        self._blocks[block.parent].children -= 1
    self.remember(block_id)


def ghosts_of(policy: EvictionPolicy, trace: Trace, capacity: int) -> dict[str, Any]:
    """The attributes that ``remember`` needs."""
    num = num_ghosts(policy, capacity)
    ghosts = np.empty(trace.num_block_references if num else 0, np.int32)
    counts = {"first_ghost": 0, "last_ghost": 0, "live_ghosts": 0}
    return {"num_ghosts": num, "ghosts": ghosts} | counts


def remember(self, block_id):
    if not self.num_ghosts:
        return
    self.ghosts[self.last_ghost] = block_id
    self.last_ghost += 1
    self._blocks[block_id].ghost = self.last_ghost
    self.live_ghosts += 1
    while self.live_ghosts > self.num_ghosts:
        oldest = self._blocks[self.ghosts[self.first_ghost]]
        self.first_ghost += 1
        if oldest.ghost == self.first_ghost:
            oldest.ghost = 0
            self.live_ghosts -= 1


def _enter(self, priority, block_id):
    """Queue a block with a new ticket."""
    rising = self.rising
    while self.rising_head < self.rising_tail and priority < rising[self.rising_tail - 1].priority:
        self.rising_tail -= 1
        last = rising[self.rising_tail]
        self._push(last.priority, last.ticket, last.block)
    if self.rising_tail == len(rising):
        self.rising_tail = _drop_stale(rising, self.rising_head, self.rising_tail, self._blocks)
        self.rising_head = 0
    _set(rising, self.rising_tail, priority, self.tickets, block_id)
    self.rising_tail += 1


def _push(self, priority, ticket, block_id):
    """Add an entry to the heap, dropping the stale ones first if there is no room."""
    heap = self.heap
    if self.heap_size == len(heap):
        self.heap_size = _drop_stale(heap, 0, self.heap_size, self._blocks)
        for root in range(self.heap_size // 2 - 1, -1, -1):
            _sift_down(heap, root, self.heap_size)
    _set(heap, self.heap_size, priority, ticket, block_id)
    _sift_up(heap, self.heap_size)
    self.heap_size += 1


@numba.njit(inline="always")
def _set(queue, at, priority, ticket, block):
    queue[at].priority = priority
    queue[at].ticket = ticket
    queue[at].block = block


@numba.njit(inline="always")
def _before(a, b):
    return a.priority < b.priority or (a.priority == b.priority and a.ticket < b.ticket)


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
