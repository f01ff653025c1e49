"""Layers of a decoder, each with the checkpoint tensors that fill its parameters.

Layers have the names of Hugging Face checkpoints.  A layer that fuses several checkpoint tensors
into one matrix lists its parts.  For each tensor of a layer, ``checkpoint_tensors``
gives the part that this rank holds and its place.  Loading and random initialisation use this.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from kernels.testing.hugging_face import import_transformers
from models.config import Rope
from models.parallel import TensorParallel


@dataclass(frozen=True)
class CheckpointTensor:
    """Destination of one tensor of a checkpoint.

    target: view of this rank's parameter that receives ``tensor[index]``.
    shape: shape of the whole tensor in the checkpoint.
    index: this rank's slices of the tensor.
    init: random weights: "normal", "ones" (norms) or "zeros" (biases, norms stored minus 1).
    """

    target: torch.Tensor
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    init: str


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight) over the last dimension (Zhang and Sennrich, 2019).

    ops: ``kernels`` or ``kernels.reference``.
    """

    def __init__(self, size: int, eps: float, ops: ModuleType, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = _parameter(size)
        self._add_rms_norm = ops.add_rms_norm

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of x.  If ``residual`` is given, add x to it and return its norm."""
        return self._add_rms_norm(x, residual, self.weight, eps=self.eps, offset=self.offset)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointTensor]]:
        shape, init = tuple(self.weight.shape), "zeros" if self.offset else "ones"
        yield f"{name}.weight", CheckpointTensor(self.weight, shape, (slice(None),), init)


def _linear_tensors(
    name: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    shape: tuple[int, int],
    index: tuple[slice, slice],
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Destinations of a linear layer's weight and bias.  index: part of the matrix (out, in)."""
    yield f"{name}.weight", CheckpointTensor(weight, shape, index, "normal")
    if bias is not None:
        yield f"{name}.bias", CheckpointTensor(bias, shape[:1], index[:1], "zeros")


class ColumnParallelLinear(nn.Module):
    """Linear layers of the same input, fused into one and split among the ranks by output.

    parts: for each fused layer its name in the checkpoint, its number of outputs, and the range of
        outputs that this rank holds.  ``forward`` returns a tensor (..., length of the range) for
        each layer."""

    def __init__(
        self, in_features: int, parts: list[tuple[str, int, range]], *, bias: bool
    ) -> None:
        super().__init__()
        self.parts = parts
        self.local_sizes = [len(part) for _, _, part in parts]
        self.weight = _parameter(sum(self.local_sizes), in_features)
        self.bias = _parameter(sum(self.local_sizes)) if bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.linear(x, self.weight, self.bias).split(self.local_sizes, dim=-1)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointTensor]]:
        prefix, in_features = name.rpartition(".")[0], self.weight.shape[1]
        weights = self.weight.split(self.local_sizes)
        biases = [None] * len(weights) if self.bias is None else self.bias.split(self.local_sizes)
        for (part, size, rows), weight, bias in zip(self.parts, weights, biases, strict=True):
            shape, index = (size, in_features), (slice(rows.start, rows.stop), slice(None))
            yield from _linear_tensors(f"{prefix}.{part}", weight, bias, shape, index)


class RowParallelLinear(nn.Module):
    """A linear layer split among the ranks by input; the output is summed over the ranks."""

    def __init__(
        self, in_features: int, in_part: range, out_features: int, *, bias: bool, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.in_features, self.in_part, self.tp = in_features, in_part, tp
        self.weight = _parameter(out_features, len(in_part))
        self.bias = _parameter(out_features) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        x = self.tp.all_reduce(F.linear(x, self.weight))
        return x if self.bias is None else x + self.bias

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointTensor]]:
        columns = slice(self.in_part.start, self.in_part.stop)
        shape, index = (len(self.weight), self.in_features), (slice(None), columns)
        yield from _linear_tensors(name, self.weight, self.bias, shape, index)


class VocabParallelEmbedding(nn.Module):
    """Token embedding or output projection, split among the ranks by vocabulary.

    Ranks hold the same number of rows.  Rows past the end of the vocabulary are padding.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.vocab_size, self.tp = vocab_size, tp
        rows_per_rank = -(-vocab_size // tp.size)
        self.first = tp.rank * rows_per_rank
        self.num_used = max(0, min(rows_per_rank, vocab_size - self.first))
        self.weight = _parameter(rows_per_rank, hidden_size)
        if self.num_used < rows_per_rank:
            self.weight[self.num_used :].zero_()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings, (num_tokens, hidden_size), of token ids, (num_tokens,)."""
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.first
        elsewhere = (local < 0) | (local >= self.num_used)
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.tp.all_reduce(x.masked_fill(elsewhere[:, None], 0.0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, (num_tokens, vocab_size), of (num_tokens, hidden_size), on every rank."""
        return self.tp.all_gather_last(F.linear(hidden, self.weight))[:, : self.vocab_size]

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointTensor]]:
        shape, last = (self.vocab_size, self.weight.shape[1]), self.first + self.num_used
        index = (slice(min(self.first, last), last), slice(None))
        yield from _linear_tensors(name, self.weight[: self.num_used], None, shape, index)


def rope_frequencies(head_dim: int, rope: Rope | None) -> tuple[torch.Tensor, float]:
    """Returns the angle per position of each rotated pair, (head_dim / 2,) fp32 (zeros without
    RoPE), and the factor by which cosines and sines are multiplied."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if rope is None:
        return torch.zeros_like(exponents), 1.0
    if rope.scaling is None:
        return 1.0 / rope.theta**exponents, 1.0
    import_transformers()
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(  # the fields of a config that ROPE_INIT_FUNCTIONS read
        rope_parameters=vars(rope.scaling) | {"rope_theta": rope.theta},
        standardize_rope_params=lambda: None,
        head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1,
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[rope.scaling.rope_type](config)


@dataclass(frozen=True)
class Rotation:
    """RoPE of the tokens of a batch.  All layers with the same Rope share it."""

    positions: torch.Tensor
    """(num_tokens,) int64: row of each token in ``cos`` and ``sin``."""
    cos: torch.Tensor
    """(num_positions, head_dim / 2) fp32."""
    sin: torch.Tensor

    @cached_property
    def of_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of each token, (num_tokens, 1, head_dim / 2) fp32 each."""
        return self.cos[self.positions].unsqueeze(1), self.sin[self.positions].unsqueeze(1)


_MAX_POSITIONS = 2**24  # fp32 represents every integer up to this number


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al., 2021), pairing dimension i with i + head_dim / 2.

    rope: None rotates by an angle of 0, which changes nothing.

    Raises ValueError for more positions than fp32 can represent exactly.
    """

    def __init__(self, head_dim: int, rope: Rope | None, max_positions: int) -> None:
        super().__init__()
        if max_positions > _MAX_POSITIONS:
            raise ValueError(
                f"max_position_embeddings={max_positions}: RoPE is tabulated for at most "
                f"{_MAX_POSITIONS} positions; give a max_model_len"
            )
        frequencies, factor = rope_frequencies(head_dim, rope)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        table = torch.stack((angles.cos(), angles.sin())) * factor
        self.table: torch.Tensor
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """The rotation of a batch whose tokens have these positions, (num_tokens,)."""
        return Rotation(positions, *self.table)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x, (num_tokens, num_heads, head_dim), by the tokens' angles, in fp32 or wider."""
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
