"""The serial replay of a model whose groups of layers share one pool, as in vLLM 0.33.

``cache.simulate`` runs it if ``groups`` is given.  A *page* is a block of one group; all pages have
the same number of bytes.  Policies see pages instead of blocks; the number of a page is ``block *
len(groups) + group``.  Requests are served in order, one at a time:

- only whole blocks can be cached; the partly filled last block of a prompt takes a page of each
  group, without content, while the request runs;
- a request takes part as a whole if the pool holds all its pages in the full groups, as many pages
  of each window group as a hit and a chunk need, and two of each state group.  Otherwise only its
  longest leading run of whole blocks for which this is true takes part;
- the last token is always computed, so hits end at the *replay boundary*, ``(input_length - 1) //
  block_size``.  Hits are the longest prefix that all groups can resume.  If the full groups hold a
  longer prefix, its end is the *junction*;
- the pages of the hit that later queries read are pinned.  The remaining blocks are computed in
  chunks.  Before a chunk, the pages that no later query reads are released.  In a chunk, resident
  pages are pinned, then missing pages are inserted in order, group by group;
- window and state groups keep the content that ``Group.kept`` selects.  Other pages are free again
  when they are released;
- a state group takes one page per chunk, for the state at the chunk's end.  With a state group,
  chunks also end at the replay boundary and at the junction;
- the rest is released at the end, group by group, each from its deepest page.

The parent of a page is the previous page of the same full group.  Pages of window and state groups
have no parent, because a hit does not need all previous pages.

In one respect this replay differs from vLLM: a block that is computed again although its page is
resident uses this page.  vLLM keeps a second copy until one of them is evicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numba
import numba.extending
import numpy as np

from cache.blocks.groups import Group, check_groups, check_retention
from cache.checks import at_least, shown
from cache.policies.base import EvictionPolicy, RequestInfo, check_victims
from cache.replay.compiled import next_uses_of
from cache.replay.operations import _KINDS, _make
from cache.traces.trace import Trace, _picked

NO_PAGE, NO_CONTENT, CONTENT, JOINED = range(4)
"""What a request holds at a position in a group; JOINED: content that was resident."""


@dataclass(frozen=True)
class GroupedReplay:
    """The replay with ``groups``, compiled or in Python."""

    groups: tuple[Group, ...]
    retention: int | None
    """Tokens."""
    block_size: int
    chunk: int
    """Maximum number of blocks computed at once."""

    @classmethod
    def of(
        cls,
        trace: Trace,
        policy: EvictionPolicy,
        groups: Iterable[Group],
        retention: int | None,
        max_num_batched_tokens: int,
    ) -> GroupedReplay:
        """Check the arguments of ``cache.simulate``.  Raises its ValueErrors."""
        groups, size = check_groups(groups), trace.block_size
        tokens = at_least(1, "max_num_batched_tokens", max_num_batched_tokens)
        if size is None:
            raise ValueError(f"trace {trace.name!r} has blocks of unknown size; load it with one")
        if policy.needs_future and any(group.kind != "full" for group in groups):
            raise ValueError(
                f"policy {policy.name!r} needs the future, and the next use of a block of a window "
                f"or state group depends on later hits; groups={shown(groups)}: needs full groups"
            )
        return cls(groups, check_retention(retention, groups, size), size, max(1, tokens // size))

    def max_pages(self, trace: Trace) -> int:
        """Number of pages that all requests of ``trace`` can use; a larger pool changes nothing."""
        return len(self.groups) * 2 * (trace.num_block_references + 1)

    def prepare(self, trace: Trace, capacity: int) -> tuple[Trace, tuple]:
        """Make the trace of pages, and the arguments of ``serve`` except the policy.

        A request of the trace of pages lists the pages that it can cache in reverse order of their
        release at its end: the last group first, each from the head of the prompt.
        """
        groups, size = self.groups, self.block_size
        whole = np.minimum(np.diff(trace.offsets), trace.input_lengths // size)
        total = whole + (trace.input_lengths > whole * size)
        lengths = np.arange(total.max() + 1)
        needed = np.array([0 if g.kind == "full" else g.num_blocks_of_hit(size) for g in groups])
        is_state = np.array([group.kind == "state" for group in groups])
        limits = needed + np.where(is_state, 1, np.where(needed, self.chunk, len(lengths)))
        demand = np.minimum(lengths, limits[:, None]).sum(axis=0)
        total = np.minimum(total, np.searchsorted(demand, capacity, "right") - 1)
        whole = np.minimum(whole, total)
        boundaries = np.minimum(np.maximum(trace.input_lengths - 1, 0) // size, whole)
        counts = np.repeat(whole, len(groups))
        blocks, offsets = _picked(
            trace.block_ids, np.repeat(trace.offsets[:-1], len(groups)), counts
        )
        group = np.tile(np.arange(len(groups))[::-1], len(trace))
        page_ids = blocks.astype(np.int64) * len(groups) + np.repeat(group, counts)
        offsets = offsets[:: len(groups)]
        pages = replace(trace, block_ids=page_ids, offsets=offsets)
        unseen = np.array([[g.num_unseen(n * size, size) for n in lengths] for g in groups])
        always_kept = np.zeros(unseen.shape, np.bool_)
        options: dict[str, Any] = {"block_size": size, "retention": self.retention}
        for row, each in zip(always_kept, groups, strict=True):
            row[list(each.kept(0, len(lengths), boundaries=(), **options))] = True
        geometry = needed, is_state, unseen, always_kept
        requests = page_ids, offsets, boundaries, total, trace.request_facts
        resident, held = np.zeros(pages.num_unique_blocks, np.bool_), np.zeros(unseen.shape, int)
        released = np.zeros(unseen.size, int)
        return pages, (*requests, capacity, self.chunk, *geometry, resident, held, released)

    def in_python(
        self, trace: Trace, policy: EvictionPolicy, capacity: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Hits and evictions of each request.  Raises RuntimeError for a wrong victim."""
        pages, arguments = self.prepare(trace, capacity)
        lists = (each.tolist() if isinstance(each, np.ndarray) else each for each in arguments)
        return serve(_InPython(policy, pages, capacity), *lists)


@numba.extending.register_jitable
def longest_hit(limit, pages, first, resident, needed):
    """``Group.longest_hit`` for the pages from index ``first``; ``needed`` 0: a full group."""
    run = 0
    if needed == 0:
        while run < limit and resident[pages[first + run]]:
            run += 1
        return run
    for position in range(limit - 1, -1, -1):
        run = run + 1 if resident[pages[first + position]] else 0
        if run == needed:
            return position + run
    return run  # 0 if one block is needed, as for a state


@numba.extending.register_jitable
def serve(
    policy, pages, offsets, boundaries, totals, request_facts, capacity, chunk,
    needed, is_state, unseen, always_kept, resident, held, released,
):  # fmt: skip
    """Serve all requests.  Compiled code has arrays, Python has lists.

    Returns hits and evictions of each request.  Changes ``resident``, ``held`` and ``released``.
    """
    num_groups, num_requests = len(needed), len(offsets) - 1
    has_state = False
    for group in range(num_groups):
        has_state = has_state or is_state[group]
    hits, evictions = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int64)
    behind = np.zeros(num_groups, np.int64)  # number of leading blocks that were released
    num_used = 0  # pages with content or in use
    for request in range(num_requests):
        start, end, total = offsets[request], offsets[request + 1], totals[request]
        boundary, num_blocks = boundaries[request], (end - start) // num_groups
        row = request_facts[request]
        facts = RequestInfo(row[0], row[1], row[2], row[3], row[4], row[5])
        policy.look_up(pages[start:end])

        hit = boundary
        for group in range(num_groups):
            if needed[group] == 0:
                first = end - (group + 1) * num_blocks
                hit = longest_hit(hit, pages, first, resident, 0)
        junction, longer = hit, -1
        while hit != longer:
            longer = hit
            for group in range(num_groups):
                if needed[group]:
                    first = end - (group + 1) * num_blocks
                    hit = longest_hit(hit, pages, first, resident, needed[group])
        if hit == junction:
            junction = boundary
        hits[request] = hit
        for group in range(num_groups):
            behind[group] = unseen[group][hit]
            for position in range(behind[group], hit):
                policy.pin(pages[end - (group + 1) * num_blocks + position])
                held[group][position] = CONTENT
        policy.tell(RequestInfo(facts[0], facts[1], math.nan, facts[3], math.nan, math.nan))

        done = hit
        while True:
            count = 0
            for group in range(num_groups):
                seen_from = unseen[group][done] if done < total else total
                for position in range(seen_from - 1, behind[group] - 1, -1):
                    if held[group][position] == CONTENT:
                        released[count] = pages[end - (group + 1) * num_blocks + position]
                        count += 1
                    elif held[group][position] == NO_CONTENT:
                        num_used -= 1
                    held[group][position] = NO_PAGE
                behind[group] = seen_from
            if done == total:
                policy.tell(facts)
                policy.release_many(released[:count])
                break
            if count:
                policy.release_many(released[:count])

            last = min(done + chunk, total)
            for stop in (boundary, junction):
                if has_state and done < stop < last:
                    last = stop
            for group in range(num_groups):
                first = end - (group + 1) * num_blocks
                for position in range(last - 1 if is_state[group] else done, last):
                    held[group][position] = NO_CONTENT
                    if position < num_blocks and (
                        always_kept[group][position]
                        or boundary - needed[group] <= position < boundary
                        or junction - needed[group] <= position < junction
                    ):
                        held[group][position] = CONTENT
                        if resident[pages[first + position]]:
                            held[group][position] = JOINED
                            policy.pin(pages[first + position])
            for group in range(num_groups):
                first = end - (group + 1) * num_blocks
                for position in range(last - 1 if is_state[group] else done, last):
                    if held[group][position] == JOINED:
                        held[group][position] = CONTENT
                        continue
                    if held[group][position] == CONTENT:
                        policy.miss(pages[first + position])
                    if num_used < capacity:
                        num_used += 1
                    else:
                        resident[policy.evict()] = False
                        evictions[request] += 1
                    if held[group][position] == CONTENT:
                        page, has_parent = pages[first + position], position and not needed[group]
                        resident[page] = True
                        policy.insert(
                            page, page, pages[first + position - 1] if has_parent else -1, position
                        )
            done = last
    return hits, evictions


def compile_replay(key: str) -> Any:
    """Compile ``serve`` with the policy of ``key``; for ``cache.replay.operations.replay_of``."""

    def run(state, *arguments):
        return serve(_make(key, state), *arguments)

    run.__qualname__ += f".{key.partition(':')[0]}"  # a file for each policy
    return numba.njit(nogil=True, cache=_KINDS[key].is_built_in)(run)


class _InPython:
    """A policy in Python as ``serve`` calls it: without a parent is -1, and victims are checked."""

    def __init__(self, policy: EvictionPolicy, pages: Trace, capacity: int) -> None:
        self.policy, self.released, self.next_use = policy, set[int](), dict[int, float]()
        self.look_up, self.tell, self.miss = policy.look_up, policy.tell, policy.miss
        self.ends, self.next_uses = iter(pages.offsets[1:].tolist()), []
        if policy.needs_future:
            ids, offsets = pages.block_ids, pages.offsets
            self.next_uses = next_uses_of(ids, offsets, pages.num_unique_blocks, capacity).tolist()
        policy.start(capacity, self.next_use.__getitem__ if policy.needs_future else None)

    def insert(self, page: int, key: int, parent: int, depth: int) -> None:
        self.policy.insert(page, key, parent if parent >= 0 else None, depth)

    def pin(self, page: int) -> None:
        self.released.remove(page)
        self.policy.pin(page)

    def release_many(self, pages: list[int]) -> None:
        if self.next_uses:  # full groups only: one release per request, of all its pages
            end = next(self.ends)
            self.next_use.update(
                zip(pages[::-1], self.next_uses[end - len(pages) : end], strict=True)
            )
        self.released.update(pages)
        self.policy.release_many(pages)

    def evict(self) -> int:
        victim = self.policy.evict()
        check_victims(self.policy, (victim,), self.released.__contains__)
        self.released.remove(victim)
        return victim
