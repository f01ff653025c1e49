"""Cache managers: microseconds per block of hash, look-up, allocate and free, by pool size.

A request of 4,096 tokens is hashed, looked up, allocated and freed.  Half of its tokens are a
cached prefix that other requests share.  The pool is full of cached blocks of earlier requests, so
every new block evicts one.  All implementations serve the same requests in turn on one core, so a
change of the machine's speed affects all of them. vLLM's ``KVCacheManager`` takes part if vLLM can
be imported.  A turn is ten requests, so the processor's caches hold the implementation's state, as
in an engine that schedules many requests per step.

Odd requests are timed by phase, even requests as a whole (``cycle``).  Odd requests look up their
prompt twice.  The second call is ``lookup``; the first call minus ``lookup`` is ``hash``.
``allocate`` includes a third look-up, which is subtracted.  Making the ``Sequence`` is not part of
a cycle.  It has separate rows.

The policy is ``lru``, as in vLLM.  In pools of up to 100,000 blocks ``vllm_v1`` also runs with
policies of different cost.

``managers.csv`` has the ratio of each cycle to vLLM's cycle with the same hash.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

import cache
from experiments import quantiles, style
from experiments.harness import Absent, Axis, Needs, Options, Unavailable, grid
from experiments.overhead.baselines import HASH_ALGORITHMS, VLLMManager

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 4096
_PREFIX_TOKENS = 2048
_PROMPT_BLOCKS = _PROMPT_TOKENS // _BLOCK_SIZE
_VOCABULARY = 150_000
_REQUESTS_A_TURN = 10
_OURS = {
    "vllm_v1": ("xxh3_128", "sha256"),
    "vllm_v0": ("xxh3_128",),
    "nano_vllm": ("xxh64",),
    "radix": (None,),
    "paged": (None,),
}
"""Hash algorithms with which each manager is measured."""
_OTHER_POLICIES = ("sieve", "gittins", "sglang_slru", "safeguarded")
_PHASES = {
    "hash": {"color": style.BLUE},
    "lookup": {"color": style.ORANGE, "hatch": "//"},
    "allocate": {"color": style.GREEN, "hatch": ".."},
    "free": {"color": style.YELLOW, "hatch": "\\\\"},
}

_MIN_BLOCKS = 2 * _PROMPT_BLOCKS
_PoolBlocks = Needs(f"an int of at least {_MIN_BLOCKS}", lambda count: count >= _MIN_BLOCKS)


@dataclass(frozen=True, kw_only=True)
class Managers(Options):
    """The grid: pool sizes.  Every implementation runs in each cell."""

    pool_blocks: Axis[Annotated[int, _PoolBlocks]] = (1_000, 10_000, 100_000, 1_000_000)
    """Number of blocks in the managers' pool, 16 tokens each."""
    pool_requests: Annotated[int, Needs("an int of at least 2", lambda count: count >= 2)] = 400
    """Number of requests measured in each pool, after the requests that fill the pool."""


@dataclass(frozen=True, kw_only=True)
class ManagersCell(Managers):
    vllm: bool
    """Whether vLLM's manager takes part."""


def cells(options: Managers) -> Iterator[ManagersCell | Absent]:
    vllm = importlib.util.find_spec("vllm") is not None
    if not vllm:
        yield Absent("vLLM is not installed")
    yield from grid(options, ManagersCell, vllm=vllm)


class _Ours:
    """A manager of this repository."""

    version = ""

    def __init__(
        self, name: str, hash_algorithm: str | None, num_blocks: int, policy: str = "lru"
    ) -> None:
        self.name, self.policy = name, policy
        self.hash_algorithm = hash_algorithm or ""
        self.manager = cache.make_manager(
            name,
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            policy=policy,
            hash_algorithm=hash_algorithm or "xxh3_128",
        )

    def make(self, seq_id: int, token_ids: list[int]) -> cache.Sequence:
        return cache.Sequence(seq_id, token_ids)

    def cycle(self, seq: cache.Sequence) -> None:
        self.manager.allocate(seq)
        self.manager.free(seq)

    def phases(self, seq: cache.Sequence) -> dict[str, float]:
        """Seconds of each phase of one cycle."""
        manager, clock = self.manager, time.perf_counter
        begin = clock()
        manager.get_computed_blocks(seq)
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


def run_cell(cell: ManagersCell) -> list[dict[str, Any]]:
    managers: list[_Ours | VLLMManager] = [
        _Ours(name, algorithm, cell.pool_blocks)
        for name, algorithms in _OURS.items()
        for algorithm in algorithms
    ]
    if cell.pool_blocks <= 100_000:
        size = cell.pool_blocks
        managers += [_Ours("vllm_v1", "xxh3_128", size, policy) for policy in _OTHER_POLICIES]
    if cell.vllm:
        with contextlib.suppress(Unavailable):
            managers += [
                VLLMManager(algorithm, cell.pool_blocks, _BLOCK_SIZE)
                for algorithm in HASH_ALGORITHMS.values()
            ]
    turns: list[tuple[Any, Any]] = [(manager, defaultdict(list)) for manager in managers]
    prompts = _prompts(np.random.default_rng(cell.seed), cell.pool_blocks)
    new_blocks = (_PROMPT_TOKENS - _PREFIX_TOKENS) // _BLOCK_SIZE
    num_filling = -(-2 * cell.pool_blocks // (new_blocks * _REQUESTS_A_TURN)) * _REQUESTS_A_TURN
    with _without_collection():
        for start in range(0, num_filling + cell.pool_requests, _REQUESTS_A_TURN):
            token_ids = list(itertools.islice(prompts, _REQUESTS_A_TURN))
            first = start // _REQUESTS_A_TURN % len(turns)
            for implementation, of_it in turns[first:] + turns[:first]:
                for number, prompt in enumerate(token_ids, start):
                    phases = _timed(implementation, number, prompt)
                    if number >= num_filling:
                        for phase, seconds in phases.items():
                            of_it[phase].append(seconds / _PROMPT_BLOCKS)
    return [
        {
            "implementation": implementation.name,
            "version": implementation.version,
            "hash_algorithm": implementation.hash_algorithm,
            "policy": implementation.policy,
            "pool_blocks": cell.pool_blocks,
            "requests": cell.pool_requests,
            "phase": phase,
            **quantiles.of_work("block", seconds),
        }
        for implementation, of_it in turns
        for phase, seconds in of_it.items()
    ]


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Disable Python's garbage collector.  Its pauses would slow a random implementation."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _timed(implementation: _Ours | VLLMManager, number: int, prompt: list[int]) -> dict[str, float]:
    """Seconds of one request: of each phase if ``number`` is odd, else of the whole cycle."""
    begin = time.perf_counter()
    request = implementation.make(number, prompt)
    made = time.perf_counter()
    if number % 2:
        return implementation.phases(request)
    implementation.cycle(request)
    return {"cycle": time.perf_counter() - made, "sequence": made - begin}


def _prompts(generator: np.random.Generator, pool_blocks: int) -> Iterator[list[int]]:
    """Prompts whose first half is one of a few prefixes.  The prefixes stay in the cache."""
    num_prefixes = min(200, max(1, pool_blocks * _BLOCK_SIZE // (8 * _PREFIX_TOKENS)))
    prefixes = generator.integers(_VOCABULARY, size=(num_prefixes, _PREFIX_TOKENS)).tolist()
    while True:
        for prefix in prefixes:
            rest = generator.integers(_VOCABULARY, size=_PROMPT_TOKENS - _PREFIX_TOKENS)
            yield prefix + rest.tolist()


def _named(rows: style.DataFrame) -> style.DataFrame:
    """Add a ``name`` of the implementation to each row, such as vllm_v1 (xxh3_128) sieve."""
    names = rows["implementation"]
    for column, shape in (("version", " {}"), ("hash_algorithm", " ({})"), ("policy", " {}")):
        known = rows[column].astype(object).fillna("").replace("lru", "")
        names = names + known.map(shape.format).where(known != "", "")
    return rows.assign(name=names).astype({"pool_blocks": int})


def table(rows: style.DataFrame) -> style.DataFrame:
    """Median cycle of each implementation and pool, and the ratio to vLLM's with the same hash."""
    rows = _named(rows)
    cycles = rows[rows["phase"] == "cycle"].rename(columns={"us": "cycle_us_per_block"})
    theirs = cycles[cycles["implementation"] == "vLLM"]
    theirs = theirs.set_index(["hash_algorithm", "pool_blocks"])["cycle_us_per_block"]
    hashes = cycles["hash_algorithm"].map(HASH_ALGORITHMS)
    of_vllm = [theirs.get(key) for key in zip(hashes, cycles["pool_blocks"], strict=True)]
    ratio = cycles["cycle_us_per_block"] / np.array(of_vllm, float)
    cycles["ratio_to_vllm"] = ratio.where(cycles["implementation"] != "vLLM")
    columns = ["name", "pool_blocks", "cycle_us_per_block", "ratio_to_vllm"]
    return cycles[columns].sort_values(columns[:2])


def draw(rows: style.DataFrame) -> style.Figure:
    """The cycle with ``lru`` against pool size, and the cycle's phases in the largest pool."""
    rows = _named(rows[rows["policy"] == "lru"])
    figure, (left, right), _ = style.panel_grid(2, height=2.4, width=3.5)
    cycles = rows[rows["phase"] == "cycle"]
    for name, line in style.lines_of(cycles["name"].unique()).items():
        style.curve(left, cycles[cycles["name"] == name], "pool_blocks", "us", **line)
    left.set(xscale="log", yscale="log", xlabel="pool (blocks)", ylabel="cycle (µs per block)")
    left.set_title("whole cycle of a request")
    style.shared_legend(figure, columns=4)

    largest = rows[rows["pool_blocks"] == rows["pool_blocks"].max()]
    phases = largest.pivot(index="name", columns="phase", values="us")
    phases = phases.reindex(columns=_PHASES).dropna()
    starts = phases.cumsum(axis=1) - phases
    for phase, look in _PHASES.items():
        bars = {"left": starts[phase], "label": phase, "edgecolor": "white", **look}
        right.barh(range(len(phases)), phases[phase], **bars)
    for y, total in enumerate(phases.sum(axis=1)):
        right.annotate(f" {total:.2f}", (total, y), fontsize=6, va="center")
    style.name_rows(right, phases.index)
    right.margins(x=0.12)
    right.set(xlabel="µs per block", title=f"its phases, pool of {rows['pool_blocks'].max():,}")
    right.legend(loc="upper right", fontsize=6)
    return figure
