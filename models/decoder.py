"""One decoder for all families: each layer has grouped-query attention, a gated MLP, and norms.

``models.config.Family`` and ``ModelConfig`` hold the differences between families.  Modules have
the names of Hugging Face checkpoints.  A decoder holds only weights; the KV cache and the batch's
metadata are arguments of ``forward``.
"""

from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from cache import Group
from models.attention import AttentionBackend, AttentionMetadata, Scores
from models.config import ModelConfig
from models.layers import (
    ColumnParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from models.parallel import TensorParallel


class Attention(nn.Module):
    """Self-attention with fused QKV, and with QK-norm if the architecture uses it."""

    def __init__(
        self, config: ModelConfig, window: int | None, backend: AttentionBackend, tp: TensorParallel
    ) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        q_heads = tp.share(config.num_q_heads, "num_q_heads")
        kv_heads = tp.share(config.num_kv_heads, "num_kv_heads", repeat=True)
        q_columns, kv_columns = (
            range(heads.start * head_dim, heads.stop * head_dim) for heads in (q_heads, kv_heads)
        )
        q_size, kv_size = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
        self.head_dim, self.backend = head_dim, backend
        self.qkv_proj = ColumnParallelLinear(
            hidden,
            [
                ("q_proj", q_size, q_columns),
                ("k_proj", kv_size, kv_columns),
                ("v_proj", kv_size, kv_columns),
            ],
            bias=config.attention_bias,
        )
        family = config.family
        output_bias = config.attention_bias and family.output_bias
        self.o_proj = RowParallelLinear(q_size, q_columns, hidden, bias=output_bias, tp=tp)
        offset = float(family.unit_offset_norms)
        norm = partial(RMSNorm, head_dim, config.rms_norm_eps, backend.ops, offset)
        self.q_norm = norm() if family.qk_norm else None
        self.k_norm = norm() if family.qk_norm else None
        scale, softcap = config.attention_scale or head_dim**-0.5, config.attention_softcap
        self.scores = Scores(scale=scale, window_size=window, softcap=softcap)
        # Scales of an fp8 cache; `models.weights.load_kv_scales` sets them if they are stored.
        self.k_scale: float | None = None
        self.v_scale: float | None = None

    def forward(
        self, x: Tensor, rotation: Rotation, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """x: (num_tokens, hidden_size).  kv_cache: (2, num_blocks, block_size, num_kv_heads,
        head_dim), the part of this layer."""
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)) for y in self.qkv_proj(x))
        caches = kv_cache[0], kv_cache[1]
        out = self.backend(query, key, value, rotation, *caches, metadata, self)
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """A gated MLP (SwiGLU or GeGLU) with fused gate and up projections."""

    def __init__(self, config: ModelConfig, ops: ModuleType, tp: TensorParallel) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        columns = tp.share(inner, "intermediate_size")
        self.gated_activation = partial(ops.gated_activation, activation=config.hidden_act)
        self.gate_up_proj = ColumnParallelLinear(
            hidden,
            [("gate_proj", inner, columns), ("up_proj", inner, columns)],
            bias=config.mlp_bias,
        )
        self.down_proj = RowParallelLinear(inner, columns, hidden, bias=config.mlp_bias, tp=tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated_activation(*self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, window: int | None, backend: AttentionBackend, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.self_attn = Attention(config, window, backend, tp)
        self.mlp = MLP(config, backend.ops, tp)
        self.input_layernorm = _norm(config, backend.ops)
        self.post_attention_layernorm = _norm(config, backend.ops)
        self.sandwich = config.family.sandwich_norms
        if self.sandwich:
            self.pre_feedforward_layernorm = _norm(config, backend.ops)
            self.post_feedforward_layernorm = _norm(config, backend.ops)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns x and residual for the next layer.

        x: output of the previous layer.  residual: residual stream; x is added to it in place.  In
            the first layer it is None: x itself is the stream.
        """
        normalised = self.input_layernorm(x, residual)
        residual = x if residual is None else residual
        x = self.self_attn(normalised, rotation, kv_cache, metadata)
        if self.sandwich:
            x = self.post_attention_layernorm(x)
            x = self.mlp(self.pre_feedforward_layernorm(x, residual))
            return self.post_feedforward_layernorm(x), residual
        return self.mlp(self.post_attention_layernorm(x, residual)), residual


def _norm(config: ModelConfig, ops: ModuleType) -> RMSNorm:
    offset = float(config.family.unit_offset_norms)
    return RMSNorm(config.hidden_size, config.rms_norm_eps, ops, offset)


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, tp: TensorParallel, max_positions: int
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        ropes = config.ropes if len(config.ropes) > 1 else config.ropes * config.num_layers
        distinct = list(dict.fromkeys(ropes))
        self.rotary_embs = nn.ModuleList(
            RotaryEmbedding(config.head_dim, rope, max_positions) for rope in distinct
        )
        self._rope_of_layer = [distinct.index(rope) for rope in ropes]
        self.layers = nn.ModuleList(
            DecoderLayer(config, window, backend, tp)
            for window in config.windows or [None] * config.num_layers
        )
        self.norm = _norm(config, backend.ops)
        self.group_of_layer = [(0, layer) for layer in range(config.num_layers)]
        self.embedding_scale = None
        if config.family.scaled_embeddings:  # rounded to the model's dtype like in training
            self.embedding_scale = torch.tensor(config.hidden_size**0.5, device="cpu").item()

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        x = self.embed_tokens(token_ids)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        residual, rotations = None, [rotary(positions) for rotary in self.rotary_embs]
        of_groups = metadata.groups or (metadata,)
        layers = zip(self.layers, self._rope_of_layer, self.group_of_layer, strict=True)
        for layer, rope, (group, index) in layers:
            x, residual = layer(x, residual, rotations[rope], kv_cache[:, index], of_groups[group])
        return self.norm(x, residual)


class CausalLM(nn.Module):
    """A language model of any architecture in ``models.config.FAMILIES``.

    A new model has uninitialised weights; ``models.weights.load_weights`` or ``randomize_weights``
    fills them.  ``build_model`` makes a model of a given dtype on a given device.
    """

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, tp: TensorParallel, max_positions: int
    ) -> None:
        super().__init__()
        self.config = config
        self.num_q_heads_per_rank = len(tp.share(config.num_q_heads, "num_q_heads"))
        self.num_kv_heads_per_rank = len(tp.share(config.num_kv_heads, "num_kv_heads", repeat=True))
        self.model = Decoder(config, backend, tp, max_positions)
        self.groups: tuple[Group, ...] = (Group(layers=config.num_layers),)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Hidden states of the new tokens of a batch, sequence by sequence.

        token_ids, positions: (num_tokens,) int64.
        kv_cache: (2, layers, num_blocks, block_size, num_kv_heads_per_rank, head_dim) in the
            model's dtype or fp8 e4m3.  The K/V of the new tokens are stored into it.  ``layers`` is
            the number of layers of the largest of ``groups``; by default all layers are one group.
        Returns (num_tokens, hidden_size).
        """
        return self.model(token_ids, positions, kv_cache, metadata)

    def use_groups(self, groups: tuple[Group, ...]) -> None:
        """Divide the layers into groups that share a KV cache of as many layers as the largest has.

        ``groups``: their ``layers`` are indices, each of a layer of this model, once.
        """
        self.groups = groups
        for number, group in enumerate(groups):
            layers = range(group.layers) if isinstance(group.layers, int) else group.layers
            for index, layer in enumerate(layers):
                self.model.group_of_layer[layer] = number, index

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, (num_rows, vocab_size), of hidden states, (num_rows, hidden_size)."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits, cap = head.logits(hidden), self.config.final_softcap
        return cap * torch.tanh(logits / cap) if cap else logits


def build_model(
    config: ModelConfig,
    backend: AttentionBackend,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int | None = None,
    tp: TensorParallel | None = None,
) -> CausalLM:
    """A model with uninitialised weights of ``dtype`` on ``device``.

    max_positions: rows of the RoPE table.  Default: ``config.max_positions``.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            max_positions = max_positions or config.max_positions
            return CausalLM(config, backend, tp or TensorParallel(), max_positions)
    finally:
        torch.set_default_dtype(previous)
