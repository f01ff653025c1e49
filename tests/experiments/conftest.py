"""Runs experiments: the real command line in a process of its own, or a sweep in this one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TINY = Path(__file__).with_name("tiny_experiment.py")


class CommandLine:
    """``python -m experiments`` and the same with the tiny experiment, run in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "TRACES_DIR"},
            "PYTHONPATH": str(REPOSITORY),
        }

    def start(self, *arguments: object, tiny: dict | None = None) -> subprocess.Popen:
        program = ["-m", "experiments"] if tiny is None else [TINY]
        return subprocess.Popen(
            [sys.executable, *program, *map(str, arguments)],
            cwd=self.folder,
            env={**self.environment, "TINY_BEHAVIOUR": json.dumps(tiny or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self, *arguments: object, tiny: dict | None = None, status: int = 0
    ) -> subprocess.CompletedProcess:
        process = self.start(*arguments, tiny=tiny)
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == status, stdout + stderr
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


@pytest.fixture(scope="session")
def tiny():
    """The module of the tiny experiment, importable by worker processes under its name."""
    spec = importlib.util.spec_from_file_location("tiny_experiment", TINY)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_experiment"] = module
    sys.path.append(str(TINY.parent))
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(TINY.parent))


@pytest.fixture
def journal(tmp_path: Path) -> Callable[[], Counter[int]]:
    """How often each tiny cell was run with ``{"journal": str(tmp_path / "journal")}``."""

    def read() -> Counter[int]:
        path = tmp_path / "journal"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(int(line.split()[0]) for line in lines)

    return read
