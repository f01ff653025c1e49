"""Tasks in real worker processes."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest

from experiments.harness.workers import Task, Workers, run_locally


@pytest.fixture
def run(tiny, tmp_path, monkeypatch):
    """Run tiny cells by an executor; their outcomes by number, and the number and the process of
    each that began."""

    def run(executor, behaviour=None, run_cell=tiny.run_cell, **options):
        journal = tmp_path / "journal"
        journal.write_text("")
        # A worker that runs keeps its environment, so behaviour counts for fresh ones only.
        behaviour = {"journal": str(journal), **(behaviour or {})}
        monkeypatch.setenv("TINY_BEHAVIOUR", json.dumps(behaviour))
        cells = tiny.cells(tiny.TinyOptions(**options))
        outcomes = list(executor([Task(str(cell.number), run_cell, cell) for cell in cells]))
        begun = [tuple(map(int, line.split())) for line in journal.read_text().splitlines()]
        return {int(outcome.key): outcome for outcome in outcomes}, begun

    return run


def statuses(outcomes):
    return [outcomes[number].status for number in sorted(outcomes)]


def test_workers_divide_the_groups_among_them(run):
    outcomes, begun = run(partial(run_locally, jobs=2), {"sleep": 0.4}, cells=8, groups=2)
    assert statuses(outcomes) == ["finished"] * 8
    even, odd = ({worker for n, worker in begun if n % 2 == group} for group in (0, 1))
    assert len(even | odd) == 2, "both workers had work"
    assert min(len(even), len(odd)) == 1, "at most the end of one group was taken over"


def test_a_dying_worker_costs_its_own_cell_only(run):
    outcomes, _ = run(partial(run_locally, jobs=1), {"dies": [1, 2]}, cells=4)
    assert statuses(outcomes) == ["finished", "failed", "failed", "finished"]
    assert outcomes[1].message == "its worker process died with exit code -9"


@pytest.mark.parametrize("asked", [None, 1, 5])
def test_workers_share_the_cores_unless_a_number_of_threads_is_asked_for(
    asked, run, tiny, monkeypatch
):
    for library in ("OMP", "MKL", "NUMBA"):
        monkeypatch.delenv(f"{library}_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", str(asked))
    outcomes, _ = run(partial(run_locally, jobs=2), run_cell=tiny.thread_limits, cells=2)
    expected = asked or max(1, len(os.sched_getaffinity(0)) // 2)
    for outcome in outcomes.values():
        assert set(outcome.rows[0].values()) == {expected}
        assert len(outcome.rows[0]) == 3


def test_no_task_no_worker():
    assert list(run_locally([], jobs=2)) == []


def test_a_lasting_worker_serves_one_sweep_after_the_other(run):
    with Workers() as worker:
        runs = [run(worker, cells=2) for _ in "ab"]
    assert [statuses(outcomes) for outcomes, _ in runs] == [["finished"] * 2] * 2
    assert len({process for _, begun in runs for _, process in begun}) == 1


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
def test_a_fresh_process_follows_where_the_old_one_is_spent(run, executor, behaviour, fresh):
    with Workers() as worker:
        executor = worker if executor == "lasting" else partial(run_locally, jobs=1)
        outcomes, begun = run(executor, behaviour, cells=3)
    assert statuses(outcomes) == ["failed", "finished", "finished"]
    assert len({process for _, process in begun}) == 1 + fresh


def test_a_worker_without_a_task_cleans_up_before_it_ends(run, tiny):
    with Workers() as worker:
        outcomes, _ = run(worker, run_cell=tiny.keep_a_semaphore, cells=1)
        file = Path(outcomes[0].rows[0]["file"])
        assert file.exists()
    assert not file.exists()


def test_at_the_deadline_what_runs_is_given_up_and_nothing_begins(run):
    with Workers() as worker:
        worker.deadline = time.monotonic() + 3
        outcomes, begun = run(worker, {"sleep": 3600}, cells=2)
        assert outcomes == {}
        assert len(begun) <= 1
        assert run(worker, cells=2)[0] == {}
        worker.deadline = float("inf")
        assert len(run(worker, cells=2)[0]) == 2


def test_a_task_beyond_its_limit_fails_and_the_next_gets_a_fresh_process(run):
    with Workers(limit_s=1.0) as worker:
        outcomes, _ = run(worker, {"sleep": 60}, cells=1)
        assert statuses(outcomes) == ["failed"]
        assert outcomes[0].message == "TimeoutError: no result after 1 s"
        worker.limit_s = float("inf")
        outcomes, begun = run(worker, cells=2)
    assert statuses(outcomes) == ["finished"] * 2
    assert len({process for _, process in begun}) == 1
