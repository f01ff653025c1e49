"""Other implementations of paged decode and prefill, called with our ops' arguments.

    flash_attn_2          flash-attn 2 (Dao, 2023) on the paged cache; block_size a multiple of 256
    flash_attn_3          flash-attn 3 (Shah et al., 2024), for Hopper; any block size
    flex_attention        FlexAttention (Dong et al., 2024) with a mask that maps slots to tokens;
                          block_size a multiple of 128, equally many queries per sequence
    gather_sdpa           the context copied to contiguous tensors, scaled_dot_product_attention
    gather_cudnn          the same, by cuDNN alone

The time of a baseline whose name begins with gather_ includes the copy. The packages are imported
on first use.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLEX_ROWS = 128
"""Rows of a block of FlexAttention's masks."""
PAGE_SIZE = 256
"""Pages of flash-attn 2 hold a multiple of this many tokens."""


class Baseline:
    """One implementation, called where `unavailable` has no reason.

    `decode` and `prefill` take the tensors of `paged_decode_attention` and
    `paged_prefill_attention` and return their `out`, causal and with a scale of head_dim ** -0.5.
    Only a `prefill` with `prefill_syncs` synchronises with the host. Errors of a package pass
    through.
    """

    name: str
    prefill_syncs = False
    """Whether `prefill` reads lengths on the host, so that no CUDA graph can capture it."""

    def prepare(self, step: str, **inputs: Any) -> Callable[[], torch.Tensor]:
        """A call of `decode` or `prefill` without the work that a step does once for all layers."""
        return functools.partial(getattr(self, step), **inputs)

    def unavailable(self, q: torch.Tensor, k_cache: torch.Tensor) -> str | None:
        """Why this baseline cannot serve such tensors here, or None if it can."""
        raise NotImplementedError


class _Package(Baseline):
    """A baseline from a package for GPUs."""

    package: str
    tables: str
    """Argument that takes the block tables."""
    page_multiple = 1
    min_capability = (8, 0)

    @functools.cached_property
    def _module(self) -> ModuleType | str:
        """The package, or why it cannot be imported."""
        try:
            return importlib.import_module(self.package)
        except (ImportError, OSError) as error:
            return f"{self.package} cannot be imported: {error}"

    def unavailable(self, q, k_cache):
        if k_cache.dtype not in (torch.float16, torch.bfloat16) or q.dtype != k_cache.dtype:
            return f"it takes fp16 and bf16, got q {q.dtype} and k_cache {k_cache.dtype}"
        if q.shape[-1] % 8 or q.shape[-1] > 256:
            return f"it takes a head_dim up to 256 in steps of 8, got {q.shape[-1]}"
        if k_cache.shape[1] % self.page_multiple:
            return f"block_size: needs a multiple of {self.page_multiple}, got {k_cache.shape[1]}"
        if q.device.type != "cuda":
            return "it runs on CUDA devices only"
        if isinstance(self._module, str):
            return self._module
        if torch.cuda.get_device_capability(q.device) < self.min_capability:
            return f"it needs compute capability {'.'.join(map(str, self.min_capability))}"
        return None

    def decode(self, q, k_cache, v_cache, block_tables, context_lens):
        options = {"cache_seqlens": context_lens, self.tables: block_tables, "causal": True}
        return self._module.flash_attn_with_kvcache(q[:, None], k_cache, v_cache, **options)[:, 0]


class FlashAttention2(_Package):
    name = "flash_attn_2"
    package = "flash_attn"
    page_multiple = PAGE_SIZE
    tables = "block_table"

    def prefill(
        self, q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, *, max_seqlen_q
    ):
        return self._module.flash_attn_varlen_func(
            q, k_cache, v_cache, block_table=block_tables,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            cu_seqlens_k=F.pad(context_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            # A bound that is known without a synchronisation.
            max_seqlen_k=block_tables.shape[1] * k_cache.shape[1],
            causal=True,
        )  # fmt: skip


class FlashAttention3(_Package):
    name = "flash_attn_3"
    package = "flash_attn_interface"
    min_capability = (9, 0)
    tables = "page_table"

    def prefill(
        self, q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, *, max_seqlen_q
    ):
        return self._module.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=context_lens, page_table=block_tables,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, causal=True,
        )  # fmt: skip


def gather_padded(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V, (batch, capacity, num_kv_heads, head_dim), and which tokens exist.

    Tokens past a context repeat its last token, so that no garbage takes part.
    """
    block_size = k_cache.shape[1]
    positions = torch.arange(block_tables.shape[1] * block_size, device=k_cache.device)
    nearest = torch.minimum(positions, (context_lens[:, None] - 1).clamp(min=0))
    blocks = block_tables.gather(1, nearest // block_size).clamp(0, len(k_cache) - 1)
    k, v = (cache[blocks, nearest % block_size] for cache in (k_cache, v_cache))
    return k, v, positions < context_lens[:, None]


class GatherSdpa(Baseline):
    """PyTorch's attention on contiguous copies, in the dtype of the cache."""

    name = "gather_sdpa"
    prefill_syncs = True

    def unavailable(self, q, k_cache):
        if q.dtype != k_cache.dtype:
            return f"q and k_cache must have one dtype, got {q.dtype} and {k_cache.dtype}"
        return None

    def decode(self, q, k_cache, v_cache, block_tables, context_lens):
        keys, values, seen = gather_padded(k_cache, v_cache, block_tables, context_lens)
        # The query heads of a group are the rows of one query matrix: no copy of K and V per head.
        queries = q.unflatten(1, (keys.shape[2], -1))
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen[:, None, None]
        ).flatten(1, 2)
        return out.masked_fill((context_lens == 0)[:, None, None], 0.0)

    def prefill(
        self, q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, *, max_seqlen_q
    ):
        from torch.nn.attention.bias import causal_lower_right  # imports PyTorch's compiler

        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        starts = cu_seqlens_q.tolist()
        for i, context_len in enumerate(context_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            if rows.start == rows.stop or context_len == 0:
                continue
            blocks = block_tables[i, : -(-context_len // k_cache.shape[1])]
            keys, values = (
                cache[blocks].flatten(0, 1)[:context_len].transpose(0, 1)[None]
                for cache in (k_cache, v_cache)
            )
            # A mask that PyTorch recognises, so that it can choose its FlashAttention.
            mask = causal_lower_right(rows.stop - rows.start, context_len)
            attended = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True
            )
            out[rows] = attended[0].transpose(0, 1)
        return out


class GatherCudnn(GatherSdpa):
    name = "gather_cudnn"

    def unavailable(self, q, k_cache):
        if q.device.type != "cuda":
            return "it runs on CUDA devices only"
        return super().unavailable(q, k_cache)

    def prepare(self, step, **inputs):
        def call() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                try:
                    return getattr(self, step)(**inputs)
                except RuntimeError as error:
                    if "No available kernel" not in str(error):
                        raise
                    raise NotImplementedError(str(error)) from error

        return call


class FlexAttention(Baseline):
    name = "flex_attention"

    def unavailable(self, q, k_cache):
        if q.dtype != k_cache.dtype:
            return f"q and k_cache must have one dtype, got {q.dtype} and {k_cache.dtype}"
        if k_cache.shape[1] % FLEX_ROWS:
            return f"block_size: needs a multiple of {FLEX_ROWS}, got {k_cache.shape[1]}"
        return None

    def decode(self, **inputs):
        return self.prepare("decode", **inputs)()

    def prefill(self, **inputs):
        return self.prepare("prefill", **inputs)()

    def prepare(
        self, step, *, q, k_cache, v_cache, block_tables, context_lens,
        cu_seqlens_q=None, max_seqlen_q=1,
    ):  # fmt: skip
        from torch.nn.attention.flex_attention import flex_attention

        batch = len(context_lens)
        if len(q) != batch * max_seqlen_q:
            raise NotImplementedError("it takes equally many queries per sequence")
        mask = flex_mask(block_tables, context_lens, *k_cache.shape[:2], max_seqlen_q)
        keys, values = (cache.flatten(0, 1).transpose(0, 1)[None] for cache in (k_cache, v_cache))
        queries = q.unflatten(0, (batch, max_seqlen_q)).transpose(1, 2)
        attend = flex_attention
        if q.is_cuda:
            # After eight shapes PyTorch would run the function uncompiled, and says nothing.
            torch.compiler.reset()
            attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)

        def call() -> torch.Tensor:
            out = attend(queries, keys, values, block_mask=mask, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)

        return call


def flex_mask(
    block_tables: torch.Tensor, context_lens: torch.Tensor,
    num_blocks: int, block_size: int, num_queries: int,
) -> BlockMask:  # fmt: skip
    """FlexAttention's mask of the last num_queries tokens of each sequence, causal, over the slots
    of a cache: (batch, 1, tiles of queries, num_blocks)."""
    from torch.nn.attention.flex_attention import BlockMask

    device = block_tables.device
    table = F.pad(block_tables, (0, num_blocks))[:, :num_blocks]
    columns = torch.arange(num_blocks, device=device)
    used = columns * block_size < context_lens[:, None]
    column_of = torch.full_like(table, -1)
    column_of.scatter_reduce_(
        1, table.where(used, 0).long(), columns.where(used, -1).to(table.dtype), "amax"
    )

    def is_seen(seq, _head, query, slot):
        column = column_of[seq, slot // block_size]
        position = column * block_size + slot % block_size
        return (column >= 0) & (position <= context_lens[seq] - num_queries + query)

    first = torch.arange(0, num_queries, FLEX_ROWS, device=device)
    last = (first + FLEX_ROWS).clamp(max=num_queries) - 1
    before = (context_lens - num_queries)[:, None, None]
    whole = (before + first + 1).clamp(min=0) // block_size
    some = (before + last + block_size) // block_size - whole
    tables = table[:, None, None].expand(-1, -1, len(first), -1).contiguous()
    later = tables.gather(3, (columns + whole[..., None]) % num_blocks)
    return BlockMask.from_kv_blocks(
        some.int(), later, whole.int(), tables,
        BLOCK_SIZE=(FLEX_ROWS, block_size), mask_mod=is_seen,
        seq_lengths=(num_queries, num_blocks * block_size), compute_q_blocks=False,
    )  # fmt: skip


_ALL = (FlashAttention2(), FlashAttention3(), FlexAttention(), GatherSdpa(), GatherCudnn())
BASELINES: dict[str, Baseline] = {baseline.name: baseline for baseline in _ALL}
"""The baselines by name."""
