"""Resources of every shipped kernel on every architecture, and a lower bound of its op's time.

Kernels are compiled without a GPU (``kernels/compiled/compile.py``). The table has registers, local
and shared memory, how many programs and warps fit a multiprocessor and which resource limits them,
widths of global accesses, asynchronous copies and tensor-core instructions. The bound is of a call
of the op at stated sizes, all of its kernels together: its bytes and operations
(``kernels/testing/cases.py``) over the datasheet's peak rates (``bench/gpus.py``), the roofline
model. It is not a measurement.

This and kernel_counters stay two experiments: one compiles every shipped configuration for every
architecture, the other executes small cases, so their grids and rows have little in common.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments import style
from experiments.bench.gpus import GPUS
from experiments.harness import Axis, Experiment, Options, Repeated

if TYPE_CHECKING:
    from experiments.bench.gpus import Gpu
    from kernels.compiled.compile import KernelResources
    from kernels.testing.cases import Case


@dataclass(frozen=True, kw_only=True)
class KernelResourcesOptions(Options):
    """The grid: shipped configurations of ops x architectures."""

    op: Repeated[Axis[str]] = ()
    """An op by name. None: every one."""
    arch: Repeated[Axis[str]] = ()
    """sm_80, sm_90, sm_100 or gfx942. None: every one."""
    match: str = ""
    """Regular expression: only configurations with it in their name."""


@dataclass(frozen=True, kw_only=True)
class KernelResourcesCell(Options):
    op: str
    config: str
    arch: str

    @property
    def group(self) -> tuple[str, ...]:
        return self.arch, self.op


def cells(options: KernelResourcesOptions) -> Iterator[KernelResourcesCell]:
    from kernels.compiled.architectures import ARCHITECTURES
    from kernels.compiled.shipped import OPS, shipped_calls

    for name, known in (("op", OPS), ("arch", tuple(ARCHITECTURES))):
        for value in getattr(options, name):
            if value not in known:
                raise ValueError(f"--{name} {value!r} is unknown; choose from {', '.join(known)}")
    for arch in options.arch or ARCHITECTURES:
        for call in shipped_calls(options.op or None):
            if re.search(options.match, call.config):
                yield KernelResourcesCell(
                    seed=options.seed, op=call.op, config=call.config, arch=arch
                )


def run_cell(cell: KernelResourcesCell) -> list[dict[str, Any]]:
    os.environ.pop("TRITON_INTERPRET", None)  # read when kernels is first imported
    from kernels.compiled.compile import ARCHITECTURES, resources_of_call
    from kernels.compiled.shipped import shipped_calls

    call = next(call for call in shipped_calls([cell.op]) if call.config == cell.config)
    arch = ARCHITECTURES[cell.arch]
    bounds = list(_bounds(call.case(), call.problem, arch.name))
    return [
        {**_resources(row, arch.max_warps), **bound}
        for row in resources_of_call(call, arch)
        for bound in bounds
    ]


def _kernel_name(row: KernelResources) -> str:
    """The kernel without `_kernel`; shared_prefix where prefill's kernel attends to a prefix."""
    if "suffix_lens_ptr" in row.signature:
        return "shared_prefix"
    return row.kernel.strip("_").removesuffix("_kernel")


def _resources(row: KernelResources, max_warps: int) -> dict[str, Any]:
    def same(*names: str) -> dict[str, Any]:
        return {name: getattr(row, name) for name in names}

    def widths(name: str, accesses: dict[int, int]) -> dict[str, int]:
        wide = accesses.get(128, 0)
        narrower = sum(count for width, count in accesses.items() if width < 128)
        return {f"{name}_128_bit": wide, f"{name}_narrower": narrower}

    resident = row.resident_programs
    limits = ("registers", "shared memory", "tensor memory", "warps", "programs")
    warps = row.programs_per_multiprocessor * row.num_warps
    return {
        **same("op", "config"),
        "kernel": _kernel_name(row),
        "arch": row.arch,
        "tile_m": row.constants.get("TILE_M"),
        "tile_n": row.constants.get("TILE_N"),
        **same("num_warps", "num_stages", "registers", "local_bytes", "scalar_spills"),
        **same("shared_bytes", "tensor_memory_columns"),
        **{f"programs_by_{limit.replace(' ', '_')}": resident.get(limit) for limit in limits},
        "programs_per_multiprocessor": row.programs_per_multiprocessor,
        "limited_by": min(resident, key=resident.get),
        "warps_per_multiprocessor": warps,
        "occupancy": warps / max_warps,
        **widths("loads", row.global_loads),
        **widths("async_copies", row.async_copies),
        **widths("stores", row.global_stores),
        **same("dots", "tensor_core_dots"),
        "tensor_core_instructions": sum(row.mma.values()),
        "tensor_core_family": " ".join(row.mma) or None,
    }


def _bounds(case: Case, problem: str, arch: str) -> Iterator[dict[str, Any]]:
    for gpu in GPUS:
        if gpu.arch != arch:
            continue
        seconds, limit = gpu.bound(
            num_bytes=case.num_bytes, operations=case.flops, host_bytes=case.host_bytes
        )
        yield {
            "problem": problem,
            "bytes_per_output": case.num_bytes / case.outputs,
            "operations_per_output": case.flops / case.outputs,
            "operations_per_byte": case.flops / case.num_bytes,
            "gpu": gpu.name,
            "bound_us": 1e6 * seconds,
            "bound_by": limit,
        }


_LIMITS = {
    "registers": ("limited by registers", style.dots(style.BLUE, "o")),
    "shared memory": ("limited by shared memory", style.dots(style.ORANGE, "s")),
    "tensor memory": ("limited by tensor memory", style.dots(style.PINK, "D")),
    "warps": ("as many warps as there can be", style.dots(style.GREEN, "^")),
    "programs": ("as many programs as there can be", style.dots(style.RED, "v")),
}
_METRICS = {
    "registers": ("registers per thread", 1),
    "shared_bytes": ("shared memory per program (KiB)", 1024),
    "occupancy": ("resident warps (% of the most)", 0.01),
}


def _draw_resources(rows: style.DataFrame) -> style.Figure:
    """A row of panels per metric, a column per architecture, a dot per compiled kernel."""
    compiled = rows.drop_duplicates(["op", "config", "kernel", "arch"])
    kernels, archs = list(compiled["kernel"].unique()), compiled["arch"].unique()
    compiled = compiled.assign(place=compiled["kernel"].map(kernels.index))
    height = 0.35 + 0.14 * len(kernels)
    panels = list(itertools.product(_METRICS.items(), archs))
    figure, axes, _ = style.panel_grid(len(panels), height=height, columns=len(archs))
    for axis, ((metric, (label, unit)), arch) in zip(axes, panels, strict=True):
        for limit, dots in compiled[compiled["arch"] == arch].groupby("limited_by"):
            name, look = _LIMITS[limit]
            axis.plot(dots[metric] / unit, dots["place"], label=name, alpha=0.8, **look)
        style.name_rows(axis, kernels, shown=arch == archs[0], fontsize=7)
        axis.set_xlim(0, 1.06 * max(1, compiled[metric].max() / unit))
        axis.set_xlabel(label, fontsize=7)
        axis.set_title(arch if metric == "registers" else "")
    return style.shared_legend(figure, columns=4)


_GPU_LOOKS = (
    style.line(style.GREEN, "^", "dashdot"),
    style.line(style.SKY, "D", "dashed"),
    style.line(style.BLUE, "o"),
    style.line(style.BLACK, "s", "dashdot"),
    style.line(style.RED, "v", "dotted"),
)


def _draw_bounds(rows: style.DataFrame) -> style.Figure:
    """A line per op. Left: its intensity, beside the one from which each GPU is bound by
    arithmetic. Right: the bound of its time on each GPU."""
    gpus = [gpu for gpu in GPUS if gpu.name in set(rows["gpu"])]
    looks = {gpu.name: _GPU_LOOKS[GPUS.index(gpu)] for gpu in gpus}
    typical = _typical(rows)
    lines = typical.drop_duplicates("number")
    height = max(2.1, 0.8 + 0.21 * len(lines))
    figure, (intensity, times), _ = style.panel_grid(
        2, height=height, width=3.5, columns=2, sharey=True
    )
    _draw_intensity(intensity, lines, gpus, looks)
    for gpu, dots in typical.groupby("gpu", sort=False):
        times.plot(dots["bound_us"], dots["number"], **{**looks[gpu], "linestyle": "none"})
    times.set(xscale="log", xlabel="lower bound of the time (µs),\nby datasheet, not measured")
    labels = [f"{line.op}, {line.config}\n{line.problem}" for line in lines.itertuples()]
    style.name_rows(intensity, labels, fontsize=5.5)
    return style.shared_legend(figure, columns=len(gpus))


def _typical(rows: style.DataFrame) -> style.DataFrame:
    """The plainest configuration of each op at head_dim 128, in bf16 where it has one, and a
    number for each op."""
    names = rows.assign(
        other_dtype=~rows["config"].str.startswith("bf16"),
        other_dim=~rows["config"].str.contains("d128"),
        length=rows["config"].str.len(),
    ).sort_values(["other_dtype", "other_dim", "length", "op"], kind="stable")
    plainest = names.drop_duplicates("op")[["op", "config"]]
    typical = rows.merge(plainest, on=["op", "config"]).drop_duplicates(["op", "gpu"])
    return typical.assign(number=typical.groupby("op", sort=False).ngroup())


def _draw_intensity(
    axis: style.Axes, lines: style.DataFrame, gpus: list[Gpu], looks: dict[str, dict]
) -> None:
    """Bars up to the operations per byte of each line."""
    low, high, bottom = 0.1, 3e4, lines["number"].max() + 0.6
    for place, gpu in enumerate(gpus):  # their markers below each other: some lines coincide
        ridge = gpu.half_flops / gpu.bandwidth
        look = {**looks[gpu.name], "markevery": [1], "linewidth": 1, "zorder": 3}
        axis.plot([ridge] * 3, [-0.6, 0.5 * place - 0.3, bottom], label=gpu.name, **look)
    operations = lines["operations_per_byte"]
    bars = operations.where(operations > 0, low) - low
    axis.barh(lines["number"], bars, left=low, height=0.5, color=style.GREY)
    for place in lines["number"][operations == 0]:
        axis.text(low * 1.2, place, "no arithmetic", fontsize=5.5, va="center")
    axis.set(xscale="log", xlim=(low, high))
    axis.set_xlabel(
        "operations per byte; a GPU is bound by\nmemory left of its line, else by arithmetic"
    )


EXPERIMENT = Experiment(
    name="kernel_resources",
    figure="registers, shared memory, occupancy and bounds of every kernel, compiled, not run",
    options=KernelResourcesOptions(),
    quick=KernelResourcesOptions(
        op=("store_kvcache", "paged_decode_attention", "paged_prefill_attention"),
        arch=("sm_90",),
        match=r"^bf16 d128( g4( b16| split)?)?$",
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"resources": _draw_resources, "bounds": _draw_bounds}),
)
