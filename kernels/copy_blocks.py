"""Copy whole blocks inside a paged KV cache, K and V of every layer in one launch (copy-on-write).

A block is split into chunks of TILE elements. A program copies one chunk of one pair in one plane
(K or V of one layer), as bit patterns. Pairs are copied in no particular order.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels import block_layout
from kernels.block_layout import element_offsets
from kernels.checks import MAX_GRID_YZ, Arg, TensorSpec, check_integer, same_dtype
from kernels.launch import launch, on_gpu_of_tensors
from kernels.tiles import cdiv, copy_tile


@triton.jit(do_not_specialize=["num_layers"])
def _copy_blocks_kernel(
    planes_ptr, src_to_dst_ptr,
    num_layers,
    stride_pair, stride_kv, stride_layer, stride_block, stride_outer, stride_inner,
    CHUNKS: tl.constexpr, NUM_ELEMENTS: tl.constexpr,
    RUN: tl.constexpr, INNER_RUNS: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one pair in one plane. Grid (num_pairs * CHUNKS, planes).

    ALIGNMENT 0: planes_ptr is a tensor (2, num_layers, num_blocks, ...). Otherwise planes_ptr holds
    the address of every plane. All addresses are multiples of ALIGNMENT.
    """
    chunk = tl.program_id(0) % CHUNKS
    pair = (tl.program_id(0) // CHUNKS).to(tl.int64)
    plane = tl.program_id(1)
    src = tl.load(src_to_dst_ptr + pair * stride_pair)
    dst = tl.load(src_to_dst_ptr + pair * stride_pair + 1)
    if (src < 0) | (dst < 0) | (src == dst):
        return
    if ALIGNMENT:
        plane_ptr = tl.load(planes_ptr + plane).to(tl.pointer_type(DTYPE))
        plane_ptr = tl.multiple_of(plane_ptr, ALIGNMENT)
    else:
        plane_ptr = planes_ptr + (plane // num_layers).to(tl.int64) * stride_kv
        plane_ptr += (plane % num_layers).to(tl.int64) * stride_layer
    elements = chunk * TILE + tl.arange(0, TILE)
    mask = elements < NUM_ELEMENTS
    offsets = element_offsets(elements, stride_outer, stride_inner, RUN, INNER_RUNS)
    bits = tl.load(plane_ptr + src * stride_block + offsets, mask=mask, other=0)
    tl.store(plane_ptr + dst * stride_block + offsets, bits, mask=mask)


@functools.cache
def _pointer_table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return addresses as an int64 tensor on the device.

    The tensor stays cached (8 bytes per address) because a captured CUDA graph may refer to it.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "copy_blocks: the first call with a list of caches uploads their addresses, which a "
            "CUDA graph cannot capture; call it once with these caches before the capture, or pass "
            "one tensor (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim)"
        )
    return torch.tensor(addresses, dtype=torch.int64, device=device)


@functools.cache
def _tensors(num_planes: int) -> TensorSpec:
    """Declare the planes (or the one tensor of all planes) and the pairs."""
    if num_planes == 1:
        return TensorSpec(
            Arg("caches", block_layout.LAYERS_DIMS, block_layout.CACHE_DTYPES, written=True),
            block_layout.PAIRS_ARG,
        )
    names = [f"caches[{plane // 2}][{plane % 2}]" for plane in range(num_planes)]
    first = Arg(names[0], block_layout.PLANE_DIMS, block_layout.CACHE_DTYPES, written=True)
    like_first = same_dtype(names[0])
    others = [Arg(name, block_layout.PLANE_DIMS, like_first) for name in names[1:]]
    return TensorSpec(first, *others, block_layout.PAIRS_ARG)


@on_gpu_of_tensors
def copy_blocks(
    caches: torch.Tensor | Sequence[tuple[torch.Tensor, torch.Tensor]], src_to_dst: torch.Tensor
) -> None:
    """Copy whole blocks of a paged KV cache, K and V of every layer, in place and in one launch.

    This is the copy-on-write of PagedAttention (Kwon et al., 2023): before a sequence appends to a
    shared block, it gets its own copy of the block.

    Args:
        caches: (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim), K and V of all
            layers, any strides but a contiguous last dimension; or one (k_cache, v_cache) per
            layer, each (num_blocks, block_size, num_kv_heads, head_dim), all of one shape, dtype
            and strides. fp16, bf16, fp32, fp8 or 8-bit integers. The first call with a list uploads
            its addresses: make that call before capturing a CUDA graph.
        src_to_dst: (num_pairs, 2) int64 on the caches' device: source and destination block. A pair
            with a negative number is skipped (padding of a captured graph). A pair of a block with
            itself does nothing. Pairs are copied in no order, so a destination must not be the
            destination or the source of another pair: split dependent copies into several calls. On
            a GPU such a destination gets undefined contents. No other block is affected.

    Mutates the destination blocks. Returns None. Without pairs nothing is launched.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit. If src_to_dst is in host memory
            also: a block is past the end, or pairs depend on one another. Nothing is copied then.
        RuntimeError: the first call with a list of caches is inside a CUDA graph capture.
    """
    if isinstance(caches, torch.Tensor):
        planes = [caches]
    else:
        try:
            layers = [tuple(layer) for layer in caches]
        except TypeError:
            layers = []
        if not layers or any(len(layer) != 2 for layer in layers):
            raise ValueError(
                "caches: expected one tensor of six dimensions, or one (k_cache, v_cache) per "
                f"layer, got {type(caches).__name__} of {len(layers)} layers of "
                f"{[*map(len, layers)]} tensors"
            )
        planes = [plane for layer in layers for plane in layer]
    first = planes[0]
    is_one_tensor = len(planes) == 1
    num_blocks = _tensors(len(planes))(*planes, src_to_dst).num_blocks
    for index, plane in enumerate(planes):
        if plane.stride() != first.stride():
            raise ValueError(
                f"caches[{index // 2}][{index % 2}]: expected the strides of caches[0][0], "
                f"{first.stride()}, got {plane.stride()}"
            )
    block_layout.check_block_pairs(
        src_to_dst, num_src_blocks=num_blocks, num_dst_blocks=num_blocks, same_pool=True
    )
    num_planes = 2 * first.shape[1] if is_one_tensor else len(planes)
    check_integer("caches", num_planes, 0, MAX_GRID_YZ, "layers * 2")
    num_pairs = src_to_dst.shape[0]
    if num_pairs == 0 or first.numel() == 0:
        return

    if is_one_tensor:
        planes_arg, alignment = first.view(block_layout.BITS[first.itemsize]), 0
    else:
        addresses = tuple(plane.data_ptr() for plane in planes)
        planes_arg = _pointer_table(addresses, first.device)
        aligned = all(address % 16 == 0 for address in addresses)
        alignment = 16 if aligned else first.itemsize
    runs = block_layout.block_runs(first)
    tile = copy_tile(runs.num_elements, first.itemsize)
    chunks = cdiv(runs.num_elements, tile.elements)
    launch(_copy_blocks_kernel, (num_pairs * chunks, num_planes),
        planes_arg, src_to_dst,
        first.shape[1] if is_one_tensor else 1,
        src_to_dst.stride(0),
        *(first.stride()[:2] if is_one_tensor else (0, 0)), first.stride(-4), *runs.strides[0],
        CHUNKS=chunks, NUM_ELEMENTS=runs.num_elements,
        RUN=runs.run, INNER_RUNS=runs.inner_runs, TILE=tile.elements,
        DTYPE=block_layout.TL_BITS[first.itemsize], ALIGNMENT=alignment,
        num_warps=tile.num_warps,
    )  # fmt: skip
