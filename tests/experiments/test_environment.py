"""The environment that is recorded beside a table."""

import json
import os
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest

from experiments.harness import environment
from experiments.registry import EXPERIMENTS


def test_names_what_a_result_depends_on_and_files_without_their_folders():
    command = "pagelab run eviction --trace /data/a/chat.jsonl --out=/data/out --policy mine/p.py:M"
    described = environment.describe(EXPERIMENTS["eviction"], command.split())
    assert described["packages"]["numpy"] == __import__("numpy").__version__
    assert described["python"].startswith("3.")
    assert described["cpu"]["model"]
    assert described["cpu"]["cores"] >= described["cpu"]["usable_cores"] >= 1
    assert described["cpu"]["memory_gib"] > 0
    assert isinstance(described["gpu"], list)
    without_folders = "pagelab run eviction --trace chat.jsonl --out=out --policy p.py:M"
    assert described["command"] == without_folders
    for folder in (os.getcwd(), os.path.expanduser("~"), "/data"):
        assert folder not in str(described)


@pytest.mark.parametrize("driver", ["", "libcuda.so.1", "/dev/kfd", "/dev/dxg"])
def test_pytorch_is_asked_for_a_gpu_where_there_is_a_driver(driver, monkeypatch):
    monkeypatch.setattr(environment, "sys", Mock(modules={}))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("ctypes.CDLL", lambda name: name == driver or os.stat("/nowhere"))
    monkeypatch.setattr("os.path.exists", driver.__eq__)
    assert environment.cuda_available() is bool(driver)


RESULTS = Path(__file__).parents[2] / "results"
PUBLISHED = [*RESULTS.glob("*/*/environment.json"), *RESULTS.glob("unseen/*/*/environment.json")]


@pytest.mark.parametrize("path", sorted(PUBLISHED), ids=lambda path: path.parts[-3])
def test_published_tables_come_from_clean_commits(path):
    environment = json.loads(path.read_text())
    for run in (environment, *environment["earlier_runs"]):
        assert run["dirty"] is False, f"measure {path.parent} again from a clean commit"


@pytest.mark.parametrize("path", sorted(PUBLISHED), ids=lambda path: path.parts[-3])
def test_no_published_row_is_wrong_or_above_its_bound(path):
    rows = pd.read_csv(path.with_name("rows.csv"), low_memory=False)
    assert rows.get("passed", pd.Series(True)).dropna().all()
    if path.parts[-3] == "eviction_serving":
        assert rows["passed"].notna().all(), "hits above what can hit"
    if path.parts[-3] != "eviction":
        return
    for bound, at in {"infinite": ["trace"], "belady": ["trace", "capacity_fraction"]}.items():
        rows["most"] = rows["block_hit_rate"].where(rows["policy"] == bound)
        most = rows.groupby(at)["most"].transform("max").fillna(1)
        assert (rows["block_hit_rate"] <= most).all(), bound


@pytest.fixture
def repository(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", "code.py")
    git("commit", "--quiet", "--message", "first")
    monkeypatch.setattr(environment, "REPOSITORY", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "dirty"),
    [
        (None, False), ("results/rows.csv", False), ("my_policy.py", False), ("code.py", True),
        ("cache/new.py", True),
    ],
)  # fmt: skip
def test_dirty_is_a_tracked_file_but_results_or_a_new_file_of_a_package(repository, file, dirty):
    if file:
        (repository / file).parent.mkdir(exist_ok=True)
        (repository / file).write_text("changed\n")
    assert environment.describe(EXPERIMENTS["eviction"], [])["dirty"] is dirty


def test_without_a_repository_pagelab_commit_or_the_version_stands_for_the_commit(
    repository, monkeypatch
):
    installed = repository / "site-packages"  # in a repository of somebody else
    installed.mkdir()
    monkeypatch.setattr(environment, "REPOSITORY", installed)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "1.2")
    monkeypatch.delenv("PAGELAB_COMMIT", raising=False)
    assert environment._git_state() == ("none, version 1.2", None)
    monkeypatch.setenv("PAGELAB_COMMIT", "c0ffee")
    assert environment._git_state() == ("c0ffee", None)
    monkeypatch.setattr(environment, "REPOSITORY", repository)
    assert environment._git_state() == ("c0ffee", None)  # HEAD is another commit
