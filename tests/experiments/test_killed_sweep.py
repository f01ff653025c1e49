"""A sweep that is killed, with real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd

TINY = Path(__file__).with_name("tiny_experiment.py")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
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


def test_a_killed_sweep_continues_where_it_stopped(journal, tmp_path, request):
    """Interrupted, then killed, then run to the end; in a folder é, in an ASCII locale."""
    folder = tmp_path / "é" / "tiny" / "cpu"
    options = ["run", "tiny", "--cells", "8", "--groups", "8", "--jobs", "2", "--out", "é"]
    stored = lambda: {path.name for path in folder.glob(".cells/*.json")}  # noqa: E731

    def start(**behaviour: object) -> subprocess.Popen:
        behaviour["journal"] = "journal"  # of tmp_path, whose name need not be ASCII
        env = {**os.environ, "PYTHONPATH": str(TINY.parents[2]), "LC_ALL": "C", "PYTHONUTF8": "0"}
        process = subprocess.Popen(
            [sys.executable, TINY, *options],
            cwd=tmp_path,
            env={**env, "TINY_BEHAVIOUR": json.dumps(behaviour)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Shells start background jobs, perhaps these tests, with interrupts ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        request.addfinalizer(process.kill)  # also if these tests are interrupted
        return process

    for signal_number, status in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        before = stored()
        process = start(sleep=1.5)
        wait_for(lambda old=before, new=process: len(stored() - old) > 1 or new.poll() is not None)
        process.send_signal(signal_number)
        process.communicate()
        assert process.returncode == status
        finished = stored()
        assert 2 <= len(finished - before) < 8 - len(before)
        lines = (tmp_path / "journal").read_text().splitlines()
        workers = [int(line.split()[1]) for line in lines]
        wait_for(lambda workers=workers: not any(map(alive, workers)))
        assert stored() == finished, "nothing is written after the sweep's end"

    begun = journal()
    times = {name: (folder / ".cells" / name).stat().st_mtime_ns for name in finished}
    process = start()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert f"{8 - len(finished)} run, {len(finished)} finished earlier" in output.decode()
    assert {n: (folder / ".cells" / n).stat().st_mtime_ns for n in finished} == times
    assert set(journal()) == set(range(8))
    # Only cells that ran when a sweep was killed may have begun again: two in each.
    assert sum(journal().values()) - 8 == sum(begun.values()) - len(finished) <= 4
    assert list(pd.read_csv(folder / "rows.csv")["number"]) == [n for n in range(8) for _ in "ab"]
    environment = json.loads((folder / "environment.json").read_bytes())
    assert environment["command"] == f"tiny_experiment.py {' '.join(options)}"
