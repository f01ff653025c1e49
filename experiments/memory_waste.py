"""Use of KV cache memory: contiguous reservations against pages of 1 to 256 tokens.

Redoes figure 2 of the PagedAttention paper (Kwon et al., SOSP 2023).  It shows which share of the
memory holds tokens, is reserved for later tokens, or is lost to fragmentation.  It compares paging
with three contiguous reservations: of the maximum length, of the next power of two of the output
length, and of the final length.

The engine's scheduler serves the requests with a real manager, without a model.  A step takes one
unit of time.  It computes the whole prompt of each admitted request and one token of each running
request.  The last token of a request is never stored.  Requests arrive in the pattern of the trace,
with gaps scaled so that unlimited memory would hold ``load`` times the cache on average.
``max_model_len`` is the longest request, rounded up to a power of two.  The cache has slots for
``sequences_in_cache`` such requests (about 8 in the paper: OPT-13B, 2048 tokens, 15.7k slots).

Memory is averaged over the steps that leave a request waiting after admission.  Free memory counts
as external fragmentation if it has enough slots for the waiting request, but they are not
contiguous.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from cache import ServiceModel, Trace, latent_slot_bytes, make_manager, slot_bytes
from cache.managers import CacheManager, Contiguous
from cache.serving import open_loop
from cache.serving.open_loop import engine_without_model
from cache.serving.scheduler import Step
from experiments import style
from experiments.harness import Axis, Count, Experiment, Positive, Unavailable, grid
from experiments.load import workloads
from experiments.load.workloads import MAX_OUTPUT_TOKENS, OnTraces, Source

_RESERVATIONS = ("max", "pow2", "oracle")
_KINDS = {
    "used": ("token states", style.bar(style.BLUE)),
    "reserved": ("reserved", style.bar(style.SKY)),
    "internal": ("internal fragmentation", style.bar(style.ORANGE, "////")),
    "external": ("external fragmentation", style.bar(style.RED, "\\\\\\\\")),
    "free": ("free, but too little", style.bar("white")),
}


@dataclass(frozen=True, kw_only=True)
class MemoryWaste(OnTraces):
    """The grid: traces x (reservations and block sizes)."""

    block_size: Axis[Count] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Tokens per block of the paged cache."""
    num_requests: Count = 2_000
    """Number of requests, evenly spaced in each trace."""
    sequences_in_cache: Count = 8
    """Size of the cache, divided by the maximum length of a request."""
    load: Positive = 2.0
    """Memory that the arriving requests would fill on average, divided by the cache's size."""


@dataclass(frozen=True, kw_only=True)
class SystemCell(MemoryWaste):
    system: Axis[str]
    """A reservation, or "paged"."""


def cells(options: MemoryWaste) -> Iterator[SystemCell]:
    traces = [*options.sources(lengths_suffice=True)]
    yield from grid(options, SystemCell, trace=traces, system=_RESERVATIONS, block_size=[1])
    yield from grid(options, SystemCell, trace=traces, system=["paged"])


def run_cell(cell: SystemCell) -> list[dict[str, Any]]:
    trace, num_left_out = sample(cell.trace, cell.num_requests)
    max_model_len = 1 << (_longest(trace) - 1).bit_length()
    num_slots = cell.sequences_in_cache * max_model_len
    sizes = {"num_blocks": num_slots // cell.block_size, "block_size": cell.block_size}
    manager = manager_of(cell.system, max_model_len, **sizes)
    served = serve(trace, manager, arrival_steps(trace, cell.load * num_slots))
    return [
        {
            "trace": trace.name,
            **cell.columns("system", "block_size", "load"),
            "requests": len(trace),
            "requests_left_out": num_left_out,
            "max_model_len": max_model_len,
            "cache_slots": num_slots,
            **served,
        }
    ]


def manager_of(system: str, max_model_len: int, **sizes: Any) -> CacheManager:
    """A manager that pages, or that makes the reservation ``system``."""
    if system not in _RESERVATIONS:
        return make_manager("paged", **sizes)
    sizes |= {"max_model_len": max_model_len, "final_length": attrgetter("max_num_tokens")}
    return make_manager("contiguous", reservation=system, **sizes)


def sample(source: Source, num_requests: int) -> tuple[Trace, int]:
    """``num_requests`` evenly spaced requests of a trace, or all if the trace has fewer.

    Requests with an output above MAX_OUTPUT_TOKENS, a fault of the file, are left out; also returns
    their number.  Lengths are at least 1.  Raises Unavailable if all requests are left out."""
    trace = workloads.load(source)
    possible = np.flatnonzero(trace.output_lengths <= MAX_OUTPUT_TOKENS)
    if not len(possible):
        raise Unavailable(f"{trace.name} has no output of at most {MAX_OUTPUT_TOKENS} tokens")
    count = min(num_requests, len(possible))
    chosen = trace.take(possible[np.arange(count) * len(possible) // count])
    lengths = {name: getattr(chosen, name).clip(1) for name in ("input_lengths", "output_lengths")}
    return replace(chosen, **lengths), len(trace) - len(possible)


def _longest(trace: Trace) -> int:
    """Number of tokens of the longest request, output included."""
    return int((trace.input_lengths + trace.output_lengths).max())


def arrival_steps(trace: Trace, mean_slots: float) -> list[float]:
    """Arrival times, in decode steps, at which unlimited memory would hold ``mean_slots`` on
    average.  A request with p prompt and n output tokens holds p to p + n slots for n steps."""
    outputs = trace.output_lengths
    slot_steps = float((outputs * (trace.input_lengths + (outputs + 1) / 2)).sum())
    passed = trace.timestamps_ms - trace.timestamps_ms[0]
    return (passed * (slot_steps / mean_slots / max(passed[-1], 1))).tolist()


_DECODE_STEPS = ServiceModel(
    step_seconds=1.0, prefill_tokens_per_second=math.inf, decode_seconds_per_sequence=0.0
)


def serve(trace: Trace, manager: CacheManager, arrivals: list[float]) -> dict[str, float]:
    """Serve all requests in unit steps, and leave the manager empty.

    Returns columns of a row.  ``measured_steps``: number of steps in which a request waited for
    memory.  ``mean_running`` and the shares of the slots by kind (fields of MemoryUsage) are means
    over these steps.  Raises Unavailable if no request ever waits for memory.
    """
    engine = engine_without_model(
        manager,
        max_num_seqs=len(trace),
        max_num_batched_tokens=int(trace.input_lengths.sum()) + len(trace),
        max_model_len=_longest(trace),
    )
    waiting, totals = engine.scheduler.waiting, Counter[str]()

    def measure(step: Step, seconds: float) -> None:
        if waiting:
            totals.update(steps=1, running=len(engine.scheduler.running))
            if isinstance(manager, Contiguous):
                usage = manager.memory_usage(waiting.first()[1])
            else:
                usage = manager.memory_usage()
            totals.update({kind: getattr(usage, kind) for kind in _KINDS})

    engine.on_step = measure
    run = open_loop.serve(
        engine,
        [*map(bytes, trace.input_lengths.tolist())],
        trace.output_lengths.tolist(),
        list(map(math.ceil, arrivals)),
        service=_DECODE_STEPS,
    )
    if not totals:
        raise Unavailable("no request waited for memory: it takes a higher load")
    slots = manager.num_blocks * manager.block_size * totals["steps"]
    return {
        "steps": len(run.steps),
        "measured_steps": totals["steps"],
        "mean_running": totals["running"] / totals["steps"],
        "preemptions": sum(request.num_preemptions for request in run.requests),
        **{f"{kind}_fraction": totals[kind] / slots for kind in _KINDS},
    }


def _draw(rows: style.DataFrame) -> style.Figure:
    figure, axes, spare = style.panel_grid(rows["trace"].nunique(), height=2.1, sharey=True)
    rows = rows.assign(paged=~rows["system"].isin(_RESERVATIONS))
    for axis, (trace, of_trace) in zip(axes, rows.groupby("trace", sort=False), strict=True):
        bars = of_trace.sort_values(["paged", "block_size"])
        labels = bars["block_size"].astype(str).where(bars["paged"], bars["system"])
        # A gap separates the reservations from the block sizes.
        positions = bars["paged"].to_numpy() + range(len(bars))
        bottom = 0.0
        for kind, (label, look) in _KINDS.items():
            heights = 100 * bars[f"{kind}_fraction"].to_numpy()
            axis.bar(positions, heights, bottom=bottom, width=0.85, label=label, **look)
            bottom = bottom + heights
        longest = of_trace["max_model_len"].iloc[0]
        axis.set(title=f"{trace}\nmaximum length {longest:,}", ylim=(0, 100))
        axis.set_xticks(positions, labels, rotation=90)
        axis.set_xlabel("reservation | block size", fontsize=7)
        axis.grid(axis="x", visible=False)
    ylabel = "share of the KV cache memory (%)"
    return style.shared_legend(figure, spare, columns=5, ylabel=ylabel)


_LAYERS = {
    "llama_8b_bytes": slot_bytes(num_layers=1, num_kv_heads=8, head_dim=128),
    "deepseek_v3_bytes": latent_slot_bytes(num_layers=1, kv_lora_rank=512, qk_rope_head_dim=64),
}
"""Bytes of a token in one layer in bf16: keys and values of eight heads, and a latent (MLA)."""


def _bytes_per_token(rows: style.DataFrame) -> style.DataFrame:
    """Memory per stored token and layer, waste included."""
    columns = {name: size / rows["used_fraction"] for name, size in _LAYERS.items()}
    return rows[["trace", "system", "block_size"]].assign(**columns)


EXPERIMENT = Experiment(
    name="memory_waste",
    figure="PagedAttention fig. 2: KV memory used, reserved and fragmented, contiguous vs paged",
    options=MemoryWaste(),
    quick=MemoryWaste(block_size=(1, 16, 256), num_requests=150),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"memory_waste": _draw}, {"bytes_per_token": (_bytes_per_token, "%.0f")}),
)
