"""Managers of a user's own: a class, or named as file.py:Class."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cache import CacheManager, make_manager
from cache.managers.paged import Paged

ROOT = Path(__file__).parents[3]
OWN = """
from cache import CacheManager
from cache.managers.paged import Paged

class Unfinished(CacheManager):
    pass

class NeedsSize(Paged):
    def __init__(self, options, *, size):
        super().__init__(options)

class Raises(Paged):
    def __init__(self, options):
        {}["x"]

class Empty(Paged):
    def __init__(self, options):
        pass

class Leaks(Paged):
    def _release(self, table):
        self._free.extend(table.blocks[1:])
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with own.py, and the manager of docs/extending.md."""
    page = (ROOT / "docs/extending.md").read_text()
    (folder := tmp_path / "é [x] {0} %s".ljust(101)).mkdir()
    (folder / "own.py").write_text(OWN)
    (folder / "my_manager.py").write_text(re.search("# my_manager.py\n(.*?)```", page, re.S)[1])
    return folder


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none.py:Mine", "there is no file"),
        ("own.py:Mine", "own.py has no cache manager class Mine; it defines Unfinished, NeedsSize"),
        ("own.py:Unfinished", "Unfinished does not define _extend, _release, num_free_blocks"),
        ("own.py:NeedsSize", "'NeedsSize' cannot be made: TypeError: .* missing 1 .* 'size'"),
        ("own.py:Raises", "'Raises' cannot be made: KeyError: 'x'"),
        ("own.py:Empty", r"'Empty': __init__ must call super\(\).__init__\(options\)"),
        (CacheManager, "CacheManager does not define _extend"),
        (type("Forks", (Paged,), {"can_fork": True}), "can_fork is True, so define _share"),
        (type("Caches", (Paged,), {"prefix_caching": True}), "_caching is True, so define _match"),
        (dict, r"<class 'dict'> is unknown; choose from .*or give a class of your own"),
        (make_manager("paged", num_blocks=8, block_size=4), r"=Paged\(num_blocks=8.* its class"),
    ],
)
def test_a_class_that_is_no_manager_is_refused(folder, name, says):
    name = str(folder / name) if isinstance(name, str) else name
    with pytest.raises(ValueError, match=f"^manager.*{says}"):
        make_manager(name, num_blocks=8, block_size=4)


@pytest.mark.parametrize(
    ("own", "status"), [("my_manager.py:LowestFirst", 0), ("own.py:Leaks", 1), ("own.py:X", 4)]
)
def test_the_contract_of_all_managers_tests_it(folder, own, status):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["tests/cache/managers/test_contract.py", "--manager", folder / own]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("6 passed" in done.stdout) == (status == 0)
