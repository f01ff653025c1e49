"""Runs experiments: the real command line in a process of its own, or a sweep in this one."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
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
            # Shells start background jobs, perhaps these tests, with interrupts ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The figures that a plot function would save, by name; none is written."""
    from experiments import style

    figures = {}

    def lay_out(figure, folder: Path, name: str) -> list[Path]:
        figure.draw_without_rendering()
        figures[name] = figure
        return [folder / f"{name}.png"]

    monkeypatch.setattr(style, "save", lay_out)
    return figures


@pytest.fixture
def timed_rows() -> Callable:
    """Made-up rows for the cells of a GPU experiment, to draw: timed_rows(cells, refused=())."""
    import pandas as pd

    def rows(cells, refused: tuple[str, ...] = ()) -> pd.DataFrame:
        table = []
        for index, cell in enumerate(cells):
            shape = cell.shape
            whole_pages = shape.block_size % 256 == 0
            paged_only = cell.implementation in ("flash_attn_2", "torch_flash")
            if cell.implementation in refused or (paged_only and not whole_pages):
                continue
            tokens = shape.batch * max(shape.context_len, shape.block_size)
            slower = 1.2 + 0.2 * (index % 7)
            num_bytes = 4096.0 * tokens
            p50 = 5 + slower * num_bytes / 3e6
            seconds = p50 * 1e-6
            flops = 16384.0 * tokens * shape.query_len
            table.append(
                {
                    **shape.columns(),
                    "implementation": cell.implementation,
                    "launch": "graph",
                    "bytes": num_bytes,
                    "flops": flops,
                    "p20_us": 0.95 * p50,
                    "p50_us": p50,
                    "p80_us": 1.1 * p50,
                    "peak_gb_per_s": 3000.0,
                    "peak_tflop_per_s": 700.0,
                    "gb_per_s": num_bytes / seconds / 1e9,
                    "bandwidth_fraction": num_bytes / seconds / 3e12,
                    "matmul_fraction": min(0.9, flops / seconds / 7e14),
                }
            )
        return pd.DataFrame(table)

    return rows
