"""What every kernel's compiled PTX does, counted as it is executed without a GPU.

Each call runs on ``kernels/executor``, which executes the PTX that Triton compiled for the
architecture, is judged against its reference, and is counted: instructions by class, requests to
global memory with the sectors and lines they touch, shared-memory wavefronts and bank conflicts,
tensor-core operations, barriers, copies in flight. From the counts follows a bound of the time
(``bench/modelled_time.py``), in columns that begin with ``modelled_``. It is not a measurement.
Columns that begin with ``executor_`` say how fast the executor itself was, while it counted.

Unseen stay ptxas and all it does (registers, spills, joined, dropped and scheduled instructions),
real speed, caches, the order of accesses on hardware and the last bits of its rounding; reads of
shared memory by wgmma are no wavefronts here.

Beside ours run SGLang's grouped decode and vLLM's unified attention where their files are given.
Triton's fused-attention tutorial is left out: it does other work (fp16, no pages, no grouped
heads), picks its tiles by timing, and its copies by tensor maps are not known to the executor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from experiments import style
from experiments.bench.gpus import GPUS
from experiments.bench.modelled_time import LINE, modelled_time
from experiments.bench.other_kernels import OTHERS
from experiments.bench.problem import OURS, WrongResult
from experiments.harness import (
    Axis,
    Count,
    Experiment,
    InputFile,
    Options,
    Unavailable,
    grid,
    one_of,
)

if TYPE_CHECKING:
    from experiments.bench.gpus import Gpu
    from kernels.executor import LaunchRecord

CLASSES = (
    "integer",
    "floating point",
    "conversion",
    "move",
    "tensor core",
    "asynchronous copy",
    "global load",
    "global store",
    "shared memory",
    "exchange",
    "synchronisation",
    "control",
    "parameter",
)
"""Classes of instructions, as the executor names them."""


class Counted(NamedTuple):
    """How an op is counted."""

    skewed: bool = False
    """Whether it has a skewed batch too."""
    in_cache: bool = True
    """Whether the cache's dtype and block size matter to it."""


COUNTED = {
    "decode": Counted(skewed=True),
    "prefill": Counted(skewed=True),
    "cascade": Counted(),
    "store": Counted(),
    "rope_store": Counted(),
    "norm_rope_store": Counted(),
    "rotary": Counted(in_cache=False),
    "norm": Counted(in_cache=False),
    "gate": Counted(in_cache=False),
    "copy": Counted(),
    "swap": Counted(),
    "merge": Counted(in_cache=False),
    "slot_mapping": Counted(in_cache=False),
    "sample": Counted(in_cache=False),
}
"""Ops by name; their inputs are in ``bench/counted_work.py``."""


@dataclass(frozen=True, kw_only=True)
class _Sizes(Options):
    op: Axis[Annotated[str, one_of(COUNTED)]] = tuple(COUNTED)
    arch: Axis[Literal["sm_80", "sm_90"]] = ("sm_80", "sm_90")
    """What the kernels are compiled for."""
    kv_dtype: Axis[Literal["bfloat16", "float8_e4m3fn"]] = ("bfloat16", "float8_e4m3fn")
    """Of the cache."""
    block_size: Axis[Count] = (1, 16, 24, 256)
    """Token slots per block."""
    lengths: Axis[Literal["even", "skewed"]] = ("even", "skewed")
    """Of the sequences: all the same, or one long one with as many tokens in all."""
    num_q_heads: Count = 32
    num_kv_heads: Count = 8
    head_dim: Count = 128


@dataclass(frozen=True, kw_only=True)
class KernelCounters(_Sizes):
    """The grid: ops x architectures x caches x batches, ours and others'."""

    sglang: Path | None = None
    """SGLang's decode_attention.py, to be counted too."""
    vllm: Path | None = None
    """vLLM's triton_unified_attention.py (its helpers beside it), to be counted too."""


@dataclass(frozen=True, kw_only=True)
class KernelCountersCell(_Sizes):
    implementation: str
    """Ours or one of ``OTHERS``."""
    source: InputFile | None
    """The file of another implementation."""

    @property
    def group(self) -> tuple[str, ...]:
        return self.arch, self.op, self.kv_dtype


def cells(options: KernelCounters) -> Iterator[KernelCountersCell]:
    """What an op does not know it is not varied over."""
    files = {name: getattr(options, name) for name in OTHERS}
    sources = {name: InputFile.of(path) for name, path in files.items() if path}
    for name, source in [(OURS, None), *sources.items()]:
        for op in options.op:
            if source is None or op in OTHERS[name].ops:
                known = COUNTED[op]
                yield from grid(
                    options,
                    KernelCountersCell,
                    op=[op],
                    kv_dtype=options.kv_dtype if known.in_cache else options.kv_dtype[:1],
                    block_size=options.block_size if known.in_cache else options.block_size[:1],
                    lengths=options.lengths if known.skewed else options.lengths[:1],
                    implementation=name,
                    source=source,
                )


def run_cell(cell: KernelCountersCell) -> list[dict[str, Any]]:
    os.environ.pop("TRITON_INTERPRET", None)  # read when kernels is first imported
    from triton.errors import TritonError

    from experiments.bench.counted_work import counted
    from kernels.executor import MULTIPROCESSORS, UnknownInstruction, execute_ptx

    other = OTHERS[cell.implementation].load(cell.source.path) if cell.source else None
    call, judge = counted(cell, other)
    try:
        with execute_ptx(cell.arch, count=True) as execution:
            result = call()
    except (TritonError, UnknownInstruction) as error:
        if other is None:
            raise
        reason = str(error).strip().splitlines()[-1]
        raise Unavailable(
            f"{cell.implementation} on {cell.arch}, {cell.kv_dtype}: {reason}"
        ) from error
    accuracy = judge(result)
    if other is None and not accuracy.passed:  # others may round otherwise: their error is shown
        raise WrongResult(f"error {accuracy.error:g}, allowed {accuracy.bound:g}")
    shape = cell.columns("op", "implementation", "arch", *_SHAPE)
    judged = {"error": accuracy.error, "error_bound": accuracy.bound}
    return [
        {**shape, **judged, **_counts(launch), **_modelled(launch, gpu, MULTIPROCESSORS[cell.arch])}
        for launch in execution.launches
        for gpu in GPUS
        if gpu.arch == cell.arch
    ]


_SHAPE = ("kv_dtype", "block_size", "lengths", "num_q_heads", "num_kv_heads", "head_dim")


def _counts(launch: LaunchRecord) -> dict[str, Any]:
    counts = launch.counts
    by_class = {
        f"instructions_{name.replace(' ', '_')}": counts.instructions.get(name, 0)
        for name in CLASSES
    }

    def same(*names: str) -> dict[str, float]:
        return {name: getattr(counts, name) for name in names}

    return {
        "kernel": launch.kernel.strip("_").removesuffix("_kernel"),
        "programs": len(counts.programs),
        "num_warps": launch.num_warps,
        "instructions": counts.total,
        **by_class,
        **same("read_bytes", "written_bytes", "distinct_bytes"),
        "distinct_line_bytes": LINE * counts.distinct_lines,
        **same("requests", "sectors", "lines", "sectors_per_request"),
        "lines_per_request": counts.lines / max(1, counts.requests),
        "shared_wavefronts": counts.wavefronts,
        **same("bank_conflicts", "tensor_operations", "barriers"),
        "bytes_in_flight_per_program": counts.bytes_in_flight,
        "executor_seconds": launch.seconds,
        "executor_warps_per_s": len(counts.programs) * launch.num_warps / launch.seconds,
        "executor_instructions_per_s": launch.warp_instructions / launch.seconds,
    }


def _modelled(launch: LaunchRecord, gpu: Gpu, num_multiprocessors: int) -> dict[str, Any]:
    time = modelled_time(launch.counts, gpu, num_multiprocessors)
    parts = {
        f"modelled_{name.replace(' ', '_').lower()}_us": 1e6 * seconds
        for name, seconds in time.parts.items()
    }
    return {
        "gpu": gpu.name,
        **parts,
        "modelled_placed_us": 1e6 * time.placed,
        "modelled_bound_us": 1e6 * time.bound,
        "modelled_bound_by": time.bound_by,
    }


def _names(rows: style.DataFrame) -> style.Series:
    """Of the op and the kernel."""
    theirs = rows["implementation"].map(lambda name: "" if name == OURS else f"{name}: ")
    return rows["op"] + ", " + theirs + rows["kernel"]


_LOOKS = {
    ("sm_80", "bfloat16"): ("sm_80, bf16 cache", style.dots(style.BLUE, "o")),
    ("sm_80", "float8_e4m3fn"): ("sm_80, fp8 cache", style.dots(style.SKY, "^")),
    ("sm_90", "bfloat16"): ("sm_90, bf16 cache", style.dots(style.BLACK, "s", fill=False)),
    ("sm_90", "float8_e4m3fn"): ("sm_90, fp8 cache", style.dots(style.RED, "D", fill=False)),
}


def _draw_counts(rows: style.DataFrame) -> style.Figure:
    """A panel per metric, a dot per architecture, cache, block size and batch."""
    kib = rows["distinct_line_bytes"] / 1024
    conflicts = rows["bank_conflicts"] / rows["shared_wavefronts"].clip(lower=1)
    metrics = {
        "warp instructions\nper KiB of distinct lines": rows["instructions"] / kib,
        "128-byte lines requested\nper distinct line": LINE / 1024 * rows["lines"] / kib,
        "wavefronts of shared memory that\nare bank conflicts (%)": 100 * conflicts,
        "most bytes of asynchronous copies\nin flight per program (KiB)": (
            rows["bytes_in_flight_per_program"] / 1024
        ),
    }
    names = list(dict.fromkeys(_names(rows)))
    places = _names(rows).map(names.index)
    kinds = rows.groupby(["arch", "kv_dtype"]).groups
    height = 0.6 + 0.2 * len(names)
    figure, axes, _ = style.panel_grid(len(metrics), height=height, width=3.4, columns=2)
    for number, (axis, (label, metric)) in enumerate(zip(axes, metrics.items(), strict=True)):
        for offset, (kind, (name, look)) in enumerate(_LOOKS.items()):
            some = kinds.get(kind, [])
            axis.plot(metric[some], places[some] + 0.18 * offset - 0.27, label=name, **look)
        style.name_rows(axis, names, shown=number % 2 == 0)
        axis.set_xlim(left=0)
        axis.set_xlabel(label, fontsize=7)
    xlabel = "counted in executed PTX; a dot per block size and batch"
    return style.shared_legend(figure, columns=4, xlabel=xlabel)


_PARTS = {
    "modelled_issue_us": ("issue slots", style.dots(style.BLUE, "o", fill=False)),
    "modelled_lsu_us": ("LSU", style.dots(style.ORANGE, "s")),
    "modelled_tensor_cores_us": ("tensor cores", style.dots(style.GREEN, "^", fill=False)),
    "modelled_dram_us": ("DRAM", style.dots(style.RED, "D")),
    "modelled_placed_us": ("programs placed one by one", style.dots(style.BLACK, "x")),
}


def _draw_modelled(rows: style.DataFrame) -> style.Figure:
    """A panel per GPU, a line per kernel, cache and batch, at one block size."""
    size = 16 if (rows["block_size"] == 16).any() else rows["block_size"].iloc[0]
    knows_blocks = rows["op"].map(lambda op: COUNTED[op].in_cache)
    rows = rows[(rows["block_size"] == size) | ~knows_blocks]
    caches = {"bfloat16": ", bf16", "float8_e4m3fn": ", fp8"}
    lengths = {"even": "", "skewed": ", skewed"}
    names = _names(rows) + rows["kv_dtype"].map(caches) + rows["lengths"].map(lengths)
    lines, gpus = list(dict.fromkeys(names)), rows["gpu"].unique()
    rows = rows.assign(place=names.map(lines.index))
    figure, axes, _ = style.panel_grid(len(gpus), height=0.6 + 0.13 * len(lines), width=2.4)
    for number, (axis, gpu) in enumerate(zip(axes, gpus, strict=True)):
        for column, (name, look) in _PARTS.items():
            some = rows[(rows["gpu"] == gpu) & (rows[column] > 0)]
            axis.plot(some[column], some["place"], label=name, **look)
        style.name_rows(axis, lines, shown=number == 0, fontsize=5.5)
        axis.set(xscale="log", title=gpu)
    xlabel = f"modelled lower bound of the time (µs), not measured; block size {size}"
    return style.shared_legend(figure, columns=5, xlabel=xlabel)


EXPERIMENT = Experiment(
    name="kernel_counters",
    figure="instructions, memory transactions, bank conflicts of every kernel, executed as PTX",
    options=KernelCounters(),
    quick=KernelCounters(
        op=("decode", "store"),
        arch=("sm_90",),
        kv_dtype=("bfloat16",),
        block_size=(16,),
        lengths=("even",),
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"counts": _draw_counts, "modelled": _draw_modelled}),
)
