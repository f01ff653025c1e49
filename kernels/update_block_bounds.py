"""Bounds of the keys of full blocks: the elementwise minimum and maximum over a block's keys.

`select_blocks` reads them. It always selects a sequence's last block, so the bounds of a block that
is not full are never read. A block is full once its last slot is written. Then all its keys are
read again. So neither the reuse of a block nor the way in which it was filled matters.
"""

import torch
import triton
import triton.language as tl

from kernels import checks
from kernels.checks import FLOAT_DTYPES, INTEGERS, Arg, TensorSpec, same_dtype
from kernels.launch import launch
from kernels.tiles import padded_dim, store_tile
from kernels.torch_ops import functional_op

_TENSORS = TensorSpec(
    Arg("k_cache", "num_blocks block_size num_kv_heads head_dim", FLOAT_DTYPES),
    Arg("block_bounds", "num_blocks 2 num_kv_heads head_dim", same_dtype("k_cache"), written=True),
    Arg("slot_mapping", "num_slots", INTEGERS),
    rules=checks.cache_rules(),
)


@triton.jit
def _update_block_bounds_kernel(
    bounds_ptr, k_cache_ptr, slot_mapping_ptr,
    stride_bounds_block, stride_bounds_kind, stride_bounds_head,
    stride_k_block, stride_k_slot, stride_k_head,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """One program: one KV head of the block of one token. Grid (num_slots, num_kv_heads)."""
    slot = tl.load(slot_mapping_ptr + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    if (slot >= 0) & (slot % BLOCK_SIZE == BLOCK_SIZE - 1):
        block = slot // BLOCK_SIZE
        offs_d = tl.arange(0, HEAD_DIM_PADDED)
        dim_mask = offs_d < HEAD_DIM
        head_ptr = k_cache_ptr + block * stride_k_block + head * stride_k_head
        low = tl.full([HEAD_DIM_PADDED], float("inf"), tl.float32)
        high = tl.full([HEAD_DIM_PADDED], float("-inf"), tl.float32)
        for start in range(0, BLOCK_SIZE, TILE_ROWS):
            # Rows past the block repeat its last row, which changes no bound.
            rows = tl.minimum(start + tl.arange(0, TILE_ROWS), BLOCK_SIZE - 1).to(tl.int64)
            ptrs = head_ptr + rows[:, None] * stride_k_slot + offs_d[None, :]
            keys = tl.load(ptrs, mask=dim_mask[None, :], other=0.0).to(tl.float32)
            low = tl.minimum(low, tl.min(keys, axis=0))
            high = tl.maximum(high, tl.max(keys, axis=0))
        ptrs = bounds_ptr + block * stride_bounds_block + head * stride_bounds_head + offs_d
        dtype: tl.constexpr = bounds_ptr.dtype.element_ty
        tl.store(ptrs, low.to(dtype), mask=dim_mask)
        tl.store(ptrs + stride_bounds_kind, high.to(dtype), mask=dim_mask)


@functional_op(mutates_args=("block_bounds",))
def update_block_bounds(
    k_cache: torch.Tensor, block_bounds: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Compute the bounds of the blocks that new tokens have filled, in place.

    Call it after the op that stores the tokens, with the same slot_mapping. A token in the last
    slot of a block fills the block, so all earlier slots of the block must have been written. The
    bounds of a block with NaN keys are unspecified.
    Bounds move with blocks: copy_blocks and swap_blocks do not copy them.

    Args:
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), fp16, bf16 or fp32, any strides
            but a contiguous last dimension.
        block_bounds: (num_blocks, 2, num_kv_heads, head_dim), in the dtype of k_cache; index 0 of
            dimension 1 is the minimum over the block's keys, 1 the maximum. Any strides but a
            contiguous last dimension.
        slot_mapping: (num_slots,) int32 or int64; slot = block_id * block_size + offset of each
            token. A negative slot is skipped.

    Mutates block_bounds. Returns None.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit. If slot_mapping is in host memory
            also: a slot is past the end of the cache. Nothing is written then.
    """
    sizes = _TENSORS(k_cache, block_bounds, slot_mapping)
    checks.check_slots(slot_mapping, k_cache)
    if sizes.num_slots == 0:
        return
    head_dim_padded = padded_dim(sizes.head_dim)
    tile = store_tile(head_dim_padded)
    launch(_update_block_bounds_kernel, (sizes.num_slots, sizes.num_kv_heads),
        block_bounds, k_cache, slot_mapping,
        *block_bounds.stride()[:3], *k_cache.stride()[:3],
        BLOCK_SIZE=sizes.block_size, HEAD_DIM=sizes.head_dim, HEAD_DIM_PADDED=head_dim_padded,
        TILE_ROWS=tile.rows, num_warps=tile.num_warps,
    )  # fmt: skip
