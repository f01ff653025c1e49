"""Products of inputs and weights.

On a CPU PyTorch computes products in fp32 by MKL and products in bf16 by oneDNN.  On AMD EPYC
(Turin, one thread) oneDNN takes 0.45 to 0.8 of MKL's time in fp32 as well, for 1 to 1,024 rows
(PyTorch 2.13, oneDNN 3.12, MKL 2024.2); `experiments/transformers_speed.py` measures the effect.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear, (rows, in) to (rows, out); by oneDNN for fp32 on a CPU, where PyTorch has it."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
