"""A valid call of every op at a tiny size, from which tests make invalid ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._pytree import tree_map_only

import kernels
from kernels import flash_attn_compat

ATTENTION = (
    "paged_decode_attention",
    "paged_prefill_attention",
    "shared_prefix_decode_attention",
)
FP8_OPS = (*ATTENTION, "store_kvcache", "rope_store_kvcache")
"""Ops that take the scales of an fp8 cache."""


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def i32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def i64(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def kv(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Both caches of a shape."""
    return {"k_cache": zeros(*shape, dtype=dtype), "v_cache": zeros(*shape, dtype=dtype)}


def function(op: str) -> Callable:
    """The public function of this name."""
    return getattr(kernels, op, None) or getattr(flash_attn_compat, op)


def good_call(op: str) -> dict[str, object]:
    """Arguments of an op by name, in host memory: 2 sequences or 4 tokens, 4 query heads and 2 KV
    heads of 16, 5 blocks of 4 slots; everything that is written to is 0 before."""
    attention = {"q": ones(2, 4, 16), **kv(5, 4, 2, 16), "out": zeros(2, 4, 16)}
    lens, tables = i32(7, 8), i32([0, 1], [2, 3])
    store = {"key": ones(4, 2, 16), "value": ones(4, 2, 16), **kv(5, 4, 2, 16)}
    store["slot_mapping"] = torch.arange(4)
    rotary = {"positions": torch.arange(4), "cos": ones(9, 8), "sin": ones(9, 8)}
    return {
        "paged_decode_attention": {**attention, "block_tables": tables, "context_lens": lens},
        "paged_prefill_attention": {
            **attention,
            "block_tables": tables,
            "context_lens": lens,
            "cu_seqlens_q": i32(0, 1, 2),
            "max_seqlen_q": 1,
        },
        "shared_prefix_decode_attention": {
            **attention,
            "prefix_block_tables": tables,
            "prefix_lens": lens,
            "group_offsets": i32(0, 1, 2),
            "suffix_block_tables": i32([4, 4], [4, 4]),
            "suffix_lens": i32(3, 5),
        },
        "store_kvcache": store,
        "rope_store_kvcache": {"query": zeros(4, 6, 16), **store, **rotary},
        "add_rms_norm": {"x": ones(4, 48), "residual": zeros(4, 48), "weight": ones(48)},
        "gated_activation": {"gate": ones(4, 48), "up": ones(4, 48), "activation": "silu"},
        "apply_rotary_embedding": {"x": ones(4, 2, 16), **rotary},
        "merge_attention_states": {
            "out_a": ones(4, 2, 16),
            "lse_a": ones(4, 2),
            "out_b": ones(4, 2, 16),
            "lse_b": ones(4, 2),
        },
        "slot_mapping_from_positions": {
            "positions": i64(0, 1),
            "block_tables": zeros(2, 3, dtype=torch.int32),
            "seq_ids": i64(0, 1),
            "block_size": 4,
        },
        "sample_tokens": {
            "logits": ones(2, 9),
            "temperatures": ones(2),
            "noise_seeds": i64(1, 2),
            "min_ps": zeros(2),
        },
        "copy_blocks": {
            "caches": torch.arange(2 * 5 * 16.0).view(2, 1, 5, 1, 1, 16),
            "src_to_dst": i64([0, 1]),
        },
        "swap_blocks": {
            "src_cache": ones(5, 4, 2, 16),
            "dst_cache": zeros(9, 4, 2, 16),
            "src_to_dst": i64([0, 1]),
        },
        "flash_attn_with_kvcache": {
            "q": ones(2, 3, 4, 16),
            "k_cache": zeros(2, 8, 2, 16),
            "v_cache": zeros(2, 8, 2, 16),
        },
        "flash_attn_varlen_func": {
            "q": ones(5, 4, 16),
            "k": zeros(7, 2, 16),
            "v": zeros(7, 2, 16),
            "cu_seqlens_q": i32(0, 2, 5),
            "cu_seqlens_k": i32(0, 3, 7),
            "max_seqlen_q": 3,
            "max_seqlen_k": 4,
        },
    }[op]


def on_device(call: dict[str, object], device: torch.device) -> dict[str, object]:
    """The call with its tensors moved, in the strides they have; meta tensors stay, and the host
    cache of a swap is pinned."""

    def moved(tensor):
        if tensor.is_meta:
            return tensor
        if tensor is call.get("dst_cache"):
            return tensor if device.type == "cpu" else tensor.pin_memory()
        if tensor.is_contiguous():
            return tensor.to(device)
        options = {"dtype": tensor.dtype, "device": device}
        return torch.empty_strided(tensor.size(), tensor.stride(), **options).copy_(tensor)

    return tree_map_only(torch.Tensor, moved, call)
