"""The accuracy rule of tests, experiments and GPU checks.

The rule is flash-attn's own: with `ref` computed in fp64 and `low` the same eager computation in
the kernel's dtype,

    max|out - ref| <= 2 * max|low - ref| + 1e-5

so the tolerance follows from the data instead of being tuned. With an fp8 cache `ref` and `low`
read the same quantised numbers, times their scales, in fp64 and in the queries' dtype. This judges
the attention; quantisation has to be exact.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Accuracy:
    """Outcome of the rule. A NaN, or an infinity in one result only, makes an infinite error."""

    error: float
    """max|out - ref|"""
    eager_error: float
    """max|low - ref|"""

    @property
    def bound(self) -> float:
        return 2 * self.eager_error + 1e-5

    @property
    def passed(self) -> bool:
        return self.error <= self.bound and math.isfinite(self.bound)


def max_error(actual: torch.Tensor, ref: torch.Tensor) -> float:
    """max|actual - ref| in fp64; equal infinities differ by 0, NaN and unequal ones by inf."""
    if actual.shape != ref.shape:
        raise ValueError(f"actual: expected shape {tuple(ref.shape)}, got {tuple(actual.shape)}")
    if not ref.numel():
        return 0.0
    actual, ref = actual.double(), ref.double()
    error = torch.where(actual == ref, 0.0, (actual - ref).abs())
    return error.nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def accuracy(out: torch.Tensor, low: torch.Tensor, ref: torch.Tensor) -> Accuracy:
    """Judge `out` by the rule; see the head of this file."""
    return Accuracy(error=max_error(out, ref), eager_error=max_error(low, ref))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a floating-point tensor, so that NaNs compare equal to themselves."""
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    )
