"""The folder of one sweep: finished cells, the lock, and what is assembled from them.

    rows.csv, environment.json, figures   assembled, each replaced in one step
    sweep.log                             what happened, appended to; not for the repository
    .cells/<cell id>.json                 one finished cell
    .cells/runs/<run id>.json             the environment of one run of the sweep
    .cells/lock                           held by the running sweep

A file appears under its name only when it is whole, so a sweep may be killed at any instruction.
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
    """Replace ``path`` by ``content`` in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)


class Store:
    """Files of the sweep in ``folder``, which is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cells = folder / ".cells"
        self._runs = self._cells / "runs"
        self._runs.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other sweep out; FolderInUse, naming the holder, if one is in.

        The lock is the kernel's: it ends with the process, however that ends.
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
            self._remove_leftovers()
            try:
                yield
            finally:
                lock.truncate(0)

    def _remove_leftovers(self) -> None:
        """Files that a killed sweep had not finished writing."""
        for folder, pattern in (
            (self._cells, ".*.tmp"),
            (self._runs, ".*.tmp"),
            (self.folder, ".rows.csv.*.tmp"),
            (self.folder, ".environment.json.*.tmp"),
        ):
            for leftover in folder.glob(pattern):
                leftover.unlink()

    def load_cell(self, cell_id: str) -> dict[str, Any] | None:
        """What ``save_cell`` stored, or None."""
        try:
            return json.loads((self._cells / f"{cell_id}.json").read_bytes())
        except FileNotFoundError:
            return None

    def save_cell(self, cell_id: str, record: dict[str, Any]) -> None:
        write_atomically(self._cells / f"{cell_id}.json", json.dumps(record))

    def discard_cell(self, cell_id: str) -> None:
        (self._cells / f"{cell_id}.json").unlink(missing_ok=True)

    def load_run(self, run_id: str) -> dict[str, Any]:
        return json.loads((self._runs / f"{run_id}.json").read_bytes())

    def save_run(self, run_id: str, environment: dict[str, Any]) -> None:
        write_atomically(self._runs / f"{run_id}.json", json.dumps(environment))

    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        """rows.csv: the columns in order of appearance, numbers with every digit."""
        columns = dict.fromkeys(column for row in rows for column in row)
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.folder / "rows.csv", text.getvalue())

    def write_environment(self, environment: dict[str, Any]) -> None:
        text = json.dumps(environment, indent=2, ensure_ascii=False)
        write_atomically(self.folder / "environment.json", text + "\n")
