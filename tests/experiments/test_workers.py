"""run_locally: tasks in real worker processes."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict

import pytest

from experiments.harness.workers import LastingWorker, Task, run_locally


@pytest.fixture
def outcomes(tiny, tmp_path, monkeypatch):
    """Run tiny cells; returns their outcomes by number and the workers that ran each group."""

    def run(behaviour, *, jobs, **options):
        journal = tmp_path / "journal"
        monkeypatch.setenv("TINY_BEHAVIOUR", json.dumps({"journal": str(journal), **behaviour}))
        cells = list(tiny.cells(tiny.TinyOptions(**options)))
        tasks = [Task(str(cell.number), tiny.run_cell, cell) for cell in cells]
        by_number = {int(o.key): o for o in run_locally(tasks, jobs=jobs)}
        workers = defaultdict(set)
        for line in journal.read_text().splitlines():
            number, worker = map(int, line.split())
            workers[cells[number].group].add(worker)
        return by_number, workers

    return run


def test_workers_divide_the_groups_among_them(outcomes):
    by_number, workers = outcomes({"sleep": 0.4}, jobs=2, cells=8, groups=2)
    assert {number: o.status for number, o in by_number.items()} == dict.fromkeys(
        range(8), "finished"
    )
    first, second = workers.values()
    assert len(first | second) == 2, "both workers had work"
    assert min(len(first), len(second)) == 1, "at most the end of one group was taken over"


def test_a_dying_worker_costs_its_own_cell_only(outcomes):
    by_number, _ = outcomes({"dies": [1, 2]}, jobs=1, cells=4)
    assert {n: o.status for n, o in by_number.items()} == {
        0: "finished",
        1: "failed",
        2: "failed",
        3: "finished",
    }
    assert by_number[1].message == "its worker process died with exit code -9"


@pytest.mark.parametrize("asked", [None, 1, 5])
def test_workers_share_the_cores_unless_a_number_of_threads_is_asked_for(asked, tiny, monkeypatch):
    for library in ("OMP", "MKL", "NUMBA"):
        monkeypatch.delenv(f"{library}_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", str(asked))
    cells = list(tiny.cells(tiny.TinyOptions(cells=2)))
    tasks = [Task(str(cell.number), tiny.thread_limits, cell) for cell in cells]
    expected = asked or max(1, len(os.sched_getaffinity(0)) // 2)
    for outcome in run_locally(tasks, jobs=2):
        assert set(outcome.rows[0].values()) == {expected}
        assert len(outcome.rows[0]) == 3


def test_no_task_no_worker():
    assert list(run_locally([], jobs=2)) == []


@pytest.fixture
def lasting(tiny, tmp_path, monkeypatch):
    """Run tiny cells on a LastingWorker; returns outcomes and the processes they ran in."""
    journal = tmp_path / "journal"

    def run(worker, behaviour=None, cells=2):
        journal.write_text("")
        given = {"journal": str(journal), **(behaviour or {})}
        # A worker that runs keeps its environment, so behaviour counts for fresh ones only.
        monkeypatch.setenv("TINY_BEHAVIOUR", json.dumps(given))
        tasks = [
            Task(str(cell.number), tiny.run_cell, cell)
            for cell in tiny.cells(tiny.TinyOptions(cells=cells))
        ]
        outcomes = list(worker(tasks))
        return outcomes, [line.split()[1] for line in journal.read_text().splitlines()]

    return run


def test_a_lasting_worker_serves_one_sweep_after_the_other(lasting):
    with LastingWorker() as worker:
        first, processes = lasting(worker)
        second, more = lasting(worker)
    assert [outcome.status for outcome in (*first, *second)] == ["finished"] * 4
    assert len({*processes, *more}) == 1


@pytest.mark.parametrize(
    ("behaviour", "fresh"),
    [
        ({"raises": [0]}, False),
        ({"raises": [0], "message": "CUDA error: an illegal memory access"}, True),
        ({"dies": [0]}, True),
    ],
    ids=["error", "CUDA error", "death"],
)
@pytest.mark.parametrize("executor", ["lasting", "local"])
def test_a_fresh_process_follows_where_the_old_one_is_spent(lasting, executor, behaviour, fresh):
    with LastingWorker() as worker:
        run = worker if executor == "lasting" else lambda tasks: run_locally(tasks, jobs=1)
        outcomes, processes = lasting(run, behaviour, cells=3)
    assert [outcome.status for outcome in outcomes] == ["failed", "finished", "finished"]
    assert len(set(processes)) == 1 + fresh


def test_at_the_deadline_what_runs_is_given_up_and_nothing_begins(lasting):
    with LastingWorker() as worker:
        lasting(worker, {"sleep": 60}, cells=0)
        started = time.monotonic()
        worker.deadline = started + 3
        outcomes, processes = lasting(worker, {"sleep": 60})
        assert (outcomes, time.monotonic() - started < 30) == ([], True)
        assert len(processes) <= 1
        assert lasting(worker)[0] == []
        worker.deadline = float("inf")
        assert len(lasting(worker)[0]) == 2


def test_a_task_beyond_its_limit_fails_and_the_next_gets_a_fresh_process(lasting):
    with LastingWorker(limit_s=1.0) as worker:
        outcomes, _ = lasting(worker, {"sleep": 60}, cells=1)
        assert [outcome.status for outcome in outcomes] == ["failed"]
        assert outcomes[0].message == "TimeoutError: no result after 1 s"
        worker.limit_s = float("inf")
        outcomes, processes = lasting(worker)
    assert [outcome.status for outcome in outcomes] == ["finished"] * 2
    assert len(set(processes)) == 1
