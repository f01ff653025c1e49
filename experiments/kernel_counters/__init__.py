"""Instructions and memory transactions of every kernel, counted while its PTX is executed.

Each call runs on ``kernels/executor``, and its result is compared with the reference. The table
counts instructions by class, requests to global memory with their sectors and lines, wavefronts and
bank conflicts of shared memory, tensor-core operations, barriers and copies in flight. The counts
do not show ptxas's changes (registers, spills, removed and reordered instructions), caches or
speed. Reads of shared memory by wgmma are not counted as wavefronts.

SGLang's grouped decode and vLLM's unified attention are also counted if their files are given.

Inputs are the cases of ``kernels/testing/cases.py``. Decode uses two splits, so that merging is
counted too. The skewed batch of decode and prefill has one long sequence; its total number of
tokens equals the even batch's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from experiments import style
from experiments.bench.shapes import OURS, WrongResult
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
from experiments.kernel_counters.other_kernels import OTHERS

if TYPE_CHECKING:
    from kernels.executor import LaunchRecord
    from kernels.testing.cases import Case

LINE = 128
"""Bytes of a line."""


class Counted(NamedTuple):
    """A case whose instructions are counted."""

    op: str
    """Name of the op in ``kernels``."""
    sizes: dict[str, Any] = {}  # noqa: RUF012  never changed
    """Sizes of the case.  For an op with a skewed batch: dicts for ``even`` and ``skewed``."""
    in_cache: bool = True
    """Whether the op depends on the cache's dtype and block size."""

    @property
    def has_skewed(self) -> bool:
        return "skewed" in self.sizes


_GROUP = {"group_sizes": (8,), "prefix_lens": (256,), "context_lens": (32,) * 8}
COUNTED = {
    "decode": Counted(
        "paged_decode_attention",
        {"even": {"context_lens": (128,) * 8}, "skewed": {"context_lens": (576, *(64,) * 7)}},
    ),
    "prefill": Counted(
        "paged_prefill_attention",
        {
            "even": {"context_lens": (128, 128), "query_lens": (64, 64)},
            "skewed": {"context_lens": (208, 48), "query_lens": (112, 16)},
        },
    ),
    "cascade": Counted("shared_prefix_decode_attention", _GROUP),
    "mla_decode": Counted(
        "paged_mla_decode_attention", {"context_lens": (128,) * 8}, in_cache=False
    ),
    "mla_store": Counted("concat_and_cache_mla", in_cache=False),
    "store": Counted("store_kvcache"),
    "rope_store": Counted("rope_store_kvcache"),
    "norm_rope_store": Counted("rope_store_kvcache", {"features": ("norms",)}),
    "rotary": Counted("apply_rotary_embedding", in_cache=False),
    "norm": Counted("add_rms_norm", in_cache=False),
    "gate": Counted("gated_activation", in_cache=False),
    "block_bounds": Counted("update_block_bounds", in_cache=False),
    "select": Counted("select_blocks", {"context_lens": (512,) * 4}, in_cache=False),
    "copy": Counted("copy_blocks"),
    "swap": Counted("swap_blocks"),
    "merge": Counted("merge_attention_states", in_cache=False),
    "slot_mapping": Counted(
        "slot_mapping_from_positions", {"context_lens": (16,) * 4}, in_cache=False
    ),
    **{
        " ".join(("sample", *features)): Counted(
            "sample_tokens",
            {"num_tokens": 4, "vocab_size": 8192, "features": features},
            in_cache=False,
        )
        for features in ((), ("greedy",), ("min_p",), ("top_p",), ("min_p", "top_k", "top_p"))
    },
}
"""Cases by the name of the op in the table."""
_SPLITS = {"decode": 2, "prefill": 1}


@dataclass(frozen=True, kw_only=True)
class _Sizes(Options):
    op: Axis[Annotated[str, one_of(COUNTED)]] = tuple(COUNTED)
    arch: Axis[Literal["sm_80", "sm_90"]] = ("sm_80", "sm_90")
    """Architectures that the kernels are compiled for."""
    kv_dtype: Axis[Literal["bfloat16", "float8_e4m3fn"]] = ("bfloat16", "float8_e4m3fn")
    """Dtypes of the cache.  All other tensors are bfloat16."""
    block_size: Axis[Count] = (1, 16, 24, 256)
    """Token slots per block."""
    lengths: Axis[Literal["even", "skewed"]] = ("even", "skewed")
    """Lengths of the sequences: all equal, or one long sequence with the same total."""
    num_q_heads: Count = 32
    num_kv_heads: Count = 8
    head_dim: Count = 128


@dataclass(frozen=True, kw_only=True)
class KernelCounters(_Sizes):
    """The grid: ops x architectures x caches x batches x implementations."""

    sglang: Path | None = None
    """Path of SGLang's decode_attention.py, to count SGLang's kernels too."""
    vllm: Path | None = None
    """Path of vLLM's triton_unified_attention.py (helpers in the same folder), to count it too."""


@dataclass(frozen=True, kw_only=True)
class KernelCountersCell(_Sizes):
    implementation: str
    """Our implementation (``OURS``) or a name in ``OTHERS``."""
    source: InputFile | None
    """The file of another implementation."""

    @property
    def group(self) -> tuple[str, ...]:
        return self.arch, self.op, self.kv_dtype


def cells(options: KernelCounters) -> Iterator[KernelCountersCell]:
    """Cells of each op.  Each axis that does not affect the op has one value."""
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
                    lengths=options.lengths if known.has_skewed else options.lengths[:1],
                    implementation=name,
                    source=source,
                )


def case_of(cell: KernelCountersCell) -> Case:
    """Inputs of a cell.  They are small, because the executor runs single instructions."""
    import torch

    from kernels.testing.cases import make_case

    counted = COUNTED[cell.op]
    options: dict[str, Any] = {}
    if cell.op in ("decode", "prefill", "cascade"):
        options["return_lse"] = False
    if cell.op in _SPLITS:
        options["num_splits"] = _SPLITS[cell.op]
    sizes = {
        **cell.columns("block_size", "num_q_heads", "num_kv_heads", "head_dim", "seed"),
        "kv_dtype": getattr(torch, cell.kv_dtype), "scales": "none", "padded": False,
        "num_tokens": 64, "num_positions": 64, "num_pairs": 3, "options": options,
    }  # fmt: skip
    return make_case(counted.op, **sizes | counted.sizes.get(cell.lengths, counted.sizes))


def run_cell(cell: KernelCountersCell) -> list[dict[str, Any]]:
    os.environ.pop("TRITON_INTERPRET", None)  # read when kernels is first imported
    from triton.errors import TritonError

    from kernels.executor import UnknownInstruction, execute_ptx

    other = OTHERS[cell.implementation].load(cell.source.path) if cell.source else None
    case = case_of(cell)
    call = (lambda: other(case.inputs, _SPLITS[cell.op])()) if other else case.call
    try:
        with execute_ptx(cell.arch, count=True) as execution:
            judged = case.judge(call)
    except (TritonError, UnknownInstruction) as error:
        if other is None:
            raise
        reason = str(error).strip().splitlines()[-1]
        raise Unavailable(
            f"{cell.implementation} on {cell.arch}, {cell.kv_dtype}: {reason}"
        ) from error
    accuracy = max(judged.values(), key=lambda one: one.error / one.bound)
    if other is None and not accuracy.passed:  # other projects may round differently
        raise WrongResult(f"error {accuracy.error:g}, allowed {accuracy.bound:g}")
    names = "op implementation arch kv_dtype block_size lengths num_q_heads num_kv_heads head_dim"
    about = cell.columns(*names.split())
    about |= {"error": accuracy.error, "error_bound": accuracy.bound}
    return [{**about, **_counts(launch)} for launch in execution.launches]


def _counts(launch: LaunchRecord) -> dict[str, Any]:
    counts: Any = launch.counts
    by_class = {
        f"instructions_{name.replace(' ', '_')}": number
        for name, number in counts.instructions.items()
    }

    def same(*names: str) -> dict[str, float]:
        return {name: getattr(counts, name) for name in names}

    return {
        "kernel": launch.kernel.strip("_").removesuffix("_kernel"),
        "programs": math.prod(launch.grid),
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
    }


def _names(rows: style.DataFrame) -> style.Series:
    theirs = rows["implementation"].map(lambda name: "" if name == OURS else f"{name}: ")
    return rows["op"] + ", " + theirs + rows["kernel"]


_LOOKS = {
    ("sm_80", "bfloat16"): ("sm_80, bf16 cache", style.dots(style.BLUE, "o")),
    ("sm_80", "float8_e4m3fn"): ("sm_80, fp8 cache", style.dots(style.ORANGE, "^")),
    ("sm_90", "bfloat16"): ("sm_90, bf16 cache", style.dots(style.BLACK, "s", fill=False)),
    ("sm_90", "float8_e4m3fn"): ("sm_90, fp8 cache", style.dots(style.RED, "D", fill=False)),
}


def _draw_counts(rows: style.DataFrame) -> style.Figure:
    """One panel per metric, one dot per architecture, cache, block size and batch; none at 0."""
    kib = rows["distinct_line_bytes"] / 1024
    conflicts = rows["bank_conflicts"] / rows["shared_wavefronts"].clip(lower=1)
    metrics = {
        "warp instructions\nper KiB of distinct lines": rows["instructions"] / kib,
        "128-byte lines requested\nper distinct line": LINE / 1024 * rows["lines"] / kib,
        "wavefronts of shared memory that\nare bank conflicts (%)": 100 * conflicts,
    }
    names = list(dict.fromkeys(_names(rows)))
    heights = _names(rows).map(names.index)
    kinds = rows.groupby(["arch", "kv_dtype"]).groups
    height = 0.6 + 0.14 * len(names)
    figure, axes, _ = style.panel_grid(len(metrics), height=height)
    for axis, (label, metric) in zip(axes, metrics.items(), strict=True):
        for offset, (kind, (name, look)) in enumerate(_LOOKS.items()):
            some = kinds.get(kind, [])
            y = heights[some] + 0.2 * offset - 0.3
            axis.plot(metric.where(metric > 0)[some], y, label=name, **{**look, "markersize": 2.2})
        style.name_rows(axis, names, shown=axis is axes[0])
        axis.set_xlabel(label, fontsize=7)
    for axis in axes[:2]:
        style.log_x(axis)
    axes[2].set_xlim(0, 100)
    return style.shared_legend(figure, columns=4)


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
    plot=style.plotter({"counts": _draw_counts}),
)
