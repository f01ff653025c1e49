"""Runs all kernel tests and the mutants on the PTX of each architecture (`-m executor`)."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.executor, pytest.mark.timeout(6 * 3600)]
FOLDER = Path(__file__).parent
MODULES = (
    *sorted(path.name for path in FOLDER.parent.glob("test_*.py")),
    "executor/test_mutants.py",
)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_module(architecture, module, run_without_interpreter):
    tests = str(FOLDER.parent / module)
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "3600"]
    run_without_interpreter("-m", "pytest", tests, "--executor", f"ptx-{architecture}", *options)
