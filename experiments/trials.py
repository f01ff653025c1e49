"""``pagelab try``: compare a policy with LRU and the optimum in seconds, on the console."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

import cache
from experiments import eviction
from experiments.eviction import Eviction
from experiments.harness import OptionsError
from experiments.harness.environment import committed
from experiments.harness.grid import check
from experiments.load import workloads

_MAX_IN_PYTHON = 1_000_000
"""A policy that runs in Python (about 5 us per block reference) skips traces longer than this."""


def try_policy(policy: str, options: Eviction, out: Path) -> None:
    """Replay traces with a policy and compare it with the eviction table.

    Without the table (in an installed wheel), with traces that the options name, and with pools
    that the table lacks, compare it only with LRU and Belady's optimum.  Means are over the same
    pools for all policies.

    Args:
        policy: a policy's name, or file.py:Class.
        options: traces and pools.
        out: folder for the figure and its summary.

    Raises OptionsError, naming the policy, if it cannot be made or raises an error, and naming
    another option that is invalid; OSError.
    """
    try:
        cache.make_policy(policy)
        cost, lru_cost, compiled = _seconds_per_reference(policy)
        tried = _replay(replace(options, policy=(policy,)), in_python=not compiled)
    except OptionsError:
        raise
    except Exception as error:  # a user's policy may raise any exception
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise OptionsError(f"{policy}: {kind}{error}") from error
    table = committed("eviction") / "rows.csv"
    known = pd.read_csv(table) if table.exists() and not options.trace else tried[:0]
    if not set(tried["capacity_fraction"]) <= set(known["capacity_fraction"]):
        known = _replay(replace(options, policy=("lru", "belady")))
    known = known[known["trace"].isin(tried["trace"]) & (known["policy"] != policy)]
    for trace, rows in tried.groupby("trace", sort=False):
        print(_verdict(rows, known[known["trace"] == trace]))
    how = "compiled by numba" if compiled else "in Python, LRU compiled"
    print(f"{1e9 * cost:,.0f} ns per block reference, {cost / lru_cost:.1f} times LRU's ({how})")
    out.mkdir(parents=True, exist_ok=True)
    print(*eviction.EXPERIMENT.plot(pd.concat([known, tried]), out), sep="\n")


def _replay(options: Eviction, in_python: bool = False) -> pd.DataFrame:
    """Rows of the eviction table, shortest trace first.  Raises OptionsError."""
    try:
        check(options)
        cells = [cell for cell in eviction.cells(options) if cell.policy != "infinite"]
    except (ValueError, OSError) as error:
        raise OptionsError(str(error)) from error
    lengths = {cell.trace: workloads.load(cell.trace).num_block_references for cell in cells}
    if in_python and not options.trace:
        for trace in [trace for trace, length in lengths.items() if length > _MAX_IN_PYTHON]:
            print(f"{trace.name}: left out, as numba cannot compile the policy")
            cells = [cell for cell in cells if cell.trace != trace]
    cells.sort(key=lambda cell: lengths[cell.trace])
    rows = [row for cell in cells for row in eviction.run_cell(cell)]
    return pd.DataFrame(rows).astype({"block_size": float})  # None if unknown


def _seconds_per_reference(policy: str) -> tuple[float, float, bool]:
    """Seconds per block reference of the policy and of LRU, and whether numba compiled the policy.

    The pool has 5 % of the blocks.  Replays take turns, and the fastest of five counts, because
    first replays also wait for new memory.
    """
    trace = cache.load_trace(workloads.REAL_TRACES[1])
    replay = partial(cache.simulate, trace, capacity_blocks=trace.num_unique_blocks // 20)
    turns = [[replay(policy=name) for name in (policy, "lru")] for _ in range(5)]
    mine, lru = (min(one.replay_seconds for one in each) for each in zip(*turns, strict=True))
    num_references = trace.num_block_references
    return mine / num_references, lru / num_references, turns[0][0].compiled


def _verdict(tried: pd.DataFrame, known: pd.DataFrame) -> str:
    """A line about a trace: the policy's mean hit rate, share of the gap that it closes, rank."""
    rows = eviction.in_common_pools(pd.concat([known, tried]))
    means = rows.groupby("policy")["block_hit_rate"].mean()
    policy = tried["policy"].iloc[0]
    mine, lru, optimum = means[[policy, "lru", "belady"]]
    online = means[[eviction.is_online(name) and name != policy for name in means.index]]
    pools = ", ".join(f"{100 * pool:g}" for pool in sorted(rows["capacity_fraction"].unique()))
    closed = (mine - lru) / (optimum - lru) if optimum > lru else 0
    share = f"{abs(closed):.0%} of the gap"
    gap = f"closes {share}" if closed >= 0 else f"{share} below LRU"
    return (
        f"{tried['trace'].iloc[0]}, mean of pools of {pools} %: {mine:.1%} of blocks hit "
        f"(LRU {lru:.1%}, optimum {optimum:.1%}); {gap}; "
        f"rank {1 + (online > mine + 1e-9).sum()} of {1 + len(online)}"
    )
