"""Kernel launches: host time of one call of each op, in three interleaved timings.

No timing waits for a kernel:

- ``checks``: the op's launcher without Triton's launches.  It checks arguments, chooses tiles,
  allocates results and scratch, and collects the kernels' arguments;
- ``first``: the whole launcher.  ``first`` minus ``checks`` is the time of Triton's launches;
- ``repeated``: a call that repeats an equal call, see ``kernels/launch.py``.

On a GPU a launch includes the driver's time.  Without a GPU, tensors are meta tensors without
values, so the host makes the same checks.  A launch then ends where Triton would call the driver.
An engine that replays CUDA graphs has none of these costs.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from experiments import style
from experiments.harness import Count, Options, grid
from experiments.overhead import timing

if TYPE_CHECKING:
    import torch

PHASES = ("checks", "first", "repeated")
_CALLS_A_SAMPLE = 5
_WITH_OUT = ("paged_decode_attention", "paged_prefill_attention", "shared_prefix_decode_attention")
_ARCH = "sm_90"
"""Architecture for which kernels are compiled if there is no GPU."""


@dataclass(frozen=True, kw_only=True)
class Launch(Options):
    """Every op at the shapes of a decode step: 64 sequences, bf16, 32 query heads, 8 KV heads."""

    launch_samples: Count = 1000
    """Number of samples of each kind of call.  A sample is 5 calls."""


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
            for phase, seconds in spans.items():
                rows.append(
                    {
                        "op": call.func.__name__,
                        "config": config,
                        "tensors": device.type,
                        "num_launches": num_launches,
                        "phase": phase,
                        **timing.columns("call", seconds),
                    }
                )
    return rows


def _calls(device: torch.device) -> dict[str, partial]:
    """For each configuration: a call of the public function with short sequences."""
    import torch

    import kernels
    from kernels.testing.cases import make_case

    batch = 64
    sizes: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    sizes |= {"num_tokens": batch, "context_lens": (1,) * batch, "query_lens": (1,) * batch}
    sizes |= {"table_width": 256, "group_sizes": (batch // 4,) * 4, "prefix_lens": (16,) * 4}
    sizes |= {"num_positions": 4096, "num_pairs": 8, "num_layers": 32, "vocab_size": 128_256}
    sizes |= {"padded": False}
    fp8 = {"kv_dtype": torch.float8_e4m3fn}
    whole, split = ({"num_splits": n, "return_lse": False} for n in (1, 8))
    configs: dict[str, tuple[str, dict[str, Any]]] = {
        "store": ("store_kvcache", {}),
        "store, fp8": ("store_kvcache", fp8),
        "rotate and store": ("rope_store_kvcache", {}),
        "normalise, rotate and store": ("rope_store_kvcache", {"features": ("norms",)}),
        "rotate": ("apply_rotary_embedding", {}),
        "slot mapping": ("slot_mapping_from_positions", {}),
        "add and normalise": ("add_rms_norm", {}),
        "gated activation": ("gated_activation", {}),
        "decode": ("paged_decode_attention", {"options": whole}),
        "decode, fp8": ("paged_decode_attention", {"options": whole, **fp8}),
        "decode, 8 splits": ("paged_decode_attention", {"options": split}),
        "prefill": ("paged_prefill_attention", {"options": whole}),
        "shared prefix": ("shared_prefix_decode_attention", {"options": whole}),
        "merge": ("merge_attention_states", {}),
        "store latents": ("concat_and_cache_mla", {}),
        "decode latents": ("paged_mla_decode_attention", {"options": whole}),
        "bounds of blocks": ("update_block_bounds", {}),
        "select blocks": ("select_blocks", {}),
        "copy": ("copy_blocks", {}),
        "copy, list of layers": ("copy_blocks", {"features": ("list",)}),
        "swap": ("swap_blocks", {}),
        "sample": ("sample_tokens", {}),
        "sample, greedy": ("sample_tokens", {"features": ("greedy",)}),
    }
    calls = {}
    for config, (op, changes) in configs.items():
        inputs = make_case(op, **sizes | changes, device=device).inputs
        if op in _WITH_OUT:
            inputs["out"] = torch.empty_like(inputs["q"])
        calls[config] = partial(getattr(kernels, op), **inputs)
    return calls


@contextlib.contextmanager
def _launches_that_end_at_the_driver() -> Iterator[None]:
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    from kernels.compiled.architectures import ARCHITECTURES
    from kernels.compiled.compile import without_gpu

    class KernelWithoutGpu(CompiledKernel):
        def __init__(self) -> None:
            self.module, self.function, self.packed_metadata = self, 0, ()
            self.name, self.src = "", None
            self._run = lambda *_: None

    def compile_nothing(self, key, _signature, device, *_) -> CompiledKernel:
        hash(self)  # finds the globals that each launch compares, as compiling does
        compiled, *_ = self.device_caches[device]
        return compiled.setdefault(key, KernelWithoutGpu())

    compiled = mock.patch.object(JITFunction, "_do_compile", compile_nothing)
    with compiled, without_gpu(ARCHITECTURES[_ARCH]):
        yield


def _measure(call: partial, num_samples: int, on_gpu: bool) -> tuple[int, dict[str, list[float]]]:
    """Number of kernels that a call launches, and samples of each kind of call in seconds."""
    import torch
    from triton.runtime.jit import JITFunction

    first = partial(inspect.unwrap(call.func), **call.keywords)
    with mock.patch.object(JITFunction, "__getitem__") as launched:
        first()
    call()  # compiles, and the call is remembered
    nothing: Any = {"__getitem__": lambda _, _grid: lambda *_args, **_options: None}
    patches: Any = (mock.patch.multiple(JITFunction, **nothing), *[contextlib.nullcontext()] * 2)
    # A Timer disables the garbage collector while it times.
    timers = list(zip(PHASES, map(timeit.Timer, (first, first, call)), patches, strict=True))
    spans: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(num_samples):
        for phase, timer, patch in timers:
            with patch:
                spans[phase].append(timer.timeit(_CALLS_A_SAMPLE) / _CALLS_A_SAMPLE)
        if on_gpu:
            torch.cuda.synchronize()  # a full queue of launches would block
    return launched.call_count, spans


def table(rows: style.DataFrame) -> style.DataFrame:
    """Median microseconds of checks, launch and repeated call.  One row per configuration."""
    table = rows.pivot(index="config", columns="phase", values="us")
    table = table.reindex(rows["config"].unique(), columns=PHASES)
    table.insert(1, "launch", table["first"] - table["checks"])
    return table.drop(columns="first").reset_index()


def draw(rows: style.DataFrame) -> style.Figure:
    """One bar per configuration.  A mark shows the time of a repeated call."""
    times = table(rows).set_index("config")
    parts = times[["checks", "launch"]]
    until = "" if rows["tensors"].iloc[0] == "cuda" else ", up to the driver"
    looks = {
        "checks, tiles, allocation": style.bar(style.BLUE),
        f"Triton's launch{until}": style.bar(style.ORANGE),
    }
    figure, (axis,), _ = style.panel_grid(1, width=5, height=0.3 + 0.2 * len(parts))
    starts = parts.cumsum(axis=1) - parts
    for part, (label, look) in zip(parts, looks.items(), strict=True):
        axis.barh(range(len(parts)), parts[part], left=starts[part], label=label, **look)
    look = style.dots(style.BLACK, "d") | {"label": f"a repeated call{until}"}
    axis.plot(times["repeated"], range(len(times)), **look)
    style.name_rows(axis, parts.index)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("host time (µs per call)")
    axis.legend(fontsize=6)
    return figure
