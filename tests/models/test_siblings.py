"""Folders beside a script that have the name of a package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("importing", "name", "file"),
    [("models", "cache", "__init__.py"), ("models", "kernels", "__init__.py"),
     ("experiments", "models", "__init__.py"), ("experiments", "models", "a.safetensors")],
)  # fmt: skip
def test_a_package_that_is_hidden_is_named(importing, name, file, tmp_path):
    """By a package of a script's folder, not by a folder without __init__.py."""
    (tmp_path / name).mkdir()
    (tmp_path / name / file).touch()
    (tmp_path / "script.py").write_text(f"import {importing}")
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if file == "__init__.py":
        found = f"ImportError: {name}: Python finds {tmp_path / name / file}, which hides the "
        assert f"{found}package in {ROOT / name}; rename it" in done.stderr
    else:
        assert not done.stderr
