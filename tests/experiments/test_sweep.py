"""run_sweep: storing, reusing, reporting and assembling cells, which run in this process."""

import json
import os
import sys
import types
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from experiments import harness
from experiments.harness import provenance, run_sweep, sweep
from experiments.harness.workers import run_here


@pytest.fixture
def run(tiny, tmp_path, monkeypatch):
    """Run a tiny sweep with options of the experiment; ``behaviour`` goes to its cells."""

    def run(behaviour=None, *, fresh=False, reverse=False, draw=False, **options):
        behaviour = {"journal": str(tmp_path / "journal"), **(behaviour or {})}
        monkeypatch.setenv("TINY_BEHAVIOUR", json.dumps(behaviour))
        monkeypatch.setattr("importlib.metadata.distributions", list)  # reading them takes longest
        if not draw:
            monkeypatch.setattr(sweep, "plot_results", lambda *_: [])
        order = -1 if reverse else 1
        options = tiny.TinyOptions(**options)
        out, execute = tmp_path / "out", lambda tasks: run_here(tasks[::order])
        return run_sweep(tiny.EXPERIMENT, options, out=out, fresh=fresh, execute=execute)

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


def test_a_second_run_repeats_nothing_and_changes_nothing(run, folder, journal):
    report = run(draw=True)
    assert report.figures == [folder / "line.pdf", folder / "line.png"]
    results = [*report.figures, folder / "rows.csv", folder / "environment.json"]
    before = [path.read_bytes() for path in results]
    report = run(draw=True)
    assert (report.finished, report.reused) == (0, 4)
    assert journal() == Counter(range(4))
    assert [path.read_bytes() for path in results] == before


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


def test_a_cell_that_raises_is_reported_and_tried_again_the_next_time(run, folder, journal, caplog):
    report = run({"raises": [1]})
    assert report.went_wrong
    assert "failed: number=1: RuntimeError: this cell raises" in caplog.messages
    assert f"tracebacks: {folder / 'sweep.log'}" in caplog.messages
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


def test_a_row_that_is_not_made_of_scalars_fails_its_cell(run):
    report = run({"no_scalar": True}, cells=1)
    (message,) = report.failed
    assert "column 'value' of a row is not a scalar: [1, 2]" in message


def test_an_empty_grid_is_an_error_that_changes_nothing(run, tmp_path):
    with pytest.raises(ValueError, match=r"grid of tiny is empty: a\.csv has lengths only"):
        run(cells=0, absent=("a.csv has lengths only",))
    assert not (tmp_path / "out").exists()


def test_a_cell_may_not_hold_a_value_without_identity(tiny, tmp_path):
    def cells(options):
        yield tiny.TinyCell(number={1, 2}, of=1)

    with pytest.raises(TypeError, match="may not hold a set"):
        run_sweep(replace(tiny.EXPERIMENT, cells=cells), tiny.TinyOptions(), out=tmp_path)


def test_an_environment_lists_every_commit_that_made_rows(run, folder, monkeypatch):
    def commit(name):
        monkeypatch.setattr(harness.environment, "_git_state", lambda: (name, False))

    commit("first")
    run({"raises": [2, 3]})
    assert environment(folder)["earlier_runs"] == []
    commit("second")
    run()
    now = environment(folder)
    assert (now["commit"], now["cells"]) == ("second", 2)
    assert [(e["commit"], e["cells"]) for e in now["earlier_runs"]] == [("first", 2)]


def test_cells_are_run_again_when_code_that_they_imported_has_changed(
    run, tmp_path, caplog, monkeypatch
):
    file = tmp_path / "kernels" / "kernel.py"
    file.parent.mkdir()
    file.write_text("key")
    os.utime(file, (0, 0))
    module = types.ModuleType("kernel_of_a_test")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    monkeypatch.setattr(provenance, "_imported", {})
    run()
    assert run().reused == 4
    file.write_text("key + 1")
    assert run().finished == 4
    assert "4 cells are run again, as these changed: kernels/kernel.py" in caplog.text
    monkeypatch.setattr(provenance, "_imported", {})
    os.utime(file, (0, 0))
    assert run().finished == 4, "the code of a file that changes while cells run is unknown"
    assert run().reused == 4
    file.unlink()
    monkeypatch.setattr(provenance, "_imported", {})
    monkeypatch.delitem(sys.modules, "kernel_of_a_test")
    assert run().finished == 4


def test_cells_are_run_again_with_another_triton(run, caplog, monkeypatch):
    monkeypatch.setattr(provenance, "_imported", {})
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    run(cells=1)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "99.0")
    assert run(cells=1).finished == 1
    assert "triton" in caplog.text


@pytest.mark.parametrize("damage", ["{", "[]", '{"rows": [], "code": {}, "run": {}}'])
def test_a_damaged_record_is_named_and_its_cell_run_again(run, folder, caplog, damage):
    run(cells=1)
    before = (folder / "rows.csv").read_bytes()
    (damaged,) = (folder / ".cells").glob("*.json")
    damaged.write_text(damage)
    assert run(cells=1).finished == 1
    assert str(damaged) in caplog.text
    assert (folder / "rows.csv").read_bytes() == before
    assert run(cells=1).reused == 1


def test_a_row_whose_check_failed_is_reported_until_it_is_right(run, folder, caplog):
    assert not run(cells=2).wrong
    report = run({"wrong": [1]}, cells=2, fresh=True)
    (wrong,) = set(report.wrong)
    assert report.went_wrong
    assert wrong == f"number=1, half=False, value={1 / 3}, note=None"
    assert f"wrong: {wrong}" in caplog.text
    assert environment(folder)["failed_checks"] == 1
    assert run(cells=2).wrong == [wrong], "reused, it is still wrong"


def test_leftovers_of_a_killed_sweep_are_removed(run, folder):
    run()
    leftovers = [folder / ".rows.csv.123.tmp", folder / ".cells" / ".0123.json.123.tmp"]
    for leftover in leftovers:
        leftover.write_text("half a fi")
    run()
    assert not any(leftover.exists() for leftover in leftovers)
