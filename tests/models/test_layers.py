from __future__ import annotations

import pytest
import torch

from kernels.testing.accuracy import accuracy
from models.config import ModelConfig, Rope
from models.layers import RotaryEmbedding, apply_rope, rope_frequencies
from tests.models.tiny import TINY, Fp64

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
BETAS = {"beta_fast": 9.0, "beta_slow": 2.0}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 512},
    "yarn": YARN,
    "yarn_untruncated": YARN | BETAS | {"attention_factor": 1.5, "truncate": False},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_equal_those_of_transformers(name, transformers):
    """Errors are relative: frequencies span four decades."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        rope_parameters=SCALINGS[name] | {"rope_theta": 10000.0},
    )
    frequencies = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]]
    low, attention_factor = frequencies(theirs, torch.device("cpu"))
    with Fp64():
        ref, _ = frequencies(theirs, torch.device("cpu"))
    fields = {"architectures": ["LlamaForCausalLM"], "rope_scaling": SCALINGS[name]}
    [ours] = set(ModelConfig.from_dict(TINY | fields).ropes)
    assert ours.scaling.attention_factor == attention_factor
    out = rope_frequencies(64, ours)
    judged = accuracy(out / ref, low / ref, torch.ones_like(ref))
    assert judged.passed, judged


def test_rope_rotates_in_fp32_and_keeps_the_dtype():
    rope = RotaryEmbedding(64, Rope(), 300)
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)).half()
    cos, sin = rope(torch.tensor([0, 5, 100, 200, 299])).of_tokens
    rotated = apply_rope(x, cos, sin)
    assert rotated.dtype == torch.float16
    assert torch.equal(rotated, apply_rope(x.float(), cos, sin).half())
