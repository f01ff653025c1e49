"""Modelled times of attention kernels on GPUs, compared with published times.

The model (model.py) uses machine code, the launch's shape and data sheets. Three constants per GPU
are fitted for three GPUs on half of the Triton decode rows, chosen by a hash of the shape. The
model is judged on the second half, on prefill, and on every GPU with the other fitted GPUs' mean
constants ("left out"). Errors on the H100, B200 and L40S are optimistic, because the model's global
values were chosen while looking at all of their rows. The model was finished before it was compared
with the H200, GB200 and RTX PRO 6000; later changes are not held out. Rows below 20 microseconds
are left out. The table also has a roofline (bytes at the data sheet's bandwidth or operations at
its peak, and 5 microseconds). ``misses.csv`` has the errors above their bars. Shares of the
bandwidth from ``bandwidth_least`` to ``bandwidth_most`` fit about as well as the fitted share: the
B200's share is uncertain.

The model then gives times of our decode and prefill, for even and skewed batches, next to published
times of other kernels at the same shape.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from experiments import style
from experiments.harness import Axis, Experiment, Options, one_of
from experiments.kernel_time.launch import launches
from experiments.kernel_time.model import Constants, fit, gpu_of, microseconds, score

if TYPE_CHECKING:
    import pandas as pd

FITTED = ("H100-SXM", "B200-SXM", "L40S")
CARDS = ("A100-SXM", *FITTED)
"""GPUs on which kernels other than Triton kernels were measured."""
BASIS = "modelled from machine code; constants fitted to times that others measured"
_GPUS = ("A100-SXM", "H100-SXM", "H200-SXM", "B200-SXM", "GB200", "L40S", "RTX-PRO-6000")
_SHAPE = ["phase", "batch_size", "query_tokens", "context_tokens", "q_heads", "kv_heads"]
_SHAPE += ["head_dim", "kv_dtype"]
_SHARES = ("bandwidth_least", "bandwidth_most")
_SHORTEST_US = 20
_BARS = {
    ("decode", False): (0.15, 0.35),
    ("prefill", False): (0.2, 0.45),
    ("decode", True): (0.2, np.inf),
    ("prefill", True): (0.25, np.inf),
}
"""Largest allowed median and 90th percentile of a GPU's errors, by (phase, left out)."""
_FAMILY_BAR = (0.3, np.inf)


@dataclass(frozen=True, kw_only=True)
class KernelTime(Options):
    gpu: Axis[Annotated[str, one_of(_GPUS)]] = _GPUS

    @property
    def group(self) -> tuple[str, ...]:
        return ("fits",)


@functools.cache
def _judged() -> pd.DataFrame:
    """Measured Triton rows, with the launches of each row and whether the fit may use it."""
    import pandas as pd

    from experiments import gpu_times

    rows = gpu_times.rows("attention", kernel="triton").drop(columns="kernel")
    # Rows of vLLM 0.22 are duplicates.
    rows = rows[(rows["engine"] != "vllm 0.22.0") & (rows["microseconds"] > _SHORTEST_US)]
    half = pd.util.hash_pandas_object(rows[_SHAPE], index=False) % 2 == 0
    rows = rows.assign(may_fit=half & (rows["phase"] == "decode") & rows["gpu"].isin(FITTED))
    return pd.concat([rows, launches(rows)], axis=1)


@functools.cache
def constants(gpu: str, left_out: bool) -> Constants:
    """Constants fitted to the GPU.  If it is left out: mean of the other ``FITTED`` GPUs."""
    if left_out:
        return Constants(*np.mean([constants(name, False) for name in FITTED if name != gpu], 0))
    rows = _judged().query("may_fit and gpu == @gpu")
    return fit(gpu, rows, rows["microseconds"])


@functools.cache
def bandwidth_shares(gpu: str) -> tuple[float, float]:
    """Least and largest bandwidth share whose score on the fitted rows is less than 2 % above the
    fit's score, with equal latency and floor. NaN for a GPU that was not fitted."""
    rows, tried = _judged().query("may_fit and gpu == @gpu"), np.arange(1, 101) / 100
    if rows.empty:
        return np.nan, np.nan
    us, found = rows["microseconds"], constants(gpu, False)
    scores = [score(gpu, rows, us, found._replace(bandwidth=share)) for share in tried]
    near = tried[np.array(scores) < 1.02 * score(gpu, rows, us, found)]
    return near.min(), near.max()


def run_cell(cell: KernelTime) -> list[dict[str, Any]]:
    rows = _judged()
    rows = rows[rows["gpu"] == cell.gpu]
    table = []
    for left_out in (False, True) if cell.gpu in FITTED else (True,):
        found = constants(cell.gpu, left_out)
        about = {"part": "errors", "gpu": cell.gpu, "left_out": left_out, **found._asdict()}
        about |= dict(zip(_SHARES, bandwidth_shares(cell.gpu), strict=True)) | {"basis": BASIS}
        for phase, of_phase in rows[~rows["may_fit"] | left_out].groupby("phase"):
            about |= {"phase": phase, "family": "all"}
            table.append(about | _errors(of_phase, found, _BARS[phase, left_out]))
            for family, some in of_phase.groupby("kernel"):
                table.append(about | {"family": family} | _errors(some, found, _FAMILY_BAR))
    if cell.gpu in CARDS:
        table += modelled(shapes(cell.gpu)).to_dict("records")
    return table


def _errors(rows: pd.DataFrame, found: Constants, bar: tuple[float, float]) -> dict[str, Any]:
    """Relative errors, quantiles of modelled / measured, and the shape with the largest error."""
    gpu, measured = gpu_of(rows["gpu"].iloc[0]), rows["microseconds"]
    ratio = microseconds(gpu.gpu, rows, found) / measured
    error = (ratio - 1).abs()
    flops = rows["work"] * rows["tile_flops"] / (gpu.tflops * 1e6)
    roofline = np.maximum(rows["moved"] / (gpu.bandwidth / 1e6), flops) + 5
    worst = rows.loc[np.log(ratio).abs().idxmax()]
    median, p90 = error.median(), error.quantile(0.9)
    return {
        "rows": len(rows),
        "error_median": median,
        "error_p90": p90,
        "within_bar": bool(median <= bar[0] and p90 <= bar[1]),
        "roofline_error_median": (roofline / measured - 1).abs().median(),
        **{f"ratio_p{100 * q:.0f}": ratio.quantile(q) for q in (0.05, 0.25, 0.5, 0.75, 0.95)},
        "worst_ratio": ratio[worst.name],
        "worst_kernel": worst["kernel"],
        **{f"worst_{name}": worst[name] for name in _SHAPE[1:6]},
        "worst_us": worst["microseconds"],
    }


@functools.cache
def _band(phase: str) -> tuple[float, float]:
    """5th and 95th percentile of modelled / measured of all Triton rows, GPUs left out."""
    rows = _judged()
    found = [
        microseconds(gpu, some, constants(gpu, True)) / some["microseconds"]
        for gpu, some in rows[rows["phase"] == phase].groupby("gpu")
    ]
    low, high = np.quantile(np.concatenate(found), (0.05, 0.95))
    return float(low), float(high)


def shapes(gpu: str) -> pd.DataFrame:
    """Shapes of our kernels, with 32 query heads of 128: even and skewed decode, and prefill."""
    import pandas as pd

    axes = ("phase", "lengths", "batch_size", "context_tokens", "kv_heads", "kv_dtype")
    contexts, heads, dtypes = [1024, 4096, 16384], [8, 4], ["bfloat16", "fp8"]
    points = [
        (["decode"], ["even"], [1, 16, 64, 256], contexts, heads, dtypes, [16, 256]),
        (["decode"], ["skewed"], [16, 64, 256], contexts, heads, dtypes, [16]),
        (["prefill"], ["even"], [1, 8], [512, 2048, 8192], heads, ["bfloat16"], [16]),
    ]
    grids = [
        pd.MultiIndex.from_product(point).to_frame(name=[*axes, "block_size"]) for point in points
    ]
    table = pd.concat(grids, ignore_index=True)
    queries = table["context_tokens"].where(table["phase"] == "prefill", 1)
    about = {"gpu": gpu, "engine": "pagelab", "q_heads": 32, "head_dim": 128}
    return table.assign(query_tokens=queries, **about)


def modelled(ours: pd.DataFrame) -> pd.DataFrame:
    """Modelled times of our kernels on one GPU, their band, and published times of the same shapes.

    ours: a table with the columns of ``shapes``, for one GPU.
    """
    from experiments import gpu_times

    gpu = ours["gpu"].iloc[0]
    measured = gpu_times.rows("attention", gpu=gpu).assign(lengths="even")
    times = measured.pivot_table("microseconds", [*_SHAPE, "lengths"], "kernel", aggfunc="min")
    times = times.reindex(columns=list(_OTHERS)).add_prefix("measured_").add_suffix("_us")
    found, launched = constants(gpu, gpu not in FITTED), launches(ours)
    us, slow, fast = (
        microseconds(gpu, launched, found._replace(bandwidth=share))
        for share in (found.bandwidth, *bandwidth_shares(gpu))
    )
    low, high = np.array([_band(phase) for phase in ours["phase"]]).T
    table = ours[["gpu", *_SHAPE, "block_size", "lengths"]].assign(
        part="ours",
        modelled_us=us,
        modelled_low_us=us / high,
        modelled_high_us=us / low,
        least_bandwidth_us=slow,
        most_bandwidth_us=fast,
        basis=BASIS,
    )
    table = table.join(times, on=[*_SHAPE, "lengths"])
    return table.astype(object).where(table.notna(), None)


def _draw_errors(rows: style.DataFrame) -> style.Figure | None:
    """One panel per phase and one row per GPU.  Small dots are families of kernels."""
    rows = rows[rows["part"] == "errors"]
    if rows.empty:
        return None
    gpus, phases = list(rows["gpu"].unique()), rows.groupby("phase")
    figure, axes, _ = style.panel_grid(len(phases), height=2.4, width=3.5, columns=2)
    for axis, (phase, of_phase) in zip(axes, phases, strict=True):
        for left_out, label, color, marker, shift in (
            (False, "fitted to half of its decode rows", style.BLUE, "o", -0.15),
            (True, "constants of other GPUs", style.ORANGE, "s", 0.15),
        ):
            some = of_phase[of_phase["left_out"] == left_out]
            heights, is_all = some["gpu"].map(gpus.index) + shift, some["family"] == "all"
            median, p90 = 100 * some["error_median"], 100 * some["error_p90"]
            axis.plot(median[~is_all], heights[~is_all], ".", color=color, markersize=2)
            axis.hlines(heights[is_all], 0, p90[is_all], color=color, linewidth=0.7)
            axis.plot(median[is_all], heights[is_all], label=label, **style.dots(color, marker))
            roofline = 100 * some["roofline_error_median"][is_all]
            axis.plot(roofline, heights[is_all], label="roofline", **style.dots(style.GREY, "x"))
        style.name_rows(axis, gpus)
        axis.set(xlim=(0, 100), title=phase)
    xlabel = (
        "|modelled / measured - 1| above 20 µs (%): median, line to the 90th percentile;\n"
        "small dots are medians of kernels"
    )
    return style.shared_legend(figure, xlabel=xlabel)


_OTHERS = {
    "flash_attn3": style.line(style.RED, "^", "dashed"),
    "flash_attn2": style.line(style.GREEN, "s", "dashed"),
    "flashinfer": style.line(style.ORANGE, "D", "dashed"),
}


def _draw_ours(rows: style.DataFrame) -> style.Figure | None:
    """Times divided by our modelled time of an even batch.  One panel per GPU, phase and batch."""
    if "ours" not in set(rows["part"]):
        return None
    rows = rows[(rows["part"] == "ours") & rows["batch_size"].isin([8, 16, 64])]
    for column, value in (("kv_heads", 8), ("kv_dtype", "bfloat16"), ("block_size", 16)):
        rows = rows[rows[column] == value]
    panels = rows.astype({"batch_size": int}).groupby(["gpu", "phase", "batch_size"])
    figure, axes, _ = style.panel_grid(len(panels), height=1.45, sharey=True)
    for axis, ((gpu, phase, batch), of_panel) in zip(axes, panels, strict=True):
        times = of_panel.set_index("context_tokens").select_dtypes("number").sort_index()
        is_even = (of_panel.sort_values("context_tokens")["lengths"] == "even").to_numpy()
        even, skewed = times[is_even], times[~is_even]
        us = even["modelled_us"]
        band = (even["modelled_low_us"] / us, even["modelled_high_us"] / us)
        axis.fill_between(us.index, *band, color=style.SKY, alpha=0.35, lw=0, label="model's error")
        ends = (even["most_bandwidth_us"] / us, even["least_bandwidth_us"] / us)
        look: dict[str, Any] = {"color": style.GREY, "alpha": 0.5, "linewidth": 0}
        axis.fill_between(us.index, *ends, label="with bandwidths that fit as well", **look)
        axis.axhline(1, color=style.BLUE, label="ours, modelled: 1")
        look = {"label": "the same, skewed batch", **style.line(style.BLACK, "x", "dotted")}
        axis.plot(skewed["modelled_us"] / us, **look)
        for name, look in _OTHERS.items():
            label = f"{name}, measured by others"
            axis.plot(even[f"measured_{name}_us"] / us, label=label, **look)
        axis.set(yscale="log", title=f"{gpu}, {phase}, batch {batch}")
        style.log_x(axis, list(us.index))
        axis.set_xticks(us.index, [f"{x:,.0f}\n{y:,.0f} µs" for x, y in us.items()])
        style.plain_log_ticks(axis.yaxis)
    xlabel = f"tokens of each sequence (on average), and our modelled time.\nOurs: {BASIS}"
    ylabel = "time / our modelled time"
    return style.shared_legend(figure, columns=4, xlabel=xlabel, ylabel=ylabel)


def _misses(rows: style.DataFrame) -> style.DataFrame:
    errors = rows[rows["part"] == "errors"]
    columns = ["gpu", "phase", "left_out", "family", "rows", "error_median", "error_p90"]
    return errors.loc[~errors["within_bar"].astype(bool), columns]


EXPERIMENT = Experiment(
    name="kernel_time",
    figure="modelled times of attention kernels on GPUs, judged on times that others measured",
    options=KernelTime(),
    quick=KernelTime(gpu=("H100-SXM",)),
    run_cell=run_cell,
    plot=style.plotter({"errors": _draw_errors, "ours": _draw_ours}, {"misses": (_misses, "%.3g")}),
)
