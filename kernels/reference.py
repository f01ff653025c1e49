"""Readable implementations of the ops in plain PyTorch, with the same signatures.

A reference computes in the dtype of its inputs. With fp64 inputs it gives the exact result that
kernels are compared with. With a kernel's fp16 or bf16 inputs it is an eager low-precision
computation, and its error sets the bound for the kernel's error (kernels/testing/accuracy.py). Both
computations read the same quantised numbers from an fp8 cache. References loop over sequences on
the host and synchronise freely.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from kernels.fp8_cache import FP8_DTYPE, Scale
from kernels.primitives import LN_2, LOG2_E
from kernels.sample_tokens import EXP2_TERMS, LOG_TERMS, MIN_NORMAL, NOISE_SPAN, SQRT_HALF_BITS
from kernels.score_options import ScoreOptions


def quantise(x: torch.Tensor, scale: Scale = None) -> torch.Tensor:
    """Quantise (num_tokens, num_kv_heads, head_dim) for an fp8 cache: x / scale in fp32, saturated.

    scale: a number, or a tensor with one element or one element per head.
    """
    x = x.float()
    if scale is not None:  # by a tensor: on a GPU, PyTorch multiplies by the reciprocal of a number
        x = x / per_head(torch.as_tensor(scale, dtype=torch.float32, device=x.device))
    return x.clamp(-448, 448).to(FP8_DTYPE)


def dequantise(x: torch.Tensor, scale: Scale, dtype: torch.dtype) -> torch.Tensor:
    """Return cache elements, (..., num_kv_heads, head_dim), times the fp8 scale, in `dtype`."""
    if scale is None:
        return x.to(dtype)
    return (x.to(torch.promote_types(dtype, torch.float32)) * per_head(scale)).to(dtype)


def per_head(scale: torch.Tensor | float) -> torch.Tensor | float:
    """Reshape a scale so that it broadcasts against (..., num_kv_heads, head_dim)."""
    return scale.reshape(-1, 1) if isinstance(scale, torch.Tensor) else scale


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
    """Reference of `kernels.store_kvcache`."""
    block_size = k_cache.shape[1]
    tokens = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[tokens].long()
    where = (slots // block_size, slots % block_size)
    for x, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        cache[where] = quantise(x[tokens], scale) if cache.dtype == FP8_DTYPE else x[tokens]


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, latent_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Reference of `kernels.concat_and_cache_mla`."""
    rows = torch.cat([kv_c, k_pe], dim=1)[:, None]
    cache = latent_cache.unsqueeze(2)
    store_kvcache(rows, rows, cache, cache, slot_mapping)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> torch.Tensor:
    """Reference of `kernels.add_rms_norm`; x may have any dimensions before the last."""
    if residual is not None:
        x = residual.add_(x)
    if not offset and weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)  # a narrower dtype would round the sum
    return F.rms_norm(x.to(wide), weight.shape, offset + weight.to(wide), eps).to(x.dtype)


_ACTIVATIONS: dict[str, Callable] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Reference of `kernels.gated_activation`."""
    return _ACTIVATIONS[activation](gate).mul_(up)


def apply_rotary_embedding(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
) -> torch.Tensor:
    """Reference of `kernels.apply_rotary_embedding`."""
    half = cos.shape[1]
    cos, sin = (table[positions.long(), None].to(x.dtype) for table in (cos, sin))
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(0, half), slice(half, 2 * half))
    )
    out = x.clone(memory_format=torch.contiguous_format)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


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
    """Reference of `kernels.rope_store_kvcache`."""

    def normalised(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        return add_rms_norm(x, None, weight, eps=norm_eps, offset=norm_offset)

    key = normalised(key, k_norm_weight)
    rotated = apply_rotary_embedding(key, positions, cos, sin, interleaved=interleaved)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    store_kvcache(rotated, value, k_cache, v_cache, slot_mapping, **scales)
    if query is not None:
        new = normalised(query, q_norm_weight)
        query.copy_(apply_rotary_embedding(new, positions, cos, sin, interleaved=interleaved))


def gather_tokens(
    cache: torch.Tensor, block_table: torch.Tensor, first: int, last: int
) -> torch.Tensor:
    """Return tokens [first, last) of one sequence, (last - first, num_kv_heads, head_dim)."""
    block_size = cache.shape[1]
    positions = torch.arange(first, last, device=cache.device)
    return cache[block_table[positions // block_size].long(), positions % block_size]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: ScoreOptions,
    *,
    q_positions: torch.Tensor, k_positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of one sequence.

    q: (num_queries, num_q_heads, head_dim); k, v: (num_keys, num_kv_heads, head_dim); q_positions
    and k_positions: their positions in the sequence. alibi_slopes: (num_q_heads,). Returns the
    output, shaped like q, and the LSE, (num_queries, num_q_heads). A query that sees no key gets
    output 0 and LSE -inf; with sinks, LSE = sink.
    """
    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)

    scores = torch.einsum("qhd,khd->hqk", q * options.scale, k)
    if options.softcap > 0:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distances = q_positions[:, None] - k_positions[None, :]
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes[:, None, None].to(q.dtype)
        scores = scores - slopes * distances.abs().to(q.dtype)
    visible = torch.ones_like(distances, dtype=torch.bool)
    if options.ahead is not None:
        visible &= distances >= -options.ahead
    if options.window_size is not None:
        visible &= distances < options.window_size
    scores = scores.masked_fill(~visible, -torch.inf)

    if options.sinks is not None:
        column = options.sinks.to(q.dtype)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, column], dim=-1)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    weights = torch.softmax(scores, -1)[..., : k.shape[0]]
    weights = weights.masked_fill(lse == -torch.inf, 0.0)
    out = torch.einsum("hqk,khd->qhd", weights, v)
    return out, lse.squeeze(-1).transpose(0, 1)


def slopes_of(alibi_slopes: torch.Tensor | None, seq: int) -> torch.Tensor | None:
    """Return a sequence's slopes, (num_q_heads,), from (num_q_heads,) or (batch, num_q_heads)."""
    return alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[seq]


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
    """Reference of `kernels.paged_decode_attention`; num_splits has no effect."""
    return paged_prefill_attention(
        q, k_cache, v_cache, block_tables, torch.arange(len(q) + 1), context_lens,
        max_seqlen_q=1, scale=scale, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
        out=out, return_lse=return_lse,
    )  # fmt: skip


def paged_prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    block_tables: torch.Tensor, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
    scale: float | None = None, window_size: int | None = None, softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    k_scale: Scale = None, v_scale: Scale = None,
    causal: bool = True, num_splits: int | None = 1,
    out: torch.Tensor | None = None, return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Reference of `kernels.paged_prefill_attention`; num_splits has no effect."""
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=q.dtype, device=q.device)
    options = ScoreOptions.checked(
        k_cache, scale, window_size, softcap, alibi_slopes, sinks, ahead=0 if causal else None
    )
    starts = cu_seqlens_q.tolist()
    for i, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        if rows.start == rows.stop:
            continue
        first_position = context_len - (rows.stop - rows.start)
        first = 0 if window_size is None else max(0, first_position - window_size + 1)
        context = (block_tables[i], first, context_len)
        out[rows], lse[rows] = attention(
            q[rows],
            dequantise(gather_tokens(k_cache, *context), k_scale, q.dtype),
            dequantise(gather_tokens(v_cache, *context), v_scale, q.dtype),
            replace(options, alibi_slopes=slopes_of(alibi_slopes, i)),
            q_positions=torch.arange(first_position, context_len, device=q.device),
            k_positions=torch.arange(first, context_len, device=q.device),
        )
    return (out, lse) if return_lse else out


def paged_mla_decode_attention(
    q: torch.Tensor, latent_cache: torch.Tensor,
    block_tables: torch.Tensor, context_lens: torch.Tensor,
    *,
    scale: float, head_dim_v: int = 512,
    num_splits: int | None = None,
    out: torch.Tensor | None = None, return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Reference of `kernels.paged_mla_decode_attention`; num_splits has no effect."""
    out = torch.empty_like(q[..., :head_dim_v]) if out is None else out
    keys = latent_cache.unsqueeze(2)
    return paged_decode_attention(
        q, keys, keys[..., :head_dim_v], block_tables, context_lens,
        scale=scale, out=out, return_lse=return_lse,
    )  # fmt: skip


def copy_blocks(
    caches: torch.Tensor | Sequence[tuple[torch.Tensor, torch.Tensor]], src_to_dst: torch.Tensor
) -> None:
    """Reference of `kernels.copy_blocks`."""
    layers = caches.unbind(1) if isinstance(caches, torch.Tensor) else caches
    source, destination = src_to_dst[(src_to_dst >= 0).all(dim=1)].unbind(1)
    for k_cache, v_cache in layers:
        k_cache[destination] = k_cache[source]
        v_cache[destination] = v_cache[source]


def swap_blocks(src_cache: torch.Tensor, dst_cache: torch.Tensor, src_to_dst: torch.Tensor) -> None:
    """Reference of `kernels.swap_blocks`."""
    source, destination = src_to_dst[(src_to_dst >= 0).all(dim=1)].unbind(1)
    blocks = src_cache.movedim(-4, 0)[source.to(src_cache.device)]
    dst_cache.movedim(-4, 0)[destination.to(dst_cache.device)] = blocks.to(dst_cache.device)


def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `kernels.merge_attention_states`."""
    parts_lse = torch.stack([lse_a, lse_b])
    parts_lse = parts_lse.masked_fill(parts_lse == torch.inf, -torch.inf)
    lse = torch.logsumexp(parts_lse, 0)
    weights = torch.exp(parts_lse - lse).masked_fill(parts_lse == -torch.inf, 0.0)
    weights = weights.to(out_a.dtype).unsqueeze(-1)
    parts = torch.stack([out_a, out_b]).masked_fill(weights == 0, 0.0)
    return (weights * parts).sum(0), lse


def slot_mapping_from_positions(
    positions: torch.Tensor, block_tables: torch.Tensor, seq_ids: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Reference of `kernels.slot_mapping_from_positions`."""
    slots = []
    for position, seq in zip(positions.tolist(), seq_ids.tolist(), strict=True):
        column = position // block_size
        mapped = 0 <= column < block_tables.shape[1]
        block = int(block_tables[seq, column]) if mapped else -1
        slots.append(block * block_size + position % block_size if block >= 0 else -1)
    return torch.tensor(slots, dtype=torch.int64, device=positions.device)


def shared_prefix_decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    prefix_block_tables: torch.Tensor, prefix_lens: torch.Tensor, group_offsets: torch.Tensor,
    suffix_block_tables: torch.Tensor, suffix_lens: torch.Tensor,
    *,
    scale: float | None = None, window_size: int | None = None, softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    k_scale: Scale = None, v_scale: Scale = None,
    num_prefix_splits: int | None = None, num_splits: int | None = None,
    out: torch.Tensor | None = None, return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Reference of `kernels.shared_prefix_decode_attention`; split counts have no effect."""
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=q.dtype, device=q.device)
    options = ScoreOptions.checked(k_cache, scale, window_size, softcap, alibi_slopes, sinks)
    starts = group_offsets.tolist()
    group_of = [g for g in range(len(prefix_lens)) for _ in range(starts[g], starts[g + 1])]
    for i, group in enumerate(group_of):
        prefix_len, suffix_len = int(prefix_lens[group]), int(suffix_lens[i])
        context_len = prefix_len + suffix_len
        first = 0 if window_size is None else max(0, context_len - window_size)
        prefix_range = (prefix_block_tables[group], min(first, prefix_len), prefix_len)
        suffix_range = (suffix_block_tables[i], max(0, first - prefix_len), suffix_len)
        ranges = (prefix_range, suffix_range)
        k, v = (
            dequantise(torch.cat([gather_tokens(cache, *r) for r in ranges]), cache_scale, q.dtype)
            for cache, cache_scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        row = slice(i, i + 1)
        out[row], lse[row] = attention(
            q[row], k, v, replace(options, alibi_slopes=slopes_of(alibi_slopes, i)),
            q_positions=torch.tensor([context_len - 1], device=q.device),
            k_positions=torch.arange(first, context_len, device=q.device),
        )  # fmt: skip
    return (out, lse) if return_lse else out


def philox(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Philox-4x32-10 (Salmon et al., 2011): four words for each key and counter.

    seeds: (num_rows,) int64, the 64-bit keys. counters: (num_counters,) int64 below 2^32. Returns
    (4, num_rows, num_counters) int64 from 0 to 2^32 - 1.
    """
    low = 2**32 - 1
    key = [seeds[:, None] & low, seeds[:, None] >> 32 & low]
    c0, c1, c2, c3 = counters[None], *counters.new_zeros(3, 1, 1)
    for _ in range(10):  # 64-bit products may wrap to negative numbers; no bit is lost
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (second >> 32 & low) ^ c1 ^ key[0], second & low
        c2, c3 = (first >> 32 & low) ^ c3 ^ key[1], first & low
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3))


def split_float(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (f, exponent) of positive normal fp32 numbers x = (1 + f) 2^exponent."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS.value) >> 23
    return (bits - (exponent << 23)).view(torch.float32) - 1, exponent


def natural_log(f: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return log((1 + f) 2^exponent) for 1 + f near 1, in fp32 like `kernels.sample_tokens`."""
    p = LOG_TERMS.value[-1]
    for term in LOG_TERMS.value[-2::-1]:
        p = term + f * p
    return exponent.float() * LN_2.value + f * (1.0 + f * p)


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Convert uniform 32-bit words (int64) to standard Gumbel variables (fp32)."""
    w, rest = ((x.float() + 0.5) * 2.0**-32 for x in (words, 2**32 - 1 - words))
    f, exponent = split_float(rest)
    near = w < 0.25
    f, exponent = split_float(-natural_log(torch.where(near, -w, f), exponent.masked_fill(near, 0)))
    return -natural_log(f, exponent)


def gumbel_noise(seeds: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the noise that `kernels.sample_tokens` adds, (num_rows, vocab_size) fp32."""
    span = min(vocab_size, NOISE_SPAN.value)
    chunks = torch.arange(-(-vocab_size // (4 * NOISE_SPAN.value)), device=seeds.device)
    counters = chunks[:, None] * NOISE_SPAN.value + torch.arange(span, device=seeds.device)
    words = philox(seeds, counters.flatten()).unflatten(2, counters.shape)  # [4, rows, chunks, S]
    return gumbel(words.permute(1, 2, 0, 3).flatten(1)[:, :vocab_size])


def softmax_weights(scores: torch.Tensor) -> torch.Tensor:
    """Return 2^40 exp(scores) as int64, rounded down. scores: fp32, <= 0."""
    x = scores.clamp(min=-30) * LOG2_E.value
    exponent = x.floor()
    f, p = x - exponent, EXP2_TERMS.value[-1]
    for term in EXP2_TERMS.value[-2::-1]:
        p = term + f * p
    return ((1.0 + f * p) * torch.exp2(exponent + 40)).long()


def mask_top_k_top_p(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
) -> torch.Tensor:
    """Return logits, (num_rows, vocab_size), with -inf where top-k and then top-p exclude them.

    top_ks and top_ps are per row, see `kernels.sample_tokens`. After top-k exactly min(k,
    vocab_size) tokens remain. Among equal logits the lower tokens remain.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    dropped = torch.zeros_like(ordered, dtype=torch.bool)
    if top_ks is not None:
        dropped |= torch.arange(logits.shape[-1], device=logits.device) >= top_ks[:, None]
    if top_ps is not None:
        scores = ordered.float() - ordered[:, :1].float()
        scores = (scores / temperatures.where(temperatures > 0, 1)[:, None]).nan_to_num(-torch.inf)
        weights = softmax_weights(scores).masked_fill(dropped, 0)
        before = weights.cumsum(dim=-1) - weights
        sought = weights.sum(dim=-1).double() * top_ps.double()
        dropped |= (before.double() >= sought[:, None]) & (top_ps < 1)[:, None]
    dropped[:, 0] = False
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    noise_seeds: torch.Tensor | None = None,
    *,
    min_ps: torch.Tensor | None = None,
    top_ks: torch.Tensor | None = None,
    top_ps: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `kernels.sample_tokens`: the same tokens in any dtype."""
    scores = logits
    if temperatures is not None and noise_seeds is not None:
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        temperatures = temperatures.float()[:, None]
        if min_ps is not None:
            log_min_ps = natural_log(*split_float(min_ps.float().clamp(min=MIN_NORMAL.value)))
            floor = scores.amax(dim=-1, keepdim=True) + temperatures * log_min_ps[:, None]
            scores = scores.masked_fill(scores < floor, -torch.inf)
        if top_ks is not None or top_ps is not None:
            scores = mask_top_k_top_p(scores, temperatures[:, 0], top_ks, top_ps)
        scores = scores + temperatures * gumbel_noise(noise_seeds, logits.shape[1])
    largest, tokens = scores.max(dim=-1)  # max returns a NaN if there is one
    return tokens.masked_fill_(~largest.isfinite(), -1)
