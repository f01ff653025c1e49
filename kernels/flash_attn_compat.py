"""flash-attn's two inference entry points, implemented with this package's kernels.

    from kernels.flash_attn_compat import flash_attn_varlen_func, flash_attn_with_kvcache

Names, argument order, defaults and semantics follow flash-attn 2.8 (Dao, 2023), for paged caches of
any block size, contiguous caches and packed (varlen) keys. They are for inference only: there is no
backward pass. docs/flash-attn-compat.md lists the differences. Unsupported arguments raise
NotImplementedError with the argument's name. The operators are in kernels/flash_attn_ops.py.
"""

from numbers import Integral
from operator import index
from typing import Any

import torch

from kernels.checks import WrongNumber, check_number
from kernels.flash_attn_ops import flash_attn_kvcache, flash_attn_varlen


class _ForwardOnly(torch.autograd.Function):
    """Connects an output to inputs that require gradients, so that backward raises an error."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        raise NotImplementedError(
            "flash_attn_varlen_func: the backward pass is not supported; use flash-attn to train"
        )


def _detached(tensor: Any) -> Any:
    """Detach the tensor, so that compiled code does not look for a derivative."""
    return tensor.detach() if getattr(tensor, "requires_grad", False) else tensor


def _as_integer(name: str, value: Any) -> int:
    """Return an integer argument as an int. NumPy integers and one-element tensors are accepted.

    Raises:
        TypeError: the value is not an integer.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        raise WrongNumber(f"{name}: expected an integer, got {type(value).__name__}") from None


def _visible(window_size: Any, causal: bool) -> dict[str, int | None]:
    """Return the fields window_size and ahead of `ScoreOptions`."""
    try:
        left, right = (_as_integer("window_size", size) for size in window_size)
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size: expected two integers (left, right), got {window_size!r}"
        ) from None
    ahead = 0 if causal else None if right < 0 else right
    return {"window_size": None if left < 0 else left + 1, "ahead": ahead}


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of packed sequences of different lengths, over packed or paged keys.

    Query i of a sequence with seqlen_q queries and seqlen_k keys has position i + seqlen_k -
    seqlen_q (bottom-right alignment). It sees the keys from window_size[0] before its position to
    window_size[1] after it. Negative sizes mean no limit; causal sets window_size[1] to 0.

    Args:
        q: (total_q, nheads, headdim), fp16, bf16 or fp32.
        k, v: (total_k, nheads_k, headdim), or with block_table (num_blocks, block_size, nheads_k,
            headdim), any block size.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, cumulative lengths from 0.
        max_seqlen_q, max_seqlen_k: the longest lengths, or upper bounds.
        dropout_p: only 0 is supported.
        softmax_scale: headdim ** -0.5 if None.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        alibi_slopes: (nheads,) or (batch, nheads) fp32; adds -slope * |distance of positions|.
        deterministic: has no effect, because results are always deterministic.
        return_attn_probs: also return the LSE and an empty tensor (flash-attn's S_dmask, which is
            empty without dropout).
        block_table: (batch, max_blocks) int32.

    Returns:
        Output, (total_q, nheads, headdim). With return_attn_probs also the LSE, (nheads, total_q)
        fp32, and the empty tensor. A query that sees no key gets output 0 and LSE +inf.

    Raises:
        NotImplementedError: dropout_p is not 0, or a backward pass goes through the output.
        ValueError: a shape, dtype, device or option does not fit.
    """
    if dropout_p:
        raise NotImplementedError(f"dropout_p: only 0 is supported, got {dropout_p}")
    if softmax_scale is not None:
        softmax_scale = check_number("softmax_scale", softmax_scale)
    inputs = (q, k, v)
    out, lse = flash_attn_varlen(
        *map(_detached, inputs), cu_seqlens_q, cu_seqlens_k,
        _as_integer("max_seqlen_q", max_seqlen_q), _as_integer("max_seqlen_k", max_seqlen_k),
        alibi_slopes, block_table,
        scale=softmax_scale, softcap=softcap, **_visible(window_size, causal),
        return_lse=return_attn_probs,
    )  # fmt: skip
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        out = _ForwardOnly.apply(out, *inputs)
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Write new keys and values, if given, into a KV cache, and compute attention over the cache.

    seqlen_k is the number of a sequence's tokens in the cache. It includes new tokens and excludes
    left padding. Query i has position i + seqlen_k - seqlen (bottom-right alignment). It sees the
    keys from window_size[0] before its position to window_size[1] after it. Negative sizes mean no
    limit; causal sets window_size[1] to 0.

    Args:
        q: (batch, seqlen, nheads, headdim), fp16, bf16 or fp32.
        k_cache, v_cache: (batch_cache, seqlen_cache, nheads_k, headdim), or with block_table
            (num_blocks, block_size, nheads_k, headdim), any block size.
        k, v: (batch, seqlen_new, nheads_k, headdim), written to the cache at cache_seqlens,
            cache_seqlens + 1, ... They require cache_seqlens.
        rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2), any float dtype, seqlen_ro at least the
            capacity of the cache per sequence. They require k and v. A new key is rotated by the
            index that it is written to. Query i is rotated by cache_seqlens + i if causal or with a
            window, otherwise by cache_seqlens.
        cache_seqlens: tokens in the cache before the call, an int or (batch,) int32. None: full.
        cache_batch_idx: (batch,) int32, the cache row of each sequence; not with block_table.
        cache_leftpad: (batch,) int32, the index where each sequence starts in the cache.
        block_table: (batch, max_blocks) int32.
        softmax_scale: headdim ** -0.5 if None.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        rotary_interleaved: pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).
        alibi_slopes: (nheads,) or (batch, nheads) fp32; adds -slope * |distance of positions|.
        num_splits: maximum number of programs that share the keys of a query. 0: automatic.
        return_softmax_lse: also return the LSE.

    Returns:
        Output, (batch, seqlen, nheads, headdim). With return_softmax_lse also the LSE, (batch,
        nheads, seqlen) fp32. A query that sees no key gets output 0 and LSE +inf.

    Mutates k_cache and v_cache if k and v are given. The host does not synchronise. Results do not
    require gradients.

    Raises:
        NotImplementedError: cache_batch_idx and block_table are both given.
        ValueError: a shape, dtype, device or option does not fit. For tensors in host memory also:
            a sequence outgrows the cache. Nothing is written then.
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

    if softmax_scale is not None:
        softmax_scale = check_number("softmax_scale", softmax_scale)
    cache_seqlen = None
    if isinstance(cache_seqlens, Integral) and not isinstance(cache_seqlens, bool):
        cache_seqlens, cache_seqlen = None, int(cache_seqlens)
    out, lse = flash_attn_kvcache(
        _detached(q), k_cache, v_cache, _detached(k), _detached(v), rotary_cos, rotary_sin,
        cache_seqlens, cache_seqlen, cache_batch_idx, cache_leftpad, block_table, alibi_slopes,
        scale=softmax_scale, softcap=softcap, **_visible(window_size, causal),
        rotary_interleaved=rotary_interleaved,
        num_splits=_as_integer("num_splits", num_splits), return_lse=return_softmax_lse,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out
