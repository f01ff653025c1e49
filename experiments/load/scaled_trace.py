"""Request traces made small enough for the model at hand.

Real requests have thousands of tokens.  A model on a laptop serves the same requests, with the same
shared blocks, with every length divided by one number: a block of 512 tokens becomes one of 8.
Ratios stay the same: the cached share of a prompt, the number of requests that fit in the cache.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from cache import Trace
from cache.replay.overlapping import num_digits
from experiments.harness import Unavailable
from experiments.load.request_lengths import MAX_OUTPUT_TOKENS


@dataclass(frozen=True)
class ScaledTrace:
    """Requests to serve."""

    trace: Trace
    """The trace with scaled lengths and tokens per block."""
    divisor: float
    """Tokens of the original trace per served token."""
    num_left_out: int
    """Requests of the original that are not served."""


def shrink(trace: Trace, *, mean_tokens: float, max_tokens: int, vocab_size: int) -> ScaledTrace:
    """Divide all lengths by one number, so that a request has about ``mean_tokens`` tokens.

    The mean counts prompt and output together; lengths are rounded up.  A block keeps a whole
    number of tokens, at least as many as make its content unique (two, of a vocabulary of 512), so
    the mean is met approximately.  Blocks are joined to larger ones where that needs it.

    Requests whose output is so long that it must be a fault of the file are left out before, and
    requests of more than ``max_tokens`` scaled tokens afterwards.  Raises Unavailable if none
    remains or the block size is unknown.
    """
    whole = len(trace)
    trace = _select(trace, trace.output_lengths <= MAX_OUTPUT_TOKENS)
    total = float(np.mean(trace.input_lengths + trace.output_lengths))
    divisor = max(1.0, total / mean_tokens)
    block_size = None
    if trace.has_blocks:
        _require_block_size(trace)
        least = num_digits(trace.num_unique_blocks, vocab_size // 2)
        block_size = max(least, round(trace.block_size / divisor))
        trace = trace.coarsened(max(1, round(block_size * divisor / trace.block_size)))
        divisor = trace.block_size / block_size
    scaled = dataclasses.replace(
        trace,
        block_size=block_size,
        input_lengths=_divided(trace.input_lengths, divisor),
        output_lengths=_divided(trace.output_lengths, divisor),
    )
    served = _select(scaled, scaled.input_lengths + scaled.output_lengths <= max_tokens)
    return ScaledTrace(served, divisor, whole - len(served))


def shrink_blocks(
    trace: Trace, *, slice_tokens: int, max_output_tokens: int, vocab_size: int
) -> ScaledTrace:
    """Scale blocks so that all prompts together stay within ``slice_tokens``.

    A block gets at least as many tokens as make its content unique and at most its own number; if
    the prompts are still too long together, the last requests are left out.  A prompt is its full
    blocks and one token of its own: the last token of a prompt is always computed, so it cannot be
    a hit.  Outputs are divided by the same number, rounded up, and cut to ``max_output_tokens``.
    Requests without a block are left out.

    Raises Unavailable if the block size is unknown or no request remains.
    """
    whole = len(trace)
    _require_block_size(trace)
    least = num_digits(trace.num_unique_blocks, vocab_size // 2)
    counts = np.diff(trace.offsets)
    trace = _select(trace, (counts > 0) & (least * counts.cumsum() <= slice_tokens))
    counts = np.diff(trace.offsets)
    block_size = max(least, min(trace.block_size, slice_tokens // int(counts.sum())))
    divisor = trace.block_size / block_size
    scaled = dataclasses.replace(
        trace,
        block_size=block_size,
        input_lengths=counts * block_size + 1,
        output_lengths=_divided(trace.output_lengths, divisor).clip(max=max_output_tokens),
    )
    return ScaledTrace(scaled, divisor, whole - len(trace))


def _divided(lengths: np.ndarray, divisor: float) -> np.ndarray:
    return np.maximum(np.ceil(lengths / divisor), 1).astype(np.int64)


def _select(trace: Trace, keep: np.ndarray) -> Trace:
    """The requests of ``trace`` where ``keep`` is True.  Raises Unavailable if there are none."""
    if not keep.any():
        raise Unavailable(f"{trace.name} has no request that can be served at this scale")
    if keep.all():
        return trace
    return Trace.from_requests(
        (
            (*request[:3], request.block_ids.tolist())
            for request, kept in zip(trace, keep, strict=True)
            if kept
        ),
        name=trace.name,
        block_size=trace.block_size,
    )


def _require_block_size(trace: Trace) -> None:
    if trace.block_size is None:
        raise Unavailable(f"{trace.name}: the tokens per block are unknown")
