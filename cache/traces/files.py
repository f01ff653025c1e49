"""The file formats of request traces: compressed streams, lines and records.

Two formats can be read, uncompressed or compressed with gzip (``.gz``) or zstandard (``.zst``):

- JSON lines (``.jsonl``), as published with Mooncake (FAST'25): an object per line with
  ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``;
- CSV (``.csv``), by default with the columns of Azure's LLM inference traces (2023 and 2024), which
  have no block ids: ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``.

This module reads files; ``cache.traces.trace`` checks requests.
"""

import contextlib
import csv
import gzip
import itertools
import json
import math
import os
import re
import reprlib
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

from cache.checks import at_least

COMPRESSIONS = (".gz", ".zst")
FORMATS = (".jsonl", ".csv")

MAX_LINE_BYTES = 2**26

REQUIRED_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_CSV_FIELDS = ("time", "timestamp", "input_length", "hash_ids", "output_length")
AZURE_COLUMNS = "time=TIMESTAMP,input_length=ContextTokens,output_length=GeneratedTokens"
_AROUND_IDS = "[](){}'\" "
_WORD = re.compile(r"""[^\s,;|'"]+""")
"""An id in a cell with several ids."""
_NOT_AN_ID = re.compile(r"none|nan|null|<na>|.*[][(){}].*", re.IGNORECASE)
_INTEGER = re.compile("0|-?[1-9][0-9]*")
_EPOCH = datetime.fromtimestamp(0, UTC)


class TraceError(ValueError):
    """A trace file that cannot be read: ``path``, ``line`` (from 1) and ``reason``."""

    def __init__(self, path: str | os.PathLike, line: int, reason: str) -> None:
        super().__init__(path, line, reason)
        self.path, self.line, self.reason = path, line, reason

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def split_suffixes(path: Path) -> tuple[str, str | None, str | None]:
    """Split a path into ``(name, format, compression)``; None for an unknown part."""
    name, found = path.name, list[str | None]()
    for known in (COMPRESSIONS, FORMATS):
        suffix = Path(name).suffix
        found.append(suffix.lower() if suffix.lower() in known else None)
        name = name.removesuffix(suffix) if found[-1] else name
    return name, found[1], found[0]


def read_lines(path: Path, max_decompressed_bytes: int = 1 << 30) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, decompressed line) for each line that is not blank.

    The file is read in pieces.  Raises TraceError for an unknown extension, a corrupt or truncated
    stream, a compressed file with more than ``max_decompressed_bytes`` of text and a line of more
    than ``MAX_LINE_BYTES``.  Raises OSError for a file that cannot be opened.
    """
    _, file_format, compression = split_suffixes(path)
    if file_format is None and not path.is_dir():
        known = _known_extensions(FORMATS)
        raise TraceError(path, 1, f"unknown extension {path.suffix!r}; known: {known}")
    left = at_least(1, "max_decompressed_bytes", max_decompressed_bytes, math.inf) + 1
    number, pending, length = 1, [], 0
    try:
        for chunk in itertools.chain(_chunks(path, compression), [b"\n"]):  # ends the last line
            left -= len(chunk) if compression else 0
            if left < 0:
                raise ValueError(
                    f"expands to more than {max_decompressed_bytes:,} bytes of text: decompress it "
                    "first, or give load_trace a larger max_decompressed_bytes"
                )
            if not length and chunk.isspace():
                number += chunk.count(b"\n")
                continue
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                pending.append(line)
                line = b"".join(pending)
                if line and not line.isspace():
                    yield number, line
                number, pending, length = number + 1, [], 0
            pending.append(rest)
            length += len(rest)
            if length > MAX_LINE_BYTES:
                raise ValueError(f"a line has more than {MAX_LINE_BYTES:,} bytes")
    except ValueError as error:
        raise TraceError(path, number, str(error)) from None


def _chunks(path: Path, compression: str | None) -> Iterator[bytes]:
    """Yield the decompressed content.  Raises ValueError if it is corrupt or truncated."""
    with open(path, "rb") as file:
        if compression == ".zst":
            yield from _zstandard_chunks(file)
            return
        try:
            stream = gzip.GzipFile(fileobj=file) if compression else file
            while chunk := stream.read(1 << 20):
                yield chunk
        except EOFError:
            raise ValueError("truncated gzip stream: the file ends too early") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"corrupt gzip stream: {error}") from None


def _zstandard_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Decompress frame by frame, because zstandard's reader does not report truncated files."""
    import zstandard

    data, frame = b"", None
    while data or (data := file.read(1024)):  # can expand to 32 MiB
        frame = frame or zstandard.ZstdDecompressor().decompressobj()
        try:
            yield frame.decompress(data)
        except zstandard.ZstdError as error:
            raise ValueError(f"corrupt zstandard stream: {error}") from None
        data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise ValueError("truncated zstandard stream: the file ends too early")


class RecordParser:
    """Parses the lines of one file in order.

    A call returns ``(timestamp_ms, input_length, output_length, hash_ids, further)``, or None for
    the header of a CSV file.  ``further`` has a JSON object's further fields, no lists and objects.
    Values are not checked.  For CSV, timestamps are milliseconds since the first row (precise to 1
    us), and ``since_first`` is true.  Raises ValueError for a line that does not parse, a number
    below 0 as time, and dates and numbers as times of one file, and KeyError for a missing field.

    columns: the columns of a CSV file, see ``load_trace``.  Raises ValueError for another type, an
    unknown field, and for columns without times or without prompts.
    """

    def __init__(self, file_format: str | None, columns: str | Mapping[str, str | int]) -> None:
        self._format = file_format
        self.since_first = file_format == ".csv"
        self._columns = _column_map(columns)
        self._header: list[str] = []
        self._first: tuple[bool, float] | None = None
        self._words: dict[str, int] = {}
        csv.field_size_limit(MAX_LINE_BYTES)

    def __call__(self, line: bytes) -> tuple | None:
        if self._format == ".jsonl":
            return _mooncake_record(line)
        try:
            rows = csv.reader([_decoded(line)], strict=True, skipinitialspace=True)
            cells = [cell.strip() for cell in next(rows)]
        except csv.Error as error:
            raise ValueError(f"malformed CSV: {error}") from None
        if self._header:
            return self._csv_record(cells)
        self._header, kind = cells, "header"
        if all(map(str.isdecimal, self._columns.values())):
            self._header, kind = [f"column {number + 1}" for number in range(len(cells))], "row"
            self._columns = {field: f"column {name}" for field, name in self._columns.items()}
        names = self._columns.values()
        if missing := [name for name in names if name not in self._header]:
            raise ValueError(
                f"a CSV trace starts with a {kind} that has {', '.join(names)}; missing "
                f"{', '.join(missing)} in {reprlib.repr(','.join(cells))}. Name its own columns "
                'with columns (--columns), such as "time=ts,input_length=prompt"'
            )
        unique_keys([(cell, None) for cell in self._header if cell in names])
        return None if kind == "header" else self._csv_record(cells)

    def _csv_record(self, cells: list[str]) -> tuple:
        if len(cells) != len(self._header):
            raise ValueError(f"needs {len(self._header)} columns, got {len(cells)}")
        row = dict(zip(self._header, cells, strict=True))
        now, ids, lengths = 0.0, list[float](), dict[str, float]()
        for field, name in self._columns.items():
            if field == "hash_ids":
                ids = [self._id(name, id_) for id_ in _WORD.findall(row[name].strip(_AROUND_IDS))]
            elif "length" in field:
                lengths[field] = _integer(name, row[name])
            else:
                now = self._milliseconds(name, row[name], field)
        input_length = lengths.get("input_length", len(ids))
        return now, input_length, lengths.get("output_length", 0), ids, {}

    def _milliseconds(self, name: str, text: str, field: str) -> float:
        """Since the first row."""
        is_date, now = _microseconds(name, text, field)
        was_date, start = self._first = self._first or (is_date, now)
        if is_date != was_date or not (is_date or 0 <= now < math.inf):
            needs = (
                "date and time as in the first row" if was_date else "finite number of at least 0"
            )
            raise ValueError(f"{name} must be a {needs}, got {reprlib.repr(text)}")
        return (now - start) / 1000

    def _id(self, name: str, word: str) -> float:
        """The integer ``word``; an integer that no file has for another word."""
        if _NOT_AN_ID.fullmatch(word):
            raise ValueError(f"{name} must have integers or words as ids, got {reprlib.repr(word)}")
        if _INTEGER.fullmatch(word):
            return _as_int(word)
        return self._words.setdefault(word, -(2**62) - len(self._words))


def _column_map(columns: str | Mapping[str, str | int]) -> dict[str, str]:
    """The column of each field."""
    halves: Iterable = columns.items() if isinstance(columns, Mapping) else [("", "")]
    if isinstance(columns, str):
        halves = [pair.partition("=")[::2] for pair in columns.split(",")]
    pairs = [(str(field).strip(), str(name).strip()) for field, name in halves]
    if not all(map(all, pairs)):
        text = reprlib.repr(columns)
        raise ValueError(f"columns: needs pairs such as time=ts,input_length=prompt, got {text}")
    named = unique_keys(pairs)
    if unknown := named.keys() - set(_CSV_FIELDS):
        choices = ", ".join(_CSV_FIELDS)
        raise ValueError(f"columns: {min(unknown)!r} is unknown; choose from {choices}")
    for needed, most in ((_CSV_FIELDS[:2], 1), (_CSV_FIELDS[2:4], 2)):
        if not 1 <= len(named.keys() & set(needed)) <= most:
            raise ValueError(f"columns: needs {' or '.join(needed)}, got {', '.join(named)}")
    return named


def _microseconds(name: str, text: str, field: str) -> tuple[bool, float]:
    """True and the time since 1970 for a date and time; False and the time for a number."""
    unit, scale = ("seconds", 1e6) if field == "time" else ("milliseconds", 1e3)
    with contextlib.suppress(ValueError):
        return False, float(text) * scale
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        needs = f"a date and time or a number of {unit}"
        raise ValueError(f"{name} must be {needs}, got {reprlib.repr(text)}") from None
    # Azure's files of 2024 have a time zone.  For files of 2023, UTC is assumed.
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return True, (moment - _EPOCH) / timedelta(microseconds=1)


def _integer(name: str, digits: str) -> float:
    if not re.fullmatch("-?[0-9]+", digits):
        raise ValueError(f"{name} must be an integer, got {reprlib.repr(digits)}")
    return _as_int(digits)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines of text, compressed by extension.  The same lines give the same bytes.

    ``path`` is replaced after everything is written, so a failure keeps an existing file.  Raises
    ValueError for an extension other than ``.jsonl``, ``.jsonl.gz`` and ``.jsonl.zst``, and a line
    of more than ``MAX_LINE_BYTES``.
    """
    _, file_format, compression = split_suffixes(path)
    if file_format != ".jsonl":
        known = _known_extensions((".jsonl",))
        raise ValueError(f"path must end in {known} to be written, got {path.name!r}")
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "xb") as file, _compressed(file, compression) as stream:
            for number, line in enumerate(lines, 1):
                if len(data := line.encode()) > MAX_LINE_BYTES:
                    raise ValueError(f"line {number} has more than {MAX_LINE_BYTES:,} bytes")
                stream.write(data + b"\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _known_extensions(formats: tuple[str, ...]) -> str:
    return ", ".join(form + compression for form in formats for compression in ("", *COMPRESSIONS))


def _compressed(
    file: BinaryIO, compression: str | None
) -> contextlib.AbstractContextManager[gzip.GzipFile | BinaryIO]:
    if compression == ".gz":
        return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
    if compression == ".zst":
        import zstandard

        compressor = zstandard.ZstdCompressor(level=10, write_checksum=True)
        return compressor.stream_writer(file, closefd=False)
    return contextlib.nullcontext(file)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook`` that makes a dict.  Raises ValueError for a repeated key."""
    record = dict(pairs)
    if len(record) < len(pairs):
        ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{reprlib.repr(repeated)} comes twice")
    return record


_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)


def parse_json(line: bytes) -> Any:
    """Parse a JSON text.  Raises ValueError for text that is not UTF-8 or not JSON, and for a key
    that is repeated in an object."""
    text = _decoded(line)
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error.msg} at column {error.colno}") from None
    except ValueError:  # a repeated key, or an integer too long for Python
        return json.JSONDecoder(object_pairs_hook=unique_keys, parse_int=_as_int).decode(text)


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error.reason} at byte {error.start + 1}") from None


def _as_int(digits: str) -> float:
    """Convert to int; infinity if there are more digits than Python converts."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def _mooncake_record(line: bytes) -> tuple:
    record = parse_json(line)
    if not isinstance(record, dict):
        raise ValueError(f"must be a JSON object, got {reprlib.repr(record)}")
    values = [record.pop(field) for field in REQUIRED_FIELDS]
    further = {k: v for k, v in record.items() if isinstance(v, int | float | str | None)}
    return *values, further
