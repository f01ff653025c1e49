"""Ops that write keys and values into the cache."""

import torch
from torch import ones, zeros

from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.inputs import LAYOUTS, SCALES, kv
from kernels.testing.op import CACHES, Case, Op, Sizes, by_head_dim

DRAWN = {"kv_dtype": (None, FP8_DTYPE), "scales": SCALES, "layout": LAYOUTS}
NO_SLOTS = ("k_cache: expected block_size of at least 1, got 0", kv(5, 0, 2, 16))
BAD_ROTARY = tuple(
    (f"cos: ... from 2 to head_dim=16, got {2 * n}", {"cos": ones(9, n), "sin": ones(9, n)})
    for n in (0, 9)
)
ROTARY_DIMS = (2, 16, None)
SLOTS = {"slot_mapping": (None, 19)}
_FP8 = {"dtype": torch.bfloat16, "kv_dtype": FP8_DTYPE}
_EVERY_SCALE = [{**_FP8, "scales": form} for form in SCALES]


def _store_kvcache(s: Sizes) -> Case:
    random = s.random()
    heads = (s.num_q_heads, s.num_kv_heads, s.num_kv_heads)
    qkv = random.normal(s.num_tokens, sum(heads), s.head_dim, dtype=s.dtype)
    _, key, value = qkv.split(heads, dim=1)
    slots, (k_cache, v_cache) = s.slots_and_caches(random)
    inputs = {"key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache}
    return Case(
        "store_kvcache",
        inputs | {"slot_mapping": slots} | s.cache_scales,
        num_bytes=2 * key.numel() * key.itemsize + s.num_tokens * (s.token_bytes + 8),
        returns=(),
        writes=("k_cache", "v_cache"),
    )


def _rope_store_kvcache(s: Sizes) -> Case:
    random = s.random()
    store = _store_kvcache(s)
    heads = (s.num_q_heads, s.num_kv_heads, s.num_kv_heads)
    qkv = random.normal(s.num_tokens, sum(heads), s.head_dim, dtype=s.dtype)
    query, key, value = qkv.split(heads, dim=1)
    num_heads = s.num_q_heads + s.num_kv_heads
    table_bytes, flops = s.rotary_cost(num_heads)
    norms = {}
    if "norms" in s.features:
        names = ("q_norm_weight", "k_norm_weight")
        norms = {name: random.normal(s.head_dim, dtype=s.dtype) for name in names}
        flops += 4 * s.num_tokens * num_heads * s.head_dim
    inputs = {"query": query, **store.inputs, "key": key, "value": value}
    return Case(
        "rope_store_kvcache",
        inputs | s.rotary_tables(random) | {"interleaved": "interleaved" in s.features, **norms},
        num_bytes=store.num_bytes + 2 * query.numel() * query.itemsize + table_bytes,
        flops=flops,
        returns=(),
        writes=("k_cache", "v_cache", "query"),
    )


OPS = {
    "store_kvcache": Op(
        case=_store_kvcache,
        takes_fp8=True,
        is_exact=True,
        drawn=DRAWN,
        executed=({}, *_EVERY_SCALE, {"head_dim": 80}),
        tiny={"spare_blocks": 4},
        ranges=SLOTS,
        bad_calls=(
            (
                "value: expected dtype torch.fl...16, got",
                kv(5, 4, 2, 16, dtype=FP8_DTYPE) | {"key": zeros(4, 2, 16).half()},
            ),
            NO_SLOTS,
        ),
        shipped=by_head_dim(CACHES),
        guarded=dict.fromkeys(("sm_80", "sm_90"), "bf16 d80|fp8 d80$"),
        timed={"store": {}},
    ),
    "rope_store_kvcache": Op(
        case=_rope_store_kvcache,
        features=("interleaved", "norms"),
        takes_fp8=True,
        # Rounding to fp8 makes an error of a last bit a large one: see test_rope_store_kvcache.py.
        drawn={"layout": LAYOUTS, "rotary_dim": ROTARY_DIMS},
        executed=(
            {},
            *_EVERY_SCALE,
            {**_FP8, "features": ("norms",)},
            {**_FP8, "dtype": torch.float16, "scales": "none", "rotary_dim": 2},  # setp.f16x2
        ),
        tiny={"spare_blocks": 4},
        optional={"q_norm_weight": ones(16), "k_norm_weight": ones(16)},
        ranges=SLOTS | {"positions": (0, 8), "norm_eps": (0, None), "norm_offset": (None, None)},
        free_dims=frozenset({("query", 1)}),
        bad_calls=(NO_SLOTS, *BAD_ROTARY),
        shipped=by_head_dim(CACHES, ("interleaved", "norms")),
        guarded={
            "sm_80": "fp8 d80$",
            "sm_90": "bf16 d80 norms|fp8 d256 norms|fp8 d80$",
            "sm_100": "bf16 d80 norms|fp8 d256 norms",
        },
    ),
}
