"""Rotate the queries and keys of new tokens and write keys and values into their cache slots.

One launch does all of a decoder layer's work between its QKV projection and attention. Rotated (and
optionally normalised) keys are written directly into the cache. See `add_rms_norm` for the
norm, `apply_rotary_embedding` for the rotation and `store_kvcache` for the slots.
"""

import torch
import triton
import triton.language as tl

from kernels import checks
from kernels.apply_rotary_embedding import rotate_rows
from kernels.checks import FLOAT_DTYPES, Arg, same_dtype
from kernels.fp8_cache import Scale, cache_argument, load_scale, scale_arguments, to_cache
from kernels.launch import launch, op
from kernels.primitives import await_launches_before
from kernels.tiles import cdiv, next_power_of_2, padded_dim, pdl_options, rotary_tile

_TENSORS = checks.store_spec(
    Arg("query", "num_tokens num_q_heads head_dim", same_dtype("key"), optional=True, written=True),
    *checks.ROTARY_ARGS,
    Arg("q_norm_weight", "head_dim", FLOAT_DTYPES, optional=True),
    Arg("k_norm_weight", "head_dim", FLOAT_DTYPES, optional=True),
    rules=(checks.ROTARY_RULE,),
)


@triton.jit(do_not_specialize=["num_query_rows", "num_kv_rows"])
def _rope_store_kvcache_kernel(
    query_ptr, key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr,
    positions_ptr, cos_ptr, sin_ptr,
    k_scale, stride_k_scale, v_scale, stride_v_scale,
    q_norm_weight_ptr, k_norm_weight_ptr, norm_eps, norm_offset,
    num_query_rows, num_kv_rows,
    stride_query_token, stride_query_head,
    stride_key_token, stride_key_head,
    stride_value_token, stride_value_head,
    stride_k_block, stride_k_slot, stride_k_head,
    stride_v_block, stride_v_slot, stride_v_head,
    stride_cos, stride_sin,
    BLOCK_SIZE: tl.constexpr, NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr, HALF_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: TILE_ROWS rows, (token, head) pairs, of keys and values, or of queries.

    The programs for keys and values come first.
    """
    await_launches_before(PDL)
    kv_programs = tl.cdiv(num_kv_rows, TILE_ROWS)
    program = tl.program_id(0).to(tl.int64)
    if program < kv_programs:
        rows = program * TILE_ROWS + tl.arange(0, TILE_ROWS)
        tokens = rows // NUM_KV_HEADS
        heads = rows % NUM_KV_HEADS
        row_mask = rows < num_kv_rows
        slots = tl.load(slot_mapping_ptr + tokens, mask=row_mask, other=-1).to(tl.int64)
        row_mask &= slots >= 0
        positions = tl.load(positions_ptr + tokens, mask=row_mask, other=0).to(tl.int64)
        blocks = slots // BLOCK_SIZE
        offsets = slots % BLOCK_SIZE
        k_rows = blocks * stride_k_block + offsets * stride_k_slot + heads * stride_k_head
        k_scales, v_scales = k_scale, v_scale
        if k_scale is not None:
            k_scales = load_scale(k_scale, heads, stride_k_scale)
        if v_scale is not None:
            v_scales = load_scale(v_scale, heads, stride_v_scale)
        rotate_rows(
            k_cache_ptr + k_rows,
            key_ptr + tokens * stride_key_token + heads * stride_key_head,
            cos_ptr + positions * stride_cos,
            sin_ptr + positions * stride_sin,
            row_mask,
            k_scales,
            k_norm_weight_ptr, norm_eps, norm_offset,
            HEAD_DIM, HEAD_DIM_PADDED, ROTARY_DIM, HALF_PADDED, INTERLEAVED,
        )  # fmt: skip
        offs_d = tl.arange(0, HEAD_DIM_PADDED)
        mask = row_mask[:, None] & (offs_d < HEAD_DIM)[None, :]  # [TILE_ROWS, HEAD_DIM_PADDED]
        value_rows = tokens * stride_value_token + heads * stride_value_head
        v_rows = blocks * stride_v_block + offsets * stride_v_slot + heads * stride_v_head
        value = tl.load(value_ptr + value_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
        value = to_cache(value, v_scales, v_cache_ptr.dtype.element_ty)
        tl.store(v_cache_ptr + v_rows[:, None] + offs_d[None, :], value, mask=mask)
    elif query_ptr is not None:
        rows = (program - kv_programs) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        tokens = rows // NUM_Q_HEADS
        heads = rows % NUM_Q_HEADS
        row_mask = rows < num_query_rows
        positions = tl.load(positions_ptr + tokens, mask=row_mask, other=0).to(tl.int64)
        query_rows = query_ptr + tokens * stride_query_token + heads * stride_query_head
        rotate_rows(
            query_rows,
            query_rows,
            cos_ptr + positions * stride_cos,
            sin_ptr + positions * stride_sin,
            row_mask,
            None,
            q_norm_weight_ptr, norm_eps, norm_offset,
            HEAD_DIM, HEAD_DIM_PADDED, ROTARY_DIM, HALF_PADDED, INTERLEAVED,
        )  # fmt: skip


@op
def rope_store_kvcache(
    query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor,
    positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    *,
    interleaved: bool = False,
    k_scale: Scale = None, v_scale: Scale = None,
    q_norm_weight: torch.Tensor | None = None, k_norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6, norm_offset: float = 0.0,
) -> None:  # fmt: skip
    """Rotate queries in place, and write rotated keys and plain values into a paged KV cache.

    Queries and keys are normalised first if their norm weights are given.

    Args:
        query: (num_tokens, num_q_heads, head_dim) to rotate in place, or None.
        key, value: (num_tokens, num_kv_heads, head_dim). query, key and value may have any stride
            on the first two dimensions, so that views of a fused QKV projection need no copy.
        k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim), in the dtype of key or
            fp8 e4m3, any strides but a contiguous last dimension.
        slot_mapping: (num_slots,) int32 or int64; slot = block_id * block_size + offset of token i.
            A negative slot is skipped. If num_slots < num_tokens, the remaining keys and values are
            not written. Slots must differ from one another.
        positions: (num_tokens,) int32 or int64, the row of cos and sin for each token.
        cos, sin: (num_positions, rotary_dim / 2), any float dtype; rotary_dim <= head_dim. Products
            are computed in fp32.
        interleaved: pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).
        k_scale, v_scale: scales of an fp8 cache, see `store_kvcache`. Rotated keys are first
            rounded to the dtype of key, so the result equals separate calls that rotate and store.
        q_norm_weight, k_norm_weight: (head_dim,), any float dtype. Weights of an RMSNorm of each
            head of query and key before the rotation (QK-norm: Qwen3, Gemma 3). None: no norm.
            Normalised values are rounded before they are rotated.
        norm_eps, norm_offset: eps and offset of both norms, see `add_rms_norm`.

    Mutates query, k_cache and v_cache, but not key. Returns None.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit. For tensors in host memory also:
            a slot is past the end of the cache, or a position is not a row of cos. Nothing is
            written then.
    """
    sizes = _TENSORS(
        k_cache, v_cache, k_scale, v_scale, key, value, slot_mapping, query, positions, cos, sin,
        q_norm_weight, k_norm_weight,
    )  # fmt: skip
    checks.check_scales(k_scale, v_scale, k_cache)
    checks.check_slots(slot_mapping, k_cache)
    checks.check_values("positions", positions, 0, sizes.num_positions - 1, "rows of cos")
    norm_eps = checks.check_number("norm_eps", norm_eps, 0)
    norm_offset = checks.check_number("norm_offset", norm_offset)

    num_q_heads = 0 if query is None else sizes.num_q_heads
    num_query_rows = sizes.num_tokens * num_q_heads
    num_kv_rows = sizes.num_slots * sizes.num_kv_heads
    if num_query_rows + num_kv_rows == 0:
        return
    head_dim_padded = padded_dim(sizes.head_dim)
    tile = rotary_tile(head_dim_padded)
    num_programs = cdiv(num_kv_rows, tile.rows) + cdiv(num_query_rows, tile.rows)
    launch(_rope_store_kvcache_kernel, (num_programs,),
        query, key, value, cache_argument(k_cache), cache_argument(v_cache), slot_mapping,
        positions, cos, sin,
        *scale_arguments(k_scale), *scale_arguments(v_scale),
        q_norm_weight, k_norm_weight, float(norm_eps), float(norm_offset),
        num_query_rows, num_kv_rows,
        *((0, 0) if query is None else query.stride()[:2]),
        *key.stride()[:2], *value.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        cos.stride(0), sin.stride(0),
        BLOCK_SIZE=sizes.block_size,
        NUM_Q_HEADS=max(1, num_q_heads), NUM_KV_HEADS=sizes.num_kv_heads,
        HEAD_DIM=sizes.head_dim, HEAD_DIM_PADDED=head_dim_padded,
        ROTARY_DIM=sizes.rotary_dim, HALF_PADDED=next_power_of_2(sizes.rotary_dim // 2),
        TILE_ROWS=tile.rows, INTERLEAVED=interleaved,
        num_warps=tile.num_warps, **pdl_options(key.device),
    )  # fmt: skip
