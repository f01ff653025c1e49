"""Fixtures of the kernel tests, which always run with poisoned fresh memory, and a path to import
``op_calls`` and ``attention_ops`` by, which are no package's modules."""

import contextlib
import ctypes
import json
import math
import mmap
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parent))
from printed import printed_by, start

COMPILE_SHIPPED = """
import dataclasses, json, re
from kernels.compiled.architectures import ARCHITECTURES
from kernels.compiled.compile import compile_call, read_resources
from kernels.compiled.shipped import shipped_calls

arch, op, match = {}
for config, call in shipped_calls(op):
    if re.search(match, config):
        for kernel in compile_call(call, ARCHITECTURES[arch]):
            row = read_resources(op, config, ARCHITECTURES[arch], *kernel)
            print(json.dumps(dataclasses.asdict(row)))
"""


def pytest_addoption(parser):
    parser.addoption(
        "--executor",
        metavar="ptx-ARCH",
        help="execute the PTX compiled for ARCH (sm_80, sm_90 ...), not Triton's interpreter",
    )
    parser.addoption("--part", default="0/1", metavar="I/N", help="only every N-th test, from I")


def pytest_configure(config):
    if config.getoption("--executor"):
        os.environ.pop("TRITON_INTERPRET", None)  # before kernels, and Triton, are imported


def pytest_collection_modifyitems(config, items):
    first, step = map(int, config.getoption("--part", "0/1").split("/"))
    items[:] = items[first::step]


def pytest_generate_tests(metafunc):
    """On the executor, tests run in step and in a seeded order; its own tests choose orders."""
    own = "executor" in metafunc.definition.path.parent.name
    if metafunc.config.getoption("--executor") and not own:
        orders = [None, 0]
        metafunc.parametrize("_executor", orders, ids=["in step", "seed 0"], indirect=True)


@pytest.fixture(autouse=True)
def _executor(request):
    """Runs each test's kernels as `--executor` says."""
    chosen = request.config.getoption("--executor", None)
    if chosen is None:
        yield
        return
    from kernels.executor import execute_ptx

    with execute_ptx(chosen.removeprefix("ptx-"), seed=getattr(request, "param", None)):
        yield


@pytest.fixture(scope="module", autouse=True)
def _poisoned_memory(poisoned_memory):
    return poisoned_memory


@pytest.fixture
def huge_tensor(device, tmp_path_factory):
    """Make zeroed tensors of several GiB. On a CPU only touched pages exist. On a GPU one test at a
    time has such tensors; it is skipped if they do not fit."""
    storages = []

    def make(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        num_bytes = dtype.itemsize * math.prod(shape)
        if device.type == "cpu":
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
            memory = mmap.mmap(-1, num_bytes, flags=flags)
            return torch.frombuffer(memory, dtype=dtype).view(shape)
        taken = sum(storage.nbytes() for storage in storages)
        needed = taken + num_bytes + 2**30  # that tests beside it use
        free = taken + torch.cuda.mem_get_info(device)[0]
        if needed > free:
            sizes = f"{needed / 2**30:.1f} GiB of GPU memory or more, {free / 2**30:.1f} GiB"
            pytest.skip(f"needs {sizes} are free")
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        storages.append(tensor.untyped_storage())
        return tensor

    lock = FileLock(tmp_path_factory.getbasetemp().parent / "huge_tensor.lock")
    with lock if device.type != "cpu" else contextlib.nullcontext():
        yield make
        for storage in storages:  # the traceback of a failed test refers to them
            storage.resize_(0)
        torch.cuda.empty_cache()


@pytest.fixture
def at_the_edge(device):
    """Copy a tensor to the end of the memory that there is: an access past it ends the process."""
    if device.type != "cpu":
        pytest.skip("compute-sanitizer checks this on a GPU")

    def move(tensor: torch.Tensor) -> torch.Tensor:
        num_bytes = tensor.numel() * tensor.itemsize
        end = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, end + mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        no_access = ctypes.CDLL(None, use_errno=True).mprotect
        assert no_access(ctypes.c_void_p(address + end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        moved = torch.frombuffer(
            memory, dtype=tensor.dtype, count=tensor.numel(), offset=end - num_bytes
        )
        return moved.view(tensor.shape).copy_(tensor)

    return move


@pytest.fixture(scope="session")
def compiling_process():
    """Run code where kernels are compiled, in one process for all tests. Returns its output.

    The process is killed at the end and after an error, such as a timeout, as it may still run.
    """
    spawn = multiprocessing.get_context("spawn")
    pools = []

    def run(code: str) -> str:
        if not pools:
            pools.append(ProcessPoolExecutor(1, spawn, initializer=start))
        try:
            return pools[0].submit(printed_by, code).result()
        except BaseException:
            end()
            raise

    def end() -> None:
        for process in multiprocessing.active_children():
            process.kill()
        while pools:
            pools.pop().shutdown()

    yield run
    end()


@pytest.fixture(scope="session")
def run_compiled(compiling_process):
    """Run pytest where kernels are compiled, all of whose tests must pass. Returns its output."""

    def run(*arguments: str) -> str:
        # The last would collect garbage five times at each end: 2 CPU-seconds.
        absent = "cacheprovider", "randomly", "unraisableexception"
        plugins = ["-s", "-v", *(word for name in absent for word in ("-p", f"no:{name}"))]
        options = [*plugins, "-o", "faulthandler_timeout=100", *arguments]
        output = compiling_process(f"import pytest\nprint(pytest.main({options!r}).name)")
        assert output.endswith("\nOK\n"), output
        return output

    return run


@pytest.fixture(scope="session")
def shipped_resources(tmp_path_factory, compiling_process):
    """Rows of shipped kernels: shipped_resources(arch, op, match).

    A selection is compiled once for all pytest-xdist workers; across runs Triton's cache serves.
    """
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    def resources(arch: str, op: str, match: str) -> list[dict]:
        path = shared / f"resources-{arch}-{op}-{match}.jsonl"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_text(compiling_process(COMPILE_SHIPPED.format((arch, op, match))))
        return [json.loads(line) for line in path.read_text().splitlines()]

    return resources
