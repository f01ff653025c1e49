"""GGUF files: a tiny one of each architecture, and damaged ones."""

import math
import re

import pytest
import torch

from models import LLM, SamplingParams
from models.config import ModelConfig
from models.gguf import GGUF, open_gguf
from models.prompts import load_chat_template, load_tokenizer
from models.weights import checkpoint_tensors
from tests.models.tiny import CHECKPOINTS, TINY, oracle_tokens, tokens_of

gguf = pytest.importorskip("gguf", reason="`make model` installs it")

TOKENS = ["<bos>", "<|im_end|>", "a", "b", "ab", "<|endoftext|>", "turn", "Ġ", "1", "2"]
TOKENS += [f"t{i}" for i in range(87)]
KEYS = {
    "llama.block_count": 1, "llama.feed_forward_length": 8, "llama.embedding_length": 64,
    "llama.context_length": 256, "llama.attention.head_count": 2, "llama.rope.scaling.type": "none",
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "split.no": 0, "split.count": 1,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] + [1] * 96, "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.eot_token_id": 6, "tokenizer.ggml.padding_token_id": 1,
    "tokenizer.ggml.add_eos_token": False, "tokenizer.chat_template": "",
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALING = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
CONFIGS = {
    "llama": ("LlamaConfig", {}, {"tokenizer.ggml.pre": "smollm"}),
    "qwen2": ("Qwen2Config", {"rope_parameters": YARN | {"rope_theta": 1e4}},
              {f"llama.rope.scaling.{key}": value for key, value in SCALING.items()}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True},
              {"llama.attention.key_length": 32}),
    "gemma3": ("Gemma3TextConfig",
               CHECKPOINTS["gemma3"][1] | {"head_dim": 32, "query_pre_attn_scalar": 32},
               {"llama.attention.key_length": 32, "llama.attention.value_length": 32,
                "llama.attention.sliding_window": 11, "llama.attention.sliding_window_pattern": 4,
                "llama.rope.freq_base_swa": 100.0, "llama.rope.freq_base": 1e4,
                "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
}  # fmt: skip
"""Classes and options of transformers, and the same options in GGUF."""


def write(path, architecture, metadata, tensors=()):
    """Write a file; metadata that are None are left out."""
    writer = gguf.GGUFWriter(path, architecture)
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    for key, value in metadata.items():
        if value is not None:
            (add | {bool: writer.add_bool}).get(type(value), writer.add_array)(key, value)
    for key, values, kind in tensors:
        writer.add_tensor(key, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def make_gguf(transformers, tmp_path):
    """make_gguf(architecture="llama", **fields) -> the path, and the model of transformers.

    ``fields`` replace or, if they are None, remove fields of the metadata.
    """

    @torch.no_grad()
    def make(architecture="llama", **fields):
        name, options, of_options = CONFIGS[architecture]
        config = getattr(transformers, name)(**TINY | options)
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        metadata = KEYS | of_options | {
            "llama.block_count": config.num_hidden_layers, "llama.feed_forward_length": 80,
            "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
            "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "tokenizer.chat_template": "{{ eos_token }}{{ messages[0].content }}",
        }  # fmt: skip
        metadata = {k.replace("llama.", f"{architecture}."): v for k, v in metadata.items()}
        metadata |= {key.replace("__", "."): value for key, value in fields.items()}
        path = tmp_path / f"{architecture}.gguf"
        tensors = []
        arch = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
        gguf_name = gguf.get_tensor_name_map(arch, config.num_hidden_layers).get_name
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1:
                tensor.add_(1 + torch.randn_like(tensor) * 0.2).sub_(1)  # exact with gemma3's +1
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            kind = gguf.GGMLQuantizationType.F32
            if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
                kind = gguf.GGMLQuantizationType.Q8_0
                rounded = gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind)
                tensor.copy_(torch.from_numpy(rounded))
            values = tensor.numpy()
            if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
                pairs = values.reshape(-1, 2, 8, *values.shape[1:])  # heads of 16, in halves
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            if architecture == "gemma3" and name.endswith("norm.weight"):
                values = values + 1
            if kind != gguf.GGMLQuantizationType.F32:
                values = gguf.quantize(values, kind)
            tensors.append((gguf_name(name, try_suffixes=(".weight", ".bias")), values, kind))
        write(path, metadata.pop("general.architecture", architecture), metadata, tensors)
        return path, model

    return make


@pytest.mark.parametrize("architecture", CONFIGS)
def test_tokens_equal_those_of_transformers(architecture, make_gguf):
    path, oracle = make_gguf(architecture)
    prompts = [list(range(5, 90)), [9] * 3]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm = LLM(path, num_blocks=64)
    for name, tensor in checkpoint_tensors(llm.model).items():
        assert torch.equal(tensor.target, oracle.state_dict()[name]), name
    tokens = tokens_of(llm.generate(prompts, params))
    assert tokens == [oracle_tokens(oracle, prompt, 8) for prompt in prompts]


def test_tokenizer_and_chat_template(make_gguf):
    path, _ = make_gguf()
    tokenizer = open_gguf(path).tokenizer()
    assert tokenizer.encode("ab12<|im_end|> ab").tokens == ["ab", "1", "2", "<|im_end|>", "Ġ", "ab"]
    assert tokenizer.decode([4, 1, 8]) == "ab1"
    chat = [{"role": "user", "content": "a"}]
    assert load_chat_template(path).render(chat) == "<|im_end|>a"
    path, _ = make_gguf(tokenizer__chat_template__tool_use="{{ tools | length }} tools")
    assert load_chat_template(path).render(chat) == "<|im_end|>a"
    assert load_chat_template(path).render(chat, tools=[{}]) == "1 tools"


def test_defaults_are_those_of_llama_cpp(tmp_path):
    for name, pre, bos, eos, ids in (
        ("qwen3", "llama-bpe", None, None, [0, 4, 1]), ("llama", "llama-bpe", False, None, [4, 1]),
        ("llama", "qwen2", None, None, [4, 1]), ("qwen2", "gpt-2", True, True, [0, 4, 1, 1]),
    ):  # fmt: skip
        keys = {"pre": pre, "add_bos_token": bos, "add_eos_token": eos}
        keys = KEYS | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        path = tmp_path / f"{name}{bos}.gguf"
        write(path, name, {key.replace("llama.", f"{name}."): keys[key] for key in keys})
        config = ModelConfig.from_folder(path)
        assert (config.head_dim, config.num_kv_heads, config.eos_token_ids) == (32, 2, {1, 5, 6})
        assert open_gguf(path).tokenizer().encode("ab<|im_end|>").ids == ids


def test_gemma3_is_that_of_llama_cpp(tmp_path):
    """A window in 5 of 6 layers; with 62 layers the attention scale of the 27B model."""
    heads = {"key_length": 16, "value_length": 16, "sliding_window": 8}
    keys = KEYS | {f"llama.attention.{key}": value for key, value in heads.items()}
    keys = {key.replace("llama.", "gemma3."): value for key, value in keys.items()}

    def read(**fields):
        path = tmp_path / f"{fields}.gguf"
        write(path, "gemma3", keys | {f"gemma3.{key}": value for key, value in fields.items()})
        return ModelConfig.from_folder(path)

    assert read(block_count=7).windows == (8, 8, 8, 8, 8, None, 8)
    assert read().attention_scale == 16**-0.5
    assert read(block_count=62).attention_scale == 32**-0.5
    for name, value in (
        ("attention.sliding_window", None), ("attention.sliding_window_pattern", [True, False]),
        ("rope.scaling.type", "yarn"), ("final_logit_softcapping", 30.0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"\.gguf: .*gemma3\.{name}"):
            read(**{name: value})


def test_sentencepiece_merges_by_score(tmp_path):
    pieces = {"\u2581": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "bc": -1.0}
    pieces |= {"\u2581ab": -3.0, "aa": -4.0, "  ": 0.0, "<end_of_turn>": 0.0}
    pieces = dict.fromkeys(["<bos>", *(f"<0x{byte:02X}>" for byte in range(256))], 0.0) | pieces
    keys = {"model": "llama", "add_space_prefix": False, "eot_token_id": None}
    keys |= {"tokens": list(pieces), "scores": list(pieces.values())}
    keys |= {"token_type": [3] + [6] * 256 + [1] * 8 + [4, 1]}
    path = tmp_path / "pieces.gguf"

    def read(**fields):
        named = {f"tokenizer.ggml.{key}": value for key, value in (keys | fields).items()}
        write(path, "llama", KEYS | named)
        return open_gguf(path).tokenizer()

    tokenizer = read()
    for text, tokens in (
        ("abc", "a bc"), (" ab  ab", "\u2581ab|  |ab"), ("aaaab", "aa a ab"),
        ("\u2581\u2581a", "\u2581 \u2581 a"), ("a<end_of_turn> b", "a <end_of_turn> \u2581 b"),
        ("é<0x41>", "<0xC3> <0xA9> <0x3C> <0x30> <0x78> <0x34> <0x31> <0x3E>"),
    ):  # fmt: skip
        encoded = tokenizer.encode(text)
        assert encoded.tokens == ["<bos>", *tokens.split("|" if "|" in tokens else " ")]
        assert tokenizer.decode(encoded.ids[1:], False) == text.replace("\u2581", " ")
    for name, value in (
        ("add_space_prefix", None), ("scores", None), ("scores", [math.nan]), ("scores", [0.5]),
        ("tokens", ["<bos>"]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"pieces\.gguf: .*tokenizer\.ggml\.({name}|tokens)"):
            read(**{name: value})


def test_values_of_other_types_are_refused_by_key(tmp_path):
    def kind(value):
        return {*map(type, value)} if isinstance(value, list) else type(value)

    for key in KEYS.keys() - {"tokenizer.chat_template"}:
        for odd in ("x", True, math.nan, 0, ["x"], [0], [1.5]):
            if kind(odd) == kind(KEYS[key]) or (odd == 0 and isinstance(KEYS[key], float)):
                continue
            path = tmp_path / f"{key}{odd}.gguf"
            write(path, "llama", KEYS | {key: odd})
            with pytest.raises(ValueError, match=rf"\.gguf: {re.escape(key)}=.*: needs "):
                ModelConfig.from_folder(path), load_tokenizer(path), load_chat_template(path)


def test_rope_is_that_of_llama_cpp(tmp_path):
    """Its attention factor of YaRN is attn_factor * (1 + 0.1 ln factor); a factor of 0 is none."""
    four, linear = {"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}
    keys = {"scaling.type": "yarn", "scaling.factor": 4.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
    yarn["attention_factor"] = 1 + 0.1 * math.log(4)
    for given, scaling in (
        ({}, {}), (four | {"scaling.type": "none"}, {}), ({"scaling.factor": 0.0}, {}),
        (four, linear), ({"scale_linear": 4.0}, linear), (four | {"scale_linear": 2.0}, linear),
        (keys, yarn), (keys | {"scaling.yarn_ext_factor": 1.0}, yarn),
        (keys | {"scaling.original_context_length": 0}, yarn),
        (keys | {"scaling.yarn_beta_fast": 48.0, "scaling.original_context_length": 64},
         yarn | {"beta_fast": 48.0, "original_max_position_embeddings": 64}),
        (keys | {"scaling.factor": 1.0, "scaling.attn_factor": 0.5},
         yarn | {"factor": 1.0, "attention_factor": 0.5}),
    ):  # fmt: skip
        ropes = {"llama.rope.scaling.type": None}
        ropes |= {f"llama.rope.{key}": value for key, value in given.items()}
        path = tmp_path / f"{given}.gguf"
        write(path, "llama", KEYS | ropes)
        assert open_gguf(path).config()["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general__architecture": "mamba"}, "general.architecture='mamba' .*choose from llama"),
        ({"tokenizer__ggml__pre": "tekken"}, "tokenizer.ggml.pre='tekken' is not supported"),
        ({"llama__expert_count": 8}, "mixtures of experts are not supported"),
        ({"llama__rope__scaling__type": "default"}, "scaling.type='default' .*choose from none"),
        ({"llama__rope__scaling__yarn_ext_factor": 1.0}, "yarn_ext_factor=1.0 .*choose from 0.0"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count=8 is not supported"),
        ({"llama__rope__scaling__attn_factor": 0.5}, "llama.rope.scaling.attn_factor=0.5 is not"),
        ({"llama__rope__scaling__alpha": 2.0}, "llama.rope.scaling.alpha=2.0 is not supported"),
        ({"llama__attention__sliding_window": 8}, "llama.attention.sliding_window=8 is not"),
        ({"llama__context_length": None}, "field 'llama.context_length' is missing"),
        ({"tokenizer__ggml__add_sep_token": True}, "tokenizer.ggml.add_sep_token=True is not"),
        ({"tokenizer__ggml__eot_token_id": 97}, "eot_token_id=97: there are 97 tokens"),
        ({"tokenizer__ggml__token_type": [3]}, "tokenizer.ggml.tokens: one is twice, or"),
        ({"tokenizer__ggml__merges": ["x y"]}, "Token .* out of vocabulary"),
        ({"split__count": 2}, "split.count=2: part 1 of 2"),
        ({"llama__embedding_length": 32}, "has shape .*, the model needs"),
    ],
)
def test_unsupported_files_are_refused_by_name(fields, message, make_gguf):
    path, _ = make_gguf(**fields)
    with pytest.raises(ValueError, match=f"llama.gguf: .*{message}"):
        LLM(path, num_blocks=64)


def test_truncated_files_are_refused(make_gguf):
    path, _ = make_gguf()
    whole = path.read_bytes()
    for keep in (3, 200, 6000, 40_000):
        assert keep < len(whole)
        path.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match=r"llama\.gguf: damaged, or not a GGUF file"):
            GGUF(path)


def test_unknown_quantisations_are_refused(make_gguf, monkeypatch):
    def dequantize(data, kind):
        raise NotImplementedError

    path, _ = make_gguf()
    monkeypatch.setattr(gguf, "dequantize", dequantize)
    with pytest.raises(ValueError, match=r"llama.gguf: quantisation Q8_0 is not supported"):
        GGUF(path)
