"""Request traces: arrival times, lengths and prompt blocks.

A block id stands for ``block_size`` tokens *and* everything before them in the prompt: two requests
share an id if and only if their prompts agree up to the end of that block.  ``load_trace`` loads
real traces, ``cache.make_workload`` makes synthetic traces.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import numbers
import os
import re
import reprlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from cache.checks import MAX_SIZE, as_int, at_least, finite, is_finite, shown
from cache.traces.files import (
    AZURE_COLUMNS,
    REQUIRED_FIELDS,
    RecordParser,
    TraceError,
    read_lines,
    split_suffixes,
    write_lines,
)

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Trace", "TraceError", "TraceRequest", "load_trace", "save_trace"]

MAX_COLUMNS = 256
_SURROGATE = re.compile("[\ud800-\udfff]")


class TraceRequest(NamedTuple):
    """One request of a trace."""

    timestamp_ms: float
    input_length: int
    """Prompt tokens."""
    output_length: int
    """Generated tokens."""
    block_ids: np.ndarray
    """Ids of the prompt's blocks, in order.  Some traces have an id for a partly filled last block.
    """
    further: Mapping[str, float | str] = MappingProxyType({})
    """Values of the request in ``Trace.columns``."""


_HINTS = "ends_session", "expected_pause_ms", "pause_spread"
"""Columns with clients' hints."""


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Requests in order of timestamp; ties keep the given order.

    Make traces with ``load_trace``, ``make_workload`` or ``Trace.from_requests``, which check
    requests; the constructor does not.  ``len(trace)``, ``trace[i]`` (a ``TraceRequest``),
    iteration and slices (``trace[100:200]``, a new ``Trace``) work as on a list.
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
    """Block ids of all requests, concatenated, ``(num_block_references,)`` int32.  Ids are 0 to
    ``num_unique_blocks - 1``, in order of first appearance."""
    offsets: np.ndarray
    """Request ``i`` has ``block_ids[offsets[i]:offsets[i + 1]]``; ``(num_requests + 1,)`` int64."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further facts about the requests, ``(num_requests,)`` arrays of float64 or text
    (variable-length ``StringDType``).  NaN or "" means unknown.  Integers that float64 would round
    are texts.  Traces of coding agents have ``session``, ``agent`` (0: main agent), ``stop``
    (``tool_use`` or ``end_turn``), ``think_time`` (ms since the end of the agent's previous
    answer), ``tool_tokens`` and ``system_tokens`` (both at the head of the prompt).  Policies get
    ``stop``, ``session``, and the hints ``ends_session``, ``expected_pause_ms``, ``pause_spread``
    (``RequestInfo``)."""

    @classmethod
    def from_requests(
        cls, requests: Iterable[tuple], *, name: str, block_size: int | None = None
    ) -> Trace:
        """Build a trace from ``(timestamp_ms, input_length, output_length, block_ids)`` tuples.

        A fifth item, a mapping from names to numbers or texts, fills ``columns``.  Requests may be
        in any order.  Block ids may be any integers.  ``block_size`` None is inferred as in
        ``load_trace``.  Raises ValueError for a timestamp that is not a finite number of at least
        0, a length that is not an integer from 0 to 2**31 - 1, a block id that is not an integer,
        repeats within a request or follows different ids in two requests, a further value that is
        neither finite number nor text, and a ``block_size`` below 1.
        """
        error = lambda i, reason: ValueError(f"requests[{i}]: {reason}")  # noqa: E731
        return collected(enumerate(requests), tuple, error, name, block_size)

    @property
    def num_requests(self) -> int:
        return len(self.timestamps_ms)

    @property
    def num_block_references(self) -> int:
        """Number of blocks of all requests, repetitions included."""
        return len(self.block_ids)

    @cached_property
    def num_unique_blocks(self) -> int:
        """Number of different blocks.  A pool of this capacity never evicts."""
        return int(self.block_ids.max()) + 1 if len(self.block_ids) else 0

    @property
    def has_blocks(self) -> bool:
        """False for a trace of lengths only, such as Azure's."""
        return len(self.block_ids) > 0

    @cached_property
    def digest(self) -> str:
        """128-bit hash of the requests and the block size, as 32 hex digits.  Ignores the name."""
        digest = hashlib.blake2b(repr((self.block_size, len(self))).encode(), digest_size=16)
        lengths = self.input_lengths, self.output_lengths
        for values in (self.timestamps_ms, *lengths, self.block_ids, self.offsets):
            digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
        for name, column in sorted(self.columns.items()):
            digest.update(f"{name}{column.tolist()}".encode())
        return digest.hexdigest()

    @cached_property
    def infinite_cache_hit_rate(self) -> float:
        """Block hit rate of a cache that never evicts: the upper bound for every policy.

        As in ``cache.simulate``, the hits of a request are the longest leading run of blocks that
        earlier requests contain.  0 for a trace without blocks.
        """
        import numpy as np

        if not self.has_blocks:
            return 0.0
        # Ids are in order of first appearance: a block is new if its id exceeds all previous ids.
        newest = np.maximum.accumulate(self.block_ids)
        is_new = np.append(True, newest[1:] > newest[:-1])
        new_positions = np.append(np.flatnonzero(is_new), len(self.block_ids))
        starts, ends = self.offsets[:-1], self.offsets[1:]
        first_new = new_positions[np.searchsorted(new_positions, starts)]
        hits = np.minimum(first_new, ends) - starts
        return int(hits.sum()) / len(self.block_ids)

    @cached_property
    def request_facts(self) -> np.ndarray:
        """Fields of ``RequestInfo`` for each request, ``(num_requests, 9)`` float64.

        The column ``stop`` gives ``calls_tool``.  The column ``session`` gives ``ends_session``,
        unless the trace has a column ``ends_session``.  Together with the column ``agent`` it gives
        the number ``session``: each sub-agent counts as a session.  Without these columns, and for
        requests without a value, the fields are NaN.

        Raises ValueError, with the request, for a pause or spread that is negative or a text, for
        ``ends_session`` other than 0 and 1, and for a session that goes on after its end.
        """
        import numpy as np

        unknown = np.full(len(self), np.nan)
        stop = self.columns.get("stop", np.full(len(self), ""))
        session = self.columns.get("session", unknown)
        latest, number = _latest_of_each(session)
        is_last = np.zeros(len(self))
        is_last[latest] = 1
        calls_tool = np.where(stop == "", np.nan, stop == "tool_use")
        is_known = (session != "") & (session == session)  # neither an empty text nor NaN
        ends = self.columns.get("ends_session", np.where(is_known, is_last, np.nan))
        given = [self.columns.get(name, unknown) for name in ("expected_pause_ms", "pause_spread")]
        for name, values in zip(_HINTS, (ends, *given), strict=True):
            if values.dtype.kind != "f":
                raise ValueError(f"column {name!r} has texts: needs numbers")
            right, needs = (values >= 0) & (values < np.inf), "a finite number of at least 0"
            if values is ends:
                right, needs = np.isin(values, (0, 1)), "0 or 1"
            for request in np.flatnonzero(~right & ~np.isnan(values))[:1]:
                raise ValueError(f"requests[{request}]: {name}={values[request]}: needs {needs}")
        if "agent" in self.columns:
            _, agent = _latest_of_each(self.columns["agent"])
            latest, number = _latest_of_each(number * len(self) + agent)
        goes_on = is_known & (ends == 1) & ("ends_session" in self.columns)
        goes_on[latest] = False
        for request in np.flatnonzero(goes_on)[:1]:
            raise ValueError(
                f"requests[{request}]: ends_session=1, but session {session[request]} goes on"
            )
        lengths = self.input_lengths, self.output_lengths, np.diff(self.offsets)
        number = np.where(is_known, number, np.nan)
        return np.column_stack((self.timestamps_ms, *lengths, calls_tool, ends, number, *given))

    def take(self, indices: Sequence[int] | np.ndarray) -> Trace:
        """The requests at ``indices``.  Raises ValueError unless they ascend from 0 or more."""
        import numpy as np

        rows = np.asarray(indices) if len(indices) else np.empty(0, int)
        if rows.dtype.kind != "i" or (np.diff(rows, prepend=-1) <= 0).any():
            raise ValueError(f"indices must ascend from 0 or more, got {reprlib.repr(indices)}")
        return self._rows(rows)

    def _rows(self, rows: np.ndarray) -> Trace:
        starts = self.offsets[rows]
        block_ids, offsets = _picked(self.block_ids, starts, self.offsets[rows + 1] - starts)
        return replace(
            self,
            timestamps_ms=self.timestamps_ms[rows],
            input_lengths=self.input_lengths[rows],
            output_lengths=self.output_lengths[rows],
            block_ids=block_ids,
            offsets=offsets,
            columns={name: column[rows] for name, column in self.columns.items()},
        )

    def coarsened(self, factor: int) -> Trace:
        """The same requests in blocks of ``factor * block_size`` tokens.

        Each group of ``factor`` consecutive blocks of a prompt becomes a coarse block.  Blocks at
        the end that do not fill a group are dropped.
        """
        import numpy as np

        factor = at_least(1, "factor", factor, MAX_SIZE // (self.block_size or 1))
        # A block is unique to its prefix, so the last block of a group identifies the group.
        block_ids, offsets = _picked(
            self.block_ids, self.offsets[:-1] + factor - 1, np.diff(self.offsets) // factor, factor
        )
        return replace(
            self,
            block_size=None if self.block_size is None else factor * self.block_size,
            block_ids=block_ids,
            offsets=offsets,
        )

    def __len__(self) -> int:
        return self.num_requests

    @overload
    def __getitem__(self, index: int) -> TraceRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Trace: ...
    def __getitem__(self, index: int | slice) -> TraceRequest | Trace:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        index = range(len(self))[index]
        return TraceRequest(
            float(self.timestamps_ms[index]),
            int(self.input_lengths[index]),
            int(self.output_lengths[index]),
            self.block_ids[self.offsets[index] : self.offsets[index + 1]],
            {name: column.item(index) for name, column in self.columns.items()},
        )

    def __iter__(self) -> Iterator[TraceRequest]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"Trace({self.name!r}, block_size={self.block_size}, requests={self.num_requests}, "
            f"block_references={self.num_block_references}, unique={self.num_unique_blocks})"
        )


def _latest_of_each(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of the last of each group of equal values, and the number of each value's group."""
    import numpy as np

    _, first, number = np.unique(values[::-1], return_index=True, return_inverse=True)
    return len(values) - 1 - first, number[::-1]


def load_trace(
    path: str | os.PathLike,
    *,
    block_size: int | None = None,
    columns: str | Mapping[str, str | int] | None = None,
    max_decompressed_bytes: int = 1 << 30,
) -> Trace:
    """Read a request trace: JSON lines in Mooncake's format, or CSV.

    ``path`` ends in ``.jsonl`` or ``.csv``, optionally followed by ``.gz`` or ``.zst``.  The name
    of the trace is the file's.  Further numbers and texts of a JSON object become
    ``Trace.columns``; true and false are 1 and 0, and null is an unknown value.

    ``columns``, such as ``"time=ts,input_length=prompt"`` or a dict, maps fields to the columns of
    a CSV file: names in its header, or numbers from 1 if it has no header.  The fields are ``time``
    (a date and time, or seconds) or ``timestamp`` (milliseconds), ``input_length`` (without it each
    id counts as one token), ``output_length`` (without it 0) and ``hash_ids`` (integers or words,
    separated by spaces, commas or semicolons, with or without brackets around all).  None: Azure's
    columns, without block ids.  Timestamps of CSV are relative to the earliest row.

    ``block_size`` is the publisher's; None takes it from a field ``block_size`` of a line (null:
    unknown), or infers it from the data if no line has this field.  Mooncake gives an id to every
    block, including a partly filled last block: ``len(hash_ids) == ceil(input_length /
    block_size)``.  Other publishers give ids to full blocks only: ``floor`` instead of ``ceil``.
    The rules are tried in this order.  A power of two that fits all requests by a rule is the block
    size; if several powers fit, it is unknown (None).  If no power fits by either rule, the only
    integer that fits all requests is used.  If no integer does, but a power of two fits most
    requests with several ids, a request that it does not fit is an error.  Otherwise None.

    The file is read in pieces; memory use is a small multiple of the decompressed text.  Limits:
    ``max_decompressed_bytes`` of text from a compressed file, 64 MiB per line, 256 further fields
    in all requests together, 2**31 - 1 for a length.

    Raises TraceError (a ValueError) that names file, line and reason for anything malformed: an
    unknown extension, a corrupt or truncated stream, a line that does not parse, a missing field, a
    timestamp that is not a finite number of at least 0, a length that is not an integer of at least
    0, ``hash_ids`` that are not integers, repeat within a request, follow different ids in two
    lines or do not match ``input_length``, a further number that is not finite, a text that is not
    Unicode, a key or column that is repeated, a file without requests, and an exceeded limit.
    Raises ValueError for a ``block_size`` below 1, for ``columns`` of a file that is not CSV, of
    another type, with an unknown field, or without times or prompts, and OSError for a file that
    cannot be opened.
    """
    path = Path(path)
    name, file_format, _ = split_suffixes(path)
    if columns is not None and file_format != ".csv":
        raise ValueError(f"columns: needs a .csv file, got {path}")
    parse = RecordParser(file_format, AZURE_COLUMNS if columns is None else columns)
    return read_requests(path, parse, name, block_size, max_decompressed_bytes)


def read_requests(
    path: Path,
    parse: Callable[[bytes], tuple | None],
    name: str,
    block_size: int | None,
    *limit: int,
) -> Trace:
    """Read a trace.  ``parse`` makes a request from a line, or returns None if it has no request.

    Raises TraceError for a malformed line, and for a file without requests.
    """
    error = partial(TraceError, path)
    trace = collected(read_lines(path, *limit), parse, error, name, block_size)
    if not trace:
        raise TraceError(path, 1, "the file holds no requests")
    return trace


def save_trace(trace: Trace, path: str | os.PathLike) -> None:
    """Write a trace as JSON lines that ``load_trace`` reads back.

    ``path`` ends in ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst`` and is replaced atomically after
    everything is written.  The name is not saved.  The first line has the block size, unless
    ``load_trace`` infers it, and the columns without values.  Raises ValueError for another
    extension, a trace without requests and a request of more than 64 MiB of text.
    """
    if not trace:
        raise ValueError("trace has no requests: a file needs at least one")
    first: dict[str, Any] = {
        name: None if column.dtype.kind == "f" else ""
        for name, column in trace.columns.items()
        if not ((column == column) & (column != "")).any()
    }
    inferred = _infer_block_size(trace.input_lengths, trace.offsets[1:] - trace.offsets[:-1])
    if inferred is None or inferred != trace.block_size:
        first["block_size"] = trace.block_size
    lines = (_json_line(request, {} if number else first) for number, request in enumerate(trace))
    write_lines(Path(path), lines)


def _json_line(request: TraceRequest, more: Mapping[str, Any]) -> str:
    timestamp = request.timestamp_ms
    record = {
        "timestamp": int(timestamp) if timestamp.is_integer() else timestamp,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": request.block_ids.tolist(),
        **more,
    }
    for name, value in request.further.items():
        if value != "" and value == value:  # known
            record[name] = int(value) if isinstance(value, float) and value.is_integer() else value
    return json.dumps(record, separators=(",", ":"))


def collected(
    rows: Iterable[tuple[Any, Any]],
    parse: Callable[[Any], tuple | None],
    error: Callable[[Any, str], ValueError],
    name: str,
    block_size: int | None,
) -> Trace:
    """Make a trace of ``rows``, pairs (place, row).  ``parse`` makes a request from a row.

    All traces are made here.  ``parse`` returns None for a row without a request.  If it has a true
    ``since_first``, finite timestamps relative to the first row become relative to the earliest.
    Raises ``error(place, reason)``, whose text is place and reason, for a malformed row.
    """
    import numpy as np

    if block_size is not None:
        block_size = at_least(1, "block_size", block_size)
    timestamps, inputs, outputs = array("d"), array("q"), array("q")
    ids: Any = array("q")  # or a list, if an id exceeds 64 bits
    ends, places = array("q", [0]), list[Any]()
    known: defaultdict[str, list[float | str | None]] = defaultdict(list)
    stated, since_first = list[int | None](), getattr(parse, "since_first", False)
    for place, row in rows:
        with placed(error, place):
            if (request := parse(row)) is None:
                continue
            timestamp, input_length, output_length, hash_ids, *further = request
            timestamps.append(timestamp if since_first else finite("timestamp_ms", timestamp))
            inputs.append(at_least(0, "input_length", input_length))
            outputs.append(at_least(0, "output_length", output_length))
            hash_ids = _ids(hash_ids)
            try:
                ids.extend(hash_ids)
            except OverflowError:
                ids = [*ids[: ends[-1]], *hash_ids]
            facts = dict(*further)
            if "block_size" in facts:
                size = facts.pop("block_size")
                stated.append(None if size is None else at_least(1, "block_size", size))
                if stated[-1] != stated[0]:
                    raise ValueError(f"block_size={size}: an earlier request has {stated[0]}")
            for column, value in facts.items():
                values = known[column]
                values += [None] * (len(places) - len(values))
                values.append(_known(column, value))
                if len(known) > MAX_COLUMNS:
                    reason = f"needs at most {MAX_COLUMNS} fields that are numbers or texts"
                    raise ValueError(f"{reprlib.repr(column)}: {reason} besides the required ones")
            ends.append(len(ids))
            places.append(place)

    timestamps_ms = np.array(timestamps, np.float64) + 0.0  # no -0.0, which a file does not keep
    if since_first:
        timestamps_ms -= timestamps_ms.min(initial=0)
    input_lengths, output_lengths = np.array(inputs, np.int64), np.array(outputs, np.int64)
    block_ids, offsets = _dense(ids), np.array(ends, np.int64)
    if two_prefixes := _two_prefixes(block_ids, offsets, ids):
        later, earlier, reason = two_prefixes
        reason += f" in {error(places[earlier], 'an id is unique to its prefix')}"
        raise error(places[later], reason)
    if block_size is None and stated:
        block_size = stated[0]
    elif block_size is None:
        block_size = _infer_block_size(input_lengths, np.diff(offsets))
        if block_size is None and (wrong := _unlike_most(input_lengths, np.diff(offsets))):
            number, reason = wrong
            raise error(places[number], reason)
    columns = {name: _column(values, len(places)) for name, values in known.items()}
    lengths = input_lengths, output_lengths
    trace = Trace(name, block_size, timestamps_ms, *lengths, block_ids, offsets, columns)
    if (timestamps_ms[1:] < timestamps_ms[:-1]).any():
        return trace._rows(np.argsort(timestamps_ms, kind="stable"))
    return trace


def _known(column: str, value: float | str | None) -> float | str | None:
    """``value``; None for NaN; a text for an integer that float64 would round.

    Raises ValueError unless ``value`` is a finite number, NaN, None or a Unicode text, and
    ``column`` a Unicode text that is not the name of a required field.
    """
    if not isinstance(column, str) or column in REQUIRED_FIELDS:
        raise ValueError(f"{shown(column)}: needs a text other than {', '.join(REQUIRED_FIELDS)}")
    is_text = isinstance(value, str) and not _SURROGATE.search(value)
    is_number = value is None or value != value or is_finite(value)
    if _SURROGATE.search(column) or not (is_text or is_number):
        got = shown(value)
        raise ValueError(f"{column!r}: needs a finite number or a Unicode text, got {got}")
    if isinstance(value, numbers.Integral) and int(float(value)) != value:
        return str(value)
    return value if value == value else None


def _column(values: list[float | str | None], num_requests: int) -> np.ndarray:
    """A column of texts if any value is a text, else of numbers.  Missing values are at the end."""
    import numpy as np

    values += [None] * (num_requests - len(values))
    if any(isinstance(value, str) for value in values):
        texts = ["" if value is None else str(value) for value in values]
        return np.array(texts, np.dtypes.StringDType())
    return np.array(values, np.float64) + 0.0


@contextlib.contextmanager
def placed(error: Callable[[Any, str], ValueError], place: Any) -> Iterator[None]:
    """Turn an error in the body into ``error(place, reason)``."""
    try:
        yield
    except KeyError as missing:
        raise error(place, f"missing {missing.args[0]!r}") from None
    except (ValueError, TypeError, OverflowError, RecursionError) as reason:
        raise error(place, str(reason)) from None


def _ids(values: Any) -> Sequence[int]:
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ValueError(f"hash_ids must be a list of integers, got {reprlib.repr(values)}")
    if set(map(type, values)) - {int}:
        values = [as_int(f"hash_ids[{at}]", value) for at, value in enumerate(values)]
    if len(set(values)) != len(values):
        ((repeated, _),) = Counter(values).most_common(1)
        reason = "an id is unique to its prefix, so it cannot come twice"
        raise ValueError(f"hash_ids repeat {reprlib.repr(repeated)}: {reason}")
    return values


def _two_prefixes(
    block_ids: np.ndarray, offsets: np.ndarray, ids: Sequence[int]
) -> tuple[int, int, str] | None:
    """Find a block that follows different blocks: (later request, earlier request, reason)."""
    import numpy as np

    before = np.append(np.int32(-1), block_ids)
    before[offsets] = -1
    first = np.flatnonzero(np.diff(np.maximum.accumulate(block_ids), prepend=-1))
    wrong = np.flatnonzero(before[:-1] != before[first][block_ids])
    if not len(wrong):
        return None
    block = block_ids[wrong[0]]
    names = [*(reprlib.repr(ids[i]) for i in first.tolist()), "the start"]
    positions = np.array([wrong[0], first[block]])
    later, earlier = (np.searchsorted(offsets, positions, side="right") - 1).tolist()
    now, then = (names[other] for other in before[positions])
    return later, earlier, f"hash_ids: {names[block]} follows {now} here and {then}"


def _picked(
    block_ids: np.ndarray, starts: np.ndarray, counts: np.ndarray, step: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Select ``counts[i]`` block ids for request i; returns ``(block_ids, offsets)``.

    The selected positions are ``starts[i]``, ``starts[i] + step`` and so on.
    """
    import numpy as np

    offsets = np.append(0, np.cumsum(counts))
    positions = np.repeat(starts - step * offsets[:-1], counts) + step * np.arange(offsets[-1])
    return _numbered_by_first_appearance(block_ids[positions]), offsets


def _dense(given: Sequence[int]) -> np.ndarray:
    """Map the ``given`` ids to dense int32 ids in order of first appearance."""
    import numpy as np

    ids = np.asarray(given, None if isinstance(given, array) else object)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 4 * len(ids):
        ids = np.unique(ids, return_inverse=True)[1]
    return _numbered_by_first_appearance(ids)


def _numbered_by_first_appearance(ids: np.ndarray) -> np.ndarray:
    """Like ``_dense``, for ids from 0 to a small multiple of their number."""
    import numpy as np

    first = np.full(int(ids.max(initial=-1)) + 1, len(ids))
    first[ids[::-1]] = np.arange(len(ids))[::-1]  # the last assignment wins: the first position
    present = np.flatnonzero(first < len(ids))
    dense = np.empty(len(first), np.int32)
    dense[present[np.argsort(first[present])]] = np.arange(len(present))
    return dense[ids]


def _infer_block_size(input_lengths: np.ndarray, num_blocks: np.ndarray) -> int | None:
    if not num_blocks.any():
        return None
    intervals = [_sizes_that_fit(input_lengths, num_blocks)]
    filled = input_lengths > 0
    if (filled == (num_blocks > 0)).all():
        # The ceil rule: the same as the floor rule for all tokens and blocks but the first.
        intervals.insert(0, _sizes_that_fit(input_lengths[filled] - 1, num_blocks[filled] - 1))
    for smallest, largest in intervals:
        power = 1 << (smallest - 1).bit_length()
        if power <= largest:
            return power if 2 * power > largest else None
    return next((smallest for smallest, largest in intervals if smallest == largest), None)


def _unlike_most(input_lengths: np.ndarray, num_blocks: np.ndarray) -> tuple[int, str] | None:
    """The first request whose number of ids contradicts most requests, and the reason.

    None if one size fits all requests, or if no power of two fits most requests.
    """
    import numpy as np

    several = num_blocks > 1
    rules = {"ceil": lambda size: -(-input_lengths // size), "floor": lambda s: input_lengths // s}
    fits = {
        (rule, 1 << power): num_blocks == count(1 << power)
        for rule, count in rules.items()
        for power in range(21)
    }
    (rule, size), best = max(fits.items(), key=lambda item: np.sum(item[1] & several))
    if best.all() or 2 * np.sum(best & several) <= np.sum(several):
        return None
    request = int(np.argmin(best))
    return request, (
        f"{num_blocks[request]} hash_ids for input_length={input_lengths[request]}, needs "
        f"{rules[rule](size)[request]} as most requests have blocks of {size} tokens"
    )


def _sizes_that_fit(input_lengths: np.ndarray, num_full: np.ndarray) -> tuple[int, int]:
    """Smallest and largest block size with ``num_full == input_lengths // size``."""
    smallest = input_lengths // (num_full + 1) + 1
    several = num_full > 0
    largest = input_lengths[several] // num_full[several]
    return int(smallest.max()), int(largest.min(initial=1 << 62))
