"""The configurations the kernels are shipped in, as calls of the public ops on meta tensors.

A configuration is a call that a tile table entry exists for; `kernels.compiled.compile` compiles
what these calls would launch. Block size 16 is the smallest that 16-byte accesses are promised for.
Configurations named fp8 have such a cache, scales per head, and bf16 queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kernels.add_rms_norm import add_rms_norm
from kernels.apply_rotary_embedding import apply_rotary_embedding
from kernels.copy_blocks import copy_blocks
from kernels.fp8_cache import FP8_DTYPE
from kernels.gated_activation import gated_activation
from kernels.merge_attention_states import merge_attention_states
from kernels.paged_decode_attention import paged_decode_attention
from kernels.paged_prefill_attention import paged_prefill_attention
from kernels.rope_store_kvcache import rope_store_kvcache
from kernels.sample_tokens import sample_tokens
from kernels.shared_prefix_decode_attention import shared_prefix_decode_attention
from kernels.slot_mapping_from_positions import slot_mapping_from_positions
from kernels.store_kvcache import store_kvcache
from kernels.swap_blocks import swap_blocks

HEAD_DIMS = (64, 80, 96, 128, 256)
HALF_DTYPES = (torch.float16, torch.bfloat16)
# Caches beyond 2 GiB, as most are: Triton's AMD backend addresses smaller tensors with 32 bits.
NUM_BLOCKS = 2**18


@dataclass(frozen=True)
class ShippedCall:
    """One configuration of one op. `run` calls it on meta tensors."""

    op: str
    config: str
    run: Callable[[], object]


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _name(dtype: torch.dtype) -> str:
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", FP8_DTYPE: "fp8"}
    return names[dtype]


def _cache(head_dim: int, dtype: torch.dtype, block_size: int = 16) -> torch.Tensor:
    return _meta(NUM_BLOCKS, block_size, 8, head_dim, dtype=dtype)


def _beside(dtype: torch.dtype) -> tuple[torch.dtype, dict[str, torch.Tensor]]:
    """What goes with a cache of `dtype`: queries of it, or bf16 ones and scales for fp8."""
    if dtype != FP8_DTYPE:
        return dtype, {}
    per_head = _meta(8, dtype=torch.float32)
    return torch.bfloat16, {"k_scale": per_head, "v_scale": per_head}


def _store_kvcache_calls() -> Iterator[ShippedCall]:
    for dtype in (*HALF_DTYPES, FP8_DTYPE):
        key_dtype, scales = _beside(dtype)
        for head_dim in HEAD_DIMS:
            key, cache = _meta(256, 8, head_dim, dtype=key_dtype), _cache(head_dim, dtype)
            slots = _meta(256, dtype=torch.int64)
            run = partial(store_kvcache, key, key, cache, cache, slots, **scales)
            yield ShippedCall("store_kvcache", f"{_name(dtype)} d{head_dim}", run)


def _rotary_calls(op: str) -> Iterator[ShippedCall]:
    """apply_rotary_embedding or rope_store_kvcache of a fused QKV projection, fp32 tables."""
    tokens = _meta(256, dtype=torch.int64)
    for dtype in HALF_DTYPES if op == "apply_rotary_embedding" else (*HALF_DTYPES, FP8_DTYPE):
        query_dtype, scales = _beside(dtype)
        for head_dim in HEAD_DIMS:
            qkv = _meta(256, 48, head_dim, dtype=query_dtype)
            query, key, value = qkv.split((32, 8, 8), dim=1)
            cache = _cache(head_dim, dtype)
            tables = [_meta(8192, head_dim // 2, dtype=torch.float32)] * 2
            config = f"{_name(dtype)} d{head_dim}"
            for interleaved in (False, True):
                if op == "apply_rotary_embedding":
                    run = partial(apply_rotary_embedding, query, tokens, *tables)
                else:
                    arguments = (query, key, value, cache, cache, tokens, tokens, *tables)
                    run = partial(rope_store_kvcache, *arguments, **scales)
                name = f"{config} interleaved" if interleaved else config
                yield ShippedCall(op, name, partial(run, interleaved=interleaved))
            if op == "rope_store_kvcache":
                weight = _meta(head_dim, dtype=query_dtype)
                norms = {"q_norm_weight": weight, "k_norm_weight": weight}
                yield ShippedCall(op, f"{config} norms", partial(run, interleaved=False, **norms))


def _attention(
    op: Callable,
    metadata: tuple[torch.Tensor, ...],
    num_tokens: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    group_size: int = 4,
    num_splits: int = 1,
    block_size: int = 16,
    features: bool = False,
    named: str = "",
    **options,
) -> ShippedCall:
    """An attention op on 8 KV heads. metadata: what follows the caches; named: in the config."""
    num_q_heads = 8 * group_size
    q_dtype, scales = _beside(dtype)
    options |= {"num_splits": num_splits, **scales}
    if features:
        per_head = _meta(num_q_heads, dtype=torch.float32)
        options |= {"window_size": 1024, "softcap": 50.0, "return_lse": True}
        options |= {"alibi_slopes": per_head, "sinks": per_head}
    q = _meta(num_tokens, num_q_heads, head_dim, dtype=q_dtype)
    cache = _cache(head_dim, dtype, block_size)
    config = f"{_name(dtype)} d{head_dim} g{group_size}{named}"
    config += " split" * (num_splits > 1) + " features" * features
    return ShippedCall(op.__name__, config, partial(op, q, cache, cache, *metadata, **options))


def _int32(*shape: int) -> torch.Tensor:
    return _meta(*shape, dtype=torch.int32)


def _decode(head_dim: int, dtype: torch.dtype, block_size: int = 16, **options) -> ShippedCall:
    named = f" b{block_size}" if block_size != 16 else ""
    options |= {"block_size": block_size, "named": named}
    metadata = (_int32(64, 256), _int32(64))
    return _attention(paged_decode_attention, metadata, 64, head_dim, dtype, **options)


def _prefill(
    head_dim: int, dtype: torch.dtype, batch: int = 1, block_size: int = 16, **options
) -> ShippedCall:
    named = f" b{block_size}" + " batch" * (batch > 1)
    options |= {"block_size": block_size, "named": named, "max_seqlen_q": 4096}
    metadata = (_int32(batch, 256), _int32(batch + 1), _int32(batch))
    return _attention(paged_prefill_attention, metadata, 4096, head_dim, dtype, **options)


def _shared_prefix(head_dim: int, dtype: torch.dtype, **options) -> ShippedCall:
    prefixes = (_int32(4, 2048), _int32(4), _int32(5))
    metadata = (*prefixes, _int32(256, 16), _int32(256))
    return _attention(shared_prefix_decode_attention, metadata, 256, head_dim, dtype, **options)


def _decode_calls() -> Iterator[ShippedCall]:
    for dtype in HALF_DTYPES:
        for head_dim in HEAD_DIMS:
            yield _decode(head_dim, dtype)
        yield _decode(128, dtype, group_size=71)
        yield _decode(128, dtype, num_splits=8)
        yield _decode(128, dtype, num_splits=8, features=True)
    yield _decode(128, torch.bfloat16, block_size=24)
    yield _decode(128, torch.bfloat16, block_size=256)
    for head_dim in HEAD_DIMS:
        yield _decode(head_dim, FP8_DTYPE)
    yield _decode(128, FP8_DTYPE, group_size=71)
    yield _decode(128, FP8_DTYPE, num_splits=8, features=True)


def _prefill_calls() -> Iterator[ShippedCall]:
    for dtype in HALF_DTYPES:
        for head_dim in HEAD_DIMS:
            yield _prefill(head_dim, dtype)
        yield _prefill(128, dtype, group_size=71, batch=64)
        yield _prefill(128, dtype, features=True)
        yield _prefill(128, dtype, num_splits=8)
        yield _prefill(256, dtype, num_splits=8, features=True)
    yield _prefill(128, torch.bfloat16, block_size=256)
    for head_dim in HEAD_DIMS:
        yield _prefill(head_dim, FP8_DTYPE)
    yield _prefill(128, FP8_DTYPE, features=True)
    yield _prefill(128, FP8_DTYPE, num_splits=8)


def _shared_prefix_calls() -> Iterator[ShippedCall]:
    for dtype in HALF_DTYPES:
        for head_dim in HEAD_DIMS:
            yield _shared_prefix(head_dim, dtype)
        yield _shared_prefix(128, dtype, group_size=71)
        yield _shared_prefix(128, dtype, features=True)
    yield _shared_prefix(128, FP8_DTYPE)


def _block_copy_calls(op: str) -> Iterator[ShippedCall]:
    """copy_blocks or swap_blocks; bits are copied, so fp16 stands for every 16-bit dtype."""
    pairs = _meta(64, 2, dtype=torch.int64)
    for head_dim in HEAD_DIMS:
        cache = _meta(2, 32, 4096, 16, 8, head_dim, dtype=torch.float16)
        layers = [tuple(cache[:, 0].unbind(0))] * 32
        hnd = _meta(2, 32, 512, 8, 16, head_dim, dtype=torch.float16).transpose(3, 4)
        config = f"fp16 d{head_dim}"
        if op == "copy_blocks":
            yield ShippedCall(op, config, partial(copy_blocks, cache, pairs))
            yield ShippedCall(op, f"{config} list", partial(copy_blocks, layers, pairs))
        else:
            yield ShippedCall(op, config, partial(swap_blocks, cache, cache, pairs))
            yield ShippedCall(op, f"{config} hnd", partial(swap_blocks, cache, hnd, pairs))


def _merge_attention_states_calls() -> Iterator[ShippedCall]:
    for dtype in HALF_DTYPES:
        for head_dim in HEAD_DIMS:
            out = _meta(64, 32, head_dim, dtype=dtype)
            lse = _meta(64, 32, dtype=torch.float32)
            run = partial(merge_attention_states, out, lse, out, lse)
            yield ShippedCall("merge_attention_states", f"{_name(dtype)} d{head_dim}", run)


def _slot_mapping_calls() -> Iterator[ShippedCall]:
    tokens, tables = _meta(4096, dtype=torch.int64), _meta(64, 256, dtype=torch.int32)
    run = partial(slot_mapping_from_positions, tokens, tables, tokens, 16)
    yield ShippedCall("slot_mapping_from_positions", "b16", run)


def _norm_calls() -> Iterator[ShippedCall]:
    """Hidden sizes of models from 0.6B to 70B, and the widest row in use."""
    for dtype in HALF_DTYPES:
        for size in (1024, 2560, 4096, 5120, 8192, 16384):
            x, weight = _meta(256, size, dtype=dtype), _meta(size, dtype=dtype)
            config = f"{_name(dtype)} h{size}"
            yield ShippedCall("add_rms_norm", config, partial(add_rms_norm, x, x, weight))
            alone = partial(add_rms_norm, x, None, weight)
            yield ShippedCall("add_rms_norm", f"{config} alone", alone)


def _gated_activation_calls() -> Iterator[ShippedCall]:
    """Halves of a fused projection, in the widths of Qwen3 8B, Gemma 2 9B and Qwen 2.5 7B."""
    for dtype in HALF_DTYPES:
        for size, activation in (
            (12288, "silu"),
            (14336, "gelu_pytorch_tanh"),
            (18944, "silu"),
        ):
            gate, up = _meta(256, 2 * size, dtype=dtype).chunk(2, dim=1)
            run = partial(gated_activation, gate, up, activation)
            config = f"{_name(dtype)} i{size} {activation[:4]}"
            yield ShippedCall("gated_activation", config, run)


def _sample_tokens_calls() -> Iterator[ShippedCall]:
    numbers, seeds = _meta(64, dtype=torch.float32), _meta(64, dtype=torch.int64)
    for dtype in (*HALF_DTYPES, torch.float32):
        logits = _meta(64, 128256, dtype=dtype)
        drawn = partial(sample_tokens, logits, numbers, seeds)
        for named, run in (
            ("", drawn),
            (" greedy", partial(sample_tokens, logits)),
            (" min_p", partial(drawn, min_ps=numbers)),
        ):
            yield ShippedCall("sample_tokens", f"{_name(dtype)} v128256{named}", run)


_CALLS = {
    "store_kvcache": _store_kvcache_calls,
    "copy_blocks": partial(_block_copy_calls, "copy_blocks"),
    "swap_blocks": partial(_block_copy_calls, "swap_blocks"),
    "shared_prefix_decode_attention": _shared_prefix_calls,
    "merge_attention_states": _merge_attention_states_calls,
    "slot_mapping_from_positions": _slot_mapping_calls,
    "rope_store_kvcache": partial(_rotary_calls, "rope_store_kvcache"),
    "apply_rotary_embedding": partial(_rotary_calls, "apply_rotary_embedding"),
    "add_rms_norm": _norm_calls,
    "gated_activation": _gated_activation_calls,
    "paged_decode_attention": _decode_calls,
    "paged_prefill_attention": _prefill_calls,
    "sample_tokens": _sample_tokens_calls,
}
OPS = tuple(_CALLS)


def shipped_calls(ops: Sequence[str] | None = None) -> Iterator[ShippedCall]:
    """Every shipped configuration, or those of the named ops."""
    for op in OPS if ops is None else ops:
        yield from _CALLS[op]()
