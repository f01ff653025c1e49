"""Hostile inputs for the attention ops.

Block tables are shuffled, their padding is garbage, and every slot that must not matter holds NaN
or Inf.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

LAYOUTS = ("NHD", "HND", "layer", "interleaved", "unlike", "unaligned K", "unaligned V")
_UNLIKE = ("interleaved", "HND")


class RandomTensors:
    """Random tensors on a device, the same from the same seed; on meta they have no values.

    Numbers are generated on the GPU where there is one: gigabytes would take the host minutes.
    """

    def __init__(self, device: torch.device | str, seed: int) -> None:
        self.device = torch.device(device)
        self._on = self.device if self.device.type == "cuda" else torch.device("cpu")
        self._generator = torch.Generator(self._on).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Normally distributed numbers."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        numbers = torch.randn(shape, generator=self._generator, device=self._on)
        return numbers.to(self.device, dtype)

    def permutation(self, n: int, start: int = 0) -> torch.Tensor:
        """start to start + n - 1 in random order, int64."""
        order = torch.randperm(n, generator=self._generator, device=self._on) + start
        return order.to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Integers from low to below high, int64."""
        numbers = torch.randint(low, high, shape, generator=self._generator, device=self._on)
        return numbers.to(self.device)


def i32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def i64(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def kv(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Both caches of a shape, zeros."""
    return {name: torch.zeros(*shape, dtype=dtype) for name in ("k_cache", "v_cache")}


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, +Inf and -Inf in turn along the last dimension, in place."""
    if tensor.is_meta:
        return tensor
    pattern = torch.tensor([math.nan, math.inf, -math.inf], device=tensor.device)
    fill = pattern[torch.arange(tensor.shape[-1], device=tensor.device) % 3]
    return tensor.copy_(fill.to(tensor.dtype).expand_as(tensor))


def make_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *,
    dtype: torch.dtype, device: torch.device | str, layout: str = "NHD",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A poisoned (k_cache, v_cache), each (num_blocks, block_size, num_kv_heads, head_dim).

    layout: "NHD": in the order of the shape. "HND": heads outside slots. "layer": one layer of a
    (2, num_layers, ...) tensor. "interleaved": K and V of a block side by side. "unlike": K
    interleaved, V HND, so that all their strides differ. "unaligned K": rows of V start at
    multiples of 16 bytes and rows of K do not; "unaligned V": the reverse.
    """
    if layout == "unlike":
        sizes = (num_blocks, block_size, num_kv_heads, head_dim)
        k, v = (make_cache(*sizes, dtype=dtype, device=device, layout=x) for x in _UNLIKE)
        return k[0], v[1]
    if layout.startswith("unaligned"):
        lengths = (head_dim + (int(layout[-1] == name) - head_dim) % 16 for name in "KV")
        rows = [
            torch.empty(num_blocks, block_size, num_kv_heads, n, dtype=dtype, device=device)
            for n in lengths
        ]
        return poison_(rows[0])[..., :head_dim], poison_(rows[1])[..., :head_dim]
    shape = {
        "NHD": (2, num_blocks, block_size, num_kv_heads, head_dim),
        "HND": (2, num_blocks, num_kv_heads, block_size, head_dim),
        "layer": (2, 3, num_blocks, block_size, num_kv_heads, head_dim),
        "interleaved": (num_blocks, 2, block_size, num_kv_heads, head_dim),
    }[layout]
    kv = poison_(torch.empty(shape, dtype=dtype, device=device))
    if layout == "HND":
        kv = kv.transpose(2, 3)
    elif layout == "layer":
        kv = kv[:, 1]
    elif layout == "interleaved":
        kv = kv.transpose(0, 1)
    return kv[0], kv[1]


@dataclass(frozen=True)
class PagedBatch:
    """A batch of sequences with paged KV; q is (sum of query lengths, num_q_heads, head_dim)."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    """(batch + 1,) int32, where each sequence's queries start."""

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Arguments that decode and prefill have in common."""
        names = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
        return {name: getattr(self, name) for name in names}


def hidden_tokens(
    context_lens: Sequence[int], query_lens: Sequence[int], window_size: int | None
) -> list[int] | None:
    """Tokens before the window of each sequence's first query (all if it has no query)."""
    if window_size is None:
        return None
    lens = zip(context_lens, query_lens, strict=True)
    return [n if q == 0 else max(0, n - q + 1 - window_size) for n, q in lens]


def random_paged_batch(
    context_lens: Sequence[int], *,
    num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
    dtype: torch.dtype, device: torch.device | str, kv_dtype: torch.dtype | None = None,
    query_lens: Sequence[int] | None = None, layout: str = "NHD", seed: int = 0,
    hidden_tokens: Sequence[int] | None = None, first_block: int = 0, spare_blocks: int = 3,
    table_width: int | None = None, exponent: int | None = None,
) -> PagedBatch:  # fmt: skip
    """Normally distributed queries, keys and values in a shuffled, poisoned paged cache.

    dtype, kv_dtype: of the queries, and of the cache if it has another dtype (fp8).
    query_lens: queries per sequence, at the end of its context. By default 1 each (decode).
    hidden_tokens: leading tokens of each sequence that no query may see (a window; negative counts
        as 0). Their slots are poisoned, and table entries of blocks with hidden tokens only are
        garbage.
    first_block, spare_blocks: numbers of unused blocks before and among the used blocks.
    table_width: columns of the tables. By default two more than the longest sequence needs.
    exponent: every query or key has 2^exponent or its negative in all dimensions (fp16, and keys in
        fp8: 2^5 at most). If the scale is a power of two, all scores are exact: one number or its
        negative. At 59 they are close to the largest of fp32.

    Unused blocks, slots past a context length and the padding of the tables (negative and huge ids)
    are poison: one read shows in the output.
    """
    random = RandomTensors(device, seed)
    placement = torch.Generator().manual_seed(seed + 1)  # values do not depend on the block size
    batch = len(context_lens)
    query_lens = [1] * batch if query_lens is None else list(query_lens)
    hidden_tokens = [0] * batch if hidden_tokens is None else [max(0, n) for n in hidden_tokens]
    num_blocks_of = [-(-n // block_size) for n in context_lens]
    num_blocks = first_block + sum(num_blocks_of) + spare_blocks
    ids = first_block + torch.randperm(num_blocks - first_block, generator=placement)

    padding = torch.tensor([-1, 2**31 - 1, -(2**31), num_blocks + 7], dtype=torch.int32)
    max_blocks = table_width or max(num_blocks_of, default=0) + 2
    tables = padding[torch.randint(0, 4, (batch, max_blocks), generator=placement)]
    kv_dtype = kv_dtype or dtype
    k_cache, v_cache = make_cache(
        num_blocks, block_size, num_kv_heads, head_dim, dtype=kv_dtype, device=device, layout=layout
    )
    used = 0
    for row, (length, hidden) in enumerate(zip(context_lens, hidden_tokens, strict=True)):
        blocks = ids[used : used + num_blocks_of[row]]
        used += num_blocks_of[row]
        first_block = min(hidden // block_size, len(blocks))
        tables[row, first_block : len(blocks)] = blocks[first_block:]
        if k_cache.is_meta or length <= hidden:
            continue
        positions = torch.arange(hidden, length)
        where = (blocks[positions // block_size].to(device), (positions % block_size).to(device))
        for cache in (k_cache, v_cache):
            cache[where] = random.normal(len(positions), num_kv_heads, head_dim, dtype=kv_dtype)

    q = random.normal(sum(query_lens), num_q_heads, head_dim, dtype=dtype)
    if exponent is not None:
        for x in (q, k_cache):
            is_narrow = dtype == torch.float16 or x.itemsize == 1
            size = torch.tensor(2.0 ** (min(exponent, 5) if is_narrow else exponent))
            first = x[..., :1].float()
            x.copy_(torch.where(first.isnan(), x.float(), size.copysign(first)))
    return PagedBatch(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables.to(device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
    )


SCALES = ("none", "number", "tensor", "per head")


def random_scales(kind: str, num_kv_heads: int, device: torch.device | str) -> dict[str, object]:
    """k_scale and v_scale of an fp8 cache; kind: of SCALES."""
    if kind == "none":
        return {}
    if kind == "number":
        return {"k_scale": 0.7, "v_scale": 1.3}
    numbers = 0.25 + torch.rand(2, num_kv_heads, generator=torch.Generator().manual_seed(3))
    k_scale, v_scale = (scale.to(device) for scale in numbers)
    if kind == "tensor":
        return {"k_scale": k_scale[0], "v_scale": v_scale[:1]}
    return {"k_scale": k_scale, "v_scale": v_scale}


def random_shared_prefix_args(
    group_sizes: Sequence[int],
    prefix_lens: Sequence[int],
    suffix_lens: Sequence[int],
    *,
    window_size: int | None = None,
    **shape,
) -> dict[str, torch.Tensor]:
    """Arguments of shared_prefix_decode_attention, poisoned as by random_paged_batch.

    group_sizes, prefix_lens: members and prefix of each group. suffix_lens: of each sequence.
    window_size: poison the tokens that no member of a group sees. shape: as of random_paged_batch.
    """
    num_groups, starts = len(group_sizes), torch.tensor([0, *group_sizes]).cumsum(0).tolist()
    members = [suffix_lens[a:b] for a, b in pairwise(starts)]
    hidden = None
    if window_size is not None:
        visible = [window_size - min(suffixes, default=0) for suffixes in members]
        hidden = [n - max(0, seen) for n, seen in zip(prefix_lens, visible, strict=True)]
        hidden = [max(0, n) for n in (*hidden, *(n - window_size for n in suffix_lens))]
    batch = random_paged_batch([*prefix_lens, *suffix_lens], hidden_tokens=hidden, **shape)
    return {
        "q": batch.q[num_groups:],
        "k_cache": batch.k_cache,
        "v_cache": batch.v_cache,
        "prefix_block_tables": batch.block_tables[:num_groups],
        "prefix_lens": batch.context_lens[:num_groups],
        "group_offsets": torch.tensor(starts, dtype=torch.int32, device=batch.q.device),
        "suffix_block_tables": batch.block_tables[num_groups:],
        "suffix_lens": batch.context_lens[num_groups:],
    }
