"""Perplexity of a real model on prose, with KV caches of several dtypes and fp8 scales.

SmolLM2-135M-Instruct computes windows of Python's documentation.  Weights and arithmetic are fp32
in every cell; only the cache differs, and every key and value is read from it.  fp8 is e4m3, with a
scale of 1 or with calibrated scales.  Calibration uses other windows of the same text: a scale maps
the largest magnitude to fp8's largest number, 448.  There is one scale per layer, like in
checkpoints, or one per layer and head.  ``saturated`` has the scale 1/32, so magnitudes above 14
saturate, as magnitudes above 448 would in a model with larger keys and scale 1.

A finer scale need not help: the relative error of a floating-point format does not depend on the
scale while numbers stay in its range, and with scale 1 they do.  Calibrated scales per head are
worse than scale 1.  Two caches show that this is not for being finer: ``power of 2 per head``
rounds the calibrated scales up to powers of two, ``random per head`` draws scales between 1 and 2,
and both are no worse than scale 1.  The cause was not found.  Calibrated scales saturate numbers
above the calibration's largest, and a scale that is no power of two changes how each number rounds.

The summary has the mean difference from the fp32 cache in the same window, in nats per token, with
a 95 % bootstrap interval over the windows, and the same for the difference from scale 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from experiments import style
from experiments.harness import Axis, Count, Experiment, Options, one_of
from experiments.load import engine_models

if TYPE_CHECKING:
    import torch

    from models import LLM

CACHES = {
    "fp32": ("float32", None),
    "bf16": ("bfloat16", None),
    "fp8, scale 1": ("float8_e4m3fn", None),
    "fp8, scale per layer": ("float8_e4m3fn", "layer"),
    "fp8, scale per head": ("float8_e4m3fn", "head"),
    "fp8, power of 2 per head": ("float8_e4m3fn", "power of 2"),
    "fp8, random per head": ("float8_e4m3fn", "random"),
    "fp8, saturated": ("float8_e4m3fn", 1 / 32),
}
"""Dtype and scale of each cache, by its name in the figure."""


@dataclass(frozen=True, kw_only=True)
class Fp8Quality(Options):
    """The grid: caches."""

    cache: Axis[Annotated[str, one_of(CACHES)]] = tuple(CACHES)
    model: Annotated[str, one_of(("tiny", engine_models.SMOLLM2))] = engine_models.SMOLLM2
    """The model ``tiny`` has random weights, and its tokens are bytes."""
    windows: Count = 20
    """Number of evenly spaced windows of the text whose perplexity is measured."""
    calibration_windows: Count = 4
    """Number of other windows, which calibrate the scales."""
    window_tokens: Count = 1024
    threads: Count = 1

    @property
    def setup_key(self) -> tuple[str, ...]:
        return (self.model,)


def run_cell(cell: Fp8Quality) -> list[dict[str, Any]]:
    llm = engine_models.window_llm(cell.model, cell.window_tokens, cell.threads)
    import torch

    from models.decoder import Attention

    judged, calibration = _windows(cell, engine_models.prose_tokens(llm))
    dtype, scale = CACHES[cell.cache]
    layers = [layer for layer in llm.model.modules() if isinstance(layer, Attention)]
    scales: Any = [(scale, scale)] * len(layers)
    for layer in layers:  # do not calibrate with the scales of the previous cell
        layer.k_scale = layer.v_scale = None
    if isinstance(scale, str):
        largest = torch.stack([_compute(llm, tokens, torch.float32)[1] for tokens in calibration])
        fitted = largest.amax(dim=0) / 448  # (2, num_layers, num_kv_heads)
        if scale == "layer":
            fitted = fitted.amax(dim=-1, keepdim=True)
        elif scale == "power of 2":
            fitted = fitted.log2().ceil().exp2()
        elif scale == "random":
            drawn = np.random.default_rng(cell.seed).random(fitted.shape, np.float32)
            fitted = torch.from_numpy(drawn).exp2()
        scales = zip(*fitted, strict=True)
    for layer, (k_scale, v_scale) in zip(layers, scales, strict=True):
        layer.k_scale, layer.v_scale = k_scale, v_scale
    return [
        {
            **cell.columns("model", "cache", "window_tokens", "calibration_windows"),
            "window": index,
            "nats_per_token": _compute(llm, tokens, getattr(torch, dtype))[0],
        }
        for index, tokens in enumerate(judged)
    ]


def _windows(cell: Fp8Quality, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The measured windows and the calibration windows, (number, window_tokens) each."""
    whole = len(tokens) // cell.window_tokens
    count = cell.windows + cell.calibration_windows
    if count > whole:
        raise ValueError(f"--windows, --calibration-windows: the text has {whole}, not {count}")
    windows = np.array(tokens[: whole * cell.window_tokens]).reshape(whole, -1)
    windows = windows[np.linspace(0, whole - 1, count).astype(int)]
    aside = np.linspace(0, count - 1, cell.calibration_windows).astype(int)
    return np.delete(windows, aside, axis=0), windows[aside]


def _compute(llm: LLM, tokens: np.ndarray, dtype: torch.dtype) -> tuple[float, torch.Tensor]:
    """Compute a window with an empty cache of ``dtype``.  Returns its nats per token, and the
    largest magnitudes of its keys and values, (2, num_layers, num_kv_heads)."""
    import torch

    from models.attention import AttentionMetadata
    from models.runner import make_kv_cache

    ids, count = torch.from_numpy(tokens).to(llm.device), len(tokens)
    positions, starts = torch.arange(count, device=llm.device), ids.new_tensor([0, count]).int()
    table, length = starts[None, :1], starts[1:]
    cache = make_kv_cache(llm.model, 1, count, dtype)
    batch = AttentionMetadata(positions, table, starts, length, count, count)
    with torch.inference_mode():
        hidden = llm.model(ids, positions, cache, batch)
        nats = torch.nn.functional.cross_entropy(llm.model.logits(hidden[:-1]), ids[1:])
    return nats.item(), cache.float().abs().amax(dim=(2, 3, 5))


def _with_differences(rows: style.DataFrame) -> style.DataFrame | None:
    """Add nats per token minus other caches' in the same window: ``more`` (than fp32) and
    ``over_scale_1``."""
    nats = rows.pivot(index="window", columns="cache", values="nats_per_token")
    nats = nats.reindex(columns=["fp32", "fp8, scale 1"]).loc[rows["window"]].to_numpy()
    more = rows["nats_per_token"].to_numpy()[:, None] - nats
    if np.isnan(more[:, 0]).any():
        return None
    return rows.assign(more=more[:, 0], over_scale_1=more[:, 1])


def _quantile(differences: style.Series, q: float) -> float:
    """The quantile ``q`` of the mean difference over windows, by bootstrap."""
    count = len(differences)
    draws = np.random.default_rng(0).integers(count, size=(10_000, count))
    return float(np.quantile(differences.to_numpy()[draws].mean(axis=1), q))


def _summary(rows: style.DataFrame) -> style.DataFrame | None:
    """Perplexity of each cache, and mean differences with their intervals."""
    rows = _with_differences(rows)
    if rows is None:
        return None
    return rows.groupby("cache", sort=False, as_index=False).agg(
        predicted_tokens=("window_tokens", lambda tokens: int((tokens - 1).sum())),
        perplexity=("nats_per_token", lambda nats: np.exp(nats.mean())),
        more_nats_per_token=("more", "mean"),
        low=("more", lambda more: _quantile(more, 0.025)),
        high=("more", lambda more: _quantile(more, 0.975)),
        over_scale_1=("over_scale_1", "mean"),
        over_scale_1_low=("over_scale_1", lambda over: _quantile(over, 0.025)),
        over_scale_1_high=("over_scale_1", lambda over: _quantile(over, 0.975)),
    )


def _draw(rows: style.DataFrame) -> style.Figure | None:
    """Draw the mean differences from fp32 with their intervals, and a dot for each window."""
    summary, rows = _summary(rows), _with_differences(rows)
    if summary is None or rows is None:
        return None
    compared = rows[rows["cache"] != "fp32"]
    if compared.empty:
        return None
    figure, [axis], _ = style.panel_grid(1, height=1.9, width=4.5)
    table = summary.set_index("cache")
    for row, (name, of_cache) in enumerate(compared.groupby("cache", sort=False)):
        axis.plot(of_cache["more"], [row] * len(of_cache), **style.dots(style.GREY, "."))
        mean, low, high = table.loc[name, ["more_nats_per_token", "low", "high"]]
        error = [[mean - low], [high - mean]]
        axis.errorbar(mean, row, xerr=error, capsize=2, **style.dots(style.BLUE, "o"))
    axis.axvline(0, **style.BOUND)
    style.name_rows(axis, compared["cache"].unique())
    tokens = table["predicted_tokens"].iloc[0]
    figure.supxlabel(
        "nats per token more than with an fp32 cache"
        f"\n({rows['model'].iloc[0]}, {tokens:,} tokens; bars: 95 % intervals of means)"
    )
    return figure


EXPERIMENT = Experiment(
    name="fp8_quality",
    figure="perplexity of a real model with bf16 and fp8 KV caches",
    options=Fp8Quality(),
    quick=Fp8Quality(windows=2, calibration_windows=1, window_tokens=128),
    run_cell=run_cell,
    plot=style.plotter({"fp8_quality": _draw}, {"summary": (_summary, "%.5g")}),
    gpu="optional",
)
