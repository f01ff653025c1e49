from __future__ import annotations

import os
import tempfile

import pytest

from experiments.harness.ray_cluster import private_folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"pagelab-{os.getuid()}"


def test_the_folder_is_private(home):
    before = os.umask(0)
    try:
        folder = private_folder("a")
    finally:
        os.umask(before)
    assert folder == home / "a"
    assert [path.stat().st_mode & 0o777 for path in (home, folder)] == [0o700, 0o700]
    assert private_folder("a") == folder


def test_a_folder_that_another_user_may_have_made_is_refused(home, tmp_path, monkeypatch):
    def refused(reason):
        with pytest.raises(PermissionError, match=reason):
            private_folder("a")

    home.symlink_to(tmp_path)
    refused("needs to be a folder, no link")
    home.unlink()
    home.mkdir(mode=0o755)
    refused(r"mode 755; needs user .* mode 700")
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    (tmp_path / f"pagelab-{uid + 1}").mkdir(mode=0o700)
    refused(f"belongs to user {uid}, .* needs user {uid + 1}")
