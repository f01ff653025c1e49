"""Shapes of the ops that GPU experiments time, and their cells; ``timed_ops.py`` runs the cells.

This file imports neither torch nor kernels, so that experiments are listed at once and
TRITON_INTERPRET can be set before kernels are imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.harness import Options

if TYPE_CHECKING:
    import torch

    from kernels.testing.accuracy import Accuracy

OURS = "pagelab"
"""Our kernels' name among the implementations."""
COPY_ENGINE = "copy_engine"
"""Swaps by one copy of the driver for each part of adjacent blocks, however small."""


class WrongResult(Exception):
    """A result beyond the bound; its time is not reported."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of an op's inputs."""

    op: str
    """A key of ``timed_ops.OPS``."""
    batch: int
    """Sequences; for store, norm and gate, tokens; for copy and swap, blocks."""
    context_len: int = 0
    """Tokens of each sequence, its queries included."""
    query_len: int = 1
    """Queries of each sequence."""
    prefix_len: int = 0
    """Leading tokens that all sequences share, for cascade: whole blocks."""
    block_size: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_layers: int = 1
    """Layers that copy and swap move the blocks of."""
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    """Dtype of the cache; ``dtype`` if None."""
    num_splits: int | None = None
    """Splits of a sequence in decode and prefill; the op's choice if None."""
    seed: int = 0

    def columns(self) -> dict[str, Any]:
        """Columns of a table."""
        names = "op batch context_len query_len prefix_len block_size num_q_heads num_kv_heads "
        names += "head_dim num_layers dtype num_splits"
        columns = {name: getattr(self, name) for name in names.split()}
        return {**columns, "kv_dtype": self.kv_dtype or self.dtype}


@dataclass(frozen=True, kw_only=True)
class Timed(Options):
    """A cell: an implementation at a shape, checked and timed."""

    shape: Shape
    implementation: str
    budget_ms: float

    @property
    def group(self) -> tuple[str, ...]:
        return (self.shape.op,)


def accuracy_columns(accuracy: Accuracy) -> dict[str, float]:
    """Columns of a table."""
    return {name: getattr(accuracy, name) for name in ("error", "eager_error", "bound")}


def use_device() -> torch.device:
    """The GPU, or a CPU with kernels in Triton's interpreter; before ``kernels`` is imported."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")
