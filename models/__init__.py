"""Decoders of several families on the paged KV cache, and the engine that serves them.

config, weights    what a Hugging Face folder holds
decoder, layers    the model; parallel: what each rank of it holds
attention          storing and attending, by the Triton kernels, PyTorch or flash-attn
runner             a step's inputs, block moves and logits; cuda_graphs: decoding replayed
sampler            next tokens from logits; uploads: what both send to the device
memory             how much the largest batch takes
llm                these and the engine of ``cache.serving`` behind ``LLM(...).generate``
workers            its tensor-parallel ranks
prompts, streams   texts and token ids in, events of each caller's requests out
generate           the command line
"""

from cache.serving.outputs import CompletionOutput, RequestOutput, TokenOutput
from cache.serving.request import FinishReason, RequestStats
from cache.serving.sampling_params import SamplingParams
from models.config import ModelConfig, RopeScaling, UnsupportedModel
from models.llm import LLM
from models.prompts import SaltedPrompt
from models.weights import WeightsError

__all__ = [
    "LLM",
    "CompletionOutput",
    "FinishReason",
    "ModelConfig",
    "RequestOutput",
    "RequestStats",
    "RopeScaling",
    "SaltedPrompt",
    "SamplingParams",
    "TokenOutput",
    "UnsupportedModel",
    "WeightsError",
]
