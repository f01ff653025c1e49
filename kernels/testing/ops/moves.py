"""Ops that move whole blocks."""

from typing import Any

import torch
from torch import zeros

from kernels.testing.inputs import RandomTensors, i64
from kernels.testing.op import Case, Op, Sizes, by_head_dim


def _copy_blocks(s: Sizes) -> Case:
    random, num_blocks = s.random(), 2 * s.num_pairs + s.spare_blocks
    caches: Any = s.random_cache(random, s.first_block + num_blocks)
    pairs = random.permutation(num_blocks, s.first_block)[: 2 * s.num_pairs].view(-1, 2)
    if "list" in s.features:
        caches = [tuple(layer) for layer in caches.unbind(1)]
    moved = s.num_pairs * s.num_layers * s.block_size
    return Case(
        "copy_blocks",
        {"caches": caches, "src_to_dst": pairs},
        num_bytes=2 * moved * s.token_bytes,
        returns=(),
        writes=("caches",),
    )


def _swap_blocks(s: Sizes) -> Case:
    random, num_blocks = s.random(), s.num_pairs + s.spare_blocks
    caches = s.random_cache(random, s.first_block + num_blocks)
    on_host = {"device": "cpu", "pin_memory": True} if caches.is_cuda else {"device": s.device}
    order = (0, 1, 2, 4, 3, 5) if "hnd" in s.features else range(6)
    other = torch.zeros([caches.shape[dim] for dim in order], dtype=caches.dtype, **on_host)
    source, target = caches, other.permute(*order)
    if "in" in s.features:
        source, target = target.copy_(caches), torch.zeros_like(caches)
    ids = RandomTensors("cpu", s.seed)
    sides = [ids.permutation(num_blocks, s.first_block)[: s.num_pairs] for _ in range(2)]
    pairs = torch.stack(sides, dim=1)
    moved = s.num_pairs * s.num_layers * s.block_size * s.token_bytes
    return Case(
        "swap_blocks",
        {"src_cache": source, "dst_cache": target, "src_to_dst": pairs.to(s.device)},
        num_bytes=moved,
        returns=(),
        writes=("dst_cache",),
    )


_DRAWN = {
    "num_pairs": range(5), "num_layers": range(1, 4),
    "block_size": (1, 2, 3, 7, 16, 24),  # the largest take several tiles
}  # fmt: skip
_BAD_PAIRS = (
    ("src_to_dst: expected destination blocks of at most ..., got 9", {"src_to_dst": i64([0, 9])}),
    ("src_to_dst: ...every destination once, got block 2", {"src_to_dst": i64([0, 2], [1, 2])}),
)
_LAYER = (zeros(5, 4, 2, 16), zeros(5, 4, 2, 16))
_HND = zeros(5, 2, 4, 16).transpose(1, 2)
OPS = {
    "copy_blocks": Op(
        case=_copy_blocks,
        features=("list",),  # caches as a list of layers
        takes_fp8=True,
        is_exact=True,
        drawn=_DRAWN,
        tiny={"num_pairs": 1, "num_layers": 1, "num_kv_heads": 1, "block_size": 1},
        ranges={"src_to_dst": (None, 4)},
        free_dims=frozenset({*(("caches", dim) for dim in range(1, 6)), ("src_to_dst", 0)}),
        bad_calls=(
            (
                "caches: ...(2, num_layers, ...got (3, 1, 5, 4, 2, 16)",
                {"caches": zeros(3, 1, 5, 4, 2, 16)},
            ),
            ("caches: expected one tensor ... got list of 0 layers", {"caches": []}),
            ("caches: ...got list of 1 layers of [3] tensors", {"caches": [(*_LAYER, zeros(1))]}),
            *[
                ("caches: expected one tensor of six", {"caches": caches})
                for caches in (None, 3, [1, 2], "kv")
            ],
            *[
                (f"caches[1][1]: {message}", {"caches": [_LAYER, (_LAYER[0], plane)]})
                for message, plane in (
                    ("...num_kv_heads=2...got (5, 4, 1, 16)", zeros(5, 4, 1, 16)),
                    ("...dtype", zeros(5, 4, 2, 16).half()),
                    ("... strides of caches[0][0], (128, 32, 16, 1)", _HND),
                )
            ],
        ),
        bad_values=(
            *_BAD_PAIRS,
            (
                "src_to_dst: ...source of another pair, got block 1;",
                {"src_to_dst": i64([0, 1], [1, 2])},
            ),
            ("src_to_dst: ...source of another pair", {"src_to_dst": i64([3, 4], [4, 3])}),
        ),
        # Bits are copied, so fp16 stands for every 16-bit dtype.
        shipped=by_head_dim((torch.float16,), ("list",)),
        guarded=dict.fromkeys(("sm_90", "sm_100"), "d80"),
        timed={"copy": {}},
    ),
    "swap_blocks": Op(
        case=_swap_blocks,
        features=("in", "hnd"),  # from host to device; into a cache with heads outside slots
        takes_fp8=True,
        is_exact=True,
        drawn=_DRAWN,
        tiny={"num_pairs": 1, "num_layers": 1, "spare_blocks": 4},
        ranges={"src_to_dst": (None, 4)},
        free_dims=frozenset({("src_cache", 0), ("dst_cache", 0), ("src_to_dst", 0)}),
        bad_calls=(
            ("dst_cache: expected the 4 dimensions of", {"dst_cache": zeros(2, 1, 5, 4, 2, 16)}),
        ),
        bad_values=_BAD_PAIRS,
        shipped=by_head_dim((torch.float16,), ("hnd",)),
        guarded=dict.fromkeys(("sm_90", "sm_100"), "d80"),
        timed={"swap_out": {}, "swap_in": {"features": ("in",)}},
    ),
}
