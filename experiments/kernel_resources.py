"""Resources of every shipped kernel on every architecture.

Kernels are compiled without a GPU (``kernels/compiled/compile.py``). The table has registers, local
and shared memory, widths of global accesses, asynchronous copies and tensor-core instructions. It
also has the number of programs and warps that fit a multiprocessor, and which resource limits it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments import style
from experiments.harness import Axis, Experiment, Options, Repeated

if TYPE_CHECKING:
    from kernels.compiled.compile import KernelResources


@dataclass(frozen=True, kw_only=True)
class KernelResourcesOptions(Options):
    """The grid: shipped configurations of ops x architectures."""

    op: Repeated[Axis[str]] = ()
    """An op by name. By default every op."""
    arch: Repeated[Axis[str]] = ()
    """sm_80, sm_90, sm_100 or gfx942. By default every architecture."""
    match: str = ""
    """Regular expression; only configurations whose name contains a match are compiled."""


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
    os.environ.pop("TRITON_INTERPRET", None)  # the first import of kernels reads it
    from kernels.compiled.architectures import ARCHITECTURES
    from kernels.compiled.compile import resources_of_call
    from kernels.compiled.shipped import shipped_calls

    call = next(call for call in shipped_calls([cell.op]) if call.config == cell.config)
    arch = ARCHITECTURES[cell.arch]
    return [_resources(row, arch.max_warps) for row in resources_of_call(call, arch)]


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
    on_prefix = "suffix_lens_ptr" in row.signature  # prefill's kernel
    return {
        **same("op", "config"),
        "kernel": "shared_prefix" if on_prefix else row.kernel.strip("_").removesuffix("_kernel"),
        "arch": row.arch,
        "tile_m": row.constants.get("TILE_M"),
        "tile_n": row.constants.get("TILE_N"),
        **same("num_warps", "num_stages", "registers", "local_bytes", "scalar_spills"),
        **same("shared_bytes", "tensor_memory_columns"),
        **{f"programs_by_{limit.replace(' ', '_')}": resident.get(limit) for limit in limits},
        "programs_per_multiprocessor": row.programs_per_multiprocessor,
        "limited_by": min(resident, key=resident.__getitem__),
        "warps_per_multiprocessor": warps,
        "occupancy": warps / max_warps,
        **widths("loads", row.global_loads),
        **widths("async_copies", row.async_copies),
        **widths("stores", row.global_stores),
        **same("dots", "tensor_core_dots"),
        "tensor_core_instructions": sum(row.mma.values()),
        "tensor_core_family": " ".join(row.mma) or None,
    }


_METRICS = {
    "registers": ("registers per thread", 1),
    "shared_bytes": ("shared memory per program (KiB)", 1024),
    "occupancy": ("resident warps (% of the most)", 0.01),
}


def _draw_resources(rows: style.DataFrame) -> style.Figure:
    """Draw a panel per metric and a row per kernel, with a dot per configuration.  It is hollow
    where neither registers nor memory limit the number of resident programs."""
    kernels, looks = list(rows["kernel"].unique()), style.lines_of(rows["arch"].unique())
    height = 0.4 + 0.2 * len(kernels)
    figure, axes, _ = style.panel_grid(len(_METRICS), height=height)
    for axis, (metric, (label, unit)) in zip(axes, _METRICS.items(), strict=True):
        for number, (arch, look) in enumerate(looks.items()):
            some = rows[rows["arch"] == arch]
            y = some["kernel"].map(kernels.index) + 0.2 * number - 0.3
            hollow = some["limited_by"].isin(["warps", "programs"])
            for fill, part in ((look["color"], ~hollow), ("white", hollow)):
                dots = {"linestyle": "none", "markersize": 2.5, "markerfacecolor": fill}
                axis.plot(some[metric][part] / unit, y[part], **look | dots)
        style.name_rows(axis, kernels, shown=axis is axes[0])
        axis.set_xlim(left=0)
        axis.set_xlabel(label, fontsize=7)
    xlabel = "hollow: neither registers nor memory limit the number of resident programs"
    return style.shared_legend(figure, xlabel=xlabel)


EXPERIMENT = Experiment(
    name="kernel_resources",
    figure="registers, shared memory, occupancy of every kernel, compiled, not run",
    options=KernelResourcesOptions(),
    quick=KernelResourcesOptions(
        op=("store_kvcache", "paged_decode_attention", "paged_prefill_attention"),
        arch=("sm_90",),
        match=r"^bf16 d128( g4( b16| split)?)?$",
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"resources": _draw_resources}),
)
