"""How well must an engine predict when an agent's session comes back?

A stream is an agent or sub-agent of a session.  Its pause is the time to its next request; in
``loop`` it is that request's think time.  Besides usual policies, ``session_gap`` runs with hints:
``told_<s>``: pause x exp(s z), z standard normal; ``predicted``: nothing is told; ``safeguarded``:
that, safeguarded; ``<hint>_ends``: the end of each stream is told, too; ``ends``: only that, as
``session_end`` knows, too.  If ends are not told, the guess after a stream's last request is
log-normal like all pauses.  ``ttl_tuned``: the time to live with most hits in the first third.

``replay``: serial replays.  *Share*: of LRU's distance to Belady's optimum, if that is at least 0.2
points of block hit rate; ``judged``: in the last third of the trace.  The constants of
``session_gap`` were chosen on the first two thirds of claude_code_512_a.  ``loop``: the closed loop
of ``tier`` on slices of the first trace, with its first rule and link.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np

import cache
from cache.replay.overlapping import LOOP_COLUMNS
from experiments import TRACES, quantiles, style
from experiments.eviction_serving import over_lru, served
from experiments.harness import Axis, Count, Experiment, Percent, Positive, Unavailable, grid
from experiments.harness.grid import one_of
from experiments.load import workloads
from experiments.load.gpu_clock import CLOCK_DISCLAIMER
from experiments.tier import Tier, row_of

_TRACES = TRACES / "claude_code_512_a.jsonl.zst", TRACES / "unseen/claude_code_512_b.jsonl.zst"
_ERRORS = "0", "0.25", "0.5", "1", "2"
_TOLD = [f"told_{error}{ends}" for ends in ("", "_ends") for error in _ERRORS]
_PREDICTED = "predicted", "predicted_ends", "safeguarded"
_USUAL = "lru", "gittins", "ttl", "ttl_tuned", "session_end"
HINTS = (*_USUAL, "ends", *_PREDICTED, *_TOLD)
_IN_LOOP = "lru", "gittins", "predicted", "ends", "told_0_ends", "told_1_ends", "told_2_ends"


@dataclass(frozen=True, kw_only=True)
class Sessions(Tier):
    """The grid: parts x traces x pools x policies with hints."""

    part: Axis[Literal["replay", "loop"]] = ("replay", "loop")
    policy: Axis[Annotated[str, one_of(HINTS)]] = HINTS
    """A policy and what it is told."""
    capacity_percent: Axis[Percent] = (0.5, 1, 2, 5, 10)
    """Pool of a replay, in percent of the unique blocks of the trace."""
    seeds: Count = 5
    """Number of replays with a hint that is drawn."""
    pool_gib: Axis[Positive] = (48.0,)
    host_gib: Axis[Positive] = (128.0, 512.0)
    load: Axis[Positive] = (0.5,)


def cells(options: Sessions) -> Iterator[Sessions]:
    options = replace(options, trace=options.trace or _TRACES)
    alike = {name: getattr(options, name)[:1] for name in ("store", "link_gb_s", "transfers")}
    no_pool: dict[str, Any] = {"part": ["replay"], "pool_gib": [0.0], "host_gib": [0.0]}
    if "replay" in options.part:
        yield from grid(options, trace=[*options.sources()], **no_pool, **alike)
    if "loop" in options.part:
        loop = {"part": ["loop"], "policy": filter(options.policy.__contains__, _IN_LOOP)}
        loop |= {"host_gib": [0.0, *options.host_gib], "capacity_percent": [100.0]}
        slices = replace(options, trace=options.trace[:1]).sliced_sources()
        yield from grid(options, trace=slices, **loop, **alike)


def run_cell(cell: Sessions) -> list[dict[str, Any]]:
    hint, is_loop = cell.policy, cell.part == "loop"
    trace = served(cell.trace) if is_loop else workloads.load(cell.trace)
    if lacking := (LOOP_COLUMNS if is_loop else {"session"}) - trace.columns.keys():
        raise Unavailable(f"{trace.name} lacks columns: {', '.join(sorted(lacking))}")
    name = hint if hint in _USUAL or hint == "safeguarded" else "session_gap"
    own: dict[str, Any] = {"policy": "session_gap"} if hint == "safeguarded" else {}
    if hint in _PREDICTED:
        own["predict"] = True
    policy = cache.make_policy(name.removesuffix("_tuned"), **own)
    if is_loop:
        return [{"part": "loop", **row_of(cell, _hinted(trace, hint, cell.seed, True), policy)}]
    pages = max(1, int(trace.num_unique_blocks * cell.capacity_percent / 100))
    if hint == "ttl_tuned":
        ttls = [cache.make_policy("ttl", ttl_s=seconds) for seconds in (5, 15, 60, 240, 960)]
        policy = max(ttls, key=lambda ttl: _rates(trace[: len(trace) // 3], ttl, pages)[0])
    bounds, rows = _bounds(cell.trace, pages), []
    for seed in range(cell.seed, cell.seed + (cell.seeds if hint in _TOLD else 1)):
        row = {"part": "replay", "trace": trace.name, "seed": seed}
        row |= cell.columns("policy", "capacity_percent") | {"capacity_blocks": pages}
        rates = _rates(_hinted(trace, hint, seed, False), policy, pages)
        for part, rate, (low, high) in zip(("", "judged_"), rates, bounds, strict=True):
            share = (rate - low) / (high - low) if high - low >= 0.002 else None
            row |= {f"{part}hit_rate": rate, f"{part}gap": high - low, f"{part}share": share}
        rows.append(row | {"infinite_hit_rate": trace.infinite_cache_hit_rate})
    return rows


def _hinted(trace: cache.Trace, hint: str, seed: int, is_loop: bool) -> cache.Trace:
    """``trace`` with the columns of the hint; guesses are drawn with ``seed``."""
    streams = trace.request_facts[:, 6]
    order = np.argsort(streams, kind="stable")
    goes_on = np.flatnonzero(np.diff(streams[order]) == 0)
    before, after = order[goes_on], order[goes_on + 1]
    if is_loop:
        pauses = np.nan_to_num(trace.columns["think_time"])[after]
    else:
        pauses = trace.timestamps_ms[after] - trace.timestamps_ms[before]
    ends = np.where(streams >= 0, 1.0, np.nan)
    ends[before] = 0
    told = {"ends_session": ends if "end" in hint else ends * np.nan}
    if hint in _TOLD:
        drawn = np.random.default_rng(seed).standard_normal(len(trace))
        logs = np.log(pauses.clip(1))
        guesses = np.where(streams >= 0, np.exp(logs.mean() + logs.std() * drawn), np.nan)
        guesses[before] = pauses * np.exp(float(hint.split("_")[1]) * drawn[before])
        told["expected_pause_ms"] = np.where(told["ends_session"] == 1, np.nan, guesses)
    return replace(trace, columns={**trace.columns, **told})


def _rates(trace: cache.Trace, policy: str | cache.EvictionPolicy, pages: int) -> list[float]:
    """Block hit rates of all requests and of the last third."""
    hits = cache.simulate(trace, policy=policy, capacity_blocks=pages).hits
    cuts, end = (0, len(trace) * 2 // 3), trace.num_block_references
    return [float(hits[cut:].sum() / (end - trace.offsets[cut])) for cut in cuts]


@lru_cache(maxsize=32)
def _bounds(source: workloads.Source, pages: int) -> list[tuple[float, float]]:
    """LRU's and Belady's rates."""
    lru, best = (_rates(workloads.load(source), name, pages) for name in ("lru", "belady"))
    return [*zip(lru, best, strict=True)]


def _shares(rows: style.DataFrame) -> style.DataFrame:
    """Medians over the seeds, and the range of the share."""
    groups = rows.groupby(["trace", "capacity_percent", "policy"], sort=False)
    table = groups[["gap", "hit_rate", "judged_hit_rate", "judged_share"]].median()
    return table.join(groups["share"].agg(["median", "min", "max"])).reset_index()


def _times(rows: style.DataFrame) -> style.DataFrame:
    values = ["block_hit_rate", "host_block_hit_rate", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s"]
    rows, by = rows.assign(over_lru=over_lru(rows)), ["trace", "pool_gib", "host_gib", "policy"]
    table = quantiles.over_slices(rows, by, [*values, "over_lru"])
    return table.assign(basis=CLOCK_DISCLAIMER)


def _draw_shares(rows: style.DataFrame) -> style.Figure:
    """Panels with ends told above, not told below: a curve per pool; bars: all seeds."""
    traces = rows.groupby("trace", sort=False)
    panels = [(of, ends) for ends in ("_ends", "") for of in traces]
    size: dict[str, Any] = {"columns": len(traces), "height": 1.6, "width": 1.4}
    figure, axes, _ = style.panel_grid(len(panels), sharex="col", sharey=True, **size)
    looks = style.lines_of(sorted(rows["capacity_percent"].unique()))
    for axis, ((trace, of_trace), ends) in zip(axes, panels, strict=True):
        names = [f"told_{error}{ends}" for error in _ERRORS]
        names += [f"predicted{ends}", "gittins", "ends"][: 3 if ends else 2]
        of_trace = of_trace[of_trace["policy"].isin(names)]
        of_trace = of_trace.assign(place=of_trace["policy"].map(names.index))
        pools = of_trace.groupby(["capacity_percent", of_trace["place"] >= len(_ERRORS)])
        for (pool, has_no_error), some in pools:
            look = {**looks[pool], "label": f"pool of {pool:g} %"}
            look |= {"linestyle": "none"} if has_no_error else {}
            quantiles.draws(axis, some, "place", "share", **look)
        axis.axhline(0, **style.BOUND)
        axis.set_title(f"{trace}\nends {'told' if ends else 'not told'}", fontsize=7)
        axis.set_ylim(-0.45, 1.05)
        ticks = *_ERRORS, "predicted", "gittins", "ends only"
        axis.set_xticks(range(len(ticks)), ticks, rotation=90)
    xlabel, ylabel = "error s of the told pauses; other hints", "share of LRU's distance to Belady"
    return style.shared_legend(figure, xlabel=xlabel, ylabel=ylabel)


EXPERIMENT = Experiment(
    name="sessions",
    figure="hits and time to first token of agents by how well their pauses are predicted",
    options=Sessions(),
    quick=Sessions(
        part=("replay",),
        trace=_TRACES[:1],
        policy=("gittins", "told_1", "told_0_ends", "told_1_ends"),
        capacity_percent=(2,),
        seeds=1,
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter(
        {"share": style.of_parts(_draw_shares, "replay")},
        {
            "share": (style.of_parts(_shares, "replay"), "%.4f"),
            "loop": (style.of_parts(_times, "loop"), "%.4g"),
        },
    ),
)
