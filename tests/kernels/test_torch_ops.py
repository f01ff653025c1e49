"""Every op as a PyTorch operator: opcheck, torch.compile, torch.export, and what a call costs."""

from __future__ import annotations

import contextlib
import time
import timeit
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels
from kernels import torch_ops
from kernels.flash_attn_compat import flash_attn_varlen_func, flash_attn_with_kvcache
from kernels.testing.accuracy import bits
from kernels.testing.inputs import random_paged_batch, random_shared_prefix_args

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

SHAPE = {
    "num_q_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "block_size": 4,
    "dtype": torch.float32,
}


FLASH_ATTN = ("flash_attn_kvcache", "flash_attn_varlen")


def clean(tensor):
    """Without the poison: opcheck compares everything it finds, and NaN is not equal to itself."""
    return tensor.nan_to_num(0.0, 0.0, 0.0)


def decode_call(device, **options):
    q, k_cache, v_cache, *rest = random_paged_batch([5, 0], device=device, **SHAPE).decode_args
    return (q, clean(k_cache), clean(v_cache), *rest), {"out": torch.zeros_like(q), **options}


def with_fp8_cache(call, *caches):
    """The same call with an fp8 cache and scales. caches: positions of k_cache and v_cache."""
    args, options = list(call[0]), dict(call[1])
    for i in caches:
        args[i] = args[i].to(torch.float8_e4m3fn)
    scale = torch.tensor(0.5, device=args[caches[0]].device)
    return tuple(args), {**options, "k_scale": scale, "v_scale": scale[None]}


def prefill_call(device):
    batch = random_paged_batch([5, 3], query_lens=[2, 1], device=device, **SHAPE)
    q, k_cache, v_cache, *rest = batch.prefill_args
    options = {"max_seqlen_q": 2, "out": torch.zeros_like(q), "return_lse": True}
    return (q, clean(k_cache), clean(v_cache), *rest), options


def cascade_call(device):
    args = random_shared_prefix_args([2], [5], [1, 2], device=device, **SHAPE)
    q, k_cache, v_cache, *rest = args
    options = {"out": torch.zeros_like(q), "sinks": torch.ones(2, device=device)}
    return (q, clean(k_cache), clean(v_cache), *rest), {**options, "return_lse": True}


def flash_attn_calls(device):
    """Of flash_attn_kvcache, on a paged and a contiguous cache, and of flash_attn_varlen."""
    q, k, v = torch.randn(3, 2, 1, 1, 16, device=device).unbind(0)
    k_cache, v_cache = torch.randn(2, 4, 8, 1, 16, device=device).unbind(0)
    lens, starts = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in ([3, 5], [0, 1, 3])
    )
    tables, angles = lens[:, None] - 3, torch.rand(8, 4, device=device)
    same = {"scale": None, "window": [4, 0], "softcap": 0.0, "alibi_slopes": None}
    options = same | {"rotary_interleaved": True, "num_splits": 0, "return_lse": True}
    new = (
        q,
        k_cache.clone(),
        v_cache.clone(),
        k,
        v,
        angles,
        angles,
        lens,
        None,
        None,
        None,
        tables,
    )
    old = (q, k_cache, v_cache, None, None, None, None, None, 5, None, lens - 3, None)
    packed = torch.randn(3, 1, 16, device=device)
    varlen = (packed, packed, packed, starts, starts, 2, 2)
    return {
        "flash_attn_kvcache": [(new, options), (old, options | {"return_lse": False})],
        "flash_attn_varlen": [(varlen, same | {"block_table": None, "return_lse": True})],
    }


def rotary_args(device):
    cos, sin = torch.rand(2, 8, 4, device=device).unbind(0)
    return torch.tensor([0, 7], device=device), cos, sin


def calls(device):
    """Arguments of one call of every operator (several where paths differ)."""
    cache = torch.randn(2, 2, 3, 4, 1, 16, device=device)
    rows = torch.randn(2, 2, 1, 16, device=device)
    slots = torch.tensor([5, -1], device=device)
    pairs = torch.tensor([[0, 2], [-1, -1]], device=device)
    host_cache = torch.zeros(2, 2, 5, 4, 1, 16, pin_memory=device.type == "cuda")
    out, lse = torch.randn(2, 3, 2, 16, device=device), torch.randn(2, 3, 2, device=device)
    tables = torch.tensor([[1, 0], [2, -1]], dtype=torch.int32, device=device)
    layers = [plane.clone() for plane in cache.flatten(0, 1)]
    return {
        **flash_attn_calls(device),
        "apply_rotary_embedding": [((rows[0], *rotary_args(device)), {"interleaved": True})],
        "copy_blocks": [(([cache.clone()], pairs), {}), ((layers, pairs), {})],
        "merge_attention_states": [((out[0], lse[0], out[1], lse[1]), {})],
        "paged_decode_attention": [
            decode_call(device, return_lse=True),
            decode_call(device, num_splits=2, window_size=3, softcap=5.0),
            with_fp8_cache(decode_call(device), 1, 2),
        ],
        "paged_prefill_attention": [
            prefill_call(device),
            with_fp8_cache(prefill_call(device), 1, 2),
        ],
        "rope_store_kvcache": [
            rope_store := (
                (rows[0].clone(), *rows, *cache[:, 0].clone(), slots, *rotary_args(device)),
                {},
            ),
            with_fp8_cache(rope_store, 3, 4),
        ],
        "shared_prefix_decode_attention": [
            cascade_call(device),
            with_fp8_cache(cascade_call(device), 1, 2),
        ],
        "slot_mapping_from_positions": [((slots, tables, slots * 0 + 1, 4), {})],
        "store_kvcache": [
            store := ((*rows, *cache[:, 0].clone(), slots), {}),
            with_fp8_cache(store, 2, 3),
        ],
        "swap_blocks": [((cache, host_cache, pairs), {})],
    }


MUTATED = {
    "copy_blocks": {"planes"},
    "flash_attn_kvcache": {"k_cache", "v_cache"},
    "paged_decode_attention": {"out"},
    "paged_prefill_attention": {"out"},
    "rope_store_kvcache": {"query", "k_cache", "v_cache"},
    "shared_prefix_decode_attention": {"out"},
    "store_kvcache": {"k_cache", "v_cache"},
    "swap_blocks": {"dst_cache"},
}


OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def operator(name):
    return getattr(torch.ops.pagelab, name).default


def test_every_public_op_is_an_operator(device):
    registered = torch._C._dispatch_get_all_op_names()
    registered = {name.removeprefix("pagelab::") for name in registered if "pagelab::" in name}
    assert registered == set(calls(device)) == {*kernels.__all__, *FLASH_ATTN}


@pytest.mark.parametrize("name", [*kernels.__all__, *FLASH_ATTN])
def test_schema_names_what_is_mutated(name):
    arguments = operator(name)._schema.arguments
    mutated = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    assert mutated == MUTATED.get(name, set())


@pytest.mark.parametrize("name", [*kernels.__all__, *FLASH_ATTN])
def test_opcheck(name, device):
    for args, kwargs in calls(device)[name]:
        # test_schema compares arguments before and after, which PyTorch cannot do with fp8.
        has_fp8 = any(getattr(arg, "dtype", None) == torch.float8_e4m3fn for arg in args)
        tests = OPCHECKS[1:] if has_fp8 else OPCHECKS
        torch.library.opcheck(operator(name), args, kwargs, test_utils=tests)


def decode_step(key, value, caches, q, positions, tables, pairs):
    """A decode step through most of the ops, with and without the optional results."""
    seqs = torch.arange(len(positions), device=q.device)
    context_lens = (positions + 1).int()
    slots = kernels.slot_mapping_from_positions(positions, tables, seqs, caches.shape[3])
    for k_cache, v_cache in zip(*caches, strict=True):
        kernels.store_kvcache(key, value, k_cache, v_cache, slots)
        args = (q, k_cache, v_cache, tables, context_lens)
        a, lse_a = kernels.paged_decode_attention(*args, return_lse=True)
        b = torch.empty_like(q)
        kernels.paged_decode_attention(*args, window_size=2, num_splits=2, out=b)
        q = kernels.merge_attention_states(a, lse_a, b, lse_a - 1)[0] + q
    kernels.copy_blocks(caches, pairs)
    kernels.copy_blocks([tuple(layer) for layer in caches.unbind(1)], pairs.flip(0))
    return q


def decode_step_args(device):
    return (
        *torch.randn(2, 2, 1, 16, device=device).unbind(0),
        torch.randn(2, 2, 6, 4, 1, 16, device=device),
        torch.randn(2, 2, 16, device=device),
        torch.tensor([5, 2], device=device),
        torch.tensor([[1, 4], [3, -1]], dtype=torch.int32, device=device),
        torch.tensor([[1, 0], [3, 5]], device=device),
    )


def fp8_step(key, value, q, k_cache, v_cache, slots, tables, lens):
    """Scales as numbers: schemas have no type for "a number or a tensor", so the traced call makes
    tensors of numbers."""
    scales = {"k_scale": 0.5, "v_scale": 2}
    rows = {"key": key, "value": value, "slot_mapping": slots}
    kernels.store_kvcache(**rows, k_cache=k_cache, v_cache=v_cache, **scales)
    return kernels.paged_decode_attention(q, k_cache, v_cache, tables, lens, **scales)


def fp8_step_args(device):
    return (
        *torch.randn(2, 2, 1, 16, device=device),
        torch.randn(1, 2, 16, device=device),
        *torch.zeros(2, 3, 4, 1, 16, device=device).to(torch.float8_e4m3fn),
        torch.tensor([4, 5], device=device),
        torch.tensor([[1]], dtype=torch.int32, device=device),
        torch.tensor([2], dtype=torch.int32, device=device),
    )


def flash_attn_step(q, k, v, k_cache, v_cache, lens, starts, table):
    """Every path of both flash-attn functions: append, prefill, decode, packed and paged keys."""
    caches, new = (k_cache, v_cache), (k, v)
    a = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lens, causal=True)
    b = flash_attn_with_kvcache(
        a[:, :1], *caches, cache_seqlens=5, block_table=table, window_size=(3, 1)
    )
    packed = (a + b).flatten(0, 1)
    c = flash_attn_varlen_func(packed, packed, packed, starts, starts, 2, 2, causal=True)
    d, lse, _ = flash_attn_varlen_func(
        c, *caches, starts, starts, 2, 2, return_attn_probs=True, block_table=table
    )
    return d, lse


def flash_attn_step_args(device):
    integers = ([1, 4], [0, 2, 4], [[1, 0], [2, 3]])
    return (
        *torch.randn(3, 2, 2, 1, 16, device=device).unbind(0),
        *torch.randn(2, 4, 8, 1, 16, device=device).unbind(0),
        *(torch.tensor(i, dtype=torch.int32, device=device) for i in integers),
    )


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
    ("step", "step_args", "how"),
    [
        *((decode_step, decode_step_args, how) for how in ("compile", "export", "export-strict")),
        *((fp8_step, fp8_step_args, how) for how in ("compile", "export")),
        *((flash_attn_step, flash_attn_step_args, how) for how in ("compile", "dynamic", "export")),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_traces_without_a_graph_break_and_computes_the_same(step, step_args, how, device):
    def arguments():
        torch.manual_seed(0)
        return step_args(device)

    def same(tensors, others):
        pairs = zip(tree_leaves(tensors), tree_leaves(others), strict=True)
        return all(torch.equal(bits(a), bits(b)) for a, b in pairs)

    got_args, want_args = arguments(), arguments()
    want = step(*want_args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracers, about themselves
        got = trace(how, step, arguments())(*got_args)
    assert same(got, want)
    assert same(got_args, want_args)
    assert not same(got_args, arguments())


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
        decode_step(*decode_step_args(device))
        operator("slot_mapping_from_positions")(*calls(device)["slot_mapping_from_positions"][0][0])
    assert calls_seen.names == ["pagelab::slot_mapping_from_positions"]


class _TensorOfGpu1:
    is_cpu, is_cuda = False, True

    def get_device(self):
        return 1


@pytest.mark.parametrize("current", [0, 1])
def test_launchers_run_with_the_gpu_of_their_tensors_as_the_current_one(current, monkeypatch):
    """As in flash-attn: Triton launches on the current device, wherever the tensors are."""
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


def overhead_per_call(device) -> dict[str, float]:
    """Microseconds of CPU time that a call with nothing to do takes more than its launcher does.

    `function`: of the public function; `operator`: of torch.ops, which traced graphs call.
    """
    empty = torch.empty(0, dtype=torch.int64, device=device)
    args = (empty, torch.empty(0, 3, dtype=torch.int32, device=device), empty, 16)
    function = kernels.slot_mapping_from_positions
    ways = {
        "launcher": function.__wrapped__,
        "function": function,
        "operator": operator("slot_mapping_from_positions"),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(40):  # in turn, so that a busy machine disturbs all alike
        for name, call in ways.items():
            seconds = timeit.timeit(lambda call=call: call(*args), time.process_time, number=100)
            best[name] = min(best[name], seconds * 1e4)
    return {name: best[name] - best["launcher"] for name in ("function", "operator")}


def test_overhead_per_call(device, record_property):
    overhead = overhead_per_call(device)
    record_property("overhead_us", overhead)
    assert overhead["function"] < 2
    assert overhead["operator"] < 10
