"""The serial replay with groups of layers that share one pool, as in vLLM 0.33.

A *page* is a block of one group.  A policy sees pages; page ``block * number of groups + group``.

- Only whole blocks are cached.  A request's partly filled last block takes pages while it runs.
- A request needs pages for all its blocks in full groups, for a hit and a chunk in window groups,
  and two in state groups.  If the pool is smaller, only its leading blocks that fit take part.
- The last token is computed again, so hits end at the *replay boundary*, ``(input_length - 1) //
  block_size``.  A hit is the longest prefix that all groups can resume.  The *junction* is the end
  of a longer prefix that the full groups hold.
- Pages of the hit that later queries read are pinned.  Then chunks are computed.  Before a chunk,
  pages that no later query reads are released, deepest first.  In a chunk, resident pages are
  pinned, then missing pages are inserted group by group.  At the end all pages are released.
- Window and state groups keep the content that ``Group.kept`` selects.  Other pages are free again
  when they are released.
- A state group takes a page for the end of each chunk.  With states, chunks also end at the replay
  boundary and the junction.
- The parent of a page is the previous page in a full group.  Other groups do not need all previous
  pages, so their pages have no parent.

A block that is computed again joins its resident page; vLLM makes a copy and evicts one later.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numba.extending
import numpy as np

from cache.blocks.groups import Group, check_retention
from cache.checks import shown
from cache.policies.base import EvictionPolicy, check_victims, request_info
from cache.replay.compiled import next_uses_of
from cache.replay.operations import Array, Compiled, Replayed, _make
from cache.traces.trace import Trace, _picked

NO_PAGE, NO_CONTENT = -1, -2
Items = Array | list[int]
Rows = Array | list[list[int]]


def replays_of(
    trace: Trace, policy: EvictionPolicy, groups: tuple[Group, ...], retention: Any, tokens: Any
) -> list[Callable]:
    """Return the replay in Python, and ``prepare`` and ``define`` for ``replay_of``.

    Raises the ValueErrors of ``cache.simulate``.
    """
    size = trace.block_size
    if size is None:
        raise ValueError(f"trace {trace.name!r} has blocks of unknown size; load it with one")
    if policy.needs_future and any(group.kind != "full" for group in groups):
        raise ValueError(
            f"policy {policy.name!r} needs the future, but the next use of a window or a state "
            f"depends on later hits; groups={shown(groups)}: needs full groups"
        )
    retention = check_retention(retention, groups, size)
    options = {"groups": groups, "retention": retention, "size": size}
    prepare = partial(_prepare, **options, chunk=max(1, tokens // size))
    return [partial(_replay_in_python, prepare), prepare, _replay_of]


def _prepare(
    trace: Trace, capacity: int, groups: tuple[Group, ...], retention: int, size: int, chunk: int
) -> tuple[Trace, tuple]:
    """The trace of pages, in reverse order of their release, and the arguments of the replay."""
    whole = np.minimum(np.diff(trace.offsets), trace.input_lengths // size)
    total = whole + (trace.input_lengths > whole * size)
    lengths = np.arange(total.max() + 1)
    needed = np.array([0 if g.kind == "full" else g.num_blocks_of_hit(size) for g in groups])
    is_state = np.array([group.kind == "state" for group in groups])
    limits = needed + np.where(is_state, 1, np.where(needed, chunk, len(lengths)))
    demand = np.minimum(lengths, limits[:, None]).sum(axis=0)
    total = np.minimum(total, np.searchsorted(demand, capacity, "right") - 1)
    whole = np.minimum(whole, total)
    boundaries = np.clip((trace.input_lengths - 1) // size, 0, whole)

    starts, counts = np.repeat([trace.offsets[:-1], whole], len(groups), axis=1)
    blocks, offsets = _picked(trace.block_ids, starts, counts)
    group_ids = np.repeat(np.tile(np.arange(len(groups))[::-1], len(trace)), counts)
    page_ids = blocks.astype(np.int64) * len(groups) + group_ids
    offsets = offsets[:: len(groups)].copy()  # contiguous: one compilation
    pages = replace(trace, block_ids=page_ids, offsets=offsets)

    unseen = np.array([[g.num_unseen(n * size, size) for n in lengths] for g in groups])
    always_kept = np.zeros(unseen.shape, np.bool_)
    rule: dict[str, Any] = {"block_size": size, "retention": retention, "boundaries": ()}
    for row, group in zip(always_kept, groups, strict=True):
        row[list(group.kept(0, len(lengths), **rule))] = True
    requests = page_ids, offsets, boundaries, total, trace.request_facts
    geometry = needed, is_state, bool(is_state.any()), unseen, always_kept
    resident = np.zeros(pages.num_unique_blocks, np.bool_)
    held, released = np.full(unseen.shape, NO_PAGE), np.zeros(unseen.size, int)
    return pages, (*requests, capacity, chunk, *geometry, resident, held, released)


@numba.extending.register_jitable
def longest_hit(limit: int, pages: Items, start: int, resident: Items, needed: int) -> int:
    """``Group.longest_hit`` for the pages from index ``start``; ``needed`` 0: a full group."""
    run = 0
    if needed == 0:
        while run < limit and resident[pages[start + run]]:
            run += 1
        return run
    for position in range(limit - 1, -1, -1):
        run = run + 1 if resident[pages[start + position]] else 0
        if run == needed:
            return position + run
    return run  # 0 for a state, which needs one page


def _replay_of(key: str | None) -> Callable:
    """Define the replay of a compiled policy, or with lists in place of arrays if ``key`` is None.

    Numba finds its file only if all that the function closes over is the same in each process.
    """

    def replay(
        state: Any, pages: Items, offsets: Items, boundaries: Items, totals: Items,
        request_facts: Array | list[list[float]], capacity: int, chunk: int,
        needed: Items, is_state: Items, has_state: bool, unseen: Rows, always_kept: Rows,
        resident: Items, held: Rows, released: Items,
    ) -> Replayed:  # fmt: skip
        policy: Compiled = state if key is None else _make(key, state)
        num_groups, num_requests = len(needed), len(offsets) - 1
        hits, evictions = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int64)
        starts, first, behind = [0] * num_groups, [0] * num_groups, [0] * num_groups
        num_used = 0
        for request in range(num_requests):
            end, total, boundary = offsets[request + 1], totals[request], boundaries[request]
            num_blocks = (end - offsets[request]) // num_groups
            policy.look_up(pages[offsets[request] : end])
            junction = boundary
            for group in range(num_groups):
                starts[group] = end - (group + 1) * num_blocks
                if needed[group] == 0:
                    junction = longest_hit(junction, pages, starts[group], resident, 0)
            hit, longer = junction, -1
            while hit != longer:
                longer = hit
                for group in range(num_groups):
                    hit = longest_hit(hit, pages, starts[group], resident, needed[group])
            hits[request] = hit
            if hit == junction:
                junction = boundary
            done, last = 0, hit  # the hit is pinned like a chunk
            while True:
                for group in range(num_groups):
                    first[group] = last - 1 if is_state[group] else done
                    if last == hit:
                        first[group] = behind[group] = unseen[group][hit]
                    for position in range(first[group], last):
                        page = NO_CONTENT
                        if position < hit or (
                            position < num_blocks
                            and (
                                always_kept[group][position]
                                or boundary - needed[group] <= position < boundary
                                or junction - needed[group] <= position < junction
                            )
                        ):
                            page = pages[starts[group] + position]
                            if resident[page]:
                                policy.pin(page)
                        held[group][position] = page
                if last == hit:
                    policy.tell(request_info(request_facts[request], False))
                for group in range(num_groups):
                    for position in range(first[group], last):
                        page = held[group][position]
                        if page >= 0:
                            if resident[page]:
                                continue
                            policy.miss(page)
                        if num_used < capacity:
                            num_used += 1
                        else:
                            resident[policy.evict()] = False
                            evictions[request] += 1
                        if page >= 0:
                            has_parent = position > 0 and needed[group] == 0
                            parent = held[group][position - 1] if has_parent else -1
                            policy.insert(page, page, parent, position)
                            resident[page] = True
                done, count = last, 0
                for group in range(num_groups):
                    seen_from = unseen[group][done] if done < total else total
                    for position in range(seen_from - 1, behind[group] - 1, -1):
                        if held[group][position] >= 0:
                            released[count] = held[group][position]
                            count += 1
                        elif held[group][position] == NO_CONTENT:
                            num_used -= 1
                        held[group][position] = NO_PAGE
                    behind[group] = seen_from
                if done == total:
                    policy.tell(request_info(request_facts[request], True))
                if count or done == total:
                    policy.release_many(released[:count])
                if done == total:
                    break
                last = min(done + chunk, total)
                for stop in (boundary, junction):
                    if has_state and done < stop < last:
                        last = stop
        return hits, evictions

    return replay


def _replay_in_python(
    prepare: Callable, trace: Trace, policy: EvictionPolicy, capacity: int
) -> Replayed:
    pages, arguments = prepare(trace, capacity)
    lists = (each.tolist() if isinstance(each, np.ndarray) else each for each in arguments)
    replay = _replay_of(None)
    return replay(_InPython(policy, pages, capacity), *lists)


class _InPython:
    """A policy as the replay calls it."""

    def __init__(self, policy: EvictionPolicy, pages: Trace, capacity: int) -> None:
        self.policy, self.released, self.next_use = policy, set[int](), dict[int, float]()
        self.look_up, self.tell, self.miss = policy.look_up, policy.tell, policy.miss
        self.ends = iter(pages.offsets[1:].tolist())
        ids, offsets = pages.block_ids, pages.offsets
        self.next_uses = next_uses_of(ids, offsets, pages.num_unique_blocks, capacity).tolist()
        policy.start(capacity, self.next_use.__getitem__ if policy.needs_future else None)

    def insert(self, page: int, key: int, parent: int, depth: int) -> None:
        self.policy.insert(page, key, None if parent < 0 else parent, depth)

    def pin(self, page: int) -> None:
        self.released.remove(page)
        self.policy.pin(page)

    def release_many(self, pages: list[int]) -> None:
        if self.policy.needs_future:  # each request releases its pages once, at its end
            end = next(self.ends)
            uses = self.next_uses[end - len(pages) : end]
            self.next_use.update(zip(pages[::-1], uses, strict=True))
        self.released.update(pages)
        self.policy.release_many(pages)

    def evict(self) -> int:
        victim = self.policy.evict()
        check_victims(self.policy, (victim,), self.released.__contains__)
        self.released.remove(victim)
        return victim
