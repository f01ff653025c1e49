"""Right at real sizes: every data-path kernel on a GPU against its reference, past 32-bit offsets.

``kernel_accuracy`` and the tests go through every feature on small inputs; what those cannot show
is shown here: thousands of blocks, many programs at a time, contexts of tens of thousands of
tokens, and caches of more than 2^31 elements whose used blocks lie at the far end.  The rule is
that of ``kernels/testing/accuracy.py``; of attention some sequences and queries are compared, see
``bench/kernel_problems.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from experiments import style
from experiments.bench.problem import OURS, Shape, accuracy_columns, use_device
from experiments.harness import Axis, Count, Experiment, Options, Unavailable, grid

FP8 = "float8_e4m3fn"
PAST_32_BITS = 2**31 + 2**28
"""Elements of a cache; copy, whose cache is one tensor, gets twice as many."""


@dataclass(frozen=True, kw_only=True)
class LargeAccuracy(Options):
    """The grid: shapes x dtypes."""

    dtype: tuple[Literal["bfloat16", "float16", FP8], ...] = ("bfloat16", "float16", FP8)
    """Of the cache; queries are bfloat16 beside an fp8 one."""
    scale: Count = 1
    """Divides sequences and tokens: 1 for the real sizes."""
    num_q_heads: Count = 32
    num_kv_heads: Count = 8
    head_dim: Count = 128
    past_32_bits: bool = True
    """Also caches whose offsets need more than 32 bits."""


@dataclass(frozen=True, kw_only=True)
class LargeAccuracyCell(Options):
    shape: Axis[Shape]
    implementation: Axis[str]


# (op, sizes) of the real shapes; block sizes of all kinds.
_SIZES: tuple[tuple[str, dict[str, int]], ...] = (
    ("decode", {"batch": 64, "context_len": 4099, "block_size": 16}),
    ("decode", {"batch": 3, "context_len": 32_771, "block_size": 256}),
    ("decode", {"batch": 256, "context_len": 1027, "block_size": 24}),
    ("decode", {"batch": 17, "context_len": 2051, "block_size": 1}),
    ("prefill", {"batch": 1, "context_len": 8195, "query_len": 8195, "block_size": 16}),
    ("prefill", {"batch": 4, "context_len": 8195, "query_len": 1027, "block_size": 100}),
    ("prefill", {"batch": 64, "context_len": 4099, "query_len": 5, "block_size": 256}),
    ("cascade", {"batch": 64, "context_len": 8192 + 259, "prefix_len": 8192, "block_size": 16}),
    ("store", {"batch": 65_537, "block_size": 16}),
    ("store", {"batch": 4099, "block_size": 7}),
    ("norm", {"batch": 65_537, "block_size": 1}),
    ("gate", {"batch": 65_537, "block_size": 1}),
    ("copy", {"batch": 257, "block_size": 16, "num_layers": 28}),
    ("swap_out", {"batch": 129, "block_size": 16, "num_layers": 28}),
    ("swap_in", {"batch": 129, "block_size": 16, "num_layers": 28}),
)
_PAST_32_BITS: tuple[tuple[str, dict[str, int]], ...] = (
    ("decode", {"batch": 16, "context_len": 2051, "block_size": 16}),
    ("prefill", {"batch": 2, "context_len": 2051, "query_len": 1027, "block_size": 16}),
    ("store", {"batch": 4099, "block_size": 16}),
    ("copy", {"batch": 64, "block_size": 16, "num_layers": 4}),
)
_SCALED = ("batch", "context_len", "query_len", "prefix_len")


def cells(options: LargeAccuracy) -> Iterator[LargeAccuracyCell]:
    heads = {name: getattr(options, name) for name in ("num_q_heads", "num_kv_heads", "head_dim")}
    large = _PAST_32_BITS if options.past_32_bits else ()
    for kind in options.dtype:
        dtypes = {"dtype": "bfloat16", "kv_dtype": FP8} if kind == FP8 else {"dtype": kind}
        for index, (op, sizes) in enumerate((*_SIZES, *large)):
            sizes = _divided(sizes, options.scale)
            elements = 0 if index < len(_SIZES) else PAST_32_BITS * (1 + (op == "copy"))
            shape = Shape(
                op=op, seed=options.seed, min_cache_elements=elements, **sizes, **dtypes, **heads
            )
            names = (OURS, "paged_decode") if op == "cascade" else (OURS,)
            yield from grid(options, LargeAccuracyCell, shape=[shape], implementation=names)


def _divided(sizes: dict[str, int], scale: int) -> dict[str, int]:
    """Smaller sizes that still fit each other: a prefix is whole blocks of a longer context."""
    small = {name: max(1, n // scale) if name in _SCALED else n for name, n in sizes.items()}
    if scale > 1 and "prefix_len" in sizes:
        block_size = sizes["block_size"]
        small["prefix_len"] = max(block_size, small["prefix_len"] // block_size * block_size)
        small["context_len"] = small["prefix_len"] + block_size + 3
    if scale > 1 and "num_layers" in sizes:
        small["num_layers"] = 2
    return small


def run_cell(cell: LargeAccuracyCell) -> list[dict[str, Any]]:
    use_device()
    from experiments.bench import gpu_timing, kernel_problems

    with gpu_timing.out_of_memory_is(Unavailable):
        problem = kernel_problems.problem_of(cell.shape)
        accuracy = problem.judged(cell.implementation)
    return [
        {
            **cell.shape.columns(),
            "implementation": cell.implementation,
            "past_32_bits": cell.shape.min_cache_elements > 2**31,
            **accuracy_columns(accuracy),
            "passed": accuracy.passed,
        }
    ]


_LOOKS = {
    "bfloat16": style.dots(style.RED, "s"),
    "float16": style.dots(style.BLUE, "o"),
    FP8: style.dots(style.GREEN, "^"),
}


def _draw(rows: style.DataFrame) -> style.Figure:
    """Error over bound, op by op."""
    names = [
        f"{row.op}{', > 32 bits' if row.past_32_bits else ''}, block {row.block_size}"
        for row in rows.itertuples()
    ]
    order = list(dict.fromkeys(names))
    # An exact copy that is wrong has an infinite error: drawn at the edge.
    ratio = (rows["error"] / rows["bound"]).clip(upper=2)
    rows = rows.assign(place=[order.index(name) for name in names], ratio=ratio)
    figure, (axis,), _ = style.panel_grid(1, width=5.2, height=0.5 + 0.2 * len(order))
    for kind, part in rows.groupby("kv_dtype", sort=False):
        axis.plot(part["ratio"], part["place"], label=f"cache {kind}", **_LOOKS[kind])
    axis.axvline(1, color="black", ls="dashed", lw=1, label="bound")
    style.name_rows(axis, order)
    axis.set(xlim=(-0.05, 2.05), xlabel="kernel error / bound")
    return style.shared_legend(figure, columns=4)


EXPERIMENT = Experiment(
    name="large_accuracy",
    figure="error of the kernels at real sizes on a GPU, past 32-bit offsets",
    options=LargeAccuracy(),
    quick=LargeAccuracy(dtype=("bfloat16",)),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"large_accuracy": _draw}),
    gpu="required",
)
