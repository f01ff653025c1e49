"""flash-attn's two inference entry points on the kernels of this package.

    from kernels.flash_attn_compat import flash_attn_varlen_func, flash_attn_with_kvcache

Names, argument names and order, defaults and semantics are those of flash-attn 2.8 (Dao, 2023), for
paged caches of any block size, contiguous caches and packed (varlen) keys. Inference only: there is
no backward pass. docs/flash-attn-compat.md lists what differs; what is not supported raises
NotImplementedError naming the argument.

Everything is one kernel call on a cache: a contiguous cache is a paged one whose blocks are as long
as a whole sequence, packed keys are a single such block in which every sequence has its own start,
and left padding is a start too. A batch of single queries runs the split-KV decode kernel, any
other the prefill kernel.
"""

from __future__ import annotations

import math

import torch

from kernels.apply_rotary_embedding import apply_rotary_embedding
from kernels.checks import (
    FLOAT_DTYPES,
    check_block_tables,
    check_cu_seqlens,
    check_grid_dim,
    check_heads,
    check_kv_cache,
    check_score_options,
    check_tensor,
)
from kernels.paged_decode_attention import paged_decode_attention
from kernels.paged_prefill_attention import launch_prefill
from kernels.rope_store_kvcache import rope_store_kvcache
from kernels.slot_mapping_from_positions import slot_mapping_from_positions
from kernels.store_kvcache import store_kvcache

_INT32 = (torch.int32,)


class _ForwardOnly(torch.autograd.Function):
    """Ties an output to inputs that require gradients, so that a backward pass fails loudly."""

    @staticmethod
    def forward(ctx, out, *inputs):
        return out

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "flash_attn_varlen_func: the backward pass is not supported; use flash-attn to train"
        )


def _contiguous_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor with a contiguous last dimension, which flash-attn too makes by a copy."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _window(window_size, causal: bool) -> tuple[int | None, int | None]:
    """(left, right) with None for no limit; causal attention sees no later key."""
    left, right = (int(limit) for limit in window_size)
    right = 0 if causal else right
    return (None if left < 0 else left, None if right < 0 else right)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
    single_queries: bool,
    window: tuple[int | None, int | None],
    num_splits: int,
    kv_starts: torch.Tensor | None = None,
    paged: bool = True,
    scale: float | None,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of q, (total_q, num_q_heads, head_dim), and its LSE, (total_q, num_q_heads)."""
    options = {"scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes}
    if single_queries and kv_starts is None and block_tables is not None:
        left = window[0]
        result = paged_decode_attention(
            q,
            k_cache,
            v_cache,
            block_tables,
            context_lens,
            window_size=None if left is None else left + 1,
            num_splits=num_splits or None,
            return_lse=return_lse,
            **options,
        )
        out, lse = result if return_lse else (result, None)
    else:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        launch_prefill(
            out,
            lse,
            q,
            k_cache,
            v_cache,
            block_tables,
            cu_seqlens_q,
            context_lens,
            max_seqlen_q=max_seqlen_q,
            window=window,
            kv_starts=kv_starts,
            paged=paged,
            **options,
        )
    # flash-attn marks a row that sees nothing by +inf.
    return out, None if lse is None else lse.masked_fill_(lse == -math.inf, math.inf)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of packed sequences of different lengths, over packed or paged keys.

    Query i of a sequence with seqlen_q queries and seqlen_k keys stands at position i + seqlen_k -
    seqlen_q (bottom-right alignment). It sees the keys from window_size[0] before its position to
    window_size[1] after it; negative is no limit, causal sets window_size[1] to 0.

    Args:
        q: (total_q, nheads, headdim), fp16, bf16 or fp32.
        k, v: (total_k, nheads_k, headdim), or with block_table (num_blocks, block_size, nheads_k,
            headdim), any block size.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, cumulative lengths from 0.
        max_seqlen_q, max_seqlen_k: the longest of each; bounds suffice.
        dropout_p: 0.
        softmax_scale: headdim ** -0.5 if None.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        alibi_slopes: (nheads,) or (batch, nheads) fp32; adds -slope * |distance of positions|.
        deterministic: concerns the backward pass only; the result is deterministic anyway.
        return_attn_probs: also return the LSE and an empty tensor (flash-attn's S_dmask, which is
            empty without dropout).
        block_table: (batch, max_blocks) int32.

    Returns:
        (total_q, nheads, headdim), and with return_attn_probs the LSE, (nheads, total_q) fp32, and
        the empty tensor. A query that sees nothing gets zeros and +inf.

    Raises:
        NotImplementedError: dropout_p other than 0; a backward pass through the output.
        ValueError: a shape, dtype, device or option that does not fit.
    """
    if dropout_p:
        raise NotImplementedError(f"dropout_p: only 0 is supported, got {dropout_p}")
    inputs = (q, k, v)
    q, k, v = (_contiguous_rows(tensor.detach()) for tensor in inputs)
    device = k.device
    dims = ("total_k", "nheads_k", "headdim")
    if block_table is not None:
        dims = ("num_blocks", "block_size", *dims[1:])
    check_tensor("k", k, dict.fromkeys(dims), dtypes=FLOAT_DTYPES)
    same_shape = dict(zip(dims, k.shape, strict=True))
    check_tensor("v", v, same_shape, dtypes=(k.dtype,), device=device)
    k_cache, v_cache = (k, v) if block_table is not None else (k[None], v[None])
    shape = {"total_q": None, "nheads": None, "headdim": k.shape[-1]}
    check_tensor("q", q, shape, dtypes=(k.dtype,), device=device)
    check_heads(q, k_cache)
    batch = cu_seqlens_q.shape[0] - 1
    check_cu_seqlens(
        "cu_seqlens_q",
        cu_seqlens_q,
        batch=batch,
        total=q.shape[0],
        max_seqlen=max_seqlen_q,
        device=device,
    )
    capacity = k.shape[0] if block_table is None else block_table.shape[1] * k.shape[1] * batch
    check_cu_seqlens(
        "cu_seqlens_k",
        cu_seqlens_k,
        batch=batch,
        total=capacity,
        max_seqlen=max_seqlen_k,
        device=device,
    )
    check_score_options(
        batch=batch,
        num_q_heads=q.shape[1],
        device=device,
        window_size=None,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=None,
    )
    window = _window(window_size, causal)
    context_lens = cu_seqlens_k.diff()
    if block_table is not None:
        check_block_tables(
            block_table,
            context_lens,
            k_cache,
            batch=batch,
            device=device,
            query_lens=cu_seqlens_q.diff() if device.type == "cpu" else 1,
            window_size=None if window[0] is None else window[0] + 1,
            names=("block_table", "cu_seqlens_k", "batch"),
        )
    out, lse = _attend(
        q,
        k_cache,
        v_cache,
        block_table,
        cu_seqlens_q,
        context_lens,
        max_seqlen_q=max_seqlen_q,
        # Then every sequence has one query, since cu_seqlens_q ends at total_q.
        single_queries=max_seqlen_q == 1 and q.shape[0] == batch,
        window=window,
        num_splits=0,
        kv_starts=cu_seqlens_k[:-1] if block_table is None else None,
        paged=block_table is not None,
        scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_attn_probs,
    )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        out = _ForwardOnly.apply(out, *inputs)
    if return_attn_probs:
        return out, lse.transpose(0, 1).contiguous(), q.new_empty(0)
    return out


def _append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    cache_seqlens: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    interleaved: bool,
) -> None:
    """Write k and v, (batch, seqlen_new, nheads_k, headdim), behind the cached tokens."""
    batch, seqlen_new = k.shape[:2]
    steps = torch.arange(seqlen_new, dtype=torch.int32, device=k.device)
    positions = (cache_seqlens[:, None] + steps).flatten()
    rows = torch.arange(batch, dtype=torch.int32, device=k.device)
    seq_ids = rows.repeat_interleave(seqlen_new, output_size=batch * seqlen_new)
    slots = slot_mapping_from_positions(positions, tables, seq_ids, k_cache.shape[1])
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    if rotary is None:
        store_kvcache(k, v, k_cache, v_cache, slots)
    else:
        rope_store_kvcache(
            None, k, v, k_cache, v_cache, slots, positions, *rotary, interleaved=interleaved
        )


def _check_rotary_tables(cos, sin, *, head_dim: int, capacity: int, device: torch.device) -> None:
    dims = dict.fromkeys(("seqlen_ro", "rotary_dim / 2"))
    check_tensor("rotary_cos", cos, dims, dtypes=FLOAT_DTYPES, device=device)
    same_shape = dict(zip(dims, cos.shape, strict=True))
    check_tensor("rotary_sin", sin, same_shape, dtypes=(cos.dtype,), device=device)
    seqlen_ro, half = cos.shape
    if not 2 <= 2 * half <= head_dim:
        raise ValueError(
            f"rotary_cos: expected a rotary_dim from 2 to headdim={head_dim}, got {2 * half}"
        )
    if seqlen_ro < capacity:
        raise ValueError(
            f"rotary_cos: expected at least {capacity} rows, the capacity of the cache per "
            f"sequence, got {seqlen_ro}"
        )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over a KV cache, which first takes up the new keys and values, if any.

    With seqlen_k the tokens of a sequence in the cache, new ones included and left padding not,
    query i stands at position i + seqlen_k - seqlen (bottom-right alignment). It sees the keys from
    window_size[0] before its position to window_size[1] after it; negative is no limit, causal sets
    window_size[1] to 0.

    Args:
        q: (batch, seqlen, nheads, headdim), fp16, bf16 or fp32.
        k_cache, v_cache: (batch_cache, seqlen_cache, nheads_k, headdim), or with block_table
            (num_blocks, block_size, nheads_k, headdim), any block size.
        k, v: (batch, seqlen_new, nheads_k, headdim), written to the cache from index cache_seqlens
            on; need cache_seqlens.
        rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2), any float dtype, seqlen_ro at least the
            capacity of the cache per sequence; need k and v. New keys are rotated at the indices
            that they are written to. Queries are rotated at cache_seqlens + i if causal or with a
            window, else all at cache_seqlens.
        cache_seqlens: tokens in the cache before the call, an int or (batch,) int32; None for full.
        cache_batch_idx: (batch,) int32, the cache row of each sequence; not with block_table.
        cache_leftpad: (batch,) int32, the index where each sequence starts in the cache.
        block_table: (batch, max_blocks) int32.
        softmax_scale: headdim ** -0.5 if None.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        rotary_interleaved: pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).
        alibi_slopes: (nheads,) or (batch, nheads) fp32; adds -slope * |distance of positions|.
        num_splits: of the keys among programs where seqlen is 1; 0 chooses. Elsewhere there is no
            split.
        return_softmax_lse: also return the LSE.

    Returns:
        (batch, seqlen, nheads, headdim), and with return_softmax_lse the LSE, (batch, nheads,
        seqlen) fp32. A query that sees nothing gets zeros and +inf.

    Mutates k_cache and v_cache if k and v are given. No host synchronisation.

    Raises:
        NotImplementedError: cache_batch_idx together with block_table.
        ValueError: a shape, dtype, device or option that does not fit; where the tensors lie in
            host memory also sequences that outgrow the cache. Nothing has been written then.
    """
    if cache_batch_idx is not None and block_table is not None:
        raise NotImplementedError("cache_batch_idx: not supported together with block_table")
    if (k is None) != (v is None):
        raise ValueError(f"{'v' if v is None else 'k'}: expected k and v together, got one of them")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: needed to append k and v, got None")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_sin: expected rotary_cos and rotary_sin together, got one of them")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos: needs new keys to rotate, got k=None")

    q, k, v = (_contiguous_rows(tensor) for tensor in (q, k, v))
    check_kv_cache(k_cache, v_cache)
    num_rows, block_size, nheads_k, head_dim = k_cache.shape
    device = k_cache.device
    like_cache = {"dtypes": (k_cache.dtype,), "device": device}
    shape = {"batch": None, "seqlen": None, "nheads": None, "headdim": head_dim}
    check_tensor("q", q, shape, **like_cache)
    check_heads(q, k_cache)
    batch, seqlen, nheads, _ = q.shape
    seqlen_new = 0
    if k is not None:
        shape = {"batch": batch, "seqlen_new": None, "nheads_k": nheads_k, "headdim": head_dim}
        check_tensor("k", k, shape, **like_cache)
        shape["seqlen_new"] = seqlen_new = k.shape[1]
        check_tensor("v", v, shape, **like_cache)

    per_sequence = {"shape": {"batch": batch}, "dtypes": _INT32, "device": device}
    tables = block_table
    if cache_batch_idx is not None:
        check_tensor("cache_batch_idx", cache_batch_idx, **per_sequence)
        tables = cache_batch_idx[:, None]
    elif block_table is None:
        if batch > num_rows:
            raise ValueError(f"k_cache: expected at least batch={batch} rows, got {num_rows}")
        tables = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    capacity = tables.shape[1] * block_size
    if cache_seqlens is None or isinstance(cache_seqlens, int):
        length = capacity if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((batch,), length, dtype=torch.int32, device=device)
    check_tensor("cache_seqlens", cache_seqlens, **per_sequence)
    if cache_leftpad is not None:
        check_tensor("cache_leftpad", cache_leftpad, **per_sequence)
    window = _window(window_size, causal)
    filled = cache_seqlens + seqlen_new if seqlen_new else cache_seqlens
    left = window[0] if cache_leftpad is None else None
    check_block_tables(
        tables,
        filled,
        k_cache,
        batch=batch,
        device=device,
        query_lens=max(seqlen, seqlen_new),
        window_size=None if left is None else left + 1,
        names=(
            "cache_batch_idx" if block_table is None else "block_table",
            "cache_seqlens",
            "batch",
        ),
    )
    check_score_options(
        batch=batch,
        num_q_heads=nheads,
        device=device,
        window_size=None,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=None,
    )
    if num_splits != 0:
        check_grid_dim("num_splits", None, num_splits)
    rotary = None
    if rotary_cos is not None:
        rotary = (rotary_cos, rotary_sin)
        _check_rotary_tables(*rotary, head_dim=head_dim, capacity=capacity, device=device)

    q = q.flatten(0, 1)
    if rotary is not None:
        # Like flash-attn, a window as wide as the cache does not count as one.
        steps = torch.arange(seqlen, dtype=torch.int32, device=device)
        if not any(limit is not None and limit < capacity for limit in window):
            steps = torch.zeros_like(steps)
        positions = (cache_seqlens[:, None] + steps).flatten()
        q = apply_rotary_embedding(q, positions, *rotary, interleaved=rotary_interleaved)
    if seqlen_new:
        _append(k, v, k_cache, v_cache, tables, cache_seqlens, rotary, rotary_interleaved)
    out, lse = _attend(
        q,
        k_cache,
        v_cache,
        tables,
        torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen,
        filled if cache_leftpad is None else filled - cache_leftpad,
        max_seqlen_q=seqlen,
        single_queries=seqlen == 1,
        window=window,
        num_splits=num_splits,
        kv_starts=cache_leftpad,
        paged=block_table is not None,
        scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
    )
    out = out.unflatten(0, (batch, seqlen))
    if return_softmax_lse:
        return out, lse.unflatten(0, (batch, seqlen)).transpose(1, 2).contiguous()
    return out
