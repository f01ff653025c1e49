"""Request traces of experiments: files or synthetic workloads.

The default is the traces of this repository, see experiments/traces/README.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cache
from cache.traces.workloads.draws import generator, log_normal_tokens
from experiments.harness import Axis, InputFile, Options, Repeated


@dataclass(frozen=True)
class TraceFile:
    """A trace in a file, or the beginning of one."""

    file: InputFile
    num_requests: int | None
    """Take the first requests only; None: all."""

    @property
    def name(self) -> str:
        return self.file.name


@dataclass(frozen=True)
class Workload:
    """A synthetic trace, see ``cache.make_workload``."""

    name: str
    seed: int
    num_requests: int | None
    """None: the workload's default."""


@dataclass(frozen=True)
class LogNormalLengths:
    """Synthetic requests a millisecond apart, whose prompt and output lengths are log-normal (sigma
    0.8).  A longer trace begins with a shorter one."""

    prompt: int
    """Median prompt tokens."""
    output: int
    """Median output tokens."""
    seed: int
    num_requests: int

    @property
    def name(self) -> str:
        return f"log_normal_{self.prompt}_{self.output}"

    def trace(self) -> cache.Trace:
        rng = generator(self.seed)
        lengths = (
            (index, *(log_normal_tokens(rng, median, 0.8) for median in (self.prompt, self.output)))
            for index in range(self.num_requests)
        )
        return cache.Trace.from_requests(((*request, ()) for request in lengths), name=self.name)


Source = TraceFile | Workload | LogNormalLengths

REAL_TRACES = tuple(sorted((Path(__file__).parents[1] / "traces").glob("*.jsonl.zst")))
"""The traces in the repository; all have block ids."""


@dataclass(frozen=True, kw_only=True)
class OnTraces(Options):
    """Options of an experiment on request traces.  In a cell, ``trace`` is a ``Source``."""

    trace: Repeated[Axis[Path]] = ()
    """A request trace (.jsonl, .csv, .gz, .zst) or a synthetic workload by its name. None:
    those in experiments/traces."""

    @property
    def group(self) -> tuple[str, ...]:
        return (self.trace.name,)

    def sources(
        self,
        num_requests: int | None = None,
        *,
        lengths_suffice: bool = False,
        default: Iterable[Source] | None = None,
    ) -> Iterator[Source]:
        """The named traces; else ``default`` (None: REAL_TRACES).

        num_requests: first requests of a file, and requests of a workload.  None: all, and the
            workload's default.

        Raises OSError if a file cannot be read, and ValueError if it has no block ids, unless
        ``lengths_suffice``.
        """
        for path in self.trace:
            if str(path) in cache.WORKLOADS:
                yield Workload(str(path), self.seed, num_requests)
                continue
            if not (cache.load_trace(path).has_blocks or lengths_suffice):
                raise ValueError(f"{path} has lengths only: a replay needs block ids")
            yield TraceFile(InputFile.of(path), num_requests)
        if not self.trace:
            real = (TraceFile(InputFile.of(path), num_requests) for path in REAL_TRACES)
            yield from real if default is None else default


@functools.lru_cache(maxsize=4)
def load(source: Source) -> cache.Trace:
    """The trace; the last four are cached."""
    if isinstance(source, TraceFile):
        trace = cache.load_trace(source.file.path)
        return trace if source.num_requests is None else trace.head(source.num_requests)
    if isinstance(source, LogNormalLengths):
        return source.trace()
    return cache.make_workload(source.name, seed=source.seed, num_requests=source.num_requests)
