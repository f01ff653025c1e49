"""What is compiled ahead is what a launch looks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bench.compile_ahead import jobs_of, launch_on_meta
from experiments.bench.kernel_problems import OPS
from experiments.bench.problem import Shape
from experiments.gpu import cascade, kernel_latency, tile_sweep


def test_every_shape_of_ours_is_a_job_once():
    grids = (
        kernel_latency.cells(kernel_latency.KernelLatency()),
        cascade.cells(cascade.Cascade()),
        tile_sweep.cells(tile_sweep.TileSweep()),
    )
    for cells in map(list, grids):
        jobs = jobs_of(cells)
        shapes = {cell.shape for cell in cells}
        assert {job.work for job in jobs} == shapes
        assert len(set(jobs)) == len(jobs)


def test_cells_of_other_experiments_are_passed_over():
    assert jobs_of([object()]) == []


_DRIVE = """
import sys
from pathlib import Path

from triton.runtime.jit import JITFunction

from experiments.bench.compile_ahead import Job, compile_job, launch_on_meta
from experiments.kernel_accuracy import KernelAccuracy
from experiments.bench.problem import Shape
from kernels.compiled.architectures import ARCHITECTURES
from kernels.compiled.compile import without_gpu

arch = ARCHITECTURES["sm_90"]
cubins = lambda: sorted(path.parent.name for path in Path(sys.argv[1]).rglob("*.cubin"))
shape = Shape(op="decode", batch=20, context_len=64, block_size=16, head_dim=64)
assert compile_job(Job(shape, None), 90, arch.num_multiprocessors) >= 1
ahead = cubins()
assert ahead

# A launch as Triton does it, up to where it has looked for the compiled kernel.
run = JITFunction.run
JITFunction.run = lambda self, *args, **options: run(self, *args, **{**options, "warmup": True})
with without_gpu(arch):
    launch_on_meta(shape)
assert cubins() == ahead, "the launch compiled something else"

compile_job(Job(shape, (0, 32, 4, 3)), 90, arch.num_multiprocessors)
assert len(cubins()) > len(ahead), "another tile is another kernel"

before = cubins()
cell = KernelAccuracy(
    kernel="store_kvcache", block_size=16, dtype="float16", head_dim=64, feature="none"
)
assert compile_job(Job(cell, None), 90, arch.num_multiprocessors) == 1
assert len(cubins()) == len(before) + 1
"""


@pytest.mark.slow
def test_a_launch_finds_what_was_compiled(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", _DRIVE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_every_op_can_be_called_on_meta_tensors(op, kv_dtype, monkeypatch):
    """Their checks pass; what a launch would do is cut off."""
    from triton.runtime.interpreter import GridExecutor

    launched = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda *a, **k: launched.append(a))
    sizes = {"context_len": 64, "prefix_len": 32 if op == "cascade" else 0, "query_len": 1}
    launch_on_meta(Shape(op=op, batch=5, block_size=16, kv_dtype=kv_dtype, num_layers=2, **sizes))
    assert launched
