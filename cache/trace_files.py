"""The file formats of request traces: compressed streams, lines and records.

Two formats are read, plain, gzipped (``.gz``) or zstandard-compressed (``.zst``):

- JSON lines (``.jsonl``), the format of the traces published with Mooncake (FAST'25): an object a
  line with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``;
- CSV (``.csv``), the format of Azure's LLM inference traces (2023 and 2024): ``TIMESTAMP``,
  ``ContextTokens``, ``GeneratedTokens``.  Lengths only.

This module knows files, ``cache.trace`` knows what a valid request is.
"""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

COMPRESSIONS = (".gz", ".zst")
FORMATS = (".jsonl", ".csv")

_CHUNK_BYTES = 1 << 20
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


def read_records(path: Path) -> Iterator[tuple[int, tuple]]:
    """Yield ``(line, (timestamp_ms, input_length, output_length, hash_ids))`` in file order.

    The format is the extension's; a file named only ``.gz`` or ``.zst`` is told by its first line.
    Blank lines are skipped, further fields ignored.  Values come as the file has them, unchecked.
    CSV timestamps become milliseconds since the first row (precise to 1 us) and ``hash_ids`` ().

    Raises TraceError for an unknown extension, a broken stream, a line that does not parse and a
    missing field; OSError for a file that cannot be opened.
    """
    _, file_format, compression = split_suffixes(path)
    if file_format is None and compression is None:
        raise TraceError(
            path, 1, f"unknown extension {path.suffix!r}; known: {_known_extensions(FORMATS)}"
        )
    lines = _lines(path, compression)
    first = next(lines, None)
    if first is None:
        raise TraceError(path, 1, "the file is empty")
    if file_format is None:
        file_format = ".jsonl" if first[1].lstrip().startswith(b"{") else ".csv"

    if file_format == ".jsonl":
        parse = _parse_mooncake
        yield first[0], _located(path, first, parse)
    else:
        parse = _located(path, first, _azure_parser)
    for line in lines:
        yield line[0], _located(path, line, parse)


@contextlib.contextmanager
def write_lines(path: Path):
    """A context whose value writes one line of text; ``path`` is replaced when it ends well.

    Compressed as the extension says; the same lines give the same bytes.  A failure leaves what
    was at ``path`` untouched.  Raises ValueError for an extension other than ``.jsonl``,
    ``.jsonl.gz`` and ``.jsonl.zst``.
    """
    _, file_format, compression = split_suffixes(path)
    if file_format != ".jsonl":
        raise ValueError(
            f"path must end in {_known_extensions(('.jsonl',))} to be written, got {path.name!r}"
        )
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(open(temporary, "xb"))
            if compression == ".gz":
                import gzip

                stream = stack.enter_context(
                    gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0)
                )
            elif compression == ".zst":
                import zstandard

                compressor = zstandard.ZstdCompressor(level=10, write_checksum=True)
                stream = stack.enter_context(compressor.stream_writer(stream, closefd=False))
            yield lambda text: stream.write(text.encode() + b"\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _known_extensions(formats: tuple[str, ...]) -> str:
    return ", ".join(form + compression for form in formats for compression in ("", *COMPRESSIONS))


def _lines(path: Path, compression: str | None) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1."""
    number = 0
    rest = b""
    try:
        for chunk in _chunks(path, compression):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                number += 1
                if line and not line.isspace():
                    yield number, line
    except _BrokenStream as error:
        raise TraceError(path, number + 1, str(error)) from error.__cause__
    if rest and not rest.isspace():
        yield number + 1, rest


class _BrokenStream(Exception):
    pass


def _chunks(path: Path, compression: str | None) -> Iterator[bytes]:
    with open(path, "rb") as file:
        if compression == ".gz":
            yield from _gzip_chunks(file)
        elif compression == ".zst":
            yield from _zstandard_chunks(file)
        else:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk


def _gzip_chunks(file) -> Iterator[bytes]:
    import gzip
    import zlib

    with gzip.GzipFile(fileobj=file) as stream:
        while True:
            try:
                chunk = stream.read(_CHUNK_BYTES)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise _BrokenStream(f"corrupt or truncated gzip stream: {error}") from error
            if not chunk:
                return
            yield chunk


def _zstandard_chunks(file) -> Iterator[bytes]:
    # zstandard's own stream reader takes a truncated file for a complete one, so the frames (a
    # file may have several) are followed here.
    import zstandard

    decompressor = zstandard.ZstdDecompressor()
    frame = None
    while data := file.read(_CHUNK_BYTES):
        while data:
            frame = frame or decompressor.decompressobj()
            try:
                chunk = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise _BrokenStream(f"corrupt zstandard stream: {error}") from error
            data = b""
            if frame.eof:
                data, frame = frame.unused_data, None
            if chunk:
                yield chunk
    if frame is not None:
        raise _BrokenStream("truncated zstandard stream: the file ends inside a frame")


def _located(path: Path, line: tuple[int, bytes], parse):
    """``parse`` of the line, its ValueError turned into a TraceError that says where."""
    number, text = line
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(path, number, str(error)) from None


def _parse_mooncake(line: bytes) -> tuple:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error.reason} at byte {error.start + 1}") from None
    if not isinstance(record, dict):
        raise ValueError(f"must be a JSON object, got {reprlib.repr(record)}")
    try:
        return tuple([record[field] for field in _MOONCAKE_FIELDS])
    except KeyError as error:
        raise ValueError(f"missing field {error.args[0]!r}") from None


def _azure_parser(header: bytes):
    """The parser of the rows below ``header``; timestamps count from the first row parsed."""
    columns = _cells(header)
    missing = [field for field in _AZURE_FIELDS if field not in columns]
    if missing:
        raise ValueError(
            f"a CSV trace starts with a header that names {', '.join(_AZURE_FIELDS)}; "
            f"missing {', '.join(missing)} in {reprlib.repr(','.join(columns))}"
        )
    indices = [columns.index(field) for field in _AZURE_FIELDS]
    start = None

    def parse(line: bytes) -> tuple:
        nonlocal start
        cells = _cells(line)
        if len(cells) != len(columns):
            raise ValueError(f"needs {len(columns)} columns, got {len(cells)}")
        when, context_tokens, generated_tokens = (cells[index] for index in indices)
        moment = _moment(when)
        input_length = _integer("ContextTokens", context_tokens)
        output_length = _integer("GeneratedTokens", generated_tokens)
        start = start or moment
        return (moment - start) / timedelta(milliseconds=1), input_length, output_length, ()

    return parse


def _cells(line: bytes) -> list[str]:
    try:
        return [cell.strip() for cell in line.decode("utf-8-sig").split(",")]
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error.reason} at byte {error.start + 1}") from None


def _moment(text: str) -> datetime:
    """The 2024 files carry a time zone, the 2023 files do not: taken as UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"TIMESTAMP must be a date and time, got {reprlib.repr(text)}") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _integer(field: str, text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{field} must be an integer, got {reprlib.repr(text)}")
    return int(text)
