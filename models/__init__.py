"""Decoders of several families on the paged KV cache, and the engine that serves them.

config, weights    read a Hugging Face folder
decoder, layers    the model; parallel: the part of the model on each rank
attention          stores K/V and attends, with the Triton kernels, PyTorch or flash-attn
runner             runs a step: moves blocks, prepares inputs, computes logits
cuda_graphs        replays decode steps from CUDA graphs
sampler, uploads   next tokens from logits; host-to-device copies
memory             measures the memory that the largest batch needs
llm                ``LLM(...).generate`` joins these modules and ``cache.serving.Engine``
workers            tensor-parallel ranks as child processes
prompts, streams   check and tokenize prompts; give each caller the events of its requests
generate           the command line
"""

# ruff: noqa: E402 (packages are imported after the check)
from pathlib import Path

from models._siblings import check_siblings

check_siblings(Path(__file__).parents[1], "cache", "kernels")

from cache.serving.outputs import CompletionOutput, RequestOutput, TokenOutput
from cache.serving.request import FinishReason, RequestStats
from cache.serving.sampling_params import SamplingParams
from models.config import ModelConfig, Rope, RopeScaling, UnsupportedModel
from models.llm import LLM, LLMOptions
from models.prompts import SaltedPrompt
from models.weights import WeightsError

__all__ = [
    "LLM", "CompletionOutput", "FinishReason", "LLMOptions", "ModelConfig", "RequestOutput",
    "RequestStats", "Rope", "RopeScaling", "SaltedPrompt", "SamplingParams", "TokenOutput",
    "UnsupportedModel", "WeightsError",
]  # fmt: skip
