"""Attention of one new token per sequence over a paged KV cache.

Decode reads every cached key and value once and computes little per byte, so it is memory-bound.
The query heads that share a KV head (GQA) are the rows of one tile and share its loads. The tokens
of a sequence are divided into chunks (flash-decoding), and a second kernel merges the chunks'
partial states (split_states.py).

The grid is persistent. Programs 0 to n - 1 take a chunk each, then programs n - 1 to 0, and so on.
They find their chunks by scanning the context lengths. So no program idles because of one long
sequence among short ones, or because of padding in a captured graph. The chunks of a sequence
depend only on its length (`kernels.tiles.Chunking`), so its result is bitwise the same in any
batch.

A program processes a chunk in tiles of TILE_N tokens, whatever the block size. It looks up the
block id of every token, or one id per tile if no tile can cross the end of a block. The compiler's
pipeliner fetches ids, keys and values some tiles ahead with asynchronous copies. The last, shorter
tile is in the same loop: a separate loop would wait twice for memory, which costs more than masks
in every tile. A window is the token interval [context_len - window_size, context_len), because
decode has one query. Tiles start at the window's first token.
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
    has_value_pairs,
    load_scale,
    queries_for_cache,
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
    natural_max,
    normalise,
    online_softmax_weights,
    row_ptrs,
    score_unit,
    wide_product,
)
from kernels.score_options import ScoreOptions
from kernels.split_states import SplitStates, chunks_of, results_of

_TENSORS = attention_spec(
    "batch",
    Arg("block_tables", "batch max_blocks", INT32),
    Arg("context_lens", "batch", INT32),
)


@triton.jit
def _work_of(
    num_keys, window_size, min_tiles, max_chunks,
    HEAD_TILES: tl.constexpr, TILE_N: tl.constexpr, USE_WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the number of work items of rows. num_keys < 0: no row."""
    if USE_WINDOW:
        num_keys = tl.minimum(num_keys, window_size)
    _, num_chunks = chunks_of(num_keys, min_tiles, max_chunks, TILE_N)
    return tl.where(num_keys < 0, 0, num_chunks * HEAD_TILES)


@triton.jit
def _locate(
    row, place, context_lens_ptr, batch, window_size, min_tiles, max_chunks,
    HEAD_TILES: tl.constexpr, TILE_N: tl.constexpr, USE_WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Return the row of the work at `place`, and the place within this row. The given place is
    counted from the beginning of the given row. Past the last work the row is >= batch.

    Every warp searches 64 rows at a time, without shared memory or barriers.
    """
    if not IS_SPLIT:
        row += (place.to(tl.uint32) // HEAD_TILES).to(tl.int32)
        return row, (place.to(tl.uint32) % HEAD_TILES).to(tl.int32)
    lanes = tl.arange(0, 32)
    work = tl.zeros([32], tl.int32)
    work_32 = work
    searching = row < batch
    while searching:
        rows, rows_32 = row + lanes, row + 32 + lanes
        work = tl.load(context_lens_ptr + rows, mask=rows < batch, other=-1)
        work_32 = tl.load(context_lens_ptr + rows_32, mask=rows_32 < batch, other=-1)
        work = _work_of(work, window_size, min_tiles, max_chunks, HEAD_TILES, TILE_N, USE_WINDOW)
        work_32 = _work_of(
            work_32, window_size, min_tiles, max_chunks, HEAD_TILES, TILE_N, USE_WINDOW
        )
        total = tl.sum(work + work_32, axis=0)
        searching = place >= total
        if searching:
            place -= total
            row += 64
            searching = row < batch
    if row < batch:
        # Bisect the 64 rows. Constants of a cumsum would take registers everywhere.
        for step in tl.static_range(6):
            lower, upper = work, work_32
            if step > 0:
                is_upper = (lanes & (32 >> step)) != 0
                lower = tl.where(is_upper, 0, work)
                upper = tl.where(is_upper, work, 0)
            total = tl.sum(lower, axis=0)
            work = tl.where(place >= total, upper, lower)
            if place >= total:
                place -= total
                row += 32 >> step
    return row, place


@triton.jit(
    do_not_specialize=[
        "window_size", "batch", "min_tiles", "max_chunks", "first_state", "num_states",
        "stride_table",
    ]
)  # fmt: skip
def _paged_decode_kernel(
    out_ptr, lse_ptr, counts_ptr, q_ptr, k_cache_ptr, v_cache_ptr,
    block_tables_ptr, context_lens_ptr,
    alibi_slopes_ptr, sinks_ptr, k_scale, stride_k_scale, v_scale, stride_v_scale,
    scale, softcap, window_size,
    batch, min_tiles, max_chunks, first_state, num_states,
    stride_out_seq, stride_out_head,
    stride_q_seq, stride_q_head,
    stride_k_block, stride_k_slot, stride_k_head,
    stride_v_block, stride_v_slot, stride_v_head,
    stride_table, stride_alibi_seq,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    USE_WINDOW: tl.constexpr, NEGATIVE_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    IS_SPLIT: tl.constexpr, PAIRED_VALUES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program processes work items one after another: TILE_M query heads of one KV head x one
    chunk of one sequence.

    IS_SPLIT: out and lse are the acc and sums of split states; chunk 0 of a row is its state number
    first_state. counts: their numbers. Otherwise every sequence has one chunk, out and lse are the
    results, and lse_ptr may be None.
    Strides of the caches are in bytes.
    BLOCK_SIZE 0: not paged. Entry 0 of a table row is the contiguous piece that holds the sequence.
    PAIRED_VALUES: read the values of an fp8 cache in pairs. Even and odd elements have separate
    accumulators, which are joined at the end.
    """
    await_launches_before(PDL)
    NUM_Q_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
    MASK_DIMS: tl.constexpr = HEAD_DIM_PADDED != HEAD_DIM
    PAIR: tl.constexpr = 2 if PAIRED_VALUES else 1
    M_TILES: tl.constexpr = (GROUP_SIZE + TILE_M - 1) // TILE_M
    HEAD_TILES: tl.constexpr = NUM_KV_HEADS * M_TILES
    # Whether no tile crosses the end of a block. Then only a tile's first token is looked up.
    # With a window, tiles start anywhere in a block.
    IN_ONE_PIECE: tl.constexpr = BLOCK_SIZE % TILE_N == 0 and not (BLOCK_SIZE and USE_WINDOW)
    offs_n = tl.arange(0, TILE_N)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    dim_mask = offs_d < HEAD_DIM
    offs_v = tl.arange(0, HEAD_DIM_PADDED // PAIR)

    # place: of the next item, counted from the first item of `seq`. remaining: items until the end.
    place = tl.program_id(0)
    remaining = batch * HEAD_TILES * (num_states - first_state if IS_SPLIT else 1) - place
    # Programs take items in alternating order, so two steps in a row add up to two rounds.
    step = 2 * (tl.num_programs(0) - place) - 1
    seq, place = _locate(
        place * 0, place, context_lens_ptr, batch, window_size, min_tiles, max_chunks,
        HEAD_TILES, TILE_N, USE_WINDOW, IS_SPLIT,
    )  # fmt: skip
    context_len = 0
    if IS_SPLIT:  # later chunks of a sequence need not wait for its length
        context_len = tl.load(context_lens_ptr + seq, mask=seq < batch, other=0)
    while seq < batch:
        if not IS_SPLIT:
            context_len = tl.load(context_lens_ptr + seq)
        # There is one query, so a window moves the first token and needs no mask.
        first = tl.maximum(context_len - window_size, 0) if USE_WINDOW else 0
        chunk_tokens, num_chunks = chunks_of(context_len - first, min_tiles, max_chunks, TILE_N)
        if not IS_SPLIT:
            num_chunks = 1
        chunk = (place.to(tl.uint32) // HEAD_TILES).to(tl.int32)
        head_tile = place - chunk * HEAD_TILES
        kv_head = head_tile // M_TILES
        offs_m = head_tile % M_TILES * TILE_M + tl.arange(0, TILE_M)
        begin = first + chunk * chunk_tokens
        end = tl.minimum(begin + chunk_tokens, context_len) if IS_SPLIT else context_len
        # The heads of a group share keys, so the rows of a tile share loads. A tile has at least 16
        # rows, like a tensor-core product. Loads take longer than the products of unused rows.
        heads = kv_head * GROUP_SIZE + offs_m
        head_mask = offs_m < GROUP_SIZE
        qo_mask = head_mask[:, None] & dim_mask[None, :]
        # Every sequence has a chunk 0, even without tokens. Its program counts the states.
        if IS_SPLIT and chunk == 0:
            counts_ptrs = counts_ptr + seq * NUM_Q_HEADS + heads
            tl.store(counts_ptrs, first_state + num_chunks, mask=head_mask)
        q_ptrs = q_ptr + wide_product(seq, stride_q_seq)
        q_ptrs += wide_product(heads, stride_q_head)[:, None]
        q = tl.load(q_ptrs + offs_d[None, :], mask=qo_mask, other=0.0)  # [TILE_M, HEAD_DIM_PADDED]
        alibi_slopes = 0.0
        if HAS_ALIBI:
            slope_ptrs = alibi_slopes_ptr + wide_product(seq, stride_alibi_seq) + heads
            alibi_slopes = tl.load(slope_ptrs, mask=head_mask, other=0.0)[:, None]

        # The K scale is the same for all keys of a head, so it joins the scale of the scores.
        q, q_unit = queries_for_cache(q, k_cache_ptr)
        qk_scale = scale * q_unit
        if k_scale is not None:
            qk_scale *= load_scale(k_scale, kv_head, stride_k_scale)
        # Weights are exp2 of scores times log2(e). Where possible, the scale joins this factor as
        # the unit, so scaling takes no instruction of its own.
        unit = score_unit(qk_scale, softcap, HAS_SOFTCAP, HAS_ALIBI)
        k_ptr = add_bytes(k_cache_ptr, wide_product(kv_head, stride_k_head))
        v_ptr = add_bytes(v_cache_ptr, wide_product(kv_head, stride_v_head))
        table_ptr = block_tables_ptr + wide_product(seq, stride_table)
        if BLOCK_SIZE == 0:
            ids = tl.load(table_ptr)
        acc = tl.zeros([TILE_M, HEAD_DIM_PADDED // PAIR], tl.float32)
        acc_odd = acc
        row_max = tl.full([TILE_M], float("-inf"), tl.float32)
        # One sum per column: warps compute different columns and need not exchange sums per tile.
        row_sum = tl.zeros([TILE_M, TILE_N], tl.float32)
        first_head = seq * NUM_Q_HEADS + kv_head * GROUP_SIZE + head_tile % M_TILES * TILE_M
        first_row_state = wide_product(first_head, num_states) + first_state
        v_factor = None
        if v_scale is not None:
            v_factor = load_scale(v_scale, kv_head, stride_v_scale)

        # The addresses of rows depend on block ids. So the pipeliner loads the ids still earlier
        # than the rows, and no tile waits for both in turn.
        for start in tl.range(begin, end, TILE_N):
            positions = start + offs_n
            token_mask = offs_n < end - start
            # Rows in one piece are one slot stride apart, so one id and one division suffice.
            slots = start + tl.arange(0, 1) if IN_ONE_PIECE else positions
            if BLOCK_SIZE:
                ids = load_block_ids(table_ptr, slots, token_mask, BLOCK_SIZE, not IN_ONE_PIECE)
                if TILE_N % BLOCK_SIZE == 0 and not IN_ONE_PIECE:
                    # Slots in a block are equal in every tile, so their division leaves the loop.
                    # LLVM sees equal elements only in a new range.
                    slots = first + tl.arange(TILE_N, 2 * TILE_N)
            k_rows = row_ptrs(k_ptr, ids, slots, stride_k_block, stride_k_slot, BLOCK_SIZE)
            v_rows = row_ptrs(v_ptr, ids, slots, stride_v_block, stride_v_slot, BLOCK_SIZE)
            k_ptrs = k_rows[:, None] + offs_d[None, :]  # [TILE_N, HEAD_DIM_PADDED]
            if PAIRED_VALUES:
                v_rows = v_rows.to(tl.pointer_type(tl.uint16))
            v_ptrs = v_rows[:, None] + offs_v[None, :]  # [TILE_N, HEAD_DIM_PADDED // PAIR]
            if IN_ONE_PIECE:
                k_ptrs = add_bytes(k_ptrs, wide_product(offs_n, stride_k_slot)[:, None])
                v_ptrs = add_bytes(v_ptrs, wide_product(offs_n, stride_v_slot)[:, None])
            # Full tiles are masked too: a loop for the last tile would wait for memory twice more.
            # Masked values are 0, because weight 0 times the NaN of an unused slot is NaN.
            k = load_rows(k_ptrs, token_mask, dim_mask, True, MASK_DIMS)
            v = load_rows(v_ptrs, token_mask, offs_v < HEAD_DIM // PAIR, True, MASK_DIMS)

            # fp8 is converted only here, so the copies to shared memory move one byte per element.
            qk = dot(q, tl.trans(from_cache(k, q.dtype)), None, PRECISION)  # [TILE_M, TILE_N]
            distances = (context_len - 1 - positions)[None, :]
            scores = attention_scores(
                qk, qk_scale, softcap, alibi_slopes, distances,
                NEGATIVE_SCALE, HAS_SOFTCAP, HAS_ALIBI,
            )  # fmt: skip
            # The product with a masked key is 0, a valid score. Only -inf gives weight 0.
            scores = tl.where(token_mask[None, :], scores, float("-inf"))
            p, alpha, row_max, row_sum = online_softmax_weights(scores, unit, row_max, row_sum)
            if PAIRED_VALUES:
                # mma.sync needs values transposed on the way from shared memory to registers. The
                # instruction for that moves two-byte elements. Bytes would be loaded one by one.
                even = values_from_cache((v & 0xFF).to(tl.uint8), q.dtype)
                odd = values_from_cache((v >> 8).to(tl.uint8), q.dtype)
                acc = accumulate(p, even, acc, alpha, PRECISION)
                acc_odd = accumulate(p, odd, acc_odd, alpha, PRECISION)
            else:
                acc = accumulate(p, values_from_cache(v, q.dtype), acc, alpha, PRECISION)

        if PAIRED_VALUES:  # joined once, because joining moves data between threads
            acc = tl.reshape(tl.join(acc, acc_odd), (TILE_M, HEAD_DIM_PADDED))
        if v_factor is not None:
            acc *= v_factor
        row_max, row_sum = natural_max(row_max, unit), tl.sum(row_sum, axis=1)
        if IS_SPLIT:
            # One wide address and narrow offsets take few registers from the loop over tiles.
            state, offsets = first_row_state + chunk, tl.arange(0, TILE_M) * num_states
            elements = offsets[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(out_ptr + state * HEAD_DIM + elements, acc, mask=qo_mask)
            sums_ptrs = lse_ptr + 2 * state + 2 * offsets
            tl.store(sums_ptrs, row_max, mask=head_mask)
            tl.store(sums_ptrs + 1, row_sum, mask=head_mask)
        else:
            if sinks_ptr is not None:
                sinks = tl.load(sinks_ptr + heads, mask=head_mask, other=0.0)
                acc, row_max, row_sum = add_sinks(acc, row_max, row_sum, sinks)
            out, lse = normalise(acc, row_max, row_sum)
            out_ptrs = out_ptr + wide_product(seq, stride_out_seq)
            out_ptrs += wide_product(heads, stride_out_head)[:, None]
            tl.store(out_ptrs + offs_d[None, :], cast(out, out_ptr.dtype.element_ty), mask=qo_mask)
            if lse_ptr is not None:
                tl.store(lse_ptr + seq * NUM_Q_HEADS + heads, lse, mask=head_mask)
        place += step
        remaining -= step
        step = 2 * tl.num_programs(0) - step
        if remaining <= 0:  # saves a search
            seq = batch
        if place >= num_chunks * HEAD_TILES:
            seq, place = _locate(
                seq, place, context_lens_ptr, batch, window_size, min_tiles, max_chunks,
                HEAD_TILES, TILE_N, USE_WINDOW, IS_SPLIT,
            )  # fmt: skip
            if IS_SPLIT:
                context_len = tl.load(context_lens_ptr + seq, mask=seq < batch, other=0)


def decode_chunking(
    q: torch.Tensor, k_cache: torch.Tensor, block_tables: torch.Tensor,
    window_size: int | None, num_splits: int | None,
) -> tuple[tiles.AttentionTile, tiles.Chunking, int]:  # fmt: skip
    """Return `launch_decode`'s plan: tile, chunking, and the maximum number of chunks that the
    tables allow."""
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    group_size, target = num_q_heads // num_kv_heads, tiles.target_of(q.device)
    tile = tiles.decode_tile(
        group_size, tiles.padded_dim(head_dim), q.dtype, target, k_cache.itemsize
    )
    max_tokens = block_tables.shape[-1] * k_cache.shape[1]
    max_tokens = max_tokens if window_size is None else min(max_tokens, window_size)
    chunks = tiles.chunking(num_kv_heads, num_splits)
    return tile, chunks, chunks.max_count(max_tokens, tile.tile_n)


def launch_decode(
    out: torch.Tensor, lse: torch.Tensor | None,
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    block_tables: torch.Tensor, context_lens: torch.Tensor, options: ScoreOptions,
    *,
    plan: tuple[tiles.AttentionTile, tiles.Chunking, int],
    paged: bool = True, states: SplitStates | None = None, first_state: int = 0,
) -> None:  # fmt: skip
    """Launch the kernel on checked arguments of `paged_decode_attention`. Further arguments:

    plan: see `decode_chunking`.
    paged: False if the keys of a sequence are contiguous. The caches are then (num_pieces, slots,
        num_kv_heads, head_dim), and block_tables is (batch, 1), the piece of each sequence.
    states, first_state: split states to merge. This kernel writes a row's states first_state,
        first_state + 1, ...
    """
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group_size, target = num_q_heads // num_kv_heads, tiles.target_of(q.device)
    tile, chunks, num_chunks = plan
    if states is None and num_chunks > 1:
        states = SplitStates.empty(q, num_chunks)
    results = (out, lse, None) if states is None else (states.acc, states.sums, states.counts)
    pieces = batch * num_chunks * num_kv_heads * tiles.cdiv(group_size, tile.tile_m)
    programs = tiles.PROGRAMS_PER_MULTIPROCESSOR * target.num_multiprocessors
    launch(_paged_decode_kernel, (min(pieces, programs),),
        *results, q, cache_argument(k_cache), cache_argument(v_cache), block_tables, context_lens,
        *options.kernel_arguments(), options.window_size or 0,
        batch, chunks.min_tiles, chunks.max_chunks,
        first_state, 0 if states is None else states.sums.shape[2],
        *out.stride()[:2], *q.stride()[:2], *byte_strides(k_cache), *byte_strides(v_cache),
        block_tables.stride(0), options.alibi_stride,
        NUM_KV_HEADS=num_kv_heads, GROUP_SIZE=group_size,
        HEAD_DIM=head_dim, HEAD_DIM_PADDED=tiles.padded_dim(head_dim),
        BLOCK_SIZE=k_cache.shape[1] if paged else 0,
        TILE_M=tile.tile_m, TILE_N=tile.tile_n,
        USE_WINDOW=options.window_size is not None, **options.kernel_constants(),
        IS_SPLIT=states is not None,
        PAIRED_VALUES=has_value_pairs(v_cache),
        PRECISION=tile.precision,
        **tiles.decode_options(tile, target), **tiles.pdl_options(q.device),
    )  # fmt: skip
    if states is not None:
        states.merge_into(out, lse, sinks=options.sinks)


@op
def paged_decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    block_tables: torch.Tensor, context_lens: torch.Tensor,
    *,
    scale: float | None = None, window_size: int | None = None, softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    k_scale: Scale = None, v_scale: Scale = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None, return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of one query token per sequence over its paged KV cache.

    This is the decode step of PagedAttention (Kwon et al., 2023), computed by flash-decoding (Dao
    et al., 2023). A sequence's query is its last token, at position context_len - 1. The key and
    value of this token are already in the cache.

    Args:
        q: (batch, num_q_heads, head_dim), fp16, bf16 or fp32; head_dim 16 to 256.
        k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim) in q's dtype or fp8 e4m3,
            any strides but a contiguous last dimension. num_q_heads is a multiple of num_kv_heads.
        block_tables: (batch, max_blocks) int32. Entries past a sequence's last block or before its
            window are never read.
        context_lens: (batch,) int32, tokens per sequence including the current token.
        scale: factor of the scores. None: head_dim ** -0.5.
        window_size: number of tokens that the query sees, including itself. None: all tokens.
        softcap: scores become softcap * tanh(score / softcap). 0: no softcap.
        alibi_slopes: (num_q_heads,) or (batch, num_q_heads) fp32; adds -slope * distance to scores.
        sinks: (num_q_heads,) logits that join the softmax denominator but carry no value (gpt-oss).
        k_scale, v_scale: an fp8 cache holds key / k_scale and value / v_scale. A number, or an fp32
            tensor with one or num_kv_heads elements. None: 1.
        num_splits: maximum number of chunks that a sequence's tokens are divided into. None chooses
            from the sequence's length, num_kv_heads and the tile. For any num_splits, a sequence's
            result is bitwise the same whatever else is in the batch and however wide its table is.
        out: (batch, num_q_heads, head_dim) to write to, in q's dtype or fp32; allocated if None.
        return_lse: also return the LSE.

    Returns:
        The output. With return_lse also the LSE: (batch, num_q_heads) fp32, natural log, with the
        sink. A context length of 0 gives output 0 and LSE -inf; with sinks, LSE = sink.

    Mutates only out. Launches one kernel, or two if the tables allow more than one chunk. Grids
    depend on shapes and the GPU alone, and the host does not synchronise. So a CUDA graph can
    capture the call and replay it with other context lengths and tables.

    Raises:
        ValueError: a shape, dtype, device, stride or option does not fit. For tensors in host
            memory also: a table is too narrow for a context length, or a block id is invalid.
    """
    sizes = _TENSORS(
        k_cache, v_cache, k_scale, v_scale, q, out, block_tables, context_lens, alibi_slopes, sinks,
    )  # fmt: skip
    options = ScoreOptions.checked(
        k_cache, scale, window_size, softcap, alibi_slopes, sinks, k_scale, v_scale
    )
    num_splits = checks.check_num_splits("num_splits", num_splits)
    checks.check_block_tables(block_tables, context_lens, k_cache, window_size=options.window_size)
    out, lse = results_of(q, out, return_lse)
    if sizes.batch:
        plan = decode_chunking(q, k_cache, block_tables, options.window_size, num_splits)
        launch_decode(out, lse, q, k_cache, v_cache, block_tables, context_lens, options, plan=plan)
    return out if lse is None else (out, lse)
