"""Times of our kernels, flash-attn and PyTorch on a GPU.

- ``decode``: one query per sequence, for each batch, context and block size.
- ``prefill``: given as (sequences, new tokens of each, context of each). If the context is longer
  than the new tokens, its first tokens are a cached prefix.
- ``cascade``: decode of sequences that share a prefix. Shared-prefix attention (Hydragen, Juravsky
  et al., 2024; FlashInfer) reads the prefix once. Plain decode reads it once per sequence.
- ``mla``: decode of a latent cache (DeepSeek-V2), with 128 query heads by default.
- ``norm``: residual addition and RMSNorm. ``gate``: SwiGLU.
- ``store``: writes new tokens to random slots. ``copy``: copies blocks of all layers in a cache.
  ``swap_out``, ``swap_in``: copy blocks of all layers to pinned host memory and back.

``tiles.py`` tries tiles and numbers of splits that ``kernels/tiles.py`` does not choose.

A cell first checks its result against fp64 by the rule of ``kernels/testing/accuracy.py``. A wrong
result is not timed. Times are p20, p50 and p80, measured by the device with a cold L2. Work that
can be captured is replayed as a CUDA graph (column ``launch``; ``bench/gpu_timing.py``). Rates are
compared with ceilings measured in the same process. The time of gather_sdpa includes a copy of the
context (``kernels/testing/baselines.py``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from experiments.bench.shapes import COPY_ENGINE, OURS, Shape, Timed, use_device
from experiments.gpu.kernel_latency import figures, tiles
from experiments.harness import Count, Experiment, Needs, Options, Positive, one_of

PARTS = (
    "decode", "prefill", "norm", "gate", "store", "copy", "swap_out", "swap_in", "cascade", "mla",
)  # fmt: skip
PAGED = (OURS, "flash_attn_2", "flash_attn_3")
"""Implementations that read the blocks in place."""
GATHER = "gather_sdpa"
"""Copies the context first, for block sizes that flash-attn 2 rejects."""
IMPLEMENTATIONS = {
    "swap_out": (OURS, COPY_ENGINE),
    "swap_in": (OURS, COPY_ENGINE),
    "norm": (OURS, "torch"),
    "gate": (OURS, "torch"),
    "cascade": (OURS, "paged_decode"),
}
_PAGE = 256

Prefill = Annotated[
    tuple[int, int, int],
    Needs(
        "sequences, new tokens, and at least as many tokens in all",
        lambda sizes: sizes[0] >= 1 and 1 <= sizes[1] <= sizes[2],
    ),
]

Prefix = Annotated[int, Needs("a multiple of 16", lambda tokens: tokens >= 1 and not tokens % 16)]


@dataclass(frozen=True, kw_only=True)
class KernelLatency(Options):
    """The grid: parts x shapes x block sizes x implementations."""

    part: tuple[Annotated[str, one_of(PARTS)], ...] = PARTS
    batch: tuple[Count, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Number of sequences of a decode step."""
    context_len: tuple[Count, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    """Tokens of each sequence of a decode step."""
    block_size: tuple[Count, ...] = (16, 256)
    prefill: tuple[Prefill, ...] = (
        (1, 512, 512), (1, 2048, 2048), (1, 8192, 8192), (1, 32768, 32768),
        (4, 2048, 2048), (16, 1024, 1024), (1, 512, 8192), (1, 2048, 32768),
        (1, 16, 32768), (4, 1024, 8192), (16, 256, 4096), (64, 4, 4096),
    )  # fmt: skip
    """Number of sequences, new tokens of each, and all tokens of each (with the cached prefix)."""
    store_tokens: tuple[Count, ...] = (1, 16, 256, 4096, 16384)
    """Number of tokens of store, norm and gate."""
    move_tokens: tuple[Count, ...] = (256, 1024, 4096)
    """Number of tokens whose blocks copy and swap move, in every layer."""
    num_layers: Count = 28
    """Number of layers whose blocks copy and swap move."""
    prefix_len: tuple[Prefix, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    """Number of tokens that all sequences of a cascade share."""
    suffix_len: Count = 256
    """Number of tokens after the shared prefix in each sequence of a cascade."""
    cascade_batch: tuple[Count, ...] = (1, 4, 16, 64, 256)
    tile_m: tuple[Count, ...] = ()
    """Rows per tile of attention, tried in addition to the table's choice."""
    tile_n: tuple[Count, ...] = ()
    """Keys per tile of attention."""
    num_warps: tuple[Count, ...] = ()
    num_stages: tuple[Count, ...] = ()
    """Pipeline stages."""
    has_producer: tuple[bool, ...] = ()
    """Use the sm_90 kernel of ``paged_prefill_hopper`` for prefill."""
    num_splits: tuple[Count, ...] = ()
    """Number of splits of a sequence in decode and prefill."""
    num_q_heads: Count = 32
    mla_q_heads: Count = 128
    """Query heads of mla."""
    num_kv_heads: Count = 8
    head_dim: Count = 128
    dtype: Literal["float16", "bfloat16", "float32"] = "bfloat16"
    kv_dtype: Literal["float8_e4m3fn"] | None = None
    """Dtype of the cache.  None: the dtype of the queries."""
    budget_ms: Positive = 60.0
    """Device time for the samples of a cell, in milliseconds."""

    def shape(self, op: str, **sizes: Any) -> Shape:
        """The shape of ``op`` with these sizes."""
        names = ("num_q_heads", "num_kv_heads", "head_dim", "dtype", "kv_dtype", "seed")
        return Shape(op=op, **({name: getattr(self, name) for name in names} | sizes))


@dataclass(frozen=True, kw_only=True)
class LatencyCell(Timed):
    """A cell: one implementation at one shape, in one part of the experiment."""

    part: str
    tile: tuple[int, ...] = (0, 0, 0, 0, 0)
    """Values of ``tiles.TILE``.  0 means the table's choice."""


def cells(options: KernelLatency) -> Iterator[LatencyCell]:
    for part in options.part:
        for shape in _shapes(options, part):
            cell = functools.partial(
                LatencyCell, part=part, budget_ms=options.budget_ms, seed=options.seed
            )
            for name in implementations(shape):
                yield cell(shape=shape, implementation=name)
            if part in tiles.TABLES:
                for other, tile in tiles.tried(options, shape):
                    yield cell(shape=other, implementation=OURS, tile=tile)


def implementations(shape: Shape) -> tuple[str, ...]:
    """The implementations that may run a shape."""
    if shape.op in IMPLEMENTATIONS:
        return IMPLEMENTATIONS[shape.op]
    if shape.op not in ("decode", "prefill") or shape.kv_dtype is not None:
        return (OURS,)
    return (*PAGED, GATHER) if shape.block_size % _PAGE else PAGED


def _shapes(options: KernelLatency, part: str) -> Iterator[Shape]:
    if part == "cascade":
        for prefix_len, batch in itertools.product(options.prefix_len, options.cascade_batch):
            sizes = {"batch": batch, "prefix_len": prefix_len, "block_size": 16}
            yield options.shape(part, **sizes, context_len=prefix_len + options.suffix_len)
    else:
        has_blocks = part not in ("norm", "gate")
        for block_size in options.block_size if has_blocks else options.block_size[:1]:
            for size in _sizes(options, part, block_size):
                yield options.shape(part, block_size=block_size, **size)


def _sizes(options: KernelLatency, part: str, block_size: int) -> list[dict[str, int]]:
    if part in ("decode", "mla"):
        heads = {} if part == "decode" else {"num_q_heads": options.mla_q_heads, "num_kv_heads": 1}
        decode = itertools.product(options.context_len, options.batch)
        return [heads | {"batch": batch, "context_len": length} for length, batch in decode]
    if part == "prefill":
        names = ("batch", "query_len", "context_len")
        return [dict(zip(names, sizes, strict=True)) for sizes in options.prefill]
    if part in figures.TOKENS:
        return [{"batch": tokens} for tokens in options.store_tokens]
    return [
        {"batch": -(-tokens // block_size), "num_layers": options.num_layers}
        for tokens in options.move_tokens
    ]


def run_cell(cell: LatencyCell) -> list[dict[str, Any]]:
    use_device()
    from experiments.bench import timed_ops

    if cell.implementation == OURS and cell.part in tiles.TABLES:
        columns = tiles.run(cell)
    else:
        columns = {"by_table": True, **dict.fromkeys(tiles.TILE)} | timed_ops.run(cell)
    return [{"part": cell.part, **columns}]


EXPERIMENT = Experiment(
    name="kernel_latency",
    figure="kernels on a GPU vs flash-attn and PyTorch, tiles",
    options=KernelLatency(),
    quick=KernelLatency(
        batch=(1, 16, 64, 256),
        context_len=(512, 4096),
        budget_ms=30.0,
        prefill=((1, 2048, 2048), (4, 1024, 8192)),
        store_tokens=(16, 4096),
        move_tokens=(1024, 4096),
        prefix_len=(1024, 32768),
        cascade_batch=(1, 16, 256),
    ),
    cells=cells,
    run_cell=run_cell,
    plot=figures.plot,
    gpu="required",
    timed=True,
)
