"""The models of the experiments on the engine."""

import pytest
import torch

from experiments.harness import Unavailable
from experiments.load.engine_models import make_llm, model_config
from models.attention import make_backend
from models.decoder import build_model


@pytest.mark.parametrize(("name", "millions"), [("tiny", 0.119), ("llama-100m", 100)])
def test_a_model_has_the_parameters_that_its_name_promises(name, millions):
    model = build_model(
        model_config(name),
        make_backend("torch", torch.device("cpu")),
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        max_positions=1,
    )
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)


def test_without_flash_attn_its_cells_are_absent(monkeypatch):
    def make_backend(name, device):
        raise ImportError(f"attention_backend={name!r} needs the package flash-attn")

    monkeypatch.setattr("models.llm.make_backend", make_backend)
    with pytest.raises(Unavailable, match="'flash_attn' needs the package flash-attn"):
        make_llm("tiny", attention_backend="flash_attn")
