"""Modelled times of attention kernels on GPUs, judged on times that others measured.

The model (model.py) takes machine code, the launch's shape and data sheets. Three constants per GPU
are fitted on half of the Triton decode rows of three GPUs, divided by a hash of the shape. Judged
are the other half, all of prefill, and every GPU with the mean constants of the others
("left out"). Errors on the H100, B200 and L40S are optimistic, because the model's global values
were chosen while looking at all of their rows; the clean judges are the H200, GB200 and RTX PRO
6000, which were never fitted. Rows are those above 20 microseconds. A roofline (bytes at the data
sheet's bandwidth or operations at its peak, and 5 microseconds) stands beside it.

Our decode and prefill are then put on the model, beside measured times of other kernels. No number
was measured on a GPU by this project.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from experiments import style
from experiments.harness import Axis, Experiment, Options, one_of
from experiments.kernel_time import ours
from experiments.kernel_time.model import GPUS, Constants, fit, launches, microseconds

if TYPE_CHECKING:
    import pandas as pd

FITTED = ("H100-SXM", "B200-SXM", "L40S")
BASIS = "modelled from machine code; constants fitted to times that others measured"
_SHAPE = ("phase", "batch_size", "query_tokens", "context_tokens", "q_heads", "kv_heads")
_SHAPE += ("head_dim", "kv_dtype")
_SHORTEST_US = 20


@dataclass(frozen=True, kw_only=True)
class KernelTime(Options):
    gpu: Axis[Annotated[str, one_of(GPUS)]] = tuple(GPUS)

    @property
    def group(self) -> tuple[str, ...]:
        return ("fits",)


@functools.cache
def _judged() -> pd.DataFrame:
    """Measured Triton rows with their launches, and whether a row may be fitted."""
    import pandas as pd

    from experiments import gpu_times

    rows = gpu_times.rows("attention", kernel="triton").drop(columns="kernel")
    # Rows of vLLM 0.22 are copies.
    rows = rows[(rows["engine"] != "vllm 0.22.0") & (rows["microseconds"] > _SHORTEST_US)]
    half = pd.util.hash_pandas_object(rows[list(_SHAPE)], index=False) % 2 == 0
    rows = rows.assign(may_fit=half & (rows["phase"] == "decode") & rows["gpu"].isin(FITTED))
    return pd.concat([rows, launches(rows)], axis=1)


@functools.cache
def constants(gpu: str, left_out: bool) -> Constants:
    """Fitted to the GPU, or the mean of those of the other GPUs in ``FITTED``."""
    if left_out:
        return Constants(*np.mean([constants(name, False) for name in FITTED if name != gpu], 0))
    rows = _judged()
    rows = rows[(rows["gpu"] == gpu) & rows["may_fit"]]
    return fit(gpu, rows, rows["microseconds"])


def run_cell(cell: KernelTime) -> list[dict[str, Any]]:
    rows = _judged()
    rows = rows[rows["gpu"] == cell.gpu]
    table = []
    for left_out in (False, True) if cell.gpu in FITTED else (True,):
        found = constants(cell.gpu, left_out)
        about = {"part": "errors", "gpu": cell.gpu, "left_out": left_out, **found._asdict()}
        for phase, of_phase in rows[~rows["may_fit"] | left_out].groupby("phase"):
            families = of_phase.groupby(["engine", "head_dim", "kv_dtype"])
            for family, some in ((("all",), of_phase), *families):
                name = " ".join(map(str, family))
                table.append({**about, "phase": phase, "family": name, **_errors(some, found)})
    return table + _ours(cell.gpu) if cell.gpu in ours.CARDS else table


def _errors(rows: pd.DataFrame, found: Constants) -> dict[str, Any]:
    """Relative errors, quantiles of modelled / measured, and the shape with the worst."""
    gpu, measured = rows["gpu"].iloc[0], rows["microseconds"]
    ratio = microseconds(gpu, rows, found) / measured
    error = (ratio - 1).abs()
    flops = rows["work"] * rows["tile_flops"] / (GPUS[gpu].tflops * 1e6)
    roofline = np.maximum(rows["moved"] / (GPUS[gpu].bandwidth * 1e3), flops) + 5
    worst = rows.loc[np.log(ratio).abs().idxmax()]
    return {
        "rows": len(rows),
        "error_median": error.median(),
        "error_p90": error.quantile(0.9),
        "roofline_error_median": (roofline / measured - 1).abs().median(),
        **{f"ratio_p{100 * q:.0f}": ratio.quantile(q) for q in (0.05, 0.25, 0.5, 0.75, 0.95)},
        "worst_ratio": ratio[worst.name],
        "worst_kernel": worst["kernel"],
        **{f"worst_{name}": worst[name] for name in _SHAPE[1:6]},
        "worst_us": worst["microseconds"],
    }


@functools.cache
def _band(phase: str) -> tuple[float, float]:
    """5th and 95th percentile of modelled / measured of all Triton rows, their GPU left out."""
    rows = _judged()
    found = [
        microseconds(gpu, some, constants(gpu, True)) / some["microseconds"]
        for gpu, some in rows[rows["phase"] == phase].groupby("gpu")
    ]
    low, high = np.quantile(np.concatenate(found), (0.05, 0.95))
    return float(low), float(high)


def _ours(gpu: str) -> list[dict[str, Any]]:
    """Our kernels, with the band of Triton's, beside others' measured at equal lengths."""
    import pandas as pd

    from experiments import gpu_times

    shapes = ours.rows(gpu)
    measured = gpu_times.rows("attention", gpu=gpu, head_dim=128)
    times = measured.pivot_table("microseconds", list(_SHAPE), "kernel", aggfunc="min")
    times = times.reindex(columns=list(_OTHERS))
    modelled = microseconds(gpu, launches(shapes), constants(gpu, gpu not in FITTED))
    bands = np.array([_band(phase) for phase in shapes["phase"]])
    shapes = shapes[["gpu", *_SHAPE, "block_size", "lengths"]].assign(
        part="ours",
        modelled_us=modelled,
        modelled_low_us=modelled / bands[:, 1],
        modelled_high_us=modelled / bands[:, 0],
        basis=BASIS,
    )
    table = shapes.join(times.add_prefix("measured_").add_suffix("_us"), on=list(_SHAPE))
    return table.astype(object).where(pd.notna(table), None).to_dict("records")


_LOOKS = {
    False: ("fitted to half of its decode rows", style.BLUE, "o", -0.15),
    True: ("constants of other GPUs", style.ORANGE, "s", 0.15),
}


def _draw_errors(rows: style.DataFrame) -> style.Figure | None:
    """A panel per GPU and phase, a row per family of kernels."""
    panels = rows[rows["part"] == "errors"].groupby(["gpu", "phase"], sort=False)
    if not len(panels):
        return None
    figure, axes, _ = style.panel_grid(len(panels), height=1.5, width=3.6, columns=2)
    for axis, ((gpu, phase), some) in zip(axes, panels, strict=True):
        families = list(dict.fromkeys(some["family"]))
        some = some.assign(place=some["family"].map(families.index))
        roofline = 100 * some["roofline_error_median"]
        axis.plot(roofline, some["place"], label="roofline", **style.dots(style.GREY, "x"))
        for left_out, those in some.groupby("left_out"):
            label, color, marker, shift = _LOOKS[left_out]
            y, median, most = those["place"] + shift, those["error_median"], those["error_p90"]
            axis.hlines(y, 100 * median, 100 * most, color=color, linewidth=0.7)
            axis.plot(100 * median, y, label=label, **style.dots(color, marker))
        style.name_rows(axis, families)
        axis.set(xlim=(0, 100), title=f"{gpu}, {phase}")
    xlabel = "|modelled / measured - 1| above 20 µs (%): median, to the 90th percentile"
    return style.shared_legend(figure, columns=3, xlabel=xlabel)


_OTHERS = {
    "flash_attn3": style.line(style.RED, "^", "dashed"),
    "flash_attn2": style.line(style.GREEN, "s", "dashed"),
    "flashinfer": style.line(style.ORANGE, "D", "dashed"),
}


def _draw_ours(rows: style.DataFrame) -> style.Figure | None:
    """Time over the context, a panel per GPU, phase and batch."""
    if "ours" not in set(rows["part"]):
        return None
    rows = rows[rows["part"] == "ours"].astype({"batch_size": int})
    for column, value in (("kv_heads", 8), ("kv_dtype", "bfloat16"), ("block_size", 16)):
        rows = rows[rows[column] == value]
    rows = rows[(rows["lengths"] == "even") & rows["batch_size"].isin([8, 16, 64])]
    panels = rows.sort_values("context_tokens").groupby(["gpu", "phase", "batch_size"])
    figure, axes, _ = style.panel_grid(len(panels), height=1.6)
    for axis, ((gpu, phase, batch), some) in zip(axes, panels, strict=True):
        x, band = some["context_tokens"], (some["modelled_low_us"], some["modelled_high_us"])
        axis.fill_between(x, *band, color=style.BLUE, alpha=0.2, linewidth=0)
        axis.plot(x, some["modelled_us"], label="ours, modelled", **style.line(style.BLUE, "o"))
        for name, look in _OTHERS.items():
            axis.plot(x, some[f"measured_{name}_us"], label=f"{name}, measured by others", **look)
        axis.set(xscale="log", yscale="log", title=f"{gpu}, {phase}, batch {batch}")
        style.log_x(axis, sorted(set(x)))
    xlabel = f"tokens of each sequence. Ours: {BASIS}"
    return style.shared_legend(figure, columns=4, xlabel=xlabel, ylabel="µs")


EXPERIMENT = Experiment(
    name="kernel_time",
    figure="modelled times of attention kernels on GPUs, judged on times that others measured",
    options=KernelTime(),
    quick=KernelTime(gpu=("H100-SXM",)),
    run_cell=run_cell,
    plot=style.plotter({"errors": _draw_errors, "ours": _draw_ours}),
)
