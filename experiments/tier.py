"""What a tier in host memory gains: Llama 3.1 8B on an H100, in modelled time.

The scheduler and a manager with ``host_blocks`` serve slices of a trace, as in
``eviction_serving``.  The pool on the card uses ``lru``; ``policy`` is the tier's.  ``exclusive``
is ``back`` with blocks that leave the tier when they are loaded.

The link to the host is modelled.  ``swap_blocks`` copied out at 52 GB/s on an H100 and an H200
(PCIe 5.0 x16, ``kernel_latency``), 0.81 of the maker's 64.  Loads are assumed to be as fast.  26
and 365 GB/s assume the same share of PCIe 4.0 x16 (32) and of a chip-to-chip link (450).  Slower
links show from where on computing is faster than loading.  ``serial``: transfers and computation
take turns, as in this project's runner.  ``overlapped``: the longest of computation, stores and
loads of a step counts, a bound for engines that move layer by layer.  Moving itself takes no time
of the host or of the GPU's memory.

``break_even`` has the bandwidth above which loading a prompt is faster than computing it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import cache
from experiments import eviction_serving, quantiles, serving, style
from experiments.eviction import Policy, named_policy, policy_spec
from experiments.eviction_serving import EvictionServing, make_clock, over_lru, served
from experiments.harness import Axis, Experiment, Positive, Repeated, grid
from experiments.load.gpu_clock import CLOCK_DISCLAIMER
from experiments.load.workloads import Source

Store = Literal["through", "selective", "back", "exclusive"]
_PROMPTS = 1024, 4096, 16_384, 65_536, 131_072


@dataclass(frozen=True, kw_only=True)
class Tier(EvictionServing):
    """The grid: slices of traces x sizes, rules and policies of the tier; then links."""

    policy: Repeated[Axis[Policy]] = ()
    """The tier's policy by name, or your own as file.py:Class.  None: lru, arc, slru, gittins."""
    pool_gib: Axis[Positive] = (48.0,)
    host_gib: Axis[Positive] = (128.0, 512.0, 1024.0, 2048.0)
    """Host memory of the tier; 0 in cells without a tier.  The smallest tier that holds all blocks
    of each slice of a trace is run with the first policy only, and no larger one."""
    store: Axis[Store] = ("through", "selective", "back", "exclusive")
    """When a block is stored in the tier; selective: when it is used for the second time."""
    link_gb_s: Axis[Positive] = (52.0, 1.0, 2.0, 4.0, 8.0, 26.0, 365.0)
    """Bandwidth to and from the host, in GB/s.  Links after the first are run only with the first
    policy and rule, and the second size (the first, if it holds all blocks)."""
    transfers: Axis[Literal["serial", "overlapped"]] = ("serial", "overlapped")
    """``overlapped`` is run only with the first policy and link, and the size of the links."""
    load: Axis[Positive] = (0.5,)


def cells(options: Tier) -> Iterator[Tier]:
    policies = [*map(named_policy, options.policy or ("lru", "arc", "slru", "gittins"))]
    link, *further = options.link_gb_s
    sources = [*options.sliced_sources()]
    for trace in sources:
        slices = [source for source in sources if source.name == trace.name]
        needed = max(map(_needed_gib, slices))
        smaller = [size for size in sorted(options.host_gib) if size < needed]
        largest = sorted(options.host_gib)[len(smaller) : len(smaller) + 1]
        at: dict[str, Any] = {"trace": [trace]}
        first = {**at, "link_gb_s": [link], "transfers": options.transfers[:1]}
        yield from grid(options, policy=["lru"], host_gib=[0.0], store=["through"], **first)
        yield from grid(options, policy=policies, host_gib=smaller, **first)
        yield from grid(options, policy=policies[:1], host_gib=largest, **first)
        plain = {**at, "policy": policies[:1], "host_gib": [*smaller, *largest][:2][-1:]}
        rest = {"link_gb_s": further, "transfers": options.transfers[:1]}
        yield from grid(options, store=options.store[:1], **plain, **rest)
        rest = {"link_gb_s": [link], "transfers": options.transfers[1:]}
        yield from grid(options, **plain, **rest)


def _needed_gib(source: Source) -> float:
    """Memory of all full blocks of prompts and outputs."""
    trace = served(source)
    clock = make_clock(block_size=trace.block_size)
    own = trace.input_lengths % clock.block_size + trace.output_lengths
    num_blocks = trace.num_unique_blocks + (own // clock.block_size).sum()
    return float(num_blocks) * clock.block_bytes / 2**30


def run_cell(cell: Tier) -> list[dict[str, Any]]:
    return [row_of(cell, served(cell.trace), policy_spec(cell.policy))]


def row_of(cell: Tier, trace: cache.Trace, policy: str | cache.EvictionPolicy) -> dict[str, Any]:
    """Serve ``trace`` with ``policy`` in the cell's tier, or in its pool if it has no tier."""
    clock = make_clock(
        host_seconds=cell.host_ms / 1000,
        block_size=trace.block_size,
        host_bandwidth=cell.link_gb_s * 1e9,
        overlaps_swaps=cell.transfers == "overlapped",
    )
    options: dict[str, Any] = {}
    if cell.host_gib:
        exclusive = cell.store == "exclusive"
        options = {"host_policy": policy, "store": "back" if exclusive else cell.store}
        options |= {"inclusive": not exclusive}
        options["host_blocks"] = int(cell.host_gib * 2**30 / clock.block_bytes)
        policy = "lru"
    row = dict.fromkeys(("host_block_hit_rate", "stored_gib", "loaded_gib"), 0.0)
    row |= eviction_serving.row_of(cell, trace, clock, policy, **options)
    return {**row, **cell.columns("host_gib", "store", "link_gb_s", "transfers")}


def _break_even(rows: style.DataFrame) -> style.DataFrame:
    """Time to compute a prompt, and the bandwidth at which loading it takes as long."""
    import pandas as pd

    clock, table = make_clock(host_seconds=0.001), []
    for tokens in _PROMPTS:
        ends = [*range(clock.max_num_batched_tokens, tokens, clock.max_num_batched_tokens), tokens]
        chunks = [(end - start, end) for start, end in itertools.pairwise([0, *ends])]
        seconds = sum(clock.seconds([], [chunk], 1) for chunk in chunks)
        gigabytes = tokens * clock.kv_bytes_per_token / 1e9
        table.append((tokens, gigabytes, seconds, gigabytes / seconds))
    names = ["prompt_tokens", "kv_gb", "compute_s", "break_even_gb_s"]
    return pd.DataFrame(table, columns=names).assign(basis=CLOCK_DISCLAIMER)


def _compared(rows: style.DataFrame) -> style.DataFrame:
    """``rows`` with their time to first token over that without a tier, and over LRU's."""
    alone = rows["ttft_mean_s"].where(rows["host_gib"] == 0)
    at = [rows[name] for name in ("trace", "slice", "pool_gib", "load")]
    alone = alone.groupby(at).transform("max")
    return rows.assign(over_none=rows["ttft_mean_s"] / alone, over_lru=over_lru(rows))


def _summary(rows: style.DataFrame) -> style.DataFrame:
    by = ["trace", "loop", "load", "pool_gib", "host_gib", "store", "policy"]
    by += ["link_gb_s", "transfers"]
    values = ["block_hit_rate", "host_block_hit_rate", "stored_gib", "loaded_gib"]
    values += ["ttft_mean_s", "over_none", "over_lru"]
    return quantiles.over_slices(_compared(rows), by, values).assign(basis=CLOCK_DISCLAIMER)


def _draw(rows: style.DataFrame) -> style.Figure | None:
    """A row of panels per trace: time by size and rule, by size and policy, by link."""
    rows = _compared(rows)
    rows = rows[rows["host_gib"] > 0]
    if rows.empty:
        return None
    first = rows.iloc[0]
    sizes = sorted(rows["host_gib"].unique())
    rows = rows.assign(place=rows["host_gib"].map(sizes.index))
    rules = style.lines_of(["lru", *rows["store"].unique()])  # the first look is LRU's
    policies = style.policy_lines(rows["policy"].unique())
    traces = rows.groupby("trace", sort=False)
    figure, axes, _ = style.panel_grid(3 * len(traces), columns=3, height=1.7, width=2.3)
    mean = functools.partial(quantiles.draws, middle="mean")
    for number, (trace, of_trace) in enumerate(traces):
        panels = axes[3 * number : 3 * number + 3]
        serial = of_trace[of_trace["transfers"] == first["transfers"]]
        at_first = serial[serial["link_gb_s"] == first["link_gb_s"]]
        plain = at_first[at_first["policy"] == first["policy"]]
        of_rule = at_first[at_first["store"] == first["store"]]
        for shift, (rule, some) in enumerate(plain.groupby("store", sort=False)):
            mean(panels[0], some, some["place"] + 0.1 * shift, "over_none", **rules[rule])
        for shift, (policy, some) in enumerate(of_rule.groupby("policy", sort=False)):
            mean(panels[1], some, some["place"] + 0.1 * shift, "over_lru", **policies[policy])
        links = serial[(serial["store"] == first["store"]) & (serial["policy"] == first["policy"])]
        others = links[links["link_gb_s"] != first["link_gb_s"]]
        if not others.empty:
            links = links[links["host_gib"].isin(others["host_gib"])]
        mean(panels[2], links, "link_gb_s", "over_none", **rules[first["store"]])
        count, loop = of_trace["slice"].nunique(), of_trace["loop"].iloc[0]
        panels[0].set_title(f"{trace}, {count} slices, {loop} loop", loc="left")
        labels = "time / without a tier", "time / LRU's", "time / without a tier"
        for axis, label in zip(panels, labels, strict=True):
            axis.set(ylabel=label, xlabel="tier (GiB)")
            axis.axhline(1, **style.BOUND)
        for axis in panels[:2]:
            axis.set_xticks(range(len(sizes)), map("{:g}".format, sizes))
            axis.set_xlim(-0.3, len(sizes) - 0.5)
        if len(of_rule[["policy", "place"]].drop_duplicates()) == 1:  # LRU in the smallest tier
            panels[1].clear()
            panels[1].set_axis_off()
            text = f"A tier of {sizes[0]:g} GiB holds all blocks:\nno policy evicts."
            panels[1].text(0.5, 0.5, text, ha="center", transform=panels[1].transAxes)
        panels[2].set(yscale="log", xlabel="link to the host (GB/s)")
        style.plain_log_ticks(panels[2].yaxis)
        style.log_x(panels[2], links["link_gb_s"].unique(), base=2)
    notes = f"Llama 3.1 8B on an H100; bars: all slices. {CLOCK_DISCLAIMER}"
    return style.shared_legend(figure, columns=4, xlabel=serving.noted(figure, "", notes))


EXPERIMENT = Experiment(
    name="tier",
    figure="time to first token with a tier in host memory: Llama 3.1 8B, H100 modelled",
    options=Tier(),
    quick=Tier(
        policy=("lru",),
        host_gib=(256.0,),
        store=("through", "exclusive"),
        link_gb_s=(52.0,),
        transfers=("serial",),
        num_requests=100,
        slices=1,
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter(
        {"tier": _draw}, {"summary": (_summary, "%.4g"), "break_even": (_break_even, "%.4g")}
    ),
)
