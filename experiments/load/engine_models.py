"""The model shapes that experiments on the engine run, with random weights.

The time of a step depends on the shape and not on the values of the weights, so nothing needs to be
downloaded.  Experiments fix the lengths of outputs, which would depend on the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

import cache
from cache.serving import open_loop
from experiments.harness import Count, Options, Unavailable, one_of

if TYPE_CHECKING:
    from models import LLM, ModelConfig

_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)
_SHAPES = {
    "tiny": (512, 64, 160, 2, 4, 2, 16, 16_384),  # 119 thousand parameters
    "llama-100m": (32_000, 768, 2_048, 12, 12, 4, 64, 16_384),  # 100 million
    "qwen3-0.6b": (151_936, 1_024, 3_072, 28, 16, 8, 128, 40_960),  # as published: 596 million
    "llama-8b": (128_256, 4_096, 14_336, 32, 32, 8, 128, 131_072),  # Llama 3.1: 8.03 billion
}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_MORE: dict[str, dict[str, Any]] = {
    "tiny": _TIED,
    "llama-100m": _TIED,
    "qwen3-0.6b": {"architecture": "Qwen3ForCausalLM", "rope_theta": 1_000_000.0, **_TIED},
    "llama-8b": {"rope_theta": 500_000.0},
}

MODEL_NAMES: tuple[str, ...] = tuple(_SHAPES)
"""Names of the shapes, by rising size."""


def default_model() -> str:
    """The model that experiments run on this machine: qwen3-0.6b on a GPU, llama-100m on a CPU."""
    import torch

    return "qwen3-0.6b" if torch.cuda.is_available() else "llama-100m"


def model_config(name: str) -> ModelConfig:
    """The shape ``name``.  On a GPU its weights are bf16."""
    import torch

    from models import ModelConfig

    shape = dict(zip(_FIELDS, _SHAPES[name], strict=True))
    return ModelConfig(dtype=torch.bfloat16, **shape, **_MORE[name])


def make_llm(name: str, *, threads: int | None = None, **options: Any) -> LLM:
    """An engine on the model ``name`` with random weights; ``options`` go to ``models.LLM``.

    threads: CPU threads of PyTorch, in this process from now on; None: unchanged.

    Raises Unavailable if a package of the attention backend is not installed.
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
    """Options of cells that repeat a measurement on an engine with blocks of ``block_size``."""

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
        chosen = self.columns("attention_backend", "block_size", "seed", "threads")
        return make_llm(self.model, **chosen, **options)

    def describe(self, llm: LLM) -> dict[str, Any]:
        """Columns of every row that was measured on ``llm``."""
        import torch

        return {
            "model": self.model,
            "dtype": str(llm.dtype).removeprefix("torch."),
            "attention_backend": llm.model.model.layers[0].self_attn.backend.name,
            "device": llm.device.type,
            "threads": torch.get_num_threads(),
            "manager": llm.manager.name,
            "block_size": llm.manager.block_size,
            "repeats": self.repeats,
        }


def serve_trace(
    llm: LLM, trace: cache.Trace, arrivals: Sequence[float] | None, **options: Any
) -> open_loop.Run:
    """Serve the requests of ``trace`` at ``arrivals``; ``options`` go to ``open_loop.serve``."""
    size = llm.config.vocab_size
    prompts = [cache.prompt_token_ids(trace, index, size) for index in range(len(trace))]
    return open_loop.serve(llm.engine, prompts, trace.output_lengths.tolist(), arrivals, **options)


def random_tokens(llm: LLM, generator: np.random.Generator, count: int) -> list[int]:
    """``count`` random token ids, uniform over the vocabulary of ``llm``."""
    return generator.integers(llm.config.vocab_size, size=count).tolist()
