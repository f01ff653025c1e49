"""flash-attn's functions as PyTorch operators: opcheck, torch.compile, torch.export."""

import warnings
from collections.abc import Callable

import pytest
import torch
from op_calls import copied, good_call, i32, on_device, same
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import store_kvcache
from kernels.flash_attn_compat import flash_attn_varlen_func, flash_attn_with_kvcache

CHECKS = ("test_schema", "test_faketensor")
CHECKS += ("test_autograd_registration", "test_aot_dispatch_dynamic")


def public_calls(device) -> list[tuple[Callable, dict]]:
    """Both functions and arguments for every path."""
    cached, varlen = good_call("flash_attn_with_kvcache"), good_call("flash_attn_varlen_func")
    table, new = i32([0], [1]), {"k": torch.ones(2, 3, 2, 16), "v": torch.ones(2, 3, 2, 16)}
    decode = {"q": cached["q"][:, :1], "cache_seqlens": 5, "window_size": (3, 1)}
    paged = {"k": cached["k_cache"], "v": cached["v_cache"], "return_attn_probs": True}
    rotary = {"rotary_cos": torch.ones(8, 4), "rotary_sin": torch.ones(8, 4)}
    found = [
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


def test_opcheck_of_both_operators(device, monkeypatch):
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    calls, checked = OperatorCalls(device).calls, set()
    monkeypatch.undo()
    for operator, args, kwargs in calls:
        # Options change shapes and what is written, not how the operator is traced.
        tests = CHECKS[: 2 if operator in checked else None]
        torch.library.opcheck(operator, args, kwargs, test_utils=tests)
        checked.add(operator)
    registered = {x for x in torch._C._dispatch_get_all_op_names() if "pagelab::" in x}
    assert {operator.name() for operator in checked} == registered
    assert len(registered) == 2


def trace(how, step, args):
    """The step as a tracer understands it; a graph break is an error."""
    if how in ("compile", "dynamic"):
        torch._dynamo.reset()
        dynamic = how == "dynamic"
        return torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)

    class Module(torch.nn.Module):
        forward = staticmethod(step)

    return torch.export.export(Module(), args, strict=how == "export-strict").module()


@pytest.mark.parametrize("how", ["compile", "dynamic", "export", "export-strict"])
def test_traces_without_a_graph_break_and_computes_the_same(how, device):
    ops, inputs = zip(*public_calls(device), strict=True)

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


def test_other_ops_run_eagerly_in_a_compiled_function(device):
    def step(call):
        call = call | {"key": call["key"] * 2}
        store_kvcache(**call)
        return call["k_cache"] + 1

    got_args, want_args = (on_device(good_call("store_kvcache"), device) for _ in range(2))
    want = step(want_args)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="`disable`"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(got_args)
    torch._dynamo.reset()
    assert same(torch.compile(step, backend="aot_eager")(got_args), want)
    assert same(got_args, want_args)
