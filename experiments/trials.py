"""``pagelab try`` tries a policy, ``pagelab check`` checks a kernel: in seconds, on the console."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

import cache
from experiments import eviction, kernel_accuracy
from experiments.harness import OptionsError
from experiments.harness.environment import REPOSITORY, committed
from experiments.load import workloads

_POOLS = (1.0, 5.0, 10.0)
"""Pool sizes, in percent of the unique blocks of the trace."""
_KNOW_THE_FUTURE = ["belady", "infinite", "reuse_oracle"]
_MAX_IN_PYTHON = 1_000_000
"""A policy that runs in Python (about 5 us per block reference) skips traces longer than this."""
_RED, _PLAIN = "\033[31m", "\033[0m"


def try_policy(policy: str, out: Path) -> None:
    """Replay the repository's traces with a policy and compare it with the eviction table.

    Without the table (in an installed wheel), compare it only with LRU and Belady's optimum.
    The pools are 1, 5 and 10 % of the unique blocks of a trace.

    Args:
        policy: a policy's name, or file.py:Class.
        out: folder for the figure and its summary.

    Raises OptionsError, naming the policy, if it cannot be made or raises an error; OSError.
    """
    try:
        cache.make_policy(policy)
        tried = _replay(policy)
        cost, compiled = _seconds_per_reference(policy)
    except Exception as error:  # a user's policy may raise any exception
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise OptionsError(f"{policy}: {kind}{error}") from error
    table = committed("eviction") / "rows.csv"
    known = pd.read_csv(table) if table.exists() else pd.concat(map(_replay, ("lru", "belady")))
    known = known[known["policy"] != policy]
    for trace, rows in tried.groupby("trace", sort=False):
        print(_verdict(rows, known[known["trace"] == trace]))
    times = cost / _seconds_per_reference("lru")[0]
    how = "compiled by numba" if compiled else "in Python, LRU compiled"
    print(f"{1e9 * cost:,.0f} ns per block reference, {times:.1f} times LRU's ({how})")
    out.mkdir(parents=True, exist_ok=True)
    print(*eviction.EXPERIMENT.plot(pd.concat([known, tried]), out), sep="\n")


def _replay(policy: str) -> pd.DataFrame:
    """Replay each trace in each pool, shortest trace first.  Returns rows of the eviction table."""
    options = eviction.Eviction(policy=(policy,), capacity_percent=_POOLS)
    cells = [cell for cell in eviction.cells(options) if cell.policy != "infinite"]
    cells.sort(key=lambda cell: workloads.load(cell.trace).num_block_references)
    rows: list[dict] = []
    for cell in cells:
        trace = workloads.load(cell.trace)
        if trace.num_block_references > _MAX_IN_PYTHON and not rows[-1]["compiled"]:
            print(f"{trace.name}: left out, as numba cannot compile the policy")
            break
        rows += eviction.run_cell(cell)
    return pd.DataFrame(rows)


def _seconds_per_reference(policy: str) -> tuple[float, bool]:
    """Seconds per block reference of a replay in a pool of 5 %, and whether numba compiled it."""
    trace = cache.load_trace(workloads.REAL_TRACES[1])
    capacity = trace.num_unique_blocks // 20
    result = cache.simulate(trace, policy=policy, capacity_blocks=capacity)
    return result.replay_seconds / result.block_references, result.compiled


def _verdict(tried: pd.DataFrame, known: pd.DataFrame) -> str:
    """A line about a trace: the policy's mean hit rate, share of the gap that it closes, rank."""
    known = known[known["capacity_blocks"].isin(tried["capacity_blocks"])]
    means = pd.concat([known, tried]).groupby("policy")["block_hit_rate"].mean()
    mine, lru, optimum = tried["block_hit_rate"].mean(), means["lru"], means["belady"]
    online = means.drop([*_KNOW_THE_FUTURE, tried["policy"].iloc[0]], errors="ignore")
    return (
        f"{tried['trace'].iloc[0]}: {mine:.1%} of blocks hit (LRU {lru:.1%}, optimum "
        f"{optimum:.1%}); closes {(mine - lru) / (optimum - lru):.0%} of the gap; "
        f"rank {1 + (online > mine + 1e-9).sum()} of {1 + len(online)}"
    )


def check_kernel(file: Path) -> bool:
    """Compare a kernel's results with fp64 over block sizes, dtypes and options.

    Prints the largest error / bound for each option, dtype and block size, in red if a result
    exceeds its bound.  Returns whether all results are within their bounds.

    Args:
        file: the file of an op of kernels/, such as kernels/store_kvcache.py.

    Raises OptionsError for any other file.
    """
    folder = REPOSITORY / "kernels"
    if file.resolve() not in {folder / f"{op}.py" for op in kernel_accuracy.KERNELS}:
        ops = ", ".join(kernel_accuracy.KERNELS)
        raise OptionsError(f"{file}: needs a file of {folder} for one of {ops}")
    options = kernel_accuracy.KernelAccuracy(
        kernel=(file.stem,), block_size=(1, 7, 256), head_dim=(80,)
    )
    rows = [
        row for cell in kernel_accuracy.cells(options) for row in kernel_accuracy.run_cell(cell)
    ]
    table = pd.DataFrame(rows).assign(block_size=lambda rows: rows["block_size"].fillna(0))
    table["ratio"] = table["error"] / table["bound"]
    print(f"largest error / bound; block size {options.block_size}")
    for (feature, dtype), rows_of in table.groupby(["feature", "dtype"], sort=False):
        ratios = (
            (f"{_PLAIN if of_size['passed'].all() else _RED}{of_size['ratio'].max():6.2f}{_PLAIN}")
            for _, of_size in rows_of.groupby("block_size")
        )
        print(f"{feature:12}{dtype:10}", *ratios)
    wrong = len(table) - table["passed"].sum()
    print(f"{file.stem}: {len(table)} results, " + (f"{wrong} WRONG" if wrong else "all within"))
    return not wrong
