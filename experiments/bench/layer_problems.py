"""What stands between the products of a decoder layer at real sizes: norms and gates of tokens.

The hidden size is that of the query heads together, the MLP three times as wide, as in Qwen3 8B.
Results are compared with fp64 for some tokens.
"""

from __future__ import annotations

import torch

from experiments.bench.problem import OURS, Problem, Shape, dtypes, generator_of, some_of
from kernels import add_rms_norm, gated_activation, reference
from kernels.testing.accuracy import Accuracy, accuracy


def _halves(shape: Shape, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two halves of the rows of ``batch`` tokens, (batch, width) each, random."""
    rows = torch.empty(shape.batch, 2 * width, dtype=dtypes(shape)[0], device=device)
    return rows.normal_(generator=generator_of(shape, device)).chunk(2, dim=1)


def norm_problem(shape: Shape, device: torch.device) -> Problem:
    """``batch`` rows added to the residual stream in place, and its RMSNorm."""
    hidden_size = shape.num_q_heads * shape.head_dim
    x, start = _halves(shape, hidden_size, device)
    residual, weight = start.clone(), x[0].contiguous()
    some = some_of(shape.batch)

    def check(out: torch.Tensor) -> Accuracy:
        low = start[some]
        normalised = reference.add_rms_norm(x[some], low, weight)
        exact = start[some].double()
        expected = reference.add_rms_norm(x[some].double(), exact, weight.double())
        added = accuracy(residual[some], low, exact)
        return accuracy(out[some], normalised, expected) if added.passed else added

    return Problem(
        num_bytes=4 * x.numel() * x.itemsize + weight.nbytes,
        flops=0,
        implementations={
            OURS: lambda: add_rms_norm(x, residual, weight),
            "torch": lambda: reference.add_rms_norm(x, residual, weight),
        },
        check=check,
        reset=lambda: residual.copy_(start),
    )


def gate_problem(shape: Shape, device: torch.device) -> Problem:
    """SwiGLU of ``batch`` rows of a fused projection."""
    parts = _halves(shape, 3 * shape.num_q_heads * shape.head_dim, device)
    some = some_of(shape.batch)

    def check(out: torch.Tensor) -> Accuracy:
        low, exact = (
            reference.gated_activation(*(part[some].to(dtype) for part in parts), "silu")
            for dtype in (parts[0].dtype, torch.float64)
        )
        return accuracy(out[some], low, exact)

    return Problem(
        num_bytes=3 * parts[0].numel() * parts[0].itemsize,
        flops=0,
        implementations={
            OURS: lambda: gated_activation(*parts, "silu"),
            "torch": lambda: reference.gated_activation(*parts, "silu"),
        },
        check=check,
    )
