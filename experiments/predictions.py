"""Times predicted for an H100 and an H200 before they were measured, and their measurement.

Without a GPU the experiment predicts.  Times of kernels are modelled as in ``kernel_time``; their
band is the 5th to 95th percentile of the model's error.  A ratio of two times depends less on the
constants of the card, so its band is 10 %, chosen before any measurement.  The engine serves
nano-vLLM's benchmark on ``GpuClock`` with a host time of 1 ms per step; 0 and 2 ms give the band.

On a GPU the same command measures.  The Triton kernel alternates with the installed baselines, see
``bench/gpu_timing.py``.  Predictions are read from the committed table, never computed again.
``ratio`` is measured / predicted.  A prediction holds if the measured value lies in its band.
The part ``ceilings`` measures the highest rates of the card.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from experiments import kernel_time, style
from experiments.bench.shapes import OURS, Shape, Timed, use_device
from experiments.harness import Absent, Axis, Experiment, Options, Positive, Unavailable
from experiments.harness.environment import committed, cuda_available

CARDS = {"H100-SXM": "NVIDIA H100 80GB HBM3", "H200-SXM": "NVIDIA H200"}
"""Cards with predictions, and the driver's name of each card."""
TABLE = committed("predictions") / "rows.csv"
"""The committed predictions.  Their date and commit are in environment.json in the same folder."""
_OTHERS = ("flash_attn_3", "flash_attn_2", "gather_cudnn", "gather_sdpa")
_COMPILED = ("flex_attention",)
"""Compiling this baseline for a shape takes long, so it is timed last, at two shapes."""
_PAGED = 256
"""Block size for the baselines: some refuse smaller blocks, the others copy the context anyway."""
_RATIO_BAND = 0.1
_HOST_MS = (0, 1, 2)
"""Assumed host time of a step in ms: for the low end of the band, the prediction, the high end."""
_BENCH = "nano-vLLM's benchmark, Qwen3-0.6B, 133,966 tokens"


def _decode(batch: int, tokens: int, block_size: int = 16, kv_dtype: str | None = None) -> Shape:
    sizes: dict[str, Any] = {"context_len": tokens, "block_size": block_size, "kv_dtype": kv_dtype}
    return Shape(op="decode", batch=batch, **sizes)


def _prefill(batch: int, tokens: int) -> Shape:
    return Shape(op="prefill", batch=batch, query_len=tokens, context_len=tokens, block_size=16)


_FP8 = "float8_e4m3fn"
KERNELS: tuple[tuple[Shape, ...], ...] = (
    *((_decode(64, 4096, size, kv),) for kv in (None, _FP8) for size in (16, 256)),
    *((_prefill(1, tokens),) for tokens in (4096, 16384)),
    (_decode(64, 4096, 16), _decode(64, 4096, 256)),
    (_decode(64, 4096, 16, _FP8), _decode(64, 4096, 16)),
    (_decode(64, 4096, 256, _FP8), _decode(64, 4096, 256)),
    (_prefill(1, 16384), _prefill(1, 4096)),
    *((_decode(*sizes),) for sizes in ((1, 4096), (1, 32768), (256, 512), (256, 1024))),
    *((_decode(64, tokens),) for tokens in (1024, 16384)),
    *((_prefill(*sizes),) for sizes in ((1, 2048), (1, 8192), (4, 2048))),
    (_decode(64, 16384), _decode(64, 4096)),
    (_prefill(4, 2048), _prefill(1, 4096)),
)
"""One shape whose time is predicted, or two whose ratio is.  The most important come first."""


@dataclass(frozen=True, kw_only=True)
class Predictions(Options):
    """The grid: parts."""

    part: Axis[Literal["ceilings", "kernels", "engine"]] = ("ceilings", "kernels", "engine")
    budget_ms: Positive = 40.0
    """Device time for the samples of an implementation, in milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Predicted(Options):
    part: str
    card: str


@dataclass(frozen=True, kw_only=True)
class Measured(Options):
    part: str
    shapes: tuple[Shape, ...] = ()
    """One shape whose time is measured, or two whose ratio is."""
    baselines: tuple[str, ...] = ()
    """Implementations that are timed in turns with the Triton kernel."""
    budget_ms: float


def cells(options: Predictions) -> Iterator[Predicted | Measured | Absent]:
    for part in options.part:
        measured = functools.partial(Measured, part=part, budget_ms=options.budget_ms)
        if cuda_available() and part == "kernels":
            for shapes in KERNELS:
                is_alone = len(shapes) > 1 or shapes[0].kv_dtype or shapes[0].block_size == _PAGED
                yield measured(shapes=shapes, baselines=() if is_alone else _OTHERS)
            for shapes in (KERNELS[0], KERNELS[5]):
                yield measured(shapes=shapes, baselines=_COMPILED)
        elif cuda_available():
            yield measured()
        elif part == "ceilings":
            yield Absent("ceilings: there is no GPU here")
        else:
            yield from (Predicted(part=part, card=card) for card in CARDS)


def run_cell(cell: Predicted | Measured) -> list[dict[str, Any]]:
    if isinstance(cell, Predicted):
        rows = (_predict_engine if cell.part == "engine" else _predict_kernels)(cell.card)
        pending = {"measured": None, "ratio": None, "verdict": "predicted"}
        return [{"gpu": cell.card, "part": cell.part, **row, **pending} for row in rows]
    use_device()
    measure = {"ceilings": _measure_ceilings, "engine": _measure_engine}
    rows = measure.get(cell.part, _measure_kernels)(cell)
    return [{"gpu": _card_here(), "part": cell.part, **row} for row in rows]


def name_of(*shapes: Shape) -> str:
    """The name of a shape, or of the ratio of two shapes."""
    return " / ".join(
        f"{shape.op} {shape.batch} x {shape.context_len:,}, "
        f"{'fp8' if shape.kv_dtype else 'bf16'}, block {shape.block_size}"
        for shape in shapes
    )


def _predict_kernels(card: str) -> list[dict[str, Any]]:
    import pandas as pd

    rows = []
    for shapes in KERNELS:
        table = pd.DataFrame(
            {
                "gpu": card, "engine": "pagelab", "phase": shape.op, "lengths": "even",
                "batch_size": shape.batch, "query_tokens": shape.query_len,
                "context_tokens": shape.context_len, "q_heads": 32, "kv_heads": 8, "head_dim": 128,
                "kv_dtype": "fp8" if shape.kv_dtype else "bfloat16", "block_size": shape.block_size,
            }
            for shape in shapes
        )  # fmt: skip
        one, *two = kernel_time.modelled(table).to_dict("records")
        row = {"name": name_of(*shapes), "unit": "ratio" if two else "us", "basis": one["basis"]}
        if two:
            ratio = one["modelled_us"] / two[0]["modelled_us"]
            low, high = ratio * (1 - _RATIO_BAND), ratio * (1 + _RATIO_BAND)
            row |= {"predicted": ratio, "low": low, "high": high}
        else:
            low, high = one["modelled_low_us"], one["modelled_high_us"]
            row |= {"predicted": one["modelled_us"], "low": low, "high": high}
            row["flash_attn3_by_others_us"] = one["measured_flash_attn3_us"]
        rows.append(row)
    return rows


def _predict_engine(card: str) -> list[dict[str, Any]]:
    """Predict the engine's time.  Returns no rows if ``GpuClock`` has no times of the card."""
    from cache import make_manager
    from cache.serving import open_loop
    from experiments import gpu_times
    from experiments.engine import nano_vllm_requests
    from experiments.load.gpu_clock import CLOCK_DISCLAIMER, GpuClock

    if card not in gpu_times.read(gpu_times.TABLES["cards"])["card"].to_list():
        return []
    prompts, outputs = nano_vllm_requests()
    limits: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    seconds = []
    for host_ms in _HOST_MS:
        manager = make_manager("vllm_v1", num_blocks=30_000, block_size=16)
        engine = open_loop.engine_without_model(manager, **limits, max_model_len=4096)
        clock = GpuClock("qwen3-0.6b", card, host_seconds=host_ms / 1000, **limits)
        run = open_loop.serve(engine, prompts, outputs, [0.0] * len(prompts), service=clock)
        seconds.append(run.seconds)
    band = dict(zip(("low", "predicted", "high"), seconds, strict=True))
    return [
        {"name": _BENCH, "unit": "s", **band, "basis": f"{CLOCK_DISCLAIMER} Host time: 0, 1, 2 ms."}
    ]


@functools.cache
def _card_here() -> str:
    """The key in CARDS of this machine's GPU, or the driver's name if CARDS does not have it."""
    import torch

    name = torch.cuda.get_device_name()
    return next((card for card, driver_name in CARDS.items() if driver_name == name), name)


def _judged(name: str, measured: float) -> dict[str, Any]:
    """Columns of a row: the committed prediction of ``name``, its commit and date, the verdict."""
    import pandas as pd

    columns: dict[str, Any] = {"name": name, "measured": measured, "verdict": "no prediction"}
    if not TABLE.exists():
        return columns | {"verdict": f"no prediction: only a checkout has {TABLE}"}
    rows = pd.read_csv(TABLE)
    rows = rows[(rows["gpu"] == _card_here()) & (rows["name"] == name)]
    for known in rows[["predicted", "low", "high"]].to_dict("records"):
        run = json.loads(TABLE.with_name("environment.json").read_text())
        verdict = "holds" if known["low"] <= measured <= known["high"] else "refuted"
        here, then = importlib.metadata.version("triton"), run["packages"]["triton"]
        if here != then:
            verdict += f"; predicted for Triton {then}, measured with {here}"
        columns |= known | {"ratio": measured / known["predicted"], "verdict": verdict}
        columns |= {"predicted_at": run["commit"], "predicted_on": run["started"]}
    return columns


def _measure_kernels(cell: Measured) -> list[dict[str, Any]]:
    """Time the kernels.  Clocks are read before and after the samples, when the card is idle."""
    from experiments.bench import gpu_timing, timed_ops

    timed = [Timed(shape=s, implementation=OURS, budget_ms=cell.budget_ms) for s in cell.shapes]
    paged = dataclasses.replace(cell.shapes[0], block_size=_PAGED)
    timed += [dataclasses.replace(timed[0], shape=paged, implementation=n) for n in cell.baselines]
    clocks = f"{gpu_timing.clocks_mhz()} before"
    results = timed_ops.run_in_turns(timed)
    clocks += f", {gpu_timing.clocks_mhz()} after"
    name, ours = name_of(*cell.shapes), []
    for row in results[: len(cell.shapes)]:
        if isinstance(row, Unavailable):
            raise row
        ours.append(row)
    us = ours[0]["p50_us"]
    if len(ours) == 2:
        ratio = us / ours[1]["p50_us"]
        return [{**_judged(name, ratio), "unit": "ratio", "clocks_mhz": clocks}]
    rows = []
    if cell.baselines != _COMPILED:  # another cell has the Triton kernel's row for this shape
        rows.append({**_judged(name, us), "unit": "us", **ours[0], "clocks_mhz": clocks})
    for baseline, row in zip(cell.baselines, results[1:], strict=True):
        about = {"name": name, "unit": "us", "implementation": baseline, "clocks_mhz": clocks}
        if isinstance(row, Unavailable):
            rows.append({**about, "verdict": str(row)})
        else:
            over = {"ours_over_this": us / row["p50_us"]}
            rows.append({**about, "measured": row["p50_us"], **row, **over})
    return rows


def _measure_engine(cell: Measured) -> list[dict[str, Any]]:
    """Time the engine with CUDA graphs and overlap.  The experiment ``engine`` times nano-vLLM."""
    from experiments.engine import EXPERIMENT as ENGINE

    options: Any = ENGINE.options
    options = dataclasses.replace(
        options, part=("throughput",), model="qwen3-0.6b",
        system=("pagelab",), graphs=(True,), overlap=(True,), scale=1,
    )  # fmt: skip
    (bench,) = ENGINE.checked_cells(options)
    [row] = ENGINE.run_cell(bench)
    return [{**_judged(_BENCH, row["seconds"]), "unit": "s"}]


def _measure_ceilings(cell: Measured) -> list[dict[str, Any]]:
    """Measure the rates of the card, and times of CUDA graphs of small kernels."""
    import torch

    from experiments.bench import gpu_timing

    rates = gpu_timing.device_bandwidths()
    rates |= {name: gpu_timing.bandwidth(name) for name in ("device_to_host", "host_to_device")}
    found: list[tuple[str, str, Any]] = [(name, "GB/s", rate / 1e9) for name, rate in rates.items()]
    found.append(("matmul", "TFLOP/s", gpu_timing.matmul_rate() / 1e12))
    x = torch.zeros(64, device="cuda")

    def add(count: int) -> None:
        for _ in range(count):
            x.add_(1)

    for count in (1, 10, 100):
        times = gpu_timing.time_call(functools.partial(add, count))
        found.append((f"graph of {count} small kernels", "us", times.p50_us))
    clocks = {"clocks_mhz": str(gpu_timing.clocks_mhz())}
    return [dict(zip(("name", "unit", "measured"), row, strict=True)) | clocks for row in found]


def _draw(rows: style.DataFrame) -> style.Figure | None:
    """Draw the bands of the predictions, and the measured values, with a panel per card."""
    rows = rows.dropna(subset="predicted") if "predicted" in rows else rows.head(0)
    if rows.empty:
        return None
    cards, names = list(rows.groupby("gpu", sort=False)), [*dict.fromkeys(rows["name"])]
    height = 0.6 + 0.21 * len(names)
    figure, axes, _ = style.panel_grid(len(cards), height=height, width=7.2 / len(cards))
    for axis, (card, some) in zip(axes, cards, strict=True):
        heights = some["name"].map(names.index)
        low, high = (100 * some[end] / some["predicted"] for end in ("low", "high"))
        axis.hlines(heights, low, high, color=style.SKY, linewidth=3, label="predicted: band")
        measured = 100 * some["measured"].astype(float) / some["predicted"]
        if measured.notna().any():
            axis.plot(measured, heights, label="measured", **style.dots(style.BLACK, "D"))
        for y, row in zip(heights, some.itertuples(), strict=True):
            number = f"{row.predicted:,.0f}" if row.predicted >= 100 else f"{row.predicted:.3g}"
            unit = "" if row.unit == "ratio" else row.unit.replace("us", "µs")
            at = axis.get_yaxis_transform()
            axis.text(1.02, y, f"{number} {unit}", transform=at, fontsize=6, va="center")
        axis.axvline(100, **style.BOUND)
        shown = [name.replace(" / ", "\n/ ") for name in names]
        style.name_rows(axis, shown, shown=axis is axes[0])
        axis.set(title=card, xlabel="% of the predicted value")
    return style.shared_legend(figure, columns=2)


EXPERIMENT = Experiment(
    name="predictions",
    figure="times predicted for an H100 and an H200, beside the measured ones on such a GPU",
    options=Predictions(),
    quick=Predictions(part=("ceilings", "kernels")),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"predictions": _draw}),
    gpu="optional",
    timed=True,
)
