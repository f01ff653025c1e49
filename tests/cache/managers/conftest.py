"""``--manager my_manager.py:Mine``: the contract of all managers, for a manager of one's own."""

import pytest

from cache import MANAGERS
from cache.managers import manager_class


def pytest_addoption(parser):
    parser.addoption("--manager", metavar="FILE:CLASS", help="only tests of this manager")


def pytest_configure(config):
    if own := config.getoption("--manager", None):
        try:
            MANAGERS[own] = manager_class(own)
        except ValueError as error:
            raise pytest.UsageError(f"--manager: {error}") from error


def pytest_collection_modifyitems(config, items):
    if own := config.getoption("--manager", None):
        # Not by the id: it escapes characters, and leaves out a text of more than 100.
        named = [item for item in items if hasattr(item, "callspec")]
        items[:] = [item for item in named if own in map(str, item.callspec.params.values())]
