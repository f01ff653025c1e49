"""Request traces: what arrived when, how long it was and which blocks its prompt consists of.

A block id stands for ``block_size`` tokens *and* everything before them in the prompt: two requests
share an id if and only if their prompts agree up to the end of that block.  Real traces come from
``load_trace``, synthetic ones from ``cache.make_workload``.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import os
import reprlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cache.trace_files import TraceError, read_records, split_suffixes, write_lines

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Trace", "TraceError", "TraceRequest", "load_trace", "save_trace"]

_DTYPES = {
    "timestamps_ms": "float64",
    "input_lengths": "int64",
    "output_lengths": "int64",
    "block_ids": "int32",
    "offsets": "int64",
}


class TraceRequest(NamedTuple):
    """One request of a trace."""

    timestamp_ms: float
    input_length: int
    """Prompt tokens."""
    output_length: int
    """Generated tokens."""
    block_ids: Sequence[int]
    """Blocks of the prompt, in order; whether a partly filled last block counts is the trace's."""


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Requests in order of timestamp, ties in the order they were given.

    Made by ``load_trace``, ``make_workload`` or ``Trace.from_requests``; the constructor takes
    finished arrays and raises ValueError where they break what is said here.  Slices share the
    arrays, so treat them as read-only.  ``len(trace)``, ``trace[i]`` (a ``TraceRequest``),
    iteration and slices (``trace[100:200]``, a ``Trace`` of its own) work as on a list.
    """

    name: str
    block_size: int | None
    """Tokens per block; None if unknown."""
    timestamps_ms: np.ndarray
    """Arrival times, ``(num_requests,)`` float64, ascending."""
    input_lengths: np.ndarray
    """Prompt tokens, ``(num_requests,)`` int64."""
    output_lengths: np.ndarray
    """Generated tokens, ``(num_requests,)`` int64."""
    block_ids: np.ndarray
    """Blocks of all requests one after the other, ``(num_block_references,)`` int32.  Ids are
    dense: 0 to ``num_unique_blocks - 1`` by first appearance."""
    offsets: np.ndarray
    """Request ``i`` has ``block_ids[offsets[i]:offsets[i + 1]]``; ``(num_requests + 1,)`` int64."""

    def __post_init__(self):
        # Compiled replays index by these arrays unchecked.
        import numpy as np

        for field, dtype in _DTYPES.items():
            values = getattr(self, field)
            if not isinstance(values, np.ndarray) or values.dtype != dtype or values.ndim != 1:
                raise ValueError(f"{field} must be a one-dimensional {dtype} array, got {values!r}")
        for field in ("input_lengths", "output_lengths"):
            if len(getattr(self, field)) != len(self.timestamps_ms):
                raise ValueError(f"{field} must have one value per request")
            if (getattr(self, field) < 0).any():
                raise ValueError(f"{field} must be at least 0")
        if not (self.timestamps_ms[1:] >= self.timestamps_ms[:-1]).all():
            raise ValueError("timestamps_ms must ascend")
        bounds = np.append(self.offsets, len(self.block_ids))
        if len(bounds) != len(self) + 2 or bounds[0] != 0 or bounds[-1] != bounds[-2]:
            raise ValueError("offsets must have num_requests + 1 values, from 0 to len(block_ids)")
        if (bounds[1:] < bounds[:-1]).any():
            raise ValueError("offsets must ascend")
        newest = np.append(np.int32(-1), np.maximum.accumulate(self.block_ids))
        if (self.block_ids < 0).any() or (newest[1:] > newest[:-1] + 1).any():
            raise ValueError("block_ids must count up from 0 by first appearance")

    @classmethod
    def from_requests(
        cls, requests: Iterable[tuple], *, name: str, block_size: int | None = None
    ) -> Trace:
        """Build a trace from ``(timestamp_ms, input_length, output_length, block_ids)`` tuples.

        Requests may come in any order, block ids may be any integers, and ``block_size`` None is
        inferred as ``load_trace`` does.  Raises ValueError for a timestamp that is not a finite
        number, a length that is not an integer of at least 0, block ids that are not integers or
        repeat within a request, and a ``block_size`` below 1.
        """
        block_size = _checked_block_size(block_size)
        builder = _TraceBuilder()
        for index, request in enumerate(requests):
            try:
                builder.add(*request)
            except ValueError as error:
                raise ValueError(f"requests[{index}]: {error}") from None
        return builder.build(name, block_size)

    @property
    def num_requests(self) -> int:
        return len(self.timestamps_ms)

    @property
    def num_block_references(self) -> int:
        """Blocks of all requests, repetitions counted."""
        return len(self.block_ids)

    @cached_property
    def num_unique_blocks(self) -> int:
        """Different blocks of all requests: the capacity from which on nothing is evicted."""
        return int(self.block_ids.max()) + 1 if len(self.block_ids) else 0

    @property
    def has_blocks(self) -> bool:
        """False for a trace of lengths only, such as Azure's."""
        return len(self.block_ids) > 0

    @property
    def duration_ms(self) -> float:
        """From the first arrival to the last."""
        return float(self.timestamps_ms[-1] - self.timestamps_ms[0]) if len(self) else 0.0

    @cached_property
    def digest(self) -> str:
        """128-bit hash of the content as 32 hex digits; the name does not count."""
        digest = hashlib.blake2b(repr((self.block_size, len(self))).encode(), digest_size=16)
        for field in _DTYPES:
            values = getattr(self, field)
            digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
        return digest.hexdigest()

    @cached_property
    def infinite_cache_hit_rate(self) -> float:
        """Block hit rate of a cache that never evicts, the bound of every policy.

        As in the serial replay of ``cache.simulate``: the hits of a request are the longest
        leading run of blocks seen in earlier requests.  0 without blocks.
        """
        import numpy as np

        if not self.has_blocks:
            return 0.0
        # Ids are numbered by first appearance: a block is new if its id exceeds all before it.
        newest = np.maximum.accumulate(self.block_ids)
        is_new = np.append(True, newest[1:] > newest[:-1])
        new_positions = np.append(np.flatnonzero(is_new), len(self.block_ids))
        starts, ends = self.offsets[:-1], self.offsets[1:]
        first_new = new_positions[np.searchsorted(new_positions, starts)]
        hits = np.minimum(first_new, ends) - starts
        return int(hits.sum()) / len(self.block_ids)

    def head(self, num_requests: int) -> Trace:
        """The first ``num_requests`` requests (all, if there are fewer)."""
        if num_requests < 0:
            raise ValueError(f"num_requests must be at least 0, got {num_requests}")
        return self[:num_requests]

    def between(self, start_ms: float, end_ms: float) -> Trace:
        """The requests that arrive at ``start_ms`` or later and before ``end_ms``."""
        if not start_ms <= end_ms:
            raise ValueError(f"start_ms must not exceed end_ms, got {start_ms} and {end_ms}")
        first, last = self.timestamps_ms.searchsorted([start_ms, end_ms])
        return self[int(first) : int(last)]

    def coarsened(self, factor: int) -> Trace:
        """The same requests in blocks of ``factor * block_size`` tokens.

        A coarse block is ``factor`` blocks in a row from the start of the prompt; those left over
        at its end fill no coarse block and are dropped.
        """
        import numpy as np

        if factor < 1:
            raise ValueError(f"factor must be at least 1, got {factor}")
        counts = np.diff(self.offsets) // factor
        offsets = np.append(0, np.cumsum(counts))
        # A block is unique to its prefix, so the last of a group names the group.
        depths = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        last = np.repeat(self.offsets[:-1], counts) + depths * factor + factor - 1
        return Trace(
            self.name,
            None if self.block_size is None else factor * self.block_size,
            self.timestamps_ms,
            self.input_lengths,
            self.output_lengths,
            _numbered_by_first_appearance(self.block_ids[last]),
            offsets,
        )

    def __len__(self) -> int:
        return self.num_requests

    def __getitem__(self, index: int | slice) -> TraceRequest | Trace:
        if isinstance(index, slice):
            return self._sliced(*index.indices(len(self)))
        index = range(len(self))[index]
        return TraceRequest(
            float(self.timestamps_ms[index]),
            int(self.input_lengths[index]),
            int(self.output_lengths[index]),
            self.block_ids[self.offsets[index] : self.offsets[index + 1]],
        )

    def __iter__(self) -> Iterator[TraceRequest]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"Trace({self.name!r}, block_size={self.block_size}, requests={self.num_requests}, "
            f"block_references={self.num_block_references}, unique={self.num_unique_blocks})"
        )

    def _sliced(self, start: int, stop: int, step: int) -> Trace:
        if step != 1:
            raise ValueError(f"a trace is sliced with step 1, got {step}")
        stop = max(start, stop)
        offsets = self.offsets[start : stop + 1]
        return Trace(
            self.name,
            self.block_size,
            self.timestamps_ms[start:stop],
            self.input_lengths[start:stop],
            self.output_lengths[start:stop],
            _numbered_by_first_appearance(self.block_ids[offsets[0] : offsets[-1]]),
            offsets - offsets[0],
        )


def load_trace(path: str | os.PathLike, *, block_size: int | None = None) -> Trace:
    """Read a request trace: JSON lines as published with Mooncake, or Azure's CSV.

    ``path`` ends in ``.jsonl`` or ``.csv``, alone or followed by ``.gz`` or ``.zst``; a file named
    only ``.gz`` or ``.zst`` is told by its first line.  The trace is named after the file.  CSV
    traces have no blocks; their timestamps count from the first row.

    ``block_size`` is what the publisher says; None infers it from the data.  Mooncake gives an id
    to every block, a partly filled last one included: ``len(hash_ids) == ceil(input_length /
    block_size)``.  Other publishers number full blocks only: ``floor``.  Each request bounds the
    sizes that fit; the one power of two that fits all requests is taken (several: unknown), by the
    first rule that admits one, or else the one whole number that fits.  Otherwise None.

    Raises TraceError (a ValueError) that names file, line and reason for anything malformed: an
    unknown extension, a corrupt or truncated stream, a line that does not parse, a missing field, a
    timestamp that is not a finite number, a length that is not an integer of at least 0,
    ``hash_ids`` that are not integers or repeat within a request, no request at all.  Raises
    ValueError for a ``block_size`` below 1 and OSError for a file that cannot be opened.
    """
    block_size = _checked_block_size(block_size)
    path = Path(path)
    builder = _TraceBuilder()
    line = 1
    for line, record in read_records(path):
        try:
            builder.add(*record)
        except ValueError as error:
            raise TraceError(path, line, str(error)) from None
    if not builder.timestamps_ms:
        raise TraceError(path, line, "the file holds no requests")
    return builder.build(split_suffixes(path)[0], block_size)


def save_trace(trace: Trace, path: str | os.PathLike) -> None:
    """Write a trace as JSON lines that ``load_trace`` reads back.

    ``path`` ends in ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst`` (else ValueError) and is replaced
    at once, when everything is written.  The format has no place for name and block size.
    """
    with write_lines(Path(path)) as write:
        for request in trace:
            timestamp = request.timestamp_ms
            record = {
                "timestamp": int(timestamp) if timestamp.is_integer() else timestamp,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": request.block_ids.tolist(),
            }
            write(json.dumps(record, separators=(",", ":")))


class _TraceBuilder:
    """Collects checked requests in compact arrays."""

    def __init__(self):
        self.timestamps_ms = array("d")
        self.input_lengths = array("q")
        self.output_lengths = array("q")
        self.block_ids = array("i")
        self.offsets = array("q", [0])
        # An unknown id gets the next dense one, at the speed of a dictionary lookup.
        self._dense_ids = defaultdict()
        self._dense_ids.default_factory = self._dense_ids.__len__

    def add(self, timestamp_ms, input_length, output_length, hash_ids) -> None:
        """Take one request; ValueError names the field that is wrong and adds nothing."""
        timestamp_ms = _checked_timestamp(timestamp_ms)
        input_length = _checked_length("input_length", input_length)
        output_length = _checked_length("output_length", output_length)
        hash_ids = _checked_ids(hash_ids)
        self.timestamps_ms.append(timestamp_ms)
        self.input_lengths.append(input_length)
        self.output_lengths.append(output_length)
        self.block_ids.extend(map(self._dense_ids.__getitem__, hash_ids))
        self.offsets.append(len(self.block_ids))

    def build(self, name: str, block_size: int | None) -> Trace:
        import numpy as np

        timestamps_ms = np.array(self.timestamps_ms, np.float64)
        input_lengths = np.array(self.input_lengths, np.int64)
        output_lengths = np.array(self.output_lengths, np.int64)
        block_ids = np.array(self.block_ids, np.int32)
        offsets = np.array(self.offsets, np.int64)
        if np.any(timestamps_ms[1:] < timestamps_ms[:-1]):
            order = np.argsort(timestamps_ms, kind="stable")
            timestamps_ms = timestamps_ms[order]
            input_lengths, output_lengths = input_lengths[order], output_lengths[order]
            counts = np.diff(offsets)[order]
            starts, offsets = offsets[:-1][order], np.append(0, np.cumsum(counts))
            gather = np.arange(len(block_ids)) + np.repeat(starts - offsets[:-1], counts)
            block_ids = _numbered_by_first_appearance(block_ids[gather])
        if block_size is None:
            block_size = _infer_block_size(input_lengths, np.diff(offsets))
        return Trace(
            name, block_size, timestamps_ms, input_lengths, output_lengths, block_ids, offsets
        )


def _checked_timestamp(value) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"timestamp must be a number of milliseconds, got {reprlib.repr(value)}")
    try:
        timestamp = float(value)
    except OverflowError:
        timestamp = math.inf
    if not math.isfinite(timestamp):
        raise ValueError(f"timestamp must be finite, got {reprlib.repr(value)}")
    return timestamp


def _checked_length(field: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{field} must be an integer, got {reprlib.repr(value)}")
    if not 0 <= value < 1 << 63:
        raise ValueError(f"{field} must be at least 0 and fit 64 bits, got {reprlib.repr(value)}")
    return int(value)


def _checked_ids(values) -> Sequence[int]:
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ValueError(f"hash_ids must be a list of integers, got {reprlib.repr(values)}")
    if set(map(type, values)) - {int}:
        wrong = next(value for value in values if type(value) is not int)
        raise ValueError(f"hash_ids must be integers, got {reprlib.repr(wrong)}")
    if len(set(values)) != len(values):
        seen = set()
        repeated = next(value for value in values if value in seen or seen.add(value))
        raise ValueError(
            f"hash_ids repeat {repeated}: an id is unique to its prefix, so it cannot come twice"
        )
    return values


def _checked_block_size(block_size: int | None) -> int | None:
    if block_size is None:
        return None
    if isinstance(block_size, bool) or not isinstance(block_size, numbers.Integral):
        raise ValueError(f"block_size must be an integer or None, got {block_size!r}")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    return int(block_size)


def _numbered_by_first_appearance(ids: np.ndarray) -> np.ndarray:
    """Dense int32 ids that repeat where ``ids`` (non-negative) repeat."""
    import numpy as np

    first = np.full(int(ids.max(initial=-1)) + 1, len(ids))
    first[ids[::-1]] = np.arange(len(ids))[::-1]  # the last assignment stays: the first position
    present = np.flatnonzero(first < len(ids))
    dense = np.empty(len(first), np.int32)
    dense[present[np.argsort(first[present])]] = np.arange(len(present))
    return dense[ids]


def _infer_block_size(input_lengths: np.ndarray, num_blocks: np.ndarray) -> int | None:
    if not num_blocks.any():
        return None
    intervals = [
        _ceil_interval(input_lengths, num_blocks),
        _floor_interval(input_lengths, num_blocks),
    ]
    for smallest, largest in intervals:
        power = 1 << (smallest - 1).bit_length()
        if power <= largest:
            return power if 2 * power > largest else None
    for smallest, largest in intervals:
        if smallest == largest:
            return smallest
    return None


def _ceil_interval(input_lengths, num_blocks) -> tuple[int, float]:
    """Smallest and largest block size for which every block, full or not, has an id."""
    if ((input_lengths == 0) != (num_blocks == 0)).any():
        return 1, 0
    filled, several = num_blocks > 0, num_blocks > 1
    smallest = -(-input_lengths[filled] // num_blocks[filled])
    largest = (input_lengths[several] - 1) // (num_blocks[several] - 1)
    return int(smallest.max()), int(largest.min()) if len(largest) else math.inf


def _floor_interval(input_lengths, num_blocks) -> tuple[int, float]:
    """Smallest and largest block size for which exactly the full blocks have an id."""
    filled = num_blocks > 0
    smallest = input_lengths // (num_blocks + 1) + 1
    return int(smallest.max()), int((input_lengths[filled] // num_blocks[filled]).min())
