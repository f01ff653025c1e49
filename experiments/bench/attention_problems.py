"""Attention at real sizes: decode, prefill and cascade, ours and every baseline.

Caches of many gigabytes cannot be copied to fp64, so results are checked for some sequences (of
prefill: for their first, middle and last queries), whose blocks alone are copied.  Block tables are
shuffled, and slots that hold no token are NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

import kernels
from experiments.bench.problem import (
    OURS,
    Problem,
    Shape,
    dtypes,
    fill_normal,
    generator_of,
    scales_of,
    some_of,
)
from kernels import reference
from kernels.testing.accuracy import Accuracy, accuracy, bits
from kernels.testing.baselines import BASELINES
from kernels.testing.inputs import PagedBatch

_QUERIES_CHECKED = 16


def _paged_batch(shape: Shape, device: torch.device) -> PagedBatch:
    """Sequences of equal length in a shuffled cache; slots without a token hold NaN."""
    dtype, kv_dtype = dtypes(shape)
    generator = generator_of(shape, device)
    blocks_per_seq = -(-shape.context_len // shape.block_size)
    used = shape.batch * blocks_per_seq
    elements = shape.block_size * shape.num_kv_heads * shape.head_dim
    num_blocks = max(used + 3, -(-shape.min_cache_elements // elements))
    first = num_blocks - used
    tables = first + torch.randperm(used, generator=generator, device=device)
    tables = tables.view(shape.batch, blocks_per_seq)
    sizes = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    nan = bits(torch.tensor(torch.nan).to(kv_dtype))
    caches = []
    for _ in range(2):
        cache = torch.empty(sizes, dtype=kv_dtype, device=device)
        fill_normal(cache, generator)
        as_bits = bits(cache)
        as_bits[: min(first, 3)] = nan.to(device)
        if tail := shape.context_len % shape.block_size:
            as_bits[tables[:, -1], tail:] = nan.to(device)
        caches.append(cache)
    rows = shape.batch * shape.query_len
    q = torch.empty(rows, shape.num_q_heads, shape.head_dim, dtype=dtype, device=device)
    starts = torch.arange(shape.batch + 1, device=device) * shape.query_len
    return PagedBatch(
        q=q.normal_(generator=generator),
        k_cache=caches[0],
        v_cache=caches[1],
        block_tables=tables.to(torch.int32),
        context_lens=torch.full((shape.batch,), shape.context_len, device=device).int(),
        cu_seqlens_q=starts.int(),
    )


def _sample(batch: PagedBatch, rows: list[tuple[int, int, int]]) -> tuple[PagedBatch, torch.Tensor]:
    """A small batch with its own cache, and which queries of ``batch`` are its queries.

    rows: sequence, first query and number of queries; its context ends with the last of them.
    """
    device, block_size = batch.q.device, batch.k_cache.shape[1]
    starts, lengths = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist()
    contexts, queries, blocks = [], [], []
    for seq, first, count in rows:
        query_len = starts[seq + 1] - starts[seq]
        contexts.append(lengths[seq] - query_len + first + count)
        queries.append(torch.arange(starts[seq] + first, starts[seq] + first + count))
        blocks.append(batch.block_tables[seq, : -(-contexts[-1] // block_size)].long())
    tables = torch.zeros(len(rows), max(map(len, blocks)), dtype=torch.int32)
    used = 0
    for row, ids in enumerate(blocks):
        tables[row, : len(ids)] = torch.arange(used, used + len(ids))
        used += len(ids)
    ids, queries = torch.cat(blocks), torch.cat(queries).to(device)
    counts = torch.tensor([0, *(count for _, _, count in rows)])
    small = PagedBatch(
        q=batch.q[queries],
        k_cache=_blocks(batch.k_cache, ids),
        v_cache=_blocks(batch.v_cache, ids),
        block_tables=tables.to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        cu_seqlens_q=counts.cumsum(0).to(device, torch.int32),
    )
    return small, queries


def _blocks(cache: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Copies of some blocks, bit for bit: PyTorch does not index fp8 everywhere."""
    return bits(cache)[ids].view(cache.dtype)


def _judge(op: str, batch: PagedBatch, rows: list, **options: Any) -> Callable:
    """How a result for ``batch`` is judged: on some rows, against the reference of ``op``."""

    @functools.cache
    def expected() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        small, queries = _sample(batch, rows)
        right = getattr(reference, op)
        if op == "paged_prefill_attention":
            options["max_seqlen_q"] = max(count for _, _, count in rows)
            args, wide = small.prefill_args, small.double().prefill_args
        else:
            args, wide = small.decode_args, small.double().decode_args
        return queries, right(*args, **options), right(*wide, **options)

    def check(out: torch.Tensor) -> Accuracy:
        queries, low, ref = expected()
        return accuracy(out[queries], low, ref)

    return check


def _attention_bytes(shape: Shape, kv_tokens: int) -> int:
    """K and V of so many tokens, queries and output."""
    dtype, kv_dtype = dtypes(shape)
    kv = 2 * kv_tokens * shape.num_kv_heads * shape.head_dim * kv_dtype.itemsize
    rows = shape.batch * shape.query_len * shape.num_q_heads * shape.head_dim
    return kv + 2 * rows * dtype.itemsize


def attention_problem(shape: Shape, device: torch.device) -> Problem:
    """Decode, or prefill, of sequences of equal length."""
    batch, scales, op = _paged_batch(shape, device), scales_of(shape), f"paged_{shape.op}_attention"
    if shape.op == "prefill":
        args, options = batch.prefill_args, {"max_seqlen_q": shape.query_len}
        seqs, eager_only = (
            some_of(shape.batch)[::2],
            {n for n, b in BASELINES.items() if b.prefill_syncs},
        )
    else:
        args, options = batch.decode_args, {}
        seqs, eager_only = some_of(shape.batch), set()
    ours = functools.partial(getattr(kernels, op), num_splits=shape.num_splits, **scales)
    calls = {OURS: functools.partial(ours, *args, **options)}
    for name, baseline in BASELINES.items():
        calls[name] = functools.partial(getattr(baseline, shape.op), *args, **options)
    queries = shape.query_len
    count = min(_QUERIES_CHECKED, queries)
    pieces = sorted({0, (queries - count) // 2, queries - count})
    visible = queries * (shape.context_len - queries) + queries * (queries + 1) // 2
    return Problem(
        num_bytes=_attention_bytes(shape, shape.batch * shape.context_len),
        flops=4 * shape.batch * visible * shape.num_q_heads * shape.head_dim,
        implementations=calls,
        check=_judge(op, batch, list(itertools.product(seqs, pieces, [count])), **scales),
        eager_only=frozenset(eager_only),
    )


def cascade_problem(shape: Shape, device: torch.device) -> Problem:
    """Decode of sequences that share their first prefix_len tokens, which fill whole blocks."""
    if shape.prefix_len % shape.block_size:
        raise ValueError(
            f"prefix_len: needs a multiple of block_size={shape.block_size}, got {shape.prefix_len}"
        )
    suffix_len = shape.context_len - shape.prefix_len
    part = functools.partial(dataclasses.replace, shape, prefix_len=0)
    own = _paged_batch(part(context_len=suffix_len), device)
    prefix = _paged_batch(part(batch=1, context_len=shape.prefix_len, seed=shape.seed + 1), device)
    caches = [
        torch.cat([bits(a), bits(b)]).view(a.dtype)
        for a, b in ((own.k_cache, prefix.k_cache), (own.v_cache, prefix.v_cache))
    ]
    prefix_table = prefix.block_tables + len(own.k_cache)
    whole = PagedBatch(
        own.q,
        *caches,
        torch.cat([prefix_table.expand(shape.batch, -1), own.block_tables], dim=1),
        own.context_lens + shape.prefix_len,
        own.cu_seqlens_q,
    )
    groups = torch.tensor([0, shape.batch], dtype=torch.int32, device=device)
    scales = scales_of(shape)
    rows = [(seq, 0, 1) for seq in some_of(shape.batch)]
    shared = (own.q, *caches, prefix_table, prefix.context_lens, groups)
    return Problem(
        num_bytes=_attention_bytes(shape, shape.prefix_len + shape.batch * suffix_len),
        flops=4 * shape.batch * shape.context_len * shape.num_q_heads * shape.head_dim,
        implementations={
            OURS: lambda: kernels.shared_prefix_decode_attention(
                *shared, own.block_tables, own.context_lens, **scales
            ),
            "paged_decode": lambda: kernels.paged_decode_attention(*whole.decode_args, **scales),
        },
        check=_judge("paged_decode_attention", whole, rows, **scales),
    )
