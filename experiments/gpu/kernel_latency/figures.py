"""Figures of kernel_latency."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from experiments import style
from experiments.bench.shapes import OURS
from experiments.gpu.kernel_latency import tiles

TOKENS = ("norm", "gate", "store")
"""Parts whose ``batch`` is a number of tokens."""
_LOOKS = {
    "flash_attn_2": style.line(style.RED, "s"),
    "flash_attn_3": style.line(style.ORANGE, "^"),
    "gather_sdpa": style.line(style.SKY, "P", "dotted", fill=False),
    "torch": style.line(style.ORANGE, "^"),
    "copy_engine": style.line(style.RED, "s"),
}
"""A hollow marker means that the time includes a copy of the context."""
_OURS = (style.line(style.BLUE, "o"), style.line(style.BLACK, "D", "dashed", fill=False))
_FP8 = style.line(style.PINK, "*", "dashdot")


def lines(rows: style.DataFrame) -> Iterator[tuple[dict[str, Any], style.DataFrame]]:
    """Look and rows of each implementation and block size.  Our kernel is last, drawn on top."""
    block_sizes = sorted(rows["block_size"].unique())
    for name in (*_LOOKS, OURS):
        of_name = rows[rows["implementation"] == name]
        for (block_size, kv_dtype), line in of_name.groupby(["block_size", "kv_dtype"]):
            look = _LOOKS.get(name) or _OURS[block_sizes.index(block_size) % 2]
            label = f"{name}, block {block_size}"
            if name in _LOOKS and block_size != of_name["block_size"].min():
                look = {**look, "linestyle": "dashed", "marker": "d"}
            if kv_dtype.startswith("float8"):
                look, label = _FP8, f"{label}, fp8 cache"
            yield {**look, "label": label}, line


def _drawer(draw: Callable[[style.DataFrame], style.Figure], *parts: str) -> Callable:
    """A function that draws the rows of ``parts`` without the tiles that are only tried."""
    draw_parts = style.of_parts(draw, *parts)
    return lambda rows: draw_parts(rows[rows["by_table"]])


def _draw_decode(rows: style.DataFrame) -> style.Figure:
    """Latency, a panel per context."""
    contexts = sorted(rows["context_len"].unique())
    figure, axes, _ = style.panel_grid(len(contexts), height=1.9, sharex=True)
    for axis, context_len in zip(axes, contexts, strict=True):
        of_context = rows[rows["context_len"] == context_len]
        for look, line in lines(of_context.sort_values("batch")):
            axis.plot(line["batch"], line["p50_us"], **look)
            spread = {"color": look["color"], "alpha": 0.2, "linewidth": 0}
            axis.fill_between(line["batch"], line["p20_us"], line["p80_us"], **spread)
        # The bound of the wider dtype if two are drawn; fp8 may lie below this bound.
        best = of_context.sort_values(["batch", "bytes"]).drop_duplicates("batch", keep="last")
        fastest = best["bytes"] / best["peak_gb_per_s"] / 1e3
        axis.plot(best["batch"], fastest, **style.BOUND, label="bound: bytes at the measured peak")
        axis.set_yscale("log")
        style.log_x(axis, base=4)
        style.plain_log_ticks(axis.yaxis)
        axis.set_title(f"context {context_len:,} tokens")
    ylabel = "latency (µs),\np50 and p20 to p80"
    return style.shared_legend(figure, columns=4, xlabel="batch (sequences)", ylabel=ylabel)


def _draw_prefill(rows: style.DataFrame) -> style.Figure:
    size = ["batch", "query_len", "context_len"]
    sizes = rows[size].drop_duplicates()
    sizes = sizes.assign(cached=sizes["context_len"] > sizes["query_len"])
    sizes = sizes.sort_values(["cached", "batch", "context_len"], ascending=[False, True, True])
    sizes = sizes.assign(height=range(len(sizes)))
    names = [
        f"{row.batch} x {row.query_len:,}"
        + (f" after {row.context_len - row.query_len:,}" if row.cached else "")
        for row in sizes.itertuples()
    ]
    figure, (axis,), _ = style.panel_grid(1, width=5.2, height=0.7 + 0.33 * len(names))
    drawn = list(lines(rows.merge(sizes, on=size)))
    for index, (look, line) in enumerate(drawn):
        shift = 0.5 * (0.5 - (index + 0.5) / len(drawn))
        look = {**look, "linestyle": "none"}
        axis.plot(100 * line["matmul_fraction"], line["height"] + shift, **look)
    axis.axvline(100, **style.BOUND, label="bound: bf16 matmul")
    axis.set(xlim=(0, 105), xlabel="operations of visible pairs (% of the measured matmul rate)")
    style.name_rows(axis, names)
    axis.set_ylabel("sequences x new tokens")
    return style.shared_legend(figure, columns=3)


_MOVES = {
    "norm": "norm: of the device's rate",
    "gate": "gate: of the device's rate",
    "store": "store: of the device's rate",
    "copy": "copy: of the device's rate",
    "swap_out": "swap out: of a copy to the host",
    "swap_in": "swap in: of a copy from the host",
}


def _draw_moves(rows: style.DataFrame) -> style.Figure:
    blocks = rows["batch"] * rows["block_size"]
    rows = rows.assign(tokens=rows["batch"].where(rows["op"].isin(TOKENS), blocks))
    ops = [op for op in _MOVES if op in set(rows["op"])]
    figure, axes, spare = style.panel_grid(len(ops), height=1.9, sharey=True)
    for axis, op in zip(axes, ops, strict=True):
        for look, line in lines(rows[rows["op"] == op]):
            style.curve(axis, line, "tokens", "bandwidth_fraction", 100, **look)
        axis.axhline(100, **style.BOUND, label="bound: measured rate")
        axis.set(title=_MOVES[op], xlabel="tokens", ylim=(0, 115))
        style.log_x(axis, base=4)
    ylabel = "bytes moved per second (% of the measured rate)"
    return style.shared_legend(figure, spare, columns=4, ylabel=ylabel)


def _draw_cascade(rows: style.DataFrame) -> style.Figure:
    """Speed of shared-prefix decode, divided by the speed of plain decode."""
    figure, (axis,), _ = style.panel_grid(1, height=2.2, width=4)
    times = rows.pivot_table("p50_us", ["batch", "prefix_len"], "implementation")
    times = times.reindex(columns=[OURS, "paged_decode"])
    looks = style.lines_of(times.index.unique("batch"))
    for batch, of_batch in times.groupby(level="batch"):
        of_batch = of_batch.droplevel("batch")
        look = looks[batch] | {"linestyle": "solid", "label": f"batch {batch}"}
        axis.plot(of_batch["paged_decode"] / of_batch[OURS], **look)
    axis.axhline(1, color="black", lw=0.8)
    axis.set(xlabel="shared prefix (tokens)", ylabel="plain / shared prefix (times)", yscale="log")
    style.log_x(axis, base=2)
    style.plain_log_ticks(axis.yaxis)
    return style.shared_legend(figure)


plot = style.plotter(
    {
        "decode": _drawer(_draw_decode, "decode"),
        "mla": _drawer(_draw_decode, "mla"),
        "prefill": _drawer(_draw_prefill, "prefill"),
        "moves": _drawer(_draw_moves, *_MOVES),
        "cascade": _drawer(_draw_cascade, "cascade"),
    },
    {"tiles": (tiles.ranking, "%.3f")},
    measured="p50_us",
)
