"""Tiny checkpoints, written by transformers, and models and LLMs on them."""

import functools
import os
import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from kernels.testing.hugging_face import import_transformers
from models import LLM
from models.attention import make_backend
from models.config import ModelConfig
from models.decoder import build_model
from models.weights import load_weights
from tests.models.tiny import CHECKPOINTS, TINY, oracle_tokens

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)  # tiny matrices: threads would only wait for each other


@pytest.fixture(scope="session")
def transformers():
    return import_transformers()


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory, transformers):
    """make_checkpoint(name, **save_options) -> (folder, the transformers model in it)."""
    made = {}

    def make(name: str, **save_options):
        key = (name, *sorted(save_options.items()))
        if key not in made:
            config_class, fields = CHECKPOINTS[name]
            config = getattr(transformers, config_class)(**(TINY | fields))
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide them
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder, **save_options)
            made[key] = (folder, model)
        return made[key]

    return make


@pytest.fixture(scope="module")
def expected(request, make_checkpoint):
    """expected(checkpoint) -> transformers' greedy tokens for each of the module's PROMPTS."""
    prompts, max_tokens = request.module.PROMPTS, request.module.MAX_TOKENS

    def generate(checkpoint: str):
        _, oracle = make_checkpoint(checkpoint)
        return [oracle_tokens(oracle, prompt, max_tokens) for prompt in prompts]

    return functools.cache(generate)


@pytest.fixture(scope="session")
def make_llm(make_checkpoint):
    """make_llm(name="llama", **options) -> an LLM on the checkpoint."""
    return lambda name="llama", **options: LLM(make_checkpoint(name)[0], **options)


@pytest.fixture(scope="session")
def load_model(make_checkpoint):
    """load_model(name, backend="torch", dtype=float32) -> our model with the same weights."""

    def load(name: str, backend: str = "torch", dtype: torch.dtype = torch.float32):
        folder, _ = make_checkpoint(name)
        config, device = ModelConfig.from_folder(folder), torch.device("cpu")
        model = build_model(config, make_backend(backend, device), dtype=dtype, device=device)
        load_weights(model, folder)
        return model

    return load


@pytest.fixture
def llama_copy(make_checkpoint, tmp_path):
    """A checkpoint that a test may change."""
    return shutil.copytree(make_checkpoint("llama")[0], tmp_path / "llama")


@pytest.fixture
def text_checkpoint(llama_copy):
    """A checkpoint with a tokenizer of the words w0 to w96."""
    vocabulary = {f"w{i}": i for i in range(97)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(llama_copy / "tokenizer.json"))
    return llama_copy
