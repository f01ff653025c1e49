"""Compiled replays are kept on disk, by the code of their priority."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from cache.replay.compiled import compile_replay


def evict_oldest(block):
    return block.accessed


def evict_newest(block):
    return -block.accessed


def hits(priority) -> int:
    """Hits of a loop over three blocks in a pool of two."""
    block_ids, offsets = np.arange(30) % 3, np.arange(31)
    replay = compile_replay(priority, has_own=False)
    facts, memory = np.zeros((30, 6)), np.zeros((3, 0))
    return replay(block_ids, offsets, 3, 2, False, facts, 0, None, memory)[0].sum()


@pytest.mark.parametrize(
    ("module", "files"), [("cache.policies.lru", [1, 1, 2]), ("own", [0])], ids=["built-in", "own"]
)
def test_a_built_in_policy_is_compiled_once_and_again_when_its_code_changes(
    module, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    kept = []
    for priority in (evict_oldest, evict_oldest, evict_newest)[: len(files)]:
        monkeypatch.setattr(priority, "__module__", module)
        monkeypatch.setattr(priority, "__qualname__", "LRU.priority")
        assert (hits(priority) == 0) == (priority is evict_oldest)
        kept.append(len([*tmp_path.rglob("*.nbc")]))
    assert kept == files
    monkeypatch.setattr(evict_newest, "__qualname__", "MRU.priority")
    hits(evict_newest)
    indices = [*tmp_path.rglob("*.nbi")]  # none is written for two policies at once
    assert len(indices) == 2 * (module != "own")
