"""The new op of docs/examples/clip_rows.diff, five files, takes part in the tests of every op."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a Python command in a copy of the repository to which the diff was applied."""
    copy = tmp_path_factory.mktemp("new_op")
    for name in ("cache", "experiments", "kernels", "models", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    env = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    env |= {"PYTHONPATH": str(copy), "GIT_CEILING_DIRECTORIES": str(copy.parent)}
    in_copy = partial(subprocess.run, cwd=copy, env=env, capture_output=True, text=True)
    in_copy(["git", "apply", ROOT / "docs" / "examples" / "clip_rows.diff"], check=True)

    def run_python(*arguments):
        done = in_copy([sys.executable, "-m", *arguments])
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run_python


@pytest.mark.parametrize(
    ("files", "options"),
    [
        ("test_contract test_bad_input test_cases test_launch test_compile", ()),
        ("executor/test_ops", ("--all", "--executor", "ptx-sm_90")),
    ],
    ids=["contract, bad input, compilation", "executed PTX"],
)
def test_every_test_of_ops_includes_it(run, tmp_path, files, options):
    names = [f"tests/kernels/{name}.py" for name in files.split()]
    options += "-v", "-k", "clip_rows", "--basetemp", str(tmp_path / "child")
    passed = re.findall(r"^(\S+)::.*clip_rows.* PASSED", run("pytest", *options, *names), re.M)
    assert {*passed} == {*names}


def test_pagelab_checks_it(run):
    assert run("experiments", "check", "kernels/clip_rows.py").endswith("3 results, all within\n")
