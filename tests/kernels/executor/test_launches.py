"""Launches of a Triton kernel that is no op of this project, in a process that compiles kernels."""

from __future__ import annotations

import pytest

KERNELS = """
import torch
import triton
import triton.language as tl
from triton.runtime import driver

from kernels.executor import execute_ptx


@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def fill(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, i, mask=i < n)


@triton.jit
def scaled(pair, scale: tl.float16, more: tl.bfloat16, total):
    i = tl.arange(0, 32)
    value = tl.load(pair[1] + i) * scale + more
    tl.store(pair[0] + i, value)
    tl.atomic_add(total, tl.sum(value))


def tuned():
    x = torch.zeros(100, dtype=torch.int32)
    with execute_ptx("sm_90", count=True) as run:
        fill[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100)
        multiprocessors = driver.active.utils.get_device_properties(0)["multiprocessor_count"]
    (launch,) = run.launches
    print(x.tolist() == [*range(100)], launch.counts.written_bytes, multiprocessors)


def arguments():
    out, given, total = torch.zeros(32), torch.arange(32.0), torch.zeros(1)
    with execute_ptx("sm_80"):
        scaled[(1,)]((out, given), 0.5, 1.5, total)
    print(torch.equal(out, given / 2 + 1.5), total.item() == out.sum().item())
"""


@pytest.mark.parametrize(
    ("call", "printed"), [("tuned", "True 400 132"), ("arguments", "True True")]
)
def test_launch(tmp_path, compiling_process, call, printed):
    (tmp_path / "own_kernels.py").write_text(KERNELS)
    path = str(tmp_path)
    code = f"import sys; sys.path.insert(0, {path!r}); import own_kernels; own_kernels.{call}()"
    assert compiling_process(code).strip() == printed
