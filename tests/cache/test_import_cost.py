"""`import cache` loads nothing heavy, and nothing needs a package where it is imported only."""

import subprocess
import sys

import pytest

HEAVY = {
    "torch", "triton", "numpy", "numba", "pandas", "matplotlib", "zstandard", "models", "kernels",
}  # fmt: skip

PROGRAM = "import cache, sys; print(*sys.modules, sep='\\n')"


def test_importing_cache_loads_nothing_heavy():
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    modules = found.stdout.splitlines()
    assert {"cache.managers.vllm_v1", "cache.serving.scheduler"} <= set(modules)
    assert not HEAVY & set(modules)


WITHOUT = """import runpy, sys
absent = "libcachesim", "matplotlib", "numba", "ray", "tyro", "xxhash", "zstandard"
sys.modules.update(dict.fromkeys(absent))  # their import raises ImportError
module, sys.argv[1:] = sys.argv[1], sys.argv[2:]
runpy.run_module(module, run_name="__main__", alter_sys=True)"""


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("experiments gpu --help", ""),
        ("experiments list", "error: needs the package tyro; only the command gpu runs without\n"),
        ("models.generate", "error: import of tyro halted; None in sys.modules\n"),
    ],
)
def test_what_runs_without_packages_that_a_gpu_machine_lacks(command, error):
    run = [sys.executable, "-c", WITHOUT, *command.split()]
    assert subprocess.run(run, capture_output=True, text=True).stderr == error
