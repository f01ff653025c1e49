"""The configurations the kernels are shipped in, as calls of the public ops on meta tensors.

A configuration is a call that a tile table entry exists for; `kernels.compiled.compile` compiles
what these calls would launch. Inputs are the cases of `kernels.testing.cases` at real sizes, so
bytes and operations of a call are known as well. Block size 16 is the smallest that 16-byte
accesses are promised for. Configurations named fp8 have an fp8 cache, scales per head, and bf16
queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.cases import ATTENTION_FEATURES, Case, make_case

HEAD_DIMS = (64, 80, 96, 128, 256)
HALF_DTYPES = (torch.float16, torch.bfloat16)
# Caches beyond 2 GiB, as most are: Triton's AMD backend addresses smaller tensors with 32 bits.
_FIRST_BLOCK = 2**18
_SIZES = {
    "num_q_heads": 32,
    "num_kv_heads": 8,
    "num_tokens": 8192,
    "num_positions": 8192,
    "vocab_size": 128_256,
    "num_pairs": 64,
    "num_layers": 32,
    "table_width": 2048,
    "padded": False,
    "device": "meta",
}
_DECODE = {"context_lens": (4096,) * 64}
_PROMPT = {"context_lens": (8192,), "query_lens": (8192,)}
_FEW_QUERIES = {"context_lens": (32768,), "query_lens": (16,)}
_GROUPS = {"prefix_lens": (32768,) * 4, "group_sizes": (64,) * 4, "context_lens": (256,) * 256}
PROBLEMS = {
    "paged_decode_attention": "64 sequences of 4096 tokens",
    "shared_prefix_decode_attention": "4 groups of 64 sequences, prefix 32768, suffix 256 tokens",
    "copy_blocks": "64 blocks, K and V of 32 layers",
    "swap_blocks": "64 blocks, K and V of 32 layers",
}


@dataclass(frozen=True)
class ShippedCall:
    """One configuration of one op."""

    op: str
    config: str
    sizes: dict[str, Any]
    problem: str = "8192 tokens"
    """The sizes in words."""

    def case(self) -> Case:
        """The call and what it costs."""
        return make_case(self.op, **_SIZES | self.sizes)

    def run(self) -> None:
        """Call the op."""
        self.case().call()


def _dtypes(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """dtype: of everything, or of an fp8 cache beside bf16."""
    if dtype == FP8_DTYPE:
        return {"dtype": torch.bfloat16, "kv_dtype": dtype}
    return {"dtype": dtype}


def _name(dtype: torch.dtype) -> str:
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", FP8_DTYPE: "fp8"}
    return names[dtype]


def _by_head_dim(
    op: str, dtypes: Sequence[torch.dtype], features: Sequence[str] = ("",)
) -> Iterator[ShippedCall]:
    """Calls for every dtype, head_dim and single feature; the first may be none."""
    for dtype in dtypes:
        for head_dim in HEAD_DIMS:
            for feature in features:
                sizes = {"head_dim": head_dim, "features": (feature,) if feature else ()}
                # The planes of copies and swaps are one tensor.
                sizes["first_block"] = _FIRST_BLOCK if "store" in op else 4096
                config = f"{_name(dtype)} d{head_dim} {feature}".strip()
                problem = PROBLEMS.get(op, "8192 tokens")
                yield ShippedCall(op, config, sizes | _dtypes(dtype), problem)


def _attention(
    op: str,
    head_dim: int,
    dtype: torch.dtype,
    lens: dict[str, tuple[int, ...]],
    problem: str,
    *,
    group_size: int = 4,
    num_splits: int = 1,
    block_size: int = 16,
    features: bool = False,
    named: str = "",
) -> ShippedCall:
    """An attention op on 8 KV heads. named: in the name of the configuration."""
    options = {"num_splits": num_splits, "return_lse": features}
    if features:
        options |= {"window_size": 1024, "softcap": 50.0}
    sizes = {
        "head_dim": head_dim,
        "num_q_heads": 8 * group_size,
        "block_size": block_size,
        "first_block": _FIRST_BLOCK,
        "features": ATTENTION_FEATURES if features else (),
        "options": options,
    }
    config = f"{_name(dtype)} d{head_dim} g{group_size}{named}"
    config += " split" * (num_splits > 1) + " features" * features
    return ShippedCall(op, config, sizes | lens | _dtypes(dtype), problem)


def _decode(head_dim: int, dtype: torch.dtype, block_size: int = 16, **options: Any) -> ShippedCall:
    named = f" b{block_size}" if block_size != 16 else ""
    op, options = "paged_decode_attention", options | {"block_size": block_size, "named": named}
    return _attention(op, head_dim, dtype, _DECODE, PROBLEMS[op], **options)


def _prefill(
    head_dim: int, dtype: torch.dtype, *, batch: int = 1, block_size: int = 16, **options: Any
) -> ShippedCall:
    options |= {"block_size": block_size, "named": f" b{block_size}" + " batch" * (batch > 1)}
    lens, problem = _PROMPT, "a prompt of 8192 tokens"
    if options.get("num_splits", 1) > 1:
        lens, problem = _FEW_QUERIES, "16 tokens, 32752 cached"
    if batch > 1:
        prompts = (128,) * (batch - 1) + (4096,)
        lens = {"context_lens": prompts, "query_lens": prompts}
        problem = f"{batch - 1} prompts of 128 tokens, one of 4096"
    return _attention("paged_prefill_attention", head_dim, dtype, lens, problem, **options)


def _shared_prefix(head_dim: int, dtype: torch.dtype, **options: Any) -> ShippedCall:
    op = "shared_prefix_decode_attention"
    return _attention(op, head_dim, dtype, _GROUPS, PROBLEMS[op], **options)


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


def _slot_mapping_calls() -> Iterator[ShippedCall]:
    yield ShippedCall("slot_mapping_from_positions", "b16", {"context_lens": (128,) * 64})


def _norm_calls() -> Iterator[ShippedCall]:
    """Hidden sizes of models from 0.6B to 70B, and the widest row in use."""
    for dtype in HALF_DTYPES:
        for size in (1024, 2560, 4096, 5120, 8192, 16384):
            for feature in ((), ("alone",)):
                sizes = {"width": size, "dtype": dtype, "features": feature}
                config = " ".join((_name(dtype), f"h{size}", *feature))
                yield ShippedCall("add_rms_norm", config, sizes)


def _gated_activation_calls() -> Iterator[ShippedCall]:
    """Halves of a fused projection, in the widths of Qwen3 8B, Gemma 2 9B and Qwen 2.5 7B."""
    for dtype in HALF_DTYPES:
        for size, name in ((12288, "silu"), (14336, "gelu"), (18944, "silu")):
            features = ("gelu",) if name == "gelu" else ()
            sizes = {"width": size, "dtype": dtype, "features": features}
            yield ShippedCall("gated_activation", f"{_name(dtype)} i{size} {name}", sizes)


def _sample_tokens_calls() -> Iterator[ShippedCall]:
    for dtype in (*HALF_DTYPES, torch.float32):
        for feature in ((), ("greedy",), ("min_p",)):
            sizes = {"num_tokens": 64, "dtype": dtype, "features": feature}
            config = " ".join((_name(dtype), "v128256", *feature))
            yield ShippedCall("sample_tokens", config, sizes, "64 rows of 128256 logits")


_CALLS: dict[str, Callable[[], Iterator[ShippedCall]]] = {
    "store_kvcache": partial(_by_head_dim, "store_kvcache", (*HALF_DTYPES, FP8_DTYPE)),
    # Bits are copied, so fp16 stands for every 16-bit dtype.
    "copy_blocks": partial(_by_head_dim, "copy_blocks", (torch.float16,), ("", "list")),
    "swap_blocks": partial(_by_head_dim, "swap_blocks", (torch.float16,), ("", "hnd")),
    "shared_prefix_decode_attention": _shared_prefix_calls,
    "merge_attention_states": partial(_by_head_dim, "merge_attention_states", HALF_DTYPES),
    "slot_mapping_from_positions": _slot_mapping_calls,
    "rope_store_kvcache": partial(
        _by_head_dim,
        "rope_store_kvcache",
        (*HALF_DTYPES, FP8_DTYPE),
        ("", "interleaved", "norms"),
    ),
    "apply_rotary_embedding": partial(
        _by_head_dim, "apply_rotary_embedding", HALF_DTYPES, ("", "interleaved")
    ),
    "add_rms_norm": _norm_calls,
    "gated_activation": _gated_activation_calls,
    "paged_decode_attention": _decode_calls,
    "paged_prefill_attention": _prefill_calls,
    "sample_tokens": _sample_tokens_calls,
}
OPS = tuple(_CALLS)


def shipped_calls(ops: Sequence[str] | None = None) -> Iterator[ShippedCall]:
    """Every shipped configuration, or the ones of the named ops."""
    for op in OPS if ops is None else ops:
        yield from _CALLS[op]()
