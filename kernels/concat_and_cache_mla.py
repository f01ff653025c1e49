"""Write the latents and rotated key parts of new tokens into their cache slots (MLA)."""

import torch
import triton
import triton.language as tl

from kernels.checks import FLOAT_DTYPES, INTEGERS, Arg, TensorSpec, bounded, check_slots, same_dtype
from kernels.launch import launch, op
from kernels.tiles import cdiv, next_power_of_2, store_tile

_TENSORS = TensorSpec(
    Arg("latent_cache", "num_blocks block_size latent_dim", FLOAT_DTYPES, written=True),
    Arg("kv_c", "num_tokens kv_lora_rank", same_dtype("latent_cache")),
    Arg("k_pe", "num_tokens rope_dim", same_dtype("latent_cache")),
    Arg("slot_mapping", "num_slots", INTEGERS),
    rules=(
        bounded("latent_cache", "block_size", 1),
        bounded("slot_mapping", "num_slots", 0, "num_tokens"),
    ),
)


@triton.jit(do_not_specialize=["num_slots"])
def _concat_and_cache_mla_kernel(
    kv_c_ptr, k_pe_ptr, latent_cache_ptr, slot_mapping_ptr, num_slots,
    stride_kv_c, stride_k_pe, stride_block, stride_slot,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr,
    ROPE_DIM: tl.constexpr, ROPE_DIM_PADDED: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_slots, other=-1).to(tl.int64)
    row_mask = (slots >= 0)[:, None]
    rows = slots // BLOCK_SIZE * stride_block + slots % BLOCK_SIZE * stride_slot
    rows = latent_cache_ptr + rows[:, None]

    offs_v = tl.arange(0, RANK_PADDED)[None, :]
    mask = row_mask & (offs_v < RANK)
    kv_c = tl.load(kv_c_ptr + (tokens * stride_kv_c)[:, None] + offs_v, mask=mask)
    offs_r = tl.arange(0, ROPE_DIM_PADDED)[None, :]
    mask_r = row_mask & (offs_r < ROPE_DIM)
    k_pe = tl.load(k_pe_ptr + (tokens * stride_k_pe)[:, None] + offs_r, mask=mask_r)
    tl.store(rows + RANK + offs_r, k_pe, mask=mask_r)
    tl.store(rows + offs_v, kv_c, mask=mask)


@op
def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, latent_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write the latents and rotated key parts of new tokens into a paged latent cache, in place.

    The store of multi-head latent attention (DeepSeek-V2, 2024), with vLLM's name.

    Args:
        kv_c: (num_tokens, kv_lora_rank), the normalised latents of keys and values.
        k_pe: (num_tokens, rope_dim), the rotated part of the keys, which all heads share.
        latent_cache: (num_blocks, block_size, kv_lora_rank + rope_dim) in the dtype of kv_c and
            k_pe, any strides but a contiguous last dimension.
        slot_mapping: (num_slots,) int32 or int64, as in `store_kvcache`.

    Mutates latent_cache. Returns None.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit. If slot_mapping is in host memory
            also: a slot is past the end of the cache. Nothing is written then.
    """
    sizes = _TENSORS(latent_cache, kv_c, k_pe, slot_mapping)
    latent_dim = sizes.kv_lora_rank + sizes.rope_dim
    if sizes.latent_dim != latent_dim:
        raise ValueError(
            f"latent_cache: expected shape (num_blocks, block_size, {latent_dim}) for the elements "
            f"of kv_c and k_pe, got {tuple(latent_cache.shape)}"
        )
    check_slots(slot_mapping, latent_cache)
    if sizes.num_slots == 0:
        return
    rank_padded = next_power_of_2(sizes.kv_lora_rank)
    tile = store_tile(rank_padded)
    launch(_concat_and_cache_mla_kernel, (cdiv(sizes.num_slots, tile.rows),),
        kv_c, k_pe, latent_cache, slot_mapping, sizes.num_slots,
        kv_c.stride(0), k_pe.stride(0), *latent_cache.stride()[:2],
        BLOCK_SIZE=sizes.block_size, RANK=sizes.kv_lora_rank, RANK_PADDED=rank_padded,
        ROPE_DIM=sizes.rope_dim, ROPE_DIM_PADDED=next_power_of_2(sizes.rope_dim),
        TILE_ROWS=tile.rows, num_warps=tile.num_warps,
    )  # fmt: skip
