"""Writes proposals.md: what proposals.toml lists, judged by committed results.

python -m docs.proposals
"""

import json
import tomllib
from pathlib import Path

import pandas as pd

from experiments.eviction import LAST, by_policy
from experiments.eviction_serving import over_lru

PAGE = Path(__file__).with_suffix(".md")
_RESULTS = PAGE.parents[1] / "results"
_POOLS = (0.005, 0.01, 0.02, 0.05, 0.1)
_SAME = 0.05
"""Points of hit rate up to which two policies hit alike."""
_TEXTS = tomllib.loads(PAGE.with_suffix(".toml").read_text())


def gains(rows: pd.DataFrame, value: str = "block_hit_rate") -> pd.DataFrame:
    """Points over LRU: a row per trace and pool, a column per policy."""
    rates = by_policy(rows, ["trace", "capacity_fraction"], value)
    rates = rates[rates.index.isin(_POOLS, level="capacity_fraction")]
    return 100 * rates.sub(rates["lru"], axis=0)


def comparison(points: pd.Series, judged: pd.Series) -> str:
    """In how many cells it is better and worse than LRU, and by how much."""
    better, worse = (points > _SAME).sum(), (points < -_SAME).sum()
    return (
        f"better than LRU in {better} of {len(points)} cells, worse in {worse}; "
        f"{_signed(points.min())} to {_signed(points.max())} points, mean {_signed(points.mean())} "
        f"(last thirds {_signed(judged.mean())})"
    )


def page() -> str:
    """The text of proposals.md."""
    rows, commit = _results("eviction")
    points, judged = gains(rows), gains(rows, LAST)
    rates = 100 * by_policy(rows, ["trace", "capacity_fraction"])
    proposals = _TEXTS["proposal"]
    text = _TEXTS["intro"].format(commit=commit)
    for proposal in proposals:
        remarks = [proposal["remark"]] if "remark" in proposal else []
        if policy := proposal.get("policy"):
            remarks.insert(0, comparison(points[policy], judged[policy]))
        here = f"**{proposal['verdict']}** {'; '.join(remarks)}"
        text += _row([proposal["name"], proposal["source"], proposal.get("claim", ""), here])
    for trace, of_trace in points.groupby(level="trace", sort=False):
        pools = [f"{100 * pool:g} %" for _, pool in of_trace.index]
        text += f"\n## {trace}\n\n" + _row(["points over LRU", *pools])
        text += _row(["---"] * (len(pools) + 1))
        shown = {p["policy"]: p["name"] for p in proposals if "policy" in p}
        shown |= {"lfu": "LFU, for HPT", "belady": "Belady's optimum"}
        for policy, name in shown.items():
            text += _row([f"{name} (`{policy}`)", *map(_signed, of_trace[policy])])
        of_lru = rates["lru"].loc[of_trace.index]
        text += _row(["hit rate of LRU, %", *(f"{rate:.1f}" for rate in of_lru)])
    return text + _queue()


def _queue() -> str:
    rows, commit = _results("eviction_serving")
    rows = rows.assign(over_lru=over_lru(rows))
    rows = rows[rows["policy"].isin(["lru", "queue_informed"])]
    slices = rows["slice"].groupby(rows["trace"]).nunique().max()
    text = _TEXTS["queue"].format(slices=slices, commit=commit)
    for at, cells in rows.groupby(["trace", "loop", "load", "pool_gib"], sort=False):
        lru, queue = (cells[cells["policy"] == name] for name in ("lru", "queue_informed"))
        over, waiting = queue["over_lru"], lru["mean_waiting"]
        text += _row(
            [*at[:2], *(f"{number:g}" for number in at[2:])]
            + [f"{waiting.mean():.1f} ({waiting.min():.1f} to {waiting.max():.1f})"]
            + [f"{100 * part['block_hit_rate'].mean():.1f}" for part in (lru, queue)]
            + [f"{over.mean():.2f} ({over.min():.2f} to {over.max():.2f})"]
        )
    return text


def _results(experiment: str) -> tuple[pd.DataFrame, str]:
    """The committed rows, and the commits that measured them."""
    folder = _RESULTS / experiment / "cpu"
    environment = json.loads((folder / "environment.json").read_text())
    runs = [environment, *environment["earlier_runs"]]
    commits = " and ".join(run["commit"][:7] for run in runs)
    return pd.read_csv(folder / "rows.csv"), f"commit{'s' * (len(runs) > 1)} {commits}"


def _signed(points: float) -> str:
    return f"{round(points, 2) + 0.0:+.2f}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
