"""Request traces made small enough for the model at hand.

Real requests have thousands of tokens.  A model that runs on a laptop serves the same requests,
with the same blocks in common, with every length divided by the same number: a block of 512 tokens
becomes one of 8, say.  What depends on ratios stays as it is: which share of a prompt is in the
cache, how many requests the cache holds.
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
    """With the lengths, and the tokens per block, that are served."""
    divisor: float
    """Tokens of the original trace for each token that is served."""
    num_left_out: int
    """Requests of the original that are not served."""


def shrink(trace: Trace, *, mean_tokens: float, max_tokens: int, vocab_size: int) -> ScaledTrace:
    """Divide all lengths by one number, so that a request has about ``mean_tokens`` tokens.

    Prompt and output together are counted; a length is rounded up.  A block keeps a whole number
    of tokens, enough of them to tell it from every other one (two, of a vocabulary of 512), which
    is why the mean is met only about; where that takes it, blocks are joined to larger ones.

    Requests of more than ``max_tokens`` tokens are left out afterwards, and before those whose
    output is so long that it must be a fault of the file.  Raises Unavailable if none remains or
    blocks are of unknown size.
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
    """Give each block as many tokens as keep all prompts together within ``slice_tokens``.

    At least as many as tell it from every other block, and no more than it has; where that makes
    the prompts too long together, the last requests are left out.  A prompt is its
    blocks, all of them full, and one token that is its own: the last token of a prompt is always
    computed, and so it is no part of what can be found in the cache.  Outputs are divided by the
    same number, rounded up, and cut to ``max_output_tokens``.  Requests without a block are left
    out.

    Raises Unavailable for blocks of unknown size, and if no request remains.
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
