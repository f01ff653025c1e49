"""Sweeps that are killed, with real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest


def wait_for(condition: Callable[[], bool], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # A process that is dead but not yet waited for is not running.
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_a_killed_sweep_goes_on_where_it_stopped(command_line, journal, tmp_path, signal_number):
    folder = tmp_path / "results" / "tiny" / "cpu"
    run = ("run", "tiny", "--cells", 6, "--groups", 6, "--jobs", 2)
    stored = lambda: {path.name for path in folder.glob(".cells/*.json")}  # noqa: E731

    process = command_line.start(*run, tiny={"journal": str(tmp_path / "journal"), "sleep": 1.5})
    wait_for(lambda: len(stored()) >= 2)
    process.send_signal(signal_number)
    process.communicate(timeout=600)
    assert process.returncode == (-9 if signal_number == signal.SIGKILL else 130)
    finished = stored()
    begun = journal()
    assert 2 <= len(finished) < 6
    workers = [int(line.split()[1]) for line in (tmp_path / "journal").read_text().splitlines()]
    wait_for(lambda: not any(map(alive, workers)), 10)
    assert stored() == finished, "nobody writes after the sweep's end"

    times = {name: (folder / ".cells" / name).stat().st_mtime_ns for name in finished}
    output = command_line(*run, tiny={"journal": str(tmp_path / "journal")}).stdout
    assert f"{6 - len(finished)} run, {len(finished)} finished earlier" in output
    assert {n: (folder / ".cells" / n).stat().st_mtime_ns for n in finished} == times
    # Only cells that were under way may have begun twice.
    assert set(journal()) == set(range(6))
    assert sum(journal().values()) - 6 == sum(begun.values()) - len(finished) <= 2
    assert list(pd.read_csv(folder / "rows.csv")["number"]) == [n for n in range(6) for _ in "ab"]
