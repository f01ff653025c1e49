"""GGUF checkpoints: configuration, weights, tokenizer and chat template in one file.

GGUF is llama.cpp's format.  Weights are dequantised when they are loaded, so a GGUF saves disk
space, not memory.  Supported are llama, qwen2 and qwen3 with byte-level BPE tokenizers, and the
quantisations that the ``gguf`` package can dequantise.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

if TYPE_CHECKING:
    from models.layers import CheckpointTensor

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"
}  # fmt: skip
_CONFIG = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
"""Fields of config.json and the GGUF keys behind the architecture's name."""

_WORDS = (  # numbers of at most {digits} digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> list[pre.PreTokenizer]:
    words = Regex(_WORDS.format(digits=digits))
    return [pre.Split(words, "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)]


_PRE_TOKENIZERS = {
    "gpt-2": [pre.ByteLevel(add_prefix_space=False)],
    "smollm": [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)],
    "llama-bpe": _split("{1,3}"),
    "qwen2": _split(""),
}
"""How text is cut before BPE, by the value of tokenizer.ggml.pre."""

_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that are found in a text before it is cut."""


def is_gguf(path: Path) -> bool:
    """Whether the checkpoint at ``path`` is a GGUF file, by its name."""
    return path.suffix == ".gguf"


def open_gguf(path: Path) -> GGUF:
    """The checkpoint at ``path``; the metadata of the last file are read once.

    Raises FileNotFoundError, ImportError without the ``gguf`` package, and ValueError, naming the
    file, if it is damaged or needs something that is not supported.
    """
    return _open(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _open(path: Path, _modified: int) -> GGUF:
    return GGUF(path)


class GGUF:
    """One GGUF file, read through a memory map."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise ImportError(
                f"{path}: reading GGUF needs the package gguf: pip install -r "
                "requirements-model.txt"
            ) from None
        self._path, self._gguf = path, gguf
        try:
            reader = gguf.GGUFReader(path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
            raise ValueError(f"{path}: damaged, or not a GGUF file: {error}") from None
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._arch = self._need("general.architecture")
        if self._arch not in _ARCHITECTURES:
            self._refuse("general.architecture", self._arch, _ARCHITECTURES)
        if self._fields.get(f"{self._arch}.expert_count"):
            raise ValueError(f"{path}: mixtures of experts are not supported")
        if "rope_freqs.weight" in self._tensors:
            raise ValueError(f"{path}: RoPE scaling by a tensor (rope_freqs) is not supported")
        for tensor in {t.tensor_type: t for t in reader.tensors}.values():
            try:
                gguf.dequantize(tensor.data[:1], tensor.tensor_type)
            except NotImplementedError:
                kind = tensor.tensor_type.name
                raise ValueError(f"{path}: quantisation {kind} is not supported") from None

    def config(self) -> dict[str, Any]:
        """The fields of a config.json."""
        get = {name: self._fields.get(f"{self._arch}.{key}") for name, key in _CONFIG.items()}
        get = {name: value for name, value in get.items() if value is not None}
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"):
            if not isinstance(get.get(name), int):
                key = f"{self._arch}.{_CONFIG[name]}"
                raise ValueError(f"{self._path}: {key}={get.get(name)!r}: needs one number")
        get["architectures"] = [_ARCHITECTURES[self._arch]]
        get["vocab_size"] = len(self._need("tokenizer.ggml.tokens"))
        get["tie_word_embeddings"] = "output.weight" not in self._tensors
        get["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        get["eos_token_id"] = self._need("tokenizer.ggml.eos_token_id")
        get["dtype"] = "bfloat16"
        scaling = f"{self._arch}.rope.scaling."
        if self._fields.get(scaling + "type", "none") != "none":
            get["rope_scaling"] = {
                "rope_type": self._fields[scaling + "type"],
                "factor": self._fields.get(scaling + "factor"),
                "original_max_position_embeddings": self._fields.get(
                    scaling + "original_context_length"
                ),
            }
        rotated = self._fields.get(f"{self._arch}.rope.dimension_count")
        head_dim = get.get("head_dim") or get["hidden_size"] // get["num_attention_heads"]
        if rotated is not None and rotated != head_dim:
            get["partial_rotary_factor"] = rotated / head_dim
        return get

    def tensors(
        self, expected: Mapping[str, CheckpointTensor]
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Name, as in safetensors, and this rank's part of every tensor, dequantised to fp32.

        (name, None) for a tensor that the model does not have.
        """
        num_layers = self._need(f"{self._arch}.block_count")
        arch = {name: arch for arch, name in self._gguf.MODEL_ARCH_NAMES.items()}[self._arch]
        gguf_name = self._gguf.get_tensor_name_map(arch, num_layers).get_name
        names = {gguf_name(name, try_suffixes=(".weight", ".bias")): name for name in expected}
        for name, tensor in self._tensors.items():
            wanted = expected.get(names.get(name))
            if wanted is None:
                yield name, None
                continue
            values = self._gguf.dequantize(tensor.data, tensor.tensor_type)
            if values.shape != wanted.shape:
                raise ValueError(
                    f"{self._path}: tensor {name} has shape {values.shape}, the model needs "
                    f"{wanted.shape}"
                )
            if self._arch == "llama" and ".attn_q." in name:
                values = _halves(values, self._need("llama.attention.head_count"))
            elif self._arch == "llama" and ".attn_k." in name:
                values = _halves(values, self._need("llama.attention.head_count_kv"))
            yield names[name], torch.from_numpy(np.require(values, requirements="W"))[wanted.index]

    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE tokenizer, with the pre-tokenizer that the file names."""
        kind = self._need("tokenizer.ggml.model")
        if kind != "gpt2":
            self._refuse("tokenizer.ggml.model", kind, ["gpt2"])
        cut = self._fields.get("tokenizer.ggml.pre", "gpt-2")
        if cut not in _PRE_TOKENIZERS:
            self._refuse("tokenizer.ggml.pre", cut, _PRE_TOKENIZERS)
        tokens = self._need("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self._need("tokenizer.ggml.merges")]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        bpe = models.BPE(vocabulary, merges, ignore_merges=cut == "llama-bpe")
        tokenizer = Tokenizer(bpe)
        if cut == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre.Sequence(_PRE_TOKENIZERS[cut])
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self._fields.get("tokenizer.ggml.token_type", [])
        tokenizer.add_tokens(
            [
                AddedToken(token, special=kind == _CONTROL, normalized=False)
                for token, kind in zip(tokens, kinds, strict=False)
                if kind in (_CONTROL, _USER_DEFINED)
            ]
        )
        if self._fields.get("tokenizer.ggml.add_bos_token"):
            bos = self._need("tokenizer.ggml.bos_token_id")
            tokenizer.post_processor = TemplateProcessing(
                single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
            )
        return tokenizer

    def chat_templates(self) -> tuple[dict[str, str], dict[str, str]]:
        """The Jinja sources by name, "default" for the one without, and their special tokens."""
        tokens, special = self._need("tokenizer.ggml.tokens"), {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
            index = self._fields.get(f"tokenizer.ggml.{key}_token_id")
            if index is not None:
                special[f"{name}_token"] = tokens[index]
        prefix, named = "tokenizer.chat_template", {}
        for key, value in self._fields.items():
            if key == prefix or key.startswith(prefix + "."):
                named[key[len(prefix) + 1 :] or "default"] = value
        return named, special

    def _need(self, key: str) -> Any:
        if key not in self._fields:
            raise ValueError(f"{self._path}: field {key!r} is missing")
        return self._fields[key]

    def _refuse(self, key: str, value: object, choices: object) -> None:
        raise ValueError(
            f"{self._path}: {key}={value!r} is not supported; choose from {', '.join(choices)}"
        )


def _halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of Q or K with RoPE's pairs half a head apart; llama.cpp has them side by side."""
    heads = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)
