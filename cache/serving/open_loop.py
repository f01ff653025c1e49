"""Requests served by an engine, as their clients send them.

Open loop: a request arrives when its time has come, however busy the engine is, so a load beyond
what the engine can serve builds up a queue.  A request counts as arrived at the time it was due,
also if a step was being computed then.

Time is real, or modelled: then a step lasts as long as a service model says, and time passes at
once.  What the scheduler, the manager and the policy decide is the engine's own either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cache.checks import at_least
from cache.managers.base import CacheManager
from cache.serving.engine import Engine
from cache.serving.request import RequestStats, ScheduledSequence
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import Scheduler, Step

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class ServiceModel:
    """Time and limits of a step of a modelled engine.

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
    """Tokens computed in one step, at most: a longer prompt takes several steps."""

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
            at_least(1, name, getattr(self, name))

    def duration(self, step: Step) -> float:
        """Seconds that a step of the scheduler takes: a sequence decodes that computes one token
        behind its prompt."""
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
    """End of the step, since the begin of the run."""
    seconds: float
    """How long it took."""
    running: int
    """Requests that held blocks during the step: the batch."""
    waiting: int
    """Requests that had arrived and held none."""
    used_blocks: int
    """Blocks that could not be given to others, by the manager's own account."""


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request.  Times are in seconds since the begin of the run."""

    arrived_s: float
    prompt_length: int
    output_length: int
    """Tokens that it is to generate."""
    stopped_s: float
    """When it was finished, or given up because the run was over."""
    finished: bool
    first_token_s: float | None
    was_scheduled: bool
    num_cached_tokens: int
    """Tokens of the prompt that were in the cache when it was first scheduled."""
    num_preemptions: int
    num_recomputed_tokens: int = 0
    """Tokens computed again after preemptions."""

    @property
    def normalized_latency(self) -> float:
        """Seconds from arrival to the end per output token, as the PagedAttention paper defines
        it.  Of a request that was given up: a lower bound."""
        return (self.stopped_s - self.arrived_s) / self.output_length

    @property
    def time_to_first_token(self) -> float:
        """Seconds from arrival.  Without a first token: a lower bound."""
        first = self.stopped_s if self.first_token_s is None else self.first_token_s
        return first - self.arrived_s

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first; None for one that was given up, or had one token."""
        if not self.finished or self.output_length < 2:
            return None
        return (self.stopped_s - self.first_token_s) / (self.output_length - 1)


@dataclass
class Run:
    """A run that is over."""

    requests: list[Served] = field(default_factory=list)
    """In order of arrival, those left out that had not arrived when the run was stopped."""
    steps: list[StepRecord] = field(default_factory=list)
    seconds: float = 0.0
    generated_tokens: int = 0

    @property
    def saturated(self) -> bool:
        """Whether the run was stopped with requests unfinished: the load is more than it serves."""
        return not all(request.finished for request in self.requests)

    @property
    def arriving_steps(self) -> list[StepRecord]:
        """Steps until the last request arrived: what follows only drains the queue."""
        last = self.requests[-1].arrived_s
        return [step for step in self.steps if step.at_s <= last] or self.steps

    @property
    def cached_prompt_fraction(self) -> float:
        """Share of the prompt tokens of the scheduled requests that were in the cache; 0 without
        any."""
        scheduled = [request for request in self.requests if request.was_scheduled]
        total = sum(request.prompt_length for request in scheduled)
        return sum(request.num_cached_tokens for request in scheduled) / total if total else 0.0

    @property
    def busy_seconds(self) -> float:
        """Time spent in steps; the rest was waiting for requests."""
        return sum(step.seconds for step in self.steps)

    def mean_of_steps(self, name: str) -> float:
        """Mean of a field of ``StepRecord`` over the steps while requests arrived."""
        steps = self.arriving_steps
        return sum(getattr(step, name) for step in steps) / len(steps)


class NoModel:
    """Runner and sampler of an engine without a model: it computes nothing, and gives all tokens of
    a request one id, from the end of their range."""

    def run(self, step: Step, manager: CacheManager) -> None:
        """Does nothing."""

    def draw(self, logits: None, rows: list[int], sequences: list[ScheduledSequence]) -> list[int]:
        return [_LAST_TOKEN_ID - seq.request.request_id for seq in sequences]


_LAST_TOKEN_ID = (1 << 32) - 1


def engine_without_model(
    manager: CacheManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> Engine:
    """An engine that schedules requests on ``manager``, and whose steps do nothing.

    Where the design of ``manager`` cannot compute a prompt in chunks, a step may have as many
    tokens as the longest sequence.
    """
    if not manager.can_chunk:
        max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
    scheduler = Scheduler(
        manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    model = NoModel()
    return Engine(scheduler, model, model, max_model_len=max_model_len)


def serve(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output_lengths: Sequence[int],
    arrivals_s: Sequence[float] | None,
    *,
    stop_s: float | None = None,
    service: ServiceModel | None = None,
) -> Run:
    """Serve requests of exactly these lengths, decoded greedily; the engine is idle afterwards.

    prompts: are looked at one by one, when they arrive.
    arrivals_s: ascending, in seconds from now; None: each request arrives when the one before it
        is finished.
    stop_s: give up at this time whatever is unfinished.
    service: how long a step lasts; None: as long as it takes.
    """
    clock, compute = engine.clock, engine.runner.run
    watch = _Watch(engine, service)
    engine.clock = engine.manager.clock = watch.clock
    engine.runner.run = watch.run
    try:
        return _serve(engine, watch, prompts, output_lengths, arrivals_s, stop_s)
    finally:
        engine.clock = engine.manager.clock = clock
        engine.runner.run = compute


class _Watch:
    """Looks at every step of an engine between scheduling and finishing, and keeps its time."""

    def __init__(self, engine: Engine, service: ServiceModel | None) -> None:
        self._engine, self._service, self._compute = engine, service, engine.runner.run
        self._now = 0.0
        self.clock: Callable[[], float] = engine.clock if service is None else lambda: self._now
        self.running = self.waiting = self.used_blocks = 0

    def sleep(self, seconds: float) -> None:
        if self._service is None:
            time.sleep(seconds)
        else:
            self._now += seconds

    def run(self, step: Step, manager: CacheManager) -> Any:
        """In the place of the runner's."""
        scheduler = self._engine.scheduler
        self.running, self.waiting = len(scheduler.running), len(scheduler.waiting)
        self.used_blocks = manager.num_blocks - manager.num_free_blocks
        logits = self._compute(step, manager)
        if self._service is not None:
            self._now += self._service.duration(step)
        return logits


def _serve(
    engine: Engine,
    watch: _Watch,
    prompts: Sequence[Sequence[int]],
    output_lengths: Sequence[int],
    arrivals_s: Sequence[float] | None,
    stop_s: float | None,
) -> Run:
    clock = watch.clock
    run = Run()
    arrived: list[tuple[int, int, RequestStats]] = []  # id, prompt length, statistics
    begin = clock()
    while stop_s is None or clock() - begin < stop_s:
        now = clock() - begin
        while len(arrived) < len(prompts):
            if arrivals_s is None:
                if engine.has_unfinished:
                    break
                due = now
            elif (due := arrivals_s[len(arrived)]) > now:
                break
            prompt = prompts[len(arrived)]
            params = SamplingParams(
                max_tokens=int(output_lengths[len(arrived)]), temperature=0, ignore_eos=True
            )
            request_id = engine.add(prompt, params)
            stats = engine.requests[request_id].stats
            stats.arrival_time = begin + due
            arrived.append((request_id, len(prompt), stats))
        if not engine.has_unfinished:
            if len(arrived) == len(prompts):
                break
            wake = arrivals_s[len(arrived)]
            watch.sleep(max(0.0, min(wake, stop_s or wake) - (clock() - begin)))
            continue
        step_begin = clock()
        tokens, _ = engine.step()
        step_end = clock()
        run.generated_tokens += len(tokens)
        run.steps.append(
            StepRecord(
                step_end - begin,
                step_end - step_begin,
                watch.running,
                watch.waiting,
                watch.used_blocks,
            )
        )
    run.seconds = clock() - begin
    given_up = engine.requests.copy()
    for request_id in given_up:
        engine.completions(engine.abort(request_id))
    for (request_id, prompt_length, stats), output_length in zip(
        arrived, output_lengths, strict=False
    ):
        done = request_id not in given_up
        first = stats.first_token_time
        run.requests.append(
            Served(
                arrived_s=stats.arrival_time - begin,
                prompt_length=prompt_length,
                output_length=int(output_length),
                stopped_s=stats.finish_time - begin if done else run.seconds,
                finished=done,
                first_token_s=None if first is None else first - begin,
                was_scheduled=stats.first_scheduled_time is not None,
                num_cached_tokens=stats.num_cached_tokens,
                num_preemptions=stats.num_preemptions,
                num_recomputed_tokens=stats.num_recomputed_tokens,
            )
        )
    return run


def poisson_arrivals(rate: float, count: int, rng: np.random.Generator) -> list[float]:
    """``count`` arrival times of a Poisson process, in seconds, from 0 on.

    ``rate``: requests per second.  The same ``rng`` at twice the rate gives half the times.
    """
    gaps = rng.standard_exponential(count) / rate
    return (gaps.cumsum() - gaps[0]).tolist()


def scaled_arrivals(timestamps_ms: Sequence[float], rate: float) -> list[float]:
    """A trace's own arrivals in seconds from 0 on, their gaps scaled to a mean of ``rate`` per
    second.  Of a trace whose requests all arrive at once, all arrive at once."""
    first, last = timestamps_ms[0], timestamps_ms[-1]
    scale = (len(timestamps_ms) - 1) / rate / (last - first) if last > first else 0.0
    return [(timestamp - first) * scale for timestamp in timestamps_ms]
