"""What a cache manager costs the engine: microseconds per block, against the size of the pool.

A request of 4,096 tokens, half of them a cached prefix that it shares with others, goes through
its whole cycle: hash the prompt, look it up, allocate, free.  The pool is full of other requests'
cached blocks, so every new block evicts one.  All implementations (vLLM's KVCacheManager too, where
vLLM can be imported) see the same requests in turn, on one core, so that a machine that changes its
speed does so for all.  A turn is ten requests: long enough that each finds its own
state in the processor's caches, as in an engine that schedules many requests a step.

``cycle`` is timed as a whole.  For managers that can look up without allocating, every second
request is taken apart instead: ``hash`` and ``lookup`` by asking twice, ``allocate`` less its own
look-up, ``free``.  Making the ``Sequence`` itself is not part of a cycle and has a row of its own.

The radix tree by itself is compared with SGLang's (``trees.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np

import cache
from experiments import quantiles, style
from experiments.harness import Axis, Count, Experiment, Needs, Options, Unavailable, grid
from experiments.manager_overhead import trees
from experiments.manager_overhead.baselines import VLLM

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 4096
_PREFIX_TOKENS = 2048
_VOCABULARY = 150_000
_REQUESTS_A_TURN = 10
_OURS = {
    "vllm_v1": ("xxh3_128", "sha256"),
    "vllm_v0": ("xxh3_128",),
    "nano_vllm": ("xxh64",),
    "radix": (None,),
    "paged": (None,),
}
"""Managers and the hash algorithms they are measured with."""


_LEAST_BLOCKS = 2 * _PROMPT_TOKENS // _BLOCK_SIZE
_PoolBlocks = Needs(f"an int of at least {_LEAST_BLOCKS}", lambda count: count >= _LEAST_BLOCKS)
_PageSize = Needs(
    f"a divisor of {trees.SHARED_TOKENS}",
    lambda size: size >= 1 and trees.SHARED_TOKENS % size == 0,
)


@dataclass(frozen=True, kw_only=True)
class Managers(Options):
    pool_blocks: Axis[Annotated[int, _PoolBlocks]] = (1_000, 10_000, 100_000, 1_000_000)
    """Blocks in the pool, of 16 tokens each."""
    requests: Annotated[int, Needs("an int of at least 2", lambda count: count >= 2)] = 400
    """Requests measured, after those that fill the pool."""


@dataclass(frozen=True, kw_only=True)
class ManagerOverhead(Managers):
    """The grid: sizes of the pool; every implementation is run in each cell."""

    tree_page_sizes: tuple[Annotated[int, _PageSize], ...] = (16, 1)
    """Tokens in a block of the radix trees that are compared."""
    tree_prompts: Count = 2_000
    """Prompts in each of these trees."""


def cells(options: ManagerOverhead) -> Iterator[Managers | trees.Trees]:
    yield from grid(options, Managers)
    yield from grid(
        options, trees.Trees, page_size=options.tree_page_sizes, prompts=options.tree_prompts
    )


class _Ours:
    """A manager of this repository."""

    version = ""

    def __init__(self, name: str, hash_algorithm: str | None, num_blocks: int) -> None:
        self.name = name
        self.hash_algorithm = hash_algorithm or ""
        options = {"hash_algorithm": hash_algorithm} if hash_algorithm else {}
        self.manager = cache.make_manager(
            name, num_blocks=num_blocks, block_size=_BLOCK_SIZE, **options
        )

    def make(self, seq_id: int, token_ids: list[int]) -> cache.Sequence:
        return cache.Sequence(seq_id, token_ids)

    def cycle(self, seq: cache.Sequence) -> None:
        self.manager.allocate(seq)
        self.manager.free(seq)

    def phases(self, seq: cache.Sequence) -> dict[str, float] | None:
        """Seconds of each phase of one cycle; None if the design cannot be taken apart."""
        manager, clock = self.manager, time.perf_counter
        begin = clock()
        try:
            manager.get_computed_blocks(seq)
        except cache.UnsupportedByDesign:
            self.cycle(seq)
            return None
        hashed = clock()
        manager.get_computed_blocks(seq)
        found = clock()
        manager.allocate(seq)
        allocated = clock()
        manager.free(seq)
        freed = clock()
        lookup = found - hashed
        return {
            "hash": hashed - begin - lookup,
            "lookup": lookup,
            "allocate": allocated - found - lookup,
            "free": freed - allocated,
        }


def run_cell(cell: Managers | trees.Trees) -> list[dict[str, Any]]:
    return trees.run_cell(cell) if isinstance(cell, trees.Trees) else _managers(cell)


def _managers(cell: Managers) -> list[dict[str, Any]]:
    makers = [
        partial(_Ours, name, algorithm, cell.pool_blocks)
        for name, algorithms in _OURS.items()
        for algorithm in algorithms
    ]
    with contextlib.suppress(Unavailable):
        vllm = VLLM()
        makers += [
            partial(vllm.manager, algorithm, cell.pool_blocks, _BLOCK_SIZE)
            for algorithm in vllm.hash_algorithms()
        ]
    rows, implementations = [], []
    for make in makers:
        implementation, made = _made(make)
        implementations.append(implementation)
        rows.append({**_describe(cell, implementation, "make_pool"), **made})

    prompts = _prompts(np.random.default_rng(cell.seed), cell.pool_blocks)
    new_blocks = (_PROMPT_TOKENS - _PREFIX_TOKENS) // _BLOCK_SIZE
    turns = [(implementation, defaultdict(list)) for implementation in implementations]
    num_filling = -(-2 * cell.pool_blocks // (new_blocks * _REQUESTS_A_TURN)) * _REQUESTS_A_TURN
    with trees.without_collection():
        for start in range(0, num_filling + cell.requests, _REQUESTS_A_TURN):
            token_ids = list(itertools.islice(prompts, _REQUESTS_A_TURN))
            first = start // _REQUESTS_A_TURN % len(turns)
            for implementation, spans in turns[first:] + turns[:first]:
                for number, prompt in enumerate(token_ids, start):
                    phases = _timed(implementation, number, prompt)
                    if number >= num_filling:
                        for phase, seconds in phases.items():
                            spans[phase].append(1e6 * seconds * _BLOCK_SIZE / _PROMPT_TOKENS)
    for implementation, spans in turns:
        for phase, us in spans.items():
            us_per_block = quantiles.columns("us_per_block", us, trees.QUANTILES)
            rows.append({**_describe(cell, implementation, phase), **us_per_block})
    return rows


def _timed(implementation, number: int, prompt: list[int]) -> dict[str, float]:
    """Seconds that one request takes: every second one as a whole, the others phase by phase."""
    begin = time.perf_counter()
    request = implementation.make(number, prompt)
    made = time.perf_counter()
    if number % 2:
        return implementation.phases(request) or {}
    implementation.cycle(request)
    return {"cycle": time.perf_counter() - made, "sequence": made - begin}


def _made(make: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What ``make`` makes, and the seconds it takes and MiB that Python allocates for it."""
    begin = time.perf_counter()
    made = make()
    seconds = time.perf_counter() - begin
    tracemalloc.start()
    try:
        again = make()
        mebibytes = tracemalloc.get_traced_memory()[0] / 2**20
    finally:
        tracemalloc.stop()
    del again
    return made, {"seconds": seconds, "mebibytes": mebibytes}


def _prompts(generator: np.random.Generator, pool_blocks: int) -> Iterator[list[int]]:
    """Prompts whose first half is one of a few prefixes that stay in the cache."""
    num_prefixes = min(200, max(1, pool_blocks * _BLOCK_SIZE // (8 * _PREFIX_TOKENS)))
    prefixes = generator.integers(_VOCABULARY, size=(num_prefixes, _PREFIX_TOKENS)).tolist()
    while True:
        for prefix in prefixes:
            rest = generator.integers(_VOCABULARY, size=_PROMPT_TOKENS - _PREFIX_TOKENS)
            yield prefix + rest.tolist()


def _describe(cell: Managers, implementation, phase: str) -> dict[str, Any]:
    return {
        "pool_blocks": cell.pool_blocks,
        "implementation": implementation.name,
        "version": implementation.version,
        "hash_algorithm": implementation.hash_algorithm,
        "phase": phase,
        "requests": cell.requests,
    }


def _of_managers(rows: style.DataFrame) -> style.DataFrame:
    """The rows of managers, with a name of each implementation."""
    rows = rows[~rows["phase"].isin(trees.OPERATIONS)]
    if rows.empty:
        return rows
    names = rows["implementation"]
    for column, shape in (("version", " {}"), ("hash_algorithm", " ({})")):
        known = rows[column].astype(object).fillna("")
        names = names + known.map(shape.format).where(known != "", "")
    return rows.assign(name=names).astype({"pool_blocks": int})


def _summary(rows: style.DataFrame) -> style.DataFrame | None:
    """Of each implementation and pool: its cycle, and what it takes to make the pool."""
    rows = _of_managers(rows)
    if rows.empty:
        return None
    key = ["name", "pool_blocks"]
    cycles = rows[rows["phase"] == "cycle"].rename(columns={"us_per_block": "cycle_us_per_block"})
    made = rows[rows["phase"] == "make_pool"].rename(columns={"seconds": "make_pool_seconds"})
    table = cycles[[*key, "cycle_us_per_block"]].merge(
        made[[*key, "make_pool_seconds", "mebibytes"]], on=key
    )
    return table.sort_values(key)


_PHASES = {
    "hash": {"color": style.BLUE},
    "lookup": {"color": style.ORANGE, "hatch": "//"},
    "allocate": {"color": style.GREEN, "hatch": ".."},
    "free": {"color": style.YELLOW, "hatch": "\\\\"},
}


def _draw(rows: style.DataFrame) -> style.Figure | None:
    """The cycle against the size of the pool, and its parts in the largest."""
    rows = _of_managers(rows)
    if rows.empty:
        return None
    figure, (left, right), _ = style.panel_grid(2, height=2.4, width=3.5)
    cycles = rows[rows["phase"] == "cycle"]
    for name, line in style.lines_of(cycles["name"].unique()).items():
        style.curve(left, cycles[cycles["name"] == name], "pool_blocks", "us_per_block", **line)
    left.set(xscale="log", yscale="log", xlabel="pool (blocks)", ylabel="cycle (µs per block)")
    left.set_title("whole cycle of a request")
    style.shared_legend(figure, columns=4)

    largest = rows[rows["pool_blocks"] == rows["pool_blocks"].max()]
    phases = largest.pivot(index="name", columns="phase", values="us_per_block")
    phases = phases.reindex(columns=_PHASES).dropna()
    starts = phases.cumsum(axis=1) - phases
    for phase, look in _PHASES.items():
        bars = {"left": starts[phase], "label": phase, "edgecolor": "white", **look}
        right.barh(phases.index, phases[phase], **bars)
    right.set(xlabel="µs per block", title=f"its parts, pool of {rows['pool_blocks'].max():,}")
    right.legend(loc="lower right")
    return figure


EXPERIMENT = Experiment(
    name="manager_overhead",
    figure="microseconds per block of hash, lookup, allocate and free vs pool size, per manager",
    options=ManagerOverhead(),
    quick=ManagerOverhead(pool_blocks=(1_000, 10_000), requests=100, tree_prompts=200),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter(
        {"manager_overhead": _draw, "radix_tree": trees.draw},
        {"summary": (_summary, "%.3f"), "radix_tree": (trees.table, "%.3f")},
    ),
    timed=True,
)
