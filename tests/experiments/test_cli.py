"""The real command line, in a process of its own."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest
import torch

from experiments import cli
from experiments.registry import EXPERIMENTS


@pytest.fixture
def refused(capsys):
    """What an erroneous command line prints; it must end with status 2."""

    def refused(*arguments: str) -> str:
        assert cli.main(list(arguments)) == 2
        return capsys.readouterr().err

    return refused


def test_list_shows_every_experiment_its_figure_and_whether_it_can_run(capsys):
    assert cli.main(["list"]) == 0
    output = capsys.readouterr().out
    for experiment in EXPERIMENTS.values():
        assert f"{experiment.name} " in output
        assert experiment.figure in output
    gpu_only = sum(e.gpu == "required" for e in EXPERIMENTS.values())
    absent = 0 if torch.cuda.is_available() else gpu_only
    assert output.count("cannot run here") == absent
    assert output.count("runs here") == len(EXPERIMENTS) - absent


@pytest.mark.parametrize("command", ["run", "plot"])
def test_an_unknown_experiment_is_refused_naming_the_choices(refused, command):
    error = refused(command, "evicton")
    assert "evicton" in error
    for name in EXPERIMENTS:
        assert name.replace("_", "-") in error, "either spelling is understood"


@pytest.mark.parametrize("arguments", [("run", "eviction"), ("plot", "eviction"), ("reproduce",)])
def test_an_unknown_option_is_refused_naming_the_choices(refused, arguments):
    error = refused(*arguments, "--no-such-option")
    assert "--no-such-option" in error
    for option in {"run": ("--policy", "--capacity-percent", "--jobs", "--out")}.get(
        arguments[0], ("--quick", "--out")
    ):
        assert option in error


def test_reproduce_is_quick_or_full(refused):
    assert "--quick or --full, not both" in refused("reproduce", "--quick", "--full")


def test_a_missing_folder_of_traces_is_refused_naming_the_variable(refused, monkeypatch):
    monkeypatch.setenv("TRACES_DIR", "/no/such/folder")
    assert "TRACES_DIR=/no/such/folder is not a folder" in refused("run", "eviction")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_help_of_an_experiment_shows_the_options_that_an_error_names(name, capsys):
    assert cli.main(["run", name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert cli.main(["run", name, "--no-such-option"]) == 2
    *_, known = capsys.readouterr().err.splitlines()
    options = re.findall(r"--[\w-]+", known)
    assert len(options) == len(vars(EXPERIMENTS[name].options)) + len(vars(cli.SweepOptions()))
    assert set(options) <= set(re.findall(r"--[\w-]+", shown))


def test_a_misspelt_option_suggests_those_of_its_experiment_alone(refused):
    error = refused("run", "eviction", "--polcy", "lru")
    assert "--policy" in error
    assert "eviction-serving" not in error


def test_the_help_tells_of_the_gpu_pass(capsys):
    assert cli.main(["--help"]) == 0
    assert "gpu-pass --help" in capsys.readouterr().out


def test_run_plot_and_resume(command_line, tmp_path):
    folder = tmp_path / "results" / "tiny" / "cpu"
    output = command_line("run", "tiny", "--seed", 3, tiny={}).stdout
    assert "tiny: 4 cells, 4 run, 0 finished earlier" in output
    assert "results/tiny/cpu/line.pdf" in output
    assert list(pd.read_csv(folder / "rows.csv")["number"]) == [0, 0, 1, 1, 2, 2, 3, 3]

    environment = json.loads((folder / "environment.json").read_text())
    assert environment["command"] == "tiny_experiment.py run tiny --seed 3"
    assert (environment["seed"], environment["cells"]) == (3, 4)

    figure = (folder / "line.png").read_bytes()
    (folder / "line.png").unlink()
    assert "results/tiny/cpu/line.png" in command_line("plot", "tiny", tiny={}).stdout
    assert (folder / "line.png").read_bytes() == figure


def test_names_that_are_not_ascii_under_an_ascii_locale(command_line, tmp_path):
    command_line.environment |= {"LC_ALL": "C", "PYTHONUTF8": "0"}
    output = command_line("run", "tiny", "--cells", 1, "--out", "é", tiny={}).stdout
    assert "tiny: 1 cells, 1 run" in output
    environment = json.loads((tmp_path / "é" / "tiny" / "cpu" / "environment.json").read_bytes())
    assert environment["command"].endswith("--out é")


@pytest.mark.parametrize("damage", ["", "number\n1\n", "\x80"])
def test_plot_of_a_damaged_table_is_an_error_that_names_it(damage, command_line, tmp_path):
    table = tmp_path / "results" / "tiny" / "cpu" / "rows.csv"
    table.parent.mkdir(parents=True)
    table.write_bytes(damage.encode("latin-1"))
    errors = command_line("plot", "tiny", tiny={}, status=2).stderr
    assert errors.startswith("error: results/tiny/cpu/rows.csv: no figure can be drawn of it (")
    assert "Traceback" not in errors


@pytest.mark.parametrize("arguments", [("run",), ("plot",)])
def test_a_folder_that_cannot_be_written_to_is_named(arguments, command_line, tmp_path):
    command_line("run", "tiny", "--cells", 1, tiny={})
    folder = tmp_path / "results" / "tiny" / "cpu"
    (folder / "line.pdf").unlink()
    (folder / "line.pdf").mkdir()  # in the way; a read-only folder would not stop root
    (folder / ".cells" / "lock").unlink()
    (folder / ".cells" / "lock").mkdir()
    errors = command_line(*arguments, "tiny", tiny={}, status=2).stderr
    assert re.fullmatch(r"error: .* directory: 'results/tiny/cpu/.*'\n", errors)


def test_a_failing_cell_makes_the_run_fail_and_the_rest_is_kept(command_line, tmp_path):
    result = command_line("run", "tiny", tiny={"raises": [1]}, status=1)
    assert "3 run, 0 finished earlier, 1 FAILED" in result.stdout
    assert "failed (1 of 4 cells): RuntimeError: this cell raises" in result.stderr
    assert "Traceback" not in result.stderr
    log = tmp_path / "results" / "tiny" / "cpu" / "sweep.log"
    assert f"tracebacks: {log.relative_to(tmp_path)}" in result.stderr
    assert "Traceback" in log.read_text()


def test_reproduce_is_quick_by_default_and_spares_the_full_results(command_line, tmp_path):
    output = command_line("reproduce", tiny={}).stdout
    assert "tiny: 2 cells, 2 run" in output
    assert (tmp_path / "results" / "quick" / "tiny" / "cpu" / "rows.csv").exists()
    assert not (tmp_path / "results" / "tiny").exists()


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_what_needs_a_gpu_is_absent_without_one(command_line, tmp_path):
    assert "cannot run here: no GPU here" in command_line("list", tiny={}).stdout
    result = command_line("run", "tiny_gpu", tiny={"raises": [0]})
    assert "4 cells, 0 run, 0 finished earlier, 4 absent" in result.stdout
    assert "absent (4): there is no GPU here" in result.stderr
    assert not (tmp_path / "results" / "tiny_gpu" / "cpu" / "rows.csv").exists()


def test_an_experiment_may_be_spelt_with_hyphens(refused):
    assert "--repeats 0: needs an int of at least 1" in refused(
        "run", "replay-speed", "--repeats", "0"
    )


def test_plot_without_a_table_says_to_run_first(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no rows.csv in a folder of results/eviction" in refused("plot", "eviction")
