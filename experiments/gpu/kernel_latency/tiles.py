"""The parts ``tiles`` and ``splits``: which tiles and split counts are fastest.

The table in ``kernels/tiles.py`` is a plain decision in the source, written from these parts. Each
cell runs an op with another tile than the table's, or with another number of splits, at a few
shapes; the table's own choice is among them. A tile that needs more than the GPU has is absent.

``tiles.csv`` ranks the tiles by their time relative to the table's choice (geometric mean over the
shapes, so that no shape counts more than another); ``splits.csv`` has the best split count of every
shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import style
from experiments.bench.shapes import Shape, use_device
from experiments.harness import Unavailable

if TYPE_CHECKING:
    from experiments.gpu.kernel_latency import KernelLatency, LatencyCell
    from kernels.tiles import AttentionTile, Target

TILE = ("tile_m", "tile_n", "num_warps", "num_stages")
TABLES = {"decode": "decode_tile", "prefill": "prefill_tile", "cascade": "split_prefill_tile"}
"""Functions of ``kernels/tiles.py``, by op."""
_BLOCK_SIZE = 16


def shapes(options: KernelLatency, part: str) -> Iterator[tuple[Shape, tuple[int, ...] | None]]:
    """Shapes of a part, each with every tile or number of splits; None is the table's choice."""

    def shape(batch: int, query_len: int, context_len: int, **more: Any) -> Shape:
        op = "decode" if query_len == 1 else "prefill"
        sizes = {"batch": batch, "query_len": query_len, "context_len": context_len}
        return options.shape(op, **sizes, block_size=_BLOCK_SIZE, **more)

    if part == "splits":
        for sizes in options.split_shapes:
            for number in (None, *options.splits):
                yield shape(*sizes, num_splits=number), None
        return
    found = [shape(*sizes) for sizes in options.tile_shapes]
    for batch, prefix_len in options.tile_prefixes:
        sizes = {"prefix_len": prefix_len, "context_len": prefix_len + 16 * _BLOCK_SIZE}
        found.append(options.shape("cascade", batch=batch, block_size=_BLOCK_SIZE, **sizes))
    for one in found:
        decode_tiles = [(0, *tile) for tile in options.decode_tile]
        for tile in (None, *(decode_tiles if one.op == "decode" else options.prefill_tile)):
            yield one, tile


def run(cell: LatencyCell) -> dict[str, Any]:
    """Columns of a cell's row: tile, whether it is the table's, and ``timed_ops.run``'s."""
    device = use_device()
    from triton.runtime.errors import OutOfResources

    from experiments.bench import timed_ops
    from kernels.tiles import force_target, target_of

    target = target_of(device)
    table = table_tile(cell.shape, target)
    if cell.tile is not None:
        target = with_tile(cell.shape, cell.tile, target)
        if table_tile(cell.shape, target) == table:
            raise Unavailable("the table's own choice, which has a cell of its own")
    tile = table_tile(cell.shape, target)
    try:
        with force_target(target):
            row = timed_ops.run(cell)
    except OutOfResources as error:
        raise Unavailable(f"tile {dataclasses.astuple(tile)[:4]}: {error}") from error
    if cell.part == "splits":
        row["num_splits"] = cell.shape.num_splits or _table_splits(cell.shape, table)
    by_table = cell.tile is None and cell.shape.num_splits is None
    return {"by_table": by_table, **{name: getattr(tile, name) for name in TILE}, **row}


def table_tile(shape: Shape, target: Target) -> AttentionTile:
    """The table's choice for ``shape``."""
    import torch

    from kernels import tiles

    head_dim, dtype = tiles.padded_dim(shape.head_dim), getattr(torch, shape.dtype)
    itemsize = getattr(torch, shape.kv_dtype or shape.dtype).itemsize
    if shape.op == "decode":
        group_size = shape.num_q_heads // shape.num_kv_heads
        return tiles.decode_tile(group_size, head_dim, dtype, target, itemsize)
    return getattr(tiles, TABLES[shape.op])(head_dim, dtype, target, itemsize)


def with_tile(shape: Shape, tile: tuple[int, ...], target: Target) -> Target:
    """``target`` with this tile_m, tile_n, num_warps and num_stages for the op of ``shape``.

    A 0 leaves the choice to the table.
    """
    changes = {name: n for name, n in zip(TILE, tile, strict=True) if n}
    changed = dataclasses.replace(table_tile(shape, target), **changes)
    return dataclasses.replace(target, tiles=((TABLES[shape.op], changed),))


def _table_splits(shape: Shape, tile: AttentionTile) -> int:
    """The number of splits that the table chooses."""
    from kernels.tiles import FEW_QUERIES, chunking

    if shape.op == "prefill" and shape.query_len > FEW_QUERIES:
        return 1
    return chunking(shape.num_kv_heads).most(shape.context_len, tile.tile_n)


def ranking(rows: style.DataFrame) -> style.DataFrame | None:
    """Time of each tile over the time of the table's choice, by op, the fastest first.

    The mean is geometric.  Tiles that failed at one of the shapes are left out.
    """
    rows = rows[rows["part"] == "tiles"]
    if rows.empty:
        return None
    shape = ["op", "batch", "query_len", "context_len"]
    table = rows[rows["by_table"].astype(bool)].groupby(shape)["p50_us"].first()
    rows = rows.join(table.rename("of_table"), on=shape)
    rows = rows.assign(logarithm=np.log(rows["p50_us"] / rows["of_table"]))
    times = rows.groupby(["op", *TILE])["logarithm"].agg(["size", "mean", "min", "max"])
    complete = times["size"] == times.groupby("op")["size"].transform("max")
    ratios = np.exp(times.loc[complete, ["mean", "min", "max"]])
    return ratios.add_suffix("_over_table").reset_index().sort_values(["op", "mean_over_table"])


def best_splits(rows: style.DataFrame) -> style.DataFrame | None:
    """The fastest number of splits of each shape, beside the table's choice."""
    rows = rows[rows["part"] == "splits"]
    if rows.empty:
        return None
    shape = ["batch", "query_len", "context_len"]
    by_table = rows[rows["by_table"].astype(bool)].set_index(shape)
    best = rows.loc[rows.groupby(shape)["p50_us"].idxmin()].set_index(shape)
    table = by_table[["num_splits"]].assign(
        best=best["num_splits"], best_over_table=best["p50_us"] / by_table["p50_us"]
    )
    return table.reset_index()
