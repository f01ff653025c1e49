"""Kernel launches: host time of a call of each op, split by three timings taken in turn.

None of them waits for a kernel:

- ``checks``: the public function without its launches: argument checks, choice of tiles, allocation
  of results and scratch, and collecting the kernels' arguments;
- ``call``: the public function.  The difference to ``checks`` is Triton's launch of its kernels;
- ``dispatcher``: an operator of the same schema that does nothing.  Graphs of torch.compile pay for
  it on top, since they call ``torch.ops.pagelab``; the public functions do not.

On a GPU a launch includes the driver's.  Elsewhere tensors are meta tensors, which like those of a
GPU have no values for the host to check, and a launch ends where Triton would call the driver.  An
engine that replays CUDA graphs pays for none of this.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from experiments import style
from experiments.harness import Count, Options, grid
from experiments.overhead import timing

if TYPE_CHECKING:
    import torch

WAYS = ("checks", "call", "dispatcher")
_CALLS_A_SAMPLE = 5
_ARCH = "sm_90"
"""The target of launches where there is no GPU."""


@dataclass(frozen=True, kw_only=True)
class Launch(Options):
    """Every op at the shapes of a decode step, 64 sequences; bf16, 32 query heads, 8 KV heads."""

    launch_samples: Count = 1000
    """Samples of each kind of call, of 5 calls each."""


def cells(options: Launch) -> Iterator[Launch]:
    yield from grid(options, Launch)


def run_cell(cell: Launch) -> list[dict[str, Any]]:
    os.environ.pop("TRITON_INTERPRET", None)  # read when kernels is first imported
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "meta")
    on_gpu = device.type == "cuda"
    rows = []
    with contextlib.nullcontext() if on_gpu else _launches_that_end_at_the_driver():
        for config, call in _calls(device).items():
            num_launches, spans = _measure(call, cell.launch_samples, on_gpu)
            for way, seconds in spans.items():
                rows.append(
                    {
                        "op": call.func.__name__,
                        "config": config,
                        "tensors": device.type,
                        "num_launches": num_launches,
                        "phase": way,
                        **timing.columns("call", seconds),
                    }
                )
    return rows


def _calls(device: torch.device) -> dict[str, partial]:
    """A call of a public function for each configuration.

    All integers are zero, which is valid everywhere: empty contexts and nothing to move.
    """
    import torch

    import kernels

    batch, num_q_heads, num_kv_heads, head_dim, block_size = 64, 32, 8, 128, 16

    def tensor(*shape: int, dtype=torch.bfloat16, device=device, **options) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device, **options).zero_()

    in_host_memory = {"device": "cpu", "pin_memory": True} if device.type == "cuda" else {}
    caches_shape = (2, 32, 64, block_size, num_kv_heads, head_dim)
    caches, host_caches = tensor(*caches_shape), tensor(*caches_shape, **in_host_memory)
    layers = [tuple(layer) for layer in caches.unbind(1)]
    kv, kv8 = layers[0], tensor(*caches_shape[1:], dtype=torch.float8_e4m3fn).unbind(0)[:2]
    scales = dict.fromkeys(("k_scale", "v_scale"), tensor(num_kv_heads, dtype=torch.float32))
    q, new = tensor(batch, num_q_heads, head_dim), [tensor(batch, num_kv_heads, head_dim)] * 2
    out, lse = tensor(*q.shape), tensor(batch, num_q_heads, dtype=torch.float32)
    lens, starts = tensor(batch, dtype=torch.int32), tensor(batch + 1, dtype=torch.int32)
    tables, slots = tensor(batch, 256, dtype=torch.int32), tensor(batch, dtype=torch.int64)
    groups = (tables[:4], lens[:4], starts[:5])
    logits = tensor(batch, 128_256)
    pairs = tensor(8, 2, dtype=torch.int64)
    rotary = (slots, *[tensor(4096, head_dim // 2, dtype=torch.float32)] * 2)
    x, weight = tensor(batch, num_q_heads * head_dim), tensor(num_q_heads * head_dim)
    gate_up = tensor(batch, 2 * 3 * num_q_heads * head_dim).chunk(2, dim=1)
    norms = dict.fromkeys(("q_norm_weight", "k_norm_weight"), tensor(head_dim))
    rotate_and_store = partial(kernels.rope_store_kvcache, q, *new, *kv, slots, *rotary)
    decode = partial(kernels.paged_decode_attention, q)
    whole, split = {"num_splits": 1, "out": out}, {"num_splits": 8, "out": out}
    return {
        "store": partial(kernels.store_kvcache, *new, *kv, slots),
        "store, fp8": partial(kernels.store_kvcache, *new, *kv8, slots, **scales),
        "rotate and store": rotate_and_store,
        "normalise, rotate and store": partial(rotate_and_store, **norms),
        "rotate": partial(kernels.apply_rotary_embedding, q, *rotary),
        "slot mapping": partial(
            kernels.slot_mapping_from_positions, slots, tables, slots, block_size
        ),
        "add and normalise": partial(kernels.add_rms_norm, x, tensor(*x.shape), weight),
        "gated activation": partial(kernels.gated_activation, *gate_up, "silu"),
        "decode": partial(decode, *kv, tables, lens, **whole),
        "decode, fp8": partial(decode, *kv8, tables, lens, **whole, **scales),
        "decode, 8 splits": partial(decode, *kv, tables, lens, **split),
        "prefill": partial(
            kernels.paged_prefill_attention, q, *kv, tables, starts, lens, max_seqlen_q=1, out=out
        ),
        "shared prefix": partial(
            kernels.shared_prefix_decode_attention, q, *kv, *groups, tables, lens, **whole
        ),
        "merge": partial(kernels.merge_attention_states, q, lse, q, lse),
        "copy": partial(kernels.copy_blocks, caches, pairs),
        "copy, list of layers": partial(kernels.copy_blocks, layers, pairs),
        "swap": partial(kernels.swap_blocks, caches, host_caches, pairs),
        "sample": partial(kernels.sample_tokens, logits, lse[:, 0].contiguous(), slots),
        "sample, greedy": partial(kernels.sample_tokens, logits),
    }


@functools.cache
def _operators_that_do_nothing() -> tuple[torch.library.Library, dict[str, Callable]]:
    """An operator with the schema of each op, by name, and the library that keeps them alive.

    The ops' own operators would run their fake implementations on meta tensors.
    """
    import torch

    import kernels

    library = torch.library.Library("pagelab_nothing", "DEF")
    operators = {}
    for name in kernels.__all__:
        schema = getattr(torch.ops.pagelab, name).default._schema
        tensors = (torch.empty(0),) * len(schema.returns)
        result = tensors if len(tensors) > 1 else tensors[0] if tensors else None
        library.define(str(schema).removeprefix("pagelab::"))
        nothing = lambda *_args, result=result, **_options: result  # noqa: E731
        library.impl(name, nothing, "CompositeExplicitAutograd")
        operators[name] = getattr(torch.ops.pagelab_nothing, name).default
    return library, operators


def _dispatch(call: partial) -> partial:
    """The same call on an operator that does nothing."""
    _, operators = _operators_that_do_nothing()
    name, args = call.func.__name__, call.args
    if name == "copy_blocks":  # whose operator takes a flat list
        caches = args[0]
        is_list = isinstance(caches, list)
        args = ([plane for layer in caches for plane in layer] if is_list else [caches], *args[1:])
    return partial(operators[name], *args, **call.keywords)


class _KernelWithoutGpu:
    """Stands in for a compiled kernel."""

    function, packed_metadata = 0, ()

    def launch_metadata(self, *_) -> None: ...

    def run(self, *_) -> None: ...


@contextlib.contextmanager
def _launches_that_end_at_the_driver() -> Iterator[None]:
    from triton.runtime.jit import JITFunction

    from kernels.compiled.architectures import ARCHITECTURES
    from kernels.compiled.compile import without_gpu

    def compile_nothing(self, key, _signature, device, *_) -> _KernelWithoutGpu:
        hash(self)  # finds the globals that every launch compares, as compiling does
        compiled, *_ = self.device_caches[device]
        return compiled.setdefault(key, _KernelWithoutGpu())

    compiled = mock.patch.object(JITFunction, "_do_compile", compile_nothing)
    with compiled, without_gpu(ARCHITECTURES[_ARCH]):
        yield


def _measure(call: partial, num_samples: int, on_gpu: bool) -> tuple[int, dict[str, list[float]]]:
    """Kernels that a call launches, and samples of the seconds of each kind of call."""
    import torch
    from triton.runtime.jit import JITFunction

    launches = []
    count = {"__getitem__": lambda _, grid: lambda *_args, **_options: launches.append(grid)}
    nothing = {"__getitem__": lambda _, _grid: lambda *_args, **_options: None}
    dispatch = _dispatch(call)
    with mock.patch.multiple(JITFunction, **count):
        call()
    call()  # compiles
    spans = {way: [] for way in WAYS}
    with timing.without_collection():
        for _ in range(num_samples):
            with mock.patch.multiple(JITFunction, **nothing):
                spans["checks"].append(timing.seconds_of(_several, call) / _CALLS_A_SAMPLE)
            spans["call"].append(timing.seconds_of(_several, call) / _CALLS_A_SAMPLE)
            spans["dispatcher"].append(timing.seconds_of(_several, dispatch) / _CALLS_A_SAMPLE)
            if on_gpu:
                torch.cuda.synchronize()  # or the queue of launches would fill up and block
    return len(launches), spans


def _several(call: Callable[[], object]) -> None:
    for _ in range(_CALLS_A_SAMPLE):
        call()


def table(rows: style.DataFrame) -> style.DataFrame:
    """Median microseconds of checks, launch and dispatcher, a row per configuration."""
    table = rows.pivot(index="config", columns="phase", values="us")
    table = table.reindex(rows["config"].unique(), columns=WAYS)
    launch = table["call"] - table["checks"]
    return table[["checks"]].assign(launch=launch, dispatcher=table["dispatcher"]).reset_index()


def draw(rows: style.DataFrame) -> style.Figure:
    """A bar for each configuration."""
    parts = table(rows).set_index("config")
    until = "" if rows["tensors"].iloc[0] == "cuda" else ", up to the driver"
    looks = {
        "checks, tiles, allocation": style.bar(style.BLUE),
        f"Triton's launch{until}": style.bar(style.ORANGE),
        "dispatcher, in compiled graphs": style.bar("white", "////"),
    }
    figure, (axis,), _ = style.panel_grid(1, width=5, height=0.3 + 0.2 * len(parts))
    starts = parts.cumsum(axis=1) - parts
    for part, (label, look) in zip(parts, looks.items(), strict=True):
        axis.barh(range(len(parts)), parts[part], left=starts[part], label=label, **look)
    style.name_rows(axis, parts.index)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("host time (µs per call)")
    axis.legend(fontsize=6)
    return figure
