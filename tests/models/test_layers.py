import copy
import importlib
import random

import pytest
import torch

from models.config import FAMILIES, ModelConfig, Rope
from models.layers import RotaryEmbedding, VocabParallelEmbedding, apply_rope
from models.parallel import TensorParallel
from tests.models.tiny import TINY

SCALINGS = {
    "rope_type": ["default", "linear", "llama3", "yarn"], "type": ["linear", "yarn"],
    "factor": [1, 2.5, 4.0], "original_max_position_embeddings": [64, 1024],
    "low_freq_factor": [1, 2.0], "high_freq_factor": [4.0, 8],
    "beta_fast": [9.0, 48, None, 0], "beta_slow": [1, 2.0, None], "truncate": [True, False],
    "attention_factor": [0.5, 1.5, None], "mscale": [0.7, 1, None, 0], "mscale_all_dim": [0.4, 1.0],
    "rope_theta": [100.0, 5e5], "partial_rotary_factor": [1.0],
}  # fmt: skip
ODD = {
    "rope_type": ["dynamic", "longrope", "su", None], "factor": ["4", True, None, 0.5],
    "original_max_position_embeddings": [None, "64"], "truncate": [None, 0], "rope_theta": [None],
    "partial_rotary_factor": [0.5, None],
}  # fmt: skip
OUTSIDE = {
    "rope_theta": [1e3, 1000000], "original_max_position_embeddings": [128, 2048],
    "partial_rotary_factor": [1, 0.5], "rope_local_base_freq": [300.0],
}  # fmt: skip
PLACES = "rope_scaling", "rope_parameters"
KINDS = "full_attention", "sliding_attention"


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "SmolLM3", "Phi3", "Gemma2", "Gemma3"])
def test_cosines_and_sines_are_those_of_transformers(name, transformers):
    """Or the configuration is refused.  It has random fields in random places."""
    module = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    new_config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    draw, read, positions = random.Random(0), set(), torch.tensor([0, 1, 37, 299])
    refused = {"type", "truncate"} if name == "Gemma3" else set()
    common = {key: SCALINGS[key] for key in SCALINGS.keys() - refused}

    def some(choices, share):
        return {key: draw.choice(choices[key]) for key in sorted(choices) if draw.random() < share}

    def scaling():
        return some(common, draw.choice([0.1, 0.9])) | some(ODD, draw.choice([0, 0, 0.1]))

    for _ in range(200):
        fields = TINY | {"head_dim": 64, "num_hidden_layers": 7}
        fields |= some(OUTSIDE, draw.choice([0, 0.3]))
        for place in draw.choice([(), PLACES[:1], PLACES[1:], PLACES]):
            nested = draw.random() < (0.7 if name == "Gemma3" else 0.1)
            fields[place] = {kind: scaling() for kind in KINDS} if nested else scaling()
        try:
            config = ModelConfig.from_dict(fields | {"architectures": [f"{name}ForCausalLM"]})
        except ValueError:
            continue
        try:
            theirs = new_config(**copy.deepcopy(fields))
        except Exception:  # refused there
            continue
        rotary = getattr(module, f"{name}RotaryEmbedding")(theirs)
        kinds = getattr(theirs, "layer_types", [""] * 7)
        ropes = config.ropes if len(config.ropes) > 1 else config.ropes * 7
        for rope, kind in set(zip(ropes, kinds, strict=True)) - {(None, "full_attention")}:
            expected = rotary(torch.zeros(1), positions[None], *[kind] * (name == "Gemma3"))
            ours = torch.stack(RotaryEmbedding(64, rope, 300)(positions).of_tokens)
            assert torch.equal(ours[:, :, 0], torch.stack(expected)[:, 0, :, :32]), fields
            read.add(rope.scaling.rope_type if rope.scaling else "default")
    assert read == set(FAMILIES[f"{name}ForCausalLM"].rope_types)


def test_rope_rotates_in_fp32_and_keeps_the_dtype():
    rope = RotaryEmbedding(64, Rope(), 300)
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)).half()
    cos, sin = rope(torch.tensor([0, 5, 100, 200, 299])).of_tokens
    rotated = apply_rope(x, cos, sin)
    assert rotated.dtype == torch.float16
    assert torch.equal(rotated, apply_rope(x.float(), cos, sin).half())


def test_a_rank_may_have_only_padding_of_the_vocabulary():
    ranks = [VocabParallelEmbedding(5, 2, TensorParallel(rank, 4)) for rank in range(4)]
    assert [rank.num_used for rank in ranks] == [2, 2, 1, 0]
