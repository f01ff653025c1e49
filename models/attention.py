"""Attention of a batch of sequences over the paged KV cache, by one of three backends.

A backend rotates queries and keys by their positions, stores the keys and values of the new tokens
into their slots, and then attends: a sequence may read blocks which another sequence of the same
batch has just filled.

    triton      the kernels of this repository
    torch       plain PyTorch: quick on a CPU, and a baseline elsewhere
    flash_attn  flash-attn, where it is installed
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
import torch.nn.functional as F

from models.layers import Rotation, apply_rope


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of a batch lie.  An argument of every layer, never global state.

    The queries of sequence i are the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of the batch: the
    last positions of its context_lens[i] tokens.
    """

    slot_mapping: torch.Tensor
    """(num_tokens,) int64: block_id * block_size + offset; negative: the token is not stored."""
    block_tables: torch.Tensor
    """(num_seqs, max_blocks) int32; entries past a sequence's last block may hold anything."""
    cu_seqlens_q: torch.Tensor
    """(num_seqs + 1,) int32: running sum of the number of queries."""
    context_lens: torch.Tensor
    """(num_seqs,) int32: tokens whose K/V are in the cache, those of this batch included."""
    max_seqlen_q: int
    """Largest number of queries of a sequence.  1 means decoding: one query each."""
    max_context_len: int
    """No smaller than the largest of context_lens."""


class AttentionBackend(Protocol):
    """Rotates query and key, stores key and value into the cache, then attends causally over each
    sequence's context."""

    name: str
    has_fp8_cache: bool
    """Whether the cache may be fp8 e4m3."""

    def can_capture(self, block_size: int) -> bool:
        """Whether decoding can be captured in a CUDA graph: nothing is read on the host."""
        ...

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> torch.Tensor:
        """query: (num_tokens, num_q_heads, head_dim), may be mutated.  key, value: (num_tokens,
        num_kv_heads, head_dim), any strides on the first two dimensions.  k_cache, v_cache:
        (num_blocks, block_size, num_kv_heads, head_dim), views of one layer, mutated, in the dtype
        of key or fp8 e4m3, which holds keys / k_scale and values / v_scale (None for 1).  Returns
        query's shape.

        All keys and values are read from the cache, those of this batch too: what a query sees
        does not depend on which tokens are computed together.
        """
        ...


def _rope_store(
    kernels, query, key, value, rotation, k_cache, v_cache, metadata, **cache_scales
) -> None:
    """Rotate query in place, and store rotated keys and values, in one launch."""
    kernels.rope_store_kvcache(
        query,
        key,
        value,
        k_cache,
        v_cache,
        metadata.slot_mapping,
        rotation.positions,
        rotation.cos,
        rotation.sin,
        **cache_scales,
    )


class TritonBackend:
    """The Triton kernels: one query per sequence by the decode kernel, all else by prefill."""

    name = "triton"
    has_fp8_cache = True

    def __init__(self) -> None:
        import kernels  # not at the top: whether to interpret is decided by then

        self._kernels = kernels

    def can_capture(self, block_size):
        return True

    def __call__(
        self, query, key, value, rotation, k_cache, v_cache, metadata, *, scale, **cache_scales
    ):
        caches = (k_cache, v_cache)
        _rope_store(self._kernels, query, key, value, rotation, *caches, metadata, **cache_scales)
        options = {"scale": scale, **cache_scales}
        if metadata.max_seqlen_q == 1:
            return self._kernels.paged_decode_attention(
                query, *caches, metadata.block_tables, metadata.context_lens, **options
            )
        return self._kernels.paged_prefill_attention(
            query,
            *caches,
            metadata.block_tables,
            metadata.cu_seqlens_q,
            metadata.context_lens,
            max_seqlen_q=metadata.max_seqlen_q,
            num_splits=None,
            **options,
        )


MASKED_QUERIES = 256
"""Queries of a sequence that the torch backend masks at a time."""

GATHERED_BYTES = 2 << 20
"""Most bytes of keys, in the dtype of the queries, that the torch backend gathers at a time on a
CPU: they stay in its cache, and in memory that the allocator keeps."""


class TorchBackend:
    """PyTorch's scaled_dot_product_attention over the gathered context.

    Decoding gathers the context of several sequences, shorter ones padded with repetitions of
    their last token (never with slots of others, which may hold NaN) and masked: of the whole batch
    on a GPU, of as many as fit into a CPU's cache there.  Longer queries go sequence by sequence.
    Lengths are read on the host: on a GPU that synchronises.
    """

    name = "torch"
    has_fp8_cache = True

    def __init__(self) -> None:
        from kernels import reference  # not at the top: whether to interpret is decided by then

        self._quantise, self._dequantise = reference.quantise, reference.dequantise

    def can_capture(self, block_size):
        return False

    def __call__(
        self,
        query,
        key,
        value,
        rotation,
        k_cache,
        v_cache,
        metadata,
        *,
        scale,
        k_scale=None,
        v_scale=None,
    ):
        query, key = (apply_rope(x, *rotation.of_tokens) for x in (query, key))
        if k_cache.dtype != key.dtype:
            key, value = self._quantise(key, k_scale), self._quantise(value, v_scale)
        block_size = k_cache.shape[1]
        slots = metadata.slot_mapping
        if bool((slots < 0).any()):
            stored = (slots >= 0).nonzero().squeeze(1)
            slots, key, value = slots[stored], key[stored], value[stored]
        k_cache[slots // block_size, slots % block_size] = key
        v_cache[slots // block_size, slots % block_size] = value
        attend = self._decode if metadata.max_seqlen_q == 1 else self._prefill
        return attend(query, ((k_cache, k_scale), (v_cache, v_scale)), metadata, scale)

    def _decode(self, query, caches, metadata, scale):
        num_kv_heads, head_dim = caches[0][0].shape[2:]
        limit = GATHERED_BYTES // (num_kv_heads * head_dim * query.itemsize)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lengths = metadata.context_lens.tolist()
        for some in padded_runs(lengths, limit if query.device.type == "cpu" else math.inf):
            tables, context_lens = metadata.block_tables[some], metadata.context_lens[some]
            out[some] = self._decode_padded(query[some], caches, tables, context_lens, scale)
        return out

    def _decode_padded(self, query, caches, block_tables, context_lens, scale):
        block_size, num_kv_heads, head_dim = caches[0][0].shape[1:]
        lengths = context_lens[:, None].long()
        longest = int(lengths.max())
        if longest == 0:
            return torch.zeros_like(query)
        positions = torch.arange(longest, device=query.device)
        nearest = torch.minimum(positions, (lengths - 1).clamp(min=0))
        blocks = block_tables.long().gather(1, nearest // block_size)
        slots = blocks.masked_fill(lengths == 0, 0) * block_size + nearest % block_size
        rows = (cache.flatten(0, 1).index_select(0, slots.flatten()) for cache, _ in caches)
        keys, values = (
            self._dequantise(part, cache_scale, query.dtype)
            .view(*slots.shape, num_kv_heads, head_dim)
            .transpose(1, 2)
            for part, (_, cache_scale) in zip(rows, caches, strict=True)
        )
        # The query heads of a group are rows of one query matrix: no copy of K and V per head.
        queries = query.unflatten(
            1, (num_kv_heads, -1)
        )  # (num_seqs, num_kv_heads, group, head_dim)
        seen = None
        if int(lengths.min()) < longest:
            seen = (positions < lengths)[:, None, None, :]
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)
        out = out.reshape(-1, query.shape[1], head_dim)
        return out.masked_fill((lengths == 0)[:, :, None], 0.0)

    def _prefill(self, query, caches, metadata, scale):
        _, block_size, num_kv_heads, _ = caches[0][0].shape
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        starts = metadata.cu_seqlens_q.tolist()
        for i, context_len in enumerate(metadata.context_lens.tolist()):
            start, end = starts[i], starts[i + 1]
            if start == end:
                continue
            num_blocks = -(-context_len // block_size)
            blocks = metadata.block_tables[i, :num_blocks]
            keys, values = (
                self._dequantise(
                    cache.index_select(0, blocks).flatten(0, 1)[:context_len],
                    cache_scale,
                    query.dtype,
                ).transpose(0, 1)[None]
                for cache, cache_scale in caches
            )
            attended = _attend_causally(
                query[start:end].transpose(0, 1)[None],
                keys,
                values,
                scale=scale,
                enable_gqa=query.shape[1] != num_kv_heads,
            )
            out[start:end] = attended[0].transpose(0, 1)
        return out


def padded_runs(lengths: list[int], limit: float) -> Iterator[slice]:
    """Cut a batch into runs of sequences that, each padded to the longest of its run, have up to
    ``limit`` tokens in all; a longer sequence is a run of its own."""
    first, longest = 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if index > first and longest * (index + 1 - first) > limit:
            yield slice(first, index)
            first, longest = index, length
    if lengths:
        yield slice(first, len(lengths))


def _attend_causally(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options
) -> torch.Tensor:
    """Attention of the last positions of a sequence, which see all that came before them.

    queries: (1, num_q_heads, num_queries, head_dim).  keys, values: (1, num_kv_heads, context_len,
    head_dim).  Returns queries' shape.

    Behind a cached prefix causality takes a mask, and what it hides is computed all the same.  So
    a slice of the queries at a time attends to no more than the last of them may see.
    """
    num_queries, context_len = queries.shape[2], keys.shape[2]
    num_cached = context_len - num_queries
    if not num_cached:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, **options)
    parts = []
    for start in range(0, num_queries, MASKED_QUERIES):
        end = min(start + MASKED_QUERIES, num_queries)
        seen = None
        if end - start > 1:
            shape = (end - start, num_cached + end)
            seen = torch.ones(shape, dtype=torch.bool, device=queries.device)
            seen = seen.tril(num_cached + start)
        parts.append(
            F.scaled_dot_product_attention(
                queries[:, :, start:end],
                keys[:, :, : num_cached + end],
                values[:, :, : num_cached + end],
                attn_mask=seen,
                **options,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


class FlashAttnBackend:
    """flash-attn's paged kernels.

    Args:
        module: what offers ``flash_attn_with_kvcache`` and ``flash_attn_varlen_func``; flash-attn
            itself by default.  ImportError if it is not installed.

    flash-attn 2 takes only block sizes that are multiples of 256.  With others the context is
    gathered into contiguous memory before each call.
    """

    name = "flash_attn"
    has_fp8_cache = False
    page_multiple = 256

    def __init__(self, module: ModuleType | None = None) -> None:
        if module is None:
            try:
                module = importlib.import_module("flash_attn")
            except ImportError as error:
                raise ImportError(
                    f"attention_backend='flash_attn' needs the package flash-attn: {error}"
                ) from error
        import kernels  # not at the top: whether to interpret is decided by then

        self._flash_attn, self._kernels = module, kernels

    def can_capture(self, block_size):
        # The copy of the context would be made for the longest one there may be, in every layer.
        return block_size % self.page_multiple == 0

    def __call__(
        self,
        query,
        key,
        value,
        rotation,
        k_cache,
        v_cache,
        metadata,
        *,
        scale,
        k_scale=None,
        v_scale=None,
    ):
        _rope_store(self._kernels, query, key, value, rotation, k_cache, v_cache, metadata)
        block_tables = metadata.block_tables
        if k_cache.shape[1] % self.page_multiple:
            k_cache, v_cache, block_tables = self._repage(k_cache, v_cache, metadata)
        if metadata.max_seqlen_q == 1:
            out = self._flash_attn.flash_attn_with_kvcache(
                query[:, None],
                k_cache,
                v_cache,
                cache_seqlens=metadata.context_lens,
                block_table=block_tables,
                softmax_scale=scale,
                causal=True,
            )
            return out[:, 0]
        return self._flash_attn.flash_attn_varlen_func(
            query,
            k_cache,
            v_cache,
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=F.pad(metadata.context_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_context_len,
            softmax_scale=scale,
            causal=True,
            block_table=block_tables,
        )

    def _repage(self, k_cache, v_cache, metadata):
        """The batch's context copied into pages of page_multiple tokens, and their table."""
        block_size = k_cache.shape[1]
        block_tables = metadata.block_tables.long()
        num_seqs, max_blocks = block_tables.shape
        pages_per_seq = max(1, -(-metadata.max_context_len // self.page_multiple))
        positions = torch.arange(pages_per_seq * self.page_multiple, device=k_cache.device)
        last = (metadata.context_lens.long() - 1).clamp(min=0)[:, None]
        nearest = torch.minimum(positions, last)
        columns = (nearest // block_size).clamp(max=max_blocks - 1)
        blocks = block_tables.gather(1, columns).clamp(min=0)
        pages = (num_seqs * pages_per_seq, self.page_multiple, *k_cache.shape[2:])
        table = torch.arange(pages[0], dtype=torch.int32, device=k_cache.device)
        return (
            k_cache[blocks, nearest % block_size].reshape(pages),
            v_cache[blocks, nearest % block_size].reshape(pages),
            table.view(num_seqs, pages_per_seq),
        )


BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend for backend in (TritonBackend, TorchBackend, FlashAttnBackend)
}
"""Attention backends by name."""


def make_backend(name: str | None, device: torch.device) -> AttentionBackend:
    """The backend ``name``, or the usual one of ``device``: triton on a GPU, torch on a CPU.

    Raises ValueError for an unknown name and for a backend that cannot run on ``device``,
    ImportError for flash_attn where it is not installed.
    """
    if name is None:
        name = "torch" if device.type == "cpu" else "triton"
    if name not in BACKENDS:
        raise ValueError(
            f"attention_backend={name!r} is unknown; choose from {', '.join(BACKENDS)}"
        )
    if device.type == "cpu" and name == "flash_attn":
        raise ValueError("attention_backend='flash_attn': flash-attn runs on GPUs only")
    if device.type == "cpu" and name == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "attention_backend='triton' on a CPU: set TRITON_INTERPRET=1 in the environment before "
            "the kernels are imported, to run them in Triton's interpreter, or use 'torch'"
        )
    return BACKENDS[name]()
