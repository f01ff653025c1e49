"""Requests served by an engine at their arrival times.

Open loop: a request arrives at its time, however busy the engine is, and queues if the load is too
high.  A request that arrives during a step counts from that time.  Closed loop: a request arrives
some time after another one is finished.

Time is real, or modelled by a clock that gives the duration of each step; then no time is spent.
The scheduler, the manager and the policy of the engine decide in both cases.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from cache.checks import at_least, finite
from cache.managers.base import CacheManager
from cache.serving.engine import Engine, HostTokens
from cache.serving.request import RequestStats, ScheduledSequence
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import Scheduler, Step

if TYPE_CHECKING:
    import numpy as np


class Clock(Protocol):
    """Duration and limits of the steps of a modelled engine."""

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that run at once."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens computed in one step; a longer prompt takes several steps."""

    def duration(self, step: Step) -> float:
        """Seconds that ``step`` takes; its tokens count as computed already."""


@dataclass(frozen=True, kw_only=True)
class ServiceModel:
    """A clock that is linear in the tokens of a step.

    A step lasts ``step_seconds + prefill tokens / prefill_tokens_per_second + decoding sequences *
    decode_seconds_per_sequence``.  The defaults are round numbers of the order of an 8-billion
    model on a data-centre GPU; they are a model, not a measurement.
    """

    step_seconds: float = 0.01
    """Fixed cost of a step (reading the weights)."""
    prefill_tokens_per_second: float = 20_000.0
    """``math.inf`` if prompts cost nothing."""
    decode_seconds_per_sequence: float = 1e-4
    max_num_seqs: int = 256
    """Most sequences that run at once."""
    max_num_batched_tokens: int = 8192
    """Most tokens computed in one step; a longer prompt takes several steps."""

    def __post_init__(self) -> None:
        finite("step_seconds", self.step_seconds, positive=True)
        finite("decode_seconds_per_sequence", self.decode_seconds_per_sequence)
        if self.prefill_tokens_per_second != math.inf:
            finite("prefill_tokens_per_second", self.prefill_tokens_per_second, positive=True)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            at_least(1, name, getattr(self, name))

    def duration(self, step: Step) -> float:
        """Seconds that ``step`` takes.

        A sequence decodes if it computes one token after its prompt.
        """
        decoding = sum(
            count == 1 and seq.num_computed_tokens > seq.num_prompt_tokens
            for seq, count in zip(step.sequences, step.counts, strict=True)
        )
        return (
            self.step_seconds
            + (step.num_tokens - decoding) / self.prefill_tokens_per_second
            + decoding * self.decode_seconds_per_sequence
        )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The state of the engine in a step."""

    at_s: float
    """End of the step, from the start of the run."""
    seconds: float
    """Duration."""
    running: int
    """Requests that held blocks during the step: the batch."""
    waiting: int
    """Requests that had arrived and held none."""
    used_blocks: int
    """Blocks that no other request could take."""


@dataclass
class Run:
    """A finished run."""

    requests: list[RequestStats] = field(default_factory=list)
    """In order of arrival.  Times are from the start of the run."""
    steps: list[StepRecord] = field(default_factory=list)
    seconds: float = 0.0
    generated_tokens: int = 0

    @property
    def cached_prompt_fraction(self) -> float:
        """Share of the prompt tokens that were cached; 0 without any."""
        total = sum(request.num_prompt_tokens for request in self.requests)
        return sum(request.num_cached_tokens for request in self.requests) / total if total else 0.0

    @property
    def busy_seconds(self) -> float:
        """Time spent in steps; the rest was waiting for requests."""
        return sum(step.seconds for step in self.steps)

    def mean_of_steps(self, name: str) -> float:
        """Mean of a field of ``StepRecord`` over the steps until the last request arrived."""
        last = self.requests[-1].arrival_time
        steps = [step for step in self.steps if step.at_s <= last] or self.steps
        return sum(getattr(step, name) for step in steps) / len(steps)


class NoModel:
    """Runner and sampler of an engine without a model.

    It computes nothing.  All tokens of a request have one id, from the end of the id range.  In a
    beam search every candidate, the likeliest first, gets a uniform share of the probability left,
    so the beams that survive are random.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)

    def run(self, step: Step, manager: CacheManager) -> None:
        """Does nothing."""

    def draw(self, logits: None, rows: list[int], sequences: list[ScheduledSequence]) -> HostTokens:
        return HostTokens(_LAST_TOKEN_ID - seq.request.request_id for seq in sequences)

    def topk_logprobs(
        self, logits: None, row: int, seq: ScheduledSequence, count: int
    ) -> list[tuple[float, int]]:
        rest, shares = 1.0, []
        for _ in range(count):
            share = rest * (1 - self._random.random())
            shares.append(share)
            rest -= share
        shares.sort(reverse=True)
        return [(math.log(max(share, 1e-300)), index) for index, share in enumerate(shares)]

    def logprobs(self, logits: None, row: int, token: int, count: int) -> dict[int, float]:
        return {token: 0.0}


_LAST_TOKEN_ID = (1 << 32) - 1


def engine_without_model(
    manager: CacheManager,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    **options: Any,
) -> Engine:
    """An engine that schedules requests on ``manager``, and whose steps compute nothing.

    ``options`` go to ``Scheduler``.  If the design of ``manager`` cannot chunk a prompt, a step may
    have as many tokens as the longest sequence.
    """
    if not manager.can_chunk:
        max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
    scheduler = Scheduler(
        manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **options
    )
    model = NoModel()
    return Engine(scheduler, model, model, max_model_len=max_model_len)


def serve(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output_lengths: Sequence[int],
    arrivals_s: Sequence[float],
    *,
    previous: Sequence[int | None] | None = None,
    hints: Sequence[Sequence[float]] | None = None,
    service: Clock | None = None,
    sampling: Mapping[str, Any] = MappingProxyType({}),
) -> Run:
    """Serve requests of exactly these lengths, decoded greedily; the engine is idle afterwards.

    prompts: read one by one, when they arrive.
    arrivals_s: in seconds from now, or from the end of the previous request if there is one.
    previous: for each request the earlier one that is finished before it arrives, or None.
    hints: ``Sequence.hints`` of each request.
    service: gives the duration of each step.  None: real time.
    sampling: further ``SamplingParams`` of every request, as ``{"n": 4}``.

    Raises ValueError for a previous request that is not an earlier one, and for arrivals and
    durations of steps that are not finite.
    """
    arrivals = _Arrivals(arrivals_s, previous or [None] * len(prompts))
    hints = hints or [()] * len(prompts)
    observer, before = _Observer(engine, service), (engine.clock, engine.on_step)
    clock = engine.clock = engine.manager.clock = observer.clock
    engine.on_step = observer.on_step
    run, numbers = Run(), {}
    try:
        while engine.has_unfinished or arrivals:
            while arrivals and arrivals.first_s <= clock():
                due, number = arrivals.pop()
                fixed = {"max_tokens": int(output_lengths[number]), "ignore_eos": True}
                params = SamplingParams(**{"temperature": 0, **sampling, **fixed})
                request = engine.requests[engine.add(prompts[number], params)]
                for seq in request.sequences:
                    seq.hints = tuple(hints[number])
                request.stats.arrival_time = due
                numbers[request.request_id] = number
                run.requests.append(request.stats)
            if not engine.has_unfinished:
                observer.sleep(max(0.0, arrivals.first_s - clock()))
                continue
            begin = clock()
            tokens, finished = engine.step()
            now = clock()
            for request in finished:
                arrivals.finished(numbers[request.request_id], now)
            run.generated_tokens += len(tokens)
            run.steps.append(StepRecord(now, now - begin, *observer.state))
        run.seconds = clock()
    finally:
        engine.clock, engine.on_step = before
        engine.manager.clock = engine.clock
    return run


class _Arrivals:
    """Requests that have not arrived, by time."""

    def __init__(self, times_s: Sequence[float], previous: Sequence[int | None]) -> None:
        if not all(map(math.isfinite, times_s)):
            raise ValueError("arrivals_s: needs finite numbers")
        self._times_s = times_s
        self._followers: dict[int, list[int]] = defaultdict(list)
        self._due: list[tuple[float, int]] = []
        for request, before in enumerate(previous):
            if before is None:
                self._due.append((times_s[request], request))
            elif 0 <= before < request:
                self._followers[before].append(request)
            else:
                raise ValueError(f"previous[{request}]={before}: needs None or an earlier request")
        heapq.heapify(self._due)

    def __len__(self) -> int:
        return len(self._due)

    @property
    def first_s(self) -> float:
        return self._due[0][0]

    def pop(self) -> tuple[float, int]:
        return heapq.heappop(self._due)

    def finished(self, request: int, now_s: float) -> None:
        """The requests that follow ``request`` have a time from now on."""
        for follower in self._followers[request]:
            heapq.heappush(self._due, (now_s + self._times_s[follower], follower))


class _Observer:
    """Keeps the time of a run, which begins at 0, and the state of the engine in each step."""

    def __init__(self, engine: Engine, service: Clock | None) -> None:
        self._engine, self._service, self._then = engine, service, engine.on_step
        self._now, real, begin = 0.0, engine.clock, engine.clock()
        self.clock = (lambda: real() - begin) if service is None else (lambda: self._now)
        self.state = 0, 0, 0

    def sleep(self, seconds: float) -> None:
        if self._service is None:
            time.sleep(seconds)
        else:
            self._now += seconds

    def on_step(self, step: Step, seconds: float) -> None:
        scheduler, manager = self._engine.scheduler, self._engine.manager
        used_blocks = manager.num_blocks - manager.num_free_blocks
        self.state = len(scheduler.running), len(scheduler.waiting), used_blocks
        if self._service is not None:
            seconds = finite("service.duration(step)", self._service.duration(step))
            self._now += seconds
        if self._then is not None:
            self._then(step, seconds)


def poisson_arrivals(rate: float, count: int, rng: np.random.Generator) -> list[float]:
    """``count`` arrival times of a Poisson process, in seconds, starting at 0.

    ``rate``: requests per second.  The same ``rng`` at twice the rate gives half the times.
    """
    finite("rate", rate, positive=True)
    gaps = rng.standard_exponential(at_least(0, "count", count)) / rate
    return (gaps.cumsum() - gaps[:1]).tolist()
