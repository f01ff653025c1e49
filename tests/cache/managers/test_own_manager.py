"""Managers of a user's own: a class, or named as file.py:Class."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cache import CacheManager, Sequence, make_manager
from cache.managers import manager_class

ROOT = Path(__file__).parents[3]
EXAMPLE = f"{ROOT / 'docs/examples/my_manager.py'}:LowestFirst"
OWN = """
from cache import CacheManager
from cache.managers.paged import Paged

class Unfinished(CacheManager):
    pass

class Forks(Paged):
    can_fork = True

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
def own_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize("own", [EXAMPLE, manager_class(EXAMPLE)], ids=["file", "class"])
def test_lowest_free_blocks_come_first(own):
    manager = make_manager(own, num_blocks=8, block_size=4)
    assert manager.name == "LowestFirst"
    assert Path(EXAMPLE.partition(":")[0]).read_text() in (ROOT / "docs/extending.md").read_text()
    first, second, third = (Sequence(i, range(9)) for i in range(3))
    manager.allocate(first)
    manager.allocate(second)
    manager.free(first)
    manager.allocate(third)
    assert manager.block_table(third) == [0, 1, 2]
    with pytest.raises(ValueError, match="'LowestFirst' has no option size; its options: none"):
        make_manager(own, num_blocks=8, block_size=4, size=3)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none.py:Mine", "there is no file"),
        ("own.py:Mine", "own.py has no cache manager class Mine; it defines Unfinished, Forks"),
        ("own.py:Unfinished", "Unfinished does not define _extend, _release, num_free_blocks"),
        ("own.py:Forks", "can_fork is True, so define _share"),
        ("own.py:NeedsSize", "'NeedsSize' cannot be made: TypeError: .* missing 1 .* 'size'"),
        ("own.py:Raises", "'Raises' cannot be made: KeyError: 'x'"),
        ("own.py:Empty", r"'Empty': __init__ must call super\(\).__init__\(options\)"),
        (CacheManager, "CacheManager does not define _extend"),
        (dict, r"<class 'dict'> is unknown; choose from .*or give a class of your own"),
    ],
)
def test_a_class_that_is_no_manager_is_refused(own_file, name, says):
    name = str(own_file.parent / name) if isinstance(name, str) else name
    with pytest.raises(ValueError, match=f"^manager.*{says}"):
        make_manager(name, num_blocks=8, block_size=4)


def test_an_object_is_refused():
    manager = make_manager("paged", num_blocks=8, block_size=4)
    with pytest.raises(ValueError, match=re.escape(f"manager={manager!r}: needs its class")):
        make_manager(manager, num_blocks=8, block_size=4)


@pytest.mark.parametrize(("own", "status"), [(EXAMPLE, 0), ("{file}:Leaks", 1), ("{file}:X", 4)])
def test_the_contract_of_all_managers_tests_it(own_file, own, status):
    own = own.format(file=own_file)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    contract = ROOT / "tests/cache/managers/test_contract.py"
    done = subprocess.run([*command, contract, "--manager", own], capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("6 passed" in done.stdout) == (status == 0)
