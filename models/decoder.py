"""The decoder that Llama and Qwen3 share: pre-norm layers of grouped-query attention and SwiGLU.

Modules carry the names they have in Hugging Face checkpoints.  The KV cache and the metadata of the
batch are arguments; a decoder holds no state besides its weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from models.attention import AttentionBackend, AttentionMetadata
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


def _head_columns(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


class Attention(nn.Module):
    """Self-attention with fused QKV; QK-norm where the architecture has it."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, tp: TensorParallel) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        q_heads = tp.share(config.num_q_heads, "num_q_heads")
        kv_heads = tp.share(config.num_kv_heads, "num_kv_heads", repeat=True)
        q_columns = _head_columns(q_heads, head_dim)
        kv_columns = _head_columns(kv_heads, head_dim)
        q_size, kv_size = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
        self.head_dim, self.backend = head_dim, backend
        self.num_heads = (len(q_heads), len(kv_heads), len(kv_heads))
        self.qkv_proj = ColumnParallelLinear(
            hidden,
            [
                ("q_proj", q_size, q_columns),
                ("k_proj", kv_size, kv_columns),
                ("v_proj", kv_size, kv_columns),
            ],
            bias=config.attention_bias,
        )
        self.o_proj = RowParallelLinear(
            q_size, q_columns, hidden, bias=config.attention_bias, tp=tp
        )
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        # Of an fp8 cache, where a checkpoint has them; see `models.weights.load_kv_scales`.
        self.k_scale: float | None = None
        self.v_scale: float | None = None

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """x: (num_tokens, hidden_size).  kv_cache: of this layer, (2, num_blocks, block_size,
        num_kv_heads, head_dim)."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        query, key, value = qkv.split(self.num_heads, dim=1)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        out = self.backend(
            query,
            key,
            value,
            rotation,
            *kv_cache,
            metadata,
            scale=self.head_dim**-0.5,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """SwiGLU with fused gate and up projections."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        columns = tp.share(inner, "intermediate_size")
        self.gate_up_proj = ColumnParallelLinear(
            hidden,
            [("gate_proj", inner, columns), ("up_proj", inner, columns)],
            bias=config.mlp_bias,
        )
        self.down_proj = RowParallelLinear(inner, columns, hidden, bias=config.mlp_bias, tp=tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, backend, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, tp)

    def forward(self, x, rotation, kv_cache, metadata):
        x = x + self.self_attn(self.input_layernorm(x), rotation, kv_cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        tp: TensorParallel,
        max_positions: int,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.rotary_emb = RotaryEmbedding(config, max_positions)
        self.layers = nn.ModuleList(
            DecoderLayer(config, backend, tp) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids, positions, kv_cache, metadata):
        x = self.embed_tokens(token_ids)
        rotation = self.rotary_emb(positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotation, kv_cache[:, i], metadata)
        return self.norm(x)


class CausalLM(nn.Module):
    """A language model of any architecture in ``models.config.FAMILIES``.

    Weights are uninitialised until ``models.weights.load_weights`` or ``randomize_weights`` fills
    them.  ``build_model`` makes one with the dtype and the device that are wanted.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        tp: TensorParallel,
        max_positions: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.num_kv_heads_per_rank = len(tp.share(config.num_kv_heads, "num_kv_heads", repeat=True))
        self.model = Decoder(config, backend, tp, max_positions)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states of a batch of sequences whose new tokens lie one after the other.

        token_ids, positions: (num_tokens,) int64.
        kv_cache: (2, num_layers, num_blocks, block_size, num_kv_heads_per_rank, head_dim) in the
            model's dtype or fp8 e4m3; receives the K/V of these tokens.
        Returns (num_tokens, hidden_size).
        """
        return self.model(token_ids, positions, kv_cache, metadata)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) to (num_rows, vocab_size)."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return head.logits(hidden)


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

    max_positions: positions that RoPE is tabulated for; those of the config by default.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return CausalLM(
                config,
                backend,
                tp or TensorParallel(),
                max_positions or config.max_position_embeddings,
            )
    finally:
        torch.set_default_dtype(previous)
