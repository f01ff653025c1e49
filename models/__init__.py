"""Llama and Qwen3 decoders on the paged KV cache: LLM, its parameters and its outputs."""

from models.config import ModelConfig, RopeScaling, UnsupportedModel
from models.llm import LLM
from models.outputs import CompletionOutput, RequestOutput, TokenOutput
from models.sampling_params import SamplingParams
from models.sequence import FinishReason, RequestStats
from models.weights import WeightsError

__all__ = [
    "LLM",
    "CompletionOutput",
    "FinishReason",
    "ModelConfig",
    "RequestOutput",
    "RequestStats",
    "RopeScaling",
    "SamplingParams",
    "TokenOutput",
    "UnsupportedModel",
    "WeightsError",
]
