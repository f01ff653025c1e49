"""Calls that launch what an equal call launched, on other tensors."""

from __future__ import annotations

import inspect
import operator
import sys
from unittest import mock

import pytest
import torch
from op_calls import ATTENTION, copied, function, good_call, on_device, same

from kernels.launch import Remembered, launch
from kernels.testing.cases import CASES
from kernels.tiles import Target, force_target

CONFIGS = [(op, {}) for op in CASES if op not in ("copy_blocks", "swap_blocks")]
CONFIGS += [(op, {"options": {"return_lse": True, "num_splits": 2}}) for op in ATTENTION]


def remembered(op):
    """An op that remembers its calls on any device, and its launcher, which counts them."""
    launcher = mock.Mock(wraps=inspect.unwrap(function(op)))
    return Remembered(launcher), launcher


@pytest.mark.parametrize(("op", "config"), CONFIGS)
def test_an_equal_call_gives_what_the_launcher_gives(op, config, device):
    call, launcher = remembered(op)
    first, second = (on_device(good_call(op, **config, seed=seed), device) for seed in (1, 2))
    expected = copied(second)
    result = inspect.unwrap(function(op))(**expected)
    call(**first)
    again = call(**second)
    assert launcher.call_count == 1
    assert type(again) is type(result)
    assert again is second.get("out", again) or isinstance(again, tuple)
    assert same((again, second), (result, expected))


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
        (lambda kernel, x, y: launch(kernel, (1,), x.view(torch.int32), n=1), (ONE, ONE[:])),
        (lambda kernel, x, y: launch(kernel, (1,), torch.empty(9)[1:], n=1), (ONE, OTHER)),
        (lambda kernel, x, y: [launch(kernel, (1,), z, n=z[:]) for z in [torch.empty(9)]], (1, 2)),
        (lambda kernel, x, y: launch(kernel, (1,), *x, n=1), ([ONE], OTHER)),
        (lambda kernel, x, y: launch(kernel, (1,), x, n=y.diff()), (ONE, OTHER)),
        (lambda kernel, x, y: launch(kernel, (1,), x, n=torch.zeros(3)), (ONE, OTHER)),
        (lambda kernel, x, y: [launch(kernel, (1,), x, n=y), x.add_(1)][:0], (ONE, OTHER)),
        (lambda kernel, x, y: None, (ONE, OTHER)),
    ],
)
def test_a_launch_that_the_layouts_do_not_determine_is_not_repeated(launcher, args, kernel):
    counting = mock.Mock(wraps=lambda *args: launcher(kernel, *args))
    call = Remembered(counting)
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
    call = Remembered(lambda x, n: launch(kernel, (1,), x, n=n))
    call(ONE, 1)
    call(*other)
    call(OTHER, 1)
    _, (grid, *launched), (grid_again, *again) = kernel.launched
    assert all(map(operator.is_, launched, other))
    assert all(map(operator.is_, again, (OTHER, 1)))
    assert grid == (1,), "launched by the function"
    assert grid_again == (1, 1, 1), "launched again"


def test_a_target_that_is_forced_is_told_apart(kernel):
    launcher = mock.Mock(wraps=lambda x: launch(kernel, (1,), x, n=1))
    call = Remembered(launcher)
    call(ONE)
    with force_target(Target("cuda", 90, 7)):
        call(ONE)
    assert launcher.call_count == 2


def test_a_call_inside_another_is_part_of_it(kernel):
    inner = Remembered(lambda x: launch(kernel, (1,), x, n=1))
    outer = Remembered(lambda x, y: (inner(x), launch(kernel, (2,), y, n=2))[:0])
    inner(ONE)
    for _ in range(2):
        kernel.launched.clear()
        assert outer(ONE, OTHER) == ()
        assert [(grid[0], n) for grid, _, n in kernel.launched] == [(1, 1), (2, 2)]
