"""The code of a result: a finished cell is reused only while its code has not changed.

A cell depends on the files of the repository's modules that its process had imported at its end,
committed or not, and on the versions of PyTorch and Triton.  A worker that runs several cells may
have imported more than a cell needs; then the cell is rerun needlessly, but a stale result is never
kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
import time
from pathlib import Path

Code = dict[str, str | None]
"""SHA-256 of files of the repository, and versions of packages, by name.  None: unknown, since the
file changed while the process ran; it equals no other code."""

_REPOSITORY = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "triton")
_STARTED = time.time()
_imported: Code = {}


def imported_code() -> Code:
    """The code that this process has imported so far, each file as first seen."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path is None or not Path(path).is_relative_to(_REPOSITORY):
            continue
        name = Path(path).relative_to(_REPOSITORY).as_posix()
        if name not in _imported and not name.startswith("."):
            is_older = Path(path).stat().st_mtime < _STARTED
            _imported[name] = _digest(name) if is_older else None
    for package in _PACKAGES:
        if package in sys.modules:
            _imported[package] = _version(package)
    return dict(_imported)


class Changes:
    """Compares the code of earlier results with today's; each file is read once."""

    def __init__(self) -> None:
        self._now: Code = {}

    def since(self, code: Code) -> list[str]:
        """The files and packages of ``code`` that have changed."""
        for name in code:
            if name not in self._now:
                self._now[name] = _version(name) if name in _PACKAGES else _digest(name)
        return [name for name, was in code.items() if was is None or self._now[name] != was]


def _digest(name: str) -> str:
    try:
        return hashlib.sha256((_REPOSITORY / name).read_bytes()).hexdigest()
    except FileNotFoundError:
        return "no file"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
