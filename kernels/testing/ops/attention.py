"""Attention over a cache of keys and values, and the merge of two attention states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import ones, zeros

from kernels.fp8_cache import FP8_DTYPE
from kernels.testing import inputs
from kernels.testing.inputs import i32, kv
from kernels.testing.op import (
    HALF,
    HEAD_DIMS,
    BadCall,
    Case,
    Op,
    Sizes,
    SizesOf,
    by_head_dim,
    each,
)
from kernels.testing.ops import stores

FEATURES = ("window", "softcap", "alibi", "sinks", "split")
TINY: SizesOf = {"spare_blocks": 1, "table_width": 2, "options": {"return_lse": False}}
SPLITS, SPLITS_DRAWN = (1, 65535), (None, 1, 2, 3, 7)
SEQUENCES = {"block_tables": (0, 4), "context_lens": (0, None)}


def _merge_attention_states(s: Sizes) -> Case:
    random, call = s.random(), dict[str, Any]()
    for part in "ab":
        out = random.normal(s.num_tokens, s.num_q_heads, s.head_dim, dtype=s.dtype)
        lse = random.normal(s.num_tokens, s.num_q_heads, dtype=torch.float32)
        if s.padded:  # no keys
            empty = random.integers(0, 5, *lse.shape) == 0
            lse[empty] = -torch.inf
            out[empty] = inputs.poison_(torch.empty_like(out[empty]))
        call |= {f"out_{part}": out, f"lse_{part}": lse}
    return Case(
        "merge_attention_states",
        call,
        num_bytes=3 * (out.numel() * out.itemsize + lse.nbytes),
        flops=4 * out.numel(),
        returns=("out", "lse"),
    )


def _attention(s: Sizes, op: str, call: dict[str, Any], cached: Sequence[int], pairs: int) -> Case:
    """cached: lengths in the cache, each read once; pairs: of a query and a key that it sees."""
    q = call["q"]
    call = call | {"return_lse": True} | s.score_options
    return Case(
        op,
        call,
        num_bytes=sum(cached) * s.token_bytes + s.table_bytes(cached) + 2 * q.numel() * q.itemsize,
        flops=4 * pairs * s.num_q_heads * s.head_dim,
        returns=("out", "lse") if call["return_lse"] else ("out",),
    )


def _batch(s: Sizes, query_lens: Sequence[int]) -> inputs.PagedBatch:
    """The sequences, with poison in tokens that the window hides from all queries."""
    hidden = inputs.hidden_tokens(s.context_lens, query_lens, s.score_options.get("window_size"))
    return inputs.random_paged_batch(
        s.context_lens, query_lens=query_lens, hidden_tokens=hidden, **s.paged
    )


def _paged_decode_attention(s: Sizes) -> Case:
    call = _batch(s, [1] * len(s.context_lens)).inputs
    pairs = sum(s.context_lens)
    return _attention(s, "paged_decode_attention", call, s.context_lens, pairs)


def _shared_prefix_decode_attention(s: Sizes) -> Case:
    sizes = s.group_sizes, s.prefix_lens, s.context_lens
    window_size = s.score_options.get("window_size")
    call = inputs.random_shared_prefix_args(*sizes, window_size=window_size, **s.paged)
    groups = zip(s.group_sizes, s.prefix_lens, strict=True)
    pairs = sum(s.context_lens) + sum(size * prefix for size, prefix in groups)
    cached = [*s.prefix_lens, *s.context_lens]
    return _attention(s, "shared_prefix_decode_attention", call, cached, pairs)


def _paged_prefill_attention(s: Sizes) -> Case:
    batch = _batch(s, s.query_lens)
    call: dict[str, Any] = {**batch.inputs, "cu_seqlens_q": batch.cu_seqlens_q}
    call["max_seqlen_q"] = max(s.query_lens, default=0)
    lens = list(zip(s.query_lens, s.context_lens, strict=True))
    pairs = sum(q * (n - q) + q * (q + 1) // 2 for q, n in lens)
    return _attention(s, "paged_prefill_attention", call, s.context_lens, pairs)


def _queries(*shape: int) -> dict[str, Any]:
    """A change of q, with output of its shape."""
    return {"q": zeros(*shape), "out": None}


def _shipped(
    lens: SizesOf, num_splits: int = 1, features: bool = False, **sizes: Any
) -> dict[str, Any]:
    options: dict[str, Any] = {"num_splits": num_splits, "return_lse": features}
    options |= {"window_size": 1024, "softcap": 50.0} if features else {}
    return {"head_dim": 128, "features": FEATURES * features, "options": options, **lens, **sizes}


def _every_dim(lens: SizesOf, block_size: str = "") -> dict[str, SizesOf]:
    """Sizes by name; block_size: its part of the name, if it has one."""
    return {f"d{dim} g4{block_size}": _shipped(lens, head_dim=dim) for dim in HEAD_DIMS}


_GROUP: dict[str, Any] = {"num_q_heads": 8 * 71}
_DECODED = {"context_lens": (4096,) * 64}
_SHARED = {"prefix_lens": (32768,) * 4, "group_sizes": (64,) * 4, "context_lens": (256,) * 256}
_PROMPT = {"context_lens": (8192,), "query_lens": (8192,)}
_PROMPTS = {"context_lens": (*(128,) * 63, 4096), "query_lens": (*(128,) * 63, 4096)}
_CHUNK = {"context_lens": (32768,), "query_lens": (16,)}
_SCORES: dict[str, Any] = {
    "features": FEATURES,
    "takes_fp8": True,
    "optional": {"alibi_slopes": ones(4), "sinks": ones(4)},
    "bad_calls": (
        ("q: expected a positive multiple of num_kv_heads=2 ... got 0", _queries(2, 0, 16)),
        ("q: expected head_dim from 16 to 256, got 8", _queries(2, 4, 8) | kv(5, 4, 2, 8)),
        ("q: expected head_dim from 16 to 256, got 257", _queries(2, 4, 257) | kv(5, 4, 2, 257)),
        stores.NO_SLOTS,
        (
            "alibi_slopes: expected shape (num_q_heads=4) or (batch=2, num_q_heads=4), got (3, 4)",
            {"alibi_slopes": zeros(3, 4)},
        ),
    ),
}
"""What the ops with options of scores declare alike."""
_DRAWN = stores.DRAWN | {
    "exponent": (None, 5, 14, 59),
    "scale": (None, 0.5, -0.2),
    "softcap": (0.0, 0.5, 30.0),
    "window_size": (None, range(1, 111)),
    "num_splits": SPLITS_DRAWN,
}
_RANGES: dict[str, Any] = {
    "scale": (None, None), "softcap": (0, None), "window_size": (1, None), "num_splits": SPLITS
}  # fmt: skip
NARROW_TABLE: BadCall = (
    "block_tables: 2 columns of block_size 4 hold 8 tokens, but context_lens reaches 9; "
    "needed are 3 columns",
    {"context_lens": i32(1, 9)},
)
_BAD_TABLES: tuple[BadCall, ...] = (
    NARROW_TABLE,
    (
        "block_tables: expected block ids within the context from 0 to 4, got -1 at [0, 0]",
        {"block_tables": i32([-1, 1], [-1, 3]), "window_size": 5},
    ),
)
_BAD_GROUPS = (
    ("prefix_block_tables: 2 columns ...prefix_lens reaches 99", {"prefix_lens": i32(7, 99)}),
    ("suffix_block_tables: 2 columns ...suffix_lens reaches 99", {"suffix_lens": i32(1, 99)}),
    ("group_offsets: ... 0 to batch=2, got [0, 1, 1]", {"group_offsets": i32(0, 1, 1)}),
    ("group_offsets: expected values that ascend", {"group_offsets": i32(0, 3, 2)}),
)
OPS = {
    "merge_attention_states": Op(
        case=_merge_attention_states,
        has_blocks=False,
        drawn={"head_dim": (0, 1, 16, 33, 80, 128, 256)},
        scaled=("lse_a", "lse_b"),
        tiny={"num_q_heads": 2},
        ranges={},
        shipped=by_head_dim(HALF),
        guarded=dict.fromkeys(("sm_90", "sm_100"), "d80"),
    ),
    "paged_decode_attention": Op(
        case=_paged_decode_attention,
        **_SCORES,
        drawn=_DRAWN,
        executed=(
            {"context_lens": (70, 5, 0)},
            {"head_dim": 255, "num_kv_heads": 1, "block_size": 1, "context_lens": (9,)},
        ),
        repeated={"context_lens": (5000, 300, 33) * 20},
        tiny={"context_lens": (7, 8), **TINY},
        ranges=_RANGES | SEQUENCES,
        free_dims=frozenset({("block_tables", 1)}),
        bad_values=_BAD_TABLES,
        shipped=each(HALF, _every_dim(_DECODED) | {
            "d128 g71": _shipped(_DECODED, **_GROUP),
            "d128 g4 split": _shipped(_DECODED, 8),
            "d128 g4 split features": _shipped(_DECODED, 8, features=True),
        }) | each((torch.bfloat16,), {
            f"d128 g4 b{size}": _shipped(_DECODED, block_size=size) for size in (24, 256)
        }) | each((FP8_DTYPE,), _every_dim(_DECODED) | {
            "d128 g71": _shipped(_DECODED, **_GROUP),
            "d128 g4 split features": _shipped(_DECODED, 8, features=True),
        }),
        guarded={
            "sm_80": "bf16 d256 g4$|bf16 d128 g4 split features|fp8 d80 g4$",
            "sm_90": "bf16 d256 g4$|bf16 d128 g4 split features|fp8 d80 g4$|bf16 d128 g71|fp8 d256",
            "sm_100": "bf16 d256 g4$|bf16 d128 g4 split features",
        },
        timed={"decode": {}},
    ),
    "shared_prefix_decode_attention": Op(
        case=_shared_prefix_decode_attention,
        **_SCORES,
        drawn=_DRAWN | {"num_prefix_splits": (None, 1, 3)},
        executed=({"group_sizes": (2, 1), "prefix_lens": (70, 20), "context_lens": (5, 0, 30)},),
        repeated={"prefix_lens": (3000, 50), "group_sizes": (20, 20), "context_lens": (77,) * 40},
        tiny={"context_lens": (3, 4), "prefix_lens": (4, 2), "group_sizes": (1, 1), **TINY},
        ranges=_RANGES | {
            "num_prefix_splits": SPLITS, "prefix_block_tables": (0, 4), "prefix_lens": (0, None),
            "suffix_block_tables": (0, 4), "suffix_lens": (0, None),
        },
        free_dims=frozenset({("prefix_block_tables", 1), ("suffix_block_tables", 1)}),
        bad_values=_BAD_GROUPS,
        shipped=each(HALF, _every_dim(_SHARED) | {
            "d128 g71": _shipped(_SHARED, **_GROUP),
            "d128 g4 features": _shipped(_SHARED, features=True),
        }) | each((FP8_DTYPE,), {"d128 g4": _shipped(_SHARED)}),
        timed={"cascade": {}},
    ),
    "paged_prefill_attention": Op(
        case=_paged_prefill_attention,
        **_SCORES,
        drawn=_DRAWN | {"causal": (False, True)},
        executed=(
            {"context_lens": (70, 9), "query_lens": (33, 1), "block_size": 16},
            {"head_dim": 40, "block_size": 7},
            {"head_dim": 160, "block_size": 7},
        ),
        repeated={"context_lens": (2048, 300, 33), "query_lens": (1024, 300, 1)},
        tiny={"context_lens": (7, 8), "query_lens": (1, 1), **TINY},
        ranges=_RANGES | SEQUENCES | {"max_seqlen_q": (0, None)},
        free_dims=frozenset({("block_tables", 1)}),
        bad_values=(
            *_BAD_TABLES,
            ("cu_seqlens_q: ...0 to at most 2, got [0, 2, 1]", {"cu_seqlens_q": i32(0, 2, 1)}),
            ("cu_seqlens_q: ...got [1, 1, 2]", {"cu_seqlens_q": i32(1, 1, 2)}),
            ("cu_seqlens_q: ... at most 2, got [0, 1, 3]", {"cu_seqlens_q": i32(0, 1, 3)}),
            ("max_seqlen_q: expected at least 1, ..., got 0", {"max_seqlen_q": 0}),
        ),
        shipped=each(HALF, _every_dim(_PROMPT, " b16") | {
            "d128 g71 b16 batch": _shipped(_PROMPTS, **_GROUP),
            "d128 g4 b16 features": _shipped(_PROMPT, features=True),
            "d128 g4 b16 split": _shipped(_CHUNK, 8),
            "d256 g4 b16 split features": _shipped(_CHUNK, 8, features=True, head_dim=256),
        }) | each((torch.bfloat16,), {"d128 g4 b256": _shipped(_PROMPT, block_size=256)})
        | each((FP8_DTYPE,), _every_dim(_PROMPT, " b16") | {
            "d128 g4 b16 features": _shipped(_PROMPT, features=True),
            "d128 g4 b16 split": _shipped(_CHUNK, 8),
        }),
        guarded={
            "sm_80": "bf16 d256 .*split|fp8 d256 .*b16",
            "sm_90": "bf16 d256 .*split|fp8 d256 .*b16|bf16 d128 g4 b16$",
            "sm_100": "bf16 d256 .*split",
        },
        timed={"prefill": {}},
    ),
}  # fmt: skip
