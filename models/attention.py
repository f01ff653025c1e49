"""Attention over the paged KV cache, by one of three backends.

A backend normalises (with QK-norm) and rotates queries and keys.  It stores the new keys and values
into their slots before it attends, so a sequence may read blocks that another sequence of the same
batch fills.

    triton      the kernels of this repository
    torch       plain PyTorch: fast on a CPU, a baseline elsewhere
    flash_attn  flash-attn, if it is installed
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels import checks, reference
from models.layers import Rotation, apply_rope

if TYPE_CHECKING:
    from models.decoder import Attention


class Scores(TypedDict):
    """How a layer computes scores: see ``AttentionBackend``."""

    scale: float
    window_size: int | None
    softcap: float


Gather = tuple[slice, Tensor, Tensor | None]  # sequences, their slots and a mask
Cache = tuple[Tensor, float | None]  # of keys or values, and its scale


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Layout of a batch.  Every layer takes it as an argument.

    Rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] are the queries of sequence i.  They belong to the
    last of its context_lens[i] tokens.
    """

    slot_mapping: Tensor
    """(num_tokens,) int64: block_id * block_size + offset.  Padding rows of a captured graph have a
    negative slot and a context length of 0."""
    block_tables: Tensor
    """(num_seqs, max_blocks) int32; entries past a sequence's last block may hold anything."""
    cu_seqlens_q: Tensor
    """(num_seqs + 1,) int32: cumulative number of queries, starting at 0."""
    context_lens: Tensor
    """(num_seqs,) int32: number of tokens of a sequence in the cache, including this batch's."""
    max_seqlen_q: int
    """Largest number of queries of a sequence; 1 when decoding."""
    max_context_len: int
    """Largest of context_lens, or an upper bound of them."""
    parts: tuple[AttentionMetadata, ...] = ()
    """Parts of a batch that mixes sequences with one, few and many queries; else empty."""
    groups: tuple[AttentionMetadata, ...] = ()
    """The slots and tables of each group of layers; empty if the model has one group."""
    gathers: dict[int | None, list[Gather]] = field(default_factory=dict, compare=False, repr=False)
    """Slots that a decode batch sees, by window size; layers share them (``TorchBackend``)."""


class AttentionBackend:
    """Rotates query and key, stores key and value, and attends causally over each context."""

    name: str
    ops: ModuleType = kernels
    """Module of the layer's other ops: ``kernels``, or ``kernels.reference`` (plain PyTorch)."""
    has_fp8_cache: bool = True
    """Whether the cache may be fp8 e4m3."""
    captured_multiple: int
    """CUDA graphs can capture decoding if the block size is a multiple of this number.  0: they
    cannot, because the host reads lengths."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, k_cache: Tensor,
        v_cache: Tensor, metadata: AttentionMetadata, layer: Attention,
    ) -> Tensor:  # fmt: skip
        """Returns attention in query's shape.

        query: (num_tokens, num_q_heads, head_dim), may be mutated.
        key, value: (num_tokens, num_kv_heads, head_dim), any strides on the first two dimensions.
        k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim), this layer's, mutated.
            Dtype: key's, or fp8 e4m3, which stores keys / k_scale and values / v_scale.
        layer: k_scale and v_scale (None is 1); q_norm and k_norm (QK-norm; None is none); and
            scores: scale, window_size (tokens that a query sees, itself included; None is all) and
            softcap (scores become softcap * tanh(score / softcap); 0 is off).

        All keys and values are read from the cache, so the result of a query does not depend on
        which tokens are computed together.
        """
        raise NotImplementedError

    def _rope_store(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation,
        caches: tuple[Tensor, Tensor], metadata: AttentionMetadata, layer: Attention,
        **scales: float | None,
    ) -> None:  # fmt: skip
        """Rotate query in place and store rotated keys, and values, in one launch."""
        norms: dict[str, Tensor | float] = {}
        if (q_norm := layer.q_norm) is not None:
            assert layer.k_norm is not None
            norms = {"q_norm_weight": q_norm.weight, "k_norm_weight": layer.k_norm.weight}
            norms |= {"norm_eps": q_norm.eps, "norm_offset": q_norm.offset}
        angles = rotation.positions, rotation.cos, rotation.sin
        slots = metadata.slot_mapping
        self.ops.rope_store_kvcache(query, key, value, *caches, slots, *angles, **norms, **scales)


class TritonBackend(AttentionBackend):
    """Triton kernels: the decode kernel for sequences with one query, else the prefill kernel."""

    name = "triton"
    captured_multiple = 1

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, k_cache: Tensor,
        v_cache: Tensor, metadata: AttentionMetadata, layer: Attention,
    ) -> Tensor:  # fmt: skip
        caches, scales = (k_cache, v_cache), {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        self._rope_store(query, key, value, rotation, caches, metadata, layer, **scales)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for rows, part in _parts(metadata):
            options = {"out": out[rows], **layer.scores, **scales}
            inputs = query[rows], *caches, part.block_tables
            if part.max_seqlen_q == 1:
                self.ops.paged_decode_attention(*inputs, part.context_lens, **options)
            else:
                options |= {"max_seqlen_q": part.max_seqlen_q, "num_splits": None}
                lens = part.cu_seqlens_q, part.context_lens
                self.ops.paged_prefill_attention(*inputs, *lens, **options)
        return out


def _parts(metadata: AttentionMetadata) -> Iterator[tuple[slice, AttentionMetadata]]:
    """For each part of a batch: the slice of its rows, and its metadata."""
    if not metadata.parts:
        yield slice(None), metadata
    end = 0
    for part in metadata.parts:
        start, end = end, end + len(part.slot_mapping)
        yield slice(start, end), part


MASKED_QUERIES = 256
"""Number of queries for which the torch backend builds one causal mask."""

GATHERED_BYTES = 2 << 20
"""Most bytes of keys that the torch backend gathers at a time on a CPU, so that they fit into the
CPU's caches."""


class TorchBackend(AttentionBackend):
    """PyTorch's scaled_dot_product_attention over the gathered context.

    Decoding gathers the contexts of several sequences: on a GPU all, on a CPU as many as fit into
    the CPU's caches.  Shorter contexts are padded with their last token (other slots may hold NaN),
    and the padding is masked.  Prompts are computed sequence by sequence.  Reading lengths on the
    host synchronises a GPU.  Scores with a softcap are computed without the fused function.
    """

    name = "torch"
    ops = reference
    captured_multiple = 0

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, k_cache: Tensor,
        v_cache: Tensor, metadata: AttentionMetadata, layer: Attention,
    ) -> Tensor:  # fmt: skip
        if layer.q_norm is not None:
            assert layer.k_norm is not None
            query, key = layer.q_norm(query), layer.k_norm(key)
        query, key = (apply_rope(x, *rotation.of_tokens) for x in (query, key))
        caches = (k_cache, layer.k_scale), (v_cache, layer.v_scale)
        for (cache, scale), new in zip(caches, (key, value), strict=True):
            if cache.itemsize == 1:  # index_copy_ does not support fp8: copy the bytes
                new = self.ops.quantise(new, scale).view(torch.uint8)
                cache = cache.view(torch.uint8)
            slots = cache.view(-1, *cache.shape[2:])
            slots.index_copy_(0, metadata.slot_mapping, new.to(cache.dtype))
        limit = math.inf
        if query.device.type == "cpu":
            limit = GATHERED_BYTES // (k_cache[0, 0].numel() * query.itemsize)
        window_size, outs = layer.scores["window_size"], []
        for rows, part in _parts(metadata):
            if part.max_seqlen_q == 1:
                if (gathers := part.gathers.get(window_size)) is None:
                    gathers = list(_gathers(part, k_cache.shape[1], window_size, limit))
                    part.gathers[window_size] = gathers
                outs.append(self._decode(query[rows], caches, gathers, **layer.scores))
            else:
                outs.append(self._prefill(query[rows], caches, part, **layer.scores))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _decode(
        self, query: Tensor, caches: tuple[Cache, Cache], gathers: list[Gather], *,
        window_size: int | None, **scores: Any,
    ) -> Tensor:  # fmt: skip
        num_kv_heads, head_dim = caches[0][0].shape[2:]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        # Query heads of a group are rows of one matrix, so K and V are not copied per head.
        queries = query.unflatten(1, (num_kv_heads, -1))
        for some, slots, seen in gathers:
            rows = (cache.flatten(0, 1).index_select(0, slots.flatten()) for cache, _ in caches)
            keys, values = (
                self.ops.dequantise(part, cache_scale, query.dtype)
                .view(*slots.shape, num_kv_heads, head_dim)
                .transpose(1, 2)
                for part, (_, cache_scale) in zip(rows, caches, strict=True)
            )
            attended = _attend(queries[some], keys, values, seen, **scores)
            out[some] = attended.reshape(-1, *query.shape[1:])
        return out

    def _prefill(
        self, query: Tensor, caches: tuple[Cache, Cache], metadata: AttentionMetadata, *,
        window_size: int | None, **scores: Any,
    ) -> Tensor:  # fmt: skip
        block_size = caches[0][0].shape[1]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        starts = metadata.cu_seqlens_q.tolist()
        for i, context_len in enumerate(metadata.context_lens.tolist()):
            start, end = starts[i], starts[i + 1]
            if start == end:
                continue
            first = 0
            if window_size is not None:
                first = max(0, context_len - (end - start) - window_size + 1)
            blocks = metadata.block_tables[i, first // block_size : -(-context_len // block_size)]
            seen = slice(first % block_size, first % block_size + context_len - first)
            keys, values = (
                self.ops.dequantise(
                    cache.index_select(0, blocks).flatten(0, 1)[seen], cache_scale, query.dtype
                ).transpose(0, 1)[None]
                for cache, cache_scale in caches
            )
            queries = query[start:end].transpose(0, 1)[None]
            attended = _attend_causally(queries, keys, values, window_size, **scores)
            out[start:end] = attended[0].transpose(0, 1)
        return out


def _gathers(
    metadata: AttentionMetadata, block_size: int, window_size: int | None, limit: float
) -> Iterator[Gather]:
    """Cut a decode batch into runs of up to ``limit`` tokens, and find the slots that queries see.

    Yields for each run: the slice of its sequences; their slots, (num_seqs, longest); and a mask,
    (num_seqs, 1, 1, longest), False for padding.  The mask is None without padding.
    """
    ends = metadata.context_lens.long()
    begins = torch.zeros_like(ends) if window_size is None else (ends - window_size).clamp(0)
    lengths = ends - begins
    for some in padded_runs(lengths.tolist(), limit):
        begin, length = begins[some, None], lengths[some, None]
        longest = int(length.max())
        offsets = torch.arange(longest, device=ends.device)
        nearest = begin + torch.minimum(offsets, length - 1)
        blocks = metadata.block_tables[some].long().gather(1, nearest // block_size)
        slots = blocks * block_size + nearest % block_size
        seen = None if int(length.min()) == longest else (offsets < length)[:, None, None, :]
        yield some, slots, seen


def padded_runs(lengths: list[int], limit: float) -> Iterator[slice]:
    """Cut a batch into runs of sequences.  A run has up to ``limit`` tokens, padding included, or
    one longer sequence."""
    first, longest = 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if index > first and longest * (index + 1 - first) > limit:
            yield slice(first, index)
            first, longest = index, length
    if lengths:
        yield slice(first, len(lengths))


def _attend_causally(
    queries: Tensor, keys: Tensor, values: Tensor, window_size: int | None, **scores: Any
) -> Tensor:
    """Causal attention of the last positions of a sequence; returns queries' shape.

    queries: (1, num_q_heads, num_queries, head_dim).  keys, values: (1, num_kv_heads, num_keys,
    head_dim), for the last num_keys positions.

    Behind a cached prefix PyTorch needs a mask, and it also computes the masked scores.  So each
    slice of queries attends only to the range of keys that it sees.
    """
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    num_before = num_keys - num_queries
    window_size = num_keys if window_size is None else min(window_size, num_keys)
    if not num_before and window_size == num_keys and not scores.get("softcap"):
        options = {"scale": scores["scale"], "enable_gqa": queries.shape[1] != keys.shape[1]}
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, **options)
    parts = []
    for start in range(0, num_queries, MASKED_QUERIES):
        end = min(start + MASKED_QUERIES, num_queries)
        some = slice(max(0, num_before + start - window_size + 1), num_before + end)
        seen = None
        if end - start > 1:
            shape = (end - start, some.stop - some.start)
            last = num_before + start - some.start  # the last key that the first query sees
            seen = torch.ones(shape, dtype=torch.bool, device=queries.device)
            seen = seen.tril(last).triu(last - window_size + 1)
        parts.append(
            _attend(queries[:, :, start:end], keys[:, :, some], values[:, :, some], seen, **scores)
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, *, scale: float,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Attention to the keys where ``seen`` is True, or to all keys if ``seen`` is None."""
    group = queries.shape[1] // keys.shape[1]
    if not softcap:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=group > 1
        )
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    capped = softcap * torch.tanh(queries @ keys.mT * (scale / softcap))
    if seen is not None:
        capped = capped.masked_fill(~seen, -torch.inf)
    return capped.softmax(dim=-1, dtype=torch.float32).to(values.dtype) @ values


class FlashAttnBackend(AttentionBackend):
    """flash-attn's paged kernels.  Raises ImportError if flash-attn is not installed.

    flash-attn 2 needs block sizes that are multiples of 256.  For other block sizes, the contexts
    are copied into pages of 256 tokens before each call.
    """

    name = "flash_attn"
    has_fp8_cache = False
    captured_multiple = page_multiple = 256  # else each layer of a graph would copy max_context_len

    def __init__(self) -> None:
        try:
            self._flash_attn = importlib.import_module("flash_attn")
        except ImportError as error:
            raise ImportError(
                f"attention_backend='flash_attn' needs the package flash-attn: {error}"
            ) from error

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, k_cache: Tensor,
        v_cache: Tensor, metadata: AttentionMetadata, layer: Attention,
    ) -> Tensor:  # fmt: skip
        options, window_size = layer.scores | {"causal": True}, layer.scores["window_size"]
        options["softmax_scale"] = options.pop("scale")
        options["window_size"] = (-1, -1) if window_size is None else (window_size - 1, 0)
        self._rope_store(query, key, value, rotation, (k_cache, v_cache), metadata, layer)
        block_tables = metadata.block_tables
        if k_cache.shape[1] % self.page_multiple:
            k_cache, v_cache, block_tables = self._repage(k_cache, v_cache, metadata)
        if metadata.max_seqlen_q == 1:
            return self._flash_attn.flash_attn_with_kvcache(
                query[:, None], k_cache, v_cache,
                cache_seqlens=metadata.context_lens, block_table=block_tables, **options,
            )[:, 0]  # fmt: skip
        cu_seqlens_k = F.pad(metadata.context_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return self._flash_attn.flash_attn_varlen_func(
            query, k_cache, v_cache, block_table=block_tables,
            cu_seqlens_q=metadata.cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=metadata.max_seqlen_q, max_seqlen_k=metadata.max_context_len, **options,
        )  # fmt: skip

    def _repage(
        self, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Copy the contexts into pages of page_multiple tokens; returns K, V and the page table."""
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


_CLASSES: tuple[type[AttentionBackend], ...] = (TritonBackend, TorchBackend, FlashAttnBackend)
BACKENDS = {backend.name: backend for backend in _CLASSES}
"""Attention backends by name."""


def make_backend(name: str | None, device: torch.device) -> AttentionBackend:
    """The backend ``name``, by default triton on a GPU and torch on a CPU.

    Raises ValueError for an unknown name or a backend that cannot run on ``device``, and
    ImportError for flash_attn if flash-attn is not installed."""
    if name is None:
        name = "torch" if device.type == "cpu" else "triton"
    if name not in BACKENDS:
        raise ValueError(
            f"attention_backend={name!r} is unknown; choose from {', '.join(BACKENDS)}"
        )
    if device.type == "cpu" and name == "flash_attn":
        raise ValueError("attention_backend='flash_attn': flash-attn runs on GPUs only")
    if device.type == "cpu" and name == "triton" and not checks.INTERPRETED.value:
        raise ValueError(
            "attention_backend='triton' on a CPU: set TRITON_INTERPRET=1 in the environment before "
            "the kernels are imported, to run them in Triton's interpreter, or use 'torch'"
        )
    return BACKENDS[name]()
