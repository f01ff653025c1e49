"""Replay a trace through a real cache manager; requests overlap in time.

The serial replay (``cache.simulate``) compares policies to the last digit.  This replay adds the
effects of overlap: running requests hold their blocks, decoding allocates new blocks, and a request
is preempted when no block is left.  Scheduler, engine and manager also serve models.  Here a clock
(``ServiceModel``) replaces the model and gives the duration of each step.  The rules of
:mod:`cache.serving.scheduler` apply: first come, first served; prefill of long prompts in chunks
beside decoding sequences, if the manager's design allows it; when blocks run out, preemption of the
youngest request, which is computed again later.  A request that does not fit the empty cache is
dropped and counted.

A trace has block ids of prompts, not tokens; ``prompt_token_ids`` makes tokens from them.
Generated tokens are never shared, because a trace does not say which prompt continues which answer.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cache.checks import at_least, finite
from cache.managers import CacheManager, CacheStats
from cache.serving.open_loop import Clock, ServiceModel, engine_without_model, serve
from cache.serving.scheduler import longest_that_fits
from cache.traces.trace import Trace

if TYPE_CHECKING:
    import numpy as np


LOOP_COLUMNS = {"session", "agent", "think_time"}
"""Columns of the trace that a closed loop needs."""


@dataclass(frozen=True)
class ServingReplayResult:
    """Result of an overlapping replay.  Times are modelled, in seconds."""

    num_requests: int
    finished: int
    dropped: int
    """Number of requests that do not fit the empty cache."""
    preemptions: int
    makespan_seconds: float
    """Time from the first arrival to the end of the last step."""
    ttft_seconds: np.ndarray
    """Time from arrival to first token, for each finished request in order of arrival."""
    normalized_latency_seconds: np.ndarray
    """(Time from arrival to last token) / generated tokens, for each finished request."""
    mean_running: float
    """Mean number of running sequences per step."""
    mean_waiting: float
    """Mean number of waiting sequences per step."""
    recomputed_tokens: int
    """Number of tokens computed again after preemptions."""
    stats: CacheStats
    """The manager's counters."""


def simulate_serving(
    trace: Trace,
    *,
    manager: CacheManager,
    service: Clock | None = None,
    time_scale: float = 1.0,
    closed_loop: bool = False,
) -> ServingReplayResult:
    """Serve ``trace`` with ``manager``.  It must be empty, and is empty again afterwards.

    ``time_scale`` multiplies the gaps between arrivals (0.5: twice the request rate).  A request
    generates at least one token.  In a trace without block ids, prompts share nothing.

    ``closed_loop``: a request arrives ``think_time`` after the previous request of the same
    ``session`` and ``agent`` (columns of the trace) has finished.  First requests arrive at their
    times.

    Raises ValueError for a manager with blocks in use, a ``time_scale`` that is negative or not
    finite, a closed loop of a trace without these columns, or a trace with unknown block size.
    """
    import numpy as np

    service = service or ServiceModel()
    finite("time_scale", time_scale)
    if manager.num_free_blocks != manager.num_blocks:
        used = manager.num_blocks - manager.num_free_blocks
        raise ValueError(f"manager: {used} of its {manager.num_blocks} blocks are in use")
    outputs = np.maximum(trace.output_lengths, 1)
    # K and V of the last token are never stored.
    sizes = (np.maximum(trace.input_lengths, 1) + outputs - 1).tolist()
    manager.max_in_flight_tokens = service.max_num_batched_tokens  # as the engine's scheduler does
    longest = longest_that_fits(manager, max(sizes, default=0))
    served = [index for index, size in enumerate(sizes) if size <= longest]
    engine = engine_without_model(
        manager,
        max_num_seqs=service.max_num_seqs,
        max_num_batched_tokens=service.max_num_batched_tokens,
        max_model_len=longest + 1,
    )
    begin, end = trace.timestamps_ms[[0, -1]].tolist() if len(trace) else (0.0, 0.0)
    if not math.isfinite((end - begin) * time_scale):
        raise ValueError(f"time_scale={time_scale}: the last arrival is beyond float64")
    arrivals_s = (trace.timestamps_ms[served] - begin) * time_scale / 1000
    previous = None
    if closed_loop:
        previous = _previous(trace.take(served))
        pauses_s = np.nan_to_num(trace.columns["think_time"][served]) / 1000
        follows = [before is not None for before in previous]
        arrivals_s = np.where(follows, pauses_s, arrivals_s)
    run = serve(
        engine,
        _Prompts(trace, served),
        outputs[served].tolist(),
        arrivals_s.tolist(),
        previous=previous,
        hints=trace.take(served).request_facts[:, 4:].tolist(),
        service=service,
    )
    requests, num_steps = run.requests, max(len(run.steps), 1)
    return ServingReplayResult(
        num_requests=trace.num_requests,
        finished=len(requests),
        dropped=trace.num_requests - len(requests),
        preemptions=sum(request.num_preemptions for request in requests),
        makespan_seconds=run.seconds,
        ttft_seconds=np.array([request.time_to_first_token for request in requests]),
        normalized_latency_seconds=np.array([request.normalized_latency for request in requests]),
        mean_running=sum(step.running for step in run.steps) / num_steps,
        mean_waiting=sum(step.waiting for step in run.steps) / num_steps,
        recomputed_tokens=sum(request.num_recomputed_tokens for request in requests),
        stats=manager.stats,
    )


def most_hits(trace: Trace) -> int:
    """Upper bound of ``CacheStats.hit_blocks`` for any order of the requests.

    The bound is the number of full prompt blocks that repeat an earlier block of the trace.
    """
    import numpy as np

    if not trace.has_blocks:
        return 0
    counts = np.diff(trace.offsets)
    depths = np.arange(len(trace.block_ids)) - np.repeat(trace.offsets[:-1], counts)
    ids = trace.block_ids[depths < np.repeat(trace.input_lengths // trace.block_size, counts)]
    return len(ids) - len(np.unique(ids))


def _previous(trace: Trace) -> list[int | None]:
    """For each request: index of the previous request of the same agent and session, or None."""
    if lacking := LOOP_COLUMNS - trace.columns.keys():
        raise ValueError(f"closed_loop: trace {trace.name!r} lacks {', '.join(sorted(lacking))}")
    latest: dict[tuple[float, float], int] = {}
    previous = []
    agents = zip(trace.columns["session"], trace.columns["agent"], strict=True)
    for request, agent in enumerate(agents):
        previous.append(latest.get(agent))
        latest[agent] = request
    return previous


class _Prompts(Items):
    """Prompts of some requests of a trace.  A prompt is made when it is read, to save memory."""

    def __init__(self, trace: Trace, indexes: list[int]) -> None:
        self._trace, self._indexes = trace, indexes

    def __len__(self) -> int:
        return len(self._indexes)

    def __getitem__(self, i: Any) -> Any:
        return prompt_token_ids(self._trace, self._indexes[i])


def prompt_token_ids(trace: Trace, index: int, vocab_size: int = 1 << 32) -> array:
    """Token ids of request ``index``.  Requests share tokens as far as they share block ids.

    Tokens of blocks are in the lower half of the vocabulary: the digits of the block id, repeated.
    Tokens after the last block are in the upper half: the digits of ``index``, repeated.

    Returns ``(max(input_length, 1),)`` unsigned 32-bit integers.  Raises ValueError for an unknown
    block size and for a ``vocab_size`` that is not an int from 4 to 2**32.
    """
    import numpy as np

    length = max(int(trace.input_lengths[index]), 1)
    base = at_least(4, "vocab_size", vocab_size, 1 << 32) // 2
    blocks = np.asarray(trace[index].block_ids, np.int64)
    shared = np.empty(0, np.int64)
    if len(blocks):
        if trace.block_size is None:
            raise ValueError(f"trace {trace.name!r} has blocks of unknown size; load it with one")
        shared = _digits(blocks, trace.block_size, trace.num_unique_blocks, base)[:length]
    own = base + _digits(np.array([index]), length - len(shared), len(trace), base)
    return array("I", np.concatenate((shared, own)).astype(np.uint32).tobytes())


def num_digits(bound: int, base: int) -> int:
    """Number of digits in base ``base`` that distinguish ``bound`` numbers."""
    digits, distinguished = 1, base
    while distinguished < bound:
        digits, distinguished = digits + 1, distinguished * base
    return digits


def _digits(numbers: np.ndarray, count: int, bound: int, base: int) -> np.ndarray:
    """``count`` digits in base ``base`` of each of ``numbers`` (below ``bound``), lowest first.
    The digits repeat."""
    import numpy as np

    places = base ** (np.arange(count) % num_digits(bound, base))
    return (numbers[:, None] // places % base).ravel()
