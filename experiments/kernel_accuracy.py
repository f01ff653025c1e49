"""Error of every kernel against fp64, beside PyTorch's error in the same dtype.

``kernels/testing/accuracy.py`` defines the bound of an error. ``kernels/testing/ops`` has the
inputs: block tables are shuffled, and slots that must not matter hold NaN and infinity. Without a
GPU the kernels run in Triton's interpreter. It checks the algorithm, but not the GPU's arithmetic.
Every block size has the same data, so a line with a length shows an effect of the block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from experiments import style
from experiments.bench.shapes import accuracy_columns, use_device
from experiments.harness import Axis, Count, Experiment, Options, Repeated, check_names, grid

if TYPE_CHECKING:
    from kernels.testing.op import Case, Op

_DTYPES = {
    "float16": style.line(style.BLUE, "o"),
    "bfloat16": style.line(style.PINK, "s"),
    "float32": style.line(style.GREEN, "^"),
    "fp8": style.line(style.ORANGE, "D"),
}
_WRONG = {**style.dots(style.RED, "x"), "markersize": 8, "markeredgewidth": 2}
"""Marks results above their bound; nothing else is red."""
_MIN_RATIO = 0.01
"""On the logarithmic axis, smaller ratios error / bound are drawn at this value."""


def ops() -> dict[str, Op]:
    """The record of each op by its name.  Imports kernels, and with them torch."""
    from kernels.testing.cases import OPS

    return OPS


@dataclass(frozen=True, kw_only=True)
class KernelAccuracy(Options):
    """The grid: kernels x features x head dims x dtypes x block sizes."""

    kernel: Repeated[Axis[str]] = ()
    """A kernel by name. By default every kernel."""
    block_size: Axis[Count] = (1, 2, 3, 7, 16, 24, 32, 64, 100, 128, 256, 512, 1024)
    """Token slots per block."""
    dtype: Axis[Literal["float16", "bfloat16", "float32", "fp8"]] = tuple(_DTYPES)
    """fp8: an fp8 (e4m3) cache with a scale per head, and bfloat16 queries, keys and values."""
    head_dim: Axis[Count] = (16, 64, 80, 96, 112, 128, 256)
    feature: Axis[str] = ()
    """Options of the kernels, tested one at a time. By default none and every option."""

    @property
    def setup_key(self) -> tuple[str, ...]:
        return self.kernel, self.dtype

    def case(self, device: str, **sizes: Any) -> Case:
        """The inputs of a cell's kernel.  sizes: more sizes of ``make_case``."""
        import torch

        from kernels.testing.cases import make_case

        is_fp8 = self.dtype == "fp8"
        return make_case(
            self.kernel,
            **self.columns("block_size", "head_dim", "seed"),
            dtype=torch.bfloat16 if is_fp8 else getattr(torch, self.dtype),
            kv_dtype=torch.float8_e4m3fn if is_fp8 else None,
            features=() if self.feature == "none" else (self.feature,),
            device=device,
            **sizes,
        )


def cells(options: KernelAccuracy) -> Iterator[KernelAccuracy]:
    """For each kernel, cells over the axes that matter to the kernel."""
    known = ops()
    check_names("kernel", options.kernel, known)
    every = {feature for op in known.values() for feature in op.features}
    check_names("feature", options.feature, ["none", *sorted(every)])
    for name in options.kernel or known:
        op, features = known[name], ("none", *known[name].features)
        yield from grid(
            options,
            kernel=[name],
            block_size=options.block_size if op.has_blocks else options.block_size[:1],
            dtype=[d for d in options.dtype if d != "fp8" or op.takes_fp8],
            feature=[f for f in options.feature or features if f in features],
        )


def run_cell(cell: KernelAccuracy) -> list[dict[str, Any]]:
    device = use_device().type
    return [
        {
            "kernel": cell.kernel,
            "result": result,
            **cell.columns("feature", "head_dim", "dtype"),
            "block_size": cell.block_size if ops()[cell.kernel].has_blocks else None,
            "interpreted": device == "cpu",
            **accuracy_columns(accuracy),
            "passed": accuracy.passed,
        }
        for result, accuracy in cell.case(device).judge().items()
    ]


def _summary(rows: style.DataFrame) -> style.DataFrame:
    """A row per kernel and dtype: number of results, largest errors, results above their bounds."""
    rows = rows.assign(error_over_bound=rows["error"] / rows["bound"], above_bound=~rows["passed"])
    return rows.groupby(["kernel", "dtype"], sort=False, as_index=False).agg(
        results=("result", "size"),
        error=("error", "max"),
        eager_error=("eager_error", "max"),
        error_over_bound=("error_over_bound", "max"),
        above_bound=("above_bound", "sum"),
    )


def _draw(rows: style.DataFrame) -> style.Figure:
    """Draw a row per kernel: a dot per result, and for each dtype the largest error / bound, with a
    line from its least to its largest value over block sizes.  A red cross marks a wrong result.
    Errors that are not finite are drawn at the right."""
    kernels, dtypes = list(rows["kernel"].unique()), list(_DTYPES)
    ratio = rows["error"] / rows["bound"]
    finite = ratio[ratio < float("inf")]
    ratio = ratio.where(ratio < float("inf"), 10 * max(1, *finite)).clip(lower=_MIN_RATIO)
    y = rows["kernel"].map(kernels.index) + 0.2 * rows["dtype"].map(dtypes.index) - 0.3
    figure, (axis,), _ = style.panel_grid(1, height=0.5 + 0.25 * len(kernels), width=6.5)
    for dtype, look in _DTYPES.items():
        some = rows["dtype"] == dtype
        axis.plot(ratio[some], y[some], ".", color=look["color"], ms=2, alpha=0.35)
        worst = ratio[some].groupby([y, rows["block_size"].fillna(0)]).max()
        least, largest = worst.groupby(level=0).min(), worst.groupby(level=0).max()
        axis.hlines(least.index, least, largest, color=look["color"])
        dots = {**look, "linestyle": "none", "label": f"{dtype}: worst result"}
        axis.plot(largest, largest.index, **dots)
    axis.axvline(1, **style.BOUND, label="bound")
    wrong = ~rows["passed"]
    if wrong.any():
        axis.plot(ratio[wrong], y[wrong], label="WRONG: above the bound", **_WRONG)
    of_kernel = wrong.groupby(rows["kernel"]).agg(["size", "sum"]).loc[kernels]
    verdicts = [f"{n:,}, {bad} WRONG" if bad else f"{n:,}" for n, bad in of_kernel.to_numpy()]
    names = [f"{name} ({said})" for name, said in zip(kernels, verdicts, strict=True)]
    style.name_rows(axis, names)
    axis.set(xscale="log", xlim=(0.7 * _MIN_RATIO, 3 * max(1, ratio.max())))
    style.plain_log_ticks(axis.xaxis)
    interpreted = "; kernels run in Triton's interpreter" if rows["interpreted"].all() else ""
    axis.set_xlabel(f"kernel error / bound, drawn at {_MIN_RATIO} if smaller{interpreted}")
    return style.shared_legend(figure, columns=5)


EXPERIMENT = Experiment(
    name="kernel_accuracy",
    figure="error of every kernel against fp64 over block sizes, dtypes, head dims and features",
    options=KernelAccuracy(),
    quick=KernelAccuracy(
        block_size=(7, 256), dtype=("float16", "fp8"), head_dim=(80,), feature=("none", "split")
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"error_over_bound": _draw}, {"summary": (_summary, "%.3g")}),
    gpu="optional",
)
