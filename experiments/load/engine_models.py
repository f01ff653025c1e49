"""The model shapes that experiments on the engine run, with random weights.

How long a step takes depends on the shape and not on the values of the weights, so nothing needs to
be downloaded.  What depends on the text (when an output ends, which tokens follow) is fixed by the
experiments instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import cache
from experiments.harness import Count, Options, Unavailable, one_of

if TYPE_CHECKING:
    import numpy as np

    from models import LLM, ModelConfig

_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {  # 119 thousand parameters
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_layers": 2,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": True,
    },
    "llama-100m": {  # 100 million
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2_048,
        "num_layers": 12,
        "num_q_heads": 12,
        "num_kv_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {  # as published: 596 million
        "architecture": "Qwen3ForCausalLM",
        "vocab_size": 151_936,
        "hidden_size": 1_024,
        "intermediate_size": 3_072,
        "num_layers": 28,
        "num_q_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "llama-8b": {  # Llama 3.1 as published: 8.03 billion
        "vocab_size": 128_256,
        "hidden_size": 4_096,
        "intermediate_size": 14_336,
        "num_layers": 32,
        "num_q_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
    },
}

MODEL_NAMES: tuple[str, ...] = tuple(_SHAPES)
"""Names that ``model_config`` knows, by rising size."""


def default_model() -> str:
    """The model that experiments run on this machine: qwen3-0.6b on a GPU, llama-100m on a CPU."""
    import torch

    return "qwen3-0.6b" if torch.cuda.is_available() else "llama-100m"


def model_config(name: str) -> ModelConfig:
    """The shape ``name``.  On a GPU its weights are bf16.  Raises ValueError for another name."""
    import torch

    from models import ModelConfig

    if name not in _SHAPES:
        raise ValueError(f"model={name!r} is unknown; choose from {', '.join(_SHAPES)}")
    return ModelConfig(dtype=torch.bfloat16, **_SHAPES[name])


def make_llm(name: str, *, threads: int | None = None, **options: Any) -> LLM:
    """An engine on the model ``name`` with random weights; ``options`` go to ``models.LLM``.

    threads: that PyTorch computes with on the CPU, in this process from now on; None: as it is.

    Raises Unavailable where a package is not installed that the attention backend needs.
    """
    import torch

    from models import LLM

    if threads is not None:
        torch.set_num_threads(threads)
    try:
        return LLM(model_config(name), **options)
    except ImportError as error:
        raise Unavailable(str(error)) from error


Model = Annotated[str, one_of(MODEL_NAMES)]
Manager = Annotated[str, one_of(cache.MANAGERS)]


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """Options of cells that measure something ``repeats`` times on an engine of their own, with
    blocks of ``block_size``."""

    model: Model | None = None
    """A shape of load/engine_models.py. None: qwen3-0.6b on a GPU, llama-100m on a CPU."""
    attention_backend: Literal["triton", "torch", "flash_attn"] | None = None
    """None: triton on a GPU, torch on a CPU."""
    repeats: Count = 3
    """Measurements of each point."""
    threads: Count | None = None
    """Threads of PyTorch on a CPU. None: a thread a core."""

    @property
    def group(self) -> tuple[str, ...]:
        return (self.model,)

    def make_llm(self, **options: Any) -> LLM:
        """The engine; ``options`` go to ``models.LLM``."""
        return make_llm(
            self.model,
            attention_backend=self.attention_backend,
            block_size=self.block_size,
            seed=self.seed,
            threads=self.threads,
            **options,
        )

    def describe(self, llm: LLM) -> dict[str, Any]:
        """Columns of every row that was measured on ``llm``."""
        return {"model": self.model, **describe(llm), "repeats": self.repeats}


def random_tokens(llm: LLM, generator: np.random.Generator, count: int) -> list[int]:
    """``count`` token ids, drawn uniformly from the vocabulary of ``llm``."""
    return generator.integers(llm.config.vocab_size, size=count).tolist()


def describe(llm: LLM) -> dict[str, Any]:
    """Columns that say what an engine of ``make_llm`` computes with."""
    import torch

    return {
        "dtype": str(llm.dtype).removeprefix("torch."),
        "attention_backend": llm.model.model.layers[0].self_attn.backend.name,
        "device": llm.device.type,
        "threads": torch.get_num_threads(),
        "manager": llm.manager.name,
        "block_size": llm.manager.block_size,
    }
