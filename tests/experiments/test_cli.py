"""The command line on the real experiments, and on tiny cells."""

import json
import os
import re
import subprocess
import sys

import pandas as pd
import pytest
import torch

from experiments import cli, style
from experiments.harness import sweep
from experiments.harness.environment import REPOSITORY
from experiments.harness.store import Store
from experiments.harness.workers import run_here
from experiments.registry import EXPERIMENTS


def test_list_shows_every_experiment_its_figure_and_whether_it_uses_a_gpu(capsys):
    assert cli.main(["list"]) == 0
    output = capsys.readouterr().out
    for experiment in EXPERIMENTS.values():
        assert f"{experiment.name} " in output
        assert experiment.figure in output
    here = "one is here" if torch.cuda.is_available() else "none here"
    assert output.count(f"(needs a GPU: {here})") == 1
    uses = sum(experiment.gpu == "optional" for experiment in EXPERIMENTS.values())
    assert output.count(f"(uses a GPU if there is one: {here})") == uses


def test_list_imports_no_package_that_takes_seconds():
    code = "import sys; from experiments import cli; cli.main(['list']); print(*sys.modules)"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=REPOSITORY)
    slow = {"matplotlib", "numba", "pandas", "transformers"}
    slow |= set() if torch.cuda.is_available() else {"torch"}
    assert not slow & set(printed.split())


@pytest.mark.parametrize("command", ["run", "plot"])
def test_an_unknown_experiment_is_refused_naming_the_choices(command, capsys):
    assert cli.main([command, "evicton"]) == 2
    error = capsys.readouterr().err
    assert "evicton" in error
    for name in EXPERIMENTS:
        assert name in error.replace("-", "_"), "either spelling is understood"


def test_a_misspelt_option_suggests_those_of_its_experiment_alone(capsys):
    assert cli.main(["run", "eviction", "--polcy", "lru"]) == 2
    error = capsys.readouterr().err
    assert "--policy" in error
    assert "eviction-serving" not in error


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_help_of_an_experiment_shows_every_option(name, capsys):
    assert cli.main(["run", name, "--help"]) == 0
    shown = set(re.findall(r"--([\w-]+)", capsys.readouterr().out))
    options = {*vars(EXPERIMENTS[name].options), *vars(cli.SweepOptions())}
    assert {option.replace("_", "-") for option in options} <= {
        flag.removeprefix("no-") for flag in shown
    }


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "results" / "tiny" / "cpu"


@pytest.fixture
def tiny_line(tiny, tmp_path, monkeypatch, capsys):
    """Run a command line on the tiny experiment with its cells in this process; its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "EXPERIMENTS", tiny.EXPERIMENTS)
    monkeypatch.setattr(sweep, "run_locally", lambda tasks, jobs: run_here(tasks))
    monkeypatch.setattr(style, "_FORMATS", {"png": {}})
    monkeypatch.setattr("importlib.metadata.distributions", list)  # reading them takes longest

    def run(words: str, status: int = 0, **behaviour: object):
        monkeypatch.setenv("TINY_BEHAVIOUR", json.dumps(behaviour))
        assert cli.main(words.split()) == status
        return capsys.readouterr()

    return run


def test_run_plot_and_resume(tiny_line, folder):
    output = tiny_line("run tiny --seed 3").out
    assert "tiny: 4 cells, 4 run, 0 finished earlier" in output
    assert "results/tiny/cpu/line.png" in output
    assert list(pd.read_csv(folder / "rows.csv")["number"]) == [0, 0, 1, 1, 2, 2, 3, 3]
    environment = json.loads((folder / "environment.json").read_text())
    assert (environment["seed"], environment["cells"]) == (3, 4)
    figure = (folder / "line.png").read_bytes()
    (folder / "line.png").unlink()
    assert "results/tiny/cpu/line.png" in tiny_line("plot tiny").out
    assert (folder / "line.png").read_bytes() == figure
    failing = tiny_line("run tiny --seed 4", status=1, raises=[1])
    assert "3 run, 0 finished earlier, 1 FAILED" in failing.out
    assert "failed: number=1: RuntimeError: this cell raises\n" in failing.err
    assert "Traceback" not in failing.err


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("", "ValueError: no rows, "),
        ("number,value\n", "ValueError: no rows, "),
        ("number,value\n1\n", "ValueError: row 2 has 1 cells, the header 2"),
        ("number,value\n1,2,3\n", "ValueError: row 2 has 3 cells, the header 2"),
        ("number,value\n1,2\n3,4", "ValueError: .*no end of the last row"),
        ("number,value\n1,\0\n", "ValueError: .*bytes that are not text"),
        ("number\n1\n", "no column: 'value'"),
        ("\x80", "UnicodeDecodeError: "),
    ],
)
def test_plot_of_a_damaged_table_is_an_error_that_names_it(damage, reason, tiny_line, folder):
    folder.mkdir(parents=True)
    (folder / "rows.csv").write_bytes(damage.encode("latin-1"))
    errors = tiny_line("plot tiny", status=2).err
    start = r"error: results/tiny/cpu/rows\.csv: no figure can be drawn of it \("
    assert re.match(start + reason, errors)
    assert errors.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "plot"])
def test_a_folder_that_cannot_be_written_to_is_named(command, tiny_line, folder):
    tiny_line("run tiny --cells 1")
    for name in ("line.png", ".cells/lock"):
        (folder / name).unlink()
        (folder / name).mkdir()  # in the way; a read-only folder would not stop root
    errors = tiny_line(f"{command} tiny", status=2).err
    assert re.fullmatch(r"error: .* directory: 'results/tiny/cpu/[^']*'\n", errors)


def test_a_folder_that_another_sweep_holds_is_refused_by_name(tiny_line, folder):
    with Store(folder).locked():
        error = tiny_line("run tiny", status=2).err
    holder = r"another sweep is writing to results/tiny/cpu: process \d+ on .* since 20"
    assert re.match(f"error: {holder}", error)
    assert not (folder / "rows.csv").exists()
    assert "4 cells, 4 run" in tiny_line("run tiny").out, "the lock is free again"


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_reproduce_is_quick_spares_the_full_results_and_says_what_needs_a_gpu(tiny_line, tmp_path):
    printed = tiny_line("reproduce")
    assert "tiny: 2 cells, 2 run" in printed.out
    assert "tiny_gpu: 2 cells, 0 run, 0 finished earlier, 2 absent" in printed.out
    assert "absent (2): there is no GPU here" in printed.err
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["quick"]
    assert "Published" not in (tmp_path / "results" / "quick" / "report.html").read_text()
    absent = {path.name for path in tmp_path.glob("results/quick/tiny_gpu/cpu/*")}
    assert absent == {".cells", "sweep.log"}, "without a row there is no table"


@pytest.mark.parametrize("closed", [True, False], ids=["pipe", "disk"])
def test_output_that_cannot_be_written_is_no_traceback(closed):
    read, write = os.pipe() if closed else (None, os.open("/dev/full", os.O_WRONLY))
    if closed:
        os.close(read)
    with os.fdopen(write, "w") as out:
        command = [sys.executable, "-m", "experiments", "list"]
        ran = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert ran.returncode == 2
    assert ran.stderr == ("" if closed else "error: [Errno 28] No space left on device\n")
