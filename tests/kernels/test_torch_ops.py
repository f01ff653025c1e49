"""Every op as a PyTorch operator: opcheck, torch.compile, torch.export, eager calls."""

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
from op_calls import ATTENTION, copied, function, good_call, i32, on_device, same, tensors_of
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from kernels import torch_ops
from kernels.flash_attn_compat import flash_attn_varlen_func, flash_attn_with_kvcache
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.cases import CASES, FEATURES

CHECKS = ("test_schema", "test_faketensor")
CHECKS += ("test_autograd_registration", "test_aot_dispatch_dynamic")


def public_calls(device) -> list[tuple[Callable, dict]]:
    """Public functions and their arguments: every op, with and without options, and every path of
    flash-attn's functions. Numbers as scales become tensors, as schemas have no type for both.

    On a GPU without swap_blocks: tracers and opcheck copy its host cache into pageable memory."""
    changes = {"kv_dtype": FP8_DTYPE, "scales": "number", "options": {"return_lse": True}}
    found = []
    for name in [op for op in CASES if device.type == "cpu" or op != "swap_blocks"]:
        plain = good_call(name) | ({"out": None} if name in ATTENTION else {})
        other = good_call(name, **changes, features=FEATURES.get(name, ())[:1])
        found += [(function(name), plain), (function(name), other)]
    cached, varlen = good_call("flash_attn_with_kvcache"), good_call("flash_attn_varlen_func")
    table, new = i32([0], [1]), {"k": torch.ones(2, 3, 2, 16), "v": torch.ones(2, 3, 2, 16)}
    decode = {"q": cached["q"][:, :1], "cache_seqlens": 5, "window_size": (3, 1)}
    paged = {"k": cached["k_cache"], "v": cached["v_cache"], "return_attn_probs": True}
    rotary = {"rotary_cos": torch.ones(8, 4), "rotary_sin": torch.ones(8, 4)}
    found += [
        (flash_attn_with_kvcache, cached | new | rotary | {"cache_seqlens": i32(1, 4)}),
        (flash_attn_with_kvcache, cached | decode | {"block_table": table}),
        (flash_attn_with_kvcache, cached | {"cache_leftpad": i32(0, 2)}),
        (flash_attn_varlen_func, varlen | {"causal": True}),
        (flash_attn_varlen_func, varlen | paged | {"block_table": table}),
    ]
    return [(op, on_device(call, device)) for op, call in found]


class OperatorCalls(TorchDispatchMode):
    """Records calls of this project's operators."""

    def __init__(self, device):
        super().__init__()
        self.calls = []
        with self:
            for op, call in public_calls(device):
                op(**call)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "pagelab":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_eager_calls_bypass_the_dispatcher(device):
    assert not OperatorCalls(device).calls


def test_opcheck_of_every_operator(device, monkeypatch):
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    calls, checked = OperatorCalls(device).calls, set()
    monkeypatch.undo()
    for operator, args, kwargs in calls:
        # test_schema compares arguments before and after, which PyTorch cannot do with fp8.
        # Options change shapes and what is written, not how the operator is traced.
        has_fp8 = any(tensor.dtype == FP8_DTYPE for tensor in tensors_of(args, kwargs))
        tests = CHECKS[has_fp8 : 2 if operator in checked else None]
        torch.library.opcheck(operator, args, kwargs, test_utils=tests)
        checked.add(operator)
    registered = {x for x in torch._C._dispatch_get_all_op_names() if "pagelab::" in x}
    unchecked = set() if device.type == "cpu" else {"pagelab::swap_blocks"}
    assert {operator.name() for operator in checked} == registered - unchecked
    assert len(registered) == len(kernels.__all__) + 2, "and flash-attn's two functions"


def trace(how, step, args):
    """The step as a tracer understands it; a graph break is an error."""
    if how in ("compile", "dynamic"):
        torch._dynamo.reset()
        dynamic = how == "dynamic"
        return torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)

    class Module(torch.nn.Module):
        forward = staticmethod(step)

    return torch.export.export(Module(), args, strict=how == "export-strict").module()


@pytest.mark.parametrize(
    ("how", "first"), [("compile", 0), ("dynamic", 1), ("export", 1), ("export-strict", 0)]
)
def test_traces_without_a_graph_break_and_computes_the_same(how, first, device):
    """Of every op in turn the call without options and the one with them."""
    ops, inputs = zip(*public_calls(device)[first::2], strict=True)

    def step(inputs):
        return [op(**call) for op, call in zip(ops, inputs, strict=True)]

    got_args, want_args = copied(inputs), copied(inputs)
    want = step(want_args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracers, about themselves
        got = trace(how, step, (copied(inputs),))(got_args)
    assert same(got, want)
    assert same(got_args, want_args)
    assert not same(got_args, inputs)


class _TensorOfGpu1:
    is_cpu, is_cuda = False, True

    def get_device(self):
        return 1


@pytest.mark.parametrize("current", [0, 1])
def test_launchers_run_with_the_gpu_of_their_tensors_as_the_current_one(current, monkeypatch):
    """Triton launches on the current device, wherever the tensors are; flash-attn does the same."""
    entered = []

    @contextlib.contextmanager
    def enter(index):
        entered.append(index)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", enter)
    launch = torch_ops._on_its_gpu(lambda *_args, **_kwargs: list(entered), False)
    expected = [1] if current == 0 else []
    assert launch(None, torch.empty(0), _TensorOfGpu1()) == expected
    assert launch(x=_TensorOfGpu1())[-1:] == expected
    assert entered.count("left") == 2 * len(expected)
