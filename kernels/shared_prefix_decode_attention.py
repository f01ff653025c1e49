"""Decode attention for sequences that share prefixes: each prefix is read once for its whole group.

Plain decode reads a system prompt once per sequence that starts with it. Here attention is split by
keys instead (Hydragen, Juravsky et al., 2024; FlashInfer's cascade): first the queries of a group,
all their heads packed into the rows of one tile, against the group's prefix; then each sequence
against its own suffix (paged_decode_attention.py); both leave split states, which are then merged.

With group members x heads in the rows, the prefix part has the shape of prefill: the work per byte
grows with the group. A program takes TILE_M rows of one KV head of one group (row r = member
r // GROUP_SIZE, head r % GROUP_SIZE) and one split of the prefix; programs of one split are
launched side by side, so that the tiles of a large group find its keys and values in L2. Which
group a tile belongs to is looked up on the device: the launch depends on the batch and the number
of groups only.

A query sits at the end of its suffix, prefix_len + suffix_len - 1, so a window or ALiBi differs
from row to row in the prefix. A split starts at a fixed position, whatever part of it a window
leaves: nothing depends on the rest of the batch, which makes the result batch-invariant at given
split counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.checks import (
    check_block_tables,
    check_grid_dim,
    check_heads,
    check_kv_cache,
    check_out,
    check_score_options,
    check_tensor,
)
from kernels.fp8_cache import (
    KV_DTYPES,
    Scale,
    cache_argument,
    check_cache_scales,
    dtypes_beside,
    from_cache,
    load_scale,
    scale_arguments,
    values_from_cache,
)
from kernels.paged_decode_attention import choose_num_splits, launch_decode
from kernels.primitives import (
    attention_scores,
    dot,
    folds_scale,
    load_block_ids,
    load_rows,
    locate_tile,
    normalise,
    online_softmax_update,
    score_unit,
    slot_offsets,
)
from kernels.split_states import SplitStates
from kernels.tiles import decode_num_splits, padded_dim, shared_prefix_tile, target_of
from kernels.torch_ops import attention_op

_SEARCH_WIDTH = 64


@triton.jit(
    do_not_specialize=["window_size", "num_groups", "num_splits", "num_states", "stride_table"]
)
def _shared_prefix_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    prefix_tables_ptr,
    prefix_lens_ptr,
    group_offsets_ptr,
    suffix_lens_ptr,
    alibi_slopes_ptr,
    k_scale,
    v_scale,
    scale,
    softcap,
    window_size,
    num_groups,
    num_splits,
    num_states,
    stride_q_seq,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table,
    stride_alibi_seq,
    stride_k_scale,
    stride_v_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SEARCH_WIDTH: tl.constexpr,
    USE_WINDOW: tl.constexpr,
    FOLD_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: TILE_M rows of one KV head of one group x one split of its prefix.

    Grid (tiles, num_splits, NUM_KV_HEADS). out and lse are split states, of which the launch writes
    the first num_splits.
    """
    NUM_Q_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
    MASK_DIMS: tl.constexpr = HEAD_DIM_PADDED != HEAD_DIM
    split = tl.program_id(1)
    kv_head = tl.program_id(2)
    group, tile = locate_tile(
        tl.program_id(0), group_offsets_ptr, num_groups, GROUP_SIZE, TILE_M, SEARCH_WIDTH
    )
    first_seq = tl.load(group_offsets_ptr + group)
    num_rows = (tl.load(group_offsets_ptr + group + 1) - first_seq) * GROUP_SIZE
    if tile * TILE_M >= num_rows:
        return

    rows = tile * TILE_M + tl.arange(0, TILE_M)
    row_mask = rows < num_rows
    seqs = first_seq + rows // GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    prefix_len = tl.load(prefix_lens_ptr + group)
    split_tokens = tl.cdiv(tl.cdiv(prefix_len, TILE_N), num_splits) * TILE_N
    begin = split * split_tokens
    end = tl.minimum(begin + split_tokens, prefix_len)

    offs_n = tl.arange(0, TILE_N)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    dim_mask = offs_d < HEAD_DIM
    qo_mask = row_mask[:, None] & dim_mask[None, :]
    q_ptrs = q_ptr + seqs.to(tl.int64)[:, None] * stride_q_seq + heads[:, None] * stride_q_head
    q = tl.load(q_ptrs + offs_d[None, :], mask=qo_mask, other=0.0)  # [TILE_M, HEAD_DIM_PADDED]
    alibi_slopes, context_lens = 0.0, prefix_len
    if HAS_ALIBI:
        slope_ptrs = alibi_slopes_ptr + seqs.to(tl.int64) * stride_alibi_seq + heads
        alibi_slopes = tl.load(slope_ptrs, mask=row_mask, other=0.0)[:, None]
    if HAS_ALIBI or USE_WINDOW:
        context_lens += tl.load(suffix_lens_ptr + seqs, mask=row_mask, other=0)[:, None]

    # [begin, full_begin): tiles that some rows' windows leave out; [full_begin, full_end): whole
    # tiles that all rows see. Tiles that no row sees are skipped.
    first_seen, full_begin = begin, begin
    if USE_WINDOW:
        first_of_row = context_lens - window_size  # [TILE_M, 1]
        last_seen = tl.max(tl.where(row_mask[:, None], first_of_row, begin))
        first_seen = tl.min(tl.where(row_mask[:, None], first_of_row, end))
        full_begin += tl.cdiv(tl.maximum(last_seen - begin, 0), TILE_N) * TILE_N
        begin += tl.maximum(first_seen - begin, 0) // TILE_N * TILE_N
    full_end = full_begin + tl.maximum(end - full_begin, 0) // TILE_N * TILE_N

    if k_scale is not None:
        scale *= load_scale(k_scale, kv_head, stride_k_scale)
    unit = score_unit(scale, FOLD_SCALE)
    k_ptr = k_cache_ptr + kv_head.to(tl.int64) * stride_k_head
    v_ptr = v_cache_ptr + kv_head.to(tl.int64) * stride_v_head
    table_ptr = prefix_tables_ptr + group.to(tl.int64) * stride_table
    acc = tl.zeros([TILE_M, HEAD_DIM_PADDED], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)

    for REGION in tl.static_range(0 if USE_WINDOW else 1, 3):
        if REGION == 0:
            loop_begin, loop_end = begin, tl.minimum(full_begin, end)
        elif REGION == 1:
            loop_begin, loop_end = full_begin, full_end
        else:
            loop_begin, loop_end = full_end, end
        for start in tl.range(loop_begin, loop_end, TILE_N):
            positions = start + offs_n
            token_mask = positions < end
            if REGION == 0:
                token_mask &= positions >= first_seen
            block_ids = load_block_ids(table_ptr, positions, token_mask, BLOCK_SIZE, REGION != 1)
            k_rows = slot_offsets(block_ids, positions, stride_k_block, stride_k_slot, BLOCK_SIZE)
            v_rows = slot_offsets(block_ids, positions, stride_v_block, stride_v_slot, BLOCK_SIZE)
            k_ptrs = k_ptr + k_rows[:, None] + offs_d[None, :]  # [TILE_N, HEAD_DIM_PADDED]
            v_ptrs = v_ptr + v_rows[:, None] + offs_d[None, :]  # [TILE_N, HEAD_DIM_PADDED]
            k = load_rows(k_ptrs, token_mask, dim_mask, REGION != 1, MASK_DIMS)
            v = load_rows(v_ptrs, token_mask, dim_mask, REGION != 1, MASK_DIMS)

            qk = dot(q, tl.trans(from_cache(k, q.dtype)), None, PRECISION)  # [TILE_M, TILE_N]
            distances = context_lens - 1 - positions[None, :]
            scores = attention_scores(
                qk, scale, softcap, alibi_slopes, distances, FOLD_SCALE, HAS_SOFTCAP, HAS_ALIBI
            )
            if REGION != 1:
                visible = token_mask[None, :]
                if REGION == 0:
                    visible = visible & (positions[None, :] >= first_of_row)
                scores = tl.where(visible, scores, float("-inf"))
            acc, row_max, row_sum = online_softmax_update(
                scores, unit, values_from_cache(v, q.dtype), acc, row_max, row_sum, PRECISION
            )

    if v_scale is not None:
        acc *= load_scale(v_scale, kv_head, stride_v_scale)
    out, lse = normalise(acc, row_max, row_sum)
    states = (seqs.to(tl.int64) * NUM_Q_HEADS + heads) * num_states + split
    tl.store(out_ptr + states[:, None] * HEAD_DIM + offs_d[None, :], out, mask=qo_mask)
    tl.store(lse_ptr + states, lse, mask=row_mask)


def _check_groups(
    group_offsets: torch.Tensor, *, num_groups: int, batch: int, device: torch.device
) -> None:
    check_tensor(
        "group_offsets",
        group_offsets,
        {"num_groups + 1": num_groups + 1},
        dtypes=(torch.int32,),
        device=device,
    )
    if device.type == "cpu":
        offsets = group_offsets.tolist()
        if offsets[0] != 0 or offsets[-1] != batch or offsets != sorted(offsets):
            raise ValueError(
                f"group_offsets: expected values that ascend from 0 to batch={batch}, got {offsets}"
            )


def _check_prefixes(
    prefix_block_tables: torch.Tensor,
    prefix_lens: torch.Tensor,
    group_offsets: torch.Tensor,
    suffix_lens: torch.Tensor,
    k_cache: torch.Tensor,
    window_size: int | None,
) -> None:
    """Check prefix tables like block tables, apart from prefixes that nobody looks at."""
    num_groups = group_offsets.shape[0] - 1
    if suffix_lens.device.type == "cpu":
        sizes = group_offsets.diff()
        used = sizes > 0
        if window_size is not None:  # what the member with the shortest suffix sees of the prefix
            parts = suffix_lens.split(sizes.tolist())
            window_size = torch.tensor([window_size - int(min(part, default=0)) for part in parts])
            used &= window_size > 0
        prefix_lens = prefix_lens.where(used, 0)
    check_block_tables(
        prefix_block_tables,
        prefix_lens,
        k_cache,
        batch=num_groups,
        device=k_cache.device,
        window_size=window_size,
        names=("prefix_block_tables", "prefix_lens", "num_groups"),
    )


@attention_op
def shared_prefix_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    prefix_block_tables: torch.Tensor,
    prefix_lens: torch.Tensor,
    group_offsets: torch.Tensor,
    suffix_block_tables: torch.Tensor,
    suffix_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window_size: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    num_prefix_splits: int | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token per sequence, in groups of sequences that share a prefix.

    The same result, up to rounding, as paged_decode_attention of every sequence over the tokens of
    its group's prefix followed by those of its suffix, but a prefix is read once for its group.

    Args:
        q: (batch, num_q_heads, head_dim), fp16, bf16 or fp32; head_dim 16 to 256. batch <= 65535.
            The members of a group are neighbours.
        k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim) in q's dtype or fp8 e4m3,
            any strides but a contiguous last dimension. num_q_heads is a multiple of num_kv_heads.
        prefix_block_tables: (num_groups, max_prefix_blocks) int32, blocks of each group's prefix.
        prefix_lens: (num_groups,) int32, tokens of each prefix, not necessarily whole blocks. 0 for
            sequences that share nothing: any number of them may form one such group.
        group_offsets: (num_groups + 1,) int32, the first sequence of each group, from 0 to batch.
            A group may be empty (padding of a captured graph); its prefix is not looked at.
        suffix_block_tables: (batch, max_blocks) int32, blocks of each sequence's own tokens, which
            start at slot 0 of a block of their own.
        suffix_lens: (batch,) int32, tokens of its own of each sequence, including the current one.
        scale: of the scores; head_dim ** -0.5 if None.
        window_size: tokens the query sees, itself included, in suffix and prefix; None for all.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        alibi_slopes: (num_q_heads,) or (batch, num_q_heads) fp32; adds -slope * distance.
        sinks: (num_q_heads,) logits that join the softmax denominator once and attract no value.
        k_scale, v_scale: of an fp8 cache, whose keys and values are what it holds times these: a
            number, or an fp32 tensor of one element or of num_kv_heads. None for 1.
        num_prefix_splits: programs that share a prefix; num_splits: programs that share a suffix.
            At given numbers a sequence's result is bitwise the same whatever else is in the batch.
            None chooses from shapes and the GPU.
        out: (batch, num_q_heads, head_dim) to write to, in q's dtype or fp32; allocated if None.
        return_lse: also return the LSE.

    Returns:
        The output, and with return_lse the LSE: (batch, num_q_heads) fp32, natural log, the sink
        included. Neither prefix nor suffix gives zeros and -inf. Table entries past a length, or
        before the window of all that share them, are never read.

    Mutates only out. Launches three kernels on grids that depend on shapes alone, without host
    synchronisation: the call can be captured in a CUDA graph and replayed with other groups,
    lengths and tables.

    Raises:
        ValueError: a shape, dtype, device, stride or option that does not fit; where the tensors
            lie in host memory also group offsets that do not ascend from 0 to batch, a table too
            narrow for its length, or an invalid block id.
    """
    check_kv_cache(k_cache, v_cache, dtypes=KV_DTYPES)
    check_cache_scales(k_scale, v_scale, k_cache)
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    device = k_cache.device
    dims = {"batch": None, "num_q_heads": None, "head_dim": head_dim}
    check_tensor("q", q, dims, dtypes=dtypes_beside(k_cache), device=device)
    check_heads(q, k_cache)
    batch, num_q_heads, _ = q.shape
    check_grid_dim("q", "batch", batch)
    int32 = (torch.int32,)
    check_tensor("prefix_lens", prefix_lens, {"num_groups": None}, dtypes=int32, device=device)
    num_groups = prefix_lens.shape[0]
    _check_groups(group_offsets, num_groups=num_groups, batch=batch, device=device)
    check_score_options(
        batch=batch,
        num_q_heads=num_q_heads,
        device=device,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        scale=scale,
    )
    check_block_tables(
        suffix_block_tables,
        suffix_lens,
        k_cache,
        batch=batch,
        device=device,
        window_size=window_size,
        names=("suffix_block_tables", "suffix_lens", "batch"),
    )
    _check_prefixes(
        prefix_block_tables, prefix_lens, group_offsets, suffix_lens, k_cache, window_size
    )
    for name, number in (("num_prefix_splits", num_prefix_splits), ("num_splits", num_splits)):
        if number is not None:
            check_grid_dim(name, None, number)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        check_out(out, q)
    fp32 = {"dtype": torch.float32, "device": device}
    lse = torch.empty(batch, num_q_heads, **fp32) if return_lse else None
    if batch == 0:
        return (out, lse) if return_lse else out

    group_size = num_q_heads // num_kv_heads
    target = target_of(device)
    head_dim_padded = padded_dim(head_dim)
    tile = shared_prefix_tile(head_dim_padded, q.dtype, target, k_cache.itemsize)
    num_tiles = batch * group_size // tile.tile_m + num_groups
    if num_prefix_splits is None:
        max_tokens = prefix_block_tables.shape[1] * block_size
        num_prefix_splits = decode_num_splits(
            num_tiles * num_kv_heads, max_tokens, tile.tile_n, target, resident_programs=1
        )
    scale = head_dim**-0.5 if scale is None else scale
    k_scale, stride_k_scale = scale_arguments(k_scale)
    v_scale, stride_v_scale = scale_arguments(v_scale)
    num_splits = num_splits or choose_num_splits(q, k_cache, suffix_block_tables, window_size)
    states = SplitStates.empty(q, num_prefix_splits + num_splits)
    _shared_prefix_kernel[(num_tiles, num_prefix_splits, num_kv_heads)](
        states.out,
        states.lse,
        q,
        cache_argument(k_cache),
        cache_argument(v_cache),
        prefix_block_tables,
        prefix_lens,
        group_offsets,
        suffix_lens,
        alibi_slopes,
        k_scale,
        v_scale,
        scale,
        softcap,
        0 if window_size is None else window_size,
        num_groups,
        num_prefix_splits,
        states.num_splits,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        prefix_block_tables.stride(0),
        alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0,
        stride_k_scale,
        stride_v_scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        BLOCK_SIZE=block_size,
        TILE_M=tile.tile_m,
        TILE_N=tile.tile_n,
        SEARCH_WIDTH=_SEARCH_WIDTH,
        USE_WINDOW=window_size is not None,
        FOLD_SCALE=folds_scale(scale, softcap, alibi_slopes),
        HAS_SOFTCAP=softcap > 0,
        HAS_ALIBI=alibi_slopes is not None,
        PRECISION=tile.precision,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    launch_decode(
        states.out,
        states.lse,
        q,
        k_cache,
        v_cache,
        suffix_block_tables,
        suffix_lens,
        scale=scale,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        num_splits=num_splits,
        first_state=num_prefix_splits,
    )
    states.merge_into(out, lse, sinks=sinks)
    return (out, lse) if return_lse else out
