"""The table of tile shapes, warps, pipeline stages and split counts.

Choices depend only on shapes, dtypes and the architecture, never on the batch or on device values.
So a sequence is always computed with the same tiles, and results are batch-invariant.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kernels.primitives import INTERPRETED


@dataclass(frozen=True)
class Target:
    """The properties of a device that choices depend on."""

    backend: str
    """"cuda" or "interpreter"."""
    arch: int
    """Compute capability as an integer (90 for sm_90)."""
    num_multiprocessors: int
    tiles: tuple[tuple[str, AttentionTile], ...] = ()
    """(name of a function of this file, tile) pairs: the tile replaces the function's choice. For
    sweeps over tiles; see `force_target`."""

    def forced_tile(self, function: str) -> AttentionTile | None:
        """The tile that overrides the choice of `function`, or None."""
        return dict(self.tiles).get(function)


PROGRAMS_PER_MULTIPROCESSOR = 2
"""Decode programs that are resident on a multiprocessor; tests check the compiled kernels."""
MAX_SPLITS = 128
PROGRAMS_OF_FEW_QUERIES = 128
"""Maximum number of prefill programs for a sequence with few queries; a multiprocessor fits one."""


@functools.lru_cache(maxsize=64)
def _cuda_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        raise RuntimeError(f"the kernels have no tiles for AMD GPUs, got {properties.gcnArchName}")
    return Target(
        "cuda", properties.major * 10 + properties.minor, properties.multi_processor_count
    )


INTERPRETER = Target("interpreter", 0, 1)
_forced_target: Target | None = None


@contextlib.contextmanager
def force_target(target: Target) -> Iterator[None]:
    """Choose tiles for `target`, whatever device the tensors are on.

    Used to compile without the GPU and, with `Target.tiles`, to run with other tiles.
    """
    global _forced_target
    previous, _forced_target = _forced_target, target
    try:
        yield
    finally:
        _forced_target = previous


def forced_target() -> Target | None:
    """The target of the enclosing `force_target`, or None."""
    return _forced_target


def target_of(device: torch.device) -> Target:
    """The target that kernels on tensors of `device` are built for."""
    if _forced_target is not None:
        return _forced_target
    if INTERPRETED.value:
        return INTERPRETER
    return _cuda_target(device.index)


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that begins with `await_launches_before`.

    The options enable programmatic dependent launch (sm_90 and later): the launch's programs are
    set up while the previous launch ends, not after its end.
    """
    target = target_of(device)
    has_pdl = isinstance(target.arch, int) and target.arch >= 90
    return {"PDL": True, "launch_pdl": True} if has_pdl else {"PDL": False}


# Triton's functions with these names also work in kernels, but take microseconds per call.
def cdiv(dividend: int, divisor: int) -> int:
    """Return dividend / divisor, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, which is positive."""
    return 1 << (number - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """head_dim rounded up to a tile size: a power of two, at least 16."""
    return max(16, next_power_of_2(head_dim))


@dataclass(frozen=True)
class RowTile:
    """Tile of a memory-bound kernel: whole rows."""

    rows: int
    num_warps: int


@functools.cache
def store_tile(head_dim_padded: int) -> RowTile:
    """Rows per program of store_kvcache and merge_attention_states. A tile has 4096 elements: per
    thread, four 16-byte loads (fp16) of each of the two operands."""
    return RowTile(rows=max(1, 4096 // head_dim_padded), num_warps=4)


@functools.cache
def rotary_tile(head_dim_padded: int) -> RowTile:
    """Rows per program of the rotary kernels: half a store tile, because operands are fp32."""
    return RowTile(rows=max(1, 2048 // head_dim_padded), num_warps=4)


MAX_NORM_SIZE = 32768
"""Maximum row size of add_rms_norm. Such a row takes 64 fp32 numbers per thread."""


@functools.cache
def norm_tile(hidden_size_padded: int) -> RowTile:
    """Rows per program of add_rms_norm: several short rows or one long row.

    A thread does two 16-byte loads (fp16) of each operand; more if a row needs over 16 warps.
    """
    rows = max(1, 1024 // hidden_size_padded)
    return RowTile(rows, num_warps=min(16, rows * hidden_size_padded // 512))


@dataclass(frozen=True)
class AttentionTile:
    """Tile of an attention kernel: tile_m query rows x tile_n keys."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    precision: str
    """`input_precision` of `tl.dot`. It matters for fp32 operands only."""
    scores_ahead: bool = False
    """Prefill only: issue the product Q K of the next tile before the product P V of this tile, so
    that the product P V runs during the next softmax."""
    has_producer: bool = False
    """Prefill on sm_90 only: use the kernel of paged_prefill_hopper for the calls that it supports.
    That kernel has its own tile."""


@functools.cache
def decode_tile(
    group_size: int,
    head_dim_padded: int,
    dtype: torch.dtype,
    target: Target,
    kv_itemsize: int | None = None,
) -> AttentionTile:
    """Tile of the decode kernel. kv_itemsize: bytes per cache element, by default as in `dtype`.

    Decode is memory-bound, so a tile is sized by the bytes of K and V that it loads. Loads have two
    levels (block ids, then rows), so Triton's pipeliner keeps (num_stages - 1) / 2 = 2 tiles in
    shared memory. A tile has 32 KiB on sm_80, sm_90 and sm_100, and 16 KiB on GPUs with about 100
    KiB of shared memory. Then two programs fit a multiprocessor. Larger groups need several tiles
    of rows, because 64 rows at once would spill registers. A tile of an fp8 cache has twice the
    keys. But their conversion needs registers, so a tile of 32 rows has at most 64 keys.
    """
    if forced := target.forced_tile("decode_tile"):
        return forced
    tile_m = min(16 if head_dim_padded > 128 else 32, max(16, next_power_of_2(group_size)))
    num_warps = 4
    if target.backend == "interpreter":
        return AttentionTile(tile_m, tile_n=32, num_warps=num_warps, num_stages=1, precision="ieee")
    tile_bytes = 32 * 1024 if target.arch in (80, 90, 100, 103) else 16 * 1024
    if dtype == torch.float32:  # tf32x3 holds every operand three times
        tile_m, tile_bytes = 16, tile_bytes // 2
        num_warps = 8 if head_dim_padded > 128 else 4
        kv_itemsize = dtype.itemsize
    kv_itemsize = kv_itemsize or dtype.itemsize
    tile_n = tile_bytes // (2 * head_dim_padded * kv_itemsize)
    tile_n = min(256 // dtype.itemsize, max(16, tile_n))
    if kv_itemsize < dtype.itemsize:
        tile_n = min(tile_n, 2048 // tile_m)
    return AttentionTile(tile_m, tile_n, num_warps, num_stages=5, precision="tf32x3")


@functools.cache
def mla_decode_tile(num_heads: int, dtype: torch.dtype, target: Target) -> AttentionTile:
    """Tile of the MLA decode kernel for rows of up to 512 + 64 elements.

    All heads read the same rows, so tile_m is as large as registers allow beside an accumulator of
    512 columns. On sm_100 it is 32, for mma.sync: with 64 rows (tcgen05) Triton 3.7.1 leaves out a
    fence. fp32 is for tests: its tile spills registers.
    """
    if target.backend == "interpreter":
        return AttentionTile(tile_m=16, tile_n=32, num_warps=4, num_stages=1, precision="ieee")
    has_228_kib = target.arch in (90, 100, 103)  # of shared memory
    if dtype == torch.float32:
        tile_m, tile_n, num_warps, num_stages = 16, 16, 4, 1
    elif num_heads <= 16:
        tile_m, tile_n, num_warps, num_stages = 16, 32, 4, 5 if has_228_kib else 3
    elif num_heads > 32 and target.arch in (80, 90):
        tile_m, num_warps = 64, 8
        tile_n, num_stages = (64, 3) if has_228_kib else (32, 5)
    elif has_228_kib:
        tile_m, tile_n, num_warps, num_stages = 32, 64, 8, 5
    else:
        tile_m, tile_n, num_warps, num_stages = 32, 32, 4, 3
    return AttentionTile(tile_m, tile_n, num_warps, num_stages, "tf32x3")


def decode_options(tile: AttentionTile, target: Target) -> dict[str, int]:
    """Compiler options of the decode kernel.

    Without maxnreg, ptxas aims at 168 registers, for three programs per multiprocessor. A tile then
    takes 1.5 times as long: address after address waits for the same registers.
    """
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if target.backend == "cuda":
        threads = 32 * tile.num_warps * PROGRAMS_PER_MULTIPROCESSOR
        options["maxnreg"] = min(255, 65536 // threads)
    return options


@dataclass(frozen=True)
class Chunking:
    """How the keys that a query sees are divided: into at most `max_chunks` equal chunks, each of
    at least `min_tiles` tiles. In prefill, max_chunks is for sequences of up to `queries` queries.

    The division depends only on the number of these keys. So a sequence's result is bitwise the
    same whatever else is in the batch and however wide the tables are. `split_states.chunks_of`
    computes it on the device.
    """

    min_tiles: int
    max_chunks: int
    queries: int = 2**30
    """Prefill: a sequence has at most max_chunks // ceil(num_queries / queries) chunks."""

    def max_count(self, max_tokens: int, tile_n: int) -> int:
        """Maximum number of chunks for up to max_tokens keys; at least 1."""
        return max(1, min(self.max_chunks, cdiv(max_tokens, self.min_tiles * tile_n)))


@functools.cache
def chunking(num_kv_heads: int, num_splits: int | None = None) -> Chunking:
    """Decode: at most `num_splits` chunks. If None, chunks have at least sixteen tiles, and a long
    sequence has enough chunks x KV heads for the 264 programs that an H200 runs at once. Between
    two chunks a program waits twice for memory, and the fp32 states of each chunk are written and
    read. Smaller chunks increase both costs. Larger chunks give a lone short sequence few programs.
    """
    if num_splits is not None:
        return Chunking(1, num_splits)
    return Chunking(16, max(16, 256 // num_kv_heads))


@functools.cache
def prefill_chunking(
    num_q_heads: int, num_kv_heads: int, num_splits: int | None, target: Target
) -> Chunking:
    """Prefill: at most `num_splits` chunks. If None, chunks have at least sixteen tiles, and a long
    sequence has enough chunks x tiles of rows x KV heads for the programs that the GPU runs at
    once.

    A second wave of programs would take as long as the first. So there are 128 programs on sm_90
    and sm_100 (132 and 148 multiprocessors), and 104 programs on sm_80 (108 multiprocessors).
    """
    if num_splits is not None:
        return Chunking(1, num_splits)
    programs = 104 if target.arch == 80 else PROGRAMS_OF_FEW_QUERIES
    queries = max(1, 128 * num_kv_heads // num_q_heads)  # that fill 128 rows
    return Chunking(16, max(1, programs // num_kv_heads), queries)


@functools.cache
def few_queries(num_q_heads: int, num_kv_heads: int) -> int:
    """Maximum number of queries per sequence for which prefill uses split-KV. Up to this number,
    tiles of rows x KV heads fill at most half of the programs that a GPU runs at once."""
    tiles = PROGRAMS_OF_FEW_QUERIES // (2 * num_kv_heads)
    return tiles * prefill_chunking(num_q_heads, num_kv_heads, None, INTERPRETER).queries


@functools.cache
def prefill_tile(
    head_dim_padded: int, dtype: torch.dtype, target: Target, kv_itemsize: int | None = None
) -> AttentionTile:
    """Tile of the prefill kernel, independent of the batch, so that results are batch-invariant.
    kv_itemsize: bytes per cache element, by default as in `dtype`.

    Prefill is bound by the tensor cores, so a half-precision tile is as large as possible without
    register spills in any combination of features. An accumulator of 128 rows leaves room for 64
    keys if products read their operands from shared memory (wgmma on sm_90, tcgen05 on sm_100), and
    for 32 keys if operands are in registers (mma.sync). num_stages is the largest that fits shared
    memory, see `decode_tile`. fp8 keys and values are converted in registers. On sm_100 an
    accumulator of 128 x 256 leaves too few registers for this conversion.

    `scores_ahead` runs asynchronous products (wgmma) during the softmax, like the overlap within a
    warp group in FlashAttention 3 (Shah et al., 2024). It keeps the scores of two tiles in
    registers. At head_dim 256 there are too few registers; at 64 only one program would fit a
    multiprocessor instead of two. Triton waits for products of converted keys and values anyway. On
    sm_100 the next product overwrites the scores in tensor memory, and Triton 3.7.1 has no barrier
    between the warps' loads of the scores and this product.
    """
    if forced := target.forced_tile("prefill_tile"):
        return forced
    if target.backend == "interpreter":
        return AttentionTile(32, 32, 4, 1, "ieee", scores_ahead=head_dim_padded < 128)  # for tests
    if dtype.itemsize == 4 and head_dim_padded <= 128:
        return AttentionTile(tile_m=32, tile_n=32, num_warps=8, num_stages=3, precision="tf32x3")
    if dtype.itemsize == 4:
        return AttentionTile(tile_m=16, tile_n=16, num_warps=4, num_stages=2, precision="tf32x3")
    scores_ahead = False
    if target.arch in (90, 100, 103):
        tile_m, tile_n, num_stages = 128, 64 if head_dim_padded <= 128 else 32, 5
        scores_ahead = target.arch == 90 and head_dim_padded == 128 and kv_itemsize != 1
        if target.arch != 90 and head_dim_padded > 128 and kv_itemsize == 1:
            tile_m = 64
    elif head_dim_padded <= 128:
        tile_m, tile_n, num_stages = 128, 64 if head_dim_padded <= 64 else 32, 5
    else:
        tile_m, tile_n, num_stages = 64, 32, 3
    return AttentionTile(tile_m, tile_n, 8, num_stages, "tf32x3", scores_ahead)


def prefix_num_splits(num_programs: int, max_tokens: int, tile_n: int, target: Target) -> int:
    """Number of prefix splits in cascade: the smallest with at least 85 % of the best wave
    efficiency (flash-attn's rule). A split has at least two tiles.

    num_programs: programs per split. One program fits a multiprocessor. Each split writes one state
    per member of the group, so fixed chunks of the prefix would cost more than they gain.
    """
    limit = max(1, min(MAX_SPLITS, max_tokens // (2 * tile_n)))

    def efficiency(num_splits: int) -> float:
        waves = num_programs * num_splits / target.num_multiprocessors
        return waves / math.ceil(waves)

    best = max(map(efficiency, range(1, limit + 1)))
    return next(n for n in range(1, limit + 1) if efficiency(n) >= 0.85 * best)


@functools.cache
def split_prefill_tile(
    head_dim_padded: int, dtype: torch.dtype, target: Target, kv_itemsize: int | None = None
) -> AttentionTile:
    """Tile of the prefill kernel when it writes split states (split-KV, or the prefix in cascade).

    Writing the fp32 output needs twice the registers, too many for 128 x 256 elements.
    """
    if forced := target.forced_tile("split_prefill_tile"):
        return forced
    tile = prefill_tile(head_dim_padded, dtype, target, kv_itemsize)
    return replace(tile, tile_m=min(tile.tile_m, 64)) if head_dim_padded > 128 else tile


@functools.cache
def merge_tile(head_dim_padded: int) -> RowTile:
    """Partial states that a program of the merge reads at a time: about 2048 fp32 numbers.

    One warp keeps sums over the states in registers. If a quarter of the last tile is enough, only
    a quarter is read: 2 states take 198 warp instructions instead of 420.
    """
    return RowTile(rows=max(4, 2048 // head_dim_padded), num_warps=1)


@dataclass(frozen=True)
class FlatTile:
    """Tile of a kernel that processes elements one by one."""

    elements: int
    num_warps: int


@functools.cache
def activation_tile(size: int) -> FlatTile:
    """Elements of a row per program of gated_activation. A thread does two 16-byte loads (fp16) of
    gate and two of up."""
    return FlatTile(min(2048, next_power_of_2(size)), num_warps=4)


@functools.cache
def copy_tile(num_elements: int, itemsize: int) -> FlatTile:
    """Elements of a block per program of copy_blocks. A thread does four 16-byte loads."""
    return FlatTile(min(8192 // itemsize, next_power_of_2(num_elements)), num_warps=4)


@functools.cache
def swap_tile(num_elements: int, itemsize: int) -> FlatTile:
    """Elements of a block that a program of swap_blocks copies at a time."""
    return FlatTile(min(16384 // itemsize, next_power_of_2(num_elements)), num_warps=8)


def swap_num_programs(num_tiles: int, target: Target) -> int:
    """Programs of swap_blocks: an eighth of the multiprocessors, at least sixteen.

    The link to the host needs bandwidth * latency bytes in flight, about 64 GB/s * 2 us = 128 KB on
    PCIe 5. Sixteen programs have twice as many bytes in flight.
    """
    return max(1, min(num_tiles, max(16, target.num_multiprocessors // 8)))


COPY_ENGINE_BYTES = 2**18
"""Minimum mean size, in bytes, of the parts that swap_blocks leaves to the copy engine. At 50 GB/s
the link moves such a part in the 5 us that the host is assumed to need per copy."""
INDEX_TILE = FlatTile(elements=256, num_warps=4)
"""Tokens per program of slot_mapping_from_positions."""
RESTRICT_TILE = FlatTile(elements=2048, num_warps=8)
"""Logits that a program of sample_tokens with top_ks or top_ps reads at a time."""
PROGRAMS_THAT_SAMPLE = 8
"""Programs of sample_tokens resident on a multiprocessor without top_ks and top_ps; with them at
least three. Tests check the compiled kernels."""


def sample_num_splits(num_rows: int, num_chunks: int, target: Target) -> int:
    """Number of programs of sample_tokens per row of num_chunks chunks: enough to fill the GPU once
    without top_ks and top_ps."""
    slots = target.num_multiprocessors * PROGRAMS_THAT_SAMPLE
    return max(1, min(MAX_SPLITS, num_chunks, slots // num_rows))
