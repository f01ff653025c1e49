"""The code of a result: a finished cell is reused only while its code has not changed.

A cell depends on the files of this repository that its process had imported at its end, committed
or not, and on the versions of PyTorch and Triton.  A worker that runs several cells may have
imported more than a cell needs.  Then the cell is rerun needlessly, but a stale result is never
kept.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

from experiments.harness.environment import REPOSITORY, version_of

Code = dict[str, str | None]
"""SHA-256 of files of the repository, and versions of packages, by name.  None: unknown, since the
file changed while the process ran.  None differs from any other code."""

_FOLDERS = ("cache/", "experiments/", "kernels/", "models/")
_PACKAGES = ("torch", "triton")
_STARTED = time.time()
_imported: Code = {}


def imported_code() -> Code:
    """The code that this process has imported so far, each file as first seen."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        name = path.removeprefix(f"{REPOSITORY}/")
        if name.startswith(_FOLDERS) and name not in _imported:
            is_older = os.stat(path).st_mtime < _STARTED
            _imported[name] = _now(name) if is_older else None
    _imported.update((package, _now(package)) for package in _PACKAGES if package in sys.modules)
    return dict(_imported)


class Changes:
    """Compares the code of earlier results with the code now.  Each file is read once."""

    def __init__(self) -> None:
        self._now: Code = {}

    def since(self, code: Code) -> list[str]:
        """The files and packages of ``code`` that have changed."""
        for name in code.keys() - self._now:
            self._now[name] = _now(name)
        return [name for name, was in code.items() if was is None or self._now[name] != was]


def _now(name: str) -> str:
    """The digest of a file, or the version of a package."""
    if name in _PACKAGES:
        return version_of(name) or "not installed"
    try:
        return hashlib.sha256((REPOSITORY / name).read_bytes()).hexdigest()
    except FileNotFoundError:
        return "no file"
