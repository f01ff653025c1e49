"""Other implementations of paged decode and prefill, called with our ops' arguments.

    flash_attn_2          flash-attn 2 (Dao, 2023) on the paged cache; block_size a multiple of 256
    flash_attn_3          flash-attn 3 (Shah et al., 2024), for Hopper; any block size
    gather_sdpa           the context copied to contiguous tensors, scaled_dot_product_attention;
                          its time includes the copy

The packages are imported on first use.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
import torch.nn.functional as F

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


BASELINES = {one.name: one for one in (FlashAttention2(), FlashAttention3(), GatherSdpa())}
"""The baselines by name."""
