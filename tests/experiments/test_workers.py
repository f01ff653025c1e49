"""Tasks in real worker processes."""

import json
import os

import pytest

from experiments.harness.workers import Task, run_locally


@pytest.fixture
def run(tiny, tmp_path, monkeypatch):
    """Run tiny cells; returns outcomes by number, and (number, process) of each that began."""

    def run(behaviour=None, *, jobs, run_cell=tiny.run_cell, **options):
        journal = tmp_path / "journal"
        journal.write_text("")
        behaviour = {"journal": str(journal), **(behaviour or {})}
        monkeypatch.setenv("TINY_BEHAVIOUR", json.dumps(behaviour))
        cells = tiny.cells(tiny.TinyOptions(**options))
        tasks = [Task(str(cell.number), run_cell, cell) for cell in cells]
        outcomes = list(run_locally(tasks, jobs=jobs))
        begun = [tuple(map(int, line.split())) for line in journal.read_text().splitlines()]
        return {int(outcome.key): outcome for outcome in outcomes}, begun

    return run


def statuses(outcomes):
    return [outcomes[number].status for number in sorted(outcomes)]


@pytest.mark.parametrize(("cells", "groups", "of_each"), [(8, 2, [1, 1]), (6, 1, [1]), (7, 1, [2])])
def test_workers_divide_the_groups_and_a_long_one_among_them(cells, groups, of_each, run):
    outcomes, begun = run(jobs=2, cells=cells, groups=groups)
    assert statuses(outcomes) == ["finished"] * cells
    workers = [{worker for n, worker in begun if n % groups == group} for group in range(groups)]
    assert [*map(len, workers)] == of_each
    assert len(set.union(*workers)) == sum(of_each)


@pytest.mark.parametrize("asked", [None, 5])
def test_workers_share_the_cores_unless_a_number_of_threads_is_asked_for(
    asked, run, tiny, monkeypatch
):
    for library in ("OMP", "MKL", "NUMBA"):
        monkeypatch.delenv(f"{library}_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", str(asked))
    outcomes, _ = run(jobs=2, run_cell=tiny.thread_limits, cells=2)
    expected = asked or max(1, len(os.sched_getaffinity(0)) // 2)
    for outcome in outcomes.values():
        assert set(outcome.rows[0].values()) == {expected}
        assert len(outcome.rows[0]) == 3


@pytest.mark.parametrize(
    ("behaviour", "fresh"),
    [
        ({"raises": [0]}, False),
        ({"raises": [0], "message": "CUDA error: an illegal memory access"}, True),
        ({"dies": [0]}, True),
    ],
    ids=["error", "CUDA error", "death"],
)
def test_a_fresh_process_follows_where_the_old_one_is_spent(run, behaviour, fresh):
    outcomes, begun = run(behaviour, jobs=1, cells=3)
    assert statuses(outcomes) == ["failed", "finished", "finished"]
    assert len({process for _, process in begun}) == 1 + fresh
    if "dies" in behaviour:
        assert outcomes[0].message == "its worker process died"


def test_no_tasks_have_no_outcomes():
    assert [*run_locally([], jobs=2)] == []
