"""Prompt and output lengths of a sample of a trace's requests, for experiments on memory alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.harness import Unavailable
from experiments.load import workloads
from experiments.load.workloads import Source

MAX_OUTPUT_TOKENS = 100_000
"""Requests with longer outputs are left out as faults of the file: in copies of Azure's 2023 traces
the last row ends in the number of requests, glued to the output length."""


@dataclass(frozen=True)
class RequestLengths:
    """Requests in order of arrival."""

    trace: str
    arrivals_ms: list[float]
    prompts: list[int]
    """Prompt tokens, at least 1."""
    outputs: list[int]
    """Generated tokens, at least 1."""
    num_left_out: int
    """Requests left out: faults of the file, or above the given limit."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(map(sum, zip(self.prompts, self.outputs, strict=True)))


def sample(source: Source, num_requests: int, *, max_tokens: int | None = None) -> RequestLengths:
    """``num_requests`` requests at equal distances over the whole trace (all, if it has fewer).

    Requests of more than ``max_tokens`` prompt and output tokens are left out first.  Raises
    Unavailable if none remains.
    """
    trace = workloads.load(source)
    allowed = trace.output_lengths <= MAX_OUTPUT_TOKENS
    if max_tokens is not None:
        allowed &= trace.input_lengths + trace.output_lengths <= max_tokens
    possible = np.flatnonzero(allowed)
    if not len(possible):
        raise Unavailable(f"{trace.name} has no request of at most {max_tokens} tokens")
    count = min(num_requests, len(possible))
    chosen = possible[np.arange(count) * len(possible) // count]
    return RequestLengths(
        trace=trace.name,
        arrivals_ms=trace.timestamps_ms[chosen].tolist(),
        prompts=np.maximum(trace.input_lengths[chosen], 1).tolist(),
        outputs=np.maximum(trace.output_lengths[chosen], 1).tolist(),
        num_left_out=len(trace) - len(possible),
    )
