"""Every op as a PyTorch operator: opcheck, torch.compile, torch.export, eager calls."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
from op_calls import FP8_OPS, copied, good_call, i32, on_device, same
from torch import ones
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels
from kernels import torch_ops
from kernels.flash_attn_compat import flash_attn_varlen_func, flash_attn_with_kvcache
from kernels.testing.cases import CASES, FEATURES, make_case

FLASH_ATTN = ("flash_attn_kvcache", "flash_attn_varlen")


TINY = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16, "num_tokens": 3, "block_size": 4}
TINY |= {
    "context_lens": (5, 3),
    "query_lens": (2, 1),
    "group_sizes": (1, 1),
    "width": 16,
    "dtype": torch.float32,
}


def calls(name: str, device) -> list[dict[str, object]]:
    """Arguments of an operator, without and with options that take other paths."""
    if name in CASES:
        features = FEATURES.get(name, ())
        found = [make_case(name, **TINY, features=f, device=device) for f in ((), features[:1])]
        if name in FP8_OPS:
            fp8 = {"kv_dtype": torch.float8_e4m3fn, "features": features[1:], "device": device}
            found.append(make_case(name, **TINY, **fp8))
        found = [case.inputs for case in found]
        if name == "copy_blocks":
            return [
                {"planes": tree_leaves(c["caches"]), "src_to_dst": c["src_to_dst"]} for c in found
            ]
        outs = [{"out": torch.empty_like(call["q"])} if "q" in call else {} for call in found]
        return [call | out for call, out in zip(found, outs, strict=True)]
    options = {"scale": None, "window": [4, 0], "softcap": 0.0, "alibi_slopes": None}
    options["return_lse"] = True
    if name == "flash_attn_varlen":
        found = [good_call("flash_attn_varlen_func") | options | {"block_table": None}]
    else:
        absent = ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_seqlen")
        absent += ("cache_batch_idx", "cache_leftpad", "block_table")
        call = dict.fromkeys(absent) | good_call("flash_attn_with_kvcache") | options
        call |= {"rotary_interleaved": True, "num_splits": 0}
        new = dict.fromkeys(("k", "v"), ones(2, 3, 2, 16)) | {"cache_seqlens": i32(3, 5)}
        new |= dict.fromkeys(("rotary_cos", "rotary_sin"), ones(8, 4))
        old = {"cache_seqlen": 5, "cache_leftpad": i32(0, 2), "return_lse": False}
        found = [call | new | {"block_table": i32([0], [1])}, call | old]
    return [on_device(call, device) for call in found]


OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def operator(name):
    return getattr(torch.ops.pagelab, name).default


def test_every_public_op_is_an_operator():
    registered = torch._C._dispatch_get_all_op_names()
    registered = {name.removeprefix("pagelab::") for name in registered if "pagelab::" in name}
    assert registered == {*kernels.__all__, *FLASH_ATTN}


@pytest.mark.parametrize("name", [*kernels.__all__, *FLASH_ATTN])
def test_opcheck(name, device):
    for number, call in enumerate(calls(name, device)):
        # test_schema compares arguments before and after, which PyTorch cannot do with fp8.
        # Options change the schema and the shapes, not how the operator is traced.
        tests = OPCHECKS["k_scale" in call : -1 if number else None]
        torch.library.opcheck(operator(name), (), call, test_utils=tests)


def public_calls(device) -> list[tuple[Callable, dict]]:
    """Public functions and their arguments: every op, with and without options, and every path of
    flash-attn's functions. Numbers as scales become tensors, as schemas have no type for both."""
    found = []
    for name in CASES:
        options = {"kv_dtype": torch.float8_e4m3fn, "features": FEATURES.get(name, ())[:1]}
        for sizes in (TINY, TINY | options):
            case = make_case(name, **sizes, scales="number", device=device)
            found.append((getattr(kernels, name), case.inputs))
    cached, varlen = good_call("flash_attn_with_kvcache"), good_call("flash_attn_varlen_func")
    table, new = i32([0], [1]), torch.ones(2, 3, 2, 16)
    decode = {"q": cached["q"][:, :1], "cache_seqlens": 5, "window_size": (3, 1)}
    paged = {"k": cached["k_cache"], "v": cached["v_cache"], "return_attn_probs": True}
    flash_attn = [
        (flash_attn_with_kvcache, cached | {"k": new, "v": new, "cache_seqlens": i32(1, 4)}),
        (flash_attn_with_kvcache, cached | decode | {"block_table": table}),
        (flash_attn_varlen_func, varlen | {"causal": True}),
        (flash_attn_varlen_func, varlen | paged | {"block_table": table}),
    ]
    return found + [(function, on_device(call, device)) for function, call in flash_attn]


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
    functions, inputs = zip(*public_calls(device), strict=True)

    def step(inputs):
        return [function(**call) for function, call in zip(functions, inputs, strict=True)]

    got_args, want_args = copied(inputs), copied(inputs)
    want = step(want_args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracers, about themselves
        got = trace(how, step, (copied(inputs),))(got_args)
    assert same(got, want)
    assert same(got_args, want_args)
    assert not same(got_args, inputs)


class _OperatorCalls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "pagelab":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_eager_calls_bypass_the_dispatcher(device):
    with _OperatorCalls() as calls_seen:
        for function, call in public_calls(device):
            function(**call)
        operator("slot_mapping_from_positions")(**calls("slot_mapping_from_positions", device)[0])
    assert calls_seen.names == ["pagelab::slot_mapping_from_positions"]


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
    launch = torch_ops._on_its_gpu(lambda *_args, **_kwargs: list(entered))
    expected = [1] if current == 0 else []
    assert launch(None, torch.empty(0), _TensorOfGpu1()) == expected
    assert launch(x=_TensorOfGpu1())[-1:] == expected
    assert entered.count("left") == 2 * len(expected)
