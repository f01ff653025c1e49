"""Attention of many query tokens per sequence over a paged KV cache.

The kernel handles every step that is not pure decode: whole prompts, prompts with a cached prefix,
chunked prefill, verification of draft tokens, and batches that mix these with decodes. The queries
of all sequences are concatenated (varlen). A sequence's queries are its last tokens.

A program computes TILE_M rows of one KV head of one sequence. A row is a (query, head of the group)
pair; row r belongs to query r // GROUP_SIZE. So the query heads that share a KV head (GQA) also
share its loads, and a sequence with one query leaves few rows unused. The number of tiles of rows
in a launch is an upper bound from total_q, batch and max_seqlen_q. Each program looks up its tile's
sequence on the device. The last tiles of a sequence see the most keys and start first.

A query at position t sees keys [t - window_left, t + window_right], clipped to [0, context_len);
causal attention is window_right = 0. For a tile of rows, keys fall into three regions:

    some rows see them (left edge of the window) | every row sees them | some rows see them

Only the outer two regions need masks; each spans a tile or two. Keys that no row sees are not
loaded. Keys are processed in steps of TILE_N from the first visible key, whatever the block size.
With SCORES_AHEAD, the product Q K of the next step is issued before the product P V of this step.
If products are asynchronous, P V then runs during the next softmax, as it does within a warp group
of FlashAttention 3 (Shah et al., 2024).

If few queries follow a long cached prefix (a turn of an agent), the tiles of rows do not fill the
GPU. Then the keys of a tile can be divided into chunks for several programs, as in decode
(split_states.py). A sequence with more tiles of rows gets fewer chunks. The division depends on the
sequence alone, so its result is bitwise the same in any batch.

This kernel also computes the prefix part of cascade (shared_prefix_decode_attention.py). There a
"sequence" is a group with one query per member. Each member has its own suffix, so the windows of
the rows begin at different positions. Tiles and splits do not depend on these positions.
"""

import torch
import triton
import triton.language as tl

from kernels import checks, tiles
from kernels.checks import INT32, Arg, attention_spec
from kernels.fp8_cache import (
    Scale,
    byte_strides,
    cache_argument,
    from_cache,
    load_scale,
    values_from_cache,
)
from kernels.launch import launch, op
from kernels.primitives import (
    accumulate,
    add_bytes,
    add_sinks,
    attention_scores,
    await_launches_before,
    cast,
    dot,
    load_block_ids,
    load_rows,
    locate_tile,
    natural_max,
    normalise,
    online_softmax_weights,
    row_ptrs,
    score_unit,
    wide_product,
)
from kernels.score_options import ScoreOptions
from kernels.split_states import SplitStates, chunks_of, results_of, states_of_sequence

# A window wider than any context. Its sum with a position still fits 32 bits.
_NO_LIMIT = 2**30
_SEARCH_WIDTH = 256
_TENSORS = attention_spec(
    "total_q",
    Arg("context_lens", "batch", INT32),
    Arg("cu_seqlens_q", "batch+1", INT32),
    Arg("block_tables", "batch max_blocks", INT32),
    rules=(checks.bounded("k_cache", "num_kv_heads", 1, checks.MAX_GRID_YZ),),
)


@triton.jit
def _load_tile(
    cache, table_ptr, slots, mask, offs_d,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load keys or values of a sequence, [slots, dims]. MASKED: 0 outside `mask`.

    cache: (pointer, block stride, slot stride). Strides are in bytes.
    """
    cache_ptr, stride_block, stride_slot = cache
    if BLOCK_SIZE:
        block_ids = load_block_ids(table_ptr, slots, mask, BLOCK_SIZE, MASKED)
        rows = row_ptrs(cache_ptr, block_ids, slots, stride_block, stride_slot, BLOCK_SIZE)
    else:
        rows = add_bytes(cache_ptr, wide_product(slots, stride_slot))
    ptrs = rows[:, None] + offs_d[None, :]
    return load_rows(ptrs, mask, offs_d < HEAD_DIM, MASKED, offs_d.shape[0] != HEAD_DIM)


@triton.jit(
    do_not_specialize=[
        "window_left", "window_right", "batch", "tiles_per_seq", "min_tiles", "max_chunks",
        "chunk_queries", "num_states", "seq_states", "stride_table",
    ]
)  # fmt: skip
def _paged_prefill_kernel(
    out_ptr, lse_ptr, counts_ptr, q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr,
    cu_seqlens_q_ptr, context_lens_ptr, kv_starts_ptr, suffix_lens_ptr,
    alibi_slopes_ptr, sinks_ptr, k_scale, stride_k_scale, v_scale, stride_v_scale,
    scale, softcap, window_left, window_right,
    batch, tiles_per_seq, min_tiles, max_chunks, chunk_queries, num_states, seq_states,
    stride_out_token, stride_out_head,
    stride_q_token, stride_q_head,
    stride_k_block, stride_k_slot, stride_k_head,
    stride_v_block, stride_v_slot, stride_v_head,
    stride_table, stride_alibi_seq,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, SEARCH_WIDTH: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, NEGATIVE_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    IS_SPLIT: tl.constexpr, SCORES_AHEAD: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: TILE_M rows of one KV head of one sequence x one chunk of the keys they see.

    Grid (tiles, NUM_KV_HEADS, chunks).
    IS_SPLIT: out and lse are the acc and sums of split states, see `states_of_sequence`. counts:
    their numbers. Otherwise there is one chunk, out and lse are the results, lse_ptr may be None.
    min_tiles, max_chunks, chunk_queries: how the keys are divided, see `kernels.tiles.Chunking`.
    SEARCH_WIDTH 0: every sequence gets tiles_per_seq programs per KV head: one per tile or, if
    IS_SPLIT without suffix_lens, one per (chunk, tile) pair. Otherwise sequences are searched.
    Strides of the caches are in bytes.
    BLOCK_SIZE 0: not paged. Entry 0 of a table row is the contiguous piece that holds the sequence.
    Without tables all sequences are in piece 0.
    kv_starts_ptr: for each sequence, the slot of position 0 in its piece or table row, or None (0).
    suffix_lens_ptr: distance of each query from the last key (cascade), or None. Cascade needs
    IS_SPLIT and no right limit; each row has num_states states.
    """
    await_launches_before(PDL)
    IS_PREFIX: tl.constexpr = suffix_lens_ptr is not None
    NUM_Q_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
    KEYS_ONCE: tl.constexpr = HEAD_DIM_PADDED <= 128  # wider keys would spill in loops on sm_80
    # Later rows see more keys if attention is causal, so the longest programs start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    if SEARCH_WIDTH:
        offs = tl.arange(0, SEARCH_WIDTH)
        seq, tile = locate_tile(tile, cu_seqlens_q_ptr, batch, offs, GROUP_SIZE, TILE_M)
    else:
        seq = tile // tiles_per_seq
        tile = tile % tiles_per_seq
    first_token = tl.load(cu_seqlens_q_ptr + seq)
    num_queries = tl.load(cu_seqlens_q_ptr + seq + 1) - first_token
    num_rows = num_queries * GROUP_SIZE
    chunk, seq_chunks, row_states = tl.program_id(2), max_chunks, num_states
    first_state = first_token * num_states.to(tl.int64)
    if IS_SPLIT and not IS_PREFIX:
        if not SEARCH_WIDTH:
            num_tiles = tl.maximum(tl.cdiv(num_rows, TILE_M), 1)
            chunk = tile // num_tiles
            tile = tile % num_tiles
        seq_chunks, first_state = states_of_sequence(
            seq, first_token, num_queries, num_states, max_chunks, chunk_queries, seq_states
        )
        # The grid is an upper bound, so that a launch depends on shapes alone.
        if chunk >= seq_chunks:
            return
        row_states = seq_chunks
    first_state *= NUM_Q_HEADS
    first_row = tile * TILE_M
    if first_row >= num_rows:
        return

    context_len = tl.load(context_lens_ptr + seq)
    rows = first_row + tl.arange(0, TILE_M)
    row_mask = rows < num_rows
    # Rows are pairs of query and head, so few queries fill a tile. The heads of a query are
    # adjacent, so a tile spans few positions, and few of its keys need masks.
    queries = rows // GROUP_SIZE
    tokens = first_token + queries
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    if IS_PREFIX:
        # A suffix lies between the prefix and its query.
        positions_q = context_len - 1 + tl.load(suffix_lens_ptr + tokens, mask=row_mask, other=0)
        last_position = tl.max(tl.where(row_mask, positions_q, 0))
        first_position = tl.min(tl.where(row_mask, positions_q, last_position))
    else:
        positions_q = context_len - num_queries + queries
        first_position = context_len - num_queries + first_row // GROUP_SIZE
        last_row = tl.minimum(first_row + TILE_M, num_rows) - 1
        last_position = context_len - num_queries + last_row // GROUP_SIZE

    # [begin, end): keys that some row sees; [full_begin, full_end): whole tiles that all rows see.
    begin, full_begin, seen_by_all = 0, 0, context_len
    first_seen, end = 0, context_len
    if HAS_LEFT:
        first_seen = tl.maximum(first_position - window_left, 0)
        # In a prefix, first_seen depends on the other members of the group. Tiles start at fixed
        # positions there, so a member's sums do not depend on the others.
        begin = first_seen // TILE_N * TILE_N if IS_PREFIX else first_seen
        masked_left = tl.maximum(last_position - window_left, 0) - begin
        full_begin = begin + tl.cdiv(masked_left, TILE_N) * TILE_N
    if HAS_RIGHT:
        end = tl.minimum(last_position + window_right + 1, context_len)
        seen_by_all = tl.minimum(first_position + window_right + 1, context_len)
    if IS_SPLIT:
        # For the same reason chunks divide the whole prefix, and otherwise only the visible keys.
        first_split = 0 if IS_PREFIX else begin
        split_tokens, num_chunks = chunks_of(end - first_split, min_tiles, seq_chunks, TILE_N)
        split_begin = first_split + chunk * split_tokens
        begin = tl.maximum(begin, split_begin)
        end = tl.minimum(split_begin + split_tokens, end)
        if not IS_PREFIX:
            if chunk == 0:  # a tile that sees no key has no state
                counts_ptrs = counts_ptr + tokens.to(tl.int64) * NUM_Q_HEADS + heads
                tl.store(counts_ptrs, tl.where(begin < end, num_chunks, 0), mask=row_mask)
            if begin >= end:
                return
        full_begin = tl.maximum(full_begin, begin)
        seen_by_all = tl.minimum(seen_by_all, end)
    # Rounded down, because region 1 has no mask for a key that some row does not see.
    full_end = full_begin + tl.maximum(seen_by_all - full_begin, 0) // TILE_N * TILE_N

    offs_n = tl.arange(0, TILE_N)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    dim_mask = offs_d < HEAD_DIM
    qo_mask = row_mask[:, None] & dim_mask[None, :]
    q_ptrs = (
        q_ptr
        + tokens.to(tl.int64)[:, None] * stride_q_token
        + heads.to(tl.int64)[:, None] * stride_q_head
    )
    q = tl.load(q_ptrs + offs_d[None, :], mask=qo_mask, other=0.0)  # [TILE_M, HEAD_DIM_PADDED]
    alibi_slopes = 0.0
    if HAS_ALIBI:
        slope_seqs = tokens.to(tl.int64) if IS_PREFIX else seq.to(tl.int64)
        slope_ptrs = alibi_slopes_ptr + slope_seqs * stride_alibi_seq + heads
        alibi_slopes = tl.load(slope_ptrs, mask=row_mask, other=0.0)[:, None]

    if k_scale is not None:
        scale *= load_scale(k_scale, kv_head, stride_k_scale)
    # Weights are exp2 of scores times log2(e). Where possible, the scale joins this factor as the
    # unit, so scaling takes no instruction of its own.
    unit = score_unit(scale, softcap, HAS_SOFTCAP, HAS_ALIBI)
    k_ptr = add_bytes(k_cache_ptr, wide_product(kv_head, stride_k_head))
    v_ptr = add_bytes(v_cache_ptr, wide_product(kv_head, stride_v_head))
    table_ptr = block_tables_ptr
    if block_tables_ptr is not None:
        table_ptr += seq.to(tl.int64) * stride_table
        if BLOCK_SIZE == 0:
            piece = tl.load(table_ptr)
            k_ptr = add_bytes(k_ptr, wide_product(piece, stride_k_block))
            v_ptr = add_bytes(v_ptr, wide_product(piece, stride_v_block))
    kv_start = 0
    if kv_starts_ptr is not None:
        kv_start = tl.load(kv_starts_ptr + seq)
    keys = (k_ptr, stride_k_block, stride_k_slot)
    values = (v_ptr, stride_v_block, stride_v_slot)
    if SCORES_AHEAD:
        # The loop issues Q K of the next tile before P V of this one. The first Q K is before it.
        positions = begin + offs_n
        mask = (positions >= first_seen) & (positions < end)
        slots = positions + kv_start
        k = _load_tile(keys, table_ptr, slots, mask, offs_d, HEAD_DIM, BLOCK_SIZE, True)
        qk = dot(q, tl.trans(from_cache(k, q.dtype, KEYS_ONCE)), None, PRECISION)
    acc = tl.zeros([TILE_M, HEAD_DIM_PADDED], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)

    # Each region has its own copy of the loop. Most keys are in region 1. Its tiles need no masks.
    for REGION in tl.static_range(0 if HAS_LEFT else 1, 3):
        if REGION == 0:
            # A chunk may end before the window's edge does.
            loop_begin, loop_end = begin, tl.minimum(full_begin, end) if IS_SPLIT else full_begin
        elif REGION == 1:
            loop_begin, loop_end = full_begin, full_end
        else:
            loop_begin, loop_end = full_end, end
        for start in tl.range(loop_begin, loop_end, TILE_N):
            positions = start + offs_n
            token_mask = positions < end
            if IS_PREFIX and REGION == 0:
                # begin was rounded down, and block ids before the window may be invalid.
                token_mask &= positions >= first_seen
            slots = positions + kv_start
            if not SCORES_AHEAD:
                k = _load_tile(
                    keys, table_ptr, slots, token_mask, offs_d, HEAD_DIM, BLOCK_SIZE, REGION != 1
                )
                qk = dot(q, tl.trans(from_cache(k, q.dtype, KEYS_ONCE)), None, PRECISION)
            v = _load_tile(
                values, table_ptr, slots, token_mask, offs_d, HEAD_DIM, BLOCK_SIZE, REGION != 1
            )
            offsets = positions_q[:, None] - positions[None, :]  # [TILE_M, TILE_N]
            distances = tl.abs(offsets)
            scores = attention_scores(
                qk, scale, softcap, alibi_slopes, distances,
                NEGATIVE_SCALE, HAS_SOFTCAP, HAS_ALIBI,
            )  # fmt: skip
            if REGION != 1:
                visible = token_mask[None, :]
                if HAS_RIGHT:
                    visible = visible & (offsets >= -window_right)
                if REGION == 0:
                    visible = visible & (offsets <= window_left)
                # A row that has seen no key yet has the maximum -inf. Then 0 is subtracted from its
                # scores, because -inf - (-inf) is NaN.
                scores = tl.where(visible, scores, float("-inf"))
            p, alpha, row_max, row_sum = online_softmax_weights(scores, unit, row_max, row_sum)
            if SCORES_AHEAD:
                # The next tile may be in another region or past the end, so it is always masked.
                mask = positions + TILE_N < end
                slots += TILE_N
                k = _load_tile(keys, table_ptr, slots, mask, offs_d, HEAD_DIM, BLOCK_SIZE, True)
                qk = dot(q, tl.trans(from_cache(k, q.dtype, KEYS_ONCE)), None, PRECISION)
            # All warps need all values, so fp8 is converted once and then shared.
            acc = accumulate(p, values_from_cache(v, q.dtype, True), acc, alpha, PRECISION)

    if v_scale is not None:  # linear, so once for the sum instead of for each value
        acc *= load_scale(v_scale, kv_head, stride_v_scale)
    row_max = natural_max(row_max, unit)
    if IS_SPLIT:
        # Computed again: keeping it from above would take registers in the loop.
        states = first_state + (queries * NUM_Q_HEADS + heads).to(tl.int64) * row_states + chunk
        tl.store(out_ptr + states[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=qo_mask)
        tl.store(lse_ptr + 2 * states, row_max, mask=row_mask)
        tl.store(lse_ptr + 2 * states + 1, row_sum, mask=row_mask)
    else:
        if sinks_ptr is not None:
            sinks = tl.load(sinks_ptr + heads, mask=row_mask, other=0.0)
            acc, row_max, row_sum = add_sinks(acc, row_max, row_sum, sinks)
        out, lse = normalise(acc, row_max, row_sum)
        tokens = tokens.to(tl.int64)
        out_ptrs = (
            out_ptr
            + tokens[:, None] * stride_out_token
            + heads.to(tl.int64)[:, None] * stride_out_head
        )
        tl.store(out_ptrs + offs_d[None, :], cast(out, out_ptr.dtype.element_ty), mask=qo_mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + tokens * NUM_Q_HEADS + heads, lse, mask=row_mask)


def count_tiles(
    total_q: int, batch: int, max_seqlen_q: int, group_size: int, tile_m: int
) -> tuple[int, int]:
    """Return the tiles of rows per KV head: total in the launch, and maximum per sequence."""
    tiles_per_seq = tiles.cdiv(max_seqlen_q * group_size, tile_m)
    return min(batch * tiles_per_seq, total_q * group_size // tile_m + batch), tiles_per_seq


def _has_aligned_rows(cache: torch.Tensor) -> bool:
    """Whether Triton can tell that all rows start at a multiple of 16 bytes."""
    return not any(start % 16 for start in (cache.data_ptr(), *byte_strides(cache)))


def launch_prefill(
    out: torch.Tensor, lse: torch.Tensor | None,
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    block_tables: torch.Tensor | None, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor,
    options: ScoreOptions,
    *,
    max_seqlen_q: int, num_splits: int | None = 1, max_seqlen_k: int | None = None,
    kv_starts: torch.Tensor | None = None, paged: bool = True,
    suffix_lens: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the kernel on checked arguments of `paged_prefill_attention`. Further arguments:

    kv_starts: (batch,) int32, the slot of position 0 of each sequence. None: slot 0.
    paged: False if the keys of a sequence are contiguous. The caches are then (num_pieces, slots,
        num_kv_heads, head_dim), and block_tables is (batch, 1), the piece of each sequence, or None
        if all are in piece 0.
    max_seqlen_k: upper bound of context_lens. None: the capacity of a table row.
    suffix_lens: (total_q,) int32, distance of each query from the last key (cascade). out and lse
        are then acc and sums of SplitStates; the first num_splits states of a row are written.
    """
    total_q, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group_size = num_q_heads // num_kv_heads
    batch = context_lens.shape[0]
    if total_q == 0 or batch == 0 or max_seqlen_q == 0:
        return
    head_dim_padded = tiles.padded_dim(head_dim)
    target = tiles.target_of(q.device)
    tile = tiles.prefill_tile(head_dim_padded, q.dtype, target, k_cache.itemsize)
    left = None if options.window_size is None else options.window_size - 1
    right = options.ahead
    if num_splits is None and max_seqlen_q > tiles.few_queries(num_q_heads, num_kv_heads):
        num_splits = 1
    chunks = tiles.prefill_chunking(num_q_heads, num_kv_heads, num_splits, target)
    if num_splits != 1 or suffix_lens is not None:  # even if no sequence has a second chunk
        tile = tiles.split_prefill_tile(head_dim_padded, q.dtype, target, k_cache.itemsize)
    max_tokens = k_cache.shape[1] * (1 if block_tables is None else block_tables.shape[1])
    max_tokens = max_tokens if max_seqlen_k is None else min(max_tokens, max_seqlen_k)
    if left is not None and right is not None:
        max_tokens = min(max_tokens, max_seqlen_q + left + right)
    num_chunks = chunks.max_count(max_tokens, tile.tile_n)
    num_tiles, tiles_per_seq = count_tiles(total_q, batch, max_seqlen_q, group_size, tile.tile_m)
    is_uniform = num_tiles == batch * tiles_per_seq
    grid = num_tiles, num_kv_heads, num_chunks if suffix_lens is None else chunks.max_chunks
    merges = num_chunks > 1 and suffix_lens is None
    is_split = merges or suffix_lens is not None
    result, seq_states = (out, lse), 0
    num_states = 0 if suffix_lens is None or lse is None else lse.shape[2]
    if merges:
        limit = chunks.max_chunks * tiles.cdiv(chunks.queries * group_size, tile.tile_m)
        tiles_per_seq = min(tiles_per_seq * num_chunks, limit)
        is_uniform = batch * tiles_per_seq <= num_tiles * num_chunks
        if is_uniform:
            grid = batch * tiles_per_seq, num_kv_heads, 1
        seq_states = min(max_seqlen_q * num_chunks, chunks.queries * chunks.max_chunks)
        states = SplitStates.empty(q, min(total_q * num_chunks, batch * seq_states), num_rows=1)
        out, lse, num_states = states.acc, states.sums, num_chunks
    constants = options.kernel_constants()
    is_plain = left is options.sinks is kv_starts is suffix_lens is None and right == 0
    is_plain = is_plain and paged and not any(constants.values())
    if tile.has_producer and is_plain and chunks.max_chunks == 1 and block_tables is not None:
        from kernels.paged_prefill_hopper import launch_hopper_prefill  # imports Gluon

        tensors = out, lse, q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens
        if launch_hopper_prefill(*tensors, options.scale):
            return
    # Triton copies rows ahead only if they are aligned. If only K or only V is aligned, wgmma and
    # tcgen05 read the copied rows without a fence (fence.proxy.async) after the copies.
    num_stages = tile.num_stages if _has_aligned_rows(k_cache) == _has_aligned_rows(v_cache) else 1
    launch(_paged_prefill_kernel, grid,
        out, lse, states.counts if merges else None,
        q, cache_argument(k_cache), cache_argument(v_cache), block_tables,
        cu_seqlens_q, context_lens, kv_starts, suffix_lens,
        *options.kernel_arguments(),
        0 if left is None else min(left, _NO_LIMIT), 0 if right is None else min(right, _NO_LIMIT),
        batch, tiles_per_seq, chunks.min_tiles, chunks.max_chunks, chunks.queries,
        num_states, seq_states,
        *result[0].stride()[:2], *q.stride()[:2], *byte_strides(k_cache), *byte_strides(v_cache),
        0 if block_tables is None else block_tables.stride(0), options.alibi_stride,
        NUM_KV_HEADS=num_kv_heads, GROUP_SIZE=group_size,
        HEAD_DIM=head_dim, HEAD_DIM_PADDED=head_dim_padded,
        BLOCK_SIZE=k_cache.shape[1] if paged else 0,
        TILE_M=tile.tile_m, TILE_N=tile.tile_n,
        SEARCH_WIDTH=0 if is_uniform else _SEARCH_WIDTH,
        HAS_LEFT=left is not None, HAS_RIGHT=right is not None, **constants,
        IS_SPLIT=is_split, SCORES_AHEAD=tile.scores_ahead, PRECISION=tile.precision,
        num_warps=tile.num_warps, num_stages=num_stages, **tiles.pdl_options(q.device),
    )  # fmt: skip
    if merges:
        states.merge_into(
            *result, sinks=options.sinks, chunks=chunks, cu_seqlens=cu_seqlens_q,
            num_splits=num_chunks, seq_states=seq_states,
        )  # fmt: skip


@op
def paged_prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    block_tables: torch.Tensor, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
    scale: float | None = None, window_size: int | None = None, softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    k_scale: Scale = None, v_scale: Scale = None,
    causal: bool = True, num_splits: int | None = 1,
    out: torch.Tensor | None = None, return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of the last tokens of each sequence over its paged KV cache.

    Sequence i has context_lens[i] tokens. Its last cu_seqlens_q[i + 1] - cu_seqlens_q[i] tokens are
    the queries, and the earlier tokens are its cached prefix. Keys and values of the queries are
    already in the cache. The op covers prefill, prefix hits, chunked prefill, verification of draft
    tokens and mixed batches. A sequence may have one query or none.

    Args:
        q: (total_q, num_q_heads, head_dim), fp16, bf16 or fp32; head_dim 16 to 256.
        k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim) in q's dtype or fp8 e4m3,
            any strides but a contiguous last dimension. num_q_heads is a multiple of num_kv_heads.
        block_tables: (batch, max_blocks) int32. Entries past a sequence's last block or before the
            window of its first query are never read.
        cu_seqlens_q: (batch + 1,) int32, cumulative numbers of queries, from 0. Rows of q at or
            after cu_seqlens_q[-1] (padding of a captured graph) are not computed.
        context_lens: (batch,) int32, tokens per sequence including the queries.
        max_seqlen_q: upper bound of the number of queries per sequence, an int on the host.
        scale, window_size, softcap, alibi_slopes, sinks, k_scale, v_scale: see
            `paged_decode_attention`.
        causal: a query sees no later token (bottom-right aligned). If False it sees every token of
            its sequence.
        num_splits: maximum number of programs that share the keys of a tile of queries. None means
            1 if max_seqlen_q > `kernels.tiles.few_queries` (256 with 32 query and 8 KV heads).
            Otherwise None chooses from the sequence's numbers of queries and keys, the heads and
            the tile; this pays for few queries after a long cached prefix. For any num_splits, a
            sequence's result is bitwise the same whatever else is in the batch.
        out: (total_q, num_q_heads, head_dim) to write to, in q's dtype or fp32; allocated if None.
        return_lse: also return the LSE.

    Returns:
        The output. With return_lse also the LSE: (total_q, num_q_heads) fp32, natural log, with the
        sink. A query that sees no key gets output 0 and LSE -inf; with sinks, LSE = sink.

    Mutates only out. Launches one kernel, or two if keys are divided. Grids depend on shapes and
    max_seqlen_q alone, and the host does not synchronise. So a CUDA graph can capture the call and
    replay it with other lengths and tables.

    Raises:
        ValueError: a shape, dtype, device, stride or option does not fit. For tensors in host
            memory also: cu_seqlens_q does not ascend or contradicts max_seqlen_q, a table is too
            narrow for a context length, or a block id is invalid.
    """
    sizes = _TENSORS(
        k_cache, v_cache, k_scale, v_scale, q, out, context_lens, cu_seqlens_q, block_tables,
        alibi_slopes, sinks,
    )  # fmt: skip
    options = ScoreOptions.checked(
        k_cache, scale, window_size, softcap, alibi_slopes, sinks, k_scale, v_scale,
        ahead=0 if causal else None,
    )  # fmt: skip
    num_splits = checks.check_num_splits("num_splits", num_splits)
    max_seqlen_q = checks.check_cu_seqlens(
        "cu_seqlens_q", cu_seqlens_q, total=sizes.total_q, max_seqlen=max_seqlen_q
    )
    checks.check_block_tables(
        block_tables, context_lens, k_cache,
        query_lens=cu_seqlens_q.diff() if q.is_cpu else 1, window_size=options.window_size,
    )  # fmt: skip
    out, lse = results_of(q, out, return_lse)
    launch_prefill(
        out, lse, q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, options,
        max_seqlen_q=max_seqlen_q, num_splits=num_splits,
    )  # fmt: skip
    return out if lse is None else (out, lse)
