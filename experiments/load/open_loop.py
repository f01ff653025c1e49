"""Requests served by the engine, as their clients send them.

Open loop: a request arrives when its time has come, however busy the engine is, so a load beyond
what the engine can serve builds up a queue.  A request counts as arrived at the time it was due,
also if a step was being computed then.

Time is real, or modelled: then a step lasts as long as a service model says, and time passes at
once.  What the scheduler, the manager and the policy decide is the engine's own either way.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from cache import ServiceModel
    from models import LLM
    from models.engine import Engine
    from models.sequence import RequestStats


@dataclass(frozen=True, slots=True)
class Step:
    """The state of the engine when a step was over; the sequences that it finished still count."""

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
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    generated_tokens: int = 0

    @property
    def saturated(self) -> bool:
        """Whether the run was stopped with requests unfinished: the load is more than it serves."""
        return not all(request.finished for request in self.requests)

    @property
    def arriving_steps(self) -> list[Step]:
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
        """Mean of a field of ``Step`` over the steps while requests arrived."""
        steps = self.arriving_steps
        return sum(getattr(step, name) for step in steps) / len(steps)


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


def serve(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    output_lengths: Sequence[int],
    arrivals_s: Sequence[float] | None,
    *,
    stop_s: float | None = None,
    service: ServiceModel | None = None,
) -> Run:
    """Serve requests of exactly these lengths, decoded greedily; the engine is idle afterwards.

    arrivals_s: ascending, in seconds from now; None: each request arrives when the one before it
        is finished.
    stop_s: give up at this time whatever is unfinished.
    service: how long a step lasts; None: as long as it takes.
    """
    if service is None:
        return _serve(llm.engine, prompts, output_lengths, arrivals_s, stop_s, time.sleep)
    with _modelled_time(llm.engine, service) as sleep:
        return _serve(llm.engine, prompts, output_lengths, arrivals_s, stop_s, sleep)


@contextlib.contextmanager
def _modelled_time(engine: Engine, service: ServiceModel) -> Iterator[Callable[[float], None]]:
    """Have ``service`` say how long the steps of ``engine`` last; yields how to sleep then."""
    clock, runner, now = engine.clock, engine.runner, 0.0
    compute = runner.run

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def run(step, manager):
        logits = compute(step, manager)
        decoding = sum(
            end == start + 1 and start >= seq.num_prompt_tokens
            for seq, start, end in zip(step.sequences, step.starts, step.ends, strict=True)
        )
        sleep(service.duration(step.num_tokens - decoding, decoding))
        return logits

    engine.clock, runner.run = lambda: now, run
    try:
        yield sleep
    finally:
        engine.clock, runner.run = clock, compute


def _serve(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output_lengths: Sequence[int],
    arrivals_s: Sequence[float] | None,
    stop_s: float | None,
    sleep: Callable[[float], None],
) -> Run:
    from models import SamplingParams

    clock = engine.clock
    run = Run()
    stats: dict[int, RequestStats] = {}
    finished: set[int] = set()
    arrived = 0
    begin = clock()
    while True:
        now = clock() - begin
        if stop_s is not None and now >= stop_s:
            break
        while arrived < len(prompts):
            if arrivals_s is None:
                if engine.has_unfinished:
                    break
                due = now
            elif (due := arrivals_s[arrived]) > now:
                break
            params = SamplingParams(
                max_tokens=int(output_lengths[arrived]), temperature=0, ignore_eos=True
            )
            request_id = engine.add(prompts[arrived], params)
            stats[request_id] = engine.requests[request_id].stats
            stats[request_id].arrival_time = begin + due
            arrived += 1
        if not engine.has_unfinished:
            if arrived == len(prompts):
                break
            wake = arrivals_s[arrived] if stop_s is None else min(arrivals_s[arrived], stop_s)
            sleep(max(0.0, wake - (clock() - begin)))
            continue
        step_begin = clock()
        tokens, done = engine.step()
        step_end = clock()
        run.generated_tokens += len(tokens)
        finished.update(request.request_id for request in done)
        manager, scheduler = engine.manager, engine.scheduler
        run.steps.append(
            Step(
                step_end - begin,
                step_end - step_begin,
                len(scheduler.running) + len(done),
                len(scheduler.waiting),
                manager.num_blocks - manager.num_free_blocks,
            )
        )
    run.seconds = clock() - begin
    for request_id in list(engine.requests):
        engine.completions(engine.abort(request_id))
    for index, (request_id, of_request) in enumerate(stats.items()):
        done = request_id in finished
        first = of_request.first_token_time
        run.requests.append(
            Served(
                arrived_s=of_request.arrival_time - begin,
                prompt_length=len(prompts[index]),
                output_length=int(output_lengths[index]),
                stopped_s=of_request.finish_time - begin if done else run.seconds,
                finished=done,
                first_token_s=None if first is None else first - begin,
                was_scheduled=of_request.first_scheduled_time is not None,
                num_cached_tokens=of_request.num_cached_tokens,
                num_preemptions=of_request.num_preemptions,
            )
        )
    return run


def quantiles(name: str, seconds: Iterable[float | None]) -> dict[str, float | None]:
    """Mean, p50, p90 and p99 of the times that are known, as columns of a row; None without any."""
    import numpy as np

    known = [value for value in seconds if value is not None]
    columns = {
        "mean": np.mean,
        "p50": functools.partial(np.percentile, q=50),
        "p90": functools.partial(np.percentile, q=90),
        "p99": functools.partial(np.percentile, q=99),
    }
    return {
        f"{name}_{column}_s": float(measure(known)) if known else None
        for column, measure in columns.items()
    }
