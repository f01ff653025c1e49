"""ModelConfig: shape and constants of a decoder, which are read from a config.json."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from cache import Group, block_bytes, layer_groups
from cache.checks import at_least, true_or_false
from cache.serving.sampling_params import SamplingParams
from models.gguf import is_gguf, open_gguf

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class UnsupportedModel(ValueError):
    """The checkpoint needs a feature that these decoders do not have."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Properties of an architecture that are not fields of its config.json."""

    defaults: Mapping[str, Any]
    """Defaults of fields that config.json may omit."""
    reads: tuple[str, ...] = ()
    """Fields of config.json that this architecture reads, but not every architecture."""
    qk_norm: bool = False
    """Queries and keys are RMS-normalised over head_dim, head by head, before RoPE."""
    output_bias: bool = True
    """``attention_bias`` also adds a bias to the output projection."""
    unit_offset_norms: bool = False
    """The checkpoint stores the weights of norms minus 1."""
    sandwich_norms: bool = False
    """The outputs of attention and MLP are normalised, too."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by sqrt(hidden_size)."""
    has_window: Callable[[Mapping[str, Any], int], bool] | None = None
    """Whether a layer has a window if config.json lacks layer_types.  None: no layer has one."""
    has_rope: Callable[[Mapping[str, Any], int], bool] = lambda fields, layer: True
    """Whether queries and keys of a layer are rotated."""
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Supported types of RoPE scaling.  Their frequencies do not depend on the sequence length."""


_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def _from_max_window_layers(fields: Mapping[str, Any], layer: int) -> bool:
    return bool(fields.get("use_sliding_window")) and layer >= fields.get("max_window_layers", 28)


def _from_interval(name: str, fields: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % at_least(1, name, fields[name]) != 0


def _from_no_rope_layers(fields: Mapping[str, Any], layer: int) -> bool:
    listed = fields.get("no_rope_layers")
    if listed is None:
        return _from_interval("no_rope_layer_interval", fields, layer)
    if not isinstance(listed, list) or len(listed) < fields["num_hidden_layers"]:
        raise ValueError(f"no_rope_layers: needs a 0 or 1 for each layer, got {listed!r}")
    return bool(listed[layer])


_GEMMA = _DEFAULTS | {
    "max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA_2 = _GEMMA | {
    "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "query_pre_attn_scalar": 256
}  # fmt: skip
_SCORES = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
_GEMMA_2_READS = ("hidden_activation", "layer_types", *_SCORES)

_QWEN = _DEFAULTS | {"use_sliding_window": False, "sliding_window": 4096}
_QWEN_READS = ("use_sliding_window", "layer_types")

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(defaults=_DEFAULTS | {"max_position_embeddings": 2048}),
    "MistralForCausalLM": Family(
        defaults=_DEFAULTS | {"max_position_embeddings": 131072, "sliding_window": 4096},
        has_window=lambda fields, layer: True,
    ),
    "Qwen2ForCausalLM": Family(
        defaults=_QWEN | {"attention_bias": True}, reads=_QWEN_READS,
        output_bias=False, has_window=_from_max_window_layers,
    ),
    "Qwen3ForCausalLM": Family(
        defaults=_QWEN | {"head_dim": 128}, reads=_QWEN_READS,
        qk_norm=True, has_window=_from_max_window_layers,
    ),
    "SmolLM3ForCausalLM": Family(
        defaults=_DEFAULTS | {
            "rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4
        },
        reads=("layer_types",), has_rope=_from_no_rope_layers,
        has_window=lambda fields, layer: (
            bool(fields.get("use_sliding_window")) and not _from_no_rope_layers(fields, layer)
        ),
    ),
    "Phi3ForCausalLM": Family(
        defaults=_DEFAULTS | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        has_window=lambda fields, layer: True,
        rope_types=("default",),  # Phi-3's "yarn" is LongRoPE, which is not supported
    ),
    "GemmaForCausalLM": Family(defaults=_GEMMA, unit_offset_norms=True, scaled_embeddings=True),
    "Gemma2ForCausalLM": Family(
        defaults=_GEMMA_2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        reads=_GEMMA_2_READS, unit_offset_norms=True, sandwich_norms=True, scaled_embeddings=True,
        has_window=lambda fields, layer: layer % 2 == 0,
    ),
    "Gemma3ForCausalLM": Family(
        defaults=_GEMMA_2 | {
            "max_position_embeddings": 131072, "sliding_window_pattern": 6,
            "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        },
        reads=(*_GEMMA_2_READS, "rope_local_base_freq"), qk_norm=True, scaled_embeddings=True,
        unit_offset_norms=True, sandwich_norms=True,
        has_window=partial(_from_interval, "sliding_window_pattern"),
    ),
}  # fmt: skip
"""Families by the architecture's name in config.json.  SmolLM2 is a Llama, Qwen2.5 a Qwen2."""

_OFF_IF_NULL = ("sliding_window", *_SCORES[1:])
"""Fields whose null turns a feature off, instead of choosing the default."""

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def _positive(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 2**-63 < value < 2**63:
        raise ValueError(f"{name}={value!r}: needs a positive number, 2**-63 to 2**63")


def _one_of(name: str, value: object, choices: Iterable[str]) -> None:
    if value not in tuple(choices):
        raise UnsupportedModel(f"{name}={value!r}: choose from {', '.join(choices)}")


_OF_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
_ROPE_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", *_OF_YARN),
}
"""Fields that a RoPE scaling reads, by its type.  Fields outside _OF_YARN are required.  In the
first four fields of _OF_YARN 0 means the default; the last four may be None."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of RoPE's frequencies for contexts longer than in pre-training.

    The fields are transformers' ``rope_parameters``.  ``linear`` divides all frequencies by
    ``factor``.  ``llama3`` (Llama 3.1) and ``yarn`` (Peng et al., 2023) divide low frequencies.  A
    type ignores the fields that _ROPE_FIELDS does not list for it.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Factor of yarn's sines and cosines.  None: computed from factor, mscale, mscale_all_dim."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _one_of("rope_type", self.rope_type, _ROPE_FIELDS)
        own = _ROPE_FIELDS[self.rope_type]
        for name in own:
            if (value := getattr(self, name)) is not None or name not in _OF_YARN[2:]:
                (true_or_false if name == "truncate" else _positive)(name, value)
        if not self.factor >= 1:
            raise ValueError(f"factor={self.factor!r}: RoPE is stretched by a factor of 1 or more")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            start, end = getattr(self, low), getattr(self, high)
            if low in own and not start < end:
                raise ValueError(f"{low}={start!r}, {high}={end!r}: needs 0 < low < high")


@dataclass(frozen=True)
class Rope:
    """RoPE of a layer: the base of its frequencies, and their scaling."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _positive("rope_theta", self.theta)
        if self.theta == 1 and self.scaling is not None:
            raise ValueError("rope_theta=1: scaling needs frequencies that differ")


def _size(name: str, value: Any) -> None:
    _positive(name, at_least(1, name, value, float("inf")))


def _off_or_positive(name: str, value: Any) -> None:
    if value not in (None, 0):
        _positive(name, value)


_CHECKS: dict[Callable[[str, Any], object], tuple[str, ...]] = {
    _size: (
        "vocab_size", "hidden_size", "intermediate_size", "num_layers",
        "num_q_heads", "num_kv_heads", "head_dim", "max_position_embeddings",
    ),
    _positive: ("rms_norm_eps",),
    _off_or_positive: (
        "attention_scale", "attention_softcap", "final_softcap", "initializer_range",
    ),
    true_or_false: ("tie_word_embeddings", "attention_bias", "mlp_bias"),
    partial(_one_of, choices=ACTIVATIONS): ("hidden_act",),
}  # fmt: skip
"""Checks of single fields of a ModelConfig."""

_RENAMED = {
    "num_layers": "num_hidden_layers",
    "num_q_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "attention_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
}
"""Fields of a ModelConfig that have other names in config.json."""


class _Fields(dict[str, Any]):
    """Fields of a config.json.  The error for a missing field names it."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"field {name!r} is missing")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a decoder.  Sizes are of the whole model, not of one rank.

    Raises ValueError, naming the field, for sizes that do not fit together.
    """

    architecture: str = "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    ropes: tuple[Rope | None, ...] = (Rope(),)
    """RoPE of each layer (None: the layer has no RoPE), or one item for all layers."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Whether the Q, K, V and, except in Qwen2, output projections have biases."""
    mlp_bias: bool = False
    hidden_act: str = "silu"
    """Activation of the MLP's gate, one of ACTIVATIONS."""
    windows: tuple[int | None, ...] = ()
    """For each layer: number of tokens that a query sees, itself included (None: all).  (): all."""
    attention_scale: float | None = None
    """Scale of the attention scores.  None: head_dim ** -0.5."""
    attention_softcap: float = 0.0
    """Attention scores become softcap * tanh(score / softcap); 0: they are not changed."""
    final_softcap: float = 0.0
    """Logits become softcap * tanh(logit / softcap); 0: they are not changed."""
    initializer_range: float = 0.02
    """Standard deviation of random weights."""
    dtype: torch.dtype = torch.float32
    """Dtype of the checkpoint, by its config.json."""
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    """Tokens that end a generation."""

    def __post_init__(self) -> None:
        _family(self.architecture)
        for check, names in _CHECKS.items():
            for name in names:
                check(name, getattr(self, name))
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads={self.num_q_heads}: needs a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim}: RoPE rotates pairs and needs an even number"
            )
        for name, same in (("windows", 0), ("ropes", 1)):
            count = len(getattr(self, name))
            if count not in (same, self.num_layers):
                raise ValueError(f"{name}: {count} for num_layers={self.num_layers}")
        for window in self.windows:
            if window is not None:
                at_least(1, "sliding_window", window)

    @property
    def sliding_window(self) -> int | None:
        """Largest window of the layers; None if some layer has no window."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.windows) else None

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups of layers that keep K/V of the same tokens; one group unless the model mixes full
        attention with windows."""
        groups = layer_groups(self.windows or (None,) * self.num_layers)
        if any(group.kind == "full" for group in groups):
            return groups
        return (Group("window", self.sliding_window, tuple(range(self.num_layers))),)

    @property
    def max_positions(self) -> int:
        """Longest sequence, as in vLLM: max_position_embeddings times the factor of linear scaling.
        In Gemma 3's checkpoints max_position_embeddings already includes this factor."""
        if "rope_local_base_freq" in self.family.reads:
            return self.max_position_embeddings
        scalings = [rope.scaling for rope in self.ropes if rope is not None and rope.scaling]
        factors = [scaling.factor for scaling in scalings if scaling.rope_type == "linear"]
        return int(self.max_position_embeddings * max(factors, default=1))

    @property
    def family(self) -> Family:
        return _family(self.architecture)

    def kv_block_bytes(
        self,
        block_size: int,
        dtype: torch.dtype,
        *,
        tensor_parallel_size: int = 1,
        num_layers: int | None = None,
    ) -> int:
        """Bytes of K and V on one rank for a block of ``block_size`` tokens, in ``num_layers``
        layers.  None: in all layers."""
        return block_bytes(
            block_size=block_size, num_layers=num_layers or self.num_layers,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            dtype_bytes=dtype.itemsize, tensor_parallel_size=tensor_parallel_size,
        )  # fmt: skip

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read ``config.json``, and end-of-text tokens from ``generation_config.json`` if present.

        ``folder`` may be a GGUF file.  Raises FileNotFoundError if a file is missing,
        UnsupportedModel for a feature that these decoders do not have, and ValueError for malformed
        fields.  The messages name the file."""
        folder = Path(folder)
        if is_gguf(folder):
            path, fields = folder, open_gguf(folder).config()
        else:
            path = folder / "config.json"
            fields = read_json_object(path)
        generation = folder / "generation_config.json"
        if generation.exists():
            eos = read_json_object(generation).get("eos_token_id")
            if eos is not None:
                with _errors_of(generation):
                    fields["eos_token_id"] = sorted(_token_ids("eos_token_id", eos))
        with _errors_of(path):
            return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Translate the fields of a config.json of transformers 4 or 5.

        Raises UnsupportedModel as ``from_folder`` does, and ValueError for missing or wrong fields.
        """
        names = fields.get("architectures")
        if not isinstance(names, list) or [type(name) for name in names[:1]] != [str]:
            raise ValueError(f"field 'architectures': expected a list of one name, got {names!r}")
        architecture, family = names[0], _family(names[0])
        get = _Fields(family.defaults)
        for name, value in fields.items():
            if value is not None or name in _OFF_IF_NULL:
                get[name] = value
        if "quantization_config" in get:
            raise UnsupportedModel("quantization_config: quantised checkpoints are not supported")
        if get.get("use_bidirectional_attention") or get.get("is_causal") is False:
            raise UnsupportedModel(
                "use_bidirectional_attention, is_causal: these decoders are causal"
            )
        get.setdefault("num_key_value_heads", get["num_attention_heads"])
        if "head_dim" not in get:
            hidden_size, num_heads = (
                at_least(1, name, get[name], 2**63)
                for name in ("hidden_size", "num_attention_heads")
            )
            if hidden_size % num_heads:
                raise ValueError(
                    f"{hidden_size=} does not divide among num_attention_heads={num_heads}, and "
                    "the field 'head_dim' is missing"
                )
            get["head_dim"] = hidden_size // num_heads
        if at_least(1, "num_hidden_layers", get["num_hidden_layers"], 2**63) > 10_000:
            raise UnsupportedModel(f"num_hidden_layers={get['num_hidden_layers']}: at most 10,000")
        layers = _layer_types(get, family)
        activation = "hidden_activation" if "hidden_activation" in family.reads else "hidden_act"
        hidden_act = get[activation]
        if architecture == "GemmaForCausalLM" and hidden_act == "gelu":
            hidden_act = "gelu_pytorch_tanh"  # published checkpoints give the wrong name
        if (scalar := get.get("query_pre_attn_scalar")) is not None:
            _positive("query_pre_attn_scalar", scalar)
        read = {
            "architecture": architecture,
            "ropes": _ropes(get, layers, family),
            "hidden_act": hidden_act,
            "windows": _windows(get, layers, family),
            "attention_scale": None if scalar is None else scalar**-0.5,
            "dtype": _dtype(get),
            "eos_token_ids": _token_ids("eos_token_id", get.get("eos_token_id", [])),
        }
        for ours in dataclasses.fields(cls):
            theirs = _RENAMED.get(ours.name, ours.name)
            is_needed = ours.default is dataclasses.MISSING
            if ours.name not in read and (is_needed or get.get(theirs) is not None):
                read[ours.name] = get[theirs]
        config = cls(**read)
        for name in _SCORES:
            if get.get(name) is not None and name not in family.reads:
                raise UnsupportedModel(f"{name}: this architecture has none")
        return config


def default_sampling_params(folder: Path | None) -> SamplingParams:
    """The sampling parameters of a checkpoint's ``generation_config.json``, as in vLLM.

    Raises ValueError, naming the file, for values that SamplingParams refuses.
    """
    path = None if folder is None else folder / "generation_config.json"
    fields = read_json_object(path) if path is not None and path.exists() else {}
    if fields.get("do_sample") is False:
        fields["temperature"] = 0.0
    fields["max_tokens"] = fields.get("max_new_tokens")
    names = "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens"
    with _errors_of(path):
        return SamplingParams(**{n: fields[n] for n in names if fields.get(n) is not None})


def eos_of_tokenizer(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Id of the eos_token that a tokenizer's files name; empty if they name no eos_token.

    The defaults of transformers' tokenizer classes do not count.  Raises ValueError, naming the
    file, for malformed JSON or a token that is not a text.
    """
    path, legacy = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    fields = read_json_object(path) if path.exists() else {}
    is_old = "added_tokens_decoder" not in fields and legacy.exists()
    if is_old and "eos_token" in (of_legacy := read_json_object(legacy)):
        path, fields = legacy, of_legacy
    eos = fields.get("eos_token")
    text = eos.get("content") if isinstance(eos, Mapping) else eos
    if not isinstance(text, str | None):
        raise ValueError(f"{path}: eos_token={eos!r}: needs a text")
    token_id = tokenizer.token_to_id(text or "")
    return frozenset() if token_id is None else frozenset({token_id})


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a checkpoint's JSON file.  Raises FileNotFoundError or ValueError, naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; a checkpoint folder has one") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


@contextlib.contextmanager
def _errors_of(path: Path | None) -> Iterator[None]:
    """Put the name of the file before the message of a ValueError or UnsupportedModel."""
    try:
        yield
    except ValueError as error:
        raise type(error)(f"{path}: {error}") from None


def _family(architecture: str) -> Family:
    if architecture not in tuple(FAMILIES):
        raise UnsupportedModel(
            f"architecture {architecture} is unknown; choose from {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]


_LAYER_TYPES = _FULL, _SLIDING = "full_attention", "sliding_attention"


def _layer_types(fields: Mapping[str, Any], family: Family) -> list[str]:
    """The type of each layer: "full_attention" or "sliding_attention"."""
    types, num_layers = fields.get("layer_types"), fields["num_hidden_layers"]
    has_window = family.has_window or (lambda fields, _: bool(fields.get("use_sliding_window")))
    own = [_LAYER_TYPES[bool(has_window(fields, layer))] for layer in range(num_layers)]
    if types is None:
        return own
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(f"layer_types: needs a list of {num_layers} names, got {types!r}")
    unknown = [kind for kind in types if kind not in _LAYER_TYPES]
    if unknown:
        raise UnsupportedModel(
            f"layer_types: these decoders have {', '.join(_LAYER_TYPES)}, not {unknown[0]}"
        )
    if types != own and "layer_types" not in family.reads:
        raise UnsupportedModel("layer_types: this architecture does not read them")
    return types


def _windows(
    fields: Mapping[str, Any], layers: list[str], family: Family
) -> tuple[int | None, ...]:
    """Window of each layer; empty if no layer has one."""
    window = fields.get("sliding_window")
    is_off = "use_sliding_window" in family.reads and not fields["use_sliding_window"]
    if window is None or is_off or _SLIDING not in layers:
        return ()
    if family.has_window is None:
        raise UnsupportedModel("sliding_window: this architecture has no layers with a window")
    return tuple(window if kind == _SLIDING else None for kind in layers)


def _ropes(fields: Mapping[str, Any], layers: list[str], family: Family) -> tuple[Rope | None, ...]:
    """RoPE of each layer, or one item for all layers.  Reads the fields of transformers 4 and 5.
    If both are present, reads the field that transformers 5 prefers."""
    scaling, parameters = (
        _json_object(name, fields.get(name, {})) for name in ("rope_scaling", "rope_parameters")
    )
    if "rope_local_base_freq" in family.reads:  # Gemma 3
        kinds = {kind: _json_object(kind, parameters.get(kind) or {}) for kind in _LAYER_TYPES}
        full, sliding = kinds[_FULL] | scaling, kinds[_SLIDING]
        if parameters.keys() - kinds or "type" in scaling or "truncate" in full | sliding:
            raise UnsupportedModel(
                "rope_parameters: needs an object for each of full_attention, sliding_attention, "
                "without truncate; rope_scaling: needs a rope_type, not a type"
            )
        sliding = {"rope_theta": fields["rope_local_base_freq"]} | sliding
        by_kind = {_FULL: full, _SLIDING: sliding}
    else:
        outside = fields.keys() & {"original_max_position_embeddings"}
        whole = (scaling or parameters) | {name: fields[name] for name in outside}
        by_kind = dict.fromkeys(layers, whole)
    ropes = {kind: _rope(fields, by_kind[kind], family) for kind in layers}
    of_layers = tuple(
        ropes[kind] if family.has_rope(fields, layer) else None for layer, kind in enumerate(layers)
    )
    return of_layers if len(set(of_layers)) > 1 else of_layers[:1]


def _json_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"field {name!r}: expected a JSON object, got {value!r}")
    return dict(value)


def _rope(fields: Mapping[str, Any], given: Mapping[str, Any], family: Family) -> Rope:
    nested = [name for name, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModel(f"rope_parameters: {nested[0]}: all layers have one RoPE here")
    partial = given.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1))
    if partial != 1:
        raise UnsupportedModel(
            f"partial_rotary_factor={partial!r}: these decoders rotate all of head_dim"
        )
    theta = given.get("rope_theta", fields["rope_theta"])
    rope_type = given.get("rope_type", given.get("type", "default"))
    _one_of("rope_type", rope_type, family.rope_types)
    if rope_type == "default":
        return Rope(theta)
    given = dict(given)
    if rope_type != "linear":
        given.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    options = {}
    for name in _ROPE_FIELDS[rope_type]:
        if name not in _OF_YARN and given.get(name) is None:
            raise ValueError(f"rope scaling of type {rope_type!r}: field {name!r} is missing")
        if given.get(name) or (name in given and name not in _OF_YARN[:4]):
            options[name] = given[name]
    return Rope(theta, RopeScaling(rope_type=rope_type, **options))


def _dtype(fields: Mapping[str, Any]) -> torch.dtype:
    name = str(fields.get("dtype", fields.get("torch_dtype", "float32"))).removeprefix("torch.")
    _one_of("dtype", name, _DTYPES)
    return _DTYPES[name]


def _token_ids(name: str, value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in values):
        raise ValueError(f"field {name!r}: expected a token id or a list of them, got {value!r}")
    return frozenset(values)
