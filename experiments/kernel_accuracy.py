"""Error of every kernel against fp64, beside the error that PyTorch makes in the same dtype.

The rule is flash-attn's: the kernel may be at most twice as far from fp64 as the same computation
done eagerly in the kernel's dtype (plus 1e-5), see ``kernels/accuracy.py``.  Block tables are
shuffled, and slots that must not matter hold NaN and infinity.  Without a GPU the kernels run in
Triton's interpreter, which checks the algorithm but not the GPU's arithmetic.

To add a kernel: a function that returns the accuracy of its results, and a line in ``KERNELS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from experiments import style
from experiments.harness import Cell, Experiment, Options

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure

    from kernels.accuracy import Accuracy

Feature = Literal["none", "window", "softcap", "alibi", "sinks", "split"]

_CONTEXT_LENS = (1, 37, 290)
_NUM_KV_HEADS = 2
_GROUP_SIZE = 3

_DTYPES = {
    "float16": {"color": style.BLUE, "marker": "o"},
    "bfloat16": {"color": style.RED, "marker": "s"},
    "float32": {"color": style.GREEN, "marker": "^"},
}


@dataclass(frozen=True, kw_only=True)
class KernelAccuracyOptions(Options):
    """The grid: kernels x features x head dims x dtypes x block sizes."""

    kernel: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A kernel by name. None: every one."""
    block_size: tuple[int, ...] = (1, 2, 3, 7, 16, 24, 32, 64, 100, 128, 256, 512, 1024)
    """Token slots per block."""
    dtype: tuple[Literal["float16", "bfloat16", "float32"], ...] = (
        "float16",
        "bfloat16",
        "float32",
    )
    head_dim: tuple[int, ...] = (16, 64, 80, 96, 112, 128, 256)
    feature: tuple[Feature, ...] = ("none", "window", "softcap", "alibi", "sinks", "split")
    """Options of the attention kernels, one at a time."""


@dataclass(frozen=True, kw_only=True)
class KernelAccuracyCell(Cell):
    kernel: str
    block_size: int
    dtype: str
    head_dim: int
    feature: str

    @property
    def group(self) -> tuple[str, ...]:
        return self.kernel, self.dtype


def cells(options: KernelAccuracyOptions) -> Iterator[KernelAccuracyCell]:
    for name in options.kernel:
        if name not in KERNELS:
            raise ValueError(f"kernel {name!r} is unknown; choose from {', '.join(KERNELS)}")
    for name in ("block_size", "head_dim"):
        if min(getattr(options, name), default=1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    for kernel in options.kernel or KERNELS:
        for feature in options.feature:
            if feature not in KERNELS[kernel].features:
                continue
            for head_dim in options.head_dim:
                for dtype in options.dtype:
                    for block_size in options.block_size:
                        yield KernelAccuracyCell(
                            seed=options.seed,
                            kernel=kernel,
                            block_size=block_size,
                            dtype=dtype,
                            head_dim=head_dim,
                            feature=feature,
                        )


def run_cell(cell: KernelAccuracyCell) -> list[dict[str, Any]]:
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
            "block_size": cell.block_size,
            "interpreted": device == "cpu",
            "error": accuracy.error,
            "eager_error": accuracy.eager_error,
            "bound": accuracy.bound,
            "passed": accuracy.passed,
        }
        for result, accuracy in KERNELS[cell.kernel].check(cell, torch.device(device)).items()
    ]


def _store_kvcache(cell: KernelAccuracyCell, device: torch.device) -> dict[str, Accuracy]:
    import torch

    from kernels import reference, store_kvcache
    from kernels.accuracy import compare_with_twin

    generator = torch.Generator().manual_seed(cell.seed)
    num_tokens = sum(_CONTEXT_LENS)
    num_blocks = -(-num_tokens // cell.block_size) + 3
    qkv_heads = (_GROUP_SIZE + 2) * _NUM_KV_HEADS
    qkv = torch.randn(num_tokens, qkv_heads, cell.head_dim, generator=generator)
    qkv = qkv.to(device, getattr(torch, cell.dtype))
    key, value = qkv[:, -2 * _NUM_KV_HEADS :].split(_NUM_KV_HEADS, dim=1)
    slots = torch.randperm(num_blocks * cell.block_size, generator=generator)[:num_tokens]
    slots[::5] = -1  # padding, to be skipped
    shape = (num_blocks, cell.block_size, _NUM_KV_HEADS, cell.head_dim)

    def stored_by(op: Callable) -> Callable:
        def stored(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            caches = [torch.zeros(shape, dtype=key.dtype, device=device) for _ in range(2)]
            op(key, value, *caches, slots)
            return torch.stack(caches)

        return stored

    (caches,) = compare_with_twin(
        stored_by(store_kvcache),
        stored_by(reference.store_kvcache),
        (key, value, slots.to(device)),
    )
    return {"K and V cache": caches}


def _paged_decode_attention(cell: KernelAccuracyCell, device: torch.device) -> dict[str, Accuracy]:
    import torch

    from kernels import paged_decode_attention, reference
    from kernels.accuracy import compare_with_twin, random_paged_batch

    dtype = getattr(torch, cell.dtype)
    num_q_heads = _GROUP_SIZE * _NUM_KV_HEADS
    window = 33 if cell.feature == "window" else None
    batch = random_paged_batch(
        _CONTEXT_LENS,
        num_q_heads=num_q_heads,
        num_kv_heads=_NUM_KV_HEADS,
        head_dim=cell.head_dim,
        block_size=cell.block_size,
        dtype=dtype,
        device=device,
        seed=cell.seed,
        hidden_tokens=[max(0, length - window) for length in _CONTEXT_LENS] if window else None,
    )
    out, lse = compare_with_twin(
        paged_decode_attention,
        reference.paged_decode_attention,
        batch.decode_args,
        return_lse=True,
        **_feature_options(cell.feature, num_q_heads, window, device),
    )
    return {"output": out, "LSE": lse}


def _feature_options(
    feature: str, num_q_heads: int, window: int | None, device: torch.device
) -> dict[str, Any]:
    import torch

    heads = torch.arange(1, num_q_heads + 1, device=device)
    match feature:
        case "window":
            return {"window_size": window}
        case "softcap":
            return {"softcap": 5.0}
        case "alibi":
            return {"alibi_slopes": 2.0 ** (-8 * heads / num_q_heads)}
        case "sinks":
            return {"sinks": heads / num_q_heads}
        case "split":
            return {"num_splits": 3}
    return {}


@dataclass(frozen=True)
class Kernel:
    """How a kernel is checked."""

    check: Callable[[KernelAccuracyCell, torch.device], dict[str, Accuracy]]
    """From a cell to the accuracy of each result of the kernel."""
    features: tuple[str, ...] = ("none",)
    """Those of ``KernelAccuracyOptions.feature`` that it has."""


KERNELS = {
    "store_kvcache": Kernel(_store_kvcache),
    "paged_decode_attention": Kernel(
        _paged_decode_attention, ("none", "window", "softcap", "alibi", "sinks", "split")
    ),
}


def plot(rows: pd.DataFrame, folder: Path) -> list[Path]:
    """The figure accuracy: a column per result of a kernel, error above and error/bound below."""
    with style.figures():
        return style.save(_draw(rows), folder, "accuracy")


def _draw(rows: pd.DataFrame) -> Figure:
    import matplotlib.pyplot as plt

    panels = list(rows.groupby(["kernel", "result"], sort=False))
    block_sizes = sorted(rows["block_size"].unique())
    place = {size: index for index, size in enumerate(block_sizes)}
    figure, axes = plt.subplots(
        2,
        len(panels),
        squeeze=False,
        sharex=True,
        figsize=(max(3.5, 2.35 * len(panels)), 4.0),
        height_ratios=(1.2, 1),
    )
    for (absolute, relative), ((kernel, result), of_panel) in zip(axes.T, panels, strict=True):
        for dtype, cells in of_panel.groupby("dtype", sort=False):
            look = _DTYPES[dtype]
            worst = cells.groupby("block_size")[["error", "eager_error"]].max()
            x = [place[size] for size in worst.index]
            absolute.plot(x, worst["error"], label=f"{dtype}: kernel", **look)
            absolute.plot(
                x,
                worst["eager_error"],
                label=f"{dtype}: eager PyTorch",
                **{**look, "linestyle": "dashed", "markerfacecolor": "white", "linewidth": 0.8},
            )
            ratio = cells["error"] / cells["bound"]
            relative.plot(
                cells["block_size"].map(place), ratio, ".", color=look["color"], ms=2, alpha=0.35
            )
            ratio = ratio.groupby(cells["block_size"]).max()
            relative.plot([place[size] for size in ratio.index], ratio, **look)
        relative.axhline(1, color="black", linestyle="dashed", linewidth=1, label="bound")
        if of_panel["error"].any():
            absolute.set_yscale("log")
        else:
            absolute.set(ylim=(-0.1, 1), yticks=[0])
            absolute.text(
                0.5, 0.5, "no error in any cell", transform=absolute.transAxes, ha="center"
            )
        failures = int((~of_panel["passed"]).sum())
        verdict = f"{failures} above the bound" if failures else "all within the bound"
        absolute.set_title(f"{kernel}\n{result}")
        relative.set_title(f"{len(of_panel)} cells, {verdict}", fontsize=7)
        relative.set_ylim(0, None)
        relative.set_xticks(range(len(block_sizes)), map(str, block_sizes), rotation=45)
    axes[0, 0].set_ylabel("max |error| against fp64")
    axes[1, 0].set_ylabel("kernel error / bound")
    where = " (kernels run in Triton's interpreter)" if rows["interpreted"].all() else ""
    figure.supxlabel(f"block size (tokens){where}", fontsize=8)
    style.shared_legend(figure, columns=len(rows["dtype"].unique()) + 1)
    return figure


EXPERIMENT = Experiment(
    name="kernel_accuracy",
    figure="error of every kernel against fp64 over block sizes, dtypes, head dims and features",
    options=KernelAccuracyOptions(),
    quick=KernelAccuracyOptions(block_size=(1, 2, 3, 7, 16, 24, 100, 256), head_dim=(80,)),
    cells=cells,
    run_cell=run_cell,
    plot=plot,
    gpu="optional",
)
