"""Move whole blocks between a cache on the GPU and a cache in pinned host memory, both ways.

If the host knows the pairs, adjacent blocks form one part, and the GPU's copy engine moves each
part (cudaMemcpyAsync) without a multiprocessor. vLLM measured more throughput with the copy engine
than with a kernel for parts of 0.5 to 2 MB (January 2026), but a kernel is faster below some 28 KiB
(pull request 42212). One launch of this kernel moves any number of blocks of all layers. A CUDA
graph can capture the launch, because its pairs are on the GPU. Pinned memory is mapped into the
GPU's address space. A few programs take the tiles round-robin and saturate the bus.
"""

from dataclasses import replace

import numpy as np
import torch
import triton
import triton.language as tl

from kernels import block_layout
from kernels.block_layout import element_offsets
from kernels.checks import Arg, TensorSpec, not_a_tensor, same_dtype
from kernels.launch import on_gpu_of_tensors
from kernels.primitives import INTERPRETED
from kernels.tiles import COPY_ENGINE_BYTES, cdiv, swap_num_programs, swap_tile, target_of

_SRC_DIMS = f"{block_layout.PLANE_DIMS} | {block_layout.LAYERS_DIMS}"
_DST_DIMS = _SRC_DIMS.replace("num_blocks", "num_dst_blocks")
_TENSORS = TensorSpec(
    Arg("src_cache", _SRC_DIMS, block_layout.CACHE_DTYPES, host_too=True),
    Arg("dst_cache", _DST_DIMS, same_dtype("src_cache"), host_too=True, written=True),
    replace(block_layout.PAIRS_ARG, host_too=True),
)


@triton.jit(do_not_specialize=["num_tiles", "num_planes", "num_layers"])
def _swap_blocks_kernel(
    src_ptr, dst_ptr, src_to_dst_ptr,
    num_tiles, num_planes, num_layers, stride_pair,
    stride_src_kv, stride_src_layer, stride_src_block, stride_src_outer, stride_src_inner,
    stride_dst_kv, stride_dst_layer, stride_dst_block, stride_dst_outer, stride_dst_inner,
    CHUNKS: tl.constexpr, NUM_ELEMENTS: tl.constexpr,
    RUN: tl.constexpr, INNER_RUNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program p copies tiles p, p + num_programs, ... (persistent grid). Chunks vary fastest."""
    tile = tl.program_id(0).to(tl.int64)
    while tile < num_tiles:
        chunk = (tile % CHUNKS).to(tl.int32)
        plane = tile // CHUNKS % num_planes
        pair = tile // CHUNKS // num_planes
        src = tl.load(src_to_dst_ptr + pair * stride_pair)
        dst = tl.load(src_to_dst_ptr + pair * stride_pair + 1)
        kv = plane // num_layers
        layer = plane % num_layers
        elements = chunk * TILE + tl.arange(0, TILE)
        mask = elements < tl.where((src >= 0) & (dst >= 0), NUM_ELEMENTS, 0)
        src_base = kv * stride_src_kv + layer * stride_src_layer + src * stride_src_block
        dst_base = kv * stride_dst_kv + layer * stride_dst_layer + dst * stride_dst_block
        src_offsets = element_offsets(elements, stride_src_outer, stride_src_inner, RUN, INNER_RUNS)
        dst_offsets = element_offsets(elements, stride_dst_outer, stride_dst_inner, RUN, INNER_RUNS)
        bits = tl.load(src_ptr + src_base + src_offsets, mask=mask, other=0)
        tl.store(dst_ptr + dst_base + dst_offsets, bits, mask=mask)
        tile += tl.num_programs(0)


def _gpu_of(src_cache: torch.Tensor, dst_cache: torch.Tensor) -> torch.device:
    """Return the device that the kernel runs on. Raise if the kernel cannot access a cache."""
    for name, cache in (("src_cache", src_cache), ("dst_cache", dst_cache)):
        if not isinstance(cache, torch.Tensor):
            raise not_a_tensor(name, cache)
        if cache.is_cpu and not INTERPRETED.value and not cache.is_pinned():
            raise ValueError(
                f"{name}: expected GPU or pinned host memory, got pageable host memory; allocate "
                "it with torch.empty(..., pin_memory=True)"
            )
    if INTERPRETED.value and src_cache.device != dst_cache.device:
        raise ValueError(
            f"dst_cache: expected a tensor on {src_cache.device}, got one on {dst_cache.device}"
        )
    if not src_cache.is_cpu:
        return src_cache.device
    if dst_cache.is_cpu and not INTERPRETED.value:
        raise ValueError("dst_cache: expected one cache on a GPU, got both in host memory")
    return dst_cache.device


def _plane_strides(cache: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of K/V, layer and block. The first two are 0 if a cache has one plane."""
    return *(cache.stride()[:2] if cache.dim() == 6 else (0, 0)), cache.stride(-4)


def adjacent_parts(
    src_cache: torch.Tensor, dst_cache: torch.Tensor, src_to_dst: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the contiguous parts of both caches that hold the blocks of CPU-tensor pairs.

    Returns a (destination, source) pair per part, or an empty list if blocks are not contiguous.
    """
    runs = block_layout.block_runs(src_cache, dst_cache)
    if runs.run < runs.num_elements:
        return []
    pairs = src_to_dst[(src_to_dst >= 0).all(dim=1)].numpy()
    pairs = pairs[pairs[:, 0].argsort()]
    is_next = (np.diff(pairs, axis=0) == 1).all(axis=1)
    if any(cache.stride(-4) != runs.num_elements for cache in (src_cache, dst_cache)):
        is_next[:] = False
    starts = np.flatnonzero(np.concatenate(([True], ~is_next)))[: len(pairs)]
    lengths = np.diff(starts, append=len(pairs))
    sources, targets = (
        [plane for layers in cache for plane in layers] if cache.dim() == 6 else [cache]
        for cache in (src_cache, dst_cache)
    )
    return [
        (target.narrow(0, dst, length), source.narrow(0, src, length))
        for source, target in zip(sources, targets, strict=True)
        for (src, dst), length in zip(pairs[starts].tolist(), lengths.tolist(), strict=True)
    ]


@on_gpu_of_tensors
def swap_blocks(src_cache: torch.Tensor, dst_cache: torch.Tensor, src_to_dst: torch.Tensor) -> None:
    """Copy whole blocks between a cache on a GPU and a cache in pinned host memory.

    This is the swapping of PagedAttention (Kwon et al., 2023): preempted sequences move to host
    memory and back. Each cache has its own block pool, so their block ids are unrelated.

    Args:
        src_cache, dst_cache: (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim), K and
            V of all layers, or (num_blocks, block_size, num_kv_heads, head_dim), K or V of a layer.
            Only num_blocks and strides may differ between the two. The last dimension is
            contiguous. fp16, bf16, fp32, fp8 or 8-bit integers. At least one cache is on the GPU; a
            cache in host memory must be pinned. The caches must not be parts of one tensor.
        src_to_dst: (num_pairs, 2) int64: block of src_cache, block of dst_cache. A pair with a
            negative number is skipped. A source may occur several times, a destination once.
            Adjacent blocks form a part. If pairs are in host memory, and parts are contiguous with
            256 KiB or more on average, the copy engine moves the blocks. Otherwise one kernel moves
            them.

    Mutates dst_cache. Returns None. The copy runs asynchronously on the current stream, so later
    launches on this stream wait for it. Synchronise with the stream before the host reads a
    dst_cache, or overwrites or frees either cache, in host memory. (PyTorch's pinned allocator
    waits for the copy engine only before it reuses memory.)

    Raises:
        ValueError: a shape, dtype, device or stride does not fit, the caches are parts of one
            tensor, or host memory is not pinned. If src_to_dst is in host memory also: a block is
            past the end, or a destination is repeated. Nothing is copied then.
    """
    device = _gpu_of(src_cache, dst_cache)
    sizes = _TENSORS(src_cache, dst_cache, src_to_dst, device=device)
    if src_cache.dim() != dst_cache.dim():
        raise ValueError(
            f"dst_cache: expected the {src_cache.dim()} dimensions of src_cache, got shape "
            f"{tuple(dst_cache.shape)}"
        )
    block_layout.check_block_pairs(
        src_to_dst,
        num_src_blocks=sizes.num_blocks,
        num_dst_blocks=sizes.num_dst_blocks,
        same_pool=False,
    )
    num_pairs = src_to_dst.shape[0]
    if num_pairs == 0 or src_cache.numel() == 0 or dst_cache.numel() == 0:
        return
    storages = [cache.untyped_storage().data_ptr() for cache in (src_cache, dst_cache)]
    if storages[0] == storages[1] and not src_cache.is_meta:
        raise ValueError("src_cache, dst_cache: expected two tensors, got parts of one")
    if src_to_dst.is_cpu and device.type != "cpu":
        if src_cache.is_cpu or dst_cache.is_cpu:
            parts = adjacent_parts(src_cache, dst_cache, src_to_dst)
            if sum(part.nbytes for part, _ in parts) >= max(1, len(parts)) * COPY_ENGINE_BYTES:
                for target, source in parts:
                    target.copy_(source, non_blocking=True)
                return
        src_to_dst = src_to_dst.pin_memory().to(device, non_blocking=True)
    bits = block_layout.BITS[src_cache.itemsize]
    runs = block_layout.block_runs(src_cache, dst_cache)
    tile = swap_tile(runs.num_elements, src_cache.itemsize)
    chunks = cdiv(runs.num_elements, tile.elements)
    num_layers = src_cache.shape[1] if src_cache.dim() == 6 else 1
    num_planes = 2 * num_layers if src_cache.dim() == 6 else 1
    num_tiles = num_pairs * num_planes * chunks
    _swap_blocks_kernel[(swap_num_programs(num_tiles, target_of(device)),)](
        src_cache.view(bits), dst_cache.view(bits), src_to_dst,
        num_tiles, num_planes, num_layers, src_to_dst.stride(0),
        *_plane_strides(src_cache), *runs.strides[0],
        *_plane_strides(dst_cache), *runs.strides[1],
        CHUNKS=chunks, NUM_ELEMENTS=runs.num_elements,
        RUN=runs.run, INNER_RUNS=runs.inner_runs, TILE=tile.elements,
        num_warps=tile.num_warps,
    )  # fmt: skip
