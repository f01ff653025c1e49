"""Environment that every test relies on; it must be in place before a kernel module is imported.

PyTorch is imported inside functions: the process that only hands out tests to workers needs none.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:
    import torch

os.environ.pop("PAGELAB_COMMIT", None)
if "--on-device" not in sys.argv and "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests without it must pass on CPU tensors
if sys.dont_write_bytecode:
    # Workers and child processes would each compile all sources of PyTorch, 3 CPU seconds a time.
    root = Path(__file__).parents[1]
    root = root if os.access(root, os.W_OK) else Path(tempfile.mkdtemp())
    bytecode = str(root / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode, sys.pycache_prefix = False, bytecode
    os.environ["PYTHONPYCACHEPREFIX"] = bytecode
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # absent if it was -B


def _has_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    import torch

    return torch.cuda.is_available()


if not _has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"

if not os.access(os.path.expanduser("~"), os.W_OK):  # libcachesim makes a folder there
    os.environ["HOME"] = tempfile.mkdtemp()

gc.set_threshold(50_000, 20, 100)  # the packages make a million objects that live to the end

_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# Shrinking takes minutes. The failing example is stored: HYPOTHESIS_PROFILE=shrink shrinks it.
_no_shrinking = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
settings.register_profile("default", max_examples=8, phases=_no_shrinking, **_common)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.register_profile("shrink", max_examples=8, **_common)
settings.register_profile("thorough", max_examples=300, **_common)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
)


def pytest_addoption(parser):
    parser.addoption(
        "--on-device", action="store_true", help="only what runs on a GPU here: compiled kernels"
    )
    parser.addoption(
        "--all", action="store_true", help="also the full crosses and long runs of make test-all"
    )


def pytest_configure(config):
    if config.getoption("--on-device") and not _has_gpu():
        raise pytest.UsageError("--on-device: needs a CUDA GPU that PyTorch finds; there is none")
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


def _cpu_seconds() -> float:
    """User and system time of this process, its ended children and its pools' processes."""
    ticks = 0
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return sum(os.times()[:4]) + ticks / os.sysconf("SC_CLK_TCK")


_cpu_before = pytest.StashKey[float]()


def pytest_collection_finish(session):
    gc.freeze()
    session.stash[_cpu_before] = _cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """The last report of a test has its ``cpu_seconds``, and fails above PAGELAB_MAX_TEST_CPU_S."""
    report = yield
    if report.when == "teardown":
        now = _cpu_seconds()
        report.cpu_seconds = now - item.session.stash[_cpu_before]
        item.session.stash[_cpu_before] = now
        limit = float(os.environ.get("PAGELAB_MAX_TEST_CPU_S", "inf"))
        if report.passed and report.cpu_seconds > limit:
            report.outcome = "failed"
            report.longrepr = f"{report.cpu_seconds:.1f} CPU-seconds, at most {limit:g} wanted"
    return report


def pytest_terminal_summary(terminalreporter):
    """Print the CPU time of the run, children included, and its ten most expensive tests."""
    reports = itertools.chain(*terminalreporter.stats.values())
    tests = {one.nodeid: one.cpu_seconds for one in reports if hasattr(one, "cpu_seconds")}
    terminalreporter.section(f"{sum(os.times()[:4]) / 60:.1f} CPU-minutes")
    for test in sorted(tests, key=tests.get, reverse=True)[:10]:
        terminalreporter.line(f"{tests[test]:6.1f} CPU-seconds {test}")


def pytest_ignore_collect(collection_path, config):
    """With --on-device, skip files without such a test: they may need packages that are absent."""
    files = [collection_path] if collection_path.is_file() else collection_path.rglob("test_*.py")
    takes_device = re.compile(r"^def test_\w+\([^)]*\bdevice\b", re.MULTILINE)
    wanted = not config.getoption("--on-device")
    wanted = wanted or any(takes_device.search(file.read_text()) for file in files)
    return None if wanted else True


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--on-device"):
        return
    others = [item for item in items if "device" not in item.fixturenames]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if "device" in item.fixturenames]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU (kernels then run in Triton's interpreter)."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def poisoned_memory():
    """Fill every fresh `torch.empty` with NaN (integers: the largest value) for one test module.

    A kernel that leaves part of its output or workspace unwritten then shows itself.
    """
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    previous = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = previous
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fake_gpu(monkeypatch):
    """A stand-in for a CUDA device with 32 MiB, on machines without one; see fake_cuda.py."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a real GPU")
    import fake_cuda

    with fake_cuda.fake_gpu(monkeypatch, total_bytes=2**25) as device:
        yield device
