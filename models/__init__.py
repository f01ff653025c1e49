"""Llama and Qwen3 decoders on the paged KV cache, and the engine that serves them.

config, weights    what a Hugging Face folder holds
decoder, layers    the model; parallel: what each rank of it holds
attention          storing and attending, by the Triton kernels, PyTorch or flash-attn
sequence           requests and their state
scheduler          which sequences compute which tokens in a step, and who has to yield
runner             a step's inputs, block moves and logits; cuda_graphs: decoding replayed
sampler            next tokens; beam_search: next beams
engine             the loop over these; memory: how large its cache is
llm                all of it behind ``LLM(...).generate``; workers: its tensor-parallel ranks
prompts, streams   texts and token ids in, events of each caller's requests out
generate           the command line
"""

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
