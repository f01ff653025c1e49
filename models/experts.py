"""Mixture of experts: each token's MLP is the weighted sum of those that a router chooses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from models.config import ModelConfig
from models.layers import CheckpointTensor, linear_tensors, parameter
from models.parallel import TensorParallel
from models.products import linear


class MixtureOfExperts(nn.Module):
    """The MLP of gpt-oss (OpenAI, 2025), split among the ranks by the inner dimension.

    A token has the ``num_experts_per_tok`` experts with the largest logits of the router; their
    softmax is the weights.  An expert computes (up + 1) * gate * sigmoid(swiglu_alpha * gate), with
    up within and gate below ``swiglu_limit``; columns of gate and up alternate in the checkpoint.
    The host reads which experts are chosen.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.experts, self.tp = config.experts, tp
        self.sizes = count, hidden, inner = (
            config.experts.num_local_experts, config.hidden_size, config.intermediate_size
        )  # fmt: skip
        self.columns = tp.share(inner, "intermediate_size")
        width = len(self.columns)
        self.router, self.router_bias = parameter(count, hidden), parameter(count)
        self.gate_up_proj = parameter(count, hidden, 2 * width)
        self.gate_up_proj_bias = parameter(count, 2 * width)
        self.down_proj = parameter(count, width, hidden)
        self.down_proj_bias = parameter(count, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) to the same shape."""
        experts, out = self.experts, torch.zeros_like(x)
        logits, chosen = linear(x, self.router, self.router_bias).topk(experts.num_experts_per_tok)
        weights = logits.softmax(dim=-1)
        for expert in chosen.unique().tolist():
            rows, places = torch.where(chosen == expert)
            gate_up = x[rows] @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert]
            gate = gate_up[:, ::2].clamp(max=experts.swiglu_limit)
            up = gate_up[:, 1::2].clamp(-experts.swiglu_limit, experts.swiglu_limit)
            inner = (up + 1) * gate * torch.sigmoid(experts.swiglu_alpha * gate)
            part = inner @ self.down_proj[expert]
            if self.tp.rank == 0:  # the parts of the ranks are summed
                part += self.down_proj_bias[expert]
            out.index_add_(0, rows, part * weights[rows, places, None])
        return self.tp.all_reduce(out)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointTensor]]:
        every, (count, hidden, inner) = slice(None), self.sizes
        yield from linear_tensors(
            f"{name}.router", self.router, self.router_bias, (count, hidden), (every, every)
        )
        own = slice(self.columns.start, self.columns.stop)
        pairs = slice(2 * own.start, 2 * own.stop)
        for part, shape, index, init in (
            ("gate_up_proj", (count, hidden, 2 * inner), (every, every, pairs), "normal"),
            ("gate_up_proj_bias", (count, 2 * inner), (every, pairs), "zeros"),
            ("down_proj", (count, inner, hidden), (every, own, every), "normal"),
            ("down_proj_bias", (count, hidden), (every, every), "zeros"),
        ):
            target = getattr(self, part)
            yield f"{name}.experts.{part}", CheckpointTensor(target, shape, index, init)
