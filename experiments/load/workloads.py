"""Request traces of experiments: files or synthetic workloads.

The default traces are those of this repository, see experiments/traces/README.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

import cache
from cache.traces.files import split_suffixes
from experiments import TRACES
from experiments.harness import Axis, Count, InputFile, Options, Repeated, arg


@dataclass(frozen=True)
class TraceFile:
    """A trace in a file, or the beginning of one."""

    file: InputFile
    num_requests: int | None
    """Number of requests.  None means all."""
    first: int = 0
    """Index of the first request."""
    columns: str | None = None
    """The columns of a CSV file, see ``cache.load_trace``."""

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
"""Requests with longer outputs are left out, because they are errors in the file. In copies of
Azure's 2023 traces the number of requests is appended to the last row's output length."""


def draw_lengths(rng: np.random.Generator, count: int, like: str) -> tuple[list[int], ...]:
    """Numbers of prompt and of output tokens of ``count`` requests: log-normal, between 1 and
    LONGEST, with the mean of the data set."""
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
    trace_columns: Annotated[str | None, arg(aliases=("--columns",))] = None
    """Columns of .csv traces, such as time=ts,input_length=prompt,hash_ids=blocks. None: those of
    Azure, without blocks. See docs/traces.md."""

    @property
    def setup_key(self) -> tuple[str, ...]:
        return (self.trace.name,)

    def sources(
        self,
        num_requests: int | None = None,
        *,
        lengths_suffice: bool = False,
    ) -> Iterator[Source]:
        """Yield the traces that the option names, or REAL_TRACES if it names no trace.

        num_requests: number of requests from the start of a file, or of a workload. None: the whole
        file, or the workload's default.

        Raises OSError if a file cannot be read, and ValueError if it has no block ids, unless
        ``lengths_suffice``.
        """
        names = [split_suffixes(path)[0] for path in self.trace]
        if len(set(names)) < len(names):
            raise ValueError(f"--trace: needs traces of different names, got {', '.join(names)}")
        tables = [path for path in self.trace if split_suffixes(path)[1] == ".csv"]
        if self.trace_columns is not None and not tables:
            got = ", ".join(map(str, self.trace)) or "no --trace"
            raise ValueError(f"--columns: needs --trace FILE.csv, got {got}")
        for path in self.trace:
            columns = self.trace_columns if path in tables else None
            if str(path) in cache.WORKLOADS:
                yield Workload(str(path), self.seed, num_requests)
                continue
            if not (_whole(path, columns).has_blocks or lengths_suffice):
                raise ValueError(f"{path} has lengths only: a replay needs block ids (hash_ids)")
            yield TraceFile(InputFile.of(path), num_requests, columns=columns)
        if not self.trace:
            yield from (TraceFile(InputFile.of(path), num_requests) for path in REAL_TRACES)


@dataclass(frozen=True, kw_only=True)
class OnSlices(OnTraces):
    """Options of an experiment that needs several slices of each trace.

    Slices of a file are sections that do not overlap and start at equal distances.  Each slice of a
    synthetic workload has its own seed.
    """

    slices: Count = 5
    """Number of slices of each trace, or of seeds of a synthetic workload."""
    num_requests: Count
    """Number of requests per slice.  It is reduced if the slices of a file would overlap."""

    @property
    def setup_key(self) -> tuple[str, ...]:
        return self.trace.name, str(self.trace.slice)

    def sliced_sources(self) -> Iterator[Source]:
        """Yield the slices of the traces.  Raises the same errors as ``sources``."""
        for source in self.sources(self.num_requests):
            for number in range(self.slices):
                if isinstance(source, Workload):
                    yield dataclasses.replace(source, seed=source.seed + number)
                    continue
                apart = len(_whole(source.file.path, source.columns)) // self.slices
                if not apart:
                    raise ValueError(f"--slices {self.slices}: {source.name} has fewer requests")
                count = min(self.num_requests, apart)
                yield dataclasses.replace(source, first=number * apart, num_requests=count)


@functools.lru_cache(maxsize=4)
def load(source: Source) -> cache.Trace:
    """Load the trace.  The four traces used last are cached."""
    if isinstance(source, TraceFile):
        first, count = source.first, source.num_requests
        trace = _whole(source.file.path, source.columns)
        return trace[first : None if count is None else first + count]
    return cache.make_workload(source.name, seed=source.seed, num_requests=source.num_requests)


@functools.lru_cache(maxsize=4)
def _whole(path: Path, columns: str | None) -> cache.Trace:
    return cache.load_trace(path, columns=columns)
