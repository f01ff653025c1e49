"""Other implementations of paged decode and prefill, called with our ops' arguments.

    flash_attn_2          flash-attn 2 (Dao, 2023) on the paged cache; block_size a multiple of 256
    flash_attn_3          flash-attn 3 (Shah et al., 2024), for Hopper; any block size
    flash_attn_4          flash-attn 4 (`flash_attn.cute`), for Hopper and Blackwell
    flashinfer            FlashInfer (Ye et al., 2025); any block size. It plans on the host, once
                          for a batch, as an engine does for all layers
    torch_flash           the FlashAttention inside PyTorch (`torch.nn.attention.varlen`) on the
                          paged cache, from PyTorch 2.12; block_size a multiple of 256
    gather_flash_attn_2   the context copied into pages of 256 tokens first, for other block sizes
    gather_torch_flash    likewise
    gather_sdpa           the context copied to contiguous tensors, scaled_dot_product_attention
    gather_naive          the same copy, then matmul, softmax and matmul

Where a name begins with gather_, every call makes the copy, so its time includes it. The packages
are imported on first use; none of them is needed to import this module.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass, replace
from types import ModuleType

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

PAGE_SIZE = 256
"""Pages of flash-attn 2 hold a multiple of this many tokens."""


class Unavailable(Exception):
    """A baseline that cannot serve these inputs on this machine, and why."""


@dataclass(frozen=True)
class _Batch:
    """Arguments of `Baseline.prefill`; decode is prefill of one query each."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    """None for decode."""
    context_lens: torch.Tensor
    max_seqlen_q: int
    scale: float | None
    window_size: int | None

    @property
    def starts(self) -> torch.Tensor:
        """Where each sequence's queries start, (batch + 1,)."""
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q
        return torch.arange(len(self.q) + 1, dtype=torch.int32, device=self.q.device)

    @property
    def window(self) -> tuple[int, int]:
        """flash-attn's (left, right) of causal attention to window_size tokens."""
        return (-1, 0) if self.window_size is None else (self.window_size - 1, 0)

    @property
    def ends(self) -> torch.Tensor:
        """Cumulative context lengths, (batch + 1,)."""
        return F.pad(self.context_lens.cumsum(0, dtype=torch.int32), (1, 0))

    @property
    def capacity(self) -> int:
        """A bound of the context lengths, known without a synchronisation."""
        return self.block_tables.shape[1] * self.k_cache.shape[1]


class Baseline:
    """One implementation. `decode` and `prefill` have the arguments and results of our ops.

    They raise Unavailable where `unavailable` has a reason; other errors of a package pass through.
    Neither synchronises with the host, except where `prefill_syncs` is set.
    """

    name: str
    prefill_syncs = False
    """Whether `prefill` reads lengths on the host, so that no CUDA graph can capture it."""

    def unavailable(self, q: torch.Tensor, k_cache: torch.Tensor) -> str | None:
        """Why this baseline cannot serve such tensors here, or None if it can."""
        return None

    def decode(
        self,
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        block_tables: torch.Tensor, context_lens: torch.Tensor,
        *, scale: float | None = None, window_size: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Same as `kernels.paged_decode_attention`: (batch, num_q_heads, head_dim)."""
        self._check(q, k_cache)
        context = (k_cache, v_cache, block_tables, None, context_lens)
        return self._decode(_Batch(q, *context, 1, scale, window_size))

    def prefill(
        self,
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        block_tables: torch.Tensor, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor,
        *, max_seqlen_q: int, scale: float | None = None, window_size: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Same as `kernels.paged_prefill_attention`, causal: (total_q, num_q_heads, head_dim)."""
        self._check(q, k_cache)
        context = (k_cache, v_cache, block_tables, cu_seqlens_q, context_lens)
        return self._prefill(_Batch(q, *context, max_seqlen_q, scale, window_size))

    def _check(self, q: torch.Tensor, k_cache: torch.Tensor) -> None:
        if reason := self.unavailable(q, k_cache):
            raise Unavailable(f"{self.name}: {reason}")

    def _decode(self, batch: _Batch) -> torch.Tensor:
        return self._prefill(batch)


class _Package(Baseline):
    """A baseline from a package for GPUs.

    module: stands in for the package, on any device; None imports it.
    """

    package: str
    page_multiple = 1
    dtypes = (torch.float16, torch.bfloat16)
    min_capability = (8, 0)

    def __init__(self, module: ModuleType | None = None) -> None:
        self._given = module

    @functools.cached_property
    def _module(self) -> ModuleType | str:
        """The package, or why it cannot be imported."""
        if self._given is not None:
            return self._given
        try:
            return importlib.import_module(self.package)
        except (ImportError, OSError) as error:
            return f"{self.package} cannot be imported: {error}"

    def unavailable(self, q, k_cache):
        if k_cache.dtype not in self.dtypes or q.dtype != k_cache.dtype:
            return f"it takes fp16 and bf16, got q {q.dtype} and k_cache {k_cache.dtype}"
        if q.shape[-1] % 8 or q.shape[-1] > 256:
            return f"it takes a head_dim up to 256 in steps of 8, got {q.shape[-1]}"
        if k_cache.shape[1] % self.page_multiple:
            return f"block_size: needs a multiple of {self.page_multiple}, got {k_cache.shape[1]}"
        if self._given is None and q.device.type != "cuda":
            return "it runs on CUDA devices only"
        if isinstance(self._module, str):
            return self._module
        if self._given is None and torch.cuda.get_device_capability(q.device) < self.min_capability:
            return f"it needs compute capability {'.'.join(map(str, self.min_capability))}"
        return None


class FlashAttention2(_Package):
    name = "flash_attn_2"
    package = "flash_attn"
    page_multiple = PAGE_SIZE

    def _decode(self, batch):
        out = self._module.flash_attn_with_kvcache(
            batch.q[:, None], batch.k_cache, batch.v_cache,
            cache_seqlens=batch.context_lens, block_table=batch.block_tables,
            softmax_scale=batch.scale, causal=True, window_size=batch.window,
        )  # fmt: skip
        return out[:, 0]

    def _prefill(self, batch):
        return self._module.flash_attn_varlen_func(
            batch.q, batch.k_cache, batch.v_cache, block_table=batch.block_tables,
            cu_seqlens_q=batch.starts, max_seqlen_q=batch.max_seqlen_q,
            cu_seqlens_k=batch.ends, max_seqlen_k=batch.capacity,
            softmax_scale=batch.scale, causal=True, window_size=batch.window,
        )  # fmt: skip


class FlashAttention3(_Package):
    name = "flash_attn_3"
    package = "flash_attn_interface"
    min_capability = (9, 0)

    def _attend(self, q, batch, **rows):
        return self._module.flash_attn_with_kvcache(
            q, batch.k_cache, batch.v_cache,
            cache_seqlens=batch.context_lens, page_table=batch.block_tables,
            softmax_scale=batch.scale, causal=True, window_size=batch.window, **rows,
        )  # fmt: skip

    def _decode(self, batch):
        return self._attend(batch.q[:, None], batch)[:, 0]

    def _prefill(self, batch):
        rows = {"cu_seqlens_q": batch.starts, "max_seqlen_q": batch.max_seqlen_q}
        return self._attend(batch.q, batch, **rows)


class FlashAttention4(_Package):
    name = "flash_attn_4"
    package = "flash_attn.cute"
    min_capability = (9, 0)

    def _prefill(self, batch):
        left = None if batch.window_size is None else batch.window_size - 1
        result = self._module.flash_attn_varlen_func(
            batch.q, batch.k_cache, batch.v_cache, page_table=batch.block_tables,
            cu_seqlens_q=batch.starts, max_seqlen_q=batch.max_seqlen_q,
            seqused_k=batch.context_lens, max_seqlen_k=batch.capacity,
            softmax_scale=batch.scale, causal=True, window_size=(left, 0),
            num_splits=0,  # its own choice
        )  # fmt: skip
        return result[0] if isinstance(result, tuple) else result


class FlashInfer(_Package):
    """Its batch wrappers. Decode uses tensor cores from 4 query heads per KV head on, as SGLang
    does."""

    name = "flashinfer"
    package = "flashinfer"
    head_dims = (64, 128, 256)

    def __init__(self, module: ModuleType | None = None) -> None:
        super().__init__(module)
        self._planned: tuple[tuple, tuple, object] | None = None
        """Tensors and values of the last plan, and its wrapper."""

    def unavailable(self, q, k_cache):
        reason = super().unavailable(q, k_cache)
        if reason is None and self._given is None and q.shape[-1] not in self.head_dims:
            reason = f"it takes head_dims of {self.head_dims}, got {q.shape[-1]}"
        return reason

    def _prefill(self, batch):
        tensors = (batch.block_tables, batch.cu_seqlens_q, batch.context_lens)
        values = (batch.q.shape, batch.q.dtype, batch.k_cache.shape, batch.scale, batch.window_size)
        if (
            self._planned is None
            or self._planned[1] != values
            or any(one is not other for one, other in zip(self._planned[0], tensors, strict=True))
        ):
            self._planned = tensors, values, self._plan(batch)
        return self._planned[2].run(batch.q, (batch.k_cache, batch.v_cache))

    def _plan(self, batch: _Batch) -> object:
        (num_q_heads, head_dim), device = batch.q.shape[1:], batch.q.device
        page_size, num_kv_heads = batch.k_cache.shape[1:3]
        num_pages = -(-batch.context_lens // page_size)
        columns = torch.arange(batch.block_tables.shape[1], device=device)
        pages = (
            F.pad(num_pages.cumsum(0, dtype=torch.int32), (1, 0)),
            batch.block_tables[columns < num_pages[:, None]],
            batch.context_lens - (num_pages - 1).clamp(min=0) * page_size,  # in the last page
        )
        options = {
            "q_data_type": batch.q.dtype,
            "kv_data_type": batch.k_cache.dtype,
            "sm_scale": batch.scale,
            "window_left": batch.window[0],
        }
        heads = (num_q_heads, num_kv_heads, head_dim, page_size)
        workspace = torch.zeros(2**27, dtype=torch.uint8, device=device)
        if batch.cu_seqlens_q is None:
            with_tensor_cores = num_q_heads >= 4 * num_kv_heads
            wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=with_tensor_cores
            )
            wrapper.plan(*pages, *heads, **options)
        else:
            wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(batch.starts, *pages, *heads, causal=True, **options)
        return wrapper


class TorchFlash(_Package):
    """PyTorch's own FlashAttention by its public function, which takes block tables since 2.12."""

    name = "torch_flash"
    package = "torch.nn.attention.varlen"
    page_multiple = PAGE_SIZE

    def unavailable(self, q, k_cache):
        if reason := super().unavailable(q, k_cache):
            return reason
        if "block_table" not in inspect.signature(self._module.varlen_attn).parameters:
            return f"varlen_attn of PyTorch {torch.__version__} takes no block_table"
        return None

    def _prefill(self, batch):
        return self._module.varlen_attn(
            batch.q, batch.k_cache, batch.v_cache,
            batch.starts, batch.ends, batch.max_seqlen_q, batch.capacity,
            seqused_k=batch.context_lens, block_table=batch.block_tables,
            scale=batch.scale, window_size=batch.window,
            enable_gqa=batch.q.shape[-2] != batch.k_cache.shape[-2],
        )  # fmt: skip


class _GatherPages(Baseline):
    """A baseline for large pages: copies the context of a cache of small blocks to pages first."""

    def __init__(self, inner: _Package) -> None:
        self.inner = inner
        self.name = f"gather_{inner.name}"

    def unavailable(self, q, k_cache):
        pages = k_cache.new_empty((1, PAGE_SIZE, *k_cache.shape[2:]), device="meta")
        return self.inner.unavailable(q, pages)

    def _in_pages(self, batch: _Batch) -> _Batch:
        k, v, table = gather_pages(batch.k_cache, batch.v_cache, batch.block_tables)
        return replace(batch, k_cache=k, v_cache=v, block_tables=table)

    def _decode(self, batch):
        return self.inner._decode(self._in_pages(batch))

    def _prefill(self, batch):
        return self.inner._prefill(self._in_pages(batch))


def gather_pages(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The blocks of every row of the table, copied into pages of PAGE_SIZE tokens.

    Returns K and V, (batch * pages, PAGE_SIZE, num_kv_heads, head_dim), and their table, (batch,
    pages) int32. Padding of the table copies some block.
    """
    num_blocks, block_size = k_cache.shape[:2]
    batch, max_blocks = block_tables.shape
    tables = block_tables.clamp(0, num_blocks - 1)
    num_pages = max(1, -(-max_blocks * block_size // PAGE_SIZE))
    if PAGE_SIZE % block_size == 0:
        per_page = PAGE_SIZE // block_size
        blocks = F.pad(tables, (0, num_pages * per_page - max_blocks)).flatten()
        k, v = (cache.index_select(0, blocks) for cache in (k_cache, v_cache))
    else:
        positions = torch.arange(num_pages * PAGE_SIZE, device=k_cache.device)
        columns = (positions // block_size).clamp(max=max_blocks - 1)
        k, v = (cache[tables[:, columns], positions % block_size] for cache in (k_cache, v_cache))
    pages = (batch * num_pages, PAGE_SIZE, *k_cache.shape[2:])
    table = torch.arange(batch * num_pages, dtype=torch.int32, device=k_cache.device)
    return k.reshape(pages), v.reshape(pages), table.view(batch, num_pages)


def gather_padded(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V, (batch, capacity, num_kv_heads, head_dim), and which tokens exist.

    Places past a context repeat its last token, so that no garbage takes part.
    """
    block_size = k_cache.shape[1]
    positions = torch.arange(block_tables.shape[1] * block_size, device=k_cache.device)
    nearest = torch.minimum(positions, (context_lens[:, None] - 1).clamp(min=0))
    blocks = block_tables.gather(1, nearest // block_size).clamp(0, len(k_cache) - 1)
    k, v = (cache[blocks, nearest % block_size] for cache in (k_cache, v_cache))
    return k, v, positions < context_lens[:, None]


class _Gather(Baseline):
    """Plain PyTorch attention on contiguous copies, in the dtype of the cache."""

    prefill_syncs = True

    def unavailable(self, q, k_cache):
        if q.dtype != k_cache.dtype:
            return f"q and k_cache must have one dtype, got {q.dtype} and {k_cache.dtype}"
        return None

    def _decode(self, batch):
        lens = batch.context_lens
        keys, values, seen = gather_padded(batch.k_cache, batch.v_cache, batch.block_tables, lens)
        if batch.window_size is not None:
            positions = torch.arange(keys.shape[1], device=lens.device)
            seen = seen & (positions >= lens[:, None] - batch.window_size)
        # The query heads of a group are the rows of one query matrix: no copy of K and V per head.
        queries = batch.q.unflatten(1, (keys.shape[2], -1))
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        out = self._attend(queries, keys, values, seen[:, None, None], batch.scale)
        return out.flatten(1, 2).masked_fill((lens == 0)[:, None, None], 0.0)

    def _prefill(self, batch):
        out = torch.zeros_like(batch.q, memory_format=torch.contiguous_format)
        starts = batch.starts.tolist()
        for i, context_len in enumerate(batch.context_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            if rows.start == rows.stop or context_len == 0:
                continue
            blocks = batch.block_tables[i, : -(-context_len // batch.k_cache.shape[1])]
            keys, values = (
                cache[blocks].flatten(0, 1)[:context_len].transpose(0, 1)[None]
                for cache in (batch.k_cache, batch.v_cache)
            )
            queries = batch.q[rows].transpose(0, 1)[None]
            attended = self._attend_causally(queries, keys, values, batch.scale, batch.window_size)
            out[rows] = attended[0].transpose(0, 1)
        return out


def _causal_mask(num_queries: int, num_keys: int, window_size: int | None, device) -> torch.Tensor:
    """The keys that each query at the end of the context sees, (num_queries, num_keys) bool."""
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    distances = queries - torch.arange(num_keys, device=device)
    seen = distances >= 0
    return seen if window_size is None else seen & (distances < window_size)


class GatherSdpa(_Gather):
    name = "gather_sdpa"

    def _attend(self, queries, keys, values, seen, scale):
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)

    def _attend_causally(self, queries, keys, values, scale, window_size):
        num_queries, num_keys = queries.shape[2], keys.shape[2]
        if window_size is None:
            # A mask that PyTorch recognises, so that it can choose its FlashAttention.
            mask = causal_lower_right(num_queries, num_keys)
        else:
            mask = _causal_mask(num_queries, num_keys, window_size, queries.device)
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )


class GatherNaive(_Gather):
    name = "gather_naive"

    def _attend(self, queries, keys, values, seen, scale):
        scale = queries.shape[-1] ** -0.5 if scale is None else scale
        scores = (queries * scale) @ keys.transpose(-1, -2)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values

    def _attend_causally(self, queries, keys, values, scale, window_size):
        num_queries, num_keys, num_kv_heads = queries.shape[2], keys.shape[2], keys.shape[1]
        seen = _causal_mask(num_queries, num_keys, window_size, queries.device)
        grouped = queries.unflatten(1, (num_kv_heads, -1))  # [1, heads, group, queries, dim]
        out = self._attend(grouped, keys[:, :, None], values[:, :, None], seen, scale)
        return out.flatten(1, 2)


BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        FlashAttention2(),
        FlashAttention3(),
        FlashAttention4(),
        FlashInfer(),
        TorchFlash(),
        _GatherPages(FlashAttention2()),
        _GatherPages(TorchFlash()),
        GatherSdpa(),
        GatherNaive(),
    )
}
"""The baselines by name."""
