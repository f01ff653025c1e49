"""Calls that launch what an equal call launched, on other tensors."""

import contextlib
import inspect
import operator
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from op_calls import ATTENTION, copied, function, good_call, on_device, same
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from kernels.launch import launch, on_gpu_of_tensors, remembered
from kernels.primitives import INTERPRETED
from kernels.testing.cases import OPS
from kernels.tiles import Target, force_target

CONFIGS = [(op, {}) for op in OPS if op not in ("copy_blocks", "swap_blocks")]
FEATURED = [(op, {"features": (one,)}) for op, _ in CONFIGS for one in OPS[op].features]
CONFIGS += [(op, {"options": {"return_lse": True, "num_splits": 2}}) for op in ATTENTION]


def counted(launcher):
    """A remembered launcher, and the launcher, which counts its calls."""
    launcher = mock.Mock(wraps=launcher)
    return remembered(launcher), launcher


@pytest.mark.parametrize(("op", "config"), CONFIGS)
def test_an_equal_call_gives_what_the_launcher_gives(op, config, device):
    call, launcher = counted(inspect.unwrap(function(op)))
    first, second = (on_device(good_call(op, **config, seed=seed), device) for seed in (1, 2))
    expected = copied(second)
    result = inspect.unwrap(function(op))(**expected)
    call(**first)
    again = call(**second)
    assert launcher.call_count == 1
    assert type(again) is type(result)
    assert again is second.get("out", again) or isinstance(again, tuple)
    assert same((again, second), (result, expected))


class OnlyMemory(TorchDispatchMode):
    """Refuses the operators of PyTorch, apart from those that allocate or view memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.is_view or "empty" in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("op", "config"), CONFIGS + FEATURED)
def test_a_launcher_only_allocates_and_views_memory(op, config, monkeypatch):
    if not INTERPRETED:
        pytest.skip("a launch on meta tensors would fail")
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_args, **_options: None)
    call = good_call(op, **config, device="meta")
    call |= {"out": None} if op in ATTENTION else {}
    with OnlyMemory():
        inspect.unwrap(function(op))(**call)


class Kernel:
    """A kernel that lists its launches."""

    arg_names = ("x", "n")

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launched.append((grid, *args, *constants.values()))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(sys.modules["kernels.launch"], "INTERPRETED", True)
    return Kernel()


ONE, OTHER = torch.zeros(2, 8), torch.ones(2, 8)


@pytest.mark.parametrize(
    ("launcher", "args"),
    [
        (lambda kernel, x, y: launch(kernel, (1,), x[1:], n=1), (ONE, OTHER)),
        (lambda kernel, x, y: launch(kernel, (1,), x, n=y), (ONE, ONE)),
        (lambda kernel, x, y: launch(kernel, (1,), *x, n=1), ([ONE], OTHER)),
    ],
)
def test_a_launch_that_the_layouts_do_not_determine_is_not_repeated(launcher, args, kernel):
    call, counting = counted(lambda *args: launcher(kernel, *args))
    for count in (1, 2, 3):
        call(*args)
        assert counting.call_count == count


@pytest.mark.parametrize(
    "other",
    [
        (ONE, 1.0), (ONE, True), (ONE, 2), (ONE.half(), 1), (ONE[:, :4], 1), (ONE.T, 1),
        (torch.zeros(17)[1:].view(2, 8), 1), (ONE.to("meta"), 1), (ONE, None),
    ],
)  # fmt: skip
def test_calls_are_told_apart(other, kernel):
    call = remembered(lambda x, n: launch(kernel, (1,), x, n=n))
    call(ONE, 1)
    call(*other)
    with force_target(Target("cuda", 90, 7)):
        call(ONE, 1)
    call(OTHER, 1)
    *firsts, (grid_again, *again) = kernel.launched
    assert [grid for grid, *_ in firsts] == [(1,)] * 3, "launched by the function"
    assert all(map(operator.is_, firsts[1][1:], other))
    assert grid_again == (1, 1, 1), "launched again"
    assert all(map(operator.is_, again, (OTHER, 1)))


def test_a_call_inside_another_is_part_of_it(kernel):
    inner = remembered(lambda x: launch(kernel, (1,), x, n=1))
    outer = remembered(lambda x, y: (inner(x), launch(kernel, (2,), y, n=2))[:0])
    inner(ONE)
    for _ in range(2):
        kernel.launched.clear()
        assert outer(ONE, OTHER) == ()
        assert [(grid[0], n) for grid, _, n in kernel.launched] == [(1, 1), (2, 2)]


@pytest.mark.parametrize("current", [0, 1])
def test_launchers_run_with_the_gpu_of_their_tensors_as_the_current_one(current, monkeypatch):
    """Triton launches on the current device, wherever the tensors are; flash-attn does the same."""
    entered = []

    @contextlib.contextmanager
    def enter(index):
        entered.append(index)
        yield
        entered.append("left")

    on_gpu_1 = SimpleNamespace(is_cpu=False, is_cuda=True, get_device=lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", enter)
    launch = on_gpu_of_tensors(lambda *_args, **_kwargs: list(entered))
    expected = [1] if current == 0 else []
    assert launch(None, torch.empty(0), on_gpu_1) == expected
    assert launch(x=on_gpu_1)[-1:] == expected
    assert entered.count("left") == 2 * len(expected)
