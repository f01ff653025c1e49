"""Which tiles and split counts are fastest: what the table in ``kernels/tiles.py`` is written from.

Tuning is offline: the table is a plain decision in the source, and this experiment says what it
should decide on the GPU at hand.  Each cell runs an op with another tile than the table's, or with
another number of splits, at a few shapes; the table's own choice is among them.  Results are
checked and timed as in ``kernel_latency``.  A tile that needs more than the GPU has is absent.

There are no figures: ``decision.md`` ranks the tiles by their time relative to the table's choice
(geometric mean over the shapes, so that no shape counts more than another) and names the best split
count of every decode shape.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from experiments import style
from experiments.bench.problem import OURS, OnHeads, Shape, use_device
from experiments.bench.tiles import TABLES, TILE, table_tile, with_tile
from experiments.harness import Axis, Count, Experiment, Options, Positive, Unavailable, grid
from experiments.harness.store import write_atomically

if TYPE_CHECKING:
    from kernels.tiles import AttentionTile

_SPLITS = {"splits": "chunks of decode", "prefill_splits": "chunks of prefill"}
"""Functions of ``kernels/tiles.py`` that choose split counts, by part."""


@dataclass(frozen=True, kw_only=True)
class TileSweep(OnHeads):
    """The grid: tiles x shapes, and split counts x shapes of decode and prefill."""

    part: tuple[Literal["decode", "prefill", "cascade", "splits", "prefill_splits"], ...] = (
        "decode",
        "splits",
        "prefill_splits",
        "prefill",
        "cascade",
    )
    decode: tuple[tuple[int, int], ...] = ((1, 8192), (16, 4096), (64, 4096), (256, 1024))
    """Sequences and context of each."""
    decode_tile: tuple[tuple[int, int, int], ...] = tuple(
        itertools.product((32, 64, 128), (4, 8), (3, 5, 7))
    )
    """Tokens of a tile, warps and pipeline stages of each."""
    prefill: tuple[tuple[int, int, int], ...] = ((1, 8192, 8192), (4, 1024, 8192), (64, 4, 4096))
    """Sequences, new tokens of each, and tokens of each with its cached prefix."""
    prefill_tile: tuple[tuple[int, int, int, int], ...] = tuple(
        itertools.product((64, 128), (32, 64, 128), (4, 8), (3, 5))
    )
    """Rows and tokens of a tile, warps and pipeline stages of each."""
    cascade: tuple[tuple[int, int], ...] = ((16, 8192), (256, 32768))
    """Sequences and tokens of their shared prefix; tiles as for prefill."""
    splits: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    splits_batch: tuple[int, ...] = (1, 4, 16, 64, 256)
    splits_context: tuple[int, ...] = (1024, 8192, 32768)
    splits_prefill: tuple[tuple[int, int, int], ...] = (
        (1, 16, 32768),
        (4, 16, 32768),
        (1, 128, 32768),
        (1, 16, 4096),
    )
    """Few queries behind a long prefix: sequences, new tokens and all tokens of each."""
    block_size: Count = 16
    budget_ms: Positive = 25.0
    """Device time for the samples of a cell."""


@dataclass(frozen=True, kw_only=True)
class TileSweepCell(Options):
    part: str
    shape: Axis[Shape]
    tile: Axis[tuple[int, ...] | None]
    """tile_m, tile_n, num_warps, num_stages; 0 is the table's. None: all the table's."""
    budget_ms: float


def cells(options: TileSweep) -> Iterator[TileSweepCell]:
    def shape(op: str, batch: int, context_len: int, **more: Any) -> Shape:
        sizes = {"batch": batch, "context_len": context_len, "block_size": options.block_size}
        return options.shape(op, **sizes, **more)

    suffix = 16 * options.block_size
    decode_tiles = [(0, *tile) for tile in options.decode_tile]
    decode_sizes = itertools.product(options.splits_context, options.splits_batch)
    splits = (None, *options.splits)
    shapes_and_tiles = {
        "decode": ([shape("decode", *size) for size in options.decode], decode_tiles),
        "prefill": (
            [shape("prefill", b, c, query_len=q) for b, q, c in options.prefill],
            options.prefill_tile,
        ),
        "cascade": (
            [shape("cascade", b, p + suffix, prefix_len=p) for b, p in options.cascade],
            options.prefill_tile,
        ),
        "splits": (
            [shape("decode", b, c, num_splits=n) for c, b in decode_sizes for n in splits],
            (),
        ),
        "prefill_splits": (
            [
                shape("prefill", b, c, query_len=q, num_splits=n)
                for b, q, c in options.splits_prefill
                for n in splits
            ],
            (),
        ),
    }
    for part in options.part:
        shapes, tiles = shapes_and_tiles[part]
        yield from grid(options, TileSweepCell, part=part, shape=shapes, tile=(None, *tiles))


def run_cell(cell: TileSweepCell) -> list[dict[str, Any]]:
    device = use_device()
    from triton.runtime.errors import OutOfResources

    from experiments.bench import kernel_problems
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
            row = kernel_problems.run(cell.shape, OURS, budget_ms=cell.budget_ms)
    except OutOfResources as error:
        raise Unavailable(f"tile {dataclasses.astuple(tile)[:4]}: {error}") from error
    columns = {name: getattr(tile, name) for name in TILE}
    by_table = cell.tile is None and cell.shape.num_splits is None
    if cell.part in _SPLITS:
        row["num_splits"] = cell.shape.num_splits or _table_splits(cell.shape, table)
    return [{"part": cell.part, "by_table": by_table, **columns, **row}]


def _table_splits(shape: Shape, tile: AttentionTile) -> int:
    """The number of splits that the table chooses."""
    from kernels.tiles import FEW_QUERIES, chunking

    if shape.op == "prefill" and shape.query_len > FEW_QUERIES:
        return 1
    return chunking(shape.num_kv_heads).most(shape.context_len, tile.tile_n)


def relative_times(rows: style.DataFrame, part: str) -> style.DataFrame:
    """Time of each tile over that of the table's choice: tiles by shapes, the fastest on average
    (``mean``, geometric) first.

    Tiles that failed at one of the shapes are left out.
    """
    rows = rows[(rows["part"] == part) & rows["p50_us"].notna()]
    sizes = zip(rows["batch"], rows["query_len"], rows["context_len"], strict=True)
    rows = rows.assign(shape=["x".join(map(str, size)) for size in sizes])
    times = rows.pivot_table("p50_us", list(TILE), "shape")
    table = rows[rows["by_table"]].groupby("shape")["p50_us"].first()
    relative = (times / table).dropna()
    relative.insert(0, "mean", np.exp(np.log(relative).mean(axis=1)))
    return relative.sort_values("mean")


def _markdown(*table: Sequence[object]) -> list[str]:
    """The lines of a table, its head first."""
    head, *body = (f"| {' | '.join(map(str, line))} |" for line in table)
    return [head, "|" + "---|" * len(table[0]), *body, ""]


def decision(rows: style.DataFrame) -> str:
    """What the table should decide here, as text."""
    first = rows.iloc[0]
    kind = f"head_dim {first['head_dim']}, {first['dtype']}"
    if first["kv_dtype"] != first["dtype"]:
        kind += f", cache {first['kv_dtype']}"
    lines = [f"# Tiles and splits by measurement ({kind})", ""]
    for part, function in TABLES.items():
        relative = relative_times(rows, part)
        if relative.empty:
            continue
        chosen = rows[(rows["part"] == part) & rows["by_table"]].iloc[0]
        lines += [f"## `{function}`: now {tuple(int(chosen[name]) for name in TILE)}", ""]
        lines += _markdown(
            (f"({', '.join(TILE)})", *relative.columns),
            *(
                (tuple(map(int, tile)), *map("{:.3f}".format, times))
                for tile, times in relative.head(8).iterrows()
            ),
        )
        lines += ["Time over that of the present choice, by sequences x queries x context.", ""]
    for part, title in _SPLITS.items():
        splits = rows[(rows["part"] == part) & rows["p50_us"].notna()]
        found = []
        for shape, group in splits.groupby(["batch", "query_len", "context_len"]):
            best = group.loc[group["p50_us"].idxmin()]
            for now in group[group["by_table"]].to_dict("records"):
                gain = f"{best['p50_us'] / now['p50_us']:.3f}"
                found.append((*shape, int(now["num_splits"]), int(best["num_splits"]), gain))
        if len(splits):
            head = ("batch", "queries", "context", "now", "best", "time of best / now")
            lines += [f"## {title}", "", *_markdown(head, *found)]
    return "\n".join(lines) + "\n"


def plot(rows: style.DataFrame, folder: Path) -> list[Path]:
    """decision.md."""
    timed = rows.dropna(subset="p50_us")
    if timed.empty:
        return []
    path = folder / "decision.md"
    write_atomically(path, decision(timed))
    return [path]


EXPERIMENT = Experiment(
    name="tile_sweep",
    figure="tiles and split counts of the attention kernels, tried out on a GPU",
    options=TileSweep(),
    quick=TileSweep(
        part=("splits", "decode"),
        decode=((64, 4096),),
        decode_tile=((64, 4, 5), (64, 4, 7), (128, 4, 5), (128, 4, 7)),
        splits=(1, 4, 16),
        splits_batch=(1, 64),
        splits_context=(8192,),
    ),
    cells=cells,
    run_cell=run_cell,
    plot=plot,
    gpu="required",
    timed=True,
)
