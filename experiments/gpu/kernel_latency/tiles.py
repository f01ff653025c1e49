"""Times our attention with tiles and splits that ``kernels/tiles.py`` does not choose.

``--tile-m``, ``--tile-n``, ``--num-warps``, ``--num-stages``, ``--has-producer`` and
``--num-splits`` try values at
every shape of the parts ``decode``, ``prefill`` and ``cascade``, in addition to the table's choice.
A tile that needs more resources than the GPU has is absent. ``tiles.csv`` ranks the choices by the
geometric mean, over the shapes, of (time of the choice / time of the table's choice).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import style
from experiments.bench.shapes import Shape, use_device
from experiments.harness import Unavailable

if TYPE_CHECKING:
    from experiments.gpu.kernel_latency import KernelLatency, LatencyCell
    from kernels.tiles import AttentionTile, Target

TILE = ("tile_m", "tile_n", "num_warps", "num_stages", "has_producer")
TABLES = {"decode": "decode_tile", "prefill": "prefill_tile", "cascade": "split_prefill_tile"}
"""Function of ``kernels/tiles.py`` that chooses the tile, by op."""


def tried(options: KernelLatency, shape: Shape) -> Iterator[tuple[Shape, tuple[int, ...]]]:
    """Shapes and tiles to try besides the table's choice."""
    table = (0,) * len(TILE)
    names = TILE if shape.op == "prefill" else TILE[:-1]  # no other op has a producer
    tiles = itertools.product(*(getattr(options, name) or (0,) for name in names))
    for tile in (values + table[len(values) :] for values in tiles):
        if tile != table:
            yield shape, tile
    if shape.op != "cascade":
        for number in options.num_splits:
            yield dataclasses.replace(shape, num_splits=number), table


def run(cell: LatencyCell) -> dict[str, Any]:
    """Columns of a cell's row: its tile, ``by_table``, and the columns of ``timed_ops.run``."""
    device = use_device()
    from triton.runtime.errors import OutOfResources

    from experiments.bench import timed_ops
    from kernels.tiles import force_target, target_of

    target = target_of(device)
    tile = table = table_tile(cell.shape, target)
    if any(cell.tile):
        changes: Any = {name: n for name, n in zip(TILE, cell.tile, strict=True) if n}
        tile = dataclasses.replace(table, **changes)
        if tile == table:
            raise Unavailable("the table's own choice, which has a cell of its own")
        target = dataclasses.replace(target, tiles=((TABLES[cell.shape.op], tile),))
    try:
        with force_target(target):
            row = timed_ops.run(cell)
    except OutOfResources as error:
        of_tile = {name: getattr(tile, name) for name in TILE}
        raise Unavailable(f"tile {of_tile}: {error}") from error
    by_table = not any(cell.tile) and cell.shape.num_splits is None
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


def ranking(rows: style.DataFrame) -> style.DataFrame | None:
    """For each op: geometric mean of (time / time of the table's choice), fastest first.

    Choices that failed at one of the shapes are left out.
    """
    if rows["by_table"].all():
        return None
    rows = rows[rows["tile_m"].notna()].fillna({"num_splits": 0})
    shape = ["op", "batch", "query_len", "context_len", "prefix_len", "block_size"]
    table = rows[rows["by_table"]].groupby(shape)["p50_us"].first()
    rows = rows.join(table.rename("of_table"), on=shape)
    rows = rows.assign(logarithm=np.log(rows["p50_us"] / rows["of_table"]))
    times = rows.groupby(["op", *TILE, "num_splits"])["logarithm"]
    times = times.agg(["size", "mean", "min", "max"])
    complete = times["size"] == times.groupby("op")["size"].transform("max")
    ratios = np.exp(times.loc[complete, ["mean", "min", "max"]])
    return ratios.add_suffix("_over_table").reset_index().sort_values(["op", "mean_over_table"])
