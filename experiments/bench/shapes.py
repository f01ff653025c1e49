"""Shapes of the ops that GPU experiments time, and cells with these shapes.

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
"""Name of our kernels among the implementations."""
COPY_ENGINE = "copy_engine"
"""Name of swaps that call the driver's copy once for each group of adjacent blocks."""


class WrongResult(Exception):
    """A result whose error exceeds the bound.  Its time is not reported."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of an op's inputs."""

    op: str
    """A key of ``timed_ops.OPS``."""
    batch: int
    """Number of sequences; of tokens for store, norm and gate; of blocks for copy and swap."""
    context_len: int = 0
    """Tokens of each sequence, its queries included."""
    query_len: int = 1
    """Queries of each sequence."""
    prefix_len: int = 0
    """For cascade: number of leading tokens that all sequences share, in whole blocks."""
    block_size: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_layers: int = 1
    """Number of layers whose blocks copy and swap move."""
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    """Dtype of the cache.  None: ``dtype``."""
    num_splits: int | None = None
    """Number of splits of a sequence in decode and prefill.  None: the op chooses."""
    seed: int = 0

    def columns(self) -> dict[str, Any]:
        """Columns of a table."""
        names = "op batch context_len query_len prefix_len block_size num_q_heads num_kv_heads "
        names += "head_dim num_layers dtype num_splits"
        columns = {name: getattr(self, name) for name in names.split()}
        return {**columns, "kv_dtype": self.kv_dtype or self.dtype}


@dataclass(frozen=True, kw_only=True)
class Timed(Options):
    """A cell that checks and times one implementation at one shape."""

    shape: Shape
    implementation: str
    budget_ms: float

    @property
    def setup_key(self) -> tuple[str, ...]:
        return (self.shape.op,)


def accuracy_columns(accuracy: Accuracy) -> dict[str, float]:
    """Columns of a table."""
    return {name: getattr(accuracy, name) for name in ("error", "eager_error", "bound")}


def use_device() -> torch.device:
    """The GPU, or a CPU with Triton's interpreter.  Call it before ``kernels`` is imported."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")
