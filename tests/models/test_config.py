import dataclasses
import json
import math

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from models import LLM
from models.config import (
    FAMILIES,
    ModelConfig,
    Rope,
    RopeScaling,
    UnsupportedModel,
    eos_of_tokenizer,
)
from tests.models.tiny import tiny_config

SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_31 = {  # as published, before transformers 5
    "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": SCALING,
    "vocab_size": 128256, "tie_word_embeddings": False, "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
PHI3, GEMMA3 = ({"architectures": [f"{name}ForCausalLM"]} for name in ("Phi3", "Gemma3"))
QWEN3 = LLAMA_31 | {"architectures": ["Qwen3ForCausalLM"]}


def test_llama_31_is_read():
    config = ModelConfig.from_dict(LLAMA_31)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert config.ropes == (Rope(500000.0, RopeScaling(**SCALING)),)
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == {128001, 128008, 128009}


def test_windows_are_read():
    """From layer_types, else by the architecture's rule; a null turns windows off."""
    qwen = QWEN3 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 31}
    assert ModelConfig.from_dict(qwen).windows == (None,) * 31 + (8,)
    assert ModelConfig.from_dict(qwen | {"use_sliding_window": False}).windows == ()
    types = ["sliding_attention", "full_attention"] * 16
    assert ModelConfig.from_dict(qwen | {"layer_types": types}).windows == (8, None) * 16
    without = {"use_sliding_window": False, "layer_types": types}
    assert ModelConfig.from_dict(qwen | without).windows == ()
    mistral = LLAMA_31 | {"architectures": ["MistralForCausalLM"]}
    assert ModelConfig.from_dict(mistral).windows == (4096,) * 32
    assert ModelConfig.from_dict(mistral | {"sliding_window": None}).windows == ()
    gemma = ModelConfig.from_dict(LLAMA_31 | {"architectures": ["Gemma2ForCausalLM"]})
    assert gemma.windows == (4096, None) * 16
    assert (gemma.attention_softcap, gemma.final_softcap) == (50.0, 30.0)


def test_layers_without_rope_are_read():
    smollm = LLAMA_31 | {"architectures": ["SmolLM3ForCausalLM"], "rope_scaling": None}
    assert ModelConfig.from_dict(smollm).ropes == (*[Rope(5e5)] * 3, None) * 8
    listed = ModelConfig.from_dict(smollm | {"no_rope_layers": [1, 0] * 16})
    assert listed.ropes == (Rope(5e5), None) * 16


def test_a_config_without_options_is_what_a_checkpoint_without_them_has():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_hidden_layers": 1}
    llama = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}
    config = ModelConfig(**sizes, num_layers=1, num_q_heads=4, num_kv_heads=4, head_dim=8)
    assert config == ModelConfig.from_dict(llama | sizes | heads)


def test_tokens_that_end_a_text(tmp_path):
    """generation_config.json overrides config.json; token 0 counts."""
    assert ModelConfig.from_dict(LLAMA_31 | {"eos_token_id": 0}).eos_token_ids == {0}
    assert ModelConfig.from_dict(LLAMA_31 | {"eos_token_id": [7, 0]}).eos_token_ids == {0, 7}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31 | {"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == {5, 7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ValueError, match=r"generation_config.json: field 'eos_token_id'"):
        ModelConfig.from_folder(tmp_path)


def test_the_end_of_the_tokenizer_is_one_too(tmp_path):
    """A text or an object; special_tokens_map.json counts in old checkpoints."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "</s>": 1, "<|im_end|>": 2}))
    path = tmp_path / "tokenizer_config.json"
    for token, ids in (("</s>", {1}), ({"content": "<|im_end|>"}, {2}), (None, {}), ("b", {})):
        path.write_text(json.dumps({"eos_token": token}))
        assert eos_of_tokenizer(tmp_path, tokenizer) == set(ids)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    assert eos_of_tokenizer(tmp_path, tokenizer) == {2}
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": 1}')
    new = {"eos_token": 1, "added_tokens_decoder": {}}
    for file, fields in (("special_tokens_map", {}), ("tokenizer_config", new)):
        path.write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=rf"{file}\.json: eos_token=1: needs a text"):
            eos_of_tokenizer(tmp_path, tokenizer)


def test_linear_scaling_lengthens_the_context():
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert ModelConfig.from_dict(LLAMA_31 | scaled).max_positions == 4 * 131072
    assert ModelConfig.from_dict(LLAMA_31 | scaled | GEMMA3).max_positions == 131072
    config = tiny_config(ropes=(Rope(10000.0, RopeScaling(rope_type="linear", factor=4.0)),))
    assert LLM(config, num_blocks=64).max_model_len == 512


def test_a_scaling_does_not_read_the_fields_of_others():
    """0 is the default where it is in transformers."""
    others = {"low_freq_factor": "9", "beta_slow": -1, "attention_factor": 0, "truncate": "no"}
    for scaling, ignored in (
        ({"rope_type": "linear", "factor": 4.0}, others | {"original_max_position_embeddings": 0}),
        (SCALING, {"beta_fast": 0.5, "mscale": -1}),
        (
            {"rope_type": "yarn", "factor": 4.0},
            {"mscale": 0, "mscale_all_dim": 0, "beta_fast": 0, "low_freq_factor": 9},
        ),
    ):
        given, plain = (ModelConfig.from_dict(LLAMA_31 | {"rope_scaling": fields})
                        for fields in (scaling | ignored, scaling))  # fmt: skip
        assert given.ropes == plain.ropes != (Rope(500000.0),)


def test_missing_fields_and_other_types_are_refused_by_name():
    sizes = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}
    numbers = {"num_attention_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta"}
    for name in sizes | numbers | {"tie_word_embeddings", "attention_bias", "mlp_bias"}:
        for odd in ("8", ["x"], {"x": 1}, -1, math.nan, 1e-320) + (None,) * (name in sizes):
            with pytest.raises(ValueError, match=rf"{name}(=|' is missing)"):
                ModelConfig.from_dict(LLAMA_31 | {name: odd})


UNSUPPORTED = [
    ({"num_hidden_layers": 10**15}, "num_hidden_layers=1000.*: at most"),
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is unknown; choose from Llama"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"use_sliding_window": True, "sliding_window": 8}, "sliding_window: this architecture"),
    ({"layer_types": ["chunked_attention"] * 32}, "layer_types: .* not chunked_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type='longrope'"),
    ({"rope_scaling": {"sliding_attention": {}}}, "rope_parameters: sliding_attention: all"),
    (PHI3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn': choose"),
    (GEMMA3 | {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: needs an object"),
    (GEMMA3 | {"rope_scaling": {"type": "linear"}}, "rope_scaling: needs a rope_type"),
    ({"torch_dtype": "int8"}, "dtype='int8'"),
    ({"is_causal": False}, "is_causal: these decoders are causal"),
    ({"layer_types": ["sliding_attention"] * 32}, "layer_types: this architecture does not"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: this architecture has none"),
]
MALFORMED = [
    ({"architectures": None}, "field 'architectures'"),
    ({"architectures": [["LlamaForCausalLM"]]}, r"field 'architectures': .*got \[\['Llama"),
    ({"layer_types": ["full_attention"]}, "layer_types: needs a list of 32 names"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window=0"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0: needs a positive number"),
    ({"attn_logit_softcapping": -1.0}, "attention_softcap=-1.0: needs a positive number"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}},
        "beta_slow=2, beta_fast=1: needs 0 < low < high",
    ),
    ({"num_key_value_heads": 5}, "multiple of num_kv_heads=5"),
    ({"head_dim": 65}, "head_dim=65"),
    ({"head_dim": 10**30}, "head_dim=1000.*: needs a positive number"),
    ({"hidden_size": 4100}, "hidden_size=4100 does not divide"),
    ({"eos_token_id": "</s>"}, "field 'eos_token_id'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor' is missing"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor=0.5"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor='2': needs a positive"),
    (GEMMA3 | {"rope_parameters": {"full_attention": 4}}, "full_attention': expected a JSON"),
    ({"rope_scaling": {"type": "linear", "factor": True}}, "factor=True: needs a positive"),
    ({"eos_token_id": True}, "field 'eos_token_id'"),
    ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers: needs"),
    ({"rope_scaling": "linear"}, "field 'rope_scaling': expected a JSON object, got 'linear'"),
]


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED + MALFORMED)
def test_what_is_unsupported_or_malformed_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_dict(LLAMA_31 | change)
    assert isinstance(caught.value, UnsupportedModel) == ((change, message) in UNSUPPORTED)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (None, FileNotFoundError, "config.json: no such file"),
        (b"\x80\x81", ValueError, "config.json: not valid JSON: .* can't decode byte 0x80"),
        (b"{", ValueError, "config.json: not valid JSON"),
        (b"[]", ValueError, "config.json: expected a JSON object, got list"),
        (b'{"architectures": ["GPT2"]}', UnsupportedModel, "config.json: architecture GPT2"),
        (b'{"architectures": ["LlamaForCausalLM"]}', ValueError, "config.json: field .* missing"),
    ],
)
def test_errors_name_the_file(tmp_path, text, error, message):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    if text is not None:
        (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(error, match=message):
        ModelConfig.from_folder(tmp_path)


def test_kv_block_bytes():
    published = tiny_config(num_layers=4, num_q_heads=8, num_kv_heads=8, head_dim=128)
    assert published.kv_block_bytes(4, torch.float16) == 65536
    assert published.kv_block_bytes(4, torch.float16, tensor_parallel_size=2) == 32768
    one_head = dataclasses.replace(published, num_kv_heads=1)
    assert one_head.kv_block_bytes(4, torch.float16, tensor_parallel_size=2) == 8192


def test_every_family_can_be_made_from_sizes_alone():
    for architecture in FAMILIES:
        tiny_config(architecture=architecture)
