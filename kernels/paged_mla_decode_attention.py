"""Attention of one new token per sequence over a paged cache of latents (MLA).

Multi-head latent attention (DeepSeek-V2, 2024) caches one row per token and layer: the latent of
keys and values, then the rotated part of the key. In absorbed form, queries are multiplied by the
up-projection of keys, and outputs by the up-projection of values. Then all query heads read the
same rows, and the values are the latents themselves. So a program loads a row once, for the scores
and the weighted sum of TILE_M heads.

The grid has one program per head tile, sequence and chunk of tokens (flash-decoding). The chunks of
a sequence depend only on its length (`kernels.tiles.Chunking`), so its result is bitwise the same
in any batch. Programs whose chunk the sequence does not have return at once. A second kernel merges
the partial states of the chunks (split_states.py).
"""

import torch
import triton
import triton.language as tl

from kernels import checks, tiles
from kernels.checks import FLOAT_DTYPES, FP32, INT32, Arg, TensorSpec, bounded, same_dtype
from kernels.launch import launch
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
from kernels.torch_ops import attention_op

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


@triton.jit(
    do_not_specialize=["batch", "min_tiles", "max_chunks", "num_states", "stride_table"]
)  # fmt: skip
def _paged_mla_decode_kernel(
    out_ptr, lse_ptr, q_ptr, latent_cache_ptr, block_tables_ptr, context_lens_ptr,
    scale, batch, min_tiles, max_chunks, num_states,
    stride_out_seq, stride_out_head,
    stride_q_seq, stride_q_head,
    stride_block, stride_slot, stride_table,
    NUM_HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program processes TILE_M heads of one chunk of one sequence. Heads vary fastest between
    programs, so programs that read the same rows run at the same time.

    IS_SPLIT: out and lse are the acc and sums of split states. Otherwise every sequence has one
    chunk, out and lse are the results, and lse_ptr may be None.
    Strides of the cache are in bytes.
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
    q = tl.load(q_rows + offs_v[None, :], mask=head_mask[:, None], other=0.0)
    q_rope = tl.load(q_rows + offs_r[None, :], mask=head_mask[:, None], other=0.0)
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
        latents = load_rows(rows + offs_v[None, :], token_mask, None, True, False)
        k_rope = load_rows(rows + offs_r[None, :], token_mask, None, True, False)
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
    else:
        out, lse = normalise(acc, row_max, row_sum)
        out_ptrs = out_ptr + wide_product(seq, stride_out_seq)
        out_ptrs += wide_product(heads, stride_out_head)[:, None] + offs_v[None, :]
        tl.store(out_ptrs, cast(out, out_ptr.dtype.element_ty), mask=head_mask[:, None])
        if lse_ptr is not None:
            tl.store(lse_ptr + seq * NUM_HEADS + heads, lse, mask=head_mask)


@attention_op
def paged_mla_decode_attention(
    q: torch.Tensor, latent_cache: torch.Tensor,
    block_tables: torch.Tensor, context_lens: torch.Tensor,
    *,
    scale: float, head_dim_v: int = 512,
    num_splits: int | None = None,
    out: torch.Tensor | None = None, return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of one query token per sequence over its paged cache of latents.

    This is the decode step of multi-head latent attention (DeepSeek-V2, 2024) in absorbed form, as
    FlashMLA computes it. A sequence's query is its last token, at position context_len - 1. The row
    of this token is already in the cache, see `concat_and_cache_mla`.

    Args:
        q: (batch, num_heads, latent_dim), fp16, bf16 or fp32. A row is the query without rotation
            times the up-projection of keys (head_dim_v elements), then the rotated part of the
            query (16, 32 or 64 elements).
        latent_cache: (num_blocks, block_size, latent_dim) in q's dtype, any strides but a
            contiguous last dimension. A row is a token's latent (head_dim_v elements), then the
            rotated part of its key. All heads read the same rows. The latents are the values, too.
        block_tables: (batch, max_blocks) int32. Entries past a sequence's last block are never
            read.
        context_lens: (batch,) int32, tokens per sequence including the current token.
        scale: factor of the scores, at least 0. There is no default, because the model's head_dim
            before absorption determines it: DeepSeek-V2 has (128 + 64) ** -0.5, times YaRN's
            factor.
        head_dim_v: kv_lora_rank, a power of two from 16 to 512.
        num_splits: maximum number of chunks that a sequence's tokens are divided into. None chooses
            from the sequence's length, num_heads and the tile. For any num_splits, a sequence's
            result is bitwise the same whatever else is in the batch and however wide its table is.
        out: (batch, num_heads, head_dim_v) to write to, in q's dtype or fp32; allocated if None.
        return_lse: also return the LSE.

    Returns:
        The output, which the up-projection of values turns into the heads' outputs. With return_lse
        also the LSE: (batch, num_heads) fp32, natural log. A context length of 0 gives output 0 and
        LSE -inf.

    Mutates only out. Launches one kernel, or two if the tables allow more than one chunk. Grids
    depend on shapes alone, and the host does not synchronise. So a CUDA graph can capture the call
    and replay it with other context lengths and tables.

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
    if sizes.batch == 0:
        return out if lse is None else (out, lse)
    tile = tiles.mla_decode_tile(sizes.num_heads, q.dtype, tiles.target_of(q.device))
    head_tiles = tiles.cdiv(sizes.num_heads, tile.tile_m)
    chunks = tiles.chunking(head_tiles, num_splits)
    num_chunks = chunks.max_count(sizes.max_blocks * sizes.block_size, tile.tile_n)
    states = SplitStates.empty(latent_queries, num_chunks) if num_chunks > 1 else None
    results = (out, lse) if states is None else (states.acc, states.sums)
    cache_strides = [stride * latent_cache.itemsize for stride in latent_cache.stride()[:2]]
    launch(_paged_mla_decode_kernel, (head_tiles * sizes.batch * num_chunks,),
        *results, q, latent_cache, block_tables, context_lens,
        scale, sizes.batch, chunks.min_tiles, chunks.max_chunks, num_chunks,
        *out.stride()[:2], *q.stride()[:2], *cache_strides, block_tables.stride(0),
        NUM_HEADS=sizes.num_heads, HEAD_DIM_V=head_dim_v, ROPE_DIM=rope_dim,
        BLOCK_SIZE=sizes.block_size, TILE_M=tile.tile_m, TILE_N=tile.tile_n,
        IS_SPLIT=states is not None, PRECISION=tile.precision,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **tiles.pdl_options(q.device),
    )  # fmt: skip
    if states is not None:
        states.merge_into(out, lse, context_lens=context_lens, chunks=chunks, tile_n=tile.tile_n)
    return out if lse is None else (out, lse)
