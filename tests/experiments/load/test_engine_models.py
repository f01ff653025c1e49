"""The models of the experiments on the engine."""

from __future__ import annotations

import pytest
import torch

from experiments import preemption, shared_prefix
from experiments.harness import Unavailable
from experiments.load.engine_models import (
    MODEL_NAMES,
    default_model,
    make_llm,
    model_config,
    with_sizes,
)
from models import SamplingParams
from models.attention import make_backend
from models.decoder import build_model


@pytest.mark.parametrize(
    ("name", "millions"),
    [("tiny", 0.119), ("llama-100m", 100), ("qwen3-0.6b", 596), ("llama-8b", 8030)],
)
def test_a_model_has_the_parameters_that_its_name_promises(name, millions):
    model = build_model(
        model_config(name),
        make_backend("torch", torch.device("cpu")),
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        max_positions=1,
    )
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)


def test_the_tiny_model_generates_and_the_default_one_is_known():
    llm = make_llm("tiny", num_blocks=8, block_size=4, seed=3)
    [output] = llm.generate([1, 2, 3], SamplingParams(max_tokens=5, temperature=0))
    assert len(output.outputs[0].token_ids) == 5
    assert default_model() in MODEL_NAMES


@pytest.mark.parametrize(
    ("model", "longest"), [("tiny", 2048), ("llama-100m", 2048), ("qwen3-0.6b", 32768)]
)
def test_sizes_that_are_left_open_suit_the_model(model, longest):
    cells = [
        *shared_prefix.cells(shared_prefix.SharedPrefix(model=model)),
        *preemption.cells(preemption.Preemption(model=model)),
    ]
    assert {cell.model for cell in cells} == {model}
    assert longest in {getattr(cell, "prompt_tokens", None) for cell in cells}
    sized = with_sizes(
        shared_prefix.SharedPrefix(model=model, requests=5),
        small={"prompt_tokens": (2048,), "requests": 8},
        large={"prompt_tokens": (32768,), "requests": 32},
    )
    assert (sized.prompt_tokens, sized.requests) == ((longest,), 5)


def test_without_flash_attn_its_cells_are_absent(monkeypatch):
    def make_backend(name, device):
        raise ImportError(f"attention_backend={name!r} needs the package flash-attn")

    monkeypatch.setattr("models.llm.make_backend", make_backend)
    with pytest.raises(Unavailable, match="'flash_attn' needs the package flash-attn"):
        make_llm("tiny", attention_backend="flash_attn")
