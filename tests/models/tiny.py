"""Tiny models: configs of the checkpoints that transformers writes, and their tokens."""

import functools

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from models import ModelConfig, RequestOutput


def tiny_config(**fields) -> ModelConfig:
    """A decoder of one layer, for random weights."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    heads = {"num_layers": 1, "num_q_heads": 2, "num_kv_heads": 1}
    return ModelConfig(**sizes | heads | {"max_position_embeddings": 128} | fields)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    """Tokens of the first completion of each request."""
    return [output.outputs[0].token_ids for output in outputs]


LOGIT_ERROR = 1e-4
"""Bound of the error of logits of `CHECKPOINTS` in fp32, see test_decoder.py."""


def oracle_tokens(oracle, prompt: list[int], max_tokens: int, **options) -> list[int]:
    """Greedy tokens of a transformers model, each ahead of all others by more than rounding."""
    options |= {"max_new_tokens": max_tokens, "do_sample": False}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    generated = oracle.generate(torch.tensor([prompt]), **options)
    first, second = torch.cat(generated.scores).topk(2).values.T
    assert (first - second > 2 * LOGIT_ERROR).all()
    return generated.sequences[0, len(prompt) :].tolist()


class Fp64(TorchFunctionMode):
    """Runs code that asks for fp32, as the norms of transformers do, in fp64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widen(value):
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(widen, args), **{k: widen(v) for k, v in (kwargs or {}).items()})


class SingleAdditions(TorchFunctionMode):
    """Adds the products of linear layers one by one, from product `first` on and then those before.

    BLAS adds them in an order, and with an error, that depend on the CPU.
    """

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, weight, bias = args
        products = (x[..., None, :] * weight).roll(-self.first, -1)
        out = functools.reduce(torch.add, products.unbind(-1))
        return out if bias is None else out + bias


TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,  # transformers would mask this token
}  # fmt: skip
_ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
_LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0
}  # fmt: skip
CHECKPOINTS = {
    "llama": ("LlamaConfig", {}),
    "llama_biased": ("LlamaConfig", {
        "num_attention_heads": 8, "head_dim": 16, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True, "rope_parameters": _ROPE | _LLAMA3_ROPE,
    }),
    "mistral": ("MistralConfig", {"sliding_window": 11}),
    "qwen2": ("Qwen2Config", {
        "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1,
        "rope_parameters": _ROPE | {"rope_type": "yarn", "factor": 4.0},
    }),
    "gemma2": ("Gemma2Config", {
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 11,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        "attn_implementation": "eager",
    }),
    "gemma": ("GemmaConfig", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma3": ("Gemma3TextConfig", {
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 11, "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        },
    }),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [0, 1]}),
    "phi3": ("Phi3Config", {"sliding_window": 11}),
    "qwen3": ("Qwen3Config", {
        "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True
    }),
}  # fmt: skip
"""Class and fields of the configs that the tests load, by the name of the checkpoint."""
