"""Launches of a Triton kernel that is no op of this project, in a process that compiles kernels."""

import pytest

KERNELS = """
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.executor import Fault, execute_ptx


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


@triton.jit
def angles(x, out):
    i = tl.arange(0, 64)
    value = tl.load(x + i)
    tl.store(out + i, tl.sin(value))
    tl.store(out + 64 + i, tl.cos(value))
    tl.store(out + 128 + i, tl.randn(3, i))


@triton.jit
def histogram(x, out):
    values = tl.load(x + tl.arange(0, 256))
    tl.store(out + tl.arange(0, 16), tl.histogram(values, 16))


@triton.jit
def product(a, b, out, steps):
    i = tl.arange(0, 64)
    total = tl.zeros((64, 64), tl.float32)
    for step in range(steps):
        total = tl.dot(a.load([0, 64 * step]), b.load([64 * step, 0]), total)
    tl.store(out + i[:, None] * 64 + i, total)


@triton.jit
def printing(x):
    i = tl.arange(0, 32)
    value = tl.load(x + i)
    tl.device_print("pair", value, i.to(tl.int64) << 33, hex=True)
    tl.device_print("float", value / 2)
    tl.device_assert(value < 31, "31 is too much")


def tuned():
    x = torch.zeros(100, dtype=torch.int32)
    with execute_ptx("sm_90") as run:
        fill[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100)
        multiprocessors = driver.active.utils.get_device_properties(0)["multiprocessor_count"]
    (launch,) = run.launches
    print(x.tolist() == [*range(100)], launch.warp_instructions > 0, multiprocessors)


def arguments():
    out, given, total = torch.zeros(32), torch.arange(32.0), torch.zeros(1)
    with execute_ptx("sm_80"):
        scaled[(1,)]((out, given), 0.5, 1.5, total)
    print(torch.equal(out, given / 2 + 1.5), total.item() == out.sum().item())


def functions():
    x = torch.linspace(-1, 1, 64).double().mul(5).pow(9).float()  # up to 2e6: exact reduction
    out, counts = torch.empty(192), torch.empty(16, dtype=torch.int32)
    values = torch.arange(256, dtype=torch.int32).square() % 16
    with execute_ptx("sm_90"):
        angles[(1,)](x, out)
        histogram[(1,)](values, counts)
    exact = torch.cat([x.double().sin(), x.double().cos()])
    close = (out[:128] - exact).abs().max() < 2e-7  # 2 ulp of numbers up to 1
    print(close.item(), out[128:].abs().max().item() < 5, out[128:].std().item() > 0.5)
    print(torch.equal(counts, values.bincount(minlength=16).int()))


def descriptors():
    a, b, out = torch.randn(60, 192).half(), torch.randn(192, 64).half(), torch.empty(64, 64)
    for target in ("sm_80", "sm_90", "sm_100"):
        with execute_ptx(target):
            descriptors = (TensorDescriptor.from_tensor(one, [64, 64]) for one in (a, b))
            product[(1,)](*descriptors, out, 3)
        print(torch.allclose(out[:60], a.float() @ b.float(), atol=1e-4), out[60:].any().item())


def cached():
    with triton.knobs.cache.scope(), tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        with execute_ptx("sm_89"), execute_ptx("sm_89"):
            histogram[(1,)](torch.zeros(256, dtype=torch.int32), torch.empty(16, dtype=torch.int32))
        print([path.name for path in Path(folder).iterdir()], triton.knobs.cache.dir == folder)


def prints():
    try:
        with execute_ptx("sm_80"):
            printing[(1,)](torch.arange(32, dtype=torch.int32), num_warps=1, debug=True)
    except Fault as fault:
        print(fault)
"""


@pytest.mark.parametrize(
    ("call", "printed"),
    [
        ("tuned", "True True 132"),
        ("arguments", "True True"),
        ("functions", "True True True\nTrue"),
        ("descriptors", "True False\nTrue False\nTrue False"),
        ("cached", "['executor'] True"),
    ],
)
def test_launch(tmp_path, compiling_process, call, printed):
    assert printed_by_kernels(tmp_path, compiling_process, call).strip() == printed


def test_prints_and_assertions(tmp_path, compiling_process):
    text = printed_by_kernels(tmp_path, compiling_process, "prints")
    assert "pid (0, 0, 0) idx (18) pair: (operand 0) 0x00000012\n" in text
    assert "pid (0, 0, 0) idx (18) pair: (operand 1) 0x0000002400000000\n" in text
    assert "pid (0, 0, 0) idx (18) float: 9.000000\n" in text
    assert text.count("\n") == 3 * 32 + 1
    assert "trap: assertion failed: 31 is too much; printing, program (0, 0, 0), thread 31" in text


def printed_by_kernels(tmp_path, compiling_process, call) -> str:
    (tmp_path / "own_kernels.py").write_text(KERNELS)
    path = str(tmp_path)
    code = f"import sys; sys.path.insert(0, {path!r}); import own_kernels; own_kernels.{call}()"
    return compiling_process(code)
