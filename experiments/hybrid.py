"""Hit rates and memory of models that mix full attention with sliding windows or states.

vLLM divides the layers of such a model into groups that share one pool (``cache.layer_groups``).
``replay``: traces in pools of equal bytes; 100 % would hold their unique blocks in all layers.
Layouts: ``full``: one table, each block holds K/V of all layers; ``dense``: groups that cache all
blocks; ``r0``: window and state groups cache what a hit at the end of a prompt, or at its junction
with another prompt, needs; ``r8``: also at every 8th block (``prefix_cache_retention_interval``).
``bound_hit_rate``: Belady's if windows and states took no memory.  ``memory``: of one sequence.

Assumptions of the replay: requests run one at a time, in chunks of 8,192 tokens.  All layers of a
model have equal bytes per token (the full layers of Gemma 4 31B have half the bytes of its window
layers).  A state has the bytes of a block; for Qwen3-Next in bf16 a block of 536 tokens has them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import cache
from experiments import style
from experiments.eviction import Policy, named_policy, policy_spec
from experiments.harness import Experiment, Options, Unavailable
from experiments.harness.grid import Axis, Count, Needs, Percent, Repeated, grid, one_of
from experiments.load import workloads

with Path(__file__).with_name("hybrid_models.csv").open(newline="") as _file:
    MODELS: dict[str, dict[str, Any]] = {
        row["model"]: {name: int(text) if text.isdigit() else text for name, text in row.items()}
        for row in csv.DictReader(_file)
    }
_REPLAYED = "gemma-3-27b", "gemma-4-31b", "gpt-oss-120b", "qwen3-next-80b"
_ANY = "any"
"""The model of the layout "full", whose hit rate does not depend on the model."""
_POLICIES = "lru", "gittins", "safeguarded", "arc", "mq", "session_end"
_LAYOUTS_OF_POLICIES = "full", "dense", "r0", "r64"
_CHUNK = 8_192
_CONTEXTS = 1_600, 4_096, 8_192, 32_768, 131_072
_PUBLISHED = {("gemma-2-9b", 8_192): 0.25, ("ministral-8b-2410", 131_072): 0.5625}
"""Wasted share of one table's memory in vLLM's RFC 11382."""
_IS_LAYOUT = re.compile(r"full|dense|r\d+").fullmatch
Layout = Annotated[str, Needs("full, dense, or r and a number", lambda x: bool(_IS_LAYOUT(x)))]
_FIFTHS = [f"fifth_{number}" for number in range(1, 6)]
"""Hit rates of five consecutive parts of a trace, equal in requests."""
_RATES = ["block_hit_rate", *_FIFTHS]
_POOL = ["trace", "model", "capacity_percent"]


@dataclass(frozen=True, kw_only=True)
class Hybrid(workloads.OnTraces):
    """The grid: traces x models x policies x pools x retention."""

    model: Axis[Annotated[str, one_of(MODELS)]] = _REPLAYED
    """Models of the replay."""
    policy: Repeated[Axis[Policy]] = ()
    """A policy by name, or your own as file.py:Class. None: LRU and five others."""
    capacity_percent: Axis[Percent] = (0.2, 0.5, 1, 2, 5, 10)
    """Size of the pool, in percent of the bytes of the trace's unique blocks in all layers."""
    layout: Axis[Layout] = ("full", "dense", "r8", "r64", "r256", "r0")
    """One table, groups without retention, or a retention interval in blocks."""
    num_requests: Count = 12_031
    """Number of requests, from the start of a trace."""


def cells(options: Hybrid) -> Iterator[Options]:
    traces, models = [*options.sources(options.num_requests)], [_ANY, *options.model]
    policies = [*map(named_policy, options.policy or _POLICIES)]
    for cell in grid(options, trace=traces, model=models, policy=policies):
        is_compared = cell.policy == "lru" or cell.layout in _LAYOUTS_OF_POLICIES
        if is_compared and (cell.model == _ANY) == (cell.layout == "full"):
            yield cell
    yield Options()  # the part memory


def run_cell(cell: Options) -> list[dict[str, Any]]:
    if isinstance(cell, Hybrid):
        return [_replay(cell)]
    return [_memory(m, n) for m in MODELS.values() for n in _CONTEXTS if n <= m["longest"]]


def _replay(cell: Hybrid) -> dict[str, Any]:
    trace = workloads.load(cell.trace)
    pages, size = int(trace.num_unique_blocks * cell.capacity_percent / 100), trace.block_size or 0
    how: dict[str, Any] = {"groups": [cache.Group()], "max_num_batched_tokens": _CHUNK}
    if cell.layout != "full":
        model = MODELS[cell.model]
        if model["other"] == "state" and 2 * size < model["block_size"]:
            raise Unavailable(f"blocks of {trace.name} are smaller than a state of {cell.model}")
        layers = [None] * model["full_layers"] + [model["other"]] * model["other_layers"]
        how["groups"] = cache.layer_groups(layers)
        # A page has room for the largest group.  Smaller groups leave a part of it empty.
        pages = pages * len(layers) // max(group.num_layers for group in how["groups"])
        how["retention"] = None if cell.layout == "dense" else int(cell.layout[1:]) * size
    result = cache.simulate(trace, policy=policy_spec(cell.policy), capacity_blocks=pages, **how)
    bound = _bound(cell.trace, pages)
    assert result.block_hit_rate <= bound <= trace.infinite_cache_hit_rate, "more than can hit"
    cuts = np.arange(6) * len(trace) // 5
    hits = np.diff([result.hits[:cut].sum() for cut in cuts])
    return {
        "part": "replay",
        "trace": trace.name,
        "policy": str(cell.policy),
        **cell.columns("model", "layout", "capacity_percent"),
        "capacity_pages": pages,
        "block_hit_rate": result.block_hit_rate,
        **dict(zip(_FIFTHS, hits / np.maximum(np.diff(trace.offsets[cuts]), 1), strict=True)),
        "bound_hit_rate": bound,
        "infinite_hit_rate": trace.infinite_cache_hit_rate,
    }


@lru_cache(maxsize=64)
def _bound(source: workloads.Source, pages: int) -> float:
    trace = workloads.load(source)
    return cache.simulate(trace, policy="belady", capacity_blocks=pages).block_hit_rate


def _memory(model: dict[str, Any], context: int) -> dict[str, Any]:
    """Bytes in bf16 while the last token, or the last chunk, of ``context`` tokens is computed."""
    size, is_state = model["block_size"], model["other"] == "state"
    group = cache.Group("state") if is_state else cache.Group("window", model["other"] or 1)
    full = 2 * size * model["full_layers"] * model["full_values"]
    other = 2 * (1 if is_state else size) * model["other_layers"] * model["other_values"]
    one_table = (full + other) * -(-context // size)
    chunk = 1 if is_state else _CHUNK
    unseen = [group.num_unseen(max(0, context - num_new), size) for num_new in (1, chunk)]
    return {
        "part": "memory",
        "model": model["model"],
        "context_tokens": context,
        "one_table_bytes": one_table,
        "groups_bytes": one_table - other * unseen[0],
        "groups_chunk_bytes": one_table - other * unseen[1],
        "wasted_fraction": other * unseen[0] / one_table,
        "published_wasted_fraction": _PUBLISHED.get((model["model"], context)),
    }


def _draw_hit_rates(rows: style.DataFrame) -> style.Figure:
    """A column of panels per trace, a row per model, a curve per layout."""
    groups = rows[rows["layout"] != "full"]
    panels = [*(rows if groups.empty else groups).groupby(["model", "trace"])]
    columns = min(3, rows["trace"].nunique())
    figure, axes, spare = style.panel_grid(len(panels), height=1.6, columns=columns)
    looks = {(name, "lru"): look for name, look in style.lines_of(rows["layout"].unique()).items()}
    looks["full", "gittins"] = style.line(style.GREY, ">", "dashed") | {"label": "full, gittins"}
    bound = {**style.BOUND, "label": "bound"}
    for axis, ((model, trace), of_model) in zip(axes, panels, strict=True):
        shown = rows[(rows["trace"] == trace) & rows["model"].isin([model, _ANY])]
        for which, curve in shown.groupby(["layout", "policy"], sort=False):
            if which in looks:
                style.curve(axis, curve, "capacity_percent", "block_hit_rate", 100, **looks[which])
        style.curve(axis, of_model, "capacity_percent", "bound_hit_rate", 100, **bound)
        axis.set(title=f"{trace}\n{model}", ylim=(0, None))
        style.log_x(axis, sorted(shown["capacity_percent"].unique()))
    label = "pool size (% of the bytes of the trace's unique blocks in all layers)"
    return style.shared_legend(figure, spare, xlabel=label, ylabel="block hit rate (%)")


def _points_over(rows: style.DataFrame, base: style.DataFrame, *on: str) -> np.ndarray:
    """Points of ``rows`` over the row of ``base`` with equal ``on``, for each of _RATES."""
    rates = rows[[*on]].merge(base[[*on, *_RATES]], on=on, how="left")[_RATES]
    return 100 * (rows[_RATES].to_numpy() - rates.to_numpy())


def _policies(rows: style.DataFrame) -> style.DataFrame:
    """Points of policies over LRU with the same layout: the mean over models and pools, and the
    worst and the best fifth of any of them."""
    rows = rows[rows["part"] == "replay"]
    points = _points_over(rows, rows[rows["policy"] == "lru"], *_POOL, "layout")
    gains = rows.assign(mean=points[:, 0], worst=points[:, 1:].min(1), best=points[:, 1:].max(1))
    by_policy = gains[rows["policy"] != "lru"].groupby(["trace", "layout", "policy"], sort=False)
    return by_policy.agg({"mean": "mean", "worst": "min", "best": "max"}).reset_index()


def _retention(rows: style.DataFrame) -> style.DataFrame:
    """LRU's best layout in the first two fifths, and its points over others in the last three."""
    rows = rows[rows["policy"] == "lru"]
    groups = rows[rows["layout"] != "full"]
    first = groups[_FIFTHS[:2]].sum(axis=1).groupby([groups[name] for name in _POOL], sort=False)
    best = groups.loc[first.idxmax()]
    table = best[[*_POOL, "layout", "block_hit_rate"]]
    for name, on in (("full", _POOL[::2]), ("dense", _POOL), ("r0", _POOL)):
        points = _points_over(best, rows[rows["layout"] == name], *on)[:, 3:]
        for how in ("mean", "min", "max"):
            table = table.assign(**{f"{how}_over_{name}": getattr(points, how)(axis=1)})
    return table


def _draw_memory(rows: style.DataFrame) -> style.Figure:
    """Bytes per token on the left, the share of one table's memory that is wasted on the right."""
    places, names = rows["model"].factorize()
    figure, axes, _ = style.panel_grid(2, height=2.6, width=3.4, sharey=True)
    style.name_rows(axes[0], names)
    kib = rows[["one_table_bytes", "groups_bytes"]].div(1024 * rows["context_tokens"], axis=0)
    axes[0].plot(kib["one_table_bytes"], places, "k|", markersize=9, label="one table")
    published = style.dots(style.BLACK, "d", fill=False) | {"markersize": 9, "label": "RFC 11382"}
    axes[1].plot(100 * rows["published_wasted_fraction"], places, **published)
    looks = style.lines_of(f"groups, {context:,} tokens" for context in _CONTEXTS)
    for number, look in enumerate(looks.values()):
        at = rows["context_tokens"] == _CONTEXTS[number]
        for axis, x in zip(axes, (kib["groups_bytes"], 100 * rows["wasted_fraction"]), strict=True):
            axis.plot(x[at], places[at] + 0.12 * (number - 2), **look | {"linestyle": "none"})
    axes[0].set(xscale="log", xlabel="KiB per token")
    axes[1].set(xlabel="wasted share of one table's memory (%)", xlim=(-3, 103))
    return style.shared_legend(figure, columns=4)


_QUICK = Hybrid(policy=("lru",), capacity_percent=(1, 5), layout=("full", "dense", "r0"))
EXPERIMENT = Experiment(
    name="hybrid",
    figure="hit rate and memory of models with windows or states, in groups with retention",
    options=Hybrid(),
    quick=replace(_QUICK, trace=workloads.REAL_TRACES[1:2], model=_REPLAYED[1:2], num_requests=400),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter(
        {
            "hit_rate": style.of_parts(_draw_hit_rates, "replay"),
            "memory": style.of_parts(_draw_memory, "memory"),
        },
        {"retention": (_retention, "%.4f"), "policies": (_policies, "%.2f")},
    ),
)
