"""``pagelab gpu``: stages with limits, whose results survive an end at any moment.

The stages themselves are rehearsed in test_on_fake_gpu.py.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.gpu import contact


def hang(out):
    """A stage that ignores an interrupt; so does a process that it started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield f"child {child.pid}"
    time.sleep(1000)


def crash(out):
    os._exit(7)
    yield


def fine(out):
    yield "done"


def raises(out):
    yield "before"
    raise RuntimeError("CUDA error: an illegal memory access")


def h100():
    return 9, 0


@pytest.fixture
def gpu_run(monkeypatch, tmp_path, capfd):
    """gpu_run(stages, *arguments) -> (status, what the log says); the GPU is assumed."""
    monkeypatch.setattr(contact, "_capability", h100)
    monkeypatch.setattr(contact, "_GRACE", {signal.SIGINT: 0.2, signal.SIGKILL: 5})

    def run(stages, *arguments):
        monkeypatch.setattr(contact, "STAGES", stages)
        words = ["--out", str(tmp_path), "--stages", *stages, *arguments]
        status = contact.main(words)
        capfd.readouterr()
        return status, (tmp_path / "first_contact/log.txt").read_text()

    return run


def test_a_stage_that_hangs_or_dies_costs_itself_alone(gpu_run):
    stages = {"hang": (hang,), "crash": (crash,), "raise": (raises, raises), "fine": (fine,)}
    stages = {name: (2, steps) for name, steps in stages.items()} | {"long": (1000, ())}
    status, log = gpu_run(stages, "--seconds", "60")
    assert status == 1
    assert "hang: cut off after 2 s; its cells so far are kept" in log
    assert "crash: its process died, status 7" in log
    assert log.count("raise: before") == 2, "an error of a step ends this step alone"
    assert "raise: RuntimeError: CUDA error: an illegal memory access" in log
    assert "long: not started" in log
    child = Path("/proc", log.partition("child ")[2].split()[0], "cmdline")
    assert not child.exists() or not child.read_text(), "it is gone, or dead and not reaped"


@pytest.mark.parametrize("seconds", [10, 10_000])
def test_a_run_in_which_all_goes_well_or_no_stage_has_the_time_to_start(seconds, gpu_run):
    assert gpu_run({"fine": (seconds, (fine,))})[0] == (seconds == 10_000)


def test_an_interrupt_ends_everything(gpu_run):
    """Of the parent, as by Ctrl-C."""
    others = {*multiprocessing.active_children()}  # of tests before
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 2)
    with pytest.raises(KeyboardInterrupt):
        gpu_run({"hang": (1000, (hang,))})
    assert {*multiprocessing.active_children()} <= others


def test_the_device_tests_are_run_and_their_failures_are_lines(tmp_path):
    (tmp_path / "first_contact").mkdir()
    line, *_, last = contact.device_tests("-k", "repeats")(tmp_path)
    assert line == "ERROR: --on-device: needs a CUDA GPU that PyTorch finds; there is none"
    assert last.endswith("(status 4)")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "needs a CUDA GPU"), (["--seconds", "0"], "--seconds 0: needs a number above 0"),
     (["--stages", "smok"], "invalid choice: 'smok'"), (["--seconds", "9"], "needs a checkout")],
)  # fmt: skip
def test_what_cannot_run_says_why(arguments, says, tmp_path, capsys, monkeypatch):
    if "checkout" in says:
        monkeypatch.setattr(contact, "REPOSITORY", tmp_path)
    try:
        status = contact.main(["--out", str(tmp_path), *arguments])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert says in capsys.readouterr().err


COMPILE = """
from experiments.gpu.contact import STAGES, compile_cell

cells = [next(STAGES[name][1][0].cells()) for name in ("headline", "smoke")]
print([compile_cell("sm_90", cell) for cell in cells])
"""


def test_kernels_of_the_stages_are_compiled_ahead():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout == "[2, 1]\n"
