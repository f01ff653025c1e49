"""Request traces of experiments: files or synthetic workloads.

The default is the traces of this repository, see experiments/traces/README.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import cache
from experiments import TRACES
from experiments.harness import Axis, Count, InputFile, Options, Repeated


@dataclass(frozen=True)
class TraceFile:
    """A trace in a file, or the beginning of one."""

    file: InputFile
    num_requests: int | None
    """Number of requests.  None means all."""
    first: int = 0
    """The first of them."""

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def slice(self) -> int:
        return self.first


@dataclass(frozen=True)
class Workload:
    """A synthetic trace, see ``cache.make_workload``."""

    name: str
    seed: int
    num_requests: int | None
    """None: the workload's default."""

    @property
    def slice(self) -> int:
        return self.seed


PAPER_LENGTHS = {
    "sharegpt": ((161.31, 1.25), (337.99, 0.95)),
    "alpaca": ((19.31, 0.6), (58.45, 1.0)),
    "translation": ((30.0, 0.5), (40.0, 0.5)),
}
"""Mean tokens and sigma of prompts and outputs.  The means of the first two are from the
PagedAttention paper (figure 11); the rest is assumed."""
LONGEST = 1024
"""Tokens of the longest prompt, and of the longest output."""
MAX_OUTPUT_TOKENS = 100_000
"""Requests with longer outputs are left out as faults of the file: in copies of Azure's 2023 traces
the last row ends in the number of requests, glued to the output length."""


def draw_lengths(rng: np.random.Generator, count: int, like: str) -> tuple[list[int], ...]:
    """Prompt and output tokens of ``count`` requests: log-normal, from 1 to LONGEST, and in the
    mean exactly the data set's."""
    drawn = []
    for mean, sigma in PAPER_LENGTHS[like]:
        tokens = np.exp(sigma * rng.standard_normal(count))
        for _ in range(50):  # clipping lowers the mean
            tokens *= mean / np.clip(tokens, 1, LONGEST).mean()
        drawn.append(np.clip(np.rint(tokens), 1, LONGEST).astype(int).tolist())
    return tuple(drawn)


Source = TraceFile | Workload

REAL_TRACES = tuple(sorted(TRACES.glob("*.jsonl.zst")))
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
    ) -> Iterator[Source]:
        """The named traces; else REAL_TRACES.

        num_requests: first requests of a file, and requests of a workload.  None: all, and the
            workload's default.

        Raises OSError if a file cannot be read, and ValueError if it has no block ids, unless
        ``lengths_suffice``.
        """
        for path in self.trace:
            if str(path) in cache.WORKLOADS:
                yield Workload(str(path), self.seed, num_requests)
                continue
            if not (_whole(path).has_blocks or lengths_suffice):
                raise ValueError(f"{path} has lengths only: a replay needs block ids")
            yield TraceFile(InputFile.of(path), num_requests)
        if not self.trace:
            yield from (TraceFile(InputFile.of(path), num_requests) for path in REAL_TRACES)


@dataclass(frozen=True, kw_only=True)
class OnSlices(OnTraces):
    """Options of an experiment on several slices of each trace, as one slice is no result.

    Slices of a file are runs of its requests that do not overlap, at equal distances.  A slice of a
    synthetic workload has a seed of its own.
    """

    slices: Count = 5
    """Slices of each trace, or seeds of a synthetic workload."""
    num_requests: Count
    """Requests of a slice; fewer where the slices of a file would overlap."""

    @property
    def group(self) -> tuple[str, ...]:
        return self.trace.name, str(self.trace.slice)

    def sliced_sources(self) -> Iterator[Source]:
        """The slices of the traces; raises as ``sources`` does."""
        for source in self.sources(self.num_requests):
            for number in range(self.slices):
                if isinstance(source, Workload):
                    yield dataclasses.replace(source, seed=source.seed + number)
                    continue
                apart = len(_whole(source.file.path)) // self.slices
                if not apart:
                    raise ValueError(f"--slices {self.slices}: {source.name} has fewer requests")
                count = min(self.num_requests, apart)
                yield dataclasses.replace(source, first=number * apart, num_requests=count)


@functools.lru_cache(maxsize=4)
def load(source: Source) -> cache.Trace:
    """The trace; the last four are cached."""
    if isinstance(source, TraceFile):
        trace, first, count = _whole(source.file.path), source.first, source.num_requests
        return trace[first : None if count is None else first + count]
    return cache.make_workload(source.name, seed=source.seed, num_requests=source.num_requests)


@functools.lru_cache(maxsize=1)
def _whole(path: Path) -> cache.Trace:
    return cache.load_trace(path)
