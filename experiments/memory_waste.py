"""What KV cache memory is used for: contiguous reservations against pages of 1 to 256 tokens.

Redoes figure 2 of the PagedAttention paper (Kwon et al., SOSP 2023): the share of the memory that
holds tokens, is reserved for tokens to come, or is lost to internal and external fragmentation,
for the systems before paging (reservations up to the maximum length, to a power of two, or to the
final length) and for paging.

Service model, where every block goes through a real manager:

* Requests are served by the engine's own scheduler, without a model: first come first served, and
  when a running request finds no block the youngest gives up its own and goes to the head of the
  line (see :mod:`cache.serving.scheduler`).
* Time is counted in steps: each takes 1, computes the whole prompt of every request it admits and
  one token of the others.  The last token of a request is never stored.
* Requests arrive in the pattern of the trace.  The distances are scaled so that, with unlimited
  memory, the running requests would fill ``load`` times the cache on average; with a load above 1
  requests queue for memory, as in the paper's measurements.
* ``max_model_len`` is the next power of two of the longest request; the cache has the slots of
  ``sequences_in_cache`` such requests (about 8 in the paper: OPT-13B, 2048 tokens, 15.7k slots).
* Reservations that depend on the future know it: as in the paper, ``pow2`` is the next power of
  two of the true output length.

Memory is measured in every step in which a request waits, after admission, and the mean is taken
over these steps.  Free memory counts as external fragmentation if the waiting request
would fit in it were it in one place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache import ServiceModel, make_manager
from cache.managers import Contiguous, Paged
from cache.serving import open_loop
from cache.serving.open_loop import engine_without_model
from cache.serving.scheduler import Scheduler, Step
from experiments import style
from experiments.harness import Absent, Axis, Count, Experiment, Positive, Unavailable, grid
from experiments.load import request_lengths
from experiments.load.request_lengths import RequestLengths
from experiments.load.workloads import OnTraces

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RESERVATIONS = ("max", "pow2", "oracle")
_KINDS = {
    "used": ("token states", style.BLUE, ""),
    "reserved": ("reserved", style.SKY, ""),
    "internal": ("internal fragmentation", style.ORANGE, "////"),
    "external": ("external fragmentation", style.RED, "\\\\\\\\"),
    "free": ("free, but too little", "white", ""),
}


@dataclass(frozen=True, kw_only=True)
class MemoryWaste(OnTraces):
    """The grid: traces x (reservations and block sizes)."""

    block_size: Axis[Count] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Tokens per block of the paged cache."""
    num_requests: Count = 2_000
    """Requests taken from each trace, at equal distances."""
    sequences_in_cache: Count = 8
    """Size of the cache, in requests of the maximum length."""
    load: Positive = 2.0
    """Memory that the arriving requests would fill on average, in caches."""


@dataclass(frozen=True, kw_only=True)
class SystemCell(MemoryWaste):
    system: Axis[str]
    """A reservation, or "paged"."""


def cells(options: MemoryWaste) -> Iterator[SystemCell | Absent]:
    traces = [*options.sources(lengths_suffice=True)]
    yield from grid(options, SystemCell, trace=traces, system=_RESERVATIONS, block_size=[1])
    yield from grid(options, SystemCell, trace=traces, system=["paged"])


def run_cell(cell: SystemCell) -> list[dict[str, Any]]:
    lengths = request_lengths.sample(cell.trace, cell.num_requests)
    max_model_len = 1 << (lengths.longest - 1).bit_length()
    num_slots = cell.sequences_in_cache * max_model_len
    num_blocks = num_slots // cell.block_size
    if cell.system == "paged":
        manager = make_manager("paged", num_blocks=num_blocks, block_size=cell.block_size)
    else:
        manager = make_manager(
            "contiguous",
            num_blocks=num_blocks,
            block_size=cell.block_size,
            reservation=cell.system,
            max_model_len=max_model_len,
            final_length=lambda seq: lengths.prompts[seq.seq_id] + lengths.outputs[seq.seq_id],
        )
    result = serve(lengths, manager, arrival_steps(lengths, cell.load * num_slots))
    return [
        {
            "trace": lengths.trace,
            "system": cell.system,
            "block_size": cell.block_size,
            "requests": len(lengths),
            "requests_left_out": lengths.num_left_out,
            "max_model_len": max_model_len,
            "cache_slots": num_slots,
            "load": cell.load,
            "steps": result.steps,
            "measured_steps": result.measured_steps,
            "mean_running": result.mean_running,
            "preemptions": result.preemptions,
            **{f"{kind}_fraction": share for kind, share in result.shares.items()},
        }
    ]


def arrival_steps(lengths: RequestLengths, mean_slots: float) -> list[float]:
    """Arrivals in decode steps, such that unlimited memory would hold ``mean_slots`` on average.

    A request with p prompt and n output tokens holds p to p + n slots for n steps.
    """
    slot_steps = sum(
        output * (prompt + (output + 1) / 2)
        for prompt, output in zip(lengths.prompts, lengths.outputs, strict=True)
    )
    first, last = lengths.arrivals_ms[0], lengths.arrivals_ms[-1]
    scale = slot_steps / mean_slots / max(last - first, 1)
    return [(arrival - first) * scale for arrival in lengths.arrivals_ms]


_DECODE_STEPS = ServiceModel(
    step_seconds=1.0, prefill_tokens_per_second=math.inf, decode_seconds_per_sequence=0.0
)


@dataclass(frozen=True)
class ServingResult:
    steps: int
    measured_steps: int
    """Steps in which a request waited for memory."""
    mean_running: float
    """Requests in these steps."""
    preemptions: int
    shares: dict[str, float]
    """Mean share of the slots by kind (the fields of MemoryUsage) in these steps."""


def serve(
    lengths: RequestLengths, manager: Contiguous | Paged, arrivals: list[float]
) -> ServingResult:
    """Serve all requests by the service model of this file, and leave the manager empty.

    The cache must hold a request of the maximum length.  Raises Unavailable if no request ever
    waits for memory.
    """
    engine = engine_without_model(
        manager,
        max_num_seqs=len(lengths),
        max_num_batched_tokens=sum(lengths.prompts) + len(lengths),
        max_model_len=lengths.longest,
    )
    engine.runner = measured = _MemoryOfSteps(engine.scheduler)
    run = open_loop.serve(
        engine,
        [bytes(length) for length in lengths.prompts],
        lengths.outputs,
        list(map(math.ceil, arrivals)),
        service=_DECODE_STEPS,
    )
    if not measured.steps:
        raise Unavailable("no request waited for memory: it takes a higher load")
    slots = manager.num_blocks * manager.block_size * measured.steps
    return ServingResult(
        steps=len(run.steps),
        measured_steps=measured.steps,
        mean_running=measured.running / measured.steps,
        preemptions=sum(request.num_preemptions for request in run.requests),
        shares={kind: total / slots for kind, total in measured.slots.items()},
    )


class _MemoryOfSteps:
    """A runner that computes nothing and sums up what memory is used for while a request waits."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.steps = self.running = 0
        self.slots = dict.fromkeys(_KINDS, 0)

    def run(self, step: Step, manager: Contiguous | Paged) -> None:
        waiting = self._scheduler.waiting
        if not waiting:
            return
        of_waiting = (waiting[0],) if isinstance(manager, Contiguous) else ()
        usage = manager.memory_usage(*of_waiting)
        for kind in self.slots:
            self.slots[kind] += getattr(usage, kind)
        self.steps += 1
        self.running += len(self._scheduler.running)


def plot(rows: pd.DataFrame, folder: Path) -> list[Path]:
    """The figure memory_waste: a panel per trace, a stacked bar per system."""
    with style.figures():
        return style.save(_draw(rows), folder, "memory_waste")


def _draw(rows: pd.DataFrame) -> Figure:
    figure, axes, spare = style.panel_grid(rows["trace"].nunique(), height=2.1, sharey=True)
    for axis, (_, of_trace) in zip(axes, rows.groupby("trace", sort=False), strict=True):
        _draw_bars(axis, of_trace)
    figure.supylabel("share of the KV cache memory (%)", fontsize=8)
    style.shared_legend(figure, spare, columns=5)
    return figure


def _draw_bars(axis: Axes, rows: pd.DataFrame) -> None:
    import numpy as np

    contiguous = rows[rows["system"] != "paged"]
    paged = rows[rows["system"] == "paged"].sort_values("block_size")
    # Room between the reservations and the block sizes.
    positions = [*range(len(contiguous)), *range(len(contiguous) + 1, len(rows) + 1)]
    labels = [*contiguous["system"], *map(str, paged["block_size"])]
    bottom = 0.0
    for kind, (label, color, hatch) in _KINDS.items():
        shares = [*contiguous[f"{kind}_fraction"], *paged[f"{kind}_fraction"]]
        heights = 100 * np.array(shares)
        axis.bar(
            positions,
            heights,
            bottom=bottom,
            width=0.85,
            color=color,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.4,
            label=label,
        )
        bottom = bottom + heights
    first = rows.iloc[0]
    axis.set(title=f"{first['trace']}\nmaximum length {first['max_model_len']:,}", ylim=(0, 100))
    axis.set_xticks(positions, labels, rotation=90)
    axis.set_xlabel("reservation | block size", fontsize=7)
    axis.grid(axis="x", visible=False)


EXPERIMENT = Experiment(
    name="memory_waste",
    figure="PagedAttention fig. 2: KV memory used, reserved and fragmented, contiguous vs paged",
    options=MemoryWaste(),
    quick=MemoryWaste(block_size=(1, 16, 64, 256), num_requests=300),
    cells=cells,
    run_cell=run_cell,
    plot=plot,
)
