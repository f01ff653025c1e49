"""GGUF checkpoints: configuration, weights, tokenizer and chat template in one file.

GGUF is llama.cpp's format.  Weights are dequantised when they are loaded, so a GGUF saves disk
space, not memory.  The architectures llama, qwen2, qwen3 and gemma3 are supported with byte-level
BPE tokenizers, SentencePiece tokenizers without a space prefix (Gemma's), and every quantisation
that the ``gguf`` package can dequantise.
"""

from __future__ import annotations

import functools
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
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
"""For fields of config.json: the GGUF key, without the prefix "<architecture>."."""
_CONFIG_OF_GEMMA3 = {
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_local_base_freq": "rope.freq_base_swa",
}
_OF_RESULTS = ("rope.", "attention.", "tokenizer.", "attn_logit_", "final_logit_")
_READ = re.compile(
    r"attention\.(head_count(_kv)?|(key|value)_length|layer_norm(_rms)?_epsilon)"
    r"|rope\.(freq_base|dimension_count|scale_linear)|rope\.scaling\.(type|factor|attn_factor"
    r"|original_context_length|finetuned|yarn_(beta_fast|beta_slow|ext_factor))"
    r"|tokenizer\.(chat_templates?(\..*)?|huggingface\.json|ggml\.(model|pre|tokens|merges|scores"
    r"|token_type(_count)?|add_[be]os_token|\w+_token_id))"
)
"""Keys that are read, or that change nothing in these architectures."""
_NEUTRAL = {"attention.causal": True, "rope.scaling.yarn_attn_factor": 1}
"""Accepted values of unread keys; they have no effect.  For any other unread key: 0 or false."""
_KINDS: dict[str, Callable[[Any], bool]] = {
    "a text": lambda value: type(value) is str,
    "true or false": lambda value: type(value) is bool,
    "an integer": lambda value: type(value) is int,
    "a finite number": lambda value: type(value) in (int, float) and math.isfinite(value),
    "a list of texts": lambda value: type(value) is list and {*map(type, value)} <= {str},
    "a list of integers": lambda value: type(value) is list and {*map(type, value)} <= {int},
    "a list of numbers": lambda value: (
        type(value) is list and {*map(type, value)} <= {float} and all(map(math.isfinite, value))
    ),
}
"""Checks of a value, by the description that the error message gives."""
_ENDS = frozenset([
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>",
    "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
])  # fmt: skip
"""Texts of the tokens that end a generation in llama.cpp.  They are control tokens."""

_WORDS = (  # {digits}: how many digits of a number stay together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> list[pre.PreTokenizer]:
    words = Regex(_WORDS.format(digits=digits))
    return [pre.Split(words, "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)]


_PRE_TOKENIZERS: dict[str, list[pre.PreTokenizer]] = {
    "gpt-2": [pre.ByteLevel(add_prefix_space=False)],
    "smollm": [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)],
    "llama-bpe": _split("{1,3}"),
    "qwen2": _split(""),
}
"""Pre-tokenizers, which cut a text before BPE, by the value of tokenizer.ggml.pre."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Types of tokens.  Tokens that are not normal are matched before the text is cut."""


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a GGUF file, by its name: it ends in .gguf."""
    return path.suffix == ".gguf"


def open_gguf(path: Path) -> GGUF:
    """The checkpoint at ``path``.  The file that was opened last stays open.

    Raises FileNotFoundError if there is no such file, ImportError without the ``gguf`` package, and
    ValueError, naming the file, if the file is damaged or needs an unsupported feature.
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

        class Reader(gguf.GGUFReader):
            # It slices ``data`` for each token.  Slices of a memmap take two thirds of its time.
            data = property(
                lambda self: vars(self)["data"],
                lambda self, file: vars(self).update(data=np.asarray(file)),
            )

        self._path, self._gguf = path, gguf
        try:
            reader = Reader(path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
            raise ValueError(f"{path}: damaged, or not a GGUF file: {error}") from None
        part = self._get("split.no", "an integer", 0) + 1
        if (parts := self._get("split.count", "an integer", 1)) > 1:
            raise ValueError(
                f"{path}: split.count={parts}: part {part} of {parts}; llama-gguf-split merges them"
            )
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._arch = self._get("general.architecture", "a text")
        if self._arch not in _ARCHITECTURES:
            self._refuse("general.architecture", self._arch, _ARCHITECTURES)
        if self._fields.get(f"{self._arch}.expert_count"):
            raise ValueError(f"{path}: mixtures of experts are not supported")
        self._config = _CONFIG | (_CONFIG_OF_GEMMA3 if self._arch == "gemma3" else {})
        for key, value in self._fields.items():
            name = key.removeprefix(f"{self._arch}.")
            read = name in self._config.values() or _READ.fullmatch(name)
            if name.startswith(_OF_RESULTS) and not read and value != _NEUTRAL.get(name, 0):
                raise ValueError(f"{path}: {key}={reprlib.repr(value)} is not supported")
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
        needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "sliding_window")
        get: dict[str, Any] = {
            name: self._number(key)
            for name, key in self._config.items()
            if name in needed or f"{self._arch}.{key}" in self._fields
        }
        share = get["hidden_size"] // max(1, get["num_attention_heads"])
        head_dim = get.setdefault("head_dim", share)
        for key in ("rope.dimension_count", "attention.value_length"):
            if (value := self._number(key, head_dim)) != head_dim:
                self._refuse(f"{self._arch}.{key}", value, [str(head_dim)])
        get.setdefault("rope_theta", 10000.0)
        if self._arch == "gemma3":  # llama.cpp knows the 27B model by its number of layers
            get["query_pre_attn_scalar"] = share if get["num_hidden_layers"] == 62 else head_dim
        get["architectures"] = [_ARCHITECTURES[self._arch]]
        tokens = self._tokens()
        get["vocab_size"] = len(tokens)
        get["tie_word_embeddings"] = "output.weight" not in self._tensors
        get["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        keys = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        ends = {self._token_id("eos"), *(self._token_id(key, None) for key in keys)}
        ends |= {index for index, token in enumerate(tokens) if token in _ENDS}
        get["eos_token_id"] = sorted(index for index in ends if index is not None)
        get["dtype"] = "bfloat16"
        get["rope_scaling"] = self._rope_scaling()
        return get

    def _rope_scaling(self) -> dict[str, Any]:
        """``rope_scaling`` by llama.cpp's rules.  The default type is linear.  YaRN's attention
        factor is the file's factor times 1 + 0.1 * log(factor)."""
        number, key = self._number, f"{self._arch}.rope.scaling."
        kind = self._get(key + "type", "a text", "linear")
        # Gemma 3 scales its global layers only, but llama.cpp's YaRN applies to all layers.
        kinds = ["none", "linear", "yarn"][: 2 if self._arch == "gemma3" else 3]
        if kind not in kinds:
            self._refuse(key + "type", kind, kinds)
        factor = number("rope.scaling.factor", number("rope.scale_linear", 1.0)) or 1.0
        attention = number("rope.scaling.attn_factor", 1.0)
        if kind != "yarn" and attention != 1:
            self._refuse(key + "attn_factor", attention, ["1"])
        share, own = number("rope.scaling.yarn_ext_factor", -1.0), float(kind == "yarn")
        if share >= 0 and share != own:
            self._refuse(key + "yarn_ext_factor", share, [str(own), "-1"])
        if kind == "none" or (kind == "linear" and factor == 1):
            return {}
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = number("rope.scaling.original_context_length", 0)
            scaling |= {
                "attention_factor": attention * (1 + 0.1 * math.log(max(1.0, factor))),
                "beta_fast": number("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": number("rope.scaling.yarn_beta_slow", 1.0),
                **({"original_max_position_embeddings": original} if original else {}),
            }
        return scaling

    def tensors(
        self, expected: Mapping[str, CheckpointTensor]
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield each tensor's name in safetensors and this rank's part, dequantised to fp32.

        If the model has no such tensor, yield its name in the GGUF and None."""
        for key in ("context_length", "attention.layer_norm_rms_epsilon"):
            self._number(key)
        num_layers = self._number("block_count")
        arch = {name: arch for arch, name in self._gguf.MODEL_ARCH_NAMES.items()}[self._arch]
        gguf_name = self._gguf.get_tensor_name_map(arch, num_layers).get_name
        names = {gguf_name(name, try_suffixes=(".weight", ".bias")): name for name in expected}
        for name, tensor in self._tensors.items():
            if name not in names:
                yield name, None
                continue
            wanted = expected[names[name]]
            values = self._gguf.dequantize(tensor.data, tensor.tensor_type)
            if values.shape != wanted.shape:
                raise ValueError(
                    f"{self._path}: tensor {name} has shape {values.shape}, the model needs "
                    f"{wanted.shape}"
                )
            for part, key in ((".attn_q.", "head_count"), (".attn_k.", "head_count_kv")):
                if self._arch == "llama" and part in name:
                    heads = self._number("attention.head_count")
                    values = _halves(values, self._number(f"attention.{key}", heads))
            if self._arch == "gemma3" and name.endswith("norm.weight"):
                values = values - 1
            yield names[name], torch.from_numpy(np.require(values, requirements="W"))[wanted.index]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer: byte-level BPE with the file's pre-tokenizer, or SentencePiece's BPE."""
        kind = self._get("tokenizer.ggml.model", "a text")
        if kind not in ("gpt2", "llama"):
            self._refuse("tokenizer.ggml.model", kind, ["gpt2", "llama"])
        tokens, key = self._tokens(), "tokenizer.ggml.token_type"
        kinds = self._get(key, "a list of integers", [_NORMAL] * len(tokens))
        vocabulary = {token: index for index, token in enumerate(tokens)}
        if not len(vocabulary) == len(tokens) <= len(kinds):
            raise ValueError(f"{self._path}: tokenizer.ggml.tokens: one is twice, or has no type")
        is_bpe = kind == "gpt2"
        tokenizer = self._byte_level(vocabulary) if is_bpe else self._sentencepiece(vocabulary)
        kinds = [_CONTROL if t in _ENDS else k for t, k in zip(tokens, kinds, strict=False)]
        tokenizer.add_tokens(
            [
                AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
            ]
        )
        adds_bos = not is_bpe or self._fields["tokenizer.ggml.pre"] == "llama-bpe"
        template, special = ["$A"], []
        for name, position, default in (("bos", 0, adds_bos), ("eos", 2, False)):
            if self._get(f"tokenizer.ggml.add_{name}_token", "true or false", default):
                index = self._token_id(name)
                template.insert(position, tokens[index])
                special.append((tokens[index], index))
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
        return tokenizer

    def _byte_level(self, vocabulary: dict[str, int]) -> Tokenizer:
        cut = self._get("tokenizer.ggml.pre", "a text")
        if cut not in _PRE_TOKENIZERS:
            self._refuse("tokenizer.ggml.pre", cut, _PRE_TOKENIZERS)
        merges = self._get("tokenizer.ggml.merges", "a list of texts")
        pairs = [tuple(merge.split(" ")) for merge in merges]
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=cut == "llama-bpe"))
        if cut == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre.Sequence(_PRE_TOKENIZERS[cut])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self, vocabulary: dict[str, int]) -> Tokenizer:
        """BPE that first merges the pair whose merged token has the highest score.

        If several pairs give one token, llama.cpp merges the leftmost pair first.  Here the pair
        with the lowest ids comes first, as in transformers."""
        key = "tokenizer.ggml.add_space_prefix"
        if self._get(key, "true or false", True):
            self._refuse(key, True, ["False"])
        scores = self._get("tokenizer.ggml.scores", "a list of numbers")
        bytes_ = {f"<0x{byte:02X}>" for byte in range(256)}
        if len(scores) < len(vocabulary) or not bytes_ <= vocabulary.keys():
            raise ValueError(f"{self._path}: tokenizer.ggml.tokens: a score or a byte is missing")
        ranked = sorted(
            (-scores[index], vocabulary[token[:cut]], vocabulary[token[cut:]])
            for token, index in vocabulary.items()
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        )
        tokens = list(vocabulary)
        merges = [(tokens[left], tokens[right]) for _, left, right in ranked]
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        spaces, join_bytes = decoders.Replace("\u2581", " "), decoders.ByteFallback()
        tokenizer.decoder = decoders.Sequence([spaces, join_bytes, decoders.Fuse()])
        return tokenizer

    def chat_templates(self) -> tuple[dict[str, str], dict[str, str]]:
        """Jinja sources by name ("default" for the key without a name), and special tokens."""
        tokens, special = self._tokens(), {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
            index = self._token_id(key, None)
            if index is not None:
                special[f"{name}_token"] = tokens[index]
        prefix, named = "tokenizer.chat_template", {}
        for key, value in self._fields.items():
            if key == prefix or key.startswith(prefix + "."):
                named[key[len(prefix) + 1 :] or "default"] = value
        return named, special

    def _tokens(self) -> list[str]:
        return self._get("tokenizer.ggml.tokens", "a list of texts")

    def _token_id(self, name: str, *default: None) -> Any:
        key, count = f"tokenizer.ggml.{name}_token_id", len(self._tokens())
        index = self._get(key, "an integer", *default)
        if index is not None and not 0 <= index < count:
            raise ValueError(f"{self._path}: {key}={index}: there are {count} tokens")
        return index

    def _number(self, key: str, *default: float) -> Any:
        return self._get(f"{self._arch}.{key}", "a finite number", *default)

    def _get(self, key: str, kind: str, *default: Any) -> Any:
        """The value of a key, checked by _KINDS[kind].  Without a default the key is required."""
        if key not in self._fields and not default:
            raise ValueError(f"{self._path}: field {key!r} is missing")
        value = self._fields.get(key, *default)
        if key in self._fields and not _KINDS[kind](value):
            raise ValueError(f"{self._path}: {key}={reprlib.repr(value)}: needs {kind}")
        return value

    def _refuse(self, key: str, value: object, choices: Iterable[str]) -> None:
        raise ValueError(
            f"{self._path}: {key}={value!r} is not supported; choose from {', '.join(choices)}"
        )


def _halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows of Q or K: RoPE's pairs are adjacent in llama.cpp, here half a head apart."""
    heads = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)
