"""Error of every kernel against fp64, beside the error that PyTorch makes in the same dtype.

The rule is flash-attn's: the kernel may be at most twice as far from fp64 as the same computation
done eagerly in the kernel's dtype (plus 1e-5), see ``kernels/testing/accuracy.py``.  Block tables
are shuffled, and slots that must not matter hold NaN and infinity.  Without a GPU the kernels run
in Triton's interpreter, which checks the algorithm but not the GPU's arithmetic.  The data are the
same for every block size, so a line that is not flat shows its influence on the result.  The
comparisons themselves are in ``bench/kernel_checks.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from experiments import style
from experiments.bench.kernel_checks import FEATURES, KERNELS, Case
from experiments.harness import Axis, Count, Experiment, Options, Repeated, grid, one_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kernels.testing.accuracy import Accuracy

_DTYPES = {
    "float16": {"color": style.BLUE, "marker": "o"},
    "bfloat16": {"color": style.RED, "marker": "s"},
    "float32": {"color": style.GREEN, "marker": "^"},
    "fp8": {"color": style.ORANGE, "marker": "D"},
}


@dataclass(frozen=True, kw_only=True)
class KernelAccuracy(Options):
    """The grid: kernels x features x head dims x dtypes x block sizes."""

    kernel: Repeated[Axis[Annotated[str, one_of(KERNELS)]]] = ()
    """A kernel by name. None: every one."""
    block_size: Axis[Count] = (1, 2, 3, 7, 16, 24, 32, 64, 100, 128, 256, 512, 1024)
    """Token slots per block."""
    dtype: Axis[Literal["float16", "bfloat16", "float32", "fp8"]] = tuple(_DTYPES)
    """fp8: an fp8 (e4m3) cache with a scale per head, and bfloat16 queries, keys and values."""
    head_dim: Axis[Count] = (16, 64, 80, 96, 112, 128, 256)
    feature: Axis[Literal[FEATURES]] = FEATURES
    """Options of the attention kernels, one at a time."""

    @property
    def group(self) -> tuple[str, ...]:
        return self.kernel, self.dtype

    def check(self, device: str) -> dict[str, Accuracy]:
        """The accuracy of each result of a cell's kernel."""
        import torch

        case = Case(
            self.block_size,
            torch.bfloat16 if self.dtype == "fp8" else getattr(torch, self.dtype),
            self.head_dim,
            self.feature,
            self.seed,
            torch.device(device),
            fp8_cache=self.dtype == "fp8",
        )
        return KERNELS[self.kernel].check(case)


def cells(options: KernelAccuracy) -> Iterator[KernelAccuracy]:
    """What a kernel does not know it is not varied over."""
    for name in options.kernel or KERNELS:
        kernel = KERNELS[name]
        yield from grid(
            options,
            kernel=[name],
            block_size=options.block_size if kernel.knows_blocks else options.block_size[:1],
            dtype=[d for d in options.dtype if d != "fp8" or kernel.touches_cache],
            feature=[f for f in options.feature if f in kernel.features],
        )


def run_cell(cell: KernelAccuracy) -> list[dict[str, Any]]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels is first imported
    return [
        {
            "kernel": cell.kernel,
            "result": result,
            "feature": cell.feature,
            "head_dim": cell.head_dim,
            "dtype": cell.dtype,
            "block_size": cell.block_size if KERNELS[cell.kernel].knows_blocks else None,
            "interpreted": device == "cpu",
            "error": accuracy.error,
            "eager_error": accuracy.eager_error,
            "bound": accuracy.bound,
            "passed": accuracy.passed,
        }
        for result, accuracy in cell.check(device).items()
    ]


def plot(rows: pd.DataFrame, folder: Path) -> list[Path]:
    """The table summary of every kernel and, of those with an error, the figures error (beside
    eager PyTorch's) and error_over_bound, a panel per kernel."""
    written = style.save_table(_summary(rows), folder, "summary", "%.3g")
    inexact = rows[rows["kernel"].isin(rows.loc[rows["error"] != 0, "kernel"])]
    if inexact.empty:
        return written
    exact = [kernel for kernel in rows["kernel"].unique() if kernel not in set(inexact["kernel"])]
    note = f"\nno error in any result: {', '.join(exact)}" if exact else ""
    figures = {
        "error": (_draw_error, "max |error| against fp64"),
        "error_over_bound": (_draw_ratio, "kernel error / bound"),
    }
    with style.figures():
        for name, (draw_panel, label) in figures.items():
            written += style.save(_draw(inexact, draw_panel, label, note), folder, name)
    return written


def _summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each kernel and dtype: how many results there are, the largest errors, how many results
    are above their bound."""
    rows = rows.assign(error_over_bound=rows["error"] / rows["bound"], above_bound=~rows["passed"])
    return rows.groupby(["kernel", "dtype"], sort=False, as_index=False).agg(
        results=("result", "size"),
        error=("error", "max"),
        eager_error=("eager_error", "max"),
        error_over_bound=("error_over_bound", "max"),
        above_bound=("above_bound", "sum"),
    )


def _draw(rows: pd.DataFrame, draw_panel: Callable, label: str, note: str) -> Figure:
    kernels = rows["kernel"].unique()
    block_sizes = sorted(rows["block_size"].dropna().astype(int).unique())
    figure, axes, spare = style.panel_grid(len(kernels), height=1.8, sharex=True)
    for axis, kernel in zip(axes, kernels, strict=True):
        of_kernel = rows[rows["kernel"] == kernel]
        if of_kernel["block_size"].isna().all():
            draw_panel(axis, of_kernel.assign(place=(len(block_sizes) - 1) / 2))
            axis.set_xlabel("knows no blocks")
        else:
            # Block sizes are no scale: 3 and 100 matter as much as the powers of two.
            place = of_kernel["block_size"].map(block_sizes.index)
            draw_panel(axis, of_kernel.assign(place=place))
        axis.set_xticks(range(len(block_sizes)), map(str, block_sizes), rotation=45)
    where = "; kernels run in Triton's interpreter" if rows["interpreted"].all() else ""
    figure.supxlabel(f"block size (tokens){where}{note}", fontsize=8)
    figure.supylabel(label, fontsize=8)
    style.shared_legend(figure, spare, columns=rows["dtype"].nunique())
    return figure


def _draw_error(axis: Axes, rows: pd.DataFrame) -> None:
    """Largest error of the kernel's first result over features and head dims."""
    result = rows["result"].iloc[0]
    axis.set_title(f"{rows['kernel'].iloc[0]}\n{result}")
    for dtype, cells in rows[rows["result"] == result].groupby("dtype", sort=False):
        look = _DTYPES[dtype]
        eager = {**look, "linestyle": "dashed", "markerfacecolor": "white", "linewidth": 0.8}
        worst = cells.groupby("place")[["error", "eager_error"]].max()
        axis.plot(worst["error"], label=f"{dtype}: kernel", **look)
        axis.plot(worst["eager_error"], label=f"{dtype}: eager PyTorch", **eager)
    axis.set_yscale("log")


def _draw_ratio(axis: Axes, rows: pd.DataFrame) -> None:
    """A dot per result of a cell, a line through the worst."""
    for dtype, cells in rows.groupby("dtype", sort=False):
        look = _DTYPES[dtype]
        ratio = cells["error"] / cells["bound"]
        axis.plot(cells["place"], ratio, ".", color=look["color"], ms=2, alpha=0.35)
        axis.plot(ratio.groupby(cells["place"]).max(), label=f"{dtype}: worst result", **look)
    axis.axhline(1, color="black", linestyle="dashed", linewidth=1, label="bound")
    failures = int((~rows["passed"]).sum())
    verdict = f"{failures} above the bound" if failures else "all within the bound"
    axis.set_title(f"{rows['kernel'].iloc[0]}\n{len(rows)} results, {verdict}")
    axis.set_ylim(0, None)


EXPERIMENT = Experiment(
    name="kernel_accuracy",
    figure="error of every kernel against fp64 over block sizes, dtypes, head dims and features",
    options=KernelAccuracy(),
    quick=KernelAccuracy(
        block_size=(1, 7, 256),
        dtype=("float16", "fp8"),
        head_dim=(80,),
        feature=("none", "split"),
    ),
    cells=cells,
    run_cell=run_cell,
    plot=plot,
    gpu="optional",
)
