"""Ops on a cache of latents, at the sizes of DeepSeek's models."""

from dataclasses import replace
from typing import Any

import torch
from torch import zeros

from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.inputs import LAYOUTS, random_paged_batch
from kernels.testing.op import HALF, Case, Lens, Op, Sizes, each
from kernels.testing.ops.attention import NARROW_TABLE, SEQUENCES, SPLITS, SPLITS_DRAWN, TINY
from kernels.testing.ops.stores import SLOTS


def _concat_and_cache_mla(s: Sizes) -> Case:
    random = s.random()
    dims = s.latent_dims
    # Projected together, as in DeepSeek's models.
    kv_c, k_pe = random.normal(s.num_tokens, sum(dims), dtype=s.dtype).split(dims, dim=1)
    sizes = replace(s, num_kv_heads=1, head_dim=sum(dims), kv_dtype=None)
    slots, (cache, _) = sizes.slots_and_caches(random)
    return Case(
        "concat_and_cache_mla",
        {"kv_c": kv_c, "k_pe": k_pe, "latent_cache": cache[:, :, 0], "slot_mapping": slots},
        num_bytes=s.num_tokens * (2 * sum(dims) * s.dtype.itemsize + 8),
        returns=(),
        writes=("latent_cache",),
    )


def _paged_mla_decode_attention(s: Sizes) -> Case:
    rank, rope_dim = s.latent_dims
    paged = s.paged | {"num_kv_heads": 1, "head_dim": rank + rope_dim, "kv_dtype": None}
    inputs: dict[str, Any] = random_paged_batch(s.context_lens, **paged).inputs
    inputs |= {"latent_cache": inputs.pop("k_cache")[:, :, 0], "head_dim_v": rank}
    del inputs["v_cache"]
    options = {"scale": (rank / 4 + rope_dim) ** -0.5, "return_lse": True}
    options |= ({"num_splits": 3} if "split" in s.features else {}) | s.options
    num_tokens, num_rows = sum(s.context_lens), len(s.context_lens) * s.num_q_heads
    elements = num_tokens * (rank + rope_dim) + num_rows * (2 * rank + rope_dim)
    return Case(
        "paged_mla_decode_attention",
        inputs | options,
        num_bytes=elements * s.dtype.itemsize + s.table_bytes(s.context_lens),
        flops=2 * num_tokens * s.num_q_heads * (2 * rank + rope_dim),
        returns=("out", "lse") if options["return_lse"] else ("out",),
    )


_V3 = {"num_q_heads": 40, "head_dim": 128, "dtype": torch.bfloat16, "options": {"num_splits": 2}}
OPS = {
    "concat_and_cache_mla": Op(
        case=_concat_and_cache_mla,
        is_exact=True,
        drawn={"layout": LAYOUTS},
        tiny={"spare_blocks": 4},
        ranges=SLOTS,
        free_dims=frozenset({("latent_cache", 0), ("latent_cache", 1)}),
        shipped=each(HALF, {"r512": {"head_dim": 128}}),
    ),
    "paged_mla_decode_attention": Op(
        case=_paged_mla_decode_attention,
        features=("split",),
        drawn={
            "context_lens": Lens(110, 3), "layout": LAYOUTS,
            "scale": (0.0, 0.07, 0.5), "num_splits": SPLITS_DRAWN,
        },
        executed=({"context_lens": (70, 5, 0)}, *[_V3] * 3),
        repeated={"context_lens": (5000, 300, 33) * 20},
        tiny={"context_lens": (7, 8), **TINY},
        optional={"out": zeros(2, 4, 64)},
        ranges=SEQUENCES | {"scale": (0, None), "num_splits": SPLITS},
        free_dims=frozenset({("block_tables", 1), ("latent_cache", 0), ("latent_cache", 1)}),
        bad_calls=(
            ("head_dim_v: expected a number from 16 to 512, got 8", {"head_dim_v": 8}),
            ("head_dim_v: ...leaves 16, 32 or 64 of latent_dim=80, got 32", {"head_dim_v": 32}),
            ("head_dim_v: expected a power of two ...got 48", {"head_dim_v": 48}),
            ("latent_cache: expected dtype", {"latent_cache": zeros(5, 4, 80, dtype=FP8_DTYPE)}),
            ("q: expected num_heads of at least 1, got 0", {"q": zeros(2, 0, 80)}),
            ("out: expected shape (..., head_dim_v=64), got (2, 4, 80)", {"out": zeros(2, 4, 80)}),
        ),
        bad_values=(NARROW_TABLE,),
        # Query heads of DeepSeek-V2-Lite and DeepSeek-V3.
        shipped=each(HALF, {
            f"{num_heads} heads{' split' * (num_splits > 1)}": {
                "num_q_heads": num_heads, "head_dim": 128, "block_size": 64,
                "context_lens": (4096,) * 64,
                "options": {"num_splits": num_splits, "return_lse": False},
            }
            for num_heads in (16, 128)
            for num_splits in (1, 8)
        }),
        guarded=dict.fromkeys(("sm_80", "sm_90"), "bf16 16 heads$|bf16 128 heads"),
        timed={"mla": {}},
    ),
}  # fmt: skip
