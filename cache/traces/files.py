"""The file formats of request traces: compressed streams, lines and records.

Two formats are read, plain, gzipped (``.gz``) or zstandard-compressed (``.zst``):

- JSON lines (``.jsonl``), the format of the traces published with Mooncake (FAST'25): an object a
  line with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``;
- CSV (``.csv``), the format of Azure's LLM inference traces (2023 and 2024): ``TIMESTAMP``,
  ``ContextTokens``, ``GeneratedTokens``.  Lengths only.

This module reads files; ``cache.traces.trace`` checks requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import reprlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import BinaryIO

COMPRESSIONS = (".gz", ".zst")
FORMATS = (".jsonl", ".csv")

MAX_LINE_BYTES = 1 << 24
"""A longer line is an error: what a request takes in memory is bounded, whatever the file says."""

_CHUNK_BYTES = 1 << 20
_COMPRESSED_CHUNK_BYTES = 256
"""Zstandard can say 128 KiB in 4 bytes: this much at once is at most 8 MiB."""
_MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A trace file that cannot be read: ``path``, ``line`` (from 1) and ``reason``."""

    def __init__(self, path: str | os.PathLike, line: int, reason: str):
        super().__init__(path, line, reason)
        self.path, self.line, self.reason = path, line, reason

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def split_suffixes(path: Path) -> tuple[str, str | None, str | None]:
    """``(name, format, compression)`` of a path; None for what its extensions leave open."""
    name, compression, file_format = path.name, None, None
    if path.suffix.lower() in COMPRESSIONS:
        compression = path.suffix.lower()
        name = name[: -len(compression)]
    suffix = Path(name).suffix.lower()
    if suffix in FORMATS:
        file_format = suffix
        name = name[: -len(suffix)]
    return name, file_format, compression


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a trace file that are not blank, decompressed, with their numbers from 1.

    Raises TraceError for an unknown extension, a broken stream and a line of more than
    ``MAX_LINE_BYTES``; OSError for a file that cannot be opened.
    """
    _, file_format, compression = split_suffixes(path)
    if file_format is None and compression is None:
        raise TraceError(
            path, 1, f"unknown extension {path.suffix!r}; known: {_known_extensions(FORMATS)}"
        )
    number, line = 1, bytearray()
    with open(path, "rb") as file:
        try:
            for chunk in _chunks(file, compression):
                pieces = chunk.split(b"\n")
                line += pieces[0]
                if len(line) > MAX_LINE_BYTES:
                    raise _Unreadable(f"a line of more than {MAX_LINE_BYTES:,} bytes")
                if len(pieces) == 1:
                    continue
                pieces[0], line = bytes(line), bytearray(pieces.pop())
                for text in pieces:
                    if text and not text.isspace():
                        yield number, text
                    number += 1
        except _Unreadable as error:
            raise TraceError(path, number, str(error)) from None
    if line.strip():
        yield number, bytes(line)


class RecordParser:
    """Parses the lines of one file in order.

    A call gives ``(timestamp_ms, input_length, output_length, hash_ids)``, or None for the header
    of a CSV file.  With ``file_format`` None the first line decides.  Further fields are ignored.
    Values come as the file has them, unchecked; CSV timestamps become milliseconds since the first
    row (precise to 1 us) and ``hash_ids`` ().  Raises ValueError for a line that does not parse,
    a missing field and a negative timestamp in JSON.
    """

    def __init__(self, file_format: str | None):
        self._format = file_format
        self._columns: list[str] | None = None
        self._start: datetime | None = None

    def __call__(self, line: bytes) -> tuple | None:
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 text: {error.reason} at byte {error.start + 1}") from None
        if self._format is None:
            self._format = ".jsonl" if text.lstrip().startswith("{") else ".csv"
        if self._format == ".jsonl":
            return _mooncake_record(text)
        cells = [cell.strip() for cell in text.split(",")]
        if self._columns is None:
            self._columns = cells
            missing = [field for field in _AZURE_FIELDS if field not in cells]
            if missing:
                raise ValueError(
                    f"a CSV trace starts with a header that names {', '.join(_AZURE_FIELDS)}; "
                    f"missing {', '.join(missing)} in {reprlib.repr(','.join(cells))}"
                )
            return None
        return self._azure_record(cells)

    def _azure_record(self, cells: list[str]) -> tuple:
        if len(cells) != len(self._columns):
            raise ValueError(f"needs {len(self._columns)} columns, got {len(cells)}")
        row = dict(zip(self._columns, cells, strict=True))
        when, *lengths = (row[field] for field in _AZURE_FIELDS)
        try:
            moment = datetime.fromisoformat(when)
        except ValueError:
            raise ValueError(
                f"TIMESTAMP must be a date and time, got {reprlib.repr(when)}"
            ) from None
        for field, length in zip(_AZURE_FIELDS[1:], lengths, strict=True):
            if not re.fullmatch("-?[0-9]+", length):
                raise ValueError(f"{field} must be an integer, got {reprlib.repr(length)}")
        # The 2024 files carry a time zone, the 2023 files do not: taken as UTC.
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        self._start = self._start or moment
        return (moment - self._start) / timedelta(milliseconds=1), *map(int, lengths), ()


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines of text, compressed as the extension says; the same lines give the same bytes.

    ``path`` is replaced when everything is written; a failure leaves what was there untouched.
    Raises ValueError for an extension other than ``.jsonl``, ``.jsonl.gz`` and ``.jsonl.zst``.
    """
    _, file_format, compression = split_suffixes(path)
    if file_format != ".jsonl":
        raise ValueError(
            f"path must end in {_known_extensions(('.jsonl',))} to be written, got {path.name!r}"
        )
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "xb") as file, _compressed(file, compression) as stream:
            for line in lines:
                stream.write(line.encode() + b"\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _known_extensions(formats: tuple[str, ...]) -> str:
    return ", ".join(form + compression for form in formats for compression in ("", *COMPRESSIONS))


def _compressed(file: BinaryIO, compression: str | None):
    if compression == ".gz":
        import gzip

        return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
    if compression == ".zst":
        import zstandard

        compressor = zstandard.ZstdCompressor(level=10, write_checksum=True)
        return compressor.stream_writer(file, closefd=False)
    return contextlib.nullcontext(file)


class _Unreadable(Exception):
    pass


def _chunks(file: BinaryIO, compression: str | None) -> Iterator[bytes]:
    """The content of ``file``.

    The frames of a compressed file (gzip calls them members) are followed here: zstandard's own
    reader takes a truncated file for a complete one.
    """
    if compression is None:
        yield from iter(partial(file.read, _CHUNK_BYTES), b"")
        return
    if compression == ".gz":
        import zlib

        new_frame = partial(zlib.decompressobj, 16 + zlib.MAX_WBITS)
        kind, broken = "gzip", zlib.error
    else:
        import zstandard

        new_frame = zstandard.ZstdDecompressor().decompressobj
        kind, broken = "zstandard", zstandard.ZstdError
    frame, padding = None, b""
    while data := file.read(_COMPRESSED_CHUNK_BYTES):
        while frame is not None or (data := data.lstrip(padding)):
            frame = frame or new_frame()
            try:
                yield frame.decompress(data)
            except broken as error:
                raise _Unreadable(f"corrupt {kind} stream: {error}") from None
            if not frame.eof:
                break
            data, frame = frame.unused_data, None
            padding = b"\0" if kind == "gzip" else b""  # of tapes and archives
    if frame is not None:
        raise _Unreadable(f"truncated {kind} stream: the file ends too early")


def _mooncake_record(text: str) -> tuple:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict):
        raise ValueError(f"must be a JSON object, got {reprlib.repr(record)}")
    try:
        values = tuple([record[field] for field in _MOONCAKE_FIELDS])
    except KeyError as error:
        raise ValueError(f"missing field {error.args[0]!r}") from None
    if isinstance(values[0], int | float) and values[0] < 0:
        raise ValueError(f"timestamp must be at least 0, got {values[0]}")
    return values
