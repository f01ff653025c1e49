"""Attention of one new token per sequence over a paged cache of latents (MLA).

Multi-head latent attention (DeepSeek-V2, 2024) caches one row per token and layer: the latent of
keys and values, then the rotated part of the key. In absorbed form, all query heads read the same
rows, and the values are the latents. So a program loads a row once for TILE_M heads.

The grid has a program for each head tile, sequence and chunk of tokens (flash-decoding). Programs
whose chunk does not exist return at once. The chunks of a sequence depend only on its length, so
its result is bitwise the same in any batch. A second kernel merges their states (split_states.py).
"""

import torch
import triton
import triton.language as tl

from kernels import checks, tiles
from kernels.checks import FLOAT_DTYPES, FP32, INT32, Arg, TensorSpec, bounded, same_dtype
from kernels.launch import launch, op
from kernels.primitives import (
    accumulate,
    await_launches_before,
    cast,
    dot,
    load_block_ids,
    load_rows,
    natural_max,
    normalise,
    online_softmax_weights,
    row_ptrs,
    score_unit,
    wide_product,
)
from kernels.split_states import SplitStates, chunks_of, results_of

_TENSORS = TensorSpec(
    Arg("latent_cache", "num_blocks block_size latent_dim", FLOAT_DTYPES),
    Arg("q", "batch num_heads latent_dim", same_dtype("latent_cache")),
    Arg(
        "out", "batch num_heads head_dim_v", lambda dtypes: (dtypes["q"], *FP32),
        optional=True, written=True,
    ),
    Arg("block_tables", "batch max_blocks", INT32),
    Arg("context_lens", "batch", INT32),
    rules=(bounded("latent_cache", "block_size", 1), bounded("q", "num_heads", 1)),
)  # fmt: skip


@triton.jit(do_not_specialize=["batch", "min_tiles", "max_chunks", "num_states", "stride_table"])
def _paged_mla_decode_kernel(
    out_ptr, lse_ptr, counts_ptr, q_ptr, latent_cache_ptr, block_tables_ptr, context_lens_ptr,
    scale, batch, min_tiles, max_chunks, num_states,
    stride_out_seq, stride_out_head,
    stride_q_seq, stride_q_head,
    stride_block, stride_slot, stride_table,
    NUM_HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Head tiles vary fastest between programs, so the readers of a row run at the same time.

    IS_SPLIT: out and lse are the acc and sums of split states. Otherwise every sequence has one
    chunk, and lse_ptr may be None. Strides of the cache are in bytes.
    """
    await_launches_before(PDL)
    HEAD_TILES: tl.constexpr = (NUM_HEADS + TILE_M - 1) // TILE_M
    piece = tl.program_id(0) // HEAD_TILES
    seq, chunk = piece % batch, piece // batch
    context_len = tl.load(context_lens_ptr + seq)
    chunk_tokens, num_chunks = chunks_of(context_len, min_tiles, max_chunks, TILE_N)
    if chunk >= num_chunks:
        return
    begin = chunk * chunk_tokens
    end = tl.minimum(begin + chunk_tokens, context_len)
    heads = tl.program_id(0) % HEAD_TILES * TILE_M + tl.arange(0, TILE_M)
    head_mask = heads < NUM_HEADS
    offs_n = tl.arange(0, TILE_N)
    offs_v = tl.arange(0, HEAD_DIM_V)
    offs_r = HEAD_DIM_V + tl.arange(0, ROPE_DIM)

    q_rows = q_ptr + wide_product(seq, stride_q_seq) + wide_product(heads, stride_q_head)[:, None]
    q_rope = tl.load(q_rows + offs_r[None, :], mask=head_mask[:, None], other=0.0)
    q = tl.load(q_rows + offs_v[None, :], mask=head_mask[:, None], other=0.0)
    unit = score_unit(scale, 0.0, False, False)
    table_ptr = block_tables_ptr + wide_product(seq, stride_table)
    acc = tl.zeros([TILE_M, HEAD_DIM_V], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    for start in tl.range(begin, end, TILE_N):
        positions = start + offs_n
        token_mask = offs_n < end - start
        ids = load_block_ids(table_ptr, positions, token_mask, BLOCK_SIZE, True)
        rows = row_ptrs(latent_cache_ptr, ids, positions, stride_block, stride_slot, BLOCK_SIZE)
        rows = rows[:, None]
        k_rope = load_rows(rows + offs_r[None, :], token_mask, None, True, False)
        latents = load_rows(rows + offs_v[None, :], token_mask, None, True, False)
        qk = dot(q_rope, tl.trans(k_rope), None, PRECISION)
        qk = dot(q, tl.trans(latents), qk, PRECISION)  # [TILE_M, TILE_N]
        scores = tl.where(token_mask[None, :], qk, float("-inf"))
        p, alpha, row_max, row_sum = online_softmax_weights(scores, unit, row_max, row_sum)
        acc = accumulate(p, latents, acc, alpha, PRECISION)

    row_max = natural_max(row_max, unit)
    if IS_SPLIT:
        states = wide_product(seq * NUM_HEADS + heads, num_states) + chunk
        out_ptrs = out_ptr + states[:, None] * HEAD_DIM_V + offs_v[None, :]
        tl.store(out_ptrs, acc, mask=head_mask[:, None])
        tl.store(lse_ptr + 2 * states, row_max, mask=head_mask)
        tl.store(lse_ptr + 2 * states + 1, row_sum, mask=head_mask)
        if chunk == 0:
            tl.store(counts_ptr + seq * NUM_HEADS + heads, num_chunks, mask=head_mask)
    else:
        out, lse = normalise(acc, row_max, row_sum)
        out_ptrs = out_ptr + wide_product(seq, stride_out_seq)
        out_ptrs += wide_product(heads, stride_out_head)[:, None] + offs_v[None, :]
        tl.store(out_ptrs, cast(out, out_ptr.dtype.element_ty), mask=head_mask[:, None])
        if lse_ptr is not None:
            tl.store(lse_ptr + seq * NUM_HEADS + heads, lse, mask=head_mask)


@op
def paged_mla_decode_attention(
    q: torch.Tensor, latent_cache: torch.Tensor,
    block_tables: torch.Tensor, context_lens: torch.Tensor,
    *,
    scale: float, head_dim_v: int = 512,
    num_splits: int | None = None,
    out: torch.Tensor | None = None, return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of one query token per sequence over its paged cache of latents.

    The decode step of multi-head latent attention (DeepSeek-V2, 2024) in absorbed form, as FlashMLA
    computes it. `concat_and_cache_mla` has already stored the row of the current token. Tables,
    lengths, num_splits, return_lse and CUDA graphs are as in `paged_decode_attention`.

    Args:
        q: (batch, num_heads, latent_dim), fp16, bf16 or fp32. A row is the unrotated query times
            the up-projection of keys (head_dim_v elements), then the rotated query (16, 32 or 64).
        latent_cache: (num_blocks, block_size, latent_dim) in q's dtype, any strides but a
            contiguous last dimension. A row is a token's latent, then the rotated part of its key.
        block_tables, context_lens: (batch, max_blocks) and (batch,) int32.
        scale: factor of the scores, at least 0. It has no default, because it depends on head_dim
            before absorption: DeepSeek-V2 has (128 + 64) ** -0.5, times YaRN's factor.
        head_dim_v: kv_lora_rank, a power of two from 16 to 512.
        out: (batch, num_heads, head_dim_v) to write to, in q's dtype or fp32; allocated if None.

    Returns:
        The weighted sums of latents, to be multiplied by the up-projection of values. With
        return_lse also the LSE: (batch, num_heads) fp32. A context length of 0 gives 0 and -inf.

    Mutates only out.

    Raises:
        ValueError: a shape, dtype, device, stride or option does not fit. For tensors in host
            memory also: a table is too narrow for a context length, or a block id is invalid.
    """
    sizes = _TENSORS(latent_cache, q, out, block_tables, context_lens)
    scale = checks.check_number("scale", scale, 0, what="a finite factor")
    head_dim_v = checks.check_integer("head_dim_v", head_dim_v, 16, 512)
    num_splits = checks.check_num_splits("num_splits", num_splits)
    rope_dim = sizes.latent_dim - head_dim_v
    if rope_dim not in (16, 32, 64) or head_dim_v != tiles.next_power_of_2(head_dim_v):
        raise ValueError(
            "head_dim_v: expected a power of two that leaves 16, 32 or 64 of "
            f"latent_dim={sizes.latent_dim}, got {head_dim_v}"
        )
    if out is not None and sizes.head_dim_v != head_dim_v:
        raise ValueError(
            f"out: expected shape (batch, num_heads, head_dim_v={head_dim_v}), "
            f"got {tuple(out.shape)}"
        )
    checks.check_block_tables(block_tables, context_lens, latent_cache)
    latent_queries = q[..., :head_dim_v]
    out, lse = results_of(latent_queries, out, return_lse)
    tile = tiles.mla_decode_tile(sizes.num_heads, q.dtype, tiles.target_of(q.device))
    head_tiles = tiles.cdiv(sizes.num_heads, tile.tile_m)
    chunks = tiles.chunking(head_tiles, num_splits)
    num_chunks = chunks.max_count(sizes.max_blocks * sizes.block_size, tile.tile_n)
    states = SplitStates.empty(latent_queries, num_chunks) if num_chunks > 1 else None
    results = (out, lse, None) if states is None else (states.acc, states.sums, states.counts)
    strides = [stride * latent_cache.itemsize for stride in latent_cache.stride()[:2]]
    launch(_paged_mla_decode_kernel, (head_tiles * sizes.batch * num_chunks,),
        *results, q, latent_cache, block_tables, context_lens,
        scale, sizes.batch, chunks.min_tiles, chunks.max_chunks, num_chunks,
        *out.stride()[:2], *q.stride()[:2], *strides, block_tables.stride(0),
        NUM_HEADS=sizes.num_heads, HEAD_DIM_V=head_dim_v, ROPE_DIM=rope_dim,
        BLOCK_SIZE=sizes.block_size, TILE_M=tile.tile_m, TILE_N=tile.tile_n,
        IS_SPLIT=states is not None, PRECISION=tile.precision,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **tiles.pdl_options(q.device),
    )  # fmt: skip
    if states is not None:
        states.merge_into(out, lse)
    return out if lse is None else (out, lse)
