"""Choice of the blocks that decode reads, by bounds of the attention scores (Quest, Tang et al.,
2024).

The keys k of a block lie between low and high in every dimension. So no key has a larger product
with a query q than

    score = sum_d max(q_d low_d, q_d high_d)

A first kernel computes the scores of all blocks but the last of each sequence. A second kernel
keeps the largest: it finds the k-th largest score bit by bit, then compacts the table. Both results
are exact and the same in any batch.
"""

import torch
import triton
import triton.language as tl

from kernels import checks
from kernels.checks import FLOAT_DTYPES, HEAD_RULES, INT32, Arg, TensorSpec, same_dtype
from kernels.launch import launch
from kernels.tiles import cdiv, next_power_of_2, padded_dim, store_tile
from kernels.torch_ops import functional_op

_MAX_COLUMNS = 2**16
_TENSORS = TensorSpec(
    Arg("block_bounds", "num_blocks 2 num_kv_heads head_dim", FLOAT_DTYPES),
    Arg("q", "batch num_q_heads head_dim", same_dtype("block_bounds")),
    Arg("block_tables", "batch max_blocks", INT32),
    Arg("context_lens", "batch", INT32),
    rules=(
        *checks.cache_rules("block_bounds"),
        *HEAD_RULES,
        checks.bounded("block_tables", "max_blocks", 0, _MAX_COLUMNS),
    ),
)


@triton.jit(do_not_specialize=["max_blocks", "num_selected", "block_size"])
def _block_scores_kernel(
    scores_ptr, q_ptr, bounds_ptr, block_tables_ptr, context_lens_ptr,
    max_blocks, num_selected, block_size,
    stride_q_seq, stride_q_head, stride_bounds_block, stride_bounds_kind, stride_bounds_head,
    stride_table,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: TILE_BLOCKS blocks of a sequence and KV head. Grid (batch, num_kv_heads, tiles).

    Sequences that keep all their blocks get no scores.
    """
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    num_blocks = tl.cdiv(tl.load(context_lens_ptr + seq), block_size)
    if (num_blocks > num_selected) & (tl.program_id(2) * TILE_BLOCKS < num_blocks - 1):
        block_mask = columns < num_blocks - 1
        table_ptr = block_tables_ptr + seq * stride_table
        blocks = tl.load(table_ptr + columns, mask=block_mask, other=0).to(tl.int64)
        offs_d = tl.arange(0, HEAD_DIM_PADDED)
        mask = block_mask[:, None] & (offs_d < HEAD_DIM)[None, :]  # [TILE_BLOCKS, HEAD_DIM_PADDED]
        rows = blocks * stride_bounds_block + head * stride_bounds_head
        ptrs = bounds_ptr + rows[:, None] + offs_d[None, :]
        low = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(ptrs + stride_bounds_kind, mask=mask, other=0.0).to(tl.float32)
        best = tl.full([TILE_BLOCKS], float("-inf"), tl.float32)
        q_ptr += seq * stride_q_seq + head * GROUP_SIZE * stride_q_head
        for _ in range(GROUP_SIZE):
            q = tl.load(q_ptr + offs_d, mask=offs_d < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
            products = tl.maximum(q * low, q * high, propagate_nan=tl.PropagateNan.ALL)
            scores = tl.sum(products, axis=1)
            best = tl.maximum(best, scores, propagate_nan=tl.PropagateNan.ALL)
            q_ptr += stride_q_head
        row = seq * tl.num_programs(1) + head
        tl.store(scores_ptr + row * max_blocks + columns, best, mask=block_mask)


@triton.jit(do_not_specialize=["max_blocks", "num_selected", "block_size"])
def _select_blocks_kernel(
    selected_ptr, selected_lens_ptr, scores_ptr, block_tables_ptr, context_lens_ptr,
    max_blocks, num_selected, block_size, stride_table, LANES: tl.constexpr,
):  # fmt: skip
    """Grid (batch, num_kv_heads). A lane holds a column of the table."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = seq * tl.num_programs(1) + head
    columns = tl.arange(0, LANES)
    context_len = tl.load(context_lens_ptr + seq)
    num_blocks = tl.cdiv(context_len, block_size)
    count = tl.minimum(num_blocks, num_selected)

    scored = (columns < num_blocks - 1) & (num_blocks > num_selected)
    scores = tl.load(scores_ptr + row * max_blocks + columns, mask=scored, other=0.0)
    scores = tl.where(scores == scores, scores + 0.0, float("inf"))  # NaN; -0
    # Unsigned integers in the order of the scores. The last block has the largest.
    bits = scores.to(tl.uint32, bitcast=True)
    keys = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    keys = tl.where(columns == num_blocks - 1, 0xFFFFFFFF, keys)
    keys = tl.where(columns < num_blocks, keys, 0)
    threshold = (count * 0).to(tl.uint32)  # becomes the largest number that `count` keys reach
    for i in tl.static_range(32):
        trial = threshold | (1 << (31 - i))
        reached = tl.sum((keys >= trial).to(tl.int32), axis=0)
        threshold = tl.where(reached >= count, trial, threshold)
    above = keys > threshold
    missing = count - tl.sum(above.to(tl.int32), axis=0)
    equal = (keys == threshold).to(tl.int32)
    chosen = above | ((equal != 0) & (tl.cumsum(equal, axis=0) <= missing))

    blocks = tl.load(block_tables_ptr + seq * stride_table + columns, mask=chosen, other=-1)
    selected_ptr += row * num_selected
    places = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(selected_ptr + places, blocks, mask=chosen)
    tl.store(selected_ptr + columns, -1, mask=(columns >= count) & (columns < num_selected))
    if head == 0:
        tl.store(selected_lens_ptr + seq, context_len - (num_blocks - count) * block_size)


def _fake(q, block_bounds, block_tables, context_lens, num_selected, _):
    shape = (len(q), block_bounds.shape[2], num_selected)
    return block_tables.new_empty(shape), context_lens.new_empty(context_lens.shape)


@functional_op(fake=_fake)
def select_blocks(
    q: torch.Tensor,
    block_bounds: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    num_selected: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the blocks that may hold the largest attention scores, for each sequence and KV head.

    Decode over the chosen blocks approximates decode over all blocks (Quest, Tang et al., 2024):

        tables, lens = select_blocks(q, block_bounds, block_tables, context_lens, 64, block_size)
        out = paged_decode_attention(q, k_cache, v_cache, tables, lens)

    A block's score is the largest bound of q k over its keys and the KV head's query heads. The
    scale of the attention must be positive. Among equal scores the earlier block wins. A score of
    NaN counts as infinite. A sequence's last block is always chosen.

    Args:
        q: (batch, num_q_heads, head_dim), fp16, bf16 or fp32, any strides on the first two
            dimensions, as stored keys are (rotated).
        block_bounds: (num_blocks, 2, num_kv_heads, head_dim), in the dtype of q, kept by
            `update_block_bounds`. Any strides but a contiguous last dimension.
        block_tables: (batch, max_blocks) int32, at most 65,536 columns, any stride between rows.
        context_lens: (batch,) int32. 0 is allowed.
        num_selected: blocks to choose per sequence and KV head, from 1 to 65,536.
        block_size: token slots per block.

    Returns:
        (tables, lens): tables is (batch, num_kv_heads, num_selected) int32, the chosen blocks in
        ascending order of position, then -1 if the sequence has fewer blocks. lens is (batch,)
        int32, the number of tokens in the chosen blocks; it is the same for all heads.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit. For tensors in host memory also:
            a length exceeds the table, or a block id within the context is not in the cache.
    """
    sizes = _TENSORS(block_bounds, q, block_tables, context_lens)
    num_selected = checks.check_integer("num_selected", num_selected, 1, _MAX_COLUMNS)
    block_size = checks.check_integer("block_size", block_size, 1)
    cache_like = block_bounds[:, :1].expand(-1, block_size, -1, -1)
    checks.check_block_tables(block_tables, context_lens, cache_like)

    batch, num_kv_heads, max_blocks = sizes.batch, sizes.num_kv_heads, sizes.max_blocks
    shape = (batch, num_kv_heads, num_selected)
    selected = torch.empty(shape, dtype=torch.int32, device=q.device)
    selected_lens = torch.empty(batch, dtype=torch.int32, device=q.device)
    if batch == 0:
        return selected, selected_lens
    scores = torch.empty(batch, num_kv_heads, max_blocks, dtype=torch.float32, device=q.device)
    head_dim_padded = padded_dim(sizes.head_dim)
    tile = store_tile(head_dim_padded)
    sequences = block_tables, context_lens, max_blocks, num_selected, block_size
    if max_blocks > num_selected:
        launch(_block_scores_kernel, (batch, num_kv_heads, cdiv(max_blocks, tile.rows)),
            scores, q, block_bounds, *sequences,
            *q.stride()[:2], *block_bounds.stride()[:3], block_tables.stride(0),
            GROUP_SIZE=sizes.num_q_heads // num_kv_heads,
            HEAD_DIM=sizes.head_dim, HEAD_DIM_PADDED=head_dim_padded, TILE_BLOCKS=tile.rows,
            num_warps=tile.num_warps,
        )  # fmt: skip
    lanes = next_power_of_2(max(max_blocks, num_selected))
    launch(_select_blocks_kernel, (batch, num_kv_heads),
        selected, selected_lens, scores, *sequences, block_tables.stride(0), LANES=lanes,
        num_warps=min(32, max(1, lanes // 512)),
    )  # fmt: skip
    return selected, selected_lens
