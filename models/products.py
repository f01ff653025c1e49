"""Products of inputs and weights, on a CPU cut into one slice of the weight per thread.

MKL divides products of few rows badly among threads. For one row and two threads it reads the
weights at a third of the memory's bandwidth; as two products side by side, at up to two thirds.
Products of up to 256 rows take a tenth less time, larger ones no less (MKL 2024.2, AMD EPYC;
`experiments/transformers_speed.py` measures the effect).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

FEW_ROWS, LARGE_WEIGHT = 256, 2**17
"""Most rows of an input, and fewest elements of a weight, for which a product is cut."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear, (rows, in) to (rows, out)."""
    threads = torch.get_num_threads()
    if not _pays_to_cut(x, weight) or len(weight) % threads:
        return F.linear(x, weight, bias)
    out = _cut_linear(x, weight, threads).transpose(0, 1).reshape(len(x), len(weight))
    return out if bias is None else out.add_(bias)


def linear_parts(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: list[int]
) -> tuple[torch.Tensor, ...]:
    """F.linear with its outputs split into parts of ``sizes``, (rows, size) each."""
    if x.device.type != "cpu" or len(x) == 1:
        return linear(x, weight, bias).split(sizes, dim=-1)
    # On a CPU one product of several rows is no faster, and rows with gaps slow what follows.
    one_each = len(sizes) == torch.get_num_threads() and len(set(sizes)) == 1
    if one_each and bias is None and _pays_to_cut(x, weight):
        return _cut_linear(x, weight, len(sizes)).unbind()
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    return tuple(map(linear, [x] * len(sizes), weight.split(sizes), biases))


def _pays_to_cut(x: torch.Tensor, weight: torch.Tensor) -> bool:
    few = len(x) <= FEW_ROWS and weight.numel() >= LARGE_WEIGHT and torch.get_num_threads() > 1
    return few and x.device.type == "cpu" and x.dtype == torch.float32


def _cut_linear(x: torch.Tensor, weight: torch.Tensor, slices: int) -> torch.Tensor:
    """(slices, rows, outputs of each)."""
    return torch.bmm(x.expand(slices, -1, -1), weight.view(slices, -1, weight.shape[1]).mT)
