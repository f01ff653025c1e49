"""How well decode's work fills a GPU on batches as they come: three ways to divide it, modelled.

No time is measured: columns that begin with ``modelled_`` come from a model of programs on
multiprocessors that share the bandwidth of the memory.  Each place of a GPU (two programs of a
multiprocessor) takes programs in the order of the grid.  A program waits ``latency_ns`` for its
sequence's length, and for each piece of its work twice as long, for block ids and then for the
first keys; then its bytes come, at an equal share of the bandwidth with the others that wait for
bytes, and no faster than what it has in flight allows in one latency.  Merging is a second launch:
a start, the length of its longest chain and the bytes of the states, written and read.  Caches,
instructions, clocks and what a hardware scheduler does besides are left out.

The ways, all on the same tiles:

    one program    of a sequence and KV head takes all of its tokens
    by shapes      as many equal splits as fill the GPU by batch, heads and width of the tables, by
                   flash-attn 2's rule (Dao et al., 2023), each a program
    chunks         ``paged_decode_attention``: equal chunks that follow from a sequence's own
                   length, taken in turn by as many programs as the GPU runs at once
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

from experiments import style
from experiments.bench.gpus import GPUS, Gpu
from experiments.harness import Axis, Count, Experiment, Options, Positive, grid, one_of

_NAMES = {gpu.name: gpu for gpu in GPUS if gpu.arch.startswith("sm_")}
_MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}


def _zipf(num_seqs: int, longest: int, seed: int) -> list[int]:
    """Lengths that fall with the rank as 1 / rank, in random order."""
    lengths = np.maximum(16, longest // np.arange(1, num_seqs + 1))
    return np.random.default_rng(seed).permutation(lengths).tolist()


BATCHES: dict[str, tuple[list[int], int]] = {
    "1 x 4k": ([4096], 4096),
    "1 x 32k": ([32_768], 32_768),
    "8 x 8k": ([8192] * 8, 8192),
    "64 x 4k": ([4096] * 64, 4096),
    "63 x 512 and 32k": ([512] * 31 + [32_768] + [512] * 32, 32_768),
    "64, Zipf to 32k": (_zipf(64, 32_768, 0), 32_768),
    "256, Zipf to 32k": (_zipf(256, 32_768, 0), 32_768),
    "6 x 512 in graph of 8, 32k": ([512] * 6 + [0] * 2, 32_768),
    "40 x 512 in graph of 64, 32k": ([512] * 40 + [0] * 24, 32_768),
    "256 x 1k": ([1024] * 256, 1024),
    "1024 x 512": ([512] * 1024, 512),
}
"""By name: the context lengths of a batch, and the tokens that the width of its tables allows."""


@dataclass(frozen=True, kw_only=True)
class DecodeBalance(Options):
    """The grid: batches x GPUs x ways; bf16."""

    batch: Axis[Annotated[str, one_of(BATCHES)]] = tuple(BATCHES)
    gpu: Axis[Annotated[str, one_of(_NAMES)]] = tuple(_NAMES)
    num_q_heads: Count = 32
    num_kv_heads: Count = 8
    head_dim: Count = 128
    latency_ns: Positive = 800.0
    """Of an access to memory under load; an assumption."""
    launch_us: Positive = 2.0
    """From the end of a launch to the work of the next, in a CUDA graph; an assumption."""


class Piece(NamedTuple):
    """What a program does without a pause: wait, then have bytes come."""

    wait: float
    num_bytes: float


def run_cell(cell: DecodeBalance) -> list[dict[str, Any]]:
    import torch

    from kernels.tiles import Target, chunking, decode_tile, padded_dim

    gpu = _NAMES[cell.gpu]
    target = Target("cuda", int(gpu.arch[3:]), _MULTIPROCESSORS[gpu.arch])
    group_size = cell.num_q_heads // cell.num_kv_heads
    tile = decode_tile(group_size, padded_dim(cell.head_dim), torch.bfloat16, target)
    lengths, capacity = BATCHES[cell.batch]
    chunks = chunking(cell.num_kv_heads)
    model = _Model(cell, gpu, target.num_multiprocessors, tile.tile_n, (tile.num_stages - 1) // 2)
    by_shapes = splits_by_shapes(
        len(lengths) * cell.num_kv_heads, math.ceil(capacity / 128), model.places
    )
    rules = {
        "one program": (1, 1, 1, False),
        "by shapes": (1, by_shapes, by_shapes, False),
        "chunks": (chunks.min_tiles, chunks.max_chunks, chunks.most(capacity, tile.tile_n), True),
    }
    floor = 1e6 * sum(lengths) * model.token_bytes * cell.num_kv_heads / gpu.bandwidth
    rows = []
    for way, (min_tiles, max_chunks, room, is_persistent) in rules.items():
        seconds, states = model.decode(lengths, min_tiles, max_chunks, room, is_persistent)
        rows.append(
            {
                "batch": cell.batch,
                "gpu": cell.gpu,
                "way": way,
                **cell.columns("num_q_heads", "num_kv_heads", "head_dim", "latency_ns"),
                "num_seqs": len(lengths),
                "tokens": sum(lengths),
                "states_per_head": states,
                "modelled_bound_us": floor,
                "modelled_us": 1e6 * seconds,
            }
        )
    return rows


def splits_by_shapes(programs: int, num_tiles: int, places: int) -> int:
    """flash-attn 2's number of splits: the fewest within 85 % of the best wave efficiency.

    programs: of one split. num_tiles: of 128 keys, that the longest sequence may have.
    """
    if programs >= 0.8 * places:
        return 1
    most = min(128, places, num_tiles)
    # Those that do not shorten the longest split are passed over.
    numbers = [
        n for n in range(1, most + 1) if n == 1 or -(-num_tiles // n) < -(-num_tiles // (n - 1))
    ]

    def efficiency(number: int) -> float:
        waves = programs * number / places
        return waves / math.ceil(waves)

    best = max(map(efficiency, numbers))
    return next(n for n in numbers if efficiency(n) >= 0.85 * best)


@dataclass(frozen=True)
class _Model:
    cell: DecodeBalance
    gpu: Gpu
    num_multiprocessors: int
    tile_n: int
    tiles_in_flight: int

    @property
    def places(self) -> int:
        """Programs that the GPU runs at once."""
        return 2 * self.num_multiprocessors

    @property
    def token_bytes(self) -> int:
        """Of a token's key and value of one head."""
        return 2 * 2 * self.cell.head_dim

    def decode(
        self, lengths: list[int], min_tiles: int, max_chunks: int, room: int, is_persistent: bool
    ) -> tuple[float, int]:
        """Seconds, and the split states that are written per query head, 0 without merging.

        room: states per query head that there is room for.
        """
        latency = 1e-9 * self.cell.latency_ns
        pieces = []
        for length in lengths:
            tiles = max(1, math.ceil(length / self.tile_n))
            per_chunk = max(min_tiles, math.ceil(tiles / max_chunks)) * self.tile_n
            parts = max(1, math.ceil(length / per_chunk))
            for begin in range(0, parts * per_chunk, per_chunk):
                tokens = max(0, min(per_chunk, length - begin))
                wait = 2 * latency if tokens else 0.0
                pieces += [Piece(wait, tokens * self.token_bytes)] * self.cell.num_kv_heads
            if not is_persistent:  # a program for each split that there is room for
                pieces += [Piece(0.0, 0.0)] * ((room - parts) * self.cell.num_kv_heads)
        num_programs = min(self.places, len(pieces)) if is_persistent else len(pieces)
        start = Piece(latency, 0.0)
        programs = [[start, *pieces[i::num_programs]] for i in range(num_programs)]
        most = self.tiles_in_flight * self.tile_n * self.token_bytes / latency
        seconds = finish(programs, self.places, self.gpu.bandwidth, most)
        if room == 1:
            return seconds, 0
        states = sum(piece.num_bytes > 0 for piece in pieces) // self.cell.num_kv_heads
        moved = 2 * states * self.cell.num_q_heads * (self.cell.head_dim + 1) * 4
        merge = 1e-6 * self.cell.launch_us + 2 * latency + moved / self.gpu.bandwidth
        return seconds + merge, states


def finish(programs: Iterable[list[Piece]], places: int, bandwidth: float, most: float) -> float:
    """Seconds until all programs are done, of which so many run at once.

    Those that have bytes come share the bandwidth equally; none gets more than ``most`` bytes/s.
    """
    queue = iter(programs)
    waiting: list[tuple[float, int, float, list[Piece]]] = []
    coming: list[tuple[float, int, list[Piece]]] = []
    now = each = 0.0  # seconds, and the bytes that a program has got that began at the start
    number = 0

    def go_on(pieces: list[Piece]) -> None:
        nonlocal number
        pieces = pieces or next(queue, None)
        if pieces:
            number += 1
            heapq.heappush(waiting, (now + pieces[0].wait, number, pieces[0].num_bytes, pieces[1:]))

    for _ in range(places):
        go_on([])
    while waiting or coming:
        rate = min(most, bandwidth / len(coming)) if coming else 1.0
        done = now + (coming[0][0] - each) / rate if coming else math.inf
        if waiting and waiting[0][0] <= done:
            time, ident, num_bytes, rest = heapq.heappop(waiting)
            each += (time - now) * rate if coming else 0.0
            now = time
            if num_bytes:
                heapq.heappush(coming, (each + num_bytes, ident, rest))
            else:
                go_on(rest)
        else:
            each, _, rest = heapq.heappop(coming)
            now = done
            go_on(rest)
    return now


_LOOKS = {
    "one program": style.bar(style.SKY) | {"label": "one program a sequence and head"},
    "by shapes": style.bar(style.ORANGE, "////")
    | {"label": "splits by shapes (flash-attn 2's rule)"},
    "chunks": style.bar(style.BLUE) | {"label": "chunks of each sequence (ours)"},
}


def _draw(rows: style.DataFrame) -> style.Figure:
    """A panel per GPU: time over the bound of the memory, batch by batch."""
    gpus, batches = rows["gpu"].unique(), rows["batch"].unique()
    times = (rows["modelled_us"] / rows["modelled_bound_us"]).rename("times")
    times = times.to_frame().join(rows).pivot(index=["gpu", "batch"], columns="way")["times"]
    height = 0.7 + 0.3 * len(batches)
    figure, axes, spare = style.panel_grid(len(gpus), height=height, width=3.3, columns=2)
    for number, (axis, gpu) in enumerate(zip(axes, gpus, strict=True)):
        of_gpu = times.loc[gpu].reindex(batches)
        style.bars(axis, of_gpu - 1, _LOOKS, horizontal=True, left=1)
        axis.set(xlim=(1, None), title=gpu)
        style.log_x(axis, (1, 2, 4, 8))
        style.name_rows(axis, batches, shown=number % 2 == 0)
    xlabel = "modelled time over the bound of the memory's bandwidth, not measured"
    return style.shared_legend(figure, spare, columns=3, xlabel=xlabel)


EXPERIMENT = Experiment(
    name="decode_balance",
    figure="decode on skewed batches: one program, splits by shapes, chunks (modelled)",
    options=DecodeBalance(),
    quick=DecodeBalance(gpu=("H100 SXM",)),
    cells=grid,
    run_cell=run_cell,
    plot=style.plotter({"decode_balance": _draw}),
)
