"""Compiled replays are kept on disk, by the code of all built-in policies."""

import functools
import pickle
import shutil
from pathlib import Path

import numba
import pytest

import cache
from cache.policies.lru import LRU
from cache.replay import compiled, operations
from tests.cache.prefix_traces import trace_of


def insert(self, block, key, parent, depth):
    pass


@pytest.mark.parametrize(
    ("module", "files"),
    [("cache.policies.lru", [1, 1, 2, 3]), ("own", [0])],
    ids=["built-in", "own"],
)
def test_a_built_in_policy_is_compiled_once_and_again_when_code_changes(
    module, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(insert, "__module__", module)
    monkeypatch.setitem(compiled._LRU, "insert", insert)
    kept = []
    for name, digest in (("Own", "a"), ("Own", "a"), ("Own", "b"), ("Other", "b"))[: len(files)]:
        monkeypatch.setattr(operations, "_RUNS", {})
        monkeypatch.setattr(operations, "_digest", lambda digest=digest: digest)
        register = functools.cache(operations._register.__wrapped__)  # with keys of this digest
        monkeypatch.setattr(operations, "_register", register)
        policy = type(name, (LRU,), {})()
        assert cache.simulate(trace_of([(0,)] * 3), policy=policy, capacity_blocks=2).compiled
        kept.append(len([*tmp_path.rglob("*.nbc")]))
    assert kept == files
    indices = [*tmp_path.rglob("*.nbi")]  # none is written for two policies at once
    assert len(indices) == 2 * (module != "own")


@pytest.mark.filterwarnings("error")
def test_what_is_kept_but_cannot_be_read_is_compiled_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    for kind in ("nbi", "nbc", "nbi"):
        monkeypatch.setattr(operations, "_RUNS", {})
        assert cache.simulate(trace_of([(0,)] * 3), policy="lru", capacity_blocks=2).compiled
        (kept,) = tmp_path.rglob(f"*.lru-*.{kind}")
        whole = kept.read_bytes()
        # Of a class that is no longer there.
        version = len(pickle.dumps(numba.__version__, -1)) if kind == "nbi" else 0
        kept.write_bytes(whole[:version] + b"ccache.policies.base\nRequest\n.")


@pytest.mark.parametrize("file", ["policies/classes.py", "policies/lru.py", "replay/operations.py"])
def test_a_change_of_any_file_changes_the_code_that_is_kept(file, tmp_path, monkeypatch):
    before, copied = operations._digest.__wrapped__(), tmp_path / "cache"
    shutil.copytree(Path(cache.__file__).parent, copied)
    monkeypatch.setattr(cache, "__file__", str(copied / "__init__.py"))
    assert operations._digest.__wrapped__() == before
    (copied / file).write_bytes((copied / file).read_bytes() + b"#")
    assert operations._digest.__wrapped__() != before
