"""Memory layout of one cache block, for the ops that move whole blocks.

In most layouts (NHD, HND, a layer of a larger tensor) the slots, heads and dims of a block form one
contiguous run, which a copy treats as flat. Other layouts have at most two strided dimensions of
runs:

    element e of a block lies at (e // RUN // INNER_RUNS) * stride_outer
                               + (e // RUN % INNER_RUNS) * stride_inner + e % RUN
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import FLOAT_DTYPES, INT64, Arg, check_values

CACHE_DTYPES = (
    *FLOAT_DTYPES,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
)
"""Dtypes of caches whose blocks can be moved. The ops copy bit patterns."""
PLANE_DIMS = "num_blocks block_size num_kv_heads head_dim"
"""Dimensions of K or V of one layer."""
LAYERS_DIMS = "2 num_layers num_blocks block_size num_kv_heads head_dim"
"""Dimensions of K and V of all layers in one tensor."""
PAIRS_ARG = Arg("src_to_dst", "num_pairs 2", INT64)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
TL_BITS = {1: tl.uint8, 2: tl.int16, 4: tl.int32}


@dataclass(frozen=True)
class BlockRuns:
    """The contiguous runs of a block. They have the same length in all given caches."""

    run: int
    """Elements per run."""
    inner_runs: int
    num_elements: int
    """Elements per block: slots * heads * dims."""
    strides: tuple[tuple[int, int], ...]
    """(outer, inner) stride between runs, for each cache."""


def block_runs(*caches: torch.Tensor) -> BlockRuns:
    """Merge slots, heads and dims to runs. Their sizes are equal in all caches."""
    shape = caches[0].shape[-3:]
    strides = [cache.stride()[-3:] for cache in caches]
    order = sorted(range(2), key=lambda dim: strides[0][dim], reverse=True)
    dims = [(shape[dim], tuple(s[dim] for s in strides)) for dim in order if shape[dim] > 1]
    run = shape[2]
    while dims and all(stride == run for stride in dims[-1][1]):
        run *= dims.pop()[0]
    none = (1, (0,) * len(caches))
    (_, outer), (inner_runs, inner) = ([none] * 2 + dims)[-2:]
    return BlockRuns(run, inner_runs, shape.numel(), tuple(zip(outer, inner, strict=True)))


@triton.jit
def element_offsets(
    elements, stride_outer, stride_inner, RUN: tl.constexpr, INNER_RUNS: tl.constexpr
):
    """Return int64 offsets of elements of a block by the formula above."""
    runs = elements // RUN
    outer = (runs // INNER_RUNS).to(tl.int64) * stride_outer
    return outer + (runs % INNER_RUNS).to(tl.int64) * stride_inner + elements % RUN


def check_block_pairs(
    src_to_dst: torch.Tensor,
    *,
    num_src_blocks: int,
    num_dst_blocks: int,
    same_pool: bool,
) -> None:
    """Check (source, destination) block pairs if they are in host memory.

    same_pool: sources and destinations are blocks of one cache. Then a destination must not be the
    source of another pair.
    """
    if not src_to_dst.is_cpu:
        return
    is_active = (src_to_dst >= 0).all(dim=1)
    sources, destinations = src_to_dst.unbind(1)
    for blocks, limit, what in (
        (sources, num_src_blocks, "source blocks"),
        (destinations, num_dst_blocks, "destination blocks"),
    ):
        check_values("src_to_dst", blocks, high=limit - 1, what=what, where=is_active)
    active = src_to_dst[is_active]
    if same_pool:
        active = active[active[:, 0] != active[:, 1]]
    destinations, counts = active[:, 1].unique(return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            "src_to_dst: expected every destination once, got block "
            f"{int(destinations[counts > 1][0])} several times"
        )
    if same_pool and (overlap := destinations[torch.isin(destinations, active[:, 0])]).numel():
        raise ValueError(
            "src_to_dst: expected no destination that is the source of another pair, got block "
            f"{int(overlap[0])}; the order of the copies in one call is undefined"
        )
