"""`import cache` loads nothing heavy: command lines and schedulers use it."""

from __future__ import annotations

import subprocess
import sys

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
