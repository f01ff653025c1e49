"""What the table in ``kernels/tiles.py`` answers for a shape, and targets that answer otherwise."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from experiments.bench.problem import Shape

if TYPE_CHECKING:
    from kernels.tiles import AttentionTile, Target

TILE = ("tile_m", "tile_n", "num_warps", "num_stages")
TABLES = {"decode": "decode_tile", "prefill": "prefill_tile", "cascade": "split_prefill_tile"}
"""Functions of ``kernels/tiles.py`` by the op that asks them."""


def table_tile(shape: Shape, target: Target) -> AttentionTile:
    """What the table chooses for ``shape``."""
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
