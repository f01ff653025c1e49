"""Partial softmax states of split keys (flash-decoding, Dao et al., 2023), and their merge.

A launch that splits the keys of a query row among programs writes one partial state per split: the
largest score m_s, the sum l_s of the weights exp(score - m_s), and the sum acc_s of the weighted
values. Attention over all keys is

    out = sum_s w_s acc_s / sum_s w_s l_s    with w_s = exp(m_s - max m)

States do not hold the LSE m_s + log(l_s), because a large m_s would round l_s away. The program of
a row's first chunk also writes how many states the row has. Later states are not written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.launch import launch
from kernels.primitives import (
    LOG2_E,
    add_sinks,
    await_launches_before,
    cast,
    finite_shift,
    normalise,
    quotient,
)
from kernels.tiles import Chunking, merge_tile, padded_dim, pdl_options

# Number of sequences that the search for a token's sequence compares at a time.
_SEARCH_WIDTH = 256


@triton.jit
def _divide_up(dividend, divisor):
    """Return dividend / divisor, rounded up. Both are positive; their sum is below 2^21.

    fp32 takes 13 SASS instructions on sm_90; integers take 26. Subtracting 0.5 keeps the quotient
    away from integers, so its rounding error does not change the result.
    """
    sum = (dividend + divisor).to(tl.float32)
    return quotient(sum - 0.5, divisor.to(tl.float32)).to(tl.int32)


@triton.jit
def chunks_of(num_tokens, min_tiles, max_chunks, TILE_N: tl.constexpr):
    """Return tokens per chunk and number of chunks for num_tokens keys by `tiles.Chunking`."""
    num_tiles = tl.cdiv(tl.maximum(num_tokens, 1).to(tl.uint32), TILE_N).to(tl.int32)
    tiles = tl.maximum(min_tiles, _divide_up(num_tiles, max_chunks))
    return tiles * TILE_N, _divide_up(num_tiles, tiles)


@triton.jit
def states_of_sequence(
    seq, first_token, num_queries, num_splits, max_chunks, chunk_queries, seq_states
):
    """Prefill: return the maximum number of chunks of a sequence, and the index of its first state.

    The state of query i, head h and chunk c has index (first + i * chunks) * num_heads + h * chunks
    + c. A sequence has at most num_splits states per query and head, and at most seq_states states
    per head. So the states of all earlier sequences fit before `first`.
    """
    chunks = max_chunks // tl.maximum(tl.cdiv(num_queries, chunk_queries), 1)
    first = tl.minimum(first_token * num_splits.to(tl.int64), seq * seq_states.to(tl.int64))
    return tl.minimum(chunks, num_splits), first


@triton.jit(
    do_not_specialize=[
        "batch", "num_splits", "max_chunks", "chunk_queries", "seq_states",
    ]
)  # fmt: skip
def _merge_splits_kernel(
    out_ptr, lse_ptr, partial_acc_ptr, partial_sums_ptr, counts_ptr, sinks_ptr, cu_seqlens_ptr,
    batch, num_splits, max_chunks, chunk_queries, seq_states,
    stride_out_token, stride_out_head,
    NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    TILE_SPLITS: tl.constexpr, SEARCH_WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge one query head's states of one token, in order. Grid (num_tokens * NUM_Q_HEADS).

    With cu_seqlens_ptr, prefill wrote the states, see `states_of_sequence`. Tokens at or after
    cu_seqlens[batch] are padding without states. Otherwise each row has room for num_splits states.
    """
    await_launches_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    token, head = row // NUM_Q_HEADS, row % NUM_Q_HEADS
    max_states, first_state = num_splits, row * num_splits
    if cu_seqlens_ptr is not None:
        if token >= tl.load(cu_seqlens_ptr + batch):
            return
        seq = 0
        for first_seq in range(0, batch, SEARCH_WIDTH):
            seqs = first_seq + tl.arange(0, SEARCH_WIDTH)
            ends = tl.load(cu_seqlens_ptr + 1 + seqs, mask=seqs < batch, other=2**31 - 1)
            seq += tl.sum((ends <= token).to(tl.int32))
        first_token = tl.load(cu_seqlens_ptr + seq)
        num_queries = tl.load(cu_seqlens_ptr + seq + 1) - first_token
        max_states, first_state = states_of_sequence(
            seq, first_token, num_queries, num_splits, max_chunks, chunk_queries, seq_states
        )
        first_state += (token - first_token) * max_states
        first_state = first_state * NUM_Q_HEADS + head * max_states
    num_written = tl.minimum(tl.load(counts_ptr + row), max_states)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    dim_mask = offs_d < HEAD_DIM
    acc = tl.zeros([1, HEAD_DIM_PADDED], tl.float32)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    # If a quarter of the last tile is enough, only that is read.
    FEW: tl.constexpr = TILE_SPLITS // 4
    begin, end = 0, tl.cdiv(tl.maximum(num_written - FEW, 0), TILE_SPLITS) * TILE_SPLITS
    for LAST in tl.static_range(2):
        for start in range(begin, end, FEW if LAST else TILE_SPLITS):
            splits = start + tl.arange(0, FEW if LAST else TILE_SPLITS)
            states = first_state + splits
            sums_ptrs = partial_sums_ptr + 2 * states
            maxima = tl.load(sums_ptrs, mask=splits < num_written, other=float("-inf"))
            sums = tl.load(sums_ptrs + 1, mask=splits < num_written, other=0.0)
            partial_acc = tl.load(
                partial_acc_ptr + states[:, None] * HEAD_DIM + offs_d[None, :],
                mask=(maxima > float("-inf"))[:, None] & dim_mask[None, :],
                other=0.0,
            )  # [splits, HEAD_DIM_PADDED]
            new_max = tl.maximum(row_max, tl.max(maxima, axis=0))
            shift = finite_shift(new_max)
            alpha = tl.exp2((row_max - shift) * LOG2_E)
            weights = tl.exp2((maxima - shift) * LOG2_E)
            acc = acc * alpha[:, None] + tl.sum(weights[:, None] * partial_acc, axis=0)[None, :]
            row_sum = row_sum * alpha + tl.sum(weights * sums, axis=0)
            row_max = new_max
        begin, end = end, num_written

    if sinks_ptr is not None:
        acc, row_max, row_sum = add_sinks(acc, row_max, row_sum, tl.load(sinks_ptr + head))
    out, lse = normalise(acc, row_max, row_sum)
    out_ptrs = out_ptr + token * stride_out_token + head * stride_out_head + offs_d[None, :]
    tl.store(out_ptrs, cast(out, out_ptr.dtype.element_ty), mask=dim_mask[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + row + tl.arange(0, 1), lse)


@dataclass(frozen=True)
class SplitStates:
    """Partial softmax states of query rows."""

    acc: torch.Tensor
    """(num_tokens, num_q_heads, num_splits, head_dim) fp32. In prefill rows have different numbers
    of states; `states_of_sequence` divides this memory among them."""
    sums: torch.Tensor
    """(num_tokens, num_q_heads, num_splits, 2) fp32: m (in natural-log units) and l."""
    counts: torch.Tensor
    """(num_tokens, num_q_heads) int32: number of states of each row."""

    @classmethod
    def empty(cls, q: torch.Tensor, num_splits: int, num_rows: int | None = None) -> SplitStates:
        """Allocate num_splits states for each row and head of q, (num_tokens, num_q_heads,
        head_dim), or for num_rows rows if states are packed."""
        num_tokens, num_q_heads, head_dim = q.shape
        states = (num_tokens if num_rows is None else num_rows, num_q_heads, num_splits)
        acc, sums = (q.new_empty(*states, n, dtype=torch.float32) for n in (head_dim, 2))
        return cls(acc, sums, q.new_empty(q.shape[:2], dtype=torch.int32))

    def merge_into(
        self, out: torch.Tensor, lse: torch.Tensor | None,
        *,
        sinks: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
        num_splits: int = 0, chunks: Chunking | None = None, seq_states: int = 0,
    ) -> None:  # fmt: skip
        """Write the attention over all keys to out, (num_tokens, num_q_heads, head_dim), and the
        natural-log LSE to lse, (num_tokens, num_q_heads) fp32.

        sinks: (num_q_heads,) logits that join the denominator. cu_seqlens: (batch + 1,) int32 if
        the states have prefill's packed layout; num_splits, chunks and seq_states are then as in
        `states_of_sequence`. No output is written for tokens at or after cu_seqlens[-1].
        """
        num_tokens, num_q_heads, head_dim = out.shape
        head_dim_padded = padded_dim(head_dim)
        tile = merge_tile(head_dim_padded)
        chunks = chunks or Chunking(0, 0)
        launch(_merge_splits_kernel, (num_tokens * num_q_heads,),
            out, lse, self.acc, self.sums, self.counts, sinks, cu_seqlens,
            0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
            num_splits or self.sums.shape[2], chunks.max_chunks, chunks.queries, seq_states,
            *out.stride()[:2],
            NUM_Q_HEADS=num_q_heads, HEAD_DIM=head_dim, HEAD_DIM_PADDED=head_dim_padded,
            TILE_SPLITS=tile.rows, SEARCH_WIDTH=_SEARCH_WIDTH,
            num_warps=tile.num_warps, **pdl_options(out.device),
        )  # fmt: skip


def results_of(
    q: torch.Tensor, out: torch.Tensor | None, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return an attention op's output (`out` or a new tensor) and LSE buffer (None if unwanted)."""
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
