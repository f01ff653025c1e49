"""Error of every kernel against fp64, beside PyTorch's error in the same dtype.

``kernels/testing/accuracy.py`` defines the bound of an error. ``kernels/testing/cases.py`` has the
inputs: block tables are shuffled, and slots that must not matter hold NaN and infinity. Without a
GPU the kernels run in Triton's interpreter. It checks the algorithm, but not the GPU's arithmetic.
Every block size has the same data, so a line that is not flat shows an effect of the block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from experiments import style
from experiments.bench.shapes import accuracy_columns, use_device
from experiments.harness import Axis, Count, Experiment, Options, Repeated, grid, one_of

if TYPE_CHECKING:
    from kernels.testing.cases import Case

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
_ATTENTION = ("none", "window", "softcap", "alibi", "sinks", "split")
_ROTARY = ("none", "interleaved")


@dataclass(frozen=True)
class Kernel:
    """The axes of the grid that matter to a kernel."""

    features: tuple[str, ...] = ("none",)
    """Options of the kernel, tested one at a time; see ``kernels.testing.cases.FEATURES``."""
    touches_cache: bool = True
    """Whether the dtype of the cache matters to the kernel."""
    has_blocks: bool = True
    """Whether the block size matters to the kernel."""


_WITHOUT_CACHE: dict[str, Any] = {"touches_cache": False, "has_blocks": False}
KERNELS = {
    "store_kvcache": Kernel(),
    "rope_store_kvcache": Kernel((*_ROTARY, "norms")),
    "add_rms_norm": Kernel(("none", "alone", "offset"), **_WITHOUT_CACHE),
    "gated_activation": Kernel(("none", "gelu"), **_WITHOUT_CACHE),
    "apply_rotary_embedding": Kernel(_ROTARY, **_WITHOUT_CACHE),
    "slot_mapping_from_positions": Kernel(touches_cache=False),
    "sample_tokens": Kernel(("none", "greedy", "min_p", "top_k", "top_p"), **_WITHOUT_CACHE),
    "update_block_bounds": Kernel(touches_cache=False),
    "select_blocks": Kernel(touches_cache=False),
    "copy_blocks": Kernel(("none", "list")),
    "swap_blocks": Kernel(("none", "in", "hnd")),
    "merge_attention_states": Kernel(**_WITHOUT_CACHE),
    "paged_decode_attention": Kernel(_ATTENTION),
    "shared_prefix_decode_attention": Kernel(_ATTENTION),
    "paged_prefill_attention": Kernel(_ATTENTION),
    "concat_and_cache_mla": Kernel(touches_cache=False),
    "paged_mla_decode_attention": Kernel(("none", "split"), touches_cache=False),
}
"""Kernels by the name of their op."""
FEATURES = tuple(dict.fromkeys(one for kernel in KERNELS.values() for one in kernel.features))


@dataclass(frozen=True, kw_only=True)
class KernelAccuracy(Options):
    """The grid: kernels x features x head dims x dtypes x block sizes."""

    kernel: Repeated[Axis[Annotated[str, one_of(KERNELS)]]] = ()
    """A kernel by name. By default every kernel."""
    block_size: Axis[Count] = (1, 2, 3, 7, 16, 24, 32, 64, 100, 128, 256, 512, 1024)
    """Token slots per block."""
    dtype: Axis[Literal["float16", "bfloat16", "float32", "fp8"]] = tuple(_DTYPES)
    """fp8: an fp8 (e4m3) cache with a scale per head, and bfloat16 queries, keys and values."""
    head_dim: Axis[Count] = (16, 64, 80, 96, 112, 128, 256)
    feature: Axis[Annotated[str, one_of(FEATURES)]] = FEATURES
    """Options of the kernels, tested one at a time."""

    @property
    def group(self) -> tuple[str, ...]:
        return self.kernel, self.dtype

    def case(self, device: str) -> Case:
        """The inputs of a cell's kernel."""
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
        )


def cells(options: KernelAccuracy) -> Iterator[KernelAccuracy]:
    """For each kernel, cells over the axes that matter to the kernel."""
    for name in options.kernel or KERNELS:
        kernel = KERNELS[name]
        yield from grid(
            options,
            kernel=[name],
            block_size=options.block_size if kernel.has_blocks else options.block_size[:1],
            dtype=[d for d in options.dtype if d != "fp8" or kernel.touches_cache],
            feature=[f for f in options.feature if f in kernel.features],
        )


def run_cell(cell: KernelAccuracy) -> list[dict[str, Any]]:
    device = use_device().type
    return [
        {
            "kernel": cell.kernel,
            "result": result,
            **cell.columns("feature", "head_dim", "dtype"),
            "block_size": cell.block_size if KERNELS[cell.kernel].has_blocks else None,
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


def _draw(rows: style.DataFrame) -> style.Figure | None:
    """Draw a panel for each kernel that has errors, and name the kernels that have none."""
    worst = rows.groupby("kernel", sort=False)["error"].max()
    kernels, exact = worst.index[worst > 0], worst.index[worst == 0]
    if kernels.empty:
        return None
    block_sizes = sorted(rows["block_size"].dropna().astype(int).unique())
    # The axis spaces block sizes evenly: 3 and 100 matter as much as the powers of two.
    x_of = {size: x for x, size in enumerate(block_sizes)}
    rows = rows.assign(x=rows["block_size"].map(x_of).fillna((len(block_sizes) - 1) / 2))
    figure, axes, spare = style.panel_grid(len(kernels), height=1.8, sharex=True)
    for axis, kernel in zip(axes, kernels, strict=True):
        of_kernel = rows[rows["kernel"] == kernel]
        _draw_ratio(axis, of_kernel)
        if of_kernel["block_size"].isna().all():
            axis.set_xlabel("has no blocks")
        axis.set_xticks(range(len(block_sizes)), map(str, block_sizes), rotation=45)
    xlabel = "block size (tokens)"
    if rows["interpreted"].all():
        xlabel += "; kernels run in Triton's interpreter"
    if len(exact):
        xlabel += f"\nno error in any result: {', '.join(exact)}"
    labels = {"xlabel": xlabel, "ylabel": "kernel error / bound"}
    return style.shared_legend(figure, spare, rows["dtype"].nunique(), **labels)


def _draw_ratio(axis: style.Axes, rows: style.DataFrame) -> None:
    """Draw a dot per result, a line through the largest error / bound at each x, and a red cross on
    each wrong result.  Errors that are not finite are drawn at the top."""
    ratio = rows["error"] / rows["bound"]
    finite = ratio[ratio < float("inf")]
    ratio = ratio.where(ratio < float("inf"), 10 * max(1, *finite)).clip(lower=_MIN_RATIO)
    for dtype, of_dtype in ratio.groupby(rows["dtype"], sort=False):
        look, x = _DTYPES[dtype], rows.loc[of_dtype.index, "x"]
        axis.plot(x, of_dtype, ".", color=look["color"], ms=2, alpha=0.35)
        axis.plot(of_dtype.groupby(x).max(), label=f"{dtype}: worst result", **look)
    axis.axhline(1, **style.BOUND, label="bound")
    wrong = rows.index[~rows["passed"]]
    verdict = f"{len(wrong)} WRONG" if len(wrong) else "all within the bound"
    axis.set_title(f"{rows['kernel'].iloc[0]}\n{len(rows)} results, {verdict}")
    axis.set(yscale="log", ylim=(0.7 * _MIN_RATIO, 5 * max(1, ratio.max())))
    if len(wrong):
        axis.plot(rows.loc[wrong, "x"], ratio[wrong], label="WRONG: above the bound", **_WRONG)


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
