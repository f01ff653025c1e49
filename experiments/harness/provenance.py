"""The code that a result depends on.  A finished cell is reused until this code changes.

A cell depends on the versions of PyTorch and Triton and on all files of this repository, committed
or not, that its process had imported when the cell ended.  A worker that runs several cells may
import more files than a cell needs.  Then a cell may be rerun needlessly, but no stale result is
reused.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

from experiments.harness.environment import PACKAGES, REPOSITORY, version_of

Code = dict[str, str | None]
"""Maps a file of the repository to its SHA-256, and a package to its version.  None means unknown:
the file changed while the process ran.  None never equals the present code."""

_INSTALLED = ("torch", "triton")
_STARTED = time.time()
_imported: Code = {}


def imported_code() -> Code:
    """The code that this process has imported so far.  Each file is read only once."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        name = path.removeprefix(f"{REPOSITORY}/")
        if name.startswith(PACKAGES) and name not in _imported:
            is_older = os.stat(path).st_mtime < _STARTED
            _imported[name] = present(name) if is_older else None
    _imported.update((name, present(name)) for name in _INSTALLED if name in sys.modules)
    return dict(_imported)


def present(name: str) -> str:
    """The present digest of a file, or version of a package."""
    if name in _INSTALLED:
        return version_of(name) or "not installed"
    try:
        return hashlib.sha256((REPOSITORY / name).read_bytes()).hexdigest()
    except FileNotFoundError:
        return "no file"
