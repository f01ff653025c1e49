"""Folders in the temporary directory that nobody else can read or has made beforehand."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def private_folder(name: str) -> Path:
    """The folder ``name`` of this user, with mode 0700; the same at every call.

    Raises PermissionError if somebody else may own or change it.
    """
    home = Path(tempfile.gettempdir()) / f"pagelab-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    status = home.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{home}: needs to be a folder, no link")
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{home}: belongs to user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}; "
            f"needs user {os.getuid()}, mode 700"
        )
    folder = home / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
