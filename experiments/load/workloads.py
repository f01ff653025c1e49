"""Where the request traces of an experiment come from: files, or synthetic workloads."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cache
from experiments.harness import Absent, Axis, InputFile, Options, Repeated

_JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_CSV = (".csv", ".csv.gz", ".csv.zst")


@dataclass(frozen=True)
class Workload:
    """A synthetic trace, see ``cache.make_workload``."""

    name: str
    seed: int
    num_requests: int | None
    """None: the workload's default."""


Source = InputFile | Workload


@dataclass(frozen=True, kw_only=True)
class OnTraces(Options):
    """Options of an experiment on request traces.  In a cell, ``trace`` is a ``Source``."""

    trace: Repeated[Axis[Path]] = ()
    """A request trace (.jsonl, .csv, .gz, .zst). None: $TRACES_DIR's, else synthetic ones."""

    @property
    def group(self) -> tuple[str, ...]:
        return (self.trace.name,)

    def sources(
        self, num_requests: int | None = None, *, lengths_suffice: bool = False
    ) -> Iterator[Source | Absent]:
        """The named trace files; else those of $TRACES_DIR; else every synthetic workload, of
        ``num_requests`` (None: its own default).

        A file that was named must be readable and, unless ``lengths_suffice``, have block ids, or
        ValueError or OSError is raised; in $TRACES_DIR such a file is absent.
        """
        directory = os.environ.get("TRACES_DIR", "")
        if self.trace:
            for path in self.trace:
                if path.is_dir():
                    raise ValueError(f"{path} is a folder: name its files, or set TRACES_DIR to it")
                if not (cache.load_trace(path).has_blocks or lengths_suffice):
                    raise ValueError(f"{path} has lengths only: a replay needs block ids")
                yield InputFile.of(path)
        elif directory:
            if not Path(directory).is_dir():
                raise ValueError(f"TRACES_DIR={directory} is not a folder")
            paths = sorted(path for path in Path(directory).iterdir() if _is_trace(path))
            if not paths:
                raise ValueError(f"TRACES_DIR={directory} holds no {', '.join(_JSON_LINES)}")
            yield from (_found(path, lengths_suffice) for path in paths)
        else:
            yield from (Workload(name, self.seed, num_requests) for name in cache.WORKLOADS)


@functools.lru_cache(maxsize=1)
def load(source: Source) -> cache.Trace:
    """The trace, kept until the next one is asked for."""
    if isinstance(source, InputFile):
        return cache.load_trace(source.path)
    return cache.make_workload(source.name, seed=source.seed, num_requests=source.num_requests)


def _is_trace(path: Path) -> bool:
    return path.name.endswith(_JSON_LINES + _CSV) and not path.name.startswith(".")


def _found(path: Path, lengths_suffice: bool) -> InputFile | Absent:
    try:
        if cache.load_trace(path).has_blocks or lengths_suffice:
            return InputFile.of(path)
        return Absent(f"{path.name} has lengths only")
    except cache.TraceError as error:
        return Absent(f"{path.name}:{error.line}: {error.reason}")
    except OSError as error:
        return Absent(f"{path.name}: {error.strerror}")
