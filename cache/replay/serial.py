"""Replay a request trace with an eviction policy: exact and fast, without GPU and model.

The replay serves one request at a time.  Every detail is fixed, so that independent implementations
agree:

- requests are served by timestamp; ties: in file order; a request is a list of block ids;
- only the first ``capacity_blocks`` blocks of a request take part (the pool holds no more);
- hits are the longest leading run of blocks of the request that are in the pool;
- blocks of the request that are in the pool are pinned, then missing blocks are inserted in order;
  if the pool is full, each insertion evicts an unpinned block;
- then all blocks of the request count as accessed now, deepest first; this order breaks ties.

For overlapping requests, decoding and preemption see ``cache.simulate_serving``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from cache.blocks.groups import Group, check_groups
from cache.checks import at_least, shown
from cache.policies import EvictionPolicy, as_policy
from cache.policies.base import request_info, wrong_victim
from cache.traces.trace import Trace, load_trace

if TYPE_CHECKING:
    import numpy as np

    from cache.replay.operations import Replayed  # numba is slow to import


@dataclass(frozen=True)
class SimulationResult:
    """Result of a replay over the counted requests."""

    policy: str
    capacity_blocks: int
    num_requests: int
    block_references: int
    """Number of blocks of all requests, including blocks beyond the pool's capacity."""
    hits: np.ndarray = field(compare=False, repr=False)
    """Number of hit blocks of each request, ``(num_requests,)`` int64."""
    hit_blocks: int
    input_tokens: int
    hit_tokens: int | None
    """Number of prompt tokens in hit blocks.  None if the block size is unknown."""
    evictions: int
    replay_seconds: float
    """Wall time of the whole replay without compilation."""
    compiled: bool
    """True if the replay ran in compiled code, False if it ran in Python."""

    @property
    def block_hit_rate(self) -> float:
        """Hit blocks divided by all block references."""
        return self.hit_blocks / self.block_references if self.block_references else 0.0

    @property
    def token_hit_rate(self) -> float | None:
        """Hit tokens divided by all prompt tokens.  None if the block size is unknown."""
        if self.hit_tokens is None:
            return None
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


def simulate(
    trace: Trace | str | os.PathLike,
    *,
    policy: str | EvictionPolicy,
    capacity_blocks: int,
    groups: Iterable[Group] | None = None,
    retention: int | None = None,
    max_num_batched_tokens: int = 8192,
    counted: slice = slice(None),
    **options: object,
) -> SimulationResult:
    """Replay ``trace`` through a pool of ``capacity_blocks`` blocks.

    ``trace`` is a path or a ``Trace``.  ``policy`` is a name, ``"file.py:Class"``, or a policy
    object.  ``options`` are for a named policy.  Compiled code runs the built-in policies, and your
    ``PriorityPolicy`` or ``ClassPolicy`` if numba can compile it.  It computes in float64.  Other
    policies run in Python, as do policies with priorities beyond 2**53, which float64 would round.

    With ``groups`` of layers, the replay of ``cache.replay.grouped`` runs: the pool has
    ``capacity_blocks`` *pages*, blocks of one group each, and ``evictions`` counts pages.
    ``retention``, in tokens, is that of ``Group.kept``.  A chunk is the whole blocks in
    ``max_num_batched_tokens``, at least one.  Without retention, evictions and states, hits are
    those of full attention.  Offline policies need full groups only.

    ``counted`` selects the requests in the result.  With ``slice(1000, None)`` the first 1000
    requests only warm up the pool and the policy.

    Raises ValueError for a capacity below 1, options together with a policy object, an unknown
    policy or option, a priority that is not a number, or a trace without block ids; with groups,
    for an unknown block size, a ``retention`` that is no multiple of it, no full group, or an
    offline policy with windows or states.  Raises RuntimeError for a victim that is not a released
    block, and TraceError for a malformed file.
    """
    capacity_blocks = at_least(1, "capacity_blocks", capacity_blocks, maximum=2**63 - 1)
    at_least(1, "max_num_batched_tokens", max_num_batched_tokens)
    if not isinstance(counted, slice) or counted.step not in (None, 1):
        raise ValueError(f"counted={counted!r}: needs a slice of requests without a step")
    policy = as_policy(policy, **options)
    if not isinstance(trace, Trace):
        trace = load_trace(trace)
    if not trace.has_blocks:
        raise ValueError(f"trace {trace.name!r} has lengths only; a replay needs block ids")

    # A larger pool evicts nothing either, and its size may overflow an int64.
    pool = min(capacity_blocks, max(trace.num_block_references, 1))
    replays: list[Callable] = [_replay_in_python]
    if groups is not None:
        from cache.replay.grouped import replays_of  # numba is slow to import

        groups = check_groups(groups)
        pool = min(capacity_blocks, 2 * len(groups) * (trace.num_block_references + 1))
        replays = replays_of(trace, policy, groups, retention, max_num_batched_tokens)
    elif retention is not None:
        raise ValueError(f"retention={shown(retention)}: needs groups")
    replay = None
    if policy.compilable:
        from cache.replay.compiled import operations_of  # numba is slow to import
        from cache.replay.operations import replay_of

        replay = replay_of(policy.name, partial(operations_of, policy), *replays[1:])
    started = time.perf_counter()
    if replay is not None:
        try:
            hits, evictions = replay(trace, pool)
        except OverflowError:  # the policy needs Python's exact integers
            replay = None
            started = time.perf_counter()
    if replay is None:
        hits, evictions = replays[0](trace, policy, pool)
    seconds = time.perf_counter() - started

    part = trace[counted]
    return SimulationResult(
        policy=policy.name,
        capacity_blocks=capacity_blocks,
        num_requests=part.num_requests,
        block_references=part.num_block_references,
        hits=hits[counted],
        hit_blocks=int(hits[counted].sum()),
        input_tokens=int(part.input_lengths.sum()),
        hit_tokens=_hit_tokens(part, hits[counted]),
        evictions=int(evictions[counted].sum()),
        replay_seconds=seconds,
        compiled=replay is not None,
    )


def _hit_tokens(trace: Trace, hits: np.ndarray) -> int | None:
    if trace.block_size is None:
        return None
    # The last block of a prompt may be partly filled.
    return int((hits * trace.block_size).clip(max=trace.input_lengths).sum())


def _replay_in_python(trace: Trace, policy: EvictionPolicy, capacity: int) -> Replayed:
    import numpy as np

    offsets = trace.offsets.tolist()
    block_ids = trace.block_ids.tolist()
    next_use: dict[int, float] = {}
    next_uses = None
    if policy.needs_future:
        from cache.replay.compiled import next_uses_of

        next_uses = next_uses_of(
            trace.block_ids, trace.offsets, trace.num_unique_blocks, capacity
        ).tolist()
    policy.start(capacity, next_use.__getitem__ if policy.needs_future else None)
    insert, pin, release_many = policy.insert, policy.pin, policy.release_many
    miss = policy.miss if "miss" in policy.hooks else None
    tell = policy.tell if "tell" in policy.hooks else None

    request_facts = trace.request_facts.tolist()
    resident: set[int] = set()
    hits = np.zeros(trace.num_requests, np.int64)
    evictions = np.zeros(trace.num_requests, np.int64)
    for request in range(trace.num_requests):
        start = offsets[request]
        blocks = block_ids[start : min(offsets[request + 1], start + capacity)]
        policy.look_up(blocks)
        missing = []
        for depth, block in enumerate(blocks):
            if block in resident:
                pin(block)
            else:
                missing.append(depth)
        hits[request] = missing[0] if missing else len(blocks)
        if tell is not None:
            tell(request_info(request_facts[request], False))
        in_use = set(blocks) if len(resident) + len(missing) > capacity else ()
        for depth in missing:
            block = blocks[depth]
            if miss is not None:
                miss(block)
            if len(resident) == capacity:
                victim = policy.evict()
                if victim not in resident or victim in in_use:
                    raise wrong_victim(policy, victim)
                resident.remove(victim)
                evictions[request] += 1
            resident.add(block)
            insert(block, block, blocks[depth - 1] if depth else None, depth)
        if next_uses is not None:
            next_use.update(zip(blocks, next_uses[start : start + len(blocks)], strict=True))
        if tell is not None:
            tell(request_info(request_facts[request], True))
        release_many(blocks[::-1])
    return hits, evictions
