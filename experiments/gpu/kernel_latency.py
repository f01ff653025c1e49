"""How long the data-path kernels take on a GPU, beside flash-attn, PyTorch and a naive attention.

- ``decode``: one query per sequence, over batch, context and block size.
- ``prefill``: (sequences, new tokens of each, context of each): without a cached prefix where the
  last two are equal, with one where the context is longer.
- ``norm``, ``gate``: the residual sum with its RMSNorm, and SwiGLU, beside PyTorch's.
- ``store``: new tokens into random slots.  ``copy``: blocks of all layers inside a cache.
  ``swap_out``, ``swap_in``: the same to pinned host memory and back.

A cell first checks its result against fp64 by the rule of ``kernels/testing/accuracy.py`` and
fails, without a time, where it is wrong.  Times are p20, p50 and p80 of the device's clock with a
cold L2, by replays of a CUDA graph where the work can be captured (``launch``), see
``bench/gpu_timing.py``.  Achieved bytes and operations per second are set against a copy and a bf16
matrix product that are timed in the same process.  Implementations whose names begin with gather_
first copy the context, in the time; see ``kernels/testing/baselines.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from experiments import quantiles, style
from experiments.bench.problem import OURS, Launch, OnHeads, Shape, Timed, run_timed, timed_cells
from experiments.harness import Count, Experiment, Needs

PARTS = ("decode", "prefill", "norm", "gate", "store", "copy", "swap_out", "swap_in")
PAGED = (OURS, "flash_attn_2", "flash_attn_3", "flash_attn_4", "flashinfer", "torch_flash")
"""Attention on the blocks as they are."""
GATHER = ("gather_flash_attn_2", "gather_torch_flash", "gather_sdpa", "gather_naive")
"""For the blocks that flash-attn 2 refuses: behind a copy, any size is the same to them."""
IMPLEMENTATIONS = {
    "norm": (OURS, "torch"),
    "gate": (OURS, "torch"),
    "store": (OURS, "torch_index_put"),
    "copy": (OURS, "torch_index_put"),
    "swap_out": (OURS, "memcpy"),
    "swap_in": (OURS, "memcpy"),
}
_PAGE = 256
_TOKENS = ("norm", "gate", "store")
"""Parts whose batch are tokens."""


Prefill = Annotated[
    tuple[int, int, int],
    Needs(
        "sequences, new tokens, and at least as many tokens in all",
        lambda sizes: sizes[0] >= 1 and 1 <= sizes[1] <= sizes[2],
    ),
]


@dataclass(frozen=True, kw_only=True)
class KernelLatency(OnHeads):
    """The grid: parts x shapes x block sizes x implementations."""

    part: tuple[Literal[PARTS], ...] = PARTS
    batch: tuple[Count, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Sequences of a decode step."""
    context_len: tuple[Count, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    """Tokens of each sequence of a decode step."""
    block_size: tuple[Count, ...] = (16, 256)
    prefill: tuple[Prefill, ...] = (
        (1, 512, 512),
        (1, 2048, 2048),
        (1, 8192, 8192),
        (1, 32768, 32768),
        (4, 2048, 2048),
        (16, 1024, 1024),
        (1, 512, 8192),
        (1, 2048, 32768),
        (1, 16, 32768),
        (4, 1024, 8192),
        (16, 256, 4096),
        (64, 4, 4096),
    )
    """Sequences, new tokens of each, and tokens of each with its cached prefix."""
    store_tokens: tuple[Count, ...] = (1, 16, 256, 4096, 65536)
    """New tokens, also of norm and gate."""
    move_tokens: tuple[Count, ...] = (256, 1024, 4096, 32768)
    """Tokens whose blocks, of every layer, copy and swap move."""
    num_layers: Count = 28
    """Layers that copy and swap move the blocks of."""
    launch: tuple[Launch, ...] = ("graph",)
    """Replays of a CUDA graph, or calls from Python."""


def cells(options: KernelLatency) -> Iterator[Timed]:
    for shape in _shapes(options):
        yield from timed_cells(options, shape, implementations(shape), options.launch)


def implementations(shape: Shape) -> tuple[str, ...]:
    """What can be compared at a shape, as far as the shape tells."""
    if shape.op in IMPLEMENTATIONS:
        return IMPLEMENTATIONS[shape.op]
    if shape.kv_dtype is not None:
        return (OURS,)
    return PAGED + (GATHER if shape.block_size % _PAGE else ())


def _shapes(options: KernelLatency) -> Iterator[Shape]:
    decode = itertools.product(options.context_len, options.batch)
    sizes = {
        "decode": [{"batch": batch, "context_len": length} for length, batch in decode],
        "prefill": [
            {"batch": batch, "query_len": query_len, "context_len": context_len}
            for batch, query_len, context_len in options.prefill
        ],
        **{part: [{"batch": tokens} for tokens in options.store_tokens] for part in _TOKENS},
    }
    for part in options.part:
        knows_blocks = part not in ("norm", "gate")
        for block_size in options.block_size if knows_blocks else options.block_size[:1]:
            moves = [
                {"batch": -(-tokens // block_size), "num_layers": options.num_layers}
                for tokens in options.move_tokens
            ]
            for size in sizes.get(part, moves):
                yield options.shape(part, block_size=block_size, **size)


_LOOKS = {
    "flash_attn_2": style.line(style.RED, "s"),
    "gather_flash_attn_2": style.line(style.RED, "s", "dotted", fill=False),
    "flash_attn_3": style.line(style.ORANGE, "^"),
    "flash_attn_4": style.line(style.PINK, "v"),
    "flashinfer": style.line(style.SKY, "h"),
    "torch_flash": style.line(style.GREEN, "D"),
    "gather_torch_flash": style.line(style.GREEN, "D", "dotted", fill=False),
    "gather_sdpa": style.line(style.SKY, "P", "dotted", fill=False),
    "gather_naive": style.line(style.GREY, "X", "dotted", fill=False),
    "torch_index_put": style.line(style.RED, "s"),
    "memcpy": style.line(style.GREEN, "D"),
    "torch": style.line(style.ORANGE, "^"),
}
"""Hollow markers say that the copy of the context is in the time."""
_OURS = (style.line(style.BLUE, "o"), style.line(style.BLACK, "o", "dashed"))
_FP8 = style.line(style.PINK, "*", "dashdot")


def lines(rows: style.DataFrame) -> Iterator[tuple[dict[str, Any], style.DataFrame]]:
    """Look with label, and rows, of each implementation and block size; ours come last, on top."""
    block_sizes = sorted(rows["block_size"].unique())
    for name in (*_LOOKS, OURS):
        of_name = rows[rows["implementation"] == name]
        for (block_size, kv_dtype), line in of_name.groupby(["block_size", "kv_dtype"]):
            look = _LOOKS.get(name) or _OURS[block_sizes.index(block_size) % 2]
            label = f"{name}, block {block_size}"
            if kv_dtype.startswith("float8"):
                look, label = _FP8, f"{label}, fp8 cache"
            yield {**look, "label": label}, line


def rates(rows: style.DataFrame) -> style.DataFrame:
    """What the GPU did at best, as the cells measured it: columns what, value and unit."""
    import pandas as pd

    links = {"swap_out": "to pinned host memory", "swap_in": "from pinned host memory"}
    kind = rows["op"].map(links).fillna("device copy, read and written")
    bandwidths = rows.groupby(kind, sort=False)["peak_gb_per_s"].median()
    found = [(what, value, "GB/s") for what, value in bandwidths.items()]
    found.append(("bf16 matrix product", rows["peak_tflop_per_s"].median(), "TFLOP/s"))
    return pd.DataFrame(found, columns=["what", "value", "unit"])


def _draw_rates(rows: style.DataFrame) -> style.Figure:
    """A bar for each rate."""
    found = rates(rows)
    figure, axes, _ = style.panel_grid(found["unit"].nunique(), height=1.6, columns=2)
    for axis, (unit, part) in zip(axes, found.groupby("unit"), strict=True):
        bars = axis.barh(part["what"], part["value"], **style.bar(style.SKY))
        axis.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=6)
        axis.margins(x=0.2)
        axis.set_xlabel(unit)
        axis.grid(axis="y", visible=False)
    return figure


def _drawer(draw: Callable[[style.DataFrame], style.Figure], *ops: str) -> Callable:
    """What draws the rows of ``ops``, where they were timed, of those that a CUDA graph can
    capture as its replays."""

    def draw_ops(rows: style.DataFrame) -> style.Figure | None:
        captured = rows.loc[rows["launch"] == "graph", "implementation"]
        shown = (rows["launch"] == "graph") | ~rows["implementation"].isin(captured)
        shown &= rows["op"].isin(ops)
        return draw(rows[shown]) if shown.any() else None

    return draw_ops


def _draw_decode(rows: style.DataFrame, *, bandwidth: bool) -> style.Figure:
    """Latency or bandwidth, a panel per context."""
    contexts = sorted(rows["context_len"].unique())
    figure, axes, _ = style.panel_grid(len(contexts), height=1.9, sharex=True)
    for axis, context_len in zip(axes, contexts, strict=True):
        of_context = rows[rows["context_len"] == context_len]
        for look, line in lines(of_context):
            if bandwidth:
                style.curve(axis, line, "batch", "bandwidth_fraction", 100, **look)
            else:
                quantiles.band(axis, line, "batch", **look)
        if bandwidth:
            axis.axhline(100, **style.BOUND, label="bound: copy bandwidth")
            axis.set_ylim(0, 110)
        else:
            # Of the wider cache where two are drawn: fp8 may lie below.
            best = of_context.sort_values(["batch", "bytes"]).drop_duplicates("batch", keep="last")
            fastest = best["bytes"] / best["peak_gb_per_s"] / 1e3
            label = "bound: bytes at copy bandwidth"
            axis.plot(best["batch"], fastest, **style.BOUND, label=label)
            axis.set_yscale("log")
        style.log_x(axis, base=2)
        axis.set_title(f"context {context_len:,} tokens")
    label = (
        "K, V, queries and output\n(% of copy bandwidth)"
        if bandwidth
        else "latency (µs), p50 and p20 to p80"
    )
    return style.shared_legend(figure, columns=4, xlabel="batch (sequences)", ylabel=label)


def _draw_prefill(rows: style.DataFrame) -> style.Figure:
    size = ["batch", "query_len", "context_len"]
    sizes = rows[size].drop_duplicates()
    sizes = sizes.assign(cached=sizes["context_len"] > sizes["query_len"])
    sizes = sizes.sort_values(["cached", "batch", "context_len"], ascending=[False, True, True])
    sizes = sizes.assign(place=range(len(sizes)))
    names = [
        f"{row.batch} x {row.query_len:,}"
        + (f" after {row.context_len - row.query_len:,}" if row.cached else "")
        for row in sizes.itertuples()
    ]
    figure, (axis,), _ = style.panel_grid(1, width=5.2, height=0.7 + 0.33 * len(names))
    drawn = list(lines(rows.merge(sizes, on=size)))
    for index, (look, line) in enumerate(drawn):
        beside = 0.5 * (0.5 - (index + 0.5) / len(drawn))
        look = {**look, "linestyle": "none"}
        axis.plot(100 * line["matmul_fraction"], line["place"] + beside, **look)
    axis.axvline(100, **style.BOUND, label="bound: bf16 matmul")
    axis.set(xlim=(0, 105), xlabel="operations of visible pairs (% of the measured matmul rate)")
    style.name_rows(axis, names)
    axis.set_ylabel("sequences x new tokens")
    return style.shared_legend(figure, columns=3)


_MOVES = {
    "norm": "norm: of a device copy",
    "gate": "gate: of a device copy",
    "store": "store: of a device copy",
    "copy": "copy: of a device copy",
    "swap_out": "swap out: of a copy to the host",
    "swap_in": "swap in: of a copy from the host",
}


def _draw_moves(rows: style.DataFrame) -> style.Figure:
    blocks = rows["batch"] * rows["block_size"]
    rows = rows.assign(tokens=rows["batch"].where(rows["op"].isin(_TOKENS), blocks))
    ops = [op for op in _MOVES if op in set(rows["op"])]
    figure, axes, _ = style.panel_grid(len(ops), height=2.1, columns=2, sharey=True)
    for axis, op in zip(axes, ops, strict=True):
        for look, line in lines(rows[rows["op"] == op]):
            style.curve(axis, line, "tokens", "bandwidth_fraction", 100, **look)
        axis.axhline(100, **style.BOUND, label="bound: measured copy")
        axis.set(title=_MOVES[op], xlabel="tokens", ylim=(0, 115))
        style.log_x(axis, base=4)
    ylabel = "bytes moved per second (% of the measured copy)"
    return style.shared_legend(figure, columns=3, ylabel=ylabel)


EXPERIMENT = Experiment(
    name="kernel_latency",
    figure="decode, prefill, norms, gates and moves on a GPU vs flash-attn, PyTorch and naive",
    options=KernelLatency(),
    quick=KernelLatency(
        batch=(1, 16, 64, 256),
        context_len=(512, 4096),
        prefill=((1, 2048, 2048), (4, 1024, 8192)),
        store_tokens=(16, 4096),
        move_tokens=(1024, 4096),
        budget_ms=30.0,
    ),
    cells=cells,
    run_cell=run_timed,
    plot=style.plotter(
        {
            "decode_latency": _drawer(functools.partial(_draw_decode, bandwidth=False), "decode"),
            "decode_bandwidth": _drawer(functools.partial(_draw_decode, bandwidth=True), "decode"),
            "prefill": _drawer(_draw_prefill, "prefill"),
            "moves": _drawer(_draw_moves, *IMPLEMENTATIONS),
            "gpu_rates": _draw_rates,
        },
        measured="p50_us",
    ),
    gpu="required",
    timed=True,
)
