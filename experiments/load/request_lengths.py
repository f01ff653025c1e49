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
    """Requests left out as faults of the file."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(map(sum, zip(self.prompts, self.outputs, strict=True)))


def sample(source: Source, num_requests: int) -> RequestLengths:
    """``num_requests`` requests at equal distances over the whole trace (all, if it has fewer).

    Raises Unavailable if all were left out.
    """
    trace = workloads.load(source)
    possible = np.flatnonzero(trace.output_lengths <= MAX_OUTPUT_TOKENS)
    if not len(possible):
        raise Unavailable(f"{trace.name} has no output of at most {MAX_OUTPUT_TOKENS} tokens")
    count = min(num_requests, len(possible))
    chosen = possible[np.arange(count) * len(possible) // count]
    return RequestLengths(
        trace=trace.name,
        arrivals_ms=trace.timestamps_ms[chosen].tolist(),
        prompts=np.maximum(trace.input_lengths[chosen], 1).tolist(),
        outputs=np.maximum(trace.output_lengths[chosen], 1).tolist(),
        num_left_out=len(trace) - len(possible),
    )
