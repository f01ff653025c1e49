"""Causal prefill over a paged KV cache for sm_90, in Gluon, structured as FlashAttention 3 (Shah et
al., 2024).

A program computes 128 rows of one KV head of one sequence (see `paged_prefill_attention`) with
three warp groups. A producer walks the block table and copies tiles of 128 keys and values to
shared memory by TMA: one copy per block, or per tile of a larger block. Two consumers compute 64
rows each, so that the products of one can run during the softmax of the other. They issue Q K of
the next tile before P V of this tile and wait for both. If P V ran during the next softmax too,
registers would not suffice, and ptxas would serialise all products.

Table entries past the end of a sequence are not read: the producer copies block -1 instead, and TMA
writes zeros for what is outside the cache. In the last block the producer overwrites the values
past the end with zeros, since 0 * NaN is NaN. Keys past the end do not matter: scores are masked.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as wgmma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as wgmma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels import primitives, tiles
from kernels.fp8_cache import byte_strides
from kernels.launch import launch
from kernels.primitives import await_launches_before, online_softmax_weights

_TILE_M, _TILE_N, _STAGES, _SEARCH_WIDTH = 128, 128, 2, 256


@gluon.jit
def _copy_tile(cache, table_ptr, kv_head, start, end, buffer, arrived, BLOCK_SIZE: gl.constexpr):
    PIECE: gl.constexpr = cache.block_shape[2]
    TILE_N: gl.constexpr = buffer.shape[0]
    mbarrier.expect(arrived, TILE_N // PIECE * cache.nbytes_per_cta)
    for first in gl.static_range(0, TILE_N, PIECE):
        position = start + first
        block = gl.load(table_ptr + position // BLOCK_SIZE, mask=position < end, other=-1)
        origin = [block, kv_head, position % BLOCK_SIZE, 0]
        tma.async_copy_global_to_shared(cache, origin, arrived, buffer.slice(first, PIECE))


@gluon.jit
def _produce(
    k_cache, v_cache, table_ptr, kv_head, end,
    k_tiles, v_tiles, k_full, v_full, k_empty, v_empty,
    BLOCK_SIZE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    await_launches_before(PDL)
    STAGES: gl.constexpr = k_tiles.shape[0]
    TILE_N: gl.constexpr = k_tiles.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 4], [1, 0])
    rows = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))[:, None]
    for tile in range(gl.cdiv(end, TILE_N)):
        stage = tile % STAGES
        # The odd phase of a new barrier counts as over, so the first STAGES tiles do not wait.
        free = (tile // STAGES & 1) ^ 1
        start = tile * TILE_N
        keys, values = k_tiles.index(stage), v_tiles.index(stage)
        mbarrier.wait(k_empty.index(stage), free)
        _copy_tile(k_cache, table_ptr, kv_head, start, end, keys, k_full.index(stage), BLOCK_SIZE)
        mbarrier.wait(v_empty.index(stage), free)
        is_full = start + TILE_N <= end
        # Consumers wait for zeros in the last tile's rows past the end, so it has another barrier.
        arrived = v_full.index(gl.where(is_full, stage, STAGES))
        _copy_tile(v_cache, table_ptr, kv_head, start, end, values, arrived, BLOCK_SIZE)
        if not is_full:
            mbarrier.wait(arrived, 0)
            for first in gl.static_range(0, TILE_N, 8):
                if start + first + 8 > end:
                    some = values.slice(first, 8)
                    some.store(gl.where(start + first + rows < end, some.load(LAYOUT), 0.0))
            fence()
            mbarrier.arrive(v_full.index(stage))


@gluon.jit
def _consume(
    args, NUM_Q_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, PDL: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    await_launches_before(PDL)
    (
        out_ptr, lse_ptr, q_ptr, stride_out_token, stride_out_head, stride_q_token, stride_q_head,
        first_token, first_row, num_rows, first_position, end, kv_head, unit,
        q_tiles, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty,
    ) = args  # fmt: skip
    STAGES: gl.constexpr = k_tiles.shape[0]
    TILE_N: gl.constexpr = k_tiles.shape[1]
    ROWS: gl.constexpr = q_tiles.shape[1]
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    # Also of scores, since head_dim is TILE_N.
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, TILE_N, 16])
    SUM_ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    MEMORY_ROWS: gl.constexpr = gl.SliceLayout(1, MEMORY)

    first_row += CONSUMER * ROWS
    rows = first_row + gl.arange(0, ROWS, MEMORY_ROWS)
    mask = rows < num_rows
    tokens = (first_token + rows // GROUP_SIZE).to(gl.int64)
    heads = (kv_head * GROUP_SIZE + rows % GROUP_SIZE).to(gl.int64)
    dims = gl.arange(0, TILE_N, gl.SliceLayout(0, MEMORY))[None, :]
    q_ptrs = q_ptr + (tokens * stride_q_token + heads * stride_q_head)[:, None] + dims
    q = q_tiles.index(CONSUMER)
    q.store(gl.load(q_ptrs, mask=mask[:, None], other=0.0))
    fence()

    queries = (first_row + gl.arange(0, ROWS, SUM_ROWS)) // GROUP_SIZE
    positions = (first_position + queries)[:, None]
    keys = gl.arange(0, TILE_N, gl.SliceLayout(0, SUMS))[None, :]
    seen_by_all = first_position + first_row // GROUP_SIZE + 1
    row_max = gl.full([ROWS], float("-inf"), gl.float32, SUM_ROWS)
    row_sum = gl.full([ROWS], 0.0, gl.float32, SUM_ROWS)
    acc = gl.zeros([ROWS, TILE_N], gl.float32, SUMS)
    none = acc
    last = gl.cdiv(end, TILE_N) - 1
    # The last tile is after the loop, because no Q K follows it.
    if last >= 0:
        mbarrier.wait(k_full.index(0), 0)
        qk = wgmma(q, k_tiles.index(0).permute((1, 0)), none, use_acc=False)
        mbarrier.arrive(k_empty.index(0))
        for tile in range(last):
            # Most tiles lie before the diagonal and skip the masks.
            if (tile + 1) * TILE_N > seen_by_all:
                qk = gl.where(tile * TILE_N + keys <= positions, qk, float("-inf"))
            p, alpha, row_max, row_sum = online_softmax_weights(qk, unit, row_max, row_sum)
            stage, following = tile % STAGES, (tile + 1) % STAGES
            mbarrier.wait(k_full.index(following), (tile + 1) // STAGES & 1)
            k = k_tiles.index(following).permute((1, 0))
            next_qk = wgmma(q, k, none, use_acc=False, is_async=True)
            acc *= alpha[:, None]
            # wgmma reads P from registers, so weights do not pass through shared memory.
            weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
            mbarrier.wait(v_full.index(stage), tile // STAGES & 1)
            sums = wgmma(weights, v_tiles.index(stage), acc, is_async=True)
            # Q K was issued first, so it is complete when one product remains. The producer can
            # refill its buffer while P V runs.
            qk = wgmma_wait(1, deps=(next_qk,))
            mbarrier.arrive(k_empty.index(following))
            acc = wgmma_wait(0, deps=(sums,))
            mbarrier.arrive(v_empty.index(stage))
        qk = gl.where(last * TILE_N + keys <= positions, qk, float("-inf"))
        p, alpha, row_max, row_sum = online_softmax_weights(qk, unit, row_max, row_sum)
        acc *= alpha[:, None]
        weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
        mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
        acc = wgmma(weights, v_tiles.index(last % STAGES), acc)

    out, lse = primitives.normalise(acc, primitives.natural_max(row_max, unit), row_sum)
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), MEMORY)
    out_ptrs = out_ptr + (tokens * stride_out_token + heads * stride_out_head)[:, None] + dims
    gl.store(out_ptrs, out, mask=mask[:, None])
    if lse_ptr is not None:
        lse = gl.convert_layout(lse, MEMORY_ROWS)
        gl.store(lse_ptr + tokens * NUM_Q_HEADS + heads, lse, mask=mask)


@gluon.jit(do_not_specialize=["batch", "stride_table"])
def _hopper_prefill_kernel(
    out_ptr, lse_ptr, q_ptr, k_cache, v_cache,
    block_tables_ptr, cu_seqlens_q_ptr, context_lens_ptr, scale, batch,
    stride_out_token, stride_out_head, stride_q_token, stride_q_head, stride_table,
    NUM_Q_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr, SEARCH_WIDTH: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One program: TILE_M rows of one KV head of one sequence. Grid (tiles, KV heads). head_dim is
    TILE_N.

    k_cache, v_cache: descriptors of (num_blocks, num_kv_heads, BLOCK_SIZE, head_dim). `full`
    barriers: a tile arrived. `empty` barriers: both consumers are done with a tile. v_full has one
    more, for a last tile before its rows past the end are zeros.
    """
    await_launches_before(PDL)
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    kv_head = gl.program_id(1)
    offs = gl.arange(0, SEARCH_WIDTH, gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
    seq, tile = primitives.locate_tile(tile, cu_seqlens_q_ptr, batch, offs, GROUP_SIZE, TILE_M)
    first_token = gl.load(cu_seqlens_q_ptr + seq)
    num_queries = gl.load(cu_seqlens_q_ptr + seq + 1) - first_token
    num_rows = num_queries * GROUP_SIZE
    first_row = tile * TILE_M
    if first_row >= num_rows:
        return
    first_position = gl.load(context_lens_ptr + seq) - num_queries
    last_row = gl.minimum(first_row + TILE_M, num_rows) - 1
    end = gl.maximum(first_position + last_row // GROUP_SIZE + 1, 0)
    table_ptr = block_tables_ptr + seq.to(gl.int64) * stride_table
    unit = primitives.score_unit(scale, 0.0, False, False)

    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_N, TILE_N], DTYPE)
    q_tiles = gl.allocate_shared_memory(DTYPE, [2, TILE_M // 2, TILE_N], LAYOUT)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TILE_N, TILE_N], LAYOUT)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TILE_N, TILE_N], LAYOUT)
    k_full, v_full = mbarrier.allocate_mbarrier(STAGES), mbarrier.allocate_mbarrier(STAGES + 1)
    k_empty, v_empty = mbarrier.allocate_mbarrier(STAGES), mbarrier.allocate_mbarrier(STAGES)
    mbarrier.init(v_full.index(STAGES), 1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), 1)
        mbarrier.init(v_full.index(stage), 1)
        mbarrier.init(k_empty.index(stage), 2)
        mbarrier.init(v_empty.index(stage), 2)
    fence()
    args = (
        out_ptr, lse_ptr, q_ptr, stride_out_token, stride_out_head, stride_q_token, stride_q_head,
        first_token, first_row, num_rows, first_position, end, kv_head, unit,
        q_tiles, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (args, NUM_Q_HEADS, GROUP_SIZE, PDL, 0)),
            (_consume, (args, NUM_Q_HEADS, GROUP_SIZE, PDL, 1)),
            (_produce, (
                k_cache, v_cache, table_ptr, kv_head, end,
                k_tiles, v_tiles, k_full, v_full, k_empty, v_empty, BLOCK_SIZE, PDL,
            )),
        ],
        [4, 4], [232, 40],
    )  # fmt: skip


class _TakesCaches:
    """The kernel, or its compiled form, called with caches instead of their descriptors. So a
    repeated launch (see `kernels.launch`) describes the caches that it gets."""

    arg_names = _hopper_prefill_kernel.arg_names

    def __init__(self, launchable: Any) -> None:
        self._launchable = launchable

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(
            out: torch.Tensor, lse: torch.Tensor | None, q: torch.Tensor,
            k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any, **constants: Any,
        ) -> Any:  # fmt: skip
            caches = _described(k_cache), _described(v_cache)
            compiled = self._launchable[grid](out, lse, q, *caches, *args, **constants)
            return compiled and _TakesCaches(compiled)

        return run


def _described(cache: torch.Tensor) -> TensorDescriptor:
    box = [1, 1, min(cache.shape[1], _TILE_N), cache.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float16)  # 16 bits
    return TensorDescriptor.from_tensor(cache.transpose(1, 2), box, layout)


def launch_hopper_prefill(
    out: torch.Tensor, lse: torch.Tensor | None,
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    block_tables: torch.Tensor, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor,
    scale: float,
) -> bool:  # fmt: skip
    """Launch the kernel on checked arguments of `paged_prefill_attention`: causal, scale >= 0, no
    window, softcap, ALiBi, sinks or split. Returns False, and launches nothing, if it does not
    support the dtype, head_dim, block size or alignment."""
    num_q_heads, num_kv_heads, batch = q.shape[1], k_cache.shape[2], context_lens.shape[0]
    block_size, group_size = k_cache.shape[1], num_q_heads // num_kv_heads
    starts = [x for cache in (k_cache, v_cache) for x in (cache.data_ptr(), *byte_strides(cache))]
    is_half = q.dtype == k_cache.dtype in (torch.float16, torch.bfloat16)
    is_one_box = block_size in (16, 32, 64) or block_size % _TILE_N == 0
    is_supported = is_half and is_one_box and q.shape[2] == _TILE_N and k_cache.numel() > 0
    if not is_supported or any(start % 16 for start in starts):
        return False
    grid = q.shape[0] * group_size // _TILE_M + batch, num_kv_heads
    launch(_TakesCaches(_hopper_prefill_kernel), grid,
        out, lse, q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, scale, batch,
        *out.stride()[:2], *q.stride()[:2], block_tables.stride(0),
        NUM_Q_HEADS=num_q_heads, GROUP_SIZE=group_size, BLOCK_SIZE=block_size,
        TILE_M=_TILE_M, TILE_N=_TILE_N, STAGES=_STAGES, SEARCH_WIDTH=_SEARCH_WIDTH,
        num_warps=4, maxnreg=168, **tiles.pdl_options(q.device),
    )  # fmt: skip
    return True
