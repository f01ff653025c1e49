"""Ops that move memory at real sizes: storing tokens, copying and swapping blocks.

Results are compared bit for bit, for some tokens or blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from experiments.bench.problem import (
    FP8_SCALE,
    OURS,
    Problem,
    Shape,
    dtypes,
    fill_normal,
    generator_of,
    scales_of,
    some_of,
)
from kernels import copy_blocks, reference, store_kvcache, swap_blocks
from kernels.testing.accuracy import Accuracy, bits


def _exact(pairs: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]) -> Callable:
    """A check of moved memory: the tensors of each pair agree bit for bit."""

    def check(_: object) -> Accuracy:
        if torch.cuda.is_available():  # for the host to read what has been copied
            torch.cuda.synchronize()
        same = all((bits(a).cpu() == bits(b).cpu()).all() for a, b in pairs())
        return Accuracy(error=0.0 if same else math.inf, eager_error=0.0)

    return check


def store_problem(shape: Shape, device: torch.device) -> Problem:
    """``batch`` tokens to random slots among twice as many."""
    dtype, kv_dtype = dtypes(shape)
    generator = generator_of(shape, device)
    elements = shape.block_size * shape.num_kv_heads * shape.head_dim
    num_blocks = 2 * -(-shape.batch // shape.block_size)
    num_blocks = max(num_blocks, -(-shape.min_cache_elements // elements))
    sizes = (2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    caches = torch.zeros(sizes, dtype=kv_dtype, device=device)
    heads = shape.num_q_heads + 2 * shape.num_kv_heads
    qkv = torch.empty(shape.batch, heads, shape.head_dim, dtype=dtype, device=device)
    key, value = qkv.normal_(generator=generator)[:, shape.num_q_heads :].chunk(2, dim=1)
    room = 2 * shape.batch
    slots = torch.randperm(room, generator=generator, device=device)[: shape.batch]
    slots += num_blocks * shape.block_size - room
    scales = scales_of(shape)

    def by_torch() -> None:
        for cache, new in zip(caches, (key, value), strict=True):
            cache.view(-1, *sizes[3:])[slots] = new

    some = torch.tensor(some_of(shape.batch), device=device)
    rows = [
        (cache.view(-1, *sizes[3:]), x[some]) for cache, x in zip(caches, (key, value), strict=True)
    ]
    if scales:
        rows = [(cache, reference.quantise(x, FP8_SCALE)) for cache, x in rows]
    moved = shape.batch * shape.num_kv_heads * shape.head_dim
    return Problem(
        num_bytes=2 * moved * (dtype.itemsize + kv_dtype.itemsize) + slots.nbytes,
        flops=0,
        implementations={
            OURS: lambda: store_kvcache(key, value, *caches, slots, **scales),
            "torch_index_put": by_torch,
        },
        check=_exact(lambda: [(bits(cache)[slots[some]].view(x.dtype), x) for cache, x in rows]),
        reset=caches.zero_,
    )


def _moved_blocks(
    shape: Shape, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor
) -> dict[str, Any]:
    """Bytes, check and reset of ops that copy whole blocks."""

    @functools.cache
    def some() -> list[list[int]]:
        return pairs[some_of(len(pairs))].tolist()

    def reset() -> None:
        for _, block in some():
            bits(target[:, :, block]).zero_()

    return {
        "num_bytes": len(pairs) * source[:, :, 0].nbytes,
        "flops": 0,
        "check": _exact(lambda: [(source[:, :, a], target[:, :, b]) for a, b in some()]),
        "reset": reset,
    }


def _block_cache(shape: Shape, num_blocks: int, device, **options: Any) -> torch.Tensor:
    sizes = (2, shape.num_layers, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    return torch.empty(sizes, dtype=dtypes(shape)[1], device=device, **options)


def copy_problem(shape: Shape, device: torch.device) -> Problem:
    """``batch`` blocks of every layer copied to others of the same cache."""
    elements = shape.block_size * shape.num_kv_heads * shape.head_dim * 2 * shape.num_layers
    num_blocks = max(2 * shape.batch, -(-shape.min_cache_elements // elements))
    generator = generator_of(shape, device)
    caches = fill_normal(_block_cache(shape, num_blocks, device), generator)
    ids = torch.randperm(2 * shape.batch, generator=generator, device=device)
    pairs = (ids + num_blocks - len(ids)).view(-1, 2)
    sources, targets = pairs.unbind(1)

    def by_torch() -> None:
        caches[:, :, targets] = caches[:, :, sources]

    moved = _moved_blocks(shape, caches, caches, pairs)
    return Problem(
        **moved | {"num_bytes": 2 * moved["num_bytes"]},
        implementations={OURS: lambda: copy_blocks(caches, pairs), "torch_index_put": by_torch},
    )


def _swap(shape: Shape, device: torch.device, *, out: bool) -> Problem:
    """``batch`` blocks of every layer to pinned host memory, or from there."""
    generator = generator_of(shape, device)
    on_gpu = fill_normal(_block_cache(shape, 2 * shape.batch, device), generator)
    host = "meta" if device.type == "meta" else "cpu"
    on_host = _block_cache(shape, shape.batch, host, pin_memory=device.type == "cuda")
    on_host.copy_(on_gpu[:, :, : shape.batch])
    gpu_ids = torch.randperm(2 * shape.batch, generator=generator, device=device)[: shape.batch]
    host_ids = torch.randperm(shape.batch, generator=generator, device=device)
    if out:
        source, target, pairs = on_gpu, on_host, torch.stack([gpu_ids, host_ids], dim=1)
    else:
        source, target, pairs = on_host, on_gpu, torch.stack([host_ids, gpu_ids], dim=1)
    on_the_host = [] if device.type == "meta" else pairs.tolist()
    places = list(itertools.product(range(2), range(shape.num_layers)))
    sources = [source[kv, layer, a] for a, _ in on_the_host for kv, layer in places]
    targets = [target[kv, layer, b] for _, b in on_the_host for kv, layer in places]

    def by_memcpy() -> None:  # one for each, from a loop in C++, as vLLM's swap_blocks
        torch._foreach_copy_(targets, sources, non_blocking=True)

    return Problem(
        **_moved_blocks(shape, source, target, pairs),
        implementations={OURS: lambda: swap_blocks(source, target, pairs), "memcpy": by_memcpy},
        eager_only=frozenset({"memcpy"}),
        ceiling="device_to_host" if out else "host_to_device",
    )


swap_out_problem = functools.partial(_swap, out=True)
swap_in_problem = functools.partial(_swap, out=False)
