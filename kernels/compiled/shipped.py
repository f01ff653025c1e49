"""The configurations that the kernels are tuned for, as calls of the public ops on meta tensors.

`kernels.compiled.compile` compiles the kernels that these calls would launch. Inputs are the cases
of `kernels.testing.cases` at real sizes. Block size 16 is the smallest with guaranteed 16-byte
accesses. Configurations named fp8 have an fp8 cache, scales per head, and bf16 queries, keys and
values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.cases import ATTENTION_FEATURES, make_case

HEAD_DIMS = (64, 80, 96, 128, 256)
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", FP8_DTYPE: "fp8"}
_HALF = (torch.float16, torch.bfloat16)
_CACHES = (*_HALF, FP8_DTYPE)
_SIZES: dict[str, Any] = {
    "num_q_heads": 32, "num_kv_heads": 8, "num_tokens": 8192, "num_positions": 8192,
    "vocab_size": 128_256, "num_pairs": 64, "num_layers": 32, "table_width": 2048,
    "padded": False, "device": "meta",
}  # fmt: skip
_LENS: dict[str, dict[str, Any]] = {
    "paged_decode_attention": {"context_lens": (4096,) * 64},
    "shared_prefix_decode_attention": {
        "prefix_lens": (32768,) * 4, "group_sizes": (64,) * 4, "context_lens": (256,) * 256
    },
}  # fmt: skip


@dataclass(frozen=True)
class ShippedCall:
    """One configuration of one op."""

    op: str
    config: str
    sizes: dict[str, Any]

    def run(self) -> None:
        """Call the op."""
        make_case(self.op, **_SIZES | self.sizes).call()


def _dtypes(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """dtype: of all tensors, or fp8 of the cache alone, with bf16 tensors."""
    of_cache = {"dtype": torch.bfloat16, "kv_dtype": dtype}
    return of_cache if dtype == FP8_DTYPE else {"dtype": dtype}


def _each(
    op: str, dtypes: Sequence[torch.dtype], variants: dict[str, dict[str, Any]]
) -> list[ShippedCall]:
    """Calls for every dtype and variant, sizes by name."""
    return [
        ShippedCall(op, f"{_NAMES[dtype]} {name}", sizes | _dtypes(dtype))
        for dtype in dtypes
        for name, sizes in variants.items()
    ]


def _by_head_dim(
    op: str, dtypes: Sequence[torch.dtype], features: Sequence[str] = ()
) -> list[ShippedCall]:
    """Calls for every dtype and head_dim, without features and with each one."""
    variants = {
        f"d{head_dim} {feature}".strip(): {
            "head_dim": head_dim,
            "features": (feature,) if feature else (),
        }
        for head_dim in HEAD_DIMS
        for feature in ("", *features)
    }
    return _each(op, dtypes, variants)


def _attention(
    op: str, dtype: torch.dtype, *, head_dim: int = 128, group_size: int = 4, num_splits: int = 1,
    block_size: int = 16, batch: int = 1, features: bool = False,
) -> ShippedCall:  # fmt: skip
    """An attention op on 8 KV heads. batch: prompts in prefill."""
    options: dict[str, Any] = {"num_splits": num_splits, "return_lse": features}
    if features:
        options |= {"window_size": 1024, "softcap": 50.0}
    config = f"{_NAMES[dtype]} d{head_dim} g{group_size}"
    lens = _LENS.get(op, {})
    if op == "paged_prefill_attention":
        config += f" b{block_size}" + " batch" * (batch > 1)
        prompts = (128,) * (batch - 1) + (4096 if batch > 1 else 8192,)
        lens = {"context_lens": prompts, "query_lens": prompts}
        if num_splits > 1:
            lens = {"context_lens": (32768,), "query_lens": (16,)}
    elif block_size != 16:
        config += f" b{block_size}"
    sizes = {
        "head_dim": head_dim, "num_q_heads": 8 * group_size, "block_size": block_size,
        "features": ATTENTION_FEATURES if features else (), "options": options,
    }  # fmt: skip
    config += " split" * (num_splits > 1) + " features" * features
    return ShippedCall(op, config, sizes | lens | _dtypes(dtype))


_EVERY_DIM = tuple({"head_dim": head_dim} for head_dim in HEAD_DIMS)
_GROUP: dict[str, Any] = {"group_size": 71}
_SPLIT: dict[str, Any] = {"num_splits": 8}
_FEATURES = {"features": True}
_LONG_SPLIT = _SPLIT | _FEATURES | {"head_dim": 256}
_ATTENTION: dict[str, tuple[tuple[tuple[torch.dtype, ...], tuple[dict[str, Any], ...]], ...]] = {
    "shared_prefix_decode_attention": (
        (_HALF, (*_EVERY_DIM, _GROUP, _FEATURES)),
        ((FP8_DTYPE,), ({},)),
    ),
    "paged_decode_attention": (
        (_HALF, (*_EVERY_DIM, _GROUP, _SPLIT, _SPLIT | _FEATURES)),
        ((torch.bfloat16,), ({"block_size": 24}, {"block_size": 256})),
        ((FP8_DTYPE,), (*_EVERY_DIM, _GROUP, _SPLIT | _FEATURES)),
    ),
    "paged_prefill_attention": (
        (_HALF, (*_EVERY_DIM, _GROUP | {"batch": 64}, _FEATURES, _SPLIT, _LONG_SPLIT)),
        ((torch.bfloat16,), ({"block_size": 256},)),
        ((FP8_DTYPE,), (*_EVERY_DIM, _FEATURES, _SPLIT)),
    ),
}
"""(dtypes, variants) of each attention op."""


def _attention_calls(op: str) -> list[ShippedCall]:
    return [
        _attention(op, dtype, **variant)
        for dtypes, variants in _ATTENTION[op]
        for dtype in dtypes
        for variant in variants
    ]


# Hidden sizes of models from 0.6B to 70B, and the widest row in use.
_HIDDEN = {
    " ".join((f"h{size}", *features)): {"width": size, "features": features}
    for size in (1024, 2560, 4096, 5120, 8192, 16384)
    for features in ((), ("alone",))
}
# Halves of a fused projection, in the widths of Qwen3 8B, Gemma 2 9B and Qwen 2.5 7B.
_GATED: dict[str, dict[str, Any]] = {
    "i12288 silu": {"width": 12288},
    "i14336 gelu": {"width": 14336, "features": ("gelu",)},
    "i18944 silu": {"width": 18944},
}
_SAMPLED = {
    " ".join(("v128256", *features)): {"num_tokens": 64, "features": features}
    for features in ((), ("greedy",), ("min_p",), ("min_p", "top_k", "top_p"))
}
# Query heads of DeepSeek-V2-Lite and DeepSeek-V3.
_MLA = {
    f"{num_heads} heads{' split' * (num_splits > 1)}": {
        "num_q_heads": num_heads, "head_dim": 128, "block_size": 64,
        "context_lens": (4096,) * 64, "options": {"num_splits": num_splits, "return_lse": False},
    }
    for num_heads in (16, 128)
    for num_splits in (1, 8)
}  # fmt: skip
_CALLS = {
    "store_kvcache": _by_head_dim("store_kvcache", _CACHES),
    # Bits are copied, so fp16 stands for every 16-bit dtype.
    "copy_blocks": _by_head_dim("copy_blocks", (torch.float16,), ("list",)),
    "swap_blocks": _by_head_dim("swap_blocks", (torch.float16,), ("hnd",)),
    "shared_prefix_decode_attention": _attention_calls("shared_prefix_decode_attention"),
    "merge_attention_states": _by_head_dim("merge_attention_states", _HALF),
    "slot_mapping_from_positions": [
        ShippedCall("slot_mapping_from_positions", "b16", {"context_lens": (128,) * 64})
    ],
    "rope_store_kvcache": _by_head_dim("rope_store_kvcache", _CACHES, ("interleaved", "norms")),
    "apply_rotary_embedding": _by_head_dim("apply_rotary_embedding", _HALF, ("interleaved",)),
    "add_rms_norm": _each("add_rms_norm", _HALF, _HIDDEN),
    "gated_activation": _each("gated_activation", _HALF, _GATED),
    "paged_decode_attention": _attention_calls("paged_decode_attention"),
    "paged_prefill_attention": _attention_calls("paged_prefill_attention"),
    "concat_and_cache_mla": _each("concat_and_cache_mla", _HALF, {"r512": {"head_dim": 128}}),
    "paged_mla_decode_attention": _each("paged_mla_decode_attention", _HALF, _MLA),
    "sample_tokens": _each("sample_tokens", (*_HALF, torch.float32), _SAMPLED),
}
OPS = tuple(_CALLS)


def shipped_calls(ops: Sequence[str] | None = None) -> Iterator[ShippedCall]:
    """Every shipped configuration, or the ones of the named ops."""
    for op in OPS if ops is None else ops:
        yield from _CALLS[op]
