"""The one table of tile shapes, warps, pipeline stages and split counts.

Choices depend on shapes, dtypes and the architecture only, never on the batch or on device values:
the same sequence is always computed with the same tiles, which batch invariance rests on.
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
    """What the table needs to know of a device."""

    backend: str
    """"cuda", "hip" or "interpreter"."""
    arch: int | str
    """Compute capability as an integer (90 for sm_90), or gfx name on hip."""
    num_multiprocessors: int
    tiles: tuple[tuple[str, AttentionTile], ...] = ()
    """(function of the table, tile): what it answers in place of its own choice. For sweeps over
    tiles, see `force_target`."""

    def forced_tile(self, function: str) -> AttentionTile | None:
        """The tile that `function` is made to answer, if any."""
        return dict(self.tiles).get(function)


PROGRAMS_PER_MULTIPROCESSOR = 2
"""Decode programs that fit one multiprocessor; tests hold the compiled kernels to it."""
MAX_SPLITS = 128
FEW_QUERIES = 32
"""Queries of a sequence up to which prefill divides keys: a tile of rows, or a few."""


@functools.lru_cache(maxsize=64)
def _cuda_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        return Target("hip", arch, properties.multi_processor_count)
    return Target(
        "cuda", properties.major * 10 + properties.minor, properties.multi_processor_count
    )


INTERPRETER = Target("interpreter", 0, 1)
_forced_target: Target | None = None


@contextlib.contextmanager
def force_target(target: Target) -> Iterator[None]:
    """Choose tiles for `target` whatever device the tensors are on.

    To compile without the GPU, and, with `Target.tiles`, to run with other tiles than the table's.
    """
    global _forced_target
    previous, _forced_target = _forced_target, target
    try:
        yield
    finally:
        _forced_target = previous


def target_of(device: torch.device) -> Target:
    """The target that kernels on tensors of `device` are built for."""
    if _forced_target is not None:
        return _forced_target
    if INTERPRETED.value:
        return INTERPRETER
    return _cuda_target(device.index)


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that begins with `await_launches_before`.

    Programmatic dependent launch, of sm_90 and later: programs are set up while the launch before
    ends, instead of after it.
    """
    target = target_of(device)
    has_pdl = target.backend == "cuda" and target.arch >= 90
    return {"PDL": True, "launch_pdl": True} if has_pdl else {"PDL": False}


# Triton's functions of these names serve kernels too, for which they spend microseconds a call.
def cdiv(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is at least `number`, a positive one."""
    return 1 << (number - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """head_dim rounded up to a size that a tile can have: a power of two, at least 16."""
    return max(16, next_power_of_2(head_dim))


@dataclass(frozen=True)
class RowTile:
    """Tile of a memory-bound kernel that moves rows of head_dim elements."""

    rows: int
    num_warps: int


@functools.cache
def store_tile(head_dim_padded: int) -> RowTile:
    """About 4096 elements per program: four 16-byte loads (fp16) of K and of V per thread."""
    return RowTile(rows=max(1, 4096 // head_dim_padded), num_warps=4)


@functools.cache
def rotary_tile(head_dim_padded: int) -> RowTile:
    """Rows that a program of the rotary kernels turns: half a store tile, as they are fp32."""
    return RowTile(rows=max(1, 2048 // head_dim_padded), num_warps=4)


MAX_NORM_SIZE = 32768
"""Longest row of add_rms_norm, 64 fp32 numbers a thread."""


@functools.cache
def norm_tile(hidden_size_padded: int) -> RowTile:
    """Rows that a program of add_rms_norm takes, whole ones, short ones together.

    Two 16-byte loads (fp16) of each operand per thread, while 16 warps suffice.
    """
    rows = max(1, 1024 // hidden_size_padded)
    return RowTile(rows, num_warps=min(16, rows * hidden_size_padded // 512))


@dataclass(frozen=True)
class AttentionTile:
    """Tile of an attention kernel: tile_m query rows by tile_n keys."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    precision: str
    """`input_precision` of `tl.dot`, which matters for fp32 operands only."""
    scores_ahead: bool = False
    """Prefill only: queries meet the keys of the next tile before weights meet the values of this
    one, whose product is then under way during the next softmax."""


@functools.cache
def decode_tile(
    group_size: int,
    head_dim_padded: int,
    dtype: torch.dtype,
    target: Target,
    kv_itemsize: int | None = None,
) -> AttentionTile:
    """Tile of the decode kernel. kv_itemsize: bytes of an element of the cache, dtype's if None.

    Decode is bound by memory, so a tile is sized by the bytes of K and V it fetches. Triton's
    pipeliner keeps (num_stages - 1) / 2 of them in shared memory, because the loads have two levels
    (block ids, then rows): three of 32 KiB on sm_90 and sm_100, two on sm_80, two of 16 KiB on GPUs
    with about 100 KiB of shared memory leave room for two programs per multiprocessor. Larger
    groups take several tiles of rows: 64 rows at once would spill registers. A tile of an fp8 cache
    holds twice the keys, whose conversion takes registers: with 32 rows they are 64 at most.
    """
    if forced := target.forced_tile("decode_tile"):
        return forced
    tile_m = min(16 if head_dim_padded > 128 else 32, max(16, next_power_of_2(group_size)))
    num_warps = 4
    if target.backend == "interpreter":
        return AttentionTile(tile_m, tile_n=32, num_warps=num_warps, num_stages=1, precision="ieee")
    if target.backend == "hip":
        tile_bytes, num_stages, precision = 16 * 1024, 2, "ieee"
    else:
        precision = "tf32x3"
        tile_bytes = 32 * 1024 if target.arch in (80, 90, 100, 103) else 16 * 1024
        num_stages = 7 if target.arch in (90, 100, 103) else 5
    if dtype == torch.float32:  # tf32x3 holds every operand three times
        tile_m, tile_bytes = 16, tile_bytes // 2
        num_warps = 8 if head_dim_padded > 128 else 4
        kv_itemsize = dtype.itemsize
    kv_itemsize = kv_itemsize or dtype.itemsize
    tile_n = tile_bytes // (2 * head_dim_padded * kv_itemsize)
    tile_n = min(256 // dtype.itemsize, max(16, tile_n))
    if kv_itemsize < dtype.itemsize:
        tile_n = min(tile_n, 2048 // tile_m)
    return AttentionTile(tile_m, tile_n, num_warps, num_stages, precision)


@dataclass(frozen=True)
class Chunking:
    """How the keys that a query sees are divided: into equal chunks of at least `min_tiles` tiles,
    and at most `max_chunks` of them.

    It follows from the number of these keys alone, so that a sequence's result is bitwise the same
    whatever else is in the batch and however wide the tables are. `split_states.chunks_of` does the
    division, on the device.
    """

    min_tiles: int
    max_chunks: int

    def most(self, max_tokens: int, tile_n: int) -> int:
        """Chunks of up to max_tokens keys; at least 1."""
        return max(1, min(self.max_chunks, cdiv(max_tokens, self.min_tiles * tile_n)))


@functools.cache
def chunking(num_kv_heads: int, num_splits: int | None = None) -> Chunking:
    """At most `num_splits` chunks; if None, of sixteen tiles at least, and so many at most that one
    long sequence occupies the 264 programs that an H200 runs at once.

    Between two chunks a program waits twice for memory, and the fp32 states that a chunk leaves are
    written and read. Smaller chunks cost more of both; larger ones leave a lone short sequence with
    few programs.
    """
    if num_splits is not None:
        return Chunking(1, num_splits)
    return Chunking(16, max(16, 256 // num_kv_heads))


@functools.cache
def prefill_tile(
    head_dim_padded: int, dtype: torch.dtype, target: Target, kv_itemsize: int | None = None
) -> AttentionTile:
    """Tile of the prefill kernel; the same for every batch, so that results are batch-invariant.
    kv_itemsize: bytes of an element of the cache, dtype's if None.

    Prefill is bound by the tensor cores, so a half-precision tile is as large as registers allow
    without spilling under any combination of features. An accumulator of 128 rows leaves room for
    64 keys at a time where the products read their operands from shared memory (wgmma on sm_90,
    tcgen05 on sm_100), and for 32 where they pass through registers (mma.sync). The key tiles in
    flight, see `decode_tile`, are what then fits shared memory. fp8 keys and values are converted
    in registers, of which 128 x 256 leaves too few on sm_100.

    Asynchronous products (wgmma) can run during the softmax: `scores_ahead`, the overlap within a
    warp group of FlashAttention 3 (Shah et al., 2024). The scores of two tiles are alive then, in
    registers: at head_dim 256 these do not suffice, at 64 they would cost a multiprocessor its
    second program, and products of converted keys and values are waited for. On sm_100 Triton 3.7.1
    has no barrier between the warps' loads of the scores from tensor memory and the product that
    overwrites them next.
    """
    if forced := target.forced_tile("prefill_tile"):
        return forced
    if target.backend == "interpreter":
        return AttentionTile(32, 32, 4, 1, "ieee", scores_ahead=head_dim_padded < 128)  # for tests
    if target.backend == "hip":
        return AttentionTile(tile_m=64, tile_n=32, num_warps=4, num_stages=2, precision="ieee")
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
    """Splits of the prefix of cascade: the fewest within 85 % of the best wave efficiency, as
    flash-attn chooses its splits; each gets at least two tiles.

    num_programs: of one split, one of which fits a multiprocessor. Their states are as many as the
    members of a group, so that fixed chunks would cost more than they fill.
    """
    most = max(1, min(MAX_SPLITS, max_tokens // (2 * tile_n)))

    def efficiency(num_splits: int) -> float:
        waves = num_programs * num_splits / target.num_multiprocessors
        return waves / math.ceil(waves)

    best = max(map(efficiency, range(1, most + 1)))
    return next(n for n in range(1, most + 1) if efficiency(n) >= 0.85 * best)


@functools.cache
def split_prefill_tile(
    head_dim_padded: int, dtype: torch.dtype, target: Target, kv_itemsize: int | None = None
) -> AttentionTile:
    """Tile of the prefill kernel where it leaves split states: split keys, the prefix of cascade.

    The output is fp32 and takes twice the registers on its way out, too many of them at 128 x 256.
    """
    if forced := target.forced_tile("split_prefill_tile"):
        return forced
    tile = prefill_tile(head_dim_padded, dtype, target, kv_itemsize)
    return replace(tile, tile_m=min(tile.tile_m, 64)) if head_dim_padded > 128 else tile


@functools.cache
def merge_tile(head_dim_padded: int) -> RowTile:
    """Partial states that the decode merge reads at a time, about 2048 fp32 numbers.

    With one warp sums over the states stay in registers: of 1,080 warp instructions and 564
    wavefronts of shared memory (480 of them bank conflicts) with four, 387 and none are left.
    """
    return RowTile(rows=max(4, 2048 // head_dim_padded), num_warps=1)


@functools.cache
def merge_states_tile(head_dim_padded: int) -> RowTile:
    """Rows of both parts that a program of merge_attention_states combines."""
    return RowTile(rows=max(1, 4096 // head_dim_padded), num_warps=4)


@dataclass(frozen=True)
class FlatTile:
    """Tile of a kernel that moves or maps elements one by one."""

    elements: int
    num_warps: int


@functools.cache
def activation_tile(size: int) -> FlatTile:
    """Part of a row of gated_activation: two 16-byte loads (fp16) of gate and of up per thread."""
    return FlatTile(min(2048, next_power_of_2(size)), num_warps=4)


@functools.cache
def copy_tile(num_elements: int, itemsize: int) -> FlatTile:
    """Part of a block that a program of copy_blocks copies: four 16-byte loads per thread."""
    elements = min(8192 // itemsize, next_power_of_2(num_elements))
    return FlatTile(elements, num_warps=4)


@functools.cache
def swap_tile(num_elements: int, itemsize: int) -> FlatTile:
    """Part of a block that a program of swap_blocks copies at a time."""
    elements = min(16384 // itemsize, next_power_of_2(num_elements))
    return FlatTile(elements, num_warps=8)


def swap_num_programs(num_tiles: int, target: Target) -> int:
    """Programs of swap_blocks: an eighth of the multiprocessors, and the rest goes on computing.

    The link to the host needs bandwidth * latency bytes in flight, about 64 GB/s * 2 us = 128 KB on
    PCIe 5; sixteen programs hold twice that.
    """
    return max(1, min(num_tiles, max(16, target.num_multiprocessors // 8)))


def index_tile() -> FlatTile:
    """Tokens that a program of slot_mapping_from_positions maps."""
    return FlatTile(elements=256, num_warps=4)


PROGRAMS_THAT_SAMPLE = 8
"""Programs of sample_tokens that fit one multiprocessor; tests hold the compiled kernels to it."""


def sample_num_splits(num_rows: int, num_chunks: int, target: Target) -> int:
    """Programs of sample_tokens that share a row of so many chunks, to fill the GPU once."""
    slots = target.num_multiprocessors * PROGRAMS_THAT_SAMPLE
    return max(1, min(MAX_SPLITS, num_chunks, slots // num_rows))
