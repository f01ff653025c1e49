"""run_sweep: what it stores, reuses, reports and assembles, with the cells run in this process."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from experiments.harness import plot_results, run_sweep, sweep
from experiments.harness.store import FolderInUse, Store
from experiments.harness.workers import execute


@pytest.fixture
def run(tiny, tmp_path, monkeypatch):
    """Run a tiny sweep; keywords are options of the experiment, ``behaviour`` that of its cells."""

    def run(behaviour=None, *, fresh=False, reverse=False, **options):
        behaviour = {"journal": str(tmp_path / "journal"), **(behaviour or {})}
        monkeypatch.setenv("TINY_BEHAVIOUR", json.dumps(behaviour))
        order = reversed if reverse else iter
        return run_sweep(
            tiny.EXPERIMENT,
            tiny.TinyOptions(**options),
            out=tmp_path / "out",
            fresh=fresh,
            executor=lambda tasks: (execute(task) for task in order(tasks)),
        )

    return run


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out" / "tiny" / "cpu"


def table(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "rows.csv")


def environment(folder: Path) -> dict:
    return json.loads((folder / "environment.json").read_text())


def test_the_table_is_in_grid_order_whatever_the_order_of_completion(run, folder):
    report = run(cells=5, reverse=True)
    assert (report.cells, report.finished, report.reused) == (5, 5, 0)
    rows = table(folder)
    assert list(rows.columns) == ["number", "half", "value", "note"]
    assert list(rows["number"]) == [n for n in range(5) for _ in range(2)]
    assert list(rows["value"]) == [n / 3 for n in range(5) for _ in range(2)], "every digit is kept"


def test_figures_are_drawn_and_named_in_the_report(run, folder):
    report = run()
    assert report.figures == [folder / "line.pdf", folder / "line.png"]
    assert all(figure.stat().st_size > 1000 for figure in report.figures)


def test_a_second_run_repeats_nothing_and_changes_nothing(run, folder, journal):
    run()
    results = ["rows.csv", "environment.json", "line.pdf", "line.png"]
    before = [(folder / name).read_bytes() for name in results]
    report = run()
    assert (report.finished, report.reused) == (0, 4)
    assert journal() == Counter(range(4))
    assert [(folder / name).read_bytes() for name in results] == before


def test_another_seed_is_another_cell(run, folder, journal):
    run(cells=3)
    run(cells=3, seed=1)
    assert journal() == Counter({0: 2, 1: 2, 2: 2})
    assert list(table(folder)["value"].unique()) == [1, 1 + 1 / 3, 1 + 2 / 3]


def test_fresh_runs_finished_cells_again(run, journal):
    run()
    report = run(fresh=True)
    assert (report.finished, report.reused) == (4, 0)
    assert set(journal().values()) == {2}


def test_an_input_is_known_by_name_and_content_not_by_its_folder(run, tmp_path, journal, folder):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trace.jsonl").write_text("same")
    run(cells=1, file=tmp_path / "a" / "trace.jsonl")
    assert run(cells=1, file=tmp_path / "b" / "trace.jsonl").reused == 1
    (tmp_path / "b" / "trace.jsonl").write_text("other")
    assert run(cells=1, file=tmp_path / "b" / "trace.jsonl").finished == 1
    (file,) = environment(folder)["inputs"]
    assert file["file"] == "trace.jsonl"
    assert len(file["sha256"]) == 64


def test_a_cell_that_raises_is_reported_and_tried_again_the_next_time(run, folder, journal):
    report = run({"raises": [1]})
    assert report.failed == {"RuntimeError: this cell raises": 1}
    assert report.finished == 3
    assert list(table(folder)["number"].unique()) == [0, 2, 3]
    assert environment(folder)["failed_cells"] == 1
    log = (folder / "sweep.log").read_text()
    assert "Traceback" in log
    assert "'number': 1" in log
    assert run().finished == 1
    assert journal() == Counter({0: 1, 1: 2, 2: 1, 3: 1})
    assert list(table(folder)["number"].unique()) == [0, 1, 2, 3]
    assert environment(folder)["failed_cells"] == 0


def test_a_cell_that_cannot_run_here_is_absent_with_the_reason(run, folder):
    report = run({"unavailable": [0, 3]}, absent=("trace.csv has lengths only",))
    assert not report.failed
    assert report.unavailable == {"no such device": 2, "trace.csv has lengths only": 1}
    assert list(table(folder)["number"].unique()) == [1, 2]
    assert environment(folder)["unavailable_cells"] == dict(report.unavailable)
    log = (folder / "sweep.log").read_text()
    assert "no such device" in log
    assert "trace.csv has lengths only" in log


def test_when_no_cell_can_run_there_is_no_table(run, folder):
    report = run({"unavailable": [0, 1, 2, 3]})
    assert report.figures == []
    assert not (folder / "rows.csv").exists()
    assert not (folder / "environment.json").exists()


def test_a_row_that_is_not_made_of_scalars_fails_its_cell(run):
    report = run({"no_scalar": True}, cells=1)
    (message,) = report.failed
    assert "column 'value' of a row is not a scalar: [1, 2]" in message


def test_an_empty_grid_is_an_error_that_changes_nothing(run, tmp_path):
    with pytest.raises(ValueError, match=r"grid of tiny is empty: a\.csv has lengths only"):
        run(cells=0, absent=("a.csv has lengths only",))
    assert not (tmp_path / "out").exists()


def test_a_cell_may_not_hold_what_has_no_identity(tiny, tmp_path):
    def cells(options):
        yield tiny.TinyCell(number={1, 2}, of=1)

    with pytest.raises(TypeError, match="may not hold a set"):
        run_sweep(replace(tiny.EXPERIMENT, cells=cells), tiny.TinyOptions(), out=tmp_path)


def test_cells_of_other_commits_are_kept_and_named(run, folder, monkeypatch, caplog):
    def commit(name):
        describe = sweep.describe
        monkeypatch.setattr(
            sweep, "describe", lambda *a: {**describe(*a), "commit": name, "dirty": False}
        )

    commit("first")
    run({"raises": [2, 3]})
    assert environment(folder)["earlier_runs"] == []
    commit("second")
    run()
    assert "keeps 2 cells of commit first" in caplog.text
    now = environment(folder)
    assert (now["commit"], now["cells"]) == ("second", 2)
    assert [(e["commit"], e["cells"]) for e in now["earlier_runs"]] == [("first", 2)]


def test_a_folder_that_another_sweep_holds_is_refused_by_name(run, folder):
    store = Store(folder)
    with store.locked(), pytest.raises(FolderInUse, match=r"process \d+ on .* since 20"):
        run()
    assert not (folder / "rows.csv").exists()
    assert run().finished == 4, "the lock is free again"


def test_leftovers_of_a_killed_sweep_are_removed(run, folder):
    run()
    leftovers = [folder / ".rows.csv.123.tmp", folder / ".cells" / ".0123.json.123.tmp"]
    for leftover in leftovers:
        leftover.write_text("half a fi")
    run()
    assert not any(leftover.exists() for leftover in leftovers)


def test_figures_are_drawn_again_from_the_table_alone(run, folder, tiny, tmp_path):
    figure = run().figures[1]
    elsewhere = tmp_path / "copied"
    elsewhere.mkdir()
    (elsewhere / "rows.csv").write_bytes((folder / "rows.csv").read_bytes())
    plot_results(tiny.EXPERIMENT, elsewhere)
    assert (elsewhere / "line.png").read_bytes() == figure.read_bytes()
