"""Write the keys and values of new tokens into their cache slots.

A row is the head_dim elements of one (token, head) pair. A program copies a tile of rows of K and
of V. Rows of neighbouring heads are adjacent both in a fused QKV projection and in the cache. So a
tile is read and written in long runs, whatever the strides between tokens.
"""

import torch
import triton
import triton.language as tl

from kernels.checks import check_scales, check_slots, store_spec
from kernels.fp8_cache import Scale, cache_argument, load_scale, scale_arguments, to_cache
from kernels.launch import launch, op
from kernels.tiles import cdiv, padded_dim, store_tile

_TENSORS = store_spec()


@triton.jit(do_not_specialize=["num_rows"])
def _store_kvcache_kernel(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr,
    k_scale, stride_k_scale, v_scale, stride_v_scale, num_rows,
    stride_key_token, stride_key_head,
    stride_value_token, stride_value_head,
    stride_k_block, stride_k_slot, stride_k_head,
    stride_v_block, stride_v_slot, stride_v_head,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    tokens = rows // NUM_KV_HEADS
    heads = rows % NUM_KV_HEADS
    row_mask = rows < num_rows
    slots = tl.load(slot_mapping_ptr + tokens, mask=row_mask, other=-1)
    slots = slots.to(tl.int64)
    row_mask &= slots >= 0
    mask = row_mask[:, None] & (offs_d < HEAD_DIM)[None, :]  # [TILE_ROWS, HEAD_DIM_PADDED]

    key_rows = tokens * stride_key_token + heads * stride_key_head
    value_rows = tokens * stride_value_token + heads * stride_value_head
    key = tl.load(key_ptr + key_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
    value = tl.load(value_ptr + value_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)

    blocks = slots // BLOCK_SIZE
    offsets = slots % BLOCK_SIZE
    k_rows = blocks * stride_k_block + offsets * stride_k_slot + heads * stride_k_head
    v_rows = blocks * stride_v_block + offsets * stride_v_slot + heads * stride_v_head
    if k_scale is not None:
        k_scale = load_scale(k_scale, heads, stride_k_scale)
    if v_scale is not None:
        v_scale = load_scale(v_scale, heads, stride_v_scale)
    key = to_cache(key, k_scale, k_cache_ptr.dtype.element_ty)
    value = to_cache(value, v_scale, v_cache_ptr.dtype.element_ty)
    tl.store(k_cache_ptr + k_rows[:, None] + offs_d[None, :], key, mask=mask)
    tl.store(v_cache_ptr + v_rows[:, None] + offs_d[None, :], value, mask=mask)


@op
def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Write the keys and values of new tokens into a paged KV cache, in place.

    PagedAttention systems run this scatter before attention (vLLM's reshape_and_cache).

    Args:
        key, value: (num_tokens, num_kv_heads, head_dim), any strides on the first two dimensions,
            so that views of a fused QKV projection need no copy.
        k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim), in the dtype of key or
            fp8 e4m3, any strides but a contiguous last dimension (NHD, HND, views of one layer).
        slot_mapping: (num_slots,) int32 or int64; slot = block_id * block_size + offset of token i.
            A negative slot is skipped. With num_slots < num_tokens (padding of a captured graph)
            the remaining tokens are not written. Slots must differ from one another.
        k_scale, v_scale: a number, or an fp32 tensor with one or num_kv_heads elements, or None for
            1. An fp8 cache stores x / scale, computed in fp32, rounded to nearest even and
            saturated at +-448.

    Mutates k_cache and v_cache. Returns None.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit. If slot_mapping is in host memory
            also: a slot is past the end of the cache. Nothing is written then.
    """
    sizes = _TENSORS(k_cache, v_cache, k_scale, v_scale, key, value, slot_mapping)
    check_scales(k_scale, v_scale, k_cache)
    check_slots(slot_mapping, k_cache)

    num_rows = sizes.num_slots * sizes.num_kv_heads
    if num_rows == 0:
        return
    head_dim_padded = padded_dim(sizes.head_dim)
    tile = store_tile(head_dim_padded)
    launch(_store_kvcache_kernel, (cdiv(num_rows, tile.rows),),
        key, value, cache_argument(k_cache), cache_argument(v_cache), slot_mapping,
        *scale_arguments(k_scale), *scale_arguments(v_scale), num_rows,
        *key.stride()[:2], *value.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        BLOCK_SIZE=sizes.block_size, NUM_KV_HEADS=sizes.num_kv_heads,
        HEAD_DIM=sizes.head_dim, HEAD_DIM_PADDED=head_dim_padded, TILE_ROWS=tile.rows,
        num_warps=tile.num_warps,
    )  # fmt: skip
