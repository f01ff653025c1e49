"""Replay a trace with its requests overlapping in time, through a real cache manager.

The serial replay (``cache.simulate``) compares policies to the last digit; this one shows what
overlap adds: running requests hold their blocks, decoding takes new ones, and when none are left
somebody is preempted.  The engine is modelled, the cache management is not: every block goes
through ``can_allocate``, ``allocate``, ``append`` and ``free`` of the manager.

The modelled engine works in steps.  A step first gives every running sequence the slot of its
latest token, then, unless that cost a preemption, admits waiting requests first come first served
while the manager says OK, the batch has room and the step's token budget is not exceeded (one
request is always let in).  An admitted prompt is computed within its step, except for its cached
prefix, and yields the first token at the step's end.  ``ServiceModel`` says how long a step takes.

When a slot is missing the sequence admitted last is preempted: it gives up its blocks and returns
to the head of the queue, to be computed again, generated tokens and all.  The sequence admitted
first is so never preempted while another one runs; it gains a token every step, which rules out a
livelock.  A request that does not fit the empty cache is dropped and counted.

A trace names blocks of a prompt, not tokens: each block id stands for ``trace.block_size`` tokens
of its own.  What a prompt has beyond its blocks, and everything generated, is shared with nobody,
since a trace does not tell which later prompt continues which answer.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.block_pool import OutOfBlocks
from cache.managers import AllocStatus, CacheManager, CacheStats
from cache.sequence import Sequence
from cache.trace import Trace

if TYPE_CHECKING:
    import numpy as np

_PRIVATE_TOKENS = 1 << 31
"""Token ids from here on belong to one request; those below to the blocks of the trace."""


@dataclass(frozen=True, kw_only=True)
class ServiceModel:
    """Time and limits of a step of the modelled engine.

    A step lasts ``step_seconds + prefill tokens / prefill_tokens_per_second + decoding sequences *
    decode_seconds_per_sequence``.  The defaults are round numbers of the order that an 8-billion
    model shows on a data-centre GPU; they are a model, not a measurement.
    """

    step_seconds: float = 0.01
    """Fixed cost of a step (reading the weights)."""
    prefill_tokens_per_second: float = 20_000.0
    decode_seconds_per_sequence: float = 1e-4
    max_num_seqs: int = 256
    """Sequences running at once, at most."""
    max_num_batched_tokens: int = 8192
    """Prompt tokens computed in one step, at most, unless a single prompt has more."""

    def __post_init__(self) -> None:
        for name in ("step_seconds", "prefill_tokens_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.decode_seconds_per_sequence < 0:
            raise ValueError(
                "decode_seconds_per_sequence must not be negative, "
                f"got {self.decode_seconds_per_sequence}"
            )
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def duration(self, prefill_tokens: int, decoding: int) -> float:
        """Seconds that a step takes."""
        return (
            self.step_seconds
            + prefill_tokens / self.prefill_tokens_per_second
            + decoding * self.decode_seconds_per_sequence
        )


@dataclass(frozen=True)
class ServingReplayResult:
    """What an overlapping replay measured.  Times are those of the model, in seconds."""

    num_requests: int
    finished: int
    dropped: int
    """Requests that do not fit the empty cache."""
    preemptions: int
    steps: int
    makespan_seconds: float
    """From the first arrival to the end of the last step."""
    ttft_seconds: np.ndarray
    """Arrival to first token of each finished request, in the trace's order."""
    normalized_latency_seconds: np.ndarray
    """Arrival to last token per generated token of each finished request."""
    mean_running: float
    """Sequences per step."""
    peak_running: int
    mean_used_fraction: float
    """Blocks of running sequences, as a share of the cache, averaged over time."""
    recomputed_tokens: int
    """Tokens computed again after preemptions."""
    stats: CacheStats
    """The manager's counters, resumed sequences counted as allocated anew."""


class _Request:
    """A request on its way."""

    __slots__ = ("arrival", "first_token_at", "index", "output_length", "remaining", "seq", "token")

    def __init__(self, index: int, arrival: float, seq: Sequence, output_length: int) -> None:
        self.index = index
        self.arrival = arrival
        self.seq = seq
        self.token = _PRIVATE_TOKENS + index
        self.output_length = output_length
        self.remaining = output_length
        self.first_token_at = 0.0


def simulate_serving(
    trace: Trace,
    *,
    manager: CacheManager,
    service: ServiceModel | None = None,
    time_scale: float = 1.0,
) -> ServingReplayResult:
    """Serve ``trace`` with ``manager``, which must be empty and is empty again afterwards.

    ``time_scale`` multiplies the gaps between arrivals (0.5: twice the request rate).  A request
    generates at least one token.  Works with lengths-only traces, which share nothing.

    Raises ValueError for a manager that is in use, a ``time_scale`` that is negative, or a trace
    with blocks of unknown size.
    """
    import numpy as np

    service = service or ServiceModel()
    if not time_scale >= 0:
        raise ValueError(f"time_scale must not be negative, got {time_scale}")
    if manager.num_free_blocks != manager.num_blocks:
        used = manager.num_blocks - manager.num_free_blocks
        raise ValueError(f"manager: {used} of its {manager.num_blocks} blocks are in use")
    arriving = _requests(trace, time_scale)
    upcoming = next(arriving, None)
    waiting: deque[_Request] = deque()
    running: list[_Request] = []
    now = upcoming.arrival if upcoming else 0.0
    ttft = np.full(trace.num_requests, np.nan)
    latency = np.full(trace.num_requests, np.nan)
    dropped = preemptions = steps = recomputed = peak = 0
    running_sum, used_time, start = 0, 0.0, now

    while upcoming or waiting or running:
        while upcoming and upcoming.arrival <= now:
            waiting.append(upcoming)
            upcoming = next(arriving, None)
        if not waiting and not running:
            now = upcoming.arrival
            continue

        # Decode: oldest first, so that the last admitted ones are preempted for them.
        preempted = False
        at = 0
        while at < len(running):
            request = running[at]
            request.seq.append_token(request.token)
            while True:
                try:
                    manager.append(request.seq)
                except OutOfBlocks:
                    victim = running.pop()
                    manager.free(victim.seq)
                    if victim is request and not at:
                        dropped += 1  # alone, and the cache is too small for it
                        break
                    waiting.appendleft(victim)
                    preemptions += 1
                    preempted = True
                    if victim is request:
                        break
                    victim.seq.append_token(victim.token)  # its turn had not come yet
                else:
                    at += 1
                    break
        decoding = len(running)

        prefill_tokens = 0
        while waiting and not preempted and len(running) < service.max_num_seqs:
            request = waiting[0]
            status = manager.can_allocate(request.seq)
            if status is AllocStatus.NEVER or (status is AllocStatus.LATER and not running):
                waiting.popleft()
                dropped += 1
                continue
            if status is AllocStatus.LATER or (
                prefill_tokens
                and prefill_tokens + request.seq.num_tokens > service.max_num_batched_tokens
            ):
                break
            waiting.popleft()
            computed = request.seq.num_tokens - manager.allocate(request.seq)
            prefill_tokens += computed
            if request.remaining < request.output_length:
                recomputed += computed
            running.append(request)
        if not running:
            continue

        steps += 1
        seconds = service.duration(prefill_tokens, decoding)
        now += seconds
        running_sum += len(running)
        peak = max(peak, len(running))
        used_time += seconds * (1 - manager.num_free_blocks / manager.num_blocks)
        still_running = []
        for request in running:
            if request.remaining == request.output_length:
                ttft[request.index] = now - request.arrival
            request.remaining -= 1
            if request.remaining:
                still_running.append(request)
            else:
                latency[request.index] = (now - request.arrival) / request.output_length
                manager.free(request.seq)
        running = still_running

    done = ~np.isnan(latency)
    return ServingReplayResult(
        num_requests=trace.num_requests,
        finished=int(done.sum()),
        dropped=dropped,
        preemptions=preemptions,
        steps=steps,
        makespan_seconds=now - start,
        ttft_seconds=ttft[done],
        normalized_latency_seconds=latency[done],
        mean_running=running_sum / steps if steps else 0.0,
        peak_running=peak,
        mean_used_fraction=used_time / (now - start) if now > start else 0.0,
        recomputed_tokens=recomputed,
        stats=manager.stats,
    )


def _requests(trace: Trace, time_scale: float) -> Iterator[_Request]:
    """The requests of ``trace``, made one by one: their tokens are many."""
    for index in range(trace.num_requests):
        yield _Request(
            index,
            float(trace.timestamps_ms[index]) * time_scale / 1000,
            Sequence(index, prompt_token_ids(trace, index)),
            max(int(trace.output_lengths[index]), 1),
        )


def prompt_token_ids(trace: Trace, index: int) -> array:
    """Token ids of request ``index`` that agree with another's as far as their block ids do.

    ``(max(input_length, 1),)`` unsigned 32-bit integers.  Raises ValueError for blocks of unknown
    size and for more blocks than 31 bits of token ids can name.
    """
    import numpy as np

    length = max(int(trace.input_lengths[index]), 1)
    tokens = np.full(length, _PRIVATE_TOKENS + index, np.uint32)
    blocks = trace.block_ids[trace.offsets[index] : trace.offsets[index + 1]]
    if len(blocks):
        size = trace.block_size
        if size is None:
            raise ValueError(f"trace {trace.name!r} has blocks of unknown size; load it with one")
        if trace.num_unique_blocks * size > _PRIVATE_TOKENS:
            raise ValueError(
                f"trace {trace.name!r}: {trace.num_unique_blocks} blocks of {size} tokens need "
                "more than 2**31 token ids"
            )
        shared = (blocks.astype(np.int64)[:, None] * size + np.arange(size)).ravel()[:length]
        tokens[: len(shared)] = shared
    return array("I", tokens.tobytes())
