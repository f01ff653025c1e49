"""The folder of one sweep: finished cells, the lock, and the files assembled from the cells.

    rows.csv, environment.json, figures   assembled, each replaced in one step
    sweep.log                             log, appended to; not for the repository
    .cells/<cell id>.json                 one finished cell, with the environment of its run
    .cells/lock                           held by the running sweep

A file gets its name only when it is complete, so a sweep may be killed at any time.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class FolderInUse(RuntimeError):
    """Another sweep is writing to the folder."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file at ``path`` in one step.  Raises OSError with ``path`` in its message."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if isinstance(content, str):
            content = content.encode(errors="surrogateescape")  # names from the command line
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:  # the error of a full disk has no name
        raise OSError(error.errno, error.strerror, str(path)) from error


class Store:
    """The files of a sweep in ``folder``.  The folder is created if it does not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cells = folder / ".cells"
        self._cells.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder.  Raises FolderInUse, with the holder, if another sweep holds the lock.

        The kernel releases the lock when the process ends.
        """
        with (self._cells / "lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read() or "one that is just starting"
                raise FolderInUse(
                    f"another sweep is writing to {self.folder}: {holder}. "
                    "Wait for it, or write elsewhere with --out"
                ) from None
            started = datetime.now(UTC).isoformat(timespec="seconds")
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()} since {started}")
            lock.flush()
            for leftover in self.folder.rglob(".*.tmp"):  # left by a killed sweep
                leftover.unlink()
            try:
                yield
            finally:
                lock.truncate(0)

    def load_cell(self, cell_id: str) -> dict[str, Any] | None:
        """The record of a finished cell.  None if there is no record.

        Raises ValueError, with the file, if the record is damaged or from an earlier version.
        """
        path = self._cells / f"{cell_id}.json"
        try:
            record = json.loads(path.read_bytes())
            record["rows"], record["code"].keys(), record["run"]["commit"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from error
        return record

    def save_cell(self, cell_id: str, record: dict[str, Any]) -> None:
        """Store a finished cell: "rows", their "code" and the environment of the "run"."""
        write_atomically(self._cells / f"{cell_id}.json", json.dumps(record))

    def discard_cell(self, cell_id: str) -> None:
        (self._cells / f"{cell_id}.json").unlink(missing_ok=True)

    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        """Write rows.csv: columns in order of first appearance, numbers with all digits."""
        columns = dict.fromkeys(column for row in rows for column in row)
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.folder / "rows.csv", text.getvalue())

    def write_environment(self, environment: dict[str, Any]) -> None:
        text = json.dumps(environment, indent=2, ensure_ascii=False)
        write_atomically(self.folder / "environment.json", text + "\n")
