"""Request traces: arrival times, lengths and prompt blocks.

A block id stands for ``block_size`` tokens *and* everything before them in the prompt: two requests
share an id if and only if their prompts agree up to the end of that block.  Real traces come from
``load_trace``, synthetic ones from ``cache.make_workload``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import numbers
import os
import re
import reprlib
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from cache.checks import at_least
from cache.traces.files import RecordParser, TraceError, read_lines, split_suffixes, write_lines

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
    """Blocks of the prompt, in order.  Some traces number a partly filled last block, some do not.
    """
    further: Mapping[str, float | str] = MappingProxyType({})
    """Its values in the further columns of the trace."""


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Requests in order of timestamp, ties in the order they were given.

    Made by ``load_trace``, ``make_workload`` or ``Trace.from_requests``, which check requests; the
    constructor does not.  ``len(trace)``, ``trace[i]`` (a ``TraceRequest``), iteration and slices
    (``trace[100:200]``, a ``Trace`` of its own) work as on a list.
    """

    name: str
    block_size: int | None
    """Tokens per block.  None means unknown."""
    timestamps_ms: np.ndarray
    """Arrival times, ``(num_requests,)`` float64, ascending."""
    input_lengths: np.ndarray
    """Prompt tokens, ``(num_requests,)`` int64."""
    output_lengths: np.ndarray
    """Generated tokens, ``(num_requests,)`` int64."""
    block_ids: np.ndarray
    """Blocks of all requests, concatenated, ``(num_block_references,)`` int32.  Ids are dense: 0 to
    ``num_unique_blocks - 1`` by first appearance."""
    offsets: np.ndarray
    """Request ``i`` has ``block_ids[offsets[i]:offsets[i + 1]]``; ``(num_requests + 1,)`` int64."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further facts of the requests, ``(num_requests,)`` float64 or text (``StringDType``, of which
    each value takes its own length); NaN or "": unknown.  Integers that float64 would round are
    texts.  A coding agent's have ``session``, ``agent`` (0: the main one), ``stop`` (``tool_use``
    or ``end_turn``), ``think_time`` (ms since the end of its previous answer), ``tool_tokens`` and
    ``system_tokens`` (at the head of the prompt)."""

    @classmethod
    def from_requests(
        cls, requests: Iterable[tuple], *, name: str, block_size: int | None = None
    ) -> Trace:
        """Build a trace from ``(timestamp_ms, input_length, output_length, block_ids)`` tuples.

        A fifth item, a mapping from names to numbers or texts, fills ``columns``.
        Requests may come in any order, block ids may be any integers, and ``block_size`` None is
        inferred as ``load_trace`` does.  Raises ValueError for a timestamp that is not a finite
        number, a length that is not an integer from 0 to 2**31 - 1, block ids that are not
        integers, repeat within a request or follow different ids in two, further values that are
        neither finite numbers nor texts, and a ``block_size`` below 1.
        """
        where = "requests[{}]".format

        def error(index: int, reason: str) -> ValueError:
            return ValueError(f"{where(index)}: {reason}")

        return collected(enumerate(requests), tuple, error, where, name, block_size)

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

    @cached_property
    def digest(self) -> str:
        """128-bit hash of the content as 32 hex digits; the name does not count."""
        digest = hashlib.blake2b(repr((self.block_size, len(self))).encode(), digest_size=16)
        for values in (
            self.timestamps_ms,
            self.input_lengths,
            self.output_lengths,
            self.block_ids,
            self.offsets,
        ):
            digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
        for name, column in sorted(self.columns.items()):
            digest.update(f"{name}{column.tolist()}".encode())
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

    @cached_property
    def request_facts(self) -> np.ndarray:
        """The policies' ``RequestInfo`` of each request, ``(num_requests, 6)`` float64.

        Hints are from ``stop`` and ``session`` in ``columns``; NaN where these are not known.
        """
        import numpy as np

        stop = self.columns.get("stop", np.full(len(self), ""))
        session = self.columns.get("session", np.full(len(self), np.nan))
        is_last = np.zeros(len(self))
        is_last[len(self) - 1 - np.unique(session[::-1], return_index=True)[1]] = 1
        calls_tool = np.where(stop == "", np.nan, stop == "tool_use")
        is_unknown = (session == "") | (session != session)  # text, or NaN
        ends_session = np.where(is_unknown, np.nan, is_last)
        lengths = self.input_lengths, self.output_lengths, np.diff(self.offsets)
        return np.column_stack((self.timestamps_ms, *lengths, calls_tool, ends_session))

    def take(self, indices: Sequence[int] | np.ndarray) -> Trace:
        """The requests at ``indices``, integers that ascend from 0 or more (else ValueError)."""
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

        A coarse block is ``factor`` blocks in a row from the start of the prompt; those left over
        at its end fill no coarse block and are dropped.
        """
        import numpy as np

        at_least(1, "factor", factor)
        # A block is unique to its prefix, so the last of a group names the group.
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
    def __getitem__(self, index):
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


def load_trace(
    path: str | os.PathLike,
    *,
    block_size: int | None = None,
    max_decompressed_bytes: int = 1 << 30,
) -> Trace:
    """Read a request trace: JSON lines as published with Mooncake, or Azure's CSV.

    ``path`` ends in ``.jsonl`` or ``.csv``, alone or followed by ``.gz`` or ``.zst``.  The trace is
    named after the file.  CSV traces have no blocks; their timestamps count from the first row.
    Further numbers and texts of a JSON object fill ``Trace.columns``.

    ``block_size`` is the publisher's; None infers it from the data.  Mooncake gives an id
    to every block, a partly filled last one included: ``len(hash_ids) == ceil(input_length /
    block_size)``.  Other publishers number full blocks only: ``floor``.  Each request bounds the
    sizes that fit.  The first rule by which a power of two fits all requests decides: that power,
    or unknown if several fit.  If there is no such rule, the only whole number that fits is taken.
    If no size fits all requests but a power of two fits more than half of those with several ids, a
    request that it does not fit has a wrong number of ids and is an error.  Otherwise None.

    Memory stays within a small multiple of the decompressed text, which is read in pieces.  Limits:
    ``max_decompressed_bytes`` of text from a compressed file, 64 MiB in a line, 256 further fields
    in all requests together, 2**31 - 1 for a length.

    Raises TraceError (a ValueError) that names file, line and reason for anything malformed: an
    unknown extension, a corrupt or truncated stream, a line that does not parse, a missing field, a
    timestamp that is not a finite number of at least 0, a length that is not an integer of at least
    0, ``hash_ids`` that are not integers, repeat within a request, follow different ids in two
    lines or do not match ``input_length``, a further number that is not finite, a text that is not
    Unicode, a key or column that comes twice, no request at all, and an exceeded limit.  Raises
    ValueError for a ``block_size`` below 1 and OSError for a file that cannot be opened.
    """
    path = Path(path)
    name, file_format, _ = split_suffixes(path)
    limit = {"max_decompressed_bytes": max_decompressed_bytes}
    return read_requests(path, RecordParser(file_format), name, block_size, **limit)


def read_requests(
    path: Path, parse: Callable[[bytes], tuple | None], name: str, block_size: int | None, **limit
) -> Trace:
    """The trace of the requests that ``parse`` finds in the lines of a file, None for no request.

    Raises TraceError for a malformed line, and for a file without requests.
    """
    error, where = partial(TraceError, path), (lambda line: f"{path}:{line}")
    trace = collected(read_lines(path, **limit), parse, error, where, name, block_size)
    if not trace:
        raise TraceError(path, 1, "the file holds no requests")
    return trace


def save_trace(trace: Trace, path: str | os.PathLike) -> None:
    """Write a trace as JSON lines that ``load_trace`` reads back.

    ``path`` ends in ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst`` (else ValueError) and is replaced
    at once, when everything is written.  The format has no place for name and block size.
    """
    write_lines(Path(path), map(_json_line, trace))


def _json_line(request: TraceRequest) -> str:
    timestamp = request.timestamp_ms
    record = {
        "timestamp": int(timestamp) if timestamp.is_integer() else timestamp,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": request.block_ids.tolist(),
    }
    for name, value in request.further.items():
        if value != "" and value == value:  # known
            record[name] = int(value) if isinstance(value, float) and value.is_integer() else value
    return json.dumps(record, separators=(",", ":"))


def collected(
    rows: Iterable[tuple[Any, Any]],
    parse: Callable[[Any], tuple | None],
    error: Callable[[Any, str], ValueError],
    where: Callable[[Any], str],
    name: str,
    block_size: int | None,
) -> Trace:
    """The trace of the requests that ``parse`` finds in ``rows``, pairs of a place and a row.

    ``parse`` returns None for a row that is no request.  Raises ``error(place, reason)`` for a
    malformed row; ``where(place)`` names a second row in a reason.
    """
    import numpy as np

    if block_size is not None:
        block_size = at_least(1, "block_size", block_size)
    timestamps, inputs, outputs = array("d"), array("q"), array("q")
    ids: Any = array("q")  # or a list, beyond 64 bits
    ends, places = array("q", [0]), list[Any]()
    known: defaultdict[str, list[float | str | None]] = defaultdict(list)
    for place, row in rows:
        with placed(error, place):
            if (request := parse(row)) is None:
                continue
            timestamp, input_length, output_length, hash_ids, *further = request
            timestamps.append(_timestamp(timestamp))
            inputs.append(at_least(0, "input_length", input_length))
            outputs.append(at_least(0, "output_length", output_length))
            hash_ids = _ids(hash_ids)
            try:
                ids.extend(hash_ids)
            except OverflowError:
                ids = [*ids[: ends[-1]], *hash_ids]
            for column, value in dict(*further).items():
                values = known[column]
                values += [None] * (len(places) - len(values))
                values.append(_known(column, value))
                if len(known) > MAX_COLUMNS:
                    reason = f"needs at most {MAX_COLUMNS} fields that are numbers or texts"
                    raise ValueError(f"{reprlib.repr(column)}: {reason} besides the required ones")
            ends.append(len(ids))
            places.append(place)

    timestamps_ms = np.array(timestamps, np.float64)
    input_lengths, output_lengths = np.array(inputs, np.int64), np.array(outputs, np.int64)
    block_ids, offsets = _dense(ids), np.array(ends, np.int64)
    if two_prefixes := _two_prefixes(block_ids, offsets, ids):
        later, earlier, reason = two_prefixes
        reason += f" in {where(places[earlier])}: an id is unique to its prefix"
        raise error(places[later], reason)
    if block_size is None:
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
    """``value``, None for NaN, text for an integer that float64 would round.

    ValueError unless it is a finite number or a text of Unicode.
    """
    if isinstance(value, numbers.Real):
        is_valid = value != value or abs(value) <= sys.float_info.max
    else:
        is_valid = value is None or (isinstance(value, str) and not _SURROGATE.search(value))
    if not is_valid or _SURROGATE.search(column):
        value = reprlib.repr(value)
        raise ValueError(f"{column!r}: needs a finite number or a Unicode text, got {value}")
    if isinstance(value, numbers.Integral) and int(float(value)) != value:
        return str(value)
    return value if value == value else None


def _column(values: list[float | str | None], num_requests: int) -> np.ndarray:
    """A column of texts if any value is a text, else of numbers; requests at the end lack one."""
    import numpy as np

    values += [None] * (num_requests - len(values))
    if any(isinstance(value, str) for value in values):
        texts = ["" if value is None else str(value) for value in values]
        return np.array(texts, np.dtypes.StringDType())
    return np.array(values, np.float64)


@contextlib.contextmanager
def placed(error: Callable[[Any, str], ValueError], place: Any) -> Iterator[None]:
    """Raise ``error(place, reason)`` for an error in a row."""
    try:
        yield
    except KeyError as missing:
        raise error(place, f"no {missing.args[0]!r}") from None
    except (ValueError, TypeError, OverflowError, RecursionError) as reason:
        raise error(place, str(reason)) from None


def _timestamp(value) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise ValueError(
            f"timestamp must be a finite number of milliseconds, got {reprlib.repr(value)}"
        )
    return float(value)


def _ids(values) -> Sequence[int]:
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ValueError(f"hash_ids must be a list of integers, got {reprlib.repr(values)}")
    if set(map(type, values)) - {int}:
        wrong = next(value for value in values if type(value) is not int)
        raise ValueError(f"hash_ids must be integers, got {reprlib.repr(wrong)}")
    if len(set(values)) != len(values):
        ((repeated, _),) = Counter(values).most_common(1)
        raise ValueError(
            f"hash_ids repeat {reprlib.repr(repeated)}: an id is unique to its prefix, so it "
            "cannot come twice"
        )
    return values


def _two_prefixes(
    block_ids: np.ndarray, offsets: np.ndarray, ids: Sequence[int]
) -> tuple[int, int, str] | None:
    """Two requests, the later first, with one block after different blocks, and the reason."""
    import numpy as np

    before = np.append(np.int32(-1), block_ids)
    before[offsets] = -1
    first = np.flatnonzero(np.diff(np.maximum.accumulate(block_ids), prepend=-1))
    wrong = np.flatnonzero(before[:-1] != before[first][block_ids])
    if not len(wrong):
        return None
    block, names = (
        block_ids[wrong[0]],
        [*(reprlib.repr(ids[i]) for i in first.tolist()), "the start"],
    )
    positions = np.array([wrong[0], first[block]])
    later, earlier = (np.searchsorted(offsets, positions, side="right") - 1).tolist()
    now, then = (names[other] for other in before[positions])
    return later, earlier, f"hash_ids: {names[block]} follows {now} here and {then}"


def _picked(
    block_ids: np.ndarray, starts: np.ndarray, counts: np.ndarray, step: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Select ``counts[i]`` of ``block_ids`` for each request; returns ``(block_ids, offsets)``.

    They are at ``starts[i]``, ``starts[i] + step`` and so on.
    """
    import numpy as np

    offsets = np.append(0, np.cumsum(counts))
    positions = np.repeat(starts - step * offsets[:-1], counts) + step * np.arange(offsets[-1])
    return _numbered_by_first_appearance(block_ids[positions]), offsets


def _dense(given: Sequence[int]) -> np.ndarray:
    """Dense int32 ids, by first appearance, that repeat where ``given`` ones repeat."""
    import numpy as np

    ids = np.asarray(given, None if isinstance(given, array) else object)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 4 * len(ids):
        ids = np.unique(ids, return_inverse=True)[1]
    return _numbered_by_first_appearance(ids)


def _numbered_by_first_appearance(ids: np.ndarray) -> np.ndarray:
    """As ``_dense``, for ids of 0 to a small multiple of their number."""
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
    intervals = [_sizes_that_fit(input_lengths, num_blocks)]
    filled = input_lengths > 0
    if (filled == (num_blocks > 0)).all():
        # The last block counts if a token is in it: as if full blocks followed the first token.
        intervals.insert(0, _sizes_that_fit(input_lengths[filled] - 1, num_blocks[filled] - 1))
    for smallest, largest in intervals:
        power = 1 << (smallest - 1).bit_length()
        if power <= largest:
            return power if 2 * power > largest else None
    return next((smallest for smallest, largest in intervals if smallest == largest), None)


def _unlike_most(input_lengths: np.ndarray, num_blocks: np.ndarray) -> tuple[int, str] | None:
    """The first request whose number of ids contradicts most requests, and the reason.

    None if one size fits all requests, or no power of two fits most of them.
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
