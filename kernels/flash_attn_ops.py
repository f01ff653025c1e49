"""The PyTorch operators behind flash-attn's entry points (kernels/flash_attn_compat.py).

Each call becomes one attention call on a cache. A contiguous cache is treated as a paged cache
whose blocks each hold a whole sequence. Packed keys are one such block, in which every sequence has
its own start slot. Left padding also sets a start slot. A batch of single queries uses the split-KV
decode kernel, any other batch the prefill kernel. The length of such a block is not a constant of
the kernels, so a cache that grows with every call compiles once.

Arguments have flash-attn's names, with three exceptions. `scale` is softmax_scale. `window_size`
and `ahead` are fields of `ScoreOptions`. Without `return_lse`, the LSE is empty.

While torch.compile or torch.export traces, a call becomes one operator, `torch.ops.pagelab.*`. An
eager call avoids the dispatcher. The operators are for inference: they have no derivative.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from kernels.apply_rotary_embedding import apply_rotary_embedding
from kernels.checks import (
    ALIBI_ARG,
    FLOAT_DTYPES,
    HEAD_RULES,
    INT32,
    Arg,
    TensorSpec,
    bounded,
    cache_rules,
    check_block_tables,
    check_cu_seqlens,
    check_num_splits,
    kv_cache_args,
    same_dtype,
)
from kernels.launch import on_gpu_of_tensors, remembered
from kernels.paged_decode_attention import decode_chunking, launch_decode
from kernels.paged_prefill_attention import launch_prefill
from kernels.rope_store_kvcache import rope_store_kvcache
from kernels.score_options import ScoreOptions
from kernels.slot_mapping_from_positions import slot_mapping_from_positions
from kernels.store_kvcache import store_kvcache

_BLOCK_TABLE = Arg("block_table", "batch max_blocks", INT32, optional=True)
_PACKED_TENSORS, _PAGED_TENSORS = (
    TensorSpec(
        Arg("k", f"{rows} num_kv_heads head_dim", FLOAT_DTYPES),
        Arg("v", f"{rows} num_kv_heads head_dim", same_dtype("k")),
        Arg("q", "total_q num_q_heads head_dim", same_dtype("k")),
        Arg("cu_seqlens_q", "batch+1", INT32),
        Arg("cu_seqlens_k", "batch+1", INT32),
        ALIBI_ARG,
        _BLOCK_TABLE,
        rules=(*cache_rules("k"), *HEAD_RULES),
    )
    for rows in ("total_k", "num_blocks block_size")
)
_CACHE_TENSORS = {
    has_new: TensorSpec(
        *kv_cache_args(FLOAT_DTYPES, written=has_new),
        Arg("q", "batch seqlen num_q_heads head_dim", same_dtype("k_cache")),
        Arg("k", "batch seqlen_new num_kv_heads head_dim", same_dtype("k_cache"), optional=True),
        Arg("v", "batch seqlen_new num_kv_heads head_dim", same_dtype("k_cache"), optional=True),
        Arg("rotary_cos", "seqlen_ro rotary_dim/2", FLOAT_DTYPES, optional=True),
        Arg("rotary_sin", "seqlen_ro rotary_dim/2", same_dtype("rotary_cos"), optional=True),
        Arg("cache_seqlens", "batch", INT32, optional=True),
        Arg("cache_batch_idx", "batch", INT32, optional=True),
        Arg("cache_leftpad", "batch", INT32, optional=True),
        _BLOCK_TABLE,
        ALIBI_ARG,
        rules=(*cache_rules(), *HEAD_RULES, bounded("rotary_cos", "rotary_dim", 2, "head_dim")),
    )
    for has_new in (False, True)
}
"""Key: whether k and v are given. If they are, the caches are written."""


def _contiguous_rows(tensor: Any) -> Any:
    """Like flash-attn, copy a tensor whose last dimension is not contiguous."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def _launch_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    block_tables: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None,
    context_lens: torch.Tensor, kv_starts: torch.Tensor | None,
    *,
    max_seqlen_q: int, num_splits: int = 0, paged: bool = True,
    max_seqlen_k: int | None = None, return_lse: bool, **fields: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return attention of q, (total_q, num_q_heads, head_dim), and LSE, (total_q, num_q_heads).

    cu_seqlens_q None: each sequence has one query, keys start at slot 0, block_tables is given.
    fields: those of `ScoreOptions`, because the layouts of a call's arguments must be visible to
        `remembered`.
    """
    options = ScoreOptions(**fields)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:2] if return_lse else 0, dtype=torch.float32)
    result = out, lse if return_lse else None
    if cu_seqlens_q is not None:
        launch_prefill(
            *result, q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, options,
            max_seqlen_q=max_seqlen_q, num_splits=num_splits or None, max_seqlen_k=max_seqlen_k,
            kv_starts=kv_starts, paged=paged,
        )  # fmt: skip
    elif q.shape[0] and block_tables is not None:
        plan = decode_chunking(q, k_cache, block_tables, options.window_size, num_splits or None)
        tensors = (q, k_cache, v_cache, block_tables, context_lens)
        launch_decode(*result, *tensors, options, plan=plan, paged=paged)
    return out, lse


_launch_again = remembered(_launch_attention)


def _attend(
    q: torch.Tensor, *args: Any, options: ScoreOptions, return_lse: bool, **sizes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `_launch_attention`, with flash-attn's +inf as the LSE of a row that
    sees no key."""
    launch = _launch_attention if q.is_cpu else _launch_again
    out, lse = launch(q, *args, return_lse=return_lse, **sizes | vars(options))
    return out, lse.masked_fill_(lse == -math.inf, math.inf) if return_lse else lse


def _fake(
    q: torch.Tensor, *_args: Any, return_lse: bool, **_options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty(q.shape[:-1] if return_lse else (0,), dtype=torch.float32)
    return q.new_empty(q.shape), _heads_first(lse) if return_lse else lse


def _heads_first(lse: torch.Tensor) -> torch.Tensor:
    """Transpose an LSE, (..., seqlen, nheads), to flash-attn's (..., nheads, seqlen)."""
    return lse.transpose(-1, -2).contiguous()


def _operator(*mutates_args: str) -> Callable[[Callable], Callable]:
    """Register a function as an operator, which its calls become while PyTorch traces."""

    def register(function: Callable) -> Callable:
        launch = on_gpu_of_tensors(function)
        name = f"pagelab::{function.__name__}"
        operator = torch.library.custom_op(name, launch, mutates_args=mutates_args)
        operator.register_fake(_fake)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return (operator if torch.compiler.is_compiling() else launch)(*args, **kwargs)

        return call

    return register


@_operator()
def flash_attn_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int,
    alibi_slopes: torch.Tensor | None, block_table: torch.Tensor | None,
    *,
    scale: float | None, window_size: int | None, ahead: int | None, softcap: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output and LSE, (nheads, total_q), of `flash_attn_varlen_func`."""
    q, k, v = map(_contiguous_rows, (q, k, v))
    spec = _PACKED_TENSORS if block_table is None else _PAGED_TENSORS
    sizes = spec(k, v, q, cu_seqlens_q, cu_seqlens_k, alibi_slopes, block_table)
    if block_table is None:
        k_cache, v_cache, capacity = k[None], v[None], sizes.total_k
    else:
        k_cache, v_cache, capacity = k, v, block_table.numel() * sizes.block_size
    batch = sizes.batch
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, total=sizes.total_q, max_seqlen=max_seqlen_q)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, total=capacity, max_seqlen=max_seqlen_k)
    options = ScoreOptions.checked(k, scale, window_size, softcap, alibi_slopes, ahead=ahead)
    context_lens = cu_seqlens_k.diff()
    if block_table is not None:
        check_block_tables(
            block_table, context_lens, k_cache,
            query_lens=cu_seqlens_q.diff() if q.is_cpu else 1,
            window_size=options.window_size, names=("block_table", "cu_seqlens_k"),
        )  # fmt: skip
    # Then every sequence has one query, because cu_seqlens_q ends at total_q.
    single_queries = max_seqlen_q == 1 and q.shape[0] == batch and block_table is not None
    out, lse = _attend(
        q, k_cache, v_cache, block_table, None if single_queries else cu_seqlens_q, context_lens,
        cu_seqlens_k[:-1] if block_table is None else None,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=None if single_queries else max_seqlen_k,
        paged=block_table is not None, options=options, return_lse=return_lse,
    )  # fmt: skip
    return out, _heads_first(lse) if return_lse else lse


def _positions(starts: torch.Tensor, count: int) -> torch.Tensor:
    """Return positions starts[i], starts[i] + 1, ... of each sequence i, (batch * count,)."""
    if count == 1:
        return starts
    steps = torch.arange(count, dtype=starts.dtype, device=starts.device)
    return (starts[:, None] + steps).flatten()


@_operator("k_cache", "v_cache")
def flash_attn_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k: torch.Tensor | None, v: torch.Tensor | None,
    rotary_cos: torch.Tensor | None, rotary_sin: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None, cache_seqlen: int | None,
    cache_batch_idx: torch.Tensor | None, cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None, alibi_slopes: torch.Tensor | None,
    *,
    scale: float | None, window_size: int | None, ahead: int | None, softcap: float,
    rotary_interleaved: bool, num_splits: int, return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output and LSE, (batch, nheads, seqlen), of `flash_attn_with_kvcache`.

    cache_seqlens: None if all sequences have cache_seqlen tokens. Both are None if all are full.
    """
    q, k, v, cache_batch_idx, block_table = map(
        _contiguous_rows, (q, k, v, cache_batch_idx, block_table)
    )
    sizes = _CACHE_TENSORS[k is not None](
        k_cache, v_cache, q, k, v,
        rotary_cos, rotary_sin,
        cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        alibi_slopes,
    )  # fmt: skip
    batch, seqlen, device = sizes.batch, sizes.seqlen, q.device
    seqlen_new = 0 if k is None else sizes.seqlen_new
    options = ScoreOptions.checked(k_cache, scale, window_size, softcap, alibi_slopes, ahead=ahead)
    check_num_splits("num_splits", num_splits or None)

    paged = block_table is not None
    if block_table is not None:
        tables = block_table
    elif cache_batch_idx is not None:
        tables = cache_batch_idx[:, None]
    else:
        if batch > sizes.num_blocks:
            raise ValueError(
                f"k_cache: expected at least batch={batch} rows, got {sizes.num_blocks}"
            )
        tables = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    capacity = tables.shape[1] * sizes.block_size
    rotary = None if rotary_cos is None or rotary_sin is None else (rotary_cos, rotary_sin)
    if rotary is not None and sizes.seqlen_ro < capacity:
        raise ValueError(
            f"rotary_cos: expected at least {capacity} rows, the capacity of the cache per "
            f"sequence, got {sizes.seqlen_ro}"
        )
    if cache_seqlens is None:
        cache_seqlen = capacity if cache_seqlen is None else cache_seqlen
        if not 0 <= cache_seqlen <= capacity - seqlen_new:
            raise ValueError(
                f"cache_seqlens: expected 0 to {capacity - seqlen_new}, as a sequence may have "
                f"{capacity} tokens, of which {seqlen_new} are new, got {cache_seqlen}"
            )
        cache_seqlens = torch.full((batch,), cache_seqlen, dtype=torch.int32, device=device)
    filled = cache_seqlens + seqlen_new if seqlen_new else cache_seqlens
    check_block_tables(
        tables, filled, k_cache,
        query_lens=max(seqlen, seqlen_new),
        window_size=options.window_size if cache_leftpad is None else None,
        names=("block_table" if paged else "cache_batch_idx", "cache_seqlens"),
    )  # fmt: skip

    q = q.flatten(0, 1)
    if rotary is not None:
        # Like flash-attn, ignore a window that is as wide as the cache.
        limits = (window_size, None if ahead is None else ahead + 1)
        if any(limit is not None and limit <= capacity for limit in limits):
            positions = _positions(cache_seqlens, seqlen)
        else:
            positions = cache_seqlens.repeat_interleave(seqlen, output_size=batch * seqlen)
        q = apply_rotary_embedding(q, positions, *rotary, interleaved=rotary_interleaved)
    if k is not None and v is not None and seqlen_new:
        positions = _positions(cache_seqlens, seqlen_new)
        seq_ids = torch.arange(batch * seqlen_new, dtype=torch.int32, device=device) // seqlen_new
        slots = slot_mapping_from_positions(positions, tables, seq_ids, sizes.block_size)
        stored = k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots
        caches = k_cache, v_cache
        if not paged and all(c.stride(0) == c.shape[1] * c.stride(1) for c in caches):
            # With blocks of one token, slots are equal, and kernels compile for any cache size.
            stored = *stored[:2], *(cache.flatten(0, 1)[:, None] for cache in caches), slots
        if rotary is None:
            store_kvcache(*stored)
        else:
            rope_store_kvcache(None, *stored, positions, *rotary, interleaved=rotary_interleaved)
    cu_seqlens_q = None
    if seqlen != 1 or cache_leftpad is not None:
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen
    context_lens = filled if cache_leftpad is None else filled - cache_leftpad
    out, lse = _attend(
        q, k_cache, v_cache, tables, cu_seqlens_q, context_lens, cache_leftpad,
        max_seqlen_q=seqlen, num_splits=num_splits, paged=paged,
        options=options, return_lse=return_lse,
    )  # fmt: skip
    out = out.unflatten(0, (batch, seqlen))
    if return_lse:
        lse = _heads_first(lse.unflatten(0, (batch, seqlen)))
    return out, lse
